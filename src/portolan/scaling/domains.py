"""Macro loss as the mean of its domains' forecasts, beside the forecast of the macro itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.scaling.curve_model import Array
from portolan.scaling.curves import RungCurve, snap
from portolan.scaling.f2 import CurveForecast
from portolan.scaling.ladder import NUM_MARKS

MACRO_ENDING = "macro_loss"
DOMAIN_ENDING = "/loss"
SAME_MEAN = 1e-4
"""Largest gap in nats between a rung's macro loss and the mean of its domains."""


@dataclass(frozen=True)
class SummedMacro:
    """Final macro loss from its domains: median and sd, and whether the direct one disagrees."""

    domains: tuple[str, ...]
    median: float
    sd: float
    disagrees: bool


def sum_domains(
    forecasts: Mapping[str, CurveForecast], headline: str, rungs: Sequence[RungCurve]
) -> SummedMacro | None:
    """Mean of the domains, with their residuals' correlation over the rungs' evaluations.

    It disagrees when its median lies farther than one sd of the direct forecast from that one.
    None if the metrics at hand do not average to the macro loss.
    """
    prefix = headline.removesuffix(MACRO_ENDING)
    names = [n for n in forecasts if n.startswith(prefix) and n.endswith(DOMAIN_ENDING)]
    curves = [{name: snap(rung.points[name]) for name in (headline, *names)} for rung in rungs]
    if not names or not all(_is_mean(curve, headline, names) for curve in curves):
        return None
    sds = np.array([_sd(forecasts[name]) for name in names])
    correlation = _correlation(curves, names)
    median = float(np.mean([forecasts[name].quantile(0.5) for name in names]))
    direct = forecasts[headline]
    return SummedMacro(
        domains=tuple(names),
        median=median,
        sd=float(np.sqrt(sds @ correlation @ sds)) / len(names),
        disagrees=abs(median - direct.quantile(0.5)) > _sd(direct),
    )


def _is_mean(curve: Mapping[str, Mapping[int, float]], headline: str, names: Sequence[str]) -> bool:
    marks = [mark for mark in curve[headline] if all(mark in curve[name] for name in names)]
    gaps = [
        abs(curve[headline][mark] - np.mean([curve[name][mark] for name in names]))
        for mark in marks
    ]
    return bool(gaps) and bool(max(gaps) < SAME_MEAN)


def _sd(forecast: CurveForecast) -> float:
    return (forecast.quantile(0.975) - forecast.quantile(0.025)) / (2 * 1.959964)


def _correlation(
    curves: Sequence[Mapping[str, Mapping[int, float]]], names: Sequence[str]
) -> Array:
    """Correlation of second differences along the rungs' curves, 1 where there are too few."""
    rows = [
        [curve[n][k - 1] - 2 * curve[n][k] + curve[n][k + 1] for n in names]
        for curve in curves
        for k in range(2, NUM_MARKS)
        if all(m in curve[n] for n in names for m in (k - 1, k, k + 1))
    ]
    table = np.array(rows)
    if len(rows) <= len(names) or np.any(table.std(axis=0) == 0):
        return np.ones((len(names), len(names)))
    return np.atleast_2d(np.corrcoef(table, rowvar=False))
