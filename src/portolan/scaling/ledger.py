"""Forecasts of one target after a change: amended, kept side by side, each scored for its time.

A change voids the registered forecast from a step on; it keeps the score that it has earned. The
amended forecast adds what the change is expected to do, then what was measured since.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portolan.canonical import stringify_floats
from portolan.errors import UsageError
from portolan.scaling.curves import mark_label, points_from_completed
from portolan.scaling.interval import LEVEL_LABELS, NOISE
from portolan.scaling.ladder import evaluation_marks
from portolan.scaling.registration import (
    Applicability,
    applicability,
    expiry_after,
    failed_conditions,
    is_expired,
    known_before,
    validate_amendment,
)
from portolan.scaling.score import last_residual_persistence, score_run

NORMAL_95 = 1.959963984540054
CORRELATION_LENGTH = 0.5
"""Share of a run over which errors of a forecast stay alike: the correlation falls to 1/e."""
PROGRESS_SD = 0.02
"""Standard deviation per share of the run left, nats: shapes may differ across scales."""
PACKING_FIELD = "sequence_length"
UNDUAL_PACKING = "packing changed without evaluation at both packings"
LOSS_DIGITS = 6

Rows = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Effect:
    """Expected effect of a change on the loss: a normal prior on a level shift, nats."""

    name: str
    mean: float
    sd: float

    @classmethod
    def multiplier(
        cls,
        name: str,
        ratio: float,
        ratio_sd: float,
        *,
        loss: float,
        asymptote: float,
        exponent: float,
    ) -> "Effect":
        """Effect of a change worth `ratio` times the compute, under loss = E + A C^-alpha.

        shift = (loss - E) (ratio^-alpha - 1); its sd by the slope in the ratio.
        """  # fmt: skip
        if ratio <= 0 or loss <= asymptote:
            raise UsageError(
                f"a compute multiplier {ratio:g} at loss {loss:.4f} and asymptote "
                f"{asymptote:.4f} has no level shift",
                remedy="give a positive multiplier, or state the shift in nats",
            )
        excess = loss - asymptote
        slope = exponent * excess * ratio ** (-exponent - 1)
        return cls(name, excess * (ratio**-exponent - 1), slope * ratio_sd)

    def record(self) -> dict[str, Any]:
        """Entry of the amendment's method."""
        return {"name": self.name, "mean": self.mean, "sd": self.sd}


def total_effect(effects: Sequence[Effect]) -> Effect:
    """Sum of independent effects: means add, variances add."""
    return Effect(
        " + ".join(effect.name for effect in effects) or "none",
        math.fsum(effect.mean for effect in effects),
        math.sqrt(math.fsum(effect.sd**2 for effect in effects)),
    )


def shift_rows(rows: Mapping[str, Mapping[str, Any]], effect: Effect) -> Rows:
    """Quantiles by mark after an effect: moved by its mean, widened by its variance.

    Exact for normal quantiles; others keep their shape.
    """
    return {
        mark: _transformed(row, effect.mean, math.hypot(_sd(row), effect.sd) / _sd(row))
        for mark, row in rows.items()
    }


def _sd(row: Mapping[str, Any]) -> float:
    """Standard deviation of a normal with the row's 95 % interval."""
    return (float(row["0.975"]) - float(row["0.025"])) / (2 * NORMAL_95)


def _transformed(row: Mapping[str, Any], shift: float, scale: float) -> dict[str, float]:
    median = float(row["0.5"])
    return {label: median + shift + scale * (float(row[label]) - median) for label in LEVEL_LABELS}


def condition_rows(
    rows: Mapping[str, Mapping[str, Any]],
    evaluations: Sequence[tuple[float, float]],
    *,
    noise: float = NOISE,
) -> Rows:
    """Quantiles of the marks to come, given (fraction, loss) of evaluations already made.

    Errors of the forecast are a normal process along the run with the rows' own spread and
    correlation exp(-|f - f'| / 0.5); each evaluation adds independent noise. At progress f the
    spread at mark g stays at least sqrt(noise^2 + (0.02 (g - f))^2).
    """
    if not evaluations:
        return {mark: dict(_transformed(row, 0.0, 1.0)) for mark, row in rows.items()}
    marks = sorted(rows, key=float)
    grid = np.array([float(mark) for mark in marks])
    medians = np.array([float(rows[mark]["0.5"]) for mark in marks])
    spreads = np.array([_sd(rows[mark]) for mark in marks])
    seen = np.array([fraction for fraction, _ in evaluations])
    residuals = np.array([loss for _, loss in evaluations]) - np.interp(seen, grid, medians)
    seen_spread = np.interp(seen, grid, spreads)

    def covariance(a: np.ndarray, sd_a: np.ndarray, b: np.ndarray, sd_b: np.ndarray) -> np.ndarray:
        decay = np.exp(-np.abs(a[:, None] - b) / CORRELATION_LENGTH)
        return decay * sd_a[:, None] * sd_b

    seen_covariance = covariance(seen, seen_spread, seen, seen_spread)
    seen_covariance += noise**2 * np.eye(len(seen))
    cross = covariance(grid, spreads, seen, seen_spread)
    gain = np.linalg.solve(seen_covariance, cross.T).T
    shifts = gain @ residuals
    variances = spreads**2 - np.einsum("ij,ij->i", gain, cross)
    result = {}
    for i, mark in enumerate(marks):
        floor = math.hypot(noise, PROGRESS_SD * (grid[i] - seen[-1]))
        if grid[i] > seen[-1] + 1e-9:
            sd = max(math.sqrt(max(0.0, variances[i])), floor)
            result[mark] = _transformed(rows[mark], float(shifts[i]), sd / spreads[i])
    return result


@dataclass(frozen=True)
class Amendment:
    """What an amended forecast rests on.

    `evaluations` are all of the metric of record so far, by completed updates; those after
    `from_step` were made after the change.
    """

    from_step: int
    changes: tuple[str, ...]
    reason: str
    effects: tuple[Effect, ...]
    conditions: Sequence[Mapping[str, Any]]
    evaluations: Mapping[int, float]
    made_at: str
    steps: int | None = None
    delay: Mapping[str, Any] | None = None
    condition: bool = True


def amend_body(earlier: Mapping[str, Any], amendment: Amendment) -> dict[str, Any]:
    """Body of the forecast that supersedes `earlier`, for the evaluations still to come.

    Every loss metric takes the same shift; only the metric of record is conditioned on what was
    measured after the change, the others move with it.

    Raises:
        UsageError: nothing is left to forecast, or the amendment is not valid.
    """
    metric = earlier["metric"]["name"]
    steps = amendment.steps or int(earlier["target"]["steps"])
    seen = sorted(amendment.evaluations)
    after = {n: x for n, x in amendment.evaluations.items() if n > amendment.from_step}
    first = max([amendment.from_step, *seen]) + 1
    marks = [mark_label(k + 1) for k, n in enumerate(evaluation_marks(steps)) if n >= first]
    kept = {
        name: {mark: rows[mark] for mark in marks if mark in rows}
        for name, rows in earlier["quantiles"].items()
        if name.endswith("loss")
    }
    if not kept.get(metric):
        raise UsageError("no evaluation is left to forecast", remedy="score the run instead")
    effect = total_effect(amendment.effects)
    whole = shift_rows(earlier["quantiles"][metric], effect)
    points = points_from_completed(after, steps) if amendment.condition else ()
    first_mark = min(float(mark) for mark in whole)
    points = tuple((f, x) for f, x in points if f >= first_mark - 1e-9)
    noise = float(earlier["method"].get("parameters", {}).get("final_noise_nats", NOISE))
    conditioned = condition_rows(whole, points, noise=noise)
    quantiles = {}
    for name, rows in kept.items():
        moved = shift_rows(rows, effect)
        quantiles[name] = {
            mark: _rounded(_follow(moved[mark], whole[mark], conditioned[mark]))
            for mark in moved
            if mark in conditioned
        }
    body = copy.deepcopy(dict(earlier))
    final = quantiles[metric]["1.00"]
    body |= {
        "made_at": amendment.made_at,
        "title": _amended_title(earlier["title"]),
        "text": (
            f"{_amended_title(earlier['title'])}: median {final['0.5']:.4f} for {metric} at the "
            f"end, 95 % interval {final['0.025']:.4f} to {final['0.975']:.4f}"
        ),
        "target": dict(earlier["target"]) | _moved_target(earlier["target"], steps, marks),
        "quantiles": quantiles,
        "conditions": [dict(condition) for condition in amendment.conditions],
        "expiry": expiry_after(steps),
        "known_before": known_before(seen, first),
        "reason": amendment.reason,
        "changes": list(amendment.changes),
        "method": dict(earlier["method"]) | _amended_method(earlier, amendment, len(points)),
    }
    body = stringify_floats(body)
    validate_amendment(body, earlier)
    return body


def _amended_title(title: str) -> str:
    return title if title.endswith("(amended)") else f"{title} (amended)"


def _follow(
    row: Mapping[str, float], headline: Mapping[str, float], conditioned: Mapping[str, float]
) -> dict[str, float]:
    """A row moved and scaled as the metric of record was by what was measured."""
    scale = _sd(conditioned) / _sd(headline)
    return _transformed(row, conditioned["0.5"] - headline["0.5"], scale)


def _rounded(row: Mapping[str, float]) -> dict[str, float]:
    return {label: round(value, LOSS_DIGITS) for label, value in row.items()}


def _moved_target(target: Mapping[str, Any], steps: int, marks: Sequence[str]) -> dict[str, Any]:
    """Target fields that a new horizon changes; compute and tokens follow the updates."""
    planned = int(target["steps"])
    moved: dict[str, Any] = {"marks": list(marks)}
    if steps != planned:
        moved |= {
            "steps": steps,
            "tokens": int(target["tokens_per_step"]) * steps,
            "flops": round(int(target["flops"]) * steps / planned),
        }
    return moved


def _amended_method(
    earlier: Mapping[str, Any], amendment: Amendment, num_conditioned: int
) -> dict[str, Any]:
    total = total_effect(amendment.effects)
    method: dict[str, Any] = {
        "effects": [effect.record() for effect in amendment.effects],
        "total_effect": {"mean": total.mean, "sd": total.sd},
        "from_step": amendment.from_step,
        "evaluations_conditioned_on": num_conditioned,
        "correlation_length": CORRELATION_LENGTH,
    }
    if amendment.delay:
        method["delay"] = dict(amendment.delay)
    return method


# ---------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Regime:
    """The live conditions from a step on: `change` is the id of the change record, or a word.

    `dual_logged`: the registered metric was evaluated at the registered packing as well as at
    the new one.
    """

    from_step: int
    live: Mapping[str, Any]
    change: str = ""
    dual_logged: bool = True


@dataclass(frozen=True)
class Void:
    """From which step a forecast no longer counts, after which change, and why."""

    from_step: int
    change: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        """`void from step 120 (mixture), change:12ab...`."""
        named = f", {self.change}" if self.change else ""
        return f"void from step {self.from_step} ({', '.join(self.fields)}){named}"


def find_void(body: Mapping[str, Any], regimes: Sequence[Regime], start: int = 0) -> Void | None:
    """First regime at or after `start` under which a forecast does not hold, None if all agree.

    A forecast whose packing differs from the run's first one holds only with dual logging.
    """
    packing = regimes[0].live.get(PACKING_FIELD) if regimes else None
    for regime in regimes:
        step = max(regime.from_step, start)
        ended = [r.from_step for r in regimes if r.from_step > regime.from_step]
        if ended and min(ended) <= start:
            continue
        if failed := failed_conditions(body["conditions"], regime.live):
            return Void(step, regime.change, tuple(failed))
        if regime.live.get(PACKING_FIELD) != packing and not regime.dual_logged:
            return Void(step, regime.change, (UNDUAL_PACKING,))
    return None


@dataclass(frozen=True)
class Entry:
    """One forecast of the ledger with its score so far."""

    id: str
    body: Mapping[str, Any]
    start: int
    void: Void | None
    status: Mapping[int, Applicability]
    score: Mapping[str, Any]

    @property
    def final(self) -> Mapping[str, str]:
        """Quantiles of the final evaluation."""
        return self.body["quantiles"][self.body["metric"]["name"]]["1.00"]

    @property
    def word(self) -> str:
        """`in force`, `void from step ...`, or why nothing can be said."""
        if self.void:
            return str(self.void)
        return "unverified" if "unverified" in self.status.values() else "in force"


def build_ledger(
    forecasts: Sequence[tuple[str, Mapping[str, Any]]],
    regimes: Sequence[Regime],
    evaluations: Mapping[int, float],
) -> list[Entry]:
    """Every forecast of a target in order of time, each scored for as long as it applied.

    `evaluations` maps completed updates to the metric of record at its registered packing.
    """
    entries = []
    for identity, body in forecasts:
        start = int(body["known_before"]["completed"])
        start = max(start, int(body["method"].get("from_step", 0)))
        if not body.get("changes"):
            start = 0
        void = find_void(body, regimes, start)
        steps = int(body["target"]["steps"])
        own = {n: x for n, x in evaluations.items() if n > start or start == 0}
        status: dict[int, Applicability] = {n: _status(body, n, void, regimes) for n in own}
        points = points_from_completed(own, steps)
        by_fraction = dict(points)
        fractions = dict(zip(sorted(own), by_fraction, strict=True))
        gate: dict[str | float, Applicability] = {fractions[n]: w for n, w in status.items()}
        score = score_run(body, _within(by_fraction), status=gate)
        entries.append(Entry(identity, body, start, void, status, score))
    return entries


def _within(points: Mapping[float, float]) -> dict[str | float, float]:
    return {fraction: value for fraction, value in points.items() if fraction <= 1 + 1e-9}


def _status(
    body: Mapping[str, Any], completed: int, void: Void | None, regimes: Sequence[Regime]
) -> Applicability:
    """Gate of one evaluation: the regime in force when its last update was made."""
    if (void and completed > void.from_step) or is_expired(body["expiry"], completed):
        return "mismatch"
    live = [regime.live for regime in regimes if regime.from_step < completed]
    return applicability(body["conditions"], live[-1]) if live else "unverified"


def baselines(
    original: Mapping[str, Any], evaluations: Mapping[int, float]
) -> dict[str, float | None]:
    """Finals of B0, B1 and B2, to be printed beside every forecast; None where there is none."""
    baseline = original.get("baseline") or {}
    f0 = sorted((float(mark), float(value)) for mark, value in baseline.get("F0", {}).items())
    previous = baseline.get("B1")
    found: dict[str, float | None] = {
        "B0": f0[-1][1] if f0 else None,
        "B1": float(previous["value"]) if previous else None,
        "B2": None,
    }
    if f0:
        marks, values = zip(*f0, strict=True)
        steps = int(original["target"]["steps"])
        residuals = [
            loss - float(np.interp(fraction, marks, values))
            for fraction, loss in points_from_completed(evaluations, steps)
            if marks[0] - 1e-9 <= fraction <= 1
        ]
        if residuals:
            found["B2"] = last_residual_persistence(values[-1], residuals)
    return found
