"""Scores of a registered forecast: error, z, coverage, CRPS, WIS, baselines and bands.

Proper scores after Gneiting and Raftery (2007). A score counts only evaluations at which the
conditions of the registration held.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from portolan.errors import UsageError
from portolan.scaling.interval import LEVEL_LABELS, LEVELS
from portolan.scaling.registration import Applicability

Array = NDArray[np.float64]

WIS_ALPHAS = (0.5, 0.2, 0.05)
"""1 - level of the central intervals that enter the weighted interval score."""
COVERAGE_LEVELS = (0.5, 0.8, 0.95)
BLOCK_MARKS = 4
NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 0
PERSISTENCE_RESIDUALS = 3
NUM_QUADRATURE = 2000
VERDICTS = {"green": "clear", "normal": "clear", "amber": "watch", "red": "off course"}


def interval_score(low: float, high: float, alpha: float, outcome: float) -> float:
    """Width of a central (1 - alpha) interval plus 2 / alpha times the miss."""
    miss = max(low - outcome, 0.0) + max(outcome - high, 0.0)
    return high - low + 2 / alpha * miss


def weighted_interval_score(
    median: float, intervals: Mapping[float, tuple[float, float]], outcome: float
) -> float:
    """WIS of the median and of central intervals keyed by alpha."""
    total = 0.5 * abs(outcome - median)
    for alpha, (low, high) in intervals.items():
        total += alpha / 2 * interval_score(low, high, alpha, outcome)
    return total / (len(intervals) + 0.5)


def crps_normal(mean: float, sd: float, outcome: float) -> float:
    """Continuous ranked probability score of N(mean, sd^2)."""
    z = (outcome - mean) / sd
    bell = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return sd * (z * (2 * float(ndtr(z)) - 1) + 2 * bell - 1 / math.sqrt(math.pi))


def crps_samples(samples: Array, outcome: float) -> float:
    """CRPS of an empirical distribution: E|X - x| - E|X - X'| / 2."""
    ordered = np.sort(np.asarray(samples, dtype=float))
    count = len(ordered)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    spread = 2 * float(ranks @ ordered) / count**2
    return float(np.mean(np.abs(ordered - outcome))) - 0.5 * spread


def log_density_normal(mean: float, sd: float, outcome: float) -> float:
    """Log density of N(mean, sd^2) at the outcome."""
    return -0.5 * ((outcome - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)


class QuantileDistribution:
    """Distribution through the 13 registered quantiles.

    Linear between them, and beyond the outer ones, in standard normal scores: exact for a normal.
    """

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.values = np.asarray(quantiles, dtype=float)
        self._scores = ndtri(np.array(LEVELS))
        if np.any(np.diff(self.values) <= 0):
            raise UsageError(f"the quantiles {list(quantiles)} do not increase")

    def _segment(self, position: Array, grid: Array) -> NDArray[np.int64]:
        return np.clip(np.searchsorted(grid, position) - 1, 0, len(grid) - 2)

    def quantile(self, level: float | Array) -> Array:
        """Value below which an outcome falls with probability `level`."""
        score = ndtri(np.atleast_1d(np.asarray(level, dtype=float)))
        i = self._segment(score, self._scores)
        slope = np.diff(self.values)[i] / np.diff(self._scores)[i]
        return self.values[i] + slope * (score - self._scores[i])

    def score_z(self, outcome: float) -> float:
        """Standard normal score of an outcome: (outcome - mean) / sd for a normal."""
        i = self._segment(np.array([outcome]), self.values)[0]
        slope = (self._scores[i + 1] - self._scores[i]) / (self.values[i + 1] - self.values[i])
        return float(self._scores[i] + slope * (outcome - self.values[i]))

    def log_density(self, outcome: float) -> float:
        """Log density at the outcome."""
        i = self._segment(np.array([outcome]), self.values)[0]
        slope = (self._scores[i + 1] - self._scores[i]) / (self.values[i + 1] - self.values[i])
        return log_density_normal(0.0, 1.0, self.score_z(outcome)) + math.log(slope)

    def crps(self, outcome: float) -> float:
        """CRPS as twice the mean pinball loss over levels, by the midpoint rule."""
        levels = (np.arange(NUM_QUADRATURE) + 0.5) / NUM_QUADRATURE
        miss = outcome - self.quantile(levels)
        return float(2 * np.mean(np.maximum(levels * miss, (levels - 1) * miss)))

    def wis(self, outcome: float) -> float:
        """Weighted interval score of the registered median and intervals."""
        intervals = {alpha: self.interval(1 - alpha) for alpha in WIS_ALPHAS}
        return weighted_interval_score(float(self.quantile(0.5)[0]), intervals, outcome)

    def interval(self, level: float) -> tuple[float, float]:
        """Central interval of a level."""
        low, high = self.quantile(np.array([(1 - level) / 2, (1 + level) / 2]))
        return float(low), float(high)

    def inside(self, level: float, outcome: float) -> bool:
        """Whether the outcome lies in the central interval, its ends included."""
        low, high = self.interval(level)
        # Registered quantiles and outcomes are rounded decimals: an outcome on the edge is inside.
        slack = 1e-12 * max(1.0, abs(outcome))
        return low - slack <= outcome <= high + slack


def compute_equivalent(predicted: float, actual: float, asymptote: float, exponent: float) -> float:
    """Compute ratio that a law E + A C^-alpha would need to turn `predicted` into `actual`."""
    if min(predicted, actual) <= asymptote:
        raise UsageError(
            f"the asymptote {asymptote:.4g} is not below {predicted:.4g} and {actual:.4g}"
        )
    return ((predicted - asymptote) / (actual - asymptote)) ** (1 / exponent)


def last_residual_persistence(final_baseline: float, residuals: Sequence[float]) -> float:
    """B2: F0's final plus the mean of the last three residuals (evaluation - F0)."""
    if not residuals:
        raise UsageError("persistence needs at least one residual")
    return final_baseline + float(np.mean(residuals[-PERSISTENCE_RESIDUALS:]))


def band_names(
    distributions: Sequence[QuantileDistribution], outcomes: Sequence[float]
) -> list[str]:
    """Band of each evaluation in order of time.

    Red needs an evaluation outside 99 % directly after another one; a single outlier is amber.
    """
    bands, outside_before = [], False
    for distribution, outcome in zip(distributions, outcomes, strict=True):
        outside = not distribution.inside(0.99, outcome)
        if outside and outside_before:
            bands.append("red")
        elif not distribution.inside(0.9, outcome):
            bands.append("amber")
        else:
            bands.append("green" if distribution.inside(0.5, outcome) else "normal")
        outside_before = outside
    return bands


def coverage_interval(inside: Sequence[bool], level: float = 0.9) -> tuple[float, float]:
    """Bootstrap interval of a coverage, resampling blocks of four neighbouring marks."""
    hits = np.asarray(inside, dtype=float)
    length = min(BLOCK_MARKS, len(hits))
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    num_blocks = math.ceil(len(hits) / length)
    starts = generator.integers(0, len(hits) - length + 1, size=(NUM_RESAMPLES, num_blocks))
    index = (starts[:, :, None] + np.arange(length)).reshape(NUM_RESAMPLES, -1)[:, : len(hits)]
    low, high = np.quantile(hits[index].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def distribution_at(
    quantiles: Mapping[str, Mapping[str, str]], fraction: float
) -> QuantileDistribution:
    """Registered distribution at a fraction of the run; quantiles are linear between marks."""
    marks = sorted(quantiles, key=float)
    grid = [float(mark) for mark in marks]
    if not grid[0] - 1e-9 <= fraction <= grid[-1] + 1e-9:
        raise UsageError(
            f"no forecast was registered at fraction {fraction:.4f} of the run",
            remedy=f"score evaluations from {marks[0]} to {marks[-1]}",
        )
    rows = np.array([[float(quantiles[m][label]) for label in LEVEL_LABELS] for m in marks])
    return QuantileDistribution([float(np.interp(fraction, grid, col)) for col in rows.T])


def score_run(
    body: Mapping[str, Any],
    evaluations: Mapping[str | float, float],
    *,
    metric: str | None = None,
    status: Mapping[str | float, Applicability] | None = None,
) -> dict[str, Any]:
    """Score a registered forecast against the target's evaluations.

    Args:
        body: of the `forecast` record.
        evaluations: value of `metric` by mark ("0.05".."1.00") or fraction of the planned steps.
        metric: name; by default the registered metric of record.
        status: result of the applicability gate by the same keys; absent means `match`.

    Returns:
        Plain JSON: `marks` (one entry per evaluation), `final` (null until the last mark),
        `coverage`, `baselines`, counts, the last and the worst band, and `verdict`.
    """
    metric = metric or body["metric"]["name"]
    if metric not in body["quantiles"]:
        raise UsageError(f"the registration forecasts no {metric!r}")
    gate = _frozen_gate(status or {}, evaluations)
    values = sorted((float(key), float(value)) for key, value in evaluations.items())
    first = min(float(mark) for mark in body["quantiles"][metric])
    values = [(f, x) for f, x in values if f >= first - 1e-9]
    valid = [(f, x) for f, x in values if gate[f] == "match"]
    distributions = [distribution_at(body["quantiles"][metric], f) for f, _ in valid]
    bands = band_names(distributions, [x for _, x in valid])
    marks = [
        _score_mark(fraction, outcome, distribution, band)
        for (fraction, outcome), distribution, band in zip(valid, distributions, bands, strict=True)
    ]
    baseline = body.get("baseline") or {}
    if baseline.get("metric", metric) != metric:
        baseline = {}
    final = _score_final(marks, distributions, baseline)
    counts = {
        name: sum(gate[f] == name for f, _ in values)
        for name in ("match", "mismatch", "unverified")
    }
    order = list(VERDICTS)
    return {
        "metric": metric,
        "num_scored": counts["match"],
        "num_void": counts["mismatch"],
        "num_unverified": counts["unverified"],
        "marks": marks,
        "final": final,
        "coverage": _coverage(distributions, [x for _, x in valid]),
        "mean": _means(marks),
        "baselines": _score_baselines(valid, marks, final, baseline),
        "last_band": bands[-1] if bands else None,
        "worst_band": max(bands, key=order.index) if bands else None,
        "verdict": _verdict(bands, counts),
    }


def _frozen_gate(
    status: Mapping[str | float, Applicability], fractions: Iterable[str | float]
) -> dict[float, str]:
    """Gate by fraction; a forecast that was void once stays void."""
    given = {float(key): value for key, value in status.items()}
    void_from = min((f for f, value in given.items() if value == "mismatch"), default=math.inf)
    return {
        fraction: "mismatch" if fraction >= void_from else given.get(fraction, "match")
        for fraction in sorted(float(key) for key in fractions)
    }


def _verdict(bands: Sequence[str], counts: Mapping[str, int]) -> str:
    """Word for the last evaluation that counts; `void` or `unverified` when none does."""
    if counts["mismatch"]:
        return "void"
    if not bands:
        return "unverified" if counts["unverified"] else "not evaluated"
    return VERDICTS[bands[-1]]


def _score_mark(
    fraction: float, outcome: float, distribution: QuantileDistribution, band: str
) -> dict[str, Any]:
    median = float(distribution.quantile(0.5)[0])
    z = distribution.score_z(outcome)
    return {
        "mark": f"{fraction:.2f}"
        if abs(fraction * 20 - round(fraction * 20)) < 1e-9
        else repr(fraction),
        "outcome": outcome,
        "median": median,
        "error": median - outcome,
        "z": z,
        "pit": float(ndtr(z)),
        "crps": distribution.crps(outcome),
        "wis": distribution.wis(outcome),
        "inside_50": distribution.inside(0.5, outcome),
        "inside_80": distribution.inside(0.8, outcome),
        "inside_90": distribution.inside(0.9, outcome),
        "inside_95": distribution.inside(0.95, outcome),
        "inside_99": distribution.inside(0.99, outcome),
        "band": band,
        "side": "above" if outcome > median else "below",
    }


def _score_final(
    marks: Sequence[Mapping[str, Any]],
    distributions: Sequence[QuantileDistribution],
    baseline: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The last mark again, with the log score and the error in three other currencies."""
    if not marks or float(marks[-1]["mark"]) < 1 - 1e-9:
        return None
    final = dict(marks[-1])
    outcome, median = final["outcome"], final["median"]
    low, high = distributions[-1].interval(0.95)
    final |= {
        "log_score": -distributions[-1].log_density(outcome),
        "low_95": low,
        "high_95": high,
        "error_percent_of_loss": 100 * final["error"] / outcome,
    }
    asymptote, exponent = (float(baseline.get(key, "nan")) for key in ("E", "alpha"))
    if min(median, outcome) > asymptote and exponent > 0:
        final["error_percent_of_excess"] = 100 * final["error"] / (outcome - asymptote)
        final["compute_equivalent"] = compute_equivalent(median, outcome, asymptote, exponent)
    return final


def _coverage(
    distributions: Sequence[QuantileDistribution], outcomes: Sequence[float]
) -> dict[str, Any]:
    """Share of evaluations inside each interval, with its block-bootstrap 90 % range."""
    result = {}
    for level in COVERAGE_LEVELS if outcomes else ():
        inside = [d.inside(level, x) for d, x in zip(distributions, outcomes, strict=True)]
        low, high = coverage_interval(inside)
        result[repr(level)] = {"share": float(np.mean(inside)), "low": low, "high": high}
    return result


def _means(marks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean score over the marks that count."""
    if not marks:
        return {}
    result = {name: float(np.mean([mark[name] for mark in marks])) for name in ("crps", "wis")}
    return result | {"absolute_error": float(np.mean([abs(mark["error"]) for mark in marks]))}


def _score_baselines(
    valid: Sequence[tuple[float, float]],
    marks: Sequence[Mapping[str, Any]],
    final: Mapping[str, Any] | None,
    baseline: Mapping[str, Any],
) -> dict[str, Any]:
    """B0 (F0 at the mark), B1 (previous law), B2 (residuals so far); skill against their |error|.

    Skill is 1 - WIS / |error of the baseline|; for B2 its error halfway through the run counts.
    """
    if not baseline.get("F0") or not valid:
        return {}
    grid = sorted((float(mark), float(value)) for mark, value in baseline["F0"].items())
    fractions, f0 = zip(*grid, strict=True)
    predictions = [float(np.interp(fraction, fractions, f0)) for fraction, _ in valid]
    residuals = [x - p for (_, x), p in zip(valid, predictions, strict=True)]
    persistence = {
        marks[i]["mark"]: last_residual_persistence(f0[-1], residuals[: i + 1])
        for i in range(len(marks))
        if valid[i][0] < 1 - 1e-9
    }
    mean_error = float(np.mean(np.abs(residuals)))
    result: dict[str, Any] = {
        "B0": {
            "values": {m["mark"]: p for m, p in zip(marks, predictions, strict=True)},
            "mean_absolute_error": mean_error,
            "mean_skill": _skill(float(np.mean([m["wis"] for m in marks])), mean_error),
        },
        "B2": {"final_by_mark": persistence},
    }
    if final is not None:
        result["B0"]["final_error"] = predictions[-1] - final["outcome"]
        result["B0"]["final_skill"] = _skill(final["wis"], abs(predictions[-1] - final["outcome"]))
        halfway = [mark for mark in persistence if float(mark) <= 0.5 + 1e-9]
        if halfway:
            error = persistence[halfway[-1]] - final["outcome"]
            result["B2"] |= {
                "made_at": halfway[-1],
                "final_error": error,
                "final_skill": _skill(final["wis"], abs(error)),
            }
    if previous := baseline.get("B1"):
        result["B1"] = {"name": previous["name"], "final": float(previous["value"])}
        if final is not None:
            error = float(previous["value"]) - final["outcome"]
            result["B1"] |= {"final_error": error, "final_skill": _skill(final["wis"], abs(error))}
    return result


def _skill(score: float, baseline_score: float) -> float | None:
    return None if baseline_score == 0 else 1 - score / baseline_score
