"""The paper that charts are drawn on: data, axes, tooltips and the look they share.

A chart fills the width of its box, has no legend of its own (the page prints one in HTML, so that
it wraps on a phone) and names colours by `palette.colour`, so that the style sheet decides them.
Text from the project only ever enters as data, never inside an expression.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from portolan.report.palette import colour

if TYPE_CHECKING:
    import altair as alt

HEIGHT = 300
SMALL_HEIGHT = 230
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
LINE_FORMAT = ".4f"

Row = dict[str, Any]


def _significant(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def table(rows: Iterable[Row]) -> "alt.Data":
    """Rows as inline data, floats to six significant digits."""
    import altair as alt

    # A tuple, unlike a list, is not copied each time that a chart is extended.
    return alt.Data(values=tuple(_rounded(row) for row in rows))  # type: ignore[arg-type]


def _rounded(row: Row) -> Row:
    return {k: _significant(v) if isinstance(v, float) else v for k, v in row.items()}


def share_axis(
    field: str = "f", title: str = "share of the run completed", **options: Any
) -> "alt.X":
    """Horizontal axis from 0 to 100 % of a run."""
    import altair as alt

    axis = alt.Axis(format="%", tickCount=6, grid=False, title=title)
    return alt.X(f"{field}:Q", scale=alt.Scale(domain=[0, 1]), axis=axis, **options)


def value_axis(field: str, domain: tuple[float, float] | None = None, **options: Any) -> "alt.Y":
    """Vertical axis without a title; `scale` and `axis` options replace the defaults."""
    import altair as alt

    kind = {"zero": False, "nice": True} if domain is None else {"domain": list(domain)}
    scale = alt.Scale(**options.pop("scale", kind))
    axis = alt.Axis(title=None, **({"tickCount": 6} | options.pop("axis", {})))
    return alt.Y(f"{field}:Q", scale=scale, axis=axis, **options)


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high]; with fewer than three of them also steps between."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**d for d in decades if low <= 10.0**d <= high]
    if len(powers) >= 3:
        return powers
    steps = (1, 2, 5) if len(powers) == 2 else (1, 1.5, 2, 3, 5, 7)
    return [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]


def power_labels(ticks: Iterable[float]) -> str:
    """Axis expression that writes the given ticks as 10¹² or 5×10¹²."""
    cases = []
    for tick in ticks:
        mantissa, _, exponent = f"{tick:.1e}".partition("e")
        factor = "" if mantissa == "1.0" else f"{float(mantissa):g}×"
        label = f"{factor}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
        cases.append(f"abs(datum.value / {tick!r} - 1) < 0.01 ? '{label}'")
    return " : ".join([*cases, "''"])


def tips(**fields: str) -> list["alt.Tooltip"]:
    """Tooltip entries: name=`Title|format`, in order; no format means a nominal field."""
    import altair as alt

    entries = []
    for field, text in fields.items():
        title, _, number_format = text.partition("|")
        options: dict[str, Any] = {"type": "quantitative" if number_format else "nominal"}
        if number_format:
            options["format"] = number_format
        entries.append(alt.Tooltip(field=field, title=title, **options))
    return entries


def finish(chart: Any, unit: str, height: int = HEIGHT) -> Any:
    """Give a chart the size, the unit above its vertical axis and the look of the page."""
    import altair as alt

    title = alt.TitleParams(unit, anchor="start", frame="bounds", fontSize=12, offset=8,
                            fontWeight="normal", color=colour("ink-soft"), font=FONT)  # fmt: skip
    return (
        chart.properties(
            width="container",
            height=height,
            title=title,
            autosize={"type": "fit-x", "contains": "padding"},
        )
        .configure(
            background="transparent",
            font=FONT,
            padding={"left": 2, "right": 10, "top": 2, "bottom": 2},
        )
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=colour("ink-soft"),
            titleColor=colour("ink-soft"),
            domainColor=colour("line"),
            tickColor=colour("line"),
            gridColor=colour("grid"),
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
            labelLimit=150,
        )
        .configure_text(font=FONT, fontSize=12, color=colour("ink"))
    )
