"""Curves of a training run over its share: losses, routing, norms and learning rates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from portolan.report.canvas import Row, finish, log_ticks, share_axis, table, tips, value_axis
from portolan.report.facts import Run
from portolan.report.palette import colour, group_colour, ramp_colours

SMALL_HEIGHT = 230


class Line(NamedTuple):
    """One curve of a line chart: points (x, y), its name and its colour."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def lines(
    curves: Sequence[Line],
    unit: str,
    *,
    number_format: str = ".4g",
    log: bool = False,
    reference: tuple[float, str] | None = None,
    around: float | None = None,
    height: int = SMALL_HEIGHT,
) -> Any:
    """Curves over the share of the run, each point readable under the pointer; None without any.

    Args:
        curves: names must differ; on a logarithmic axis points at or below 0 are left out.
        unit: text above the vertical axis.
        reference: (value, name) of a dashed horizontal line.
        around: keep at least 1 % on both sides of this value in view, so that a constant curve
            is drawn as one and not as magnified rounding.
    """
    import altair as alt

    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    rows = [
        {"f": f, "value": value, "curve": curve.name}
        for curve in curves
        for f, value in curve.points
        if not log or value > 0
    ]
    options = _value_options(rows, log=log, around=around)
    scale = alt.Scale(
        domain=[curve.name for curve in curves], range=[curve.colour for curve in curves]
    )
    encoding = {
        "x": share_axis(),
        "y": value_axis("value", **options),
        "color": alt.Color("curve:N", scale=scale, legend=None),
    }
    tip = tips(curve="series", f="share of the run|.1%", value=f"value|{number_format}")
    hovered = alt.selection_point(on="pointerover", clear="pointerout", empty=False)
    base = alt.Chart(table(rows))
    dashes = alt.Scale(
        domain=[curve.name for curve in curves],
        range=[[5, 3] if curve.dashed else [1, 0] for curve in curves],
    )
    drawn = base.mark_line(strokeWidth=1.6).encode(
        **encoding, strokeDash=alt.StrokeDash("curve:N", scale=dashes, legend=None)
    )
    dots = base.mark_point(size=110, filled=True).encode(
        **encoding, tooltip=tip, opacity=alt.condition(hovered, alt.value(1), alt.value(0))
    )
    layers = [drawn, dots.add_params(hovered)]
    if reference:
        layers.insert(0, _reference(reference, options))
    return finish(alt.layer(*layers), unit, height)


def _value_options(rows: list[Row], *, log: bool, around: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if log:
        low = min(row["value"] for row in rows) / 1.1
        high = max(row["value"] for row in rows) * 1.1
        options = {
            "scale": {"type": "log", "domain": [low, high], "nice": False},
            "axis": {"format": "~g", "values": log_ticks(low, high)},
        }
    if around is not None:
        reach = max(0.01, *(abs(row["value"] - around) * 1.1 for row in rows))
        low = min(around - 0.01, min(row["value"] for row in rows) - 0.05 * reach)
        options |= {"domain": (low, around + reach)}
    return options


def _reference(reference: tuple[float, str], options: dict[str, Any]) -> Any:
    import altair as alt

    rows = [{"value": reference[0], "name": reference[1]}]
    rule = alt.Chart(table(rows)).mark_rule(color=colour("ink-soft"), strokeDash=[3, 3])
    return rule.encode(
        y=value_axis("value", **options), tooltip=tips(name="reference", value="value|.4g")
    )


def run_curve(run: Run, key: str, take: str = "mean") -> list[tuple[float, float]]:
    """Condensed metric of a run over its share: the mean, low or high of each bucket."""
    total = run.num_steps or run.completed or 1
    return [(b.completed / total, getattr(b, take)) for b in run.series.get(key, ())]


def layer_curves(run: Run, prefix: str, take: str, max_layers: int = 8) -> list[Line]:
    """One curve a layer; for deep models the lowest, median and highest layer instead."""
    keys = [key for key in run.series if key.startswith(prefix)]
    keys.sort(key=lambda key: (len(key), key))
    if len(keys) <= max_layers:
        shades = ramp_colours("layer", len(keys)) if keys else []
        return [
            Line(f"layer {key.removeprefix(prefix)}", shade, run_curve(run, key, take))
            for key, shade in zip(keys, shades, strict=True)
        ]
    columns: dict[float, list[float]] = {}
    for key in keys:
        for f, value in run_curve(run, key, take):
            columns.setdefault(f, []).append(value)
    ranks = {"lowest layer": 0.0, "median layer": 0.5, "highest layer": 1.0}
    return [
        Line(name, shade, [(f, _at_rank(values, rank)) for f, values in sorted(columns.items())])
        for (name, rank), shade in zip(ranks.items(), ramp_colours("layer", 3), strict=True)
    ]


def _at_rank(values: list[float], rank: float) -> float:
    return sorted(values)[round(rank * (len(values) - 1))]


def norm_curves(run: Run, kind: str, *, relative: bool = False) -> list[Line]:
    """Norm of each parameter group, absolute or as a multiple of its first logged value.

    Groups whose norm the optimizer holds are solid, free ones dashed.
    """
    curves = []
    for key in sorted(key for key in run.series if key.startswith(kind)):
        held, _, group = key.removeprefix("norm/").partition("/")[2].partition("/")
        points = run_curve(run, key)
        if relative:
            start = points[0][1] if points else 0.0
            points = [(f, value / start) for f, value in points] if start else []
        if group:
            curves.append(Line(group, group_colour(group), points, dashed=held == "free"))
    return curves
