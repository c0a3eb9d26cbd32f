"""The page of an ablation: effects with their intervals, costs, and what was reported elsewhere."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.files import write_bytes_atomic
from portolan.report.canvas import finish, table, tips
from portolan.report.figures import Figure, Key, Table
from portolan.report.palette import colour
from portolan.report.site import Section, render_template
from portolan.report.values import as_count, as_number, as_text
from portolan.report.words import MISSING, count, loss, percent, scientific, signed, size

FOLDER = "ablations"
PAGE = "ablation.html"
NOT_RESOLVED = "not resolved"
DIVERGED = "diverged"
ROW_PIXELS = 21
ORIGIN_NATS = 0.02
"""Half width of the linear middle of the axis of differences; beyond it is logarithmic."""
BUDGETS = {"tokens": "equal tokens", "flops": "equal training FLOPs"}
SCALE_REMINDER = (
    "The reported effects come from models with a million times the compute and more, another "
    "tokenizer and other text. They stand beside these numbers for comparison, not as a check."
)


@dataclass(frozen=True)
class Found:
    """A table that was read: sentences about the whole suite, and its widths."""

    facts: Mapping[str, Any]
    introduction: tuple[str, ...]

    @property
    def widths(self) -> list[Mapping[str, Any]]:
        """One entry a width."""
        return self.facts["widths"]

    @property
    def num_arms(self) -> int:
        """Arms of every width, the baseline apart."""
        return len(self.widths[0]["arms"])


def read_table(facts: Mapping[str, Any]) -> Found:
    """A table of `ablations/` with the sentences that explain its columns."""
    seeds, level = facts["seeds"], percent(as_number(facts["level"]), 0)
    arms = len(facts["widths"][0]["arms"])
    changes = ", ".join(f"{key} = {_setting(value)}" for key, value in facts["changes"].items())
    lines = [
        f"Recipe {facts['recipe_name']}" + (f" with {changes}." if changes else "."),
        f"{arms} arms against the recipe as it is, or against the arm that is named; seeds "
        f"{', '.join(map(str, seeds))}; held-out macro loss in nats per token; same initial draws "
        "and same order of data in every arm.",
        f"Difference: mean over seeds of arm minus reference. Paired: {level} Student t interval "
        "of the arm's own differences. Joint: interval from the pooled residual noise of arms and "
        f"seeds, {level} for all arms of a width together (Bonferroni). A difference counts as "
        f"resolved only when both leave out 0; otherwise it is {NOT_RESOLVED!r}.",
        f"Equal FLOPs: updates follow from FLOPs per token, convention "
        f"{facts['flops_convention']!r}; arms within {percent(as_number(facts['same_budget']), 0)} "
        "of the baseline keep its updates.",
        _law_line(facts["law"]),
        SCALE_REMINDER,
    ]
    return Found(facts, tuple(lines))


def _law_line(law: Mapping[str, Any] | None) -> str:
    if law is None:
        return (
            "Compute: not given, because a law needs baseline losses at two widths; name two "
            "widths or train the ladder."
        )
    asymptote, exponent = as_number(law["asymptote"]), as_number(law["exponent"])
    return (
        "Compute: what the reference needs for the arm's loss over what it had, by L = E + A C^-a "
        f"through the baselines of this project, E = {loss(asymptote)} (0.55 of the smallest), "
        f"a = {loss(exponent)}; its interval is that of the paired differences under this law."
    )


# ---------------------------------------------------------------- tables


def arms_table(found: Found) -> Table:
    """What every arm changes in the recipe."""
    rows = tuple(
        (row["arm"], row["change"], "; ".join(f"{k} = {_setting(v)}" for k, v in settings.items()))
        for row in found.widths[0]["arms"]
        for settings in [row["settings"]]
    )
    return Table("The arms", ("Arm", "Change", "Recipe keys"), rows, wraps=True)


def _setting(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def width_tables(found: Found, width: Mapping[str, Any]) -> tuple[Table, ...]:
    """Effects at both budgets, cost, and sweeps of the learning rate, of one width."""
    tables = (
        _effect_table(width, "tokens"),
        _effect_table(width, "flops"),
        _cost_table(found, width),
        _sweep_table(width),
    )
    return tuple(table for table in tables if table.rows)


def _effect_table(width: Mapping[str, Any], budget: str) -> Table:
    same = budget == "tokens"
    rows = []
    for row in width["arms"]:
        name = row["arm"] + (f" against {row['against']}" if row["against"] != "baseline" else "")
        effect = row.get(budget)
        if effect is None:
            cells = (f"as {row['same_as']}", MISSING, MISSING, MISSING)
        else:
            ends = (interval_text(effect.get("own")), interval_text(effect.get("joint")))
            cells = (finding(effect), *ends, _compute(effect))
        if same:
            rows.append((name, *cells, _reported(row)))
        else:
            rows.append((name, count(effect["steps"]) if effect else MISSING, *cells))
    columns = ("Difference", "Paired", "Joint", "Compute")
    columns = ("Arm", *columns, "Reported elsewhere") if same else ("Arm", "Updates", *columns)
    caption = f"Width {width['width']}, {BUDGETS[budget]}: loss against the baseline"
    return Table(caption, columns, tuple(rows), _effect_note(width, budget), wraps=same)


def _effect_note(width: Mapping[str, Any], budget: str) -> str:
    """The baseline, the noise, and what the tolerance of equal FLOPs is worth."""
    losses = ", ".join(loss(as_number(value)) for value in width["baseline"]["losses"].values())
    parts = [f"Baseline: {count(width['baseline']['steps'])} updates, losses {losses}."]
    if noise := width[f"noise_{budget}"]:
        parts.append(
            f"Noise of a run after arm and seed: {loss(as_number(noise['sd']))} nats "
            f"({noise['freedom']} degrees of freedom); joint over {width['num_distinct']} arms."
        )
    else:
        parts.append("Too few seeds for an interval.")
    if budget == "flops" and "same_budget_nats" in width:
        nats = loss(as_number(width["same_budget_nats"]))
        parts.append(f"By the law, the tolerance of equal FLOPs is worth at most {nats} nats.")
    return " ".join(parts)


def finding(effect: Mapping[str, Any]) -> str:
    """The difference when it is resolved, else the words that say why there is none."""
    if effect["diverged"]:
        return f"{DIVERGED} ({effect['diverged']} runs)"
    if "difference" not in effect:
        return MISSING
    return signed(as_number(effect["difference"])) if effect["resolved"] else NOT_RESOLVED


def interval_text(ends: Sequence[Any] | None) -> str:
    """`−0.0012 to +0.0034`, or a dash."""
    if ends is None:
        return MISSING
    return " to ".join(signed(as_number(end)) for end in ends)


def _compute(effect: Mapping[str, Any]) -> str:
    ratio = as_number(effect.get("compute"))
    if not effect.get("resolved") or ratio is None:
        return MISSING
    low, high = (as_number(end) for end in effect["compute_interval"])
    ends = ("0" if low is None else f"{low:.2f}", "∞" if high is None else f"{high:.2f}")
    return f"{ratio:.2f} ({ends[0]} to {ends[1]})"


def _reported(row: Mapping[str, Any]) -> str:
    text = as_text(row["reported"])
    where = ", ".join(part for part in (row["scale"], row["source"]) if part)
    return f"{text} ({where})" if where and where not in text else text


def _cost_table(found: Found, width: Mapping[str, Any]) -> Table:
    rows = [
        (
            row["arm"],
            count(as_count(row["total_params"])),
            count(as_count(row["active_params"])),
            scientific(as_number(row["flops_per_token"])),
            f"{as_number(row['flops_ratio']):.3f}",
            _whole(row["tokens_per_second"]),
            size(as_count(row["program_bytes"])),
            _times(row.get("speedup")),
            f"× {as_number(row['rate']):g}",
        )
        for row in ({"arm": "baseline"} | dict(width["baseline"]), *width["arms"])
    ]
    columns = ("Arm", "All parameters", "Active", "FLOPs/token", "Ratio", "Tokens/s", "Memory",
               "Speed-up in time", "Learning rate")  # fmt: skip
    note = (
        f"FLOPs: forward, convention {found.facts['flops_convention']!r}. Tokens/s: fastest "
        f"{percent(as_number(found.facts['fast_share']), 0)} of the updates; on a CPU with one "
        f"thread a run, other runs beside it on {found.facts['cores']} cores. Memory: arguments, "
        "results and temporaries of the larger program of a step. Speed-up in time: at equal "
        "tokens, of resolved arms; compute ratio times the ratio of tokens/s. Learning rate: "
        "multiple of the rate law."
    )
    return Table(f"Width {width['width']}: what each arm costs", columns, tuple(rows), note)


def _whole(value: Any) -> str:
    number = as_number(value)
    return MISSING if number is None else count(round(number))


def _times(value: Any) -> str:
    number = as_number(value)
    return MISSING if number is None else f"{number:.2f}"


def _sweep_table(width: Mapping[str, Any]) -> Table:
    """Final loss of the first seed by learning rate, of the arms that looked for theirs."""
    swept = {row["arm"]: row["sweep"] for row in width["arms"] if "sweep" in row}
    rates = sorted({rate for sweep in swept.values() for rate in sweep}, key=float)
    rows = tuple(
        (arm, *(_swept(sweep.get(rate)) for rate in rates)) for arm, sweep in swept.items()
    )
    columns = ("Arm", *(f"× {float(rate):g}" for rate in rates))
    note = "First seed, equal tokens. A sweep goes on until its best lies inside; all seeds use it."
    return Table(f"Width {width['width']}: loss by multiple of the rate law", columns, rows, note)


def _swept(value: Any) -> str:
    return DIVERGED if value == DIVERGED else loss(as_number(value))


# ---------------------------------------------------------------- figure and page


def effect_rows(width: Mapping[str, Any], budget: str) -> list[dict[str, Any]]:
    """One row an arm with a difference: its value and the ends of both intervals."""
    rows = []
    for row in width["arms"]:
        effect = row.get(budget, {})
        if "difference" not in effect:
            continue
        point: dict[str, Any] = {
            "arm": row["arm"],
            "difference": as_number(effect["difference"]),
            "state": "resolved" if effect["resolved"] else NOT_RESOLVED,
        }
        for name in ("own", "joint"):
            if effect[name] is not None:
                point[f"{name}_low"], point[f"{name}_high"] = map(as_number, effect[name])
        rows.append(point)
    return sorted(rows, key=lambda point: -point["difference"])


def _forest(rows: Sequence[dict[str, Any]]) -> Any:
    """Differences by arm with both intervals, largest loss on top."""
    import altair as alt

    if not rows:
        return None
    names = alt.Axis(grid=True, ticks=False, domain=False, labelLimit=170, labelPadding=6)
    y = alt.Y("arm:N", sort=[row["arm"] for row in rows], title=None, axis=names)
    scale = alt.Scale(type="symlog", constant=ORIGIN_NATS, nice=False, padding=8)
    ticks = [-1, -0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1]
    axis = alt.Axis(title="arm − baseline, nats per token", values=ticks, format="+.2~f")

    def x(field: str) -> Any:
        return alt.X(f"{field}:Q", scale=scale, axis=axis)

    shade = alt.condition(
        "datum.state == 'resolved'", alt.value(colour("measured")), alt.value(colour("ink-soft"))
    )
    layers = [alt.Chart(table([{"zero": 0.0}])).mark_rule(color=colour("ink")).encode(x=x("zero"))]
    for name, width, opacity in (("joint", 9, 0.3), ("own", 2, 1.0)):
        held = [row for row in rows if f"{name}_low" in row]
        if held:
            mark = alt.Chart(table(held)).mark_rule(strokeWidth=width, opacity=opacity)
            ends = {"x": x(f"{name}_low"), "x2": alt.X2(f"{name}_high:Q")}
            layers.append(mark.encode(y=y, color=shade, **ends))
    tip = tips(arm="arm", difference="difference|+.4f", state="finding",
               own_low="paired from|+.4f", own_high="paired to|+.4f",
               joint_low="joint from|+.4f", joint_high="joint to|+.4f")  # fmt: skip
    points = alt.Chart(table(rows)).mark_point(size=60, filled=True, opacity=1)
    layers.append(points.encode(y=y, x=x("difference"), color=shade, tooltip=tip))
    return finish(alt.layer(*layers), "", max(120, ROW_PIXELS * len(rows)))


def _figure(width: Mapping[str, Any], budget: str) -> Figure:
    chart = _forest(effect_rows(width, budget))
    keys = (
        Key("resolved", colour("measured"), "dot"),
        Key(NOT_RESOLVED, colour("ink-soft"), "dot"),
        Key("paired interval", colour("ink-soft"), "line"),
        Key("joint interval", colour("ink-soft"), "band", 0.3),
    )
    title = f"Width {width['width']}, {BUDGETS[budget]}"
    return Figure(
        f"effects-{budget}-{width['width']}",
        title,
        f"Right of 0 the arm is worse than the recipe. The axis is linear up to {ORIGIN_NATS} nats "
        "and logarithmic beyond.",
        f"{title}: difference of every arm with its intervals; the table below has the values.",
        chart,
        keys,
        wide=False,
    )


def sections(found: Found) -> Iterator[Section]:
    """One part of the page a width."""
    for width in found.widths:
        drawn = [_figure(width, budget) for budget in BUDGETS]
        yield Section(
            f"width-{width['width']}",
            f"Width {width['width']}",
            "",
            tuple(figure for figure in drawn if figure.chart is not None),
            width_tables(found, width),
        )


def _command(found: Found) -> str:
    """The command that makes the suite again."""
    widths = ",".join(str(width["width"]) for width in found.widths)
    parts = [f"portolan ablate --widths {widths} --seeds {len(found.facts['seeds'])}"]
    if not found.facts["all_arms"]:
        parts.append(f"--arms {','.join(row['arm'] for row in found.widths[0]['arms'])}")
    parts += [f"--set {key}={_setting(value)}" for key, value in found.facts["changes"].items()]
    return " ".join(parts)


def build_page(root: Path, path: Path) -> Path:
    """Write `site/ablation.html` from a table of the project and return its path.

    Raises:
        UsageError: the table does not exist.
    """
    if not path.is_file():
        raise UsageError(f"there is no table {path}", remedy="run `portolan ablate` first")
    found = read_table(json.loads(path.read_bytes()))
    parts = tuple(sections(found))
    page = render_template(
        "ablation.html",
        tuple(figure for part in parts for figure in part.figures),
        found=found,
        arms=arms_table(found),
        command=_command(found),
        sections=parts,
        digest=path.stem,
    )
    target = root / "site" / PAGE
    write_bytes_atomic(target, page.encode())
    return target
