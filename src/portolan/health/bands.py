"""Bands from the rungs' normalised shapes: what a signal and its slope should be at a share of
the run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.health.curves import SHAPES, RunCurves, Series

GRID = (0.001, 0.003, 0.01, 0.03, *(k / 20 for k in range(1, 21)))
"""Shares of the run at which shapes are compared."""
SMOOTH_FRACTION = 0.01
"""Values within this share of the run around a grid point count; their median is taken."""
SLOPE_FRACTION = 0.02
MIN_SLOPE_SAMPLES = 5
MAX_SLOPE_FRACTION = 0.2
"""A slope needs 5 samples; a short run takes them from up to 20 % of it."""
RESIDUAL_SDS = 3
TREND_DOUBT = 0.5
"""Share of an extrapolated trend that is added to the half-width."""
MIN_TREND_RUNGS = 3
SLOPE_TOLERANCE = 0.5
"""Least half-width of a slope's band: d ln(signal) per whole run."""
PEAK_FROM = 0.03
"""A peak before this share is that of the warm-up."""
CONSECUTIVE = 2
"""Grid points in a row outside a band that make a finding; one alone is noise."""
MIN_UPDATES = 20
"""Updates that a run must have made before its shape says anything."""


def value_at(series: Series, steps: int, fraction: float) -> float | None:
    """Median of a signal around a share of the run, linear between rows where they are sparse.

    None outside the rows that exist.
    """
    if not len(series):
        return None
    place = fraction * steps
    done = series.rows + 1
    slack = 1 + 0.02 * steps
    if place < done[0] - slack or place > done[-1] + slack:
        return None
    near = np.abs(done - place) <= SMOOTH_FRACTION * steps
    if near.sum() >= 3 and fraction > 2 * SMOOTH_FRACTION:
        return float(np.median(series.values[near]))
    return float(np.interp(place, done, series.values))


def slope_at(series: Series, steps: int, fraction: float) -> tuple[float, float] | None:
    """d ln(signal) / d fraction over the last 2 % of the run before `fraction`, and its error.

    Sparse series take their last 5 samples, from at most 20 % of the run; None without them, or
    when a value is not positive.
    """
    done = (series.rows + 1) / steps
    end = int(np.searchsorted(done, fraction + 1e-9, side="right"))
    start = int(np.searchsorted(done, fraction - SLOPE_FRACTION))
    start = max(0, min(start, end - MIN_SLOPE_SAMPLES))
    x, y = done[start:end], series.values[start:end]
    if len(x) < MIN_SLOPE_SAMPLES or fraction - x[0] > MAX_SLOPE_FRACTION or np.any(y <= 0):
        return None
    centred, logs = x - x.mean(), np.log(y)
    slope = float(centred @ logs / (centred @ centred))
    residuals = logs - logs.mean() - slope * centred
    error = float(np.sqrt(residuals @ residuals / (len(x) - 2) / (centred @ centred)))
    return slope, error


@dataclass(frozen=True)
class Band:
    """Expected centre and half-width at a share of the run; `rungs` holds their own values."""

    fraction: float
    centre: float
    half_width: float
    rungs: tuple[tuple[str, float], ...]

    @property
    def low(self) -> float:
        """Lower edge."""
        return self.centre - self.half_width

    @property
    def high(self) -> float:
        """Upper edge."""
        return self.centre + self.half_width

    def holds(self, value: float) -> bool:
        """Whether a value lies inside, the edges included."""
        return self.low <= value <= self.high

    def nearest(self, value: float) -> tuple[str, float]:
        """Name and value of the rung that is closest."""
        return min(self.rungs, key=lambda item: abs(item[1] - value))


def build_band(
    fraction: float,
    values: Sequence[tuple[str, float, float]],
    log_flops: float,
    *,
    tolerance: float = 0.0,
    relative: bool = False,
    noise: float = 0.0,
) -> Band | None:
    """Band for a run of `log_flops` from (name, ln FLOPs, value) of rungs; None below two sizes.

    Centre: the median of the rungs; where three or more sizes all rise or all fall, the straight
    line in ln FLOPs through them, at the run's own compute. Half-width: the largest of the range
    over rungs, three residual standard deviations (which grow as the line is extended), three
    standard errors of the comparison itself (`noise`) and the tolerance; plus half of what the
    line rises beyond the largest rung. Two sizes cannot say whether a difference is a trend: then
    the centre stays, and the whole of what it would amount to widens the band.
    """
    sizes = sorted({x for _, x, _ in values})
    if len(sizes) < 2:
        return None
    x = np.array([item[1] for item in values])
    y = np.array([item[2] for item in values])
    means = np.array([y[x == size].mean() for size in sizes])
    changes = np.diff(means)
    centre, residuals, freedom, reach = float(np.median(y)), y - np.median(y), len(y) - 1, 1.0
    extrapolated = 0.0
    if len(sizes) >= MIN_TREND_RUNGS and (np.all(changes > 0) or np.all(changes < 0)):
        offset = x - x.mean()
        slope = float(offset @ y / (offset @ offset))
        centre = float(y.mean() + slope * (log_flops - x.mean()))
        residuals, freedom = y - y.mean() - slope * offset, len(y) - 2
        reach = float(np.sqrt(1 + 1 / len(y) + (log_flops - x.mean()) ** 2 / (offset @ offset)))
        extrapolated = TREND_DOUBT * abs(slope) * max(0.0, log_flops - sizes[-1])
    elif len(sizes) < MIN_TREND_RUNGS:
        slope = float(changes[0] / (sizes[1] - sizes[0]))
        extrapolated = abs(slope) * max(0.0, log_flops - sizes[-1])
    sd = float(np.sqrt((residuals**2).sum() / max(1, freedom))) * reach
    least = tolerance * abs(centre) if relative else tolerance
    half_width = max(float(np.ptp(y)), RESIDUAL_SDS * sd, least, RESIDUAL_SDS * noise)
    return Band(
        fraction,
        centre,
        half_width + extrapolated,
        tuple((name, value) for name, _, value in values),
    )


@dataclass(frozen=True)
class Comparison:
    """A signal of the run beside its band at one share of the run: `kind` is level or slope."""

    signal: str
    kind: str
    value: float
    band: Band

    @property
    def inside(self) -> bool:
        """Whether the rungs show such a value."""
        return self.band.holds(self.value)

    def words(self) -> str:
        """The comparison and the rung that is closest to it."""
        name, value = self.band.nearest(self.value)
        what = self.signal if self.kind == "level" else f"growth of the {self.signal}"
        return (
            f"{what} {self.value:.4g} at {self.band.fraction:.0%} of the run, the ladder gives "
            f"{self.band.low:.4g} to {self.band.high:.4g}; closest is {name} with {value:.4g}"
        )


def compare(
    target: RunCurves, rungs: Sequence[RunCurves], signal: str, kind: str = "level"
) -> list[Comparison]:
    """A signal, or its slope, beside the rungs at every grid point that the target has reached."""
    return list(_compare(target, rungs, signal, kind))


def _compare(
    target: RunCurves, rungs: Sequence[RunCurves], signal: str, kind: str
) -> Iterator[Comparison]:
    shape, own = SHAPES[signal], target.shape(signal)
    if own is None:
        return
    for fraction in GRID:
        if not MIN_UPDATES / target.steps <= fraction <= target.progress + 1e-9:
            continue
        measured = _measure(own, target.steps, fraction, kind)
        found = [
            (rung, at)
            for rung in rungs
            if fraction * rung.steps >= MIN_UPDATES
            and (series := rung.shape(signal)) is not None
            and (at := _measure(series, rung.steps, fraction, kind)) is not None
        ]
        if measured is None or not found:
            continue
        errors = [error for _, (_, error) in found]
        band = build_band(
            fraction,
            [(rung.label, rung.log_flops, value) for rung, (value, _) in found],
            target.log_flops,
            tolerance=shape.tolerance if kind == "level" else SLOPE_TOLERANCE,
            relative=shape.relative and kind == "level",
            noise=float(np.hypot(measured[1], np.sqrt(np.mean(np.square(errors))))),
        )
        if band is not None:
            yield Comparison(signal, kind, measured[0], band)


def _measure(series: Series, steps: int, fraction: float, kind: str) -> tuple[float, float] | None:
    """Level or slope with its standard error; a level is a median and taken as exact."""
    if kind == "slope":
        return slope_at(series, steps, fraction)
    value = value_at(series, steps, fraction)
    return None if value is None else (value, 0.0)


def lower_edge(
    target: RunCurves, rungs: Sequence[RunCurves], signal: str
) -> Callable[[float], float | None]:
    """Share of the run -> lower edge of the rungs' newest band up to there.

    Before their first band it is that one: the first updates of a long run are a share of it at
    which the rungs have hardly begun. None without any band.
    """
    edges = [(c.band.fraction, c.band.low) for c in compare(target, rungs, signal)]

    def edge(fraction: float) -> float | None:
        reached = [low for at, low in edges if at <= fraction + 1e-9]
        return reached[-1] if reached else (edges[0][1] if edges else None)

    return edge


def outside_in_a_row(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The first run of CONSECUTIVE neighbours outside their bands, else nothing."""
    run: list[Comparison] = []
    for item in comparisons:
        run = [] if item.inside else [*run, item]
        if len(run) >= CONSECUTIVE:
            return run
    return []


def peak(series: Series, steps: int) -> float | None:
    """Share of the run at which a signal is largest after the warm-up, None if it has no values."""
    points = [(f, value_at(series, steps, f)) for f in GRID if f >= PEAK_FROM]
    known = [(value, f) for f, value in points if value is not None]
    return max(known)[1] if known else None
