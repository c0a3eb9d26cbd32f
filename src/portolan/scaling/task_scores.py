"""Scores of backtests: relative error, CRPS, interval score, coverage; suites count once."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portolan.scaling.drifting_law import Array
from portolan.scaling.score import crps_samples, interval_score

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
EXTRAPOLATION_BINS = (1.0, 3.0, 6.0, 15.0, 60.0, float("inf"))


@dataclass(frozen=True)
class TaskScore:
    """One forecast of one task; losses are relative to the outcome, not in nats."""

    task: str
    suite: str
    method: str
    extrapolation: float
    error: float
    crps: float
    interval_score_90: float
    inside_80: bool
    low_90: float
    high_90: float

    @property
    def inside_90(self) -> bool:
        """Whether the 90 % interval holds the outcome."""
        return self.low_90 <= 1 <= self.high_90

    @property
    def width_90(self) -> float:
        """Width of the 90 % interval."""
        return self.high_90 - self.low_90


def score_samples(
    task: str, suite: str, method: str, extrapolation: float, samples: Array, outcome: float,
    point: float | None = None,
) -> TaskScore:  # fmt: skip
    """Score of a sample, or of equally spaced quantiles, of the predicted loss.

    `point` is the forecast that the error is taken of; by default the median.
    """
    relative = np.asarray(samples) / outcome
    low_90, low_80, median, high_80, high_90 = np.quantile(relative, (0.05, 0.1, 0.5, 0.9, 0.95))
    return TaskScore(
        task=task,
        suite=suite,
        method=method,
        extrapolation=extrapolation,
        error=float(median if point is None else point / outcome) - 1,
        crps=crps_samples(relative, 1.0),
        interval_score_90=interval_score(float(low_90), float(high_90), 0.1, 1.0),
        inside_80=bool(low_80 <= 1 <= high_80),
        low_90=float(low_90),
        high_90=float(high_90),
    )


def _over_suites(
    scores: Sequence[TaskScore],
    value: Callable[[TaskScore], float],
    within: Callable[[list[float]], Any] = np.mean,
) -> Array:
    """One number per suite, in order of the suites' names."""
    suites: dict[str, list[float]] = {}
    for score in scores:
        suites.setdefault(score.suite, []).append(float(value(score)))
    return np.array([within(suites[suite]) for suite in sorted(suites)])


def summary(scores: Sequence[TaskScore]) -> dict[str, float]:
    """Means over suites, in per cent: median |error|, mean error, CRPS, interval score, coverage.

    `width_90` is the median over suites of the suite's median width, `width_90_mean` the mean.
    """
    errors = _over_suites(scores, lambda s: abs(s.error), np.median)
    widths = _over_suites(scores, lambda s: s.width_90, np.median)
    values = {
        "error": errors.mean(),
        "bias": _over_suites(scores, lambda s: s.error).mean(),
        "crps": _over_suites(scores, lambda s: s.crps).mean(),
        "interval_score_90": _over_suites(scores, lambda s: s.interval_score_90).mean(),
        "coverage_80": _over_suites(scores, lambda s: s.inside_80).mean(),
        "coverage_90": _over_suites(scores, lambda s: s.inside_90).mean(),
        "width_90": float(np.median(widths)),
        "width_90_mean": widths.mean(),
    }
    percent = {name: 100 * float(value) for name, value in values.items()}
    return {"suites": len(errors), "tasks": len(scores)} | percent


def paired_ratio(
    scores: Sequence[TaskScore], others: Sequence[TaskScore]
) -> tuple[float, float, float]:
    """Ratio of mean CRPS over suites to that of another method, with a 90 % bootstrap interval.

    Only tasks that both methods forecast count; suites are resampled together.
    """
    common = {score.task for score in scores} & {score.task for score in others}
    first, second = (
        _over_suites([s for s in group if s.task in common], lambda s: s.crps)
        for group in (scores, others)
    )
    rng = np.random.Generator(np.random.Philox(BOOTSTRAP_SEED))
    picks = rng.integers(0, len(first), (NUM_RESAMPLES, len(first)))
    ratios = first[picks].mean(axis=1) / second[picks].mean(axis=1)
    low, high = np.quantile(ratios, (0.05, 0.95))
    return float(first.mean() / second.mean()), float(low), float(high)


def by_method(scores: Sequence[TaskScore], main: str) -> dict[str, list[TaskScore]]:
    """Scores per method; the main one also over the tasks that most baselines can forecast."""
    groups: dict[str, list[TaskScore]] = {main: []}
    for score in scores:
        groups.setdefault(score.method, []).append(score)
    others = [group for name, group in groups.items() if name != main]
    common = {score.task for score in max(others, key=len, default=[])}
    if 0 < len(common) < len(groups[main]):
        shared = [score for score in groups[main] if score.task in common]
        return {main: groups.pop(main), f"{main}, ladders": shared} | groups
    return groups


def by_extrapolation(scores: Sequence[TaskScore]) -> list[dict[str, Any]]:
    """Summaries per band of the extrapolation factor; empty bands are left out."""
    rows = []
    for low, high in itertools.pairwise(EXTRAPOLATION_BINS):
        # Anything below the first edge is an interpolation, counted in the first band.
        chosen = [
            s for s in scores if s.extrapolation < high and (s.extrapolation >= low or low == 1)
        ]
        if chosen:
            label = f"above {low:g} x" if np.isinf(high) else f"{low:g} to {high:g} x"
            rows.append({"band": label} | summary(chosen))
    return rows


def by_suite(scores: Sequence[TaskScore]) -> list[dict[str, Any]]:
    """Summaries per suite."""
    suites = sorted({score.suite for score in scores})
    return [{"suite": n} | summary([s for s in scores if s.suite == n]) for n in suites]
