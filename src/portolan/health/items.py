"""The checks behind the checklist: each takes the evidence and a window, and says what it found."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import ndtri

from portolan.health import bands
from portolan.health.curves import DRIFT_PREFIX, PARAMETER_PREFIX, Series
from portolan.health.rules import RULES, entropy_limit, evaluation_limit
from portolan.health.training import MIN_TREND_ROWS
from portolan.optim.schedule import HYPERBALL_TO_ADAM

if TYPE_CHECKING:
    from portolan.health.checklist import Evidence, Window

Verdict = Literal["pass", "fail", "not measured"]
Outcome = tuple[Verdict, str]

BLOCK_STEPS = 500
MIN_BLOCK_STEPS = 50
SHORT_RUN_BLOCKS = 10
"""A run below 10 x 500 steps compares tenths of itself, of at least 50 steps."""
SPREAD_RATIO = 2.0
LEVEL_FROM = 0.01
MAX_DRIFT = 1e-3
MAX_JUMP = 1.0
JUMPS_FROM = 0.03
"""Share of a rung's run from which its rows show their scatter: before, the loss falls fast."""
CLEAN_RUNS = 1000
NORMAL_MEDIAN = float(ndtri(0.75))
"""Median magnitude of a standard normal."""
BIAS_FROM = 0.03
SLOPE_MARKS = 3
SLOPE_STEP = 0.05
"""Rise of d ln(norm) / d fraction from mark to mark that counts as rising."""
CHECK_SHARE = 0.005
MIN_CHECK_ROWS = 10
THROUGHPUT_CHECKS = 3
BASELINE_CHECKS = 10
RATE_POINTS = 20
RATE_TOLERANCE = 1e-6
FREE_NORMS = ("embedding norm", "router norm", "head-gate norm")
GRADIENTS = (
    "gradient norm",
    "gradient of the head",
    "gradient of the router",
    "gradient of the head gate",
)


def _join(outcomes: Sequence[Outcome]) -> Outcome:
    """fail before not measured before pass; the reasons of the deciding parts."""
    for verdict in ("fail", "not measured", "pass"):
        reasons = [reason for found, reason in outcomes if found == verdict]
        if reasons:
            return verdict, "; ".join(dict.fromkeys(reasons))
    return "not measured", "nothing was looked at"


def _rows(evidence: "Evidence", window: "Window", key: str) -> Series | None:
    """Rows of a metric inside a window, None when there are none."""
    series = evidence.target.series.get(key)
    if series is None:
        return None
    steps = evidence.target.steps
    cut = series.between(window.start * steps, window.end * steps)
    return cut if len(cut) else None


def _in_window(found: Sequence[bands.Comparison], window: "Window") -> list[bands.Comparison]:
    inside = [c for c in found if window.start <= c.band.fraction <= window.end + 1e-9]
    # Over the whole run the present counts: what came back into its band is over.
    return inside[-bands.CONSECUTIVE :] if window.name == "all" else inside


def _shape(evidence: "Evidence", window: "Window", signal: str, kind: str) -> Outcome:
    """A signal or its growth against the rungs."""
    found = _in_window(bands.compare(evidence.target, evidence.rungs, signal, kind), window)
    noun = signal if kind == "level" else f"growth of the {signal}"
    if not found:
        return "not measured", f"{noun}: no rung to compare with here"
    if outside := bands.outside_in_a_row(found):
        return "fail", outside[-1].words()
    return "pass", f"{noun} as on the rungs"


def gradient(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 1: spread, level where registered, and growth at the gradient peak."""
    rows = _rows(evidence, window, "norm/gradient/global")
    if rows is None:
        return "not measured", "no gradient norm in this window"
    parts = [_gradient_spread(evidence, window, rows)]
    if (level := evidence.settings.limit(RULES["H07"], "gradient_norm_max")) is not None:
        parts.append(gradient_level(rows, evidence.target.steps, level))
    if window.name == "W2":
        measured = [_shape(evidence, window, name, "slope") for name in GRADIENTS]
        known = [outcome for outcome in measured if outcome[0] != "not measured"]
        parts += known or measured[:1]
    return _join(parts)


def gradient_level(rows: Series, steps: int, level: float) -> Outcome:
    """Gradient norm below a registered level once 1 % of the run is done."""
    late = rows.values[rows.rows + 1 >= LEVEL_FROM * steps]
    if not len(late):
        return "not measured", f"no row after {LEVEL_FROM:.0%} of the run"
    largest = float(np.max(late))
    verdict: Verdict = "pass" if largest < level else "fail"
    return verdict, f"largest gradient norm {largest:.3g}, level {level:g}"


def _gradient_spread(evidence: "Evidence", window: "Window", rows: Series) -> Outcome:
    steps = evidence.target.steps
    length = BLOCK_STEPS
    if steps < BLOCK_STEPS * SHORT_RUN_BLOCKS:
        length = max(MIN_BLOCK_STEPS, steps // SHORT_RUN_BLOCKS)
    spreads = [_detrended_sd(block) for block in _blocks(rows, length)][::-1]
    if window.name == "all":
        spreads = spreads[-3:]
    if len(spreads) < 2:
        return "not measured", f"fewer than {2 * length} consecutive rows of the gradient norm"
    ratio = max(b / a if a else math.inf for a, b in pairwise(spreads))
    text = f"spread of {length} detrended steps {ratio:.2f} x that of those before"
    return ("pass" if ratio <= SPREAD_RATIO else "fail"), text


def _blocks(rows: Series, length: int) -> Iterator[np.ndarray]:
    """Blocks of consecutive rows from the newest to the oldest; those with holes are left out."""
    for end in range(len(rows), 0, -length):
        if end < length:
            return
        span = rows.rows[end - length : end]
        if span[-1] - span[0] == length - 1:
            yield rows.values[end - length : end]


def _detrended_sd(values: np.ndarray) -> float:
    x = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(x @ values / (x @ x))
    return float(np.std(values - values.mean() - slope * x))


def constraints(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 2: norms of constrained leaves, and of their layers where those are logged."""
    target, worst, place, measured = evidence.target, 0.0, "", False
    for leaf in target.constrained:
        for key, series in target.series.items():
            own = key.removeprefix(PARAMETER_PREFIX)
            if not key.startswith(PARAMETER_PREFIX) or not (
                own == leaf or own.startswith(f"{leaf}/")
            ):
                continue
            rows = _rows(evidence, window, key)
            if rows is None or not series.values[0]:
                continue
            drift = float(np.max(np.abs(rows.values / series.values[0] - 1)))
            measured = True
            worst, place = max((worst, place), (drift, own))
        if (steps := _rows(evidence, window, DRIFT_PREFIX + leaf)) is not None:
            measured = True
            worst, place = max((worst, place), (float(np.max(steps.values)), leaf))
    if not measured:
        return "not measured", "no norm of a constrained leaf in this window"
    text = f"largest relative drift {worst:.1e} ({place})"
    return ("pass" if worst <= MAX_DRIFT else "fail"), text


def drops(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 3: the absolute limit, and the rungs' band."""
    series = evidence.target.shape("drop fraction")
    steps = evidence.target.steps
    rows = series.between(window.start * steps, window.end * steps) if series else None
    if rows is None or not len(rows):
        return "not measured", "no drop fraction in this window"
    parts = [drop_level(rows)]
    if evidence.rungs:
        parts.append(_shape(evidence, window, "drop fraction", "level"))
    return _join(parts)


def drop_level(rows: Series) -> Outcome:
    """At most the notify level once the first 100 steps are over."""
    limits = RULES["H10"].limits
    late = rows.values[rows.rows >= limits["from_row"]]
    if not len(late):
        return "not measured", f"no row after step {limits['from_row']:g}"
    largest = float(np.max(late))
    text = f"largest drop fraction {largest:.2%}"
    return ("pass" if largest <= limits["fraction"] else "fail"), text


def train_loss(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 4: rows above the trend, and jumps from one row to the next."""
    rows = _rows(evidence, window, "train/cross_entropy")
    if rows is None or len(rows) < 2:
        return "not measured", "no train loss in this window"
    if not np.all(np.isfinite(rows.values)):
        return "fail", "the train loss is not finite"
    limits, above = RULES["H06"].limits, _longest_above(rows.values)
    if above >= limits["consecutive"]:
        return "fail", f"{above} rows in a row above {limits['ratio']:g} x trend"
    jump, bound = float(np.max(_steps(rows), initial=0.0)), _jump_limit(evidence)
    verdict: Verdict = "pass" if jump <= bound else "fail"
    return verdict, f"largest jump of the train loss {jump:.2f} nats, limit {bound:.2f}"


def _steps(rows: Series) -> np.ndarray:
    """Differences of neighbouring rows."""
    return np.diff(rows.values)[np.diff(rows.rows) == 1]


def _jump_limit(evidence: "Evidence") -> float:
    """A nat, or what the scatter of the rungs' rows explains, whichever is larger.

    A row is the mean over one batch: where batches are small, rows scatter by a large part of a
    nat, and the more so the lower the loss. The scatter is a band over the rungs; the number of
    standard deviations is the largest that a rung shows, at least that which normal errors exceed
    in one run of CLEAN_RUNS.
    """
    scatter, largest = [], 0.0
    for rung in evidence.rungs:
        if (series := rung.series.get("train/cross_entropy")) is None:
            continue
        steps = _steps(series.between(JUMPS_FROM * rung.steps, rung.steps))
        sd = float(np.median(np.abs(steps))) / NORMAL_MEDIAN if len(steps) else 0.0
        if sd > 0:
            scatter.append((rung.label, rung.log_flops, sd))
            largest = max(largest, float(np.max(steps)) / sd)
    band = bands.build_band(1.0, scatter, evidence.target.log_flops)
    if band is None:
        return MAX_JUMP
    deviations = -float(ndtri(1 / (CLEAN_RUNS * evidence.target.steps)))
    return max(MAX_JUMP, band.high * max(largest, deviations))


def _longest_above(values: np.ndarray) -> int:
    """Most rows in a row above the ratio times the median of the rows before each."""
    import polars as pl

    limits = RULES["H06"].limits
    column = pl.Series(values)
    trend = column.rolling_median(int(limits["rows"]), min_samples=MIN_TREND_ROWS).shift(1)
    above = (column > limits["ratio"] * trend).fill_null(False).to_numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], above.astype(np.int8), [0]])))
    return int(np.max(edges[1::2] - edges[::2], initial=0))


def evaluations(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 5: each evaluation against the one before it in the same mixture segment."""
    steps, bound = evidence.target.steps, evaluation_limit(evidence.settings.evaluation_noise)
    marks = [n for n in sorted(evidence.evaluations) if n <= window.end * steps + 1e-9]
    pairs = [
        (before, after)
        for before, after in pairwise(marks)
        if after >= window.start * steps
        and not any(before < change <= after for change in evidence.mixture_changes)
    ]
    if not pairs:
        return "not measured", "fewer than two evaluations of one segment"
    rise, after = max((evidence.evaluations[b] - evidence.evaluations[a], b) for a, b in pairs)
    text = f"largest rise {rise:+.4f} nats at step {after}, noise gives {bound:.4f}"
    return ("pass" if rise <= bound else "fail"), text


def router_bias(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 6: growth of the largest bias against the rungs, once the warm-up is over."""
    found = bands.compare(evidence.target, evidence.rungs, "router bias", "slope")
    found = [c for c in _in_window(found, window) if c.band.fraction >= BIAS_FROM]
    if not found:
        return "not measured", "no growth of the router bias to compare here"
    if window.name == "W1":
        outside = [c for c in found if not c.inside]
    else:
        outside = bands.outside_in_a_row(found)
    if outside:
        return "fail", outside[-1].words()
    return "pass", "growth of the router bias as on the rungs"


def entropy(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 7: the absolute limit, or the rungs' lower edge where the ladder itself lies lower."""
    target, series = evidence.target, evidence.target.shape("routing entropy")
    if series is None:
        return "not measured", "no routing entropy is logged"
    limit = entropy_limit(target.num_experts)
    edge = bands.lower_edge(target, evidence.rungs, "routing entropy")
    found = [
        (value, limit if (low := edge(fraction)) is None else min(limit, low), fraction)
        for fraction in bands.GRID
        if window.start <= fraction <= min(window.end, target.progress) + 1e-9
        and fraction * target.steps >= bands.MIN_UPDATES
        and (value := bands.value_at(series, target.steps, fraction)) is not None
    ]
    if window.name == "all":
        found = found[-bands.CONSECUTIVE :]
    if not found:
        return "not measured", "no routing entropy in this window"
    for (_, _, _), (value, low, fraction) in _below_twice(found):
        return "fail", f"routing entropy {value:.4f} at {fraction:.0%}, limit {low:.4f}"
    value, low, _ = found[-1]
    return "pass", f"routing entropy {value:.4f}, limit {low:.4f}"


def _below_twice(
    found: Sequence[tuple[float, float, float]],
) -> Iterator[tuple[tuple[float, float, float], tuple[float, float, float]]]:
    for first, second in pairwise(found):
        if first[0] < first[1] and second[0] < second[1]:
            yield first, second


def free_norms(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 8: levels of embedding, router and head gate, and growth that does not itself grow."""
    logged = [name for name in FREE_NORMS if evidence.target.shape(name) is not None]
    outcomes = []
    for name in logged:
        outcomes += [_shape(evidence, window, name, "level"), _growth(evidence, window, name)]
    if outcomes and all(verdict == "pass" for verdict, _ in outcomes):
        return "pass", f"{', '.join(logged)} as on the rungs"
    return _join(outcomes)


def _growth(evidence: "Evidence", window: "Window", name: str) -> Outcome:
    """Fail when the slope rises over three marks up to the last one in the window."""
    target, series = evidence.target, evidence.target.shape(name)
    assert series is not None
    last = min(window.end, target.progress) + 1e-9
    marks = [f for f in bands.GRID if 0.05 <= f <= last][-SLOPE_MARKS - 1 :]
    slopes = [bands.slope_at(series, target.steps, f) for f in marks]
    known = [slope[0] for slope in slopes if slope is not None]
    if len(known) <= SLOPE_MARKS or marks[-1] < window.start:
        return "pass", "too early for a rise over three marks"
    rises = [b - a > SLOPE_STEP for a, b in pairwise(known)]
    if all(rises):
        return "fail", f"growth of the {name} rises: {', '.join(f'{s:.2f}' for s in known)}"
    return "pass", f"growth of the {name} does not rise"


def throughput(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 9: medians of consecutive checks against the level of the first ones."""
    series = evidence.target.series
    key = next((k for k in ("throughput/mfu", "throughput/tokens_per_second") if k in series), "")
    if not key:
        return "not measured", "no throughput is logged"
    steps = evidence.target.steps
    length = max(MIN_CHECK_ROWS, round(CHECK_SHARE * steps))
    every = series[key]
    # The first rows of a run contain compilation and empty caches.
    ends = range(2 * length, len(every) + 1, length)
    checks = [
        (int(every.rows[end - 1]) + 1, float(np.median(every.values[end - length : end])))
        for end in ends
    ]
    level = [value for _, value in checks[:BASELINE_CHECKS]]
    inside = [v for n, v in checks if window.start * steps <= n <= window.end * steps + 1e-9]
    if window.name == "all":
        inside = inside[-THROUGHPUT_CHECKS:]
    if len(inside) < THROUGHPUT_CHECKS:
        return "not measured", f"fewer than {THROUGHPUT_CHECKS} checks of {length} rows"
    bound = RULES["H13"].limits["share"] * float(np.median(level))
    low = 0
    for value in inside:
        low = low + 1 if value < bound else 0
        if low >= THROUGHPUT_CHECKS:
            return "fail", f"{key.removeprefix('throughput/')} {value:.4g}, bound {bound:.4g}"
    return "pass", f"{key.removeprefix('throughput/')} {inside[-1]:.4g}, bound {bound:.4g}"


def learning_rates(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 10: both logged rates against the formula at 20 rows of the window."""
    hyperball, adam = (_rows(evidence, window, f"rate/{n}") for n in ("hyperball", "adam"))
    if evidence.rates is None or hyperball is None or adam is None:
        return "not measured", "no learning rate or no formula for this window"
    picked = np.unique(np.linspace(0, len(hyperball) - 1, RATE_POINTS).round().astype(int))
    logged = dict(zip(adam.rows.tolist(), adam.values.tolist(), strict=True))
    worst, place = 0.0, 0
    for row, value in zip(hyperball.rows[picked].tolist(), hyperball.values[picked].tolist(),
                          strict=True):  # fmt: skip
        expected = evidence.rates(row)
        found = (value, logged.get(row, math.nan))
        errors = [abs(a - b) / b if b else abs(a) for a, b in zip(found, expected, strict=True)]
        if not evidence.capped and found[1]:
            errors.append(abs(found[0] / found[1] / HYPERBALL_TO_ADAM - 1))
        if any(math.isnan(error) for error in errors):
            return "not measured", f"one of the rates is missing at row {row}"
        worst, place = max((worst, place), (max(errors), row))
    text = f"largest relative difference {worst:.1e}, at row {place}"
    return ("pass" if worst <= RATE_TOLERANCE else "fail"), text


def configuration(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 11: digest of the resolved configuration."""
    if evidence.config is None or not all(evidence.config):
        return "not measured", "no registered configuration to compare with"
    registered, live = evidence.config
    if registered != live:
        return "fail", f"registered {registered[:12]}, running {live[:12]}"
    return "pass", f"digest {live[:12]}"


def projection(evidence: "Evidence", window: "Window") -> Outcome:
    """Item 12: the band of the newest evaluation that may be scored."""
    if evidence.void:
        return "not measured", evidence.void
    if not evidence.bands:
        return "not measured", "no evaluation with a registered band yet"
    fraction, band = evidence.bands[-1]
    reds = [f for f, name in evidence.bands if name == "red"]
    text = f"{band} at {fraction:.0%}"
    if reds:
        text += f"; red at {len(reds)} marks, first at {reds[0]:.0%}"
    return ("fail" if band in ("amber", "red") else "pass"), text
