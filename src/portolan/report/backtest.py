"""The page of a backtest: errors and intervals of every task, and scores beside the baselines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portolan.files import write_bytes_atomic
from portolan.report.canvas import finish, table, tips
from portolan.report.figures import Figure, Key, Table
from portolan.report.palette import colour
from portolan.report.site import Section, render_template
from portolan.report.words import MISSING, plural
from portolan.scaling.task_scores import (
    TaskScore,
    by_extrapolation,
    by_method,
    by_suite,
    paired_ratio,
    summary,
)

COLUMNS = {
    "error": "|error| %",
    "bias": "bias %",
    "crps": "CRPS %",
    "interval_score_90": "IS 90 %",
    "coverage_80": "inside 80 %",
    "coverage_90": "inside 90 %",
    "width_90": "width %",
}
WHOLE = ("coverage_80", "coverage_90")
INTRODUCTION = (
    "Each task is a ladder of finished runs and one larger run. A forecast sees the ladder only; "
    "what is learnt across ladders is learnt without the suite of the task.",
    "Suites differ in size, so every suite counts once: |error| is the mean over suites of the "
    "suite's median; bias, CRPS, interval score and coverage are means over suites of the suite's "
    "mean; width is the median over suites of the suite's median width of the 90 % interval.",
)


def build_page(path: Path, scores: Sequence[TaskScore], method: str) -> None:
    """Write one self-contained HTML file; the same scores give the same bytes.

    Args:
        method: the forecaster that the figures show; the others are its baselines.
    """
    write_bytes_atomic(path, render(scores, method).encode())


def render(scores: Sequence[TaskScore], method: str) -> str:
    """The HTML of the page."""
    ours = [score for score in scores if score.method == method]
    methods = list(dict.fromkeys(score.method for score in scores))
    sections = (
        Section("methods", "Methods", "", (), (methods_table(scores, method),)),
        Section("tasks", "Every task", "", (interval_figure(ours),), ()),
        Section(
            "extrapolation",
            "By extrapolation",
            "",
            (),
            tuple(_bands(name, [s for s in scores if s.method == name]) for name in methods),
        ),
        Section("suites", "By suite", "", (), (_suites(scores, methods, method),)),
    )
    drawn = [figure for part in sections for figure in part.figures]
    return render_template(
        "backtest.html",
        drawn,
        sections=sections,
        introduction=INTRODUCTION,
        status=f"{plural(len(ours), 'task')}, "
        f"{plural(len({score.suite for score in ours}), 'suite')}, method {method}",
    )


def _cells(values: dict[str, Any]) -> list[str]:
    return [f"{values[name]:.0f}" if name in WHOLE else f"{values[name]:.2f}" for name in COLUMNS]


def methods_table(scores: Sequence[TaskScore], method: str) -> Table:
    """One row a method, over the tasks that it can forecast, with the paired CRPS ratio."""
    ours = [score for score in scores if score.method == method]
    rows = []
    for name, group in by_method(scores, method).items():
        values = summary(group)
        ratio = MISSING
        if not name.startswith(method):
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(ours, group))
        rows.append((name, f"{values['tasks']}", f"{values['suites']}", *_cells(values), ratio))
    columns = ("method", "tasks", "suites", *COLUMNS.values(), f"CRPS {method} / this")
    note = (
        "IS 90 is the interval score of the 90 % interval. The ratio is over common tasks, with a "
        "90 % bootstrap interval over suites. Baselines need three rungs of one ladder, and F0 a "
        "loss above its asymptote of 1.5."
    )
    return Table("Scores over suites", columns, tuple(rows), note)


def _bands(name: str, scores: Sequence[TaskScore]) -> Table:
    rows = [
        (row["band"], f"{row['tasks']}", f"{row['suites']}", *_cells(row))
        for row in by_extrapolation(scores)
    ]
    columns = ("x of the target over the largest rung", "tasks", "suites", *COLUMNS.values())
    return Table(name, columns, tuple(rows))


def _suites(scores: Sequence[TaskScore], methods: Sequence[str], method: str) -> Table:
    found = {
        name: {row["suite"]: row for row in by_suite([s for s in scores if s.method == name])}
        for name in methods
    }
    others = [name for name in methods if name != method]
    rows = []
    for suite, values in found[method].items():
        cells = [f"{values['tasks']}", *_cells(values)]
        for name in others:
            other = found[name].get(suite)
            cells.append(MISSING if other is None else f"{other['crps']:.2f}")
        rows.append((suite, *cells))
    columns = ("suite", "tasks", *COLUMNS.values(), *(f"CRPS {name}" for name in others))
    return Table(f"Suites, {method}", columns, tuple(rows))


def interval_figure(scores: Sequence[TaskScore]) -> Figure:
    """Error and 90 % interval of every task against the extrapolation."""
    rows = [
        {
            "task": score.task,
            "suite": score.suite,
            "x": score.extrapolation,
            "error": 100 * score.error,
            "low": 100 * (score.low_90 - 1),
            "high": 100 * (score.high_90 - 1),
            "inside": score.inside_90,
        }
        for score in sorted(scores, key=lambda score: (score.extrapolation, score.task))
    ]
    missed = sum(not row["inside"] for row in rows)
    cells = tuple(
        (
            row["task"], row["suite"], f"{row['x']:.1f}", f"{row['error']:+.2f}",
            f"{row['low']:+.2f}", f"{row['high']:+.2f}", "yes" if row["inside"] else "no",
        )
        for row in rows
    )  # fmt: skip
    columns = ("task", "suite", "x", "error %", "low 90 %", "high 90 %", "inside")
    return Figure(
        id="intervals",
        title="Forecast minus outcome, with the 90 % interval",
        caption="A bar that crosses zero holds the outcome. Each bar is one task.",
        description=f"{missed} of {len(rows)} intervals of 90 % miss the outcome.",
        chart=finish(_interval_chart(rows), "per cent of the measured loss"),
        legend=(
            Key("holds the outcome", colour("forecast"), "line"),
            Key("misses it", colour("measured"), "line"),
        ),
        table=Table("Tasks", columns, cells),
    )


def _interval_chart(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    hue = alt.condition(
        "datum.inside", alt.value(colour("forecast")), alt.value(colour("measured"))
    )
    axis = alt.Axis(title="x of the target over the x of the largest rung", grid=False)
    base = alt.Chart(table(rows)).encode(
        x=alt.X("x:Q", scale=alt.Scale(type="log"), axis=axis),
        color=hue,
        tooltip=tips(
            task="task", suite="suite", x="extrapolation|.1f", error="error %|+.2f",
            low="low 90 %|+.2f", high="high 90 %|+.2f",
        ),
    )  # fmt: skip
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(
        y=alt.Y("low:Q", axis=alt.Axis(title=None)), y2="high:Q"
    )
    points = base.mark_point(filled=True, size=36).encode(y="error:Q")
    zero = alt.Chart(table([{"zero": 0}])).mark_rule(color=colour("ink-soft")).encode(y="zero:Q")
    return alt.layer(zero, bars, points)
