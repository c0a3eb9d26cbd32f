"""F0: the public point forecaster (marin #8435): one power law across rungs at each mark.

Its known defects are kept and reported: it is not monotone, it has no interval, the curve shape
depends on scale through the exponent, and one tail constant serves all marks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.errors import UsageError
from portolan.scaling.curves import WidthCurve, mark_label
from portolan.scaling.ladder import NUM_MARKS

PUBLIC_ASYMPTOTE = 1.5
PUBLIC_TAIL_CONSTANT = 0.005
"""Nats added to the extrapolated line of a truncated rung."""
RELATIVE_ASYMPTOTE = 0.55
"""Asymptote over the best final rung loss, where no public asymptote exists."""
SENSITIVITY_ASYMPTOTES = (0.0, 0.5, 1.0, 1.2, 1.3, 1.4, 1.45, 1.5, 1.55, 1.6, 1.7, 1.8)
SENSITIVITY_TAILS = (0.0, 0.0032, 0.005, 0.01)


@dataclass(frozen=True)
class PowerLaw:
    """loss = asymptote + coefficient * flops ** -exponent.

    `rms` is the root of the sum of squared log residuals over (points - 2); 0 for two points.
    """

    coefficient: float
    exponent: float
    asymptote: float
    rms: float

    def __call__(self, flops: float) -> float:
        """Loss at a training compute."""
        return self.asymptote + self.coefficient * flops**-self.exponent


@dataclass(frozen=True)
class BaselineForecast:
    """F0 at every mark that all rungs have, with the range over leave-one-rung-out fits."""

    marks: tuple[int, ...]
    laws: tuple[PowerLaw, ...]
    values: tuple[float, ...]
    ranges: tuple[tuple[float, float] | None, ...]
    warnings: tuple[str, ...]

    def at(self, fraction: float) -> float | None:
        """Forecast between marks, linear in the fraction; None before the first mark."""
        grid = [mark / NUM_MARKS for mark in self.marks]
        if not grid[0] <= fraction <= grid[-1]:
            return None
        return float(np.interp(fraction, grid, self.values))


def fit_power_law(
    flops: Sequence[float], losses: Sequence[float], asymptote: float = PUBLIC_ASYMPTOTE
) -> PowerLaw:
    """Unweighted least squares of ln(loss - asymptote) on ln(flops)."""
    excess = np.asarray(losses, dtype=float) - asymptote
    if len(excess) < 2 or not np.all(excess > 0):
        raise UsageError(
            f"the asymptote {asymptote:.4g} is not below every one of the losses {list(losses)}",
            remedy="lower the asymptote, and give at least two rungs",
        )
    x, y = np.log(np.asarray(flops, dtype=float)), np.log(excess)
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    intercept = float(y.mean() - slope * x.mean())
    squares = float(((y - intercept - slope * x) ** 2).sum())
    freedom = len(x) - 2
    rms = float(np.sqrt(squares / freedom)) if freedom else 0.0
    return PowerLaw(float(np.exp(intercept)), -slope, asymptote, rms)


def forecast_baseline(
    curves: Sequence[WidthCurve],
    target_flops: float,
    *,
    asymptote: float = PUBLIC_ASYMPTOTE,
    tail_constant: float = PUBLIC_TAIL_CONSTANT,
    flops_of: Callable[[WidthCurve], float] = lambda curve: curve.flops,
) -> BaselineForecast:
    """F0 on the axis `flops_of`; the compute at a mark is that fraction of the plan's."""
    marks = [k for k in range(1, NUM_MARKS + 1) if all(curve.has(k) for curve in curves)]
    laws, values, ranges, warnings = [], [], [], []
    for mark in marks:
        fraction = mark / NUM_MARKS
        flops = [flops_of(curve) * fraction for curve in curves]
        losses = [curve.value(mark, tail_constant) for curve in curves]
        law = fit_power_law(flops, losses, asymptote)
        laws.append(law)
        values.append(law(target_flops * fraction))
        ranges.append(_leave_one_out(flops, losses, asymptote, target_flops * fraction))
        if len(values) > 1 and values[-1] > values[-2]:
            warnings.append(
                f"F0 rises at mark {mark_label(mark)}: {values[-2]:.4f} to {values[-1]:.4f}"
            )
    return BaselineForecast(
        tuple(marks), tuple(laws), tuple(values), tuple(ranges), tuple(warnings)
    )


def sensitivity_table(
    curves: Sequence[WidthCurve],
    target_flops: float,
    *,
    asymptotes: Sequence[float] = SENSITIVITY_ASYMPTOTES,
    tail_constants: Sequence[float] = SENSITIVITY_TAILS,
) -> list[tuple[str, PowerLaw, float]]:
    """(what was changed, final law, final forecast) for other asymptotes and tail constants."""
    rows = []
    for asymptote in asymptotes:
        found = forecast_baseline(curves, target_flops, asymptote=asymptote)
        rows.append((f"E = {asymptote:g}", found.laws[-1], found.values[-1]))
    for constant in tail_constants:
        found = forecast_baseline(curves, target_flops, tail_constant=constant)
        rows.append((f"tail constant {constant:g}", found.laws[-1], found.values[-1]))
    return rows


def _leave_one_out(
    flops: list[float], losses: list[float], asymptote: float, target_flops: float
) -> tuple[float, float] | None:
    """Range of the forecasts that leave out one rung; None below three rungs."""
    if len(flops) < 3:
        return None
    forecasts = []
    for left_out in range(len(flops)):
        kept = [i for i in range(len(flops)) if i != left_out]
        law = fit_power_law([flops[i] for i in kept], [losses[i] for i in kept], asymptote)
        forecasts.append(law(target_flops))
    return min(forecasts), max(forecasts)
