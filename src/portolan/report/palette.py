"""Colours of the page: one table, read by the charts, the style sheet and the legends.

Charts never hold a colour themselves: they say `var(--name)` and the style sheet gives each name
its light and its dark value. So one chart serves both colour schemes and print. Hues follow the
colour-blind safe set of Okabe and Ito, darkened for white paper and lightened for dark screens.
"""

LIGHT: dict[str, str] = {
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "line": "#d5dbe1",
    "grid": "#e8ecf0",
    "ink": "#1b2430",
    "ink-soft": "#55606e",
    "link": "#0b5c99",
    "forecast": "#1769aa",
    "measured": "#c24a00",
    "good": "#00694f",
    "caution": "#8a5a00",
    "bad": "#a8282d",
    "series-1": "#1769aa",
    "series-2": "#c24a00",
    "series-3": "#00805f",
    "series-4": "#a8528f",
    "series-5": "#7a6a00",
    "series-6": "#3b97c9",
    "series-7": "#5b6470",
    "series-8": "#8a3324",
}

DARK: dict[str, str] = {
    "paper": "#11161c",
    "panel": "#19212a",
    "line": "#34404d",
    "grid": "#27313c",
    "ink": "#e6ebf0",
    "ink-soft": "#a3afbc",
    "link": "#7cc0f5",
    "forecast": "#6db5f0",
    "measured": "#ff9a55",
    "good": "#4cc9a0",
    "caution": "#e6b450",
    "bad": "#ff8a8a",
    "series-1": "#6db5f0",
    "series-2": "#ff9a55",
    "series-3": "#4cc9a0",
    "series-4": "#e09ccb",
    "series-5": "#d6c24a",
    "series-6": "#a5dcfa",
    "series-7": "#a3afbc",
    "series-8": "#e0846f",
}

NUM_SERIES = 8
NUM_RAMP = 8
"""Steps of the two ordered ramps: `rung-1..8` for widths, `layer-1..8` for depths."""

_RAMPS: dict[str, dict[str, tuple[str, ...]]] = {
    "light": {
        "rung": ("#8d9aa8", "#46525f"),
        "layer": ("#3d2c7d", "#1f6f9c", "#15806a", "#7d7412", "#b04a1a"),
    },
    "dark": {
        "rung": ("#677584", "#bcc8d4"),
        "layer": ("#a99bf0", "#62b6e6", "#4fc9a6", "#d8c652", "#ff9d6e"),
    },
}

GROUP_SERIES: dict[str, int] = {
    "experts": 1,
    "attention": 2,
    "shared experts": 3,
    "latent pair": 4,
    "output head": 5,
    "gated norms": 6,
    "router": 1,
    "embedding": 2,
    "attention gate": 3,
    "norm gains": 4,
    "short convolutions": 5,
    "other": 7,
}
"""Colour number of a parameter group, the same in every chart; free groups are dashed as well."""

BAND_OPACITY: dict[int, float] = {95: 0.13, 80: 0.2, 50: 0.3}
"""Opacity of the forecast band that holds this many per cent; the bands lie on each other."""


def _mix(first: str, second: str, share: float) -> str:
    pairs = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _ramp(anchors: tuple[str, ...]) -> list[str]:
    colours = []
    for step in range(NUM_RAMP):
        position = step / (NUM_RAMP - 1) * (len(anchors) - 1)
        left = min(int(position), len(anchors) - 2)
        colours.append(_mix(anchors[left], anchors[left + 1], position - left))
    return colours


def css_variables(scheme: str) -> dict[str, str]:
    """Every colour name of a scheme (`light` or `dark`) with its hexadecimal value."""
    values = dict(LIGHT if scheme == "light" else DARK)
    for name, anchors in _RAMPS[scheme].items():
        values |= {f"{name}-{i + 1}": colour for i, colour in enumerate(_ramp(anchors))}
    return values


def colour(name: str) -> str:
    """The CSS reference of a colour name."""
    if name not in _NAMES:
        raise KeyError(f"no colour named {name!r}")
    return f"var(--{name})"


def group_colour(group: str) -> str:
    """Colour of a parameter group."""
    return colour(f"series-{GROUP_SERIES.get(group, NUM_SERIES)}")


def ramp_colours(ramp: str, count: int) -> list[str]:
    """`count` ordered colours spread over a ramp (`rung` or `layer`)."""
    if count == 1:
        return [colour(f"{ramp}-{NUM_RAMP // 2}")]
    steps = (round(i * (NUM_RAMP - 1) / (count - 1)) for i in range(count))
    return [colour(f"{ramp}-{step + 1}") for step in steps]


_NAMES = frozenset(css_variables("light"))
