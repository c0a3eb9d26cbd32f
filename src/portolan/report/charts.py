"""Charts of the forecast, the ladder and the domains: functions from facts to Altair charts.

Each returns None when it has nothing to draw.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from portolan.report.canvas import (
    LINE_FORMAT,
    Row,
    finish,
    log_ticks,
    power_labels,
    share_axis,
    table,
    tips,
    value_axis,
)
from portolan.report.facts import LEVELS, Forecast, Run
from portolan.report.palette import BAND_OPACITY, colour, ramp_colours

# ---------------------------------------------------------------- forecast


def fractions(run: Run, key: str) -> list[tuple[float, float]]:
    """Evaluations of a run as (share of the run, value)."""
    total = run.num_steps or max((e.completed for e in run.evaluations.get(key, ())), default=1)
    return [(completed / total, value) for completed, value in run.evaluations.get(key, ())]


def forecast_rows(forecast: Forecast) -> list[Row]:
    """One row a mark with the median and the ends of the intervals, where they exist."""
    rows = []
    for mark in sorted(forecast.quantiles.get(forecast.metric, {})):
        row: Row = {"f": mark, "median": forecast.median(mark)}
        for level in LEVELS:
            if interval := forecast.interval(level, mark):
                row[f"low{level}"], row[f"high{level}"] = interval
        if row["median"] is not None:
            rows.append(row)
    return rows


def interval_strip(forecast: Forecast, measured: float | None) -> Any:
    """The final forecast as nested bars on one axis, with the measured value as a diamond."""
    import altair as alt

    layers, ends = [], []
    scale = alt.Scale(zero=False, nice=True, padding=14)
    axis = alt.Axis(title="held-out loss at the end of the run, nats per token", tickCount=6)
    for level in sorted(LEVELS, reverse=True):
        if interval := forecast.interval(level):
            ends += interval
            rows = [{"low": interval[0], "high": interval[1], "level": f"{level} % interval"}]
            layers.append(
                alt.Chart(table(rows))
                .mark_bar(height=34, color=colour("forecast"), opacity=BAND_OPACITY[level])
                .encode(
                    x=alt.X("low:Q", scale=scale, axis=axis),
                    x2=alt.X2("high:Q"),
                    tooltip=tips(
                        level="forecast", low=f"from|{LINE_FORMAT}", high=f"to|{LINE_FORMAT}"
                    ),
                )
            )
    median = table([{"value": forecast.median()}])
    layers.append(
        alt.Chart(median)
        .mark_tick(size=34, thickness=3, color=colour("forecast"), opacity=1)
        .encode(
            x=alt.X("value:Q", scale=scale, axis=axis),
            tooltip=tips(value=f"forecast median|{LINE_FORMAT}"),
        )
    )
    if measured is not None:
        layers.append(
            alt.Chart(table([{"value": measured}]))
            .mark_point(
                shape="diamond",
                size=190,
                filled=True,
                color=colour("measured"),
                opacity=1,
                stroke=colour("paper"),
                strokeWidth=1.5,
            )
            .encode(
                x=alt.X("value:Q", scale=scale, axis=axis),
                tooltip=tips(value=f"measured|{LINE_FORMAT}"),
            )
        )
    return finish(alt.layer(*layers), "", height=56)


def _bands(rows: list[Row], domain: tuple[float, float] | None) -> list[Any]:
    import altair as alt

    layers = []
    for level in sorted(LEVELS, reverse=True):
        held = [row for row in rows if f"low{level}" in row]
        if held:
            layers.append(
                alt.Chart(table(held))
                .mark_area(color=colour("forecast"), opacity=BAND_OPACITY[level], clip=True)
                .encode(
                    x=share_axis(), y=value_axis(f"low{level}", domain), y2=alt.Y2(f"high{level}:Q")
                )
            )
    return layers


def _band_tip(rows: list[Row]) -> list[Any]:
    fields = {"f": "share of the run|.0%", "median": f"forecast median|{LINE_FORMAT}"}
    for level in LEVELS:
        if any(f"low{level}" in row for row in rows):
            fields |= {f"low{level}": f"{level} % from|{LINE_FORMAT}",
                       f"high{level}": f"{level} % to|{LINE_FORMAT}"}  # fmt: skip
    return tips(**fields)


def forecast_band(
    forecast: Forecast | None, target: Run | None, rungs: Sequence[Run], key: str
) -> Any:
    """Forecast band, measured curve of the target and the rungs beside it; None without data."""
    import altair as alt

    rows = forecast_rows(forecast) if forecast else []
    layers = _bands(rows, None)
    colours = ramp_colours("rung", len(rungs)) if rungs else []
    for run, shade in zip(rungs, colours, strict=True):
        curve = [{"f": f, "value": v, "run": run.label} for f, v in fractions(run, key)]
        if curve:
            tip = tips(run="rung", f="share of its run|.0%", value=f"loss|{LINE_FORMAT}")
            layers.append(
                alt.Chart(table(curve))
                .mark_line(
                    color=shade,
                    strokeWidth=1.3,
                    opacity=0.8,
                    point={"size": 14, "color": shade, "filled": True},
                )
                .encode(x=share_axis(), y=value_axis("value"), tooltip=tip)
            )
    if rows:
        layers.append(
            alt.Chart(table(rows))
            .mark_line(
                color=colour("forecast"),
                strokeWidth=2,
                strokeDash=[6, 3],
                point={"size": 40, "opacity": 0},
            )
            .encode(x=share_axis(), y=value_axis("median"), tooltip=_band_tip(rows))
        )
    curve = [{"f": f, "value": v} for f, v in fractions(target, key)] if target else []
    if curve:
        layers.append(_measured(curve, "value", f"measured loss|{LINE_FORMAT}"))
    return finish(alt.layer(*layers), "held-out loss, nats per token", 380) if layers else None


def _measured(
    rows: list[Row], field: str, title: str, domain: tuple[float, float] | None = None
) -> Any:
    import altair as alt

    point = {"size": 42, "filled": True, "color": colour("measured"), "opacity": 1}
    tip = tips(f="share of the run|.0%", **{field: title})
    return (
        alt.Chart(table(rows))
        .mark_line(color=colour("measured"), strokeWidth=2.2, point=point)
        .encode(x=share_axis(), y=value_axis(field, domain), tooltip=tip)
    )


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Straight line between neighbouring points (sorted by x); None outside them."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 - 1e-9 <= x <= x1 + 1e-9:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def residual_rows(forecast: Forecast, target: Run, key: str) -> list[Row]:
    """Measured minus forecast median at the share of the run of each evaluation."""
    medians = [(row["f"], row["median"]) for row in forecast_rows(forecast)]
    rows = []
    for f, value in fractions(target, key):
        if (median := interpolate(medians, f)) is not None:
            rows.append({"f": f, "residual": value - median, "measured": value, "median": median})
    return rows


def residuals(forecast: Forecast, target: Run, key: str) -> Any:
    """Measured minus forecast with the intervals around zero; None without evaluations."""
    import altair as alt

    measured = residual_rows(forecast, target, key)
    if not measured:
        return None
    rows = []
    for row in forecast_rows(forecast):
        ends = {k: v - row["median"] for k, v in row.items() if k.startswith(("low", "high"))}
        rows.append({"f": row["f"], **ends})
    zero = alt.Chart(table([{"zero": 0.0}])).mark_rule(color=colour("forecast"), strokeDash=[6, 3])
    layers = [
        *_bands(rows, None),
        zero.encode(y=value_axis("zero")),
        _measured(measured, "residual", "measured - forecast|+.4f"),
    ]
    return finish(alt.layer(*layers), "measured minus forecast median, nats per token", 240)


# ---------------------------------------------------------------- ladder and domains


def ladder_rows(rungs: Sequence[Run], key: str) -> list[Row]:
    """Finished rungs with compute and final loss."""
    rows = []
    for run in rungs:
        if run.flops and (loss := run.final(key)) is not None:
            rows.append({"flops": run.flops, "loss": loss, "run": run.label})
    return rows


def _law_rows(forecast: Forecast, lowest: float, highest: float) -> list[Row]:
    if not forecast.law:
        return []
    steps = [math.log10(lowest) + i / 59 * math.log10(highest / lowest) for i in range(60)]
    return [{"flops": 10**s, "loss": forecast.law.at(10**s)} for s in steps]


def ladder_fit(
    rungs: Sequence[Run], forecast: Forecast | None, target: Run | None, key: str
) -> Any:
    """Final loss against compute: rungs, fitted law, forecast, measured; None below two sizes."""
    import altair as alt

    points = ladder_rows(rungs, key)
    if len({row["flops"] for row in points}) < 2:
        return None
    at = (forecast.target_flops if forecast else None) or (target.flops if target else None)
    top = max([row["flops"] for row in points] + [at or 0])
    low = min(row["flops"] for row in points)
    scale = alt.Scale(type="log", domain=[low / 1.8, top * 1.8], nice=False)
    ticks = log_ticks(low / 1.8, top * 1.8)
    axis = alt.Axis(
        title="training compute, FLOPs (log scale)",
        values=ticks,
        labelExpr=power_labels(ticks),
        grid=False,
        labelOverlap="greedy",
        labelFontSize=13,
    )
    x = alt.X("flops:Q", scale=scale, axis=axis)
    layers = []
    if forecast and (curve := _law_rows(forecast, low / 1.5, top * 1.5)):
        layers.append(
            alt.Chart(table(curve))
            .mark_line(color=colour("forecast"), strokeWidth=1.6, strokeDash=[6, 3])
            .encode(x=x, y=value_axis("loss"))
        )
    if forecast and at:
        layers += _intervals_at(forecast, at, x)
    tip = tips(run="rung", flops="compute, FLOPs|.3e", loss=f"final loss|{LINE_FORMAT}")
    base = alt.Chart(table(points)).encode(x=x, y=value_axis("loss"), tooltip=tip)
    layers.append(base.mark_point(size=70, filled=True, color=colour("rung-6"), opacity=0.95))
    labels = {row["flops"]: row for row in points if "seed" not in row["run"]}.values()
    layers.append(
        alt.Chart(table(labels))
        .mark_text(align="left", dx=9, dy=-7)
        .encode(x=x, y=value_axis("loss"), text=alt.Text("run:N"))
    )
    if target and target.flops and (loss := target.final(key)) is not None:
        rows = [{"flops": at or target.flops, "loss": loss, "run": target.label}]
        tip = tips(run="target", flops="compute, FLOPs|.3e", loss=f"measured loss|{LINE_FORMAT}")
        layers.append(
            alt.Chart(table(rows))
            .mark_point(
                shape="diamond",
                size=170,
                filled=True,
                color=colour("measured"),
                opacity=1,
                stroke=colour("paper"),
                strokeWidth=1.5,
            )
            .encode(x=x, y=value_axis("loss"), tooltip=tip)
        )
    return finish(alt.layer(*layers), "held-out loss at the end of the run, nats per token", 340)


def _intervals_at(forecast: Forecast, flops: float, x: Any) -> list[Any]:
    import altair as alt

    layers = []
    for level, width in ((95, 5), (80, 9), (50, 14)):
        if interval := forecast.interval(level):
            rows = [
                {"flops": flops, "low": interval[0], "high": interval[1], "level": f"{level} %"}
            ]
            tip = tips(
                level="forecast interval", low=f"from|{LINE_FORMAT}", high=f"to|{LINE_FORMAT}"
            )
            layers.append(
                alt.Chart(table(rows))
                .mark_rule(
                    strokeWidth=width, color=colour("forecast"), opacity=BAND_OPACITY[level] + 0.1
                )
                .encode(x=x, y=value_axis("low"), y2=alt.Y2("high:Q"), tooltip=tip)
            )
    return layers


def domain_dots(
    rows: Sequence[Row], num_rungs: int, unit: str, number_format: str = LINE_FORMAT
) -> Any:
    """Final value by domain. Rows: domain, value, run, order (rung index or -1 for the target),
    and optionally low, high (95 % interval of the forecast of the target)."""
    import altair as alt

    if not rows:
        return None
    order = _domain_order(rows)
    names = alt.Axis(grid=True, ticks=False, domain=False, labelLimit=140, labelPadding=6)
    y = alt.Y("domain:N", sort=order, title=None, axis=names)
    axis = alt.Axis(title=None, tickCount=5, grid=False)
    x = alt.X("value:Q", scale=alt.Scale(zero=False, nice=True, padding=8), axis=axis)
    tip = tips(domain="domain", run="run", value=f"value|{number_format}")
    layers = []
    if held := [row for row in rows if "low" in row]:
        layers.append(
            alt.Chart(table(held))
            .mark_rule(strokeWidth=7, color=colour("forecast"), opacity=0.3)
            .encode(y=y, x=alt.X("low:Q", scale=x["scale"], axis=axis), x2=alt.X2("high:Q"))
        )
    for index, shade in enumerate(ramp_colours("rung", num_rungs) if num_rungs else []):
        dots = [row for row in rows if row["order"] == index]
        if dots:
            mark = alt.Chart(table(dots)).mark_point(size=46, filled=True, color=shade, opacity=0.9)
            layers.append(mark.encode(y=y, x=x, tooltip=tip))
    if dots := [row for row in rows if row["order"] == -1]:
        mark = alt.Chart(table(dots)).mark_point(
            shape="diamond", size=120, filled=True, color=colour("measured"), opacity=1
        )
        layers.append(mark.encode(y=y, x=x, tooltip=tip))
    return finish(alt.layer(*layers), unit, max(120, 28 * len(order)))


def _domain_order(rows: Sequence[Row]) -> list[str]:
    """Domains by the value of the last run that has them, highest first."""
    last = {row["domain"]: row["value"] for row in sorted(rows, key=lambda row: -row["order"])}
    for row in rows:
        if row["order"] == -1:
            last[row["domain"]] = row["value"]
    return sorted(last, key=lambda name: (-last[name], name))
