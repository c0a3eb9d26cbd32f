"""Backtests within a ladder: each rung forecast from the smaller ones, with the same code.

A few correlated tests, all at short range: they bound the error from below.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from portolan.scaling.curves import RungCurve, TargetPlan, by_width, mark_label
from portolan.scaling.forecast import AsymptoteName, MethodName, MetricForecast, forecast_ladder
from portolan.scaling.ladder import NUM_MARKS

LATE_FROM = 0.5
EARLY_BELOW = 0.25


def backtest(
    rungs: Sequence[RungCurve],
    *,
    asymptote: AsymptoteName = "relative",
    metric: str | None = None,
    method: MethodName = "F2",
) -> list[dict[str, Any]]:
    """One dict per pair of (smaller rungs, larger rung), at all marks.

    From three widths on, a rung is also forecast from fewer of the smaller ones, down to two.
    Outcome, error and interval are those of its last mark; `late` and `early` hold the root mean
    square error and the share inside the 95 % interval from 50 % on and below 25 %.
    """
    widths = sorted({rung.width for rung in rungs})
    results = []
    for position in range(2, len(widths)):
        held_out = [rung for rung in rungs if rung.width == widths[position]]
        for used in range(2, position + 1):
            smaller = [rung for rung in rungs if rung.width in widths[:used]]
            forecast = forecast_ladder(
                smaller,
                _as_target(held_out[0]),
                method=method,
                asymptote=asymptote,
                metrics=None if metric is None else [metric],
                min_rungs=2,
            )
            actual = by_width(held_out, forecast.headline)[0]
            headline = forecast.metrics[forecast.headline]
            entry = {"width": widths[position], "from_widths": widths[:used]}
            results.append(entry | _compare(forecast.headline, headline, dict(actual.values)))
    return results


def _compare(name: str, forecast: MetricForecast, actual: dict[int, float]) -> dict[str, Any]:
    last = max(actual)
    low, high = forecast.quantile(0.025, last), forecast.quantile(0.975, last)
    baseline = dict(zip(forecast.baseline_marks, forecast.baseline, strict=True))
    return {
        "metric": name,
        "mark": mark_label(last),
        "median": forecast.quantile(0.5, last),
        "low_95": low,
        "high_95": high,
        "baseline": baseline.get(last),
        "outcome": actual[last],
        "error": forecast.quantile(0.5, last) - actual[last],
        "inside_95": low <= actual[last] <= high,
        "late": _part(forecast, actual, LATE_FROM, 2.0),
        "early": _part(forecast, actual, 0.0, EARLY_BELOW),
    }


def _part(
    forecast: MetricForecast, actual: dict[int, float], start: float, end: float
) -> dict[str, float] | None:
    """Errors at the marks of a part of the run; None if there are none."""
    marks = [k for k in forecast.marks if k in actual and start <= k / NUM_MARKS < end]
    if not marks:
        return None
    errors = np.array([forecast.quantile(0.5, k) - actual[k] for k in marks])
    inside = [
        forecast.quantile(0.025, k) <= actual[k] <= forecast.quantile(0.975, k) for k in marks
    ]
    return {"rms": float(np.sqrt((errors**2).mean())), "inside_95": float(np.mean(inside))}


def _as_target(rung: RungCurve) -> TargetPlan:
    return TargetPlan(
        run_id=rung.run_id,
        width=rung.width,
        steps=rung.steps,
        tokens=0,
        tokens_per_step=0,
        sequence_length=0,
        flops=rung.flops,
        family=rung.family,
        tokens_per_active_param=rung.tokens_per_active_param,
        lr_capped=rung.lr_capped,
        beta2_guard=rung.beta2_guard,
    )
