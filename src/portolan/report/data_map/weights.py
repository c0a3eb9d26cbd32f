"""The mixture page: weights by cell and phase, epochs against the cap, differences."""

from collections.abc import Mapping, Sequence
from typing import Any

from portolan.report.canvas import finish, log_ticks, power_labels, table, tips
from portolan.report.data_map.facts import Overview
from portolan.report.data_map.overview import compact
from portolan.report.figures import Figure, Key, Table
from portolan.report.palette import colour
from portolan.report.words import MISSING, count, percent, plural

Mixture = Mapping[str, Any]


def page_data(mixtures: Sequence[Mixture], overview: Overview) -> dict[str, Any]:
    """What the script of the page reads: the mixture files and the labels of the domains."""
    labels = {
        domain.name: domain.label
        if domain.label == domain.name
        else f"{domain.name} {domain.label}"
        for domain in overview.domains
    }
    return {"mixtures": mixtures, "labels": labels, "grid": overview.num_buckets > 1}


def epochs_of(mixture: Mixture) -> dict[str, float]:
    """Times each cell is read over all phases."""
    lattice = mixture["lattice"]
    return {
        cell: sum(phase["budget_tokens"] * phase["counts"][cell] for phase in mixture["phases"])
        / (lattice * tokens)
        for cell, tokens in mixture["cells"].items()
        if tokens
    }


def lead(mixtures: Sequence[Mixture]) -> str:
    """One sentence on the first mixture."""
    if not mixtures:
        return "This project has no mixture file and no corpus that one could be planned for."
    mixture = mixtures[0]
    epochs = epochs_of(mixture)
    most = max(epochs, key=lambda cell: epochs[cell])
    return (
        f"{mixture['name']}: {plural(len(mixture['cells']), 'cell')} in "
        f"{plural(len(mixture['phases']), 'phase')}. The most repeated is {most}, read "
        f"{epochs[most]:.2f} times; the cap is {mixture['cap_epochs']:g}."
    )


def phase_table(mixtures: Sequence[Mixture]) -> Table:
    """Phases of every mixture."""
    rows = []
    for mixture in mixtures:
        budget = sum(phase["budget_tokens"] for phase in mixture["phases"])
        rows += [
            (
                mixture["name"],
                phase["name"],
                count(phase["start_step"]),
                compact(phase["budget_tokens"]),
                percent(phase["budget_tokens"] / budget) if budget else MISSING,
                count(sum(1 for number in phase["counts"].values() if number)),
            )
            for phase in mixture["phases"]
        ]
    columns = ("Mixture", "Phase", "First step", "Tokens", "Share of all", "Cells read")
    return Table("Phases", columns, tuple(rows))


def epochs_figure(mixtures: Sequence[Mixture]) -> Figure | None:
    """Epochs of each cell of the first mixture against its tokens, with the cap."""
    import altair as alt

    if not mixtures:
        return None
    mixture = mixtures[0]
    epochs, cap = epochs_of(mixture), mixture["cap_epochs"]
    rows = [
        {"cell": cell, "tokens": mixture["cells"][cell], "epochs": value}
        for cell, value in epochs.items()
    ]
    if not rows:
        return None
    low, high = min(row["tokens"] for row in rows), max(row["tokens"] for row in rows)
    ticks = log_ticks(low / 2, high * 2)
    axis = alt.Axis(title="tokens of the cell (log scale)", values=ticks,
                    labelExpr=power_labels(ticks), grid=False)  # fmt: skip
    scale = alt.Scale(type="log", domain=[low / 1.6, high * 1.6], nice=False)
    y = alt.Y("epochs:Q", axis=alt.Axis(title=None, tickCount=6), scale=alt.Scale(zero=True))
    points = (
        alt.Chart(table(rows))
        .mark_point(size=60, filled=True, color=colour("forecast"), opacity=0.85)
        .encode(
            x=alt.X("tokens:Q", scale=scale, axis=axis),
            y=y,
            tooltip=tips(cell="cell", tokens="tokens|.4~s", epochs="epochs|.3f"),
        )
    )
    limit = (
        alt.Chart(table([{"epochs": cap}]))
        .mark_rule(color=colour("bad"), strokeDash=[6, 3])
        .encode(y=y)
    )
    return Figure(
        "epochs-by-cell",
        f"Epochs of each cell in {mixture['name']}",
        "A point is a cell. Small cells reach the cap first.",
        f"Epochs of {len(rows)} cells between {min(epochs.values()):.2f} and "
        f"{max(epochs.values()):.2f}; the cap is {cap:g}.",
        finish(alt.layer(points, limit), "epochs over all phases", 320),
        (Key("cell", colour("forecast"), "dot"), Key(f"cap of {cap:g}", colour("bad"), "dash")),
    )
