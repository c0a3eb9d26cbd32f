"""Figures and tables of lineages, of the moments on their curves, and of the evidence."""

import math
from collections.abc import Sequence
from typing import Any

from portolan.record.lineage import Interval
from portolan.record.lineage_view import LineageView
from portolan.report.canvas import finish, table, tips, value_axis
from portolan.report.curves import SMALL_HEIGHT, Line
from portolan.report.facts import Project, Run
from portolan.report.figures import Figure, Key, Table
from portolan.report.moments import CurveMoment
from portolan.report.palette import colour
from portolan.report.words import MISSING, count, plural

MAX_CHARTS = 12
MAX_EVIDENCE = 200
MAX_MOMENTS = 200
NEIGHBOUR_SHARE = 0.02
"""Before and after an event: the mean over this share of the curve on either side."""
ROLE_COLOURS = {"production": "series-1", "trial": "series-2", "control": "series-3",
                "rolled_back": "series-4", "ablation": "series-5"}  # fmt: skip

# ---------------------------------------------------------------- lineage


def lineage_figures(project: Project) -> tuple[Figure, ...]:
    """A bar a run: what counts of it is solid, what a later run replaced or never counted pale."""
    shown = [view for view in project.observed.lineages if _is_worth_showing(view)]
    return tuple(_lineage_figure(view, index) for index, view in enumerate(shown))


def _is_worth_showing(view: LineageView) -> bool:
    return bool(view.runs) and (
        len(view.runs) + len(view.excluded) > 1 or any(len(run.attempts) > 1 for run in view.runs)
    )


def _lineage_figure(view: LineageView, index: int) -> Figure:
    rows, body = [], []
    for run, interval in zip(view.runs, view.intervals, strict=True):
        written = {"run": run.name, "role": run.role, "state": "replaced later"}
        rows.append(written | {"start": run.fork, "end": run.completed})
        rows.append(written | {"state": "counts", "start": interval.start, "end": interval.end})
        body.append((run.name, run.role, count(run.fork), count(run.completed),
                     f"{count(interval.start)} to {count(interval.end)}",
                     count(len(run.attempts)) if run.attempts else MISSING))  # fmt: skip
    for run in view.excluded:
        rows.append(
            {"run": run.name, "role": run.role, "state": "never counts", "start": run.fork,
             "end": run.completed}
        )  # fmt: skip
        body.append((run.name, run.role, count(run.fork), count(run.completed), "none",
                     count(len(run.attempts)) if run.attempts else MISSING))  # fmt: skip
    columns = ("Run", "Role", "Forked at", "Reached", "Counts for updates", "Attempts")
    note = f"{count(view.num_rows)} updates count once; {count(view.num_redone)} were repeated."
    if view.incomplete:
        note += f" Without a recorded start: {', '.join(view.incomplete)}."
    roles = dict.fromkeys(row["role"] for row in rows)
    return Figure(
        f"lineage-{index}",
        f"Lineage {view.name}",
        "Updates that each run trained. Solid: they count for the curve; pale: a later run or "
        "attempt replaced them, or the run never counts.",
        f"Runs of the lineage {view.name} over completed updates; the table has the numbers.",
        _bars(rows, list(dict.fromkeys(row["run"] for row in rows))),
        tuple(Key(role.replace("_", " "), _role_colour(role), "band") for role in roles),
        Table(f"Runs of the lineage {view.name}", columns, tuple(body), note),
    )


def _role_colour(role: str) -> str:
    return colour(ROLE_COLOURS.get(role, "series-7"))


def _bars(rows: list[dict[str, Any]], order: list[str]) -> Any:
    import altair as alt

    roles = list(dict.fromkeys(row["role"] for row in rows))
    scale = alt.Scale(domain=roles, range=[_role_colour(role) for role in roles])
    chart = (
        alt.Chart(table(rows))
        .mark_bar(height=14)
        .encode(
            x=alt.X("start:Q", axis=alt.Axis(title="completed updates", grid=True, format="~s")),
            x2="end:Q",
            y=alt.Y("run:N", sort=order, axis=alt.Axis(title=None, grid=False)),
            color=alt.Color("role:N", scale=scale, legend=None),
            opacity=alt.condition("datum.state == 'counts'", alt.value(1), alt.value(0.3)),
            tooltip=tips(run="run", role="role", state="state", start="from|,", end="to|,"),
        )
    )
    return finish(chart, "", 26 * len(order) + 46)


# ---------------------------------------------------------------- curves with moments


def series_figures(project: Project) -> tuple[Figure, ...]:
    """Series of imported runs, stitched by lineage, with what happened marked on them."""
    figures = []
    for view in project.observed.lineages:
        runs = {run.id: run for run in project.runs if run.role == "imported"}
        own = [
            (runs[r.name], i)
            for r, i in zip(view.runs, view.intervals, strict=True)
            if r.name in runs
        ]
        for key in _chosen_keys([run for run, _ in own]):
            figures.append(_series_figure(view.name, key, own, project.observed.moments))
    return tuple(figure for figure in figures if figure.chart is not None)


def _valid(run: Run, key: str, interval: Interval) -> list[tuple[float, float]]:
    """Points (completed, mean) of the rows that count."""
    return [
        (float(bucket.completed), bucket.mean)
        for bucket in run.series.get(key, ())
        if interval.start < bucket.completed <= interval.end
    ]


def _is_loss(key: str) -> bool:
    return "loss" in key or "cross_entropy" in key


def _chosen_keys(runs: Sequence[Run]) -> list[str]:
    """Losses first, then the series with most points; the tracker's own counter is not drawn."""
    sizes: dict[str, int] = {}
    for run in runs:
        for key, points in run.series.items():
            sizes[key] = sizes.get(key, 0) + len(points)
    drawn = [key for key in sizes if not key.startswith(("tracker/", "_"))]

    def rank(key: str) -> tuple[bool, int, str]:
        return (not _is_loss(key), -sizes[key], key)

    return sorted(drawn, key=rank)[:MAX_CHARTS]


def _series_figure(
    lineage: str, key: str, own: Sequence[tuple[Run, Interval]], moments: Sequence[CurveMoment]
) -> Figure:
    lines = []
    for number, (run, interval) in enumerate(own):
        shade = colour(f"series-{number % 8 + 1}")
        lines.append(Line(run.id, shade, _valid(run, key, interval)))
    lines = [line for line in lines if line.points]
    names = {line.name for line in lines}
    marks = [m for m in moments if not m.run or m.run in names]
    identity = "".join(c if c.isalnum() else "-" for c in f"{lineage}-{key}")
    return Figure(
        f"series-{identity}",
        key,
        f"Lineage {lineage}, the updates that count. A point is a mean over neighbouring updates."
        + (" Dashed: incidents and changes, listed below." if marks else ""),
        f"Series {key} of the lineage {lineage} over completed updates.",
        _curve_chart(lines, marks) if lines else None,
        tuple(Key(line.name, line.colour) for line in lines) if len(lines) > 1 else (),
        wide=False,
    )


def _curve_chart(lines: Sequence[Line], marks: Sequence[CurveMoment]) -> Any:
    import altair as alt

    rows = [{"n": n, "value": v, "run": line.name} for line in lines for n, v in line.points]
    scale = alt.Scale(domain=[line.name for line in lines], range=[line.colour for line in lines])
    x = alt.X("n:Q", axis=alt.Axis(title="completed updates", grid=False, format="~s", tickCount=5))
    drawn = (
        alt.Chart(table(rows))
        .mark_line(strokeWidth=1.6, point=alt.OverlayMarkDef(size=14))
        .encode(
            x=x,
            y=value_axis("value"),
            color=alt.Color("run:N", scale=scale, legend=None),
            tooltip=tips(run="run", n="updates|,", value="value|.5g"),
        )
    )
    layers: list[Any] = [drawn]
    if marks:
        places = [{"n": m.completed, "what": f"{m.what}: {m.text}"} for m in marks[:MAX_MOMENTS]]
        rules = (
            alt.Chart(table(places))
            .mark_rule(color=colour("ink-soft"), strokeDash=[3, 3])
            .encode(x=x, tooltip=tips(what="moment", n="updates|,"))
        )
        layers.insert(0, rules)
    return finish(alt.layer(*layers), "", SMALL_HEIGHT)


# ---------------------------------------------------------------- tables


def moment_table(project: Project) -> Table | None:
    """Incidents and changes with the curve's mean just before and just after each."""
    moments = project.observed.moments
    if not moments:
        return None
    rows = []
    for moment in moments[-MAX_MOMENTS:]:
        key, before, after = _around(project, moment)
        rows.append(
            (
                count(moment.completed),
                f"{moment.what}{' (superseded)' if moment.superseded else ''}",
                moment.run or MISSING,
                moment.text,
                moment.cause or MISSING,
                f"{before:.4g} → {after:.4g}" if key else MISSING,
            )
        )
    left_out = len(moments) - len(rows)
    note = "Loss: mean over 2 % of the run before and after, of the rows that count."
    if left_out:
        note += f" The first {count(left_out)} are left out; the journal has them."
    columns = ("Updates", "What", "Run", "Text", "Cause or verdict", "Loss around it")
    return Table("Incidents and changes on the curve", columns, tuple(rows), note, wraps=True)


def _around(project: Project, moment: CurveMoment) -> tuple[str, float, float]:
    """A training loss of the lineage, with its means before and after the moment."""
    runs = {run.id: run for run in project.runs}
    for view in project.observed.lineages:
        own = [
            (runs[span.name], interval)
            for span, interval in zip(view.runs, view.intervals, strict=True)
            if span.name in runs
        ]
        if moment.run and moment.run not in {span.name for span in view.runs}:
            continue
        losses = (key for key in _chosen_keys([run for run, _ in own]) if _is_loss(key))
        for key in losses:
            points = [point for run, interval in own for point in _valid(run, key, interval)]
            reach = NEIGHBOUR_SHARE * max(n for n, _ in points)
            near = [(n, v) for n, v in points if abs(n - moment.completed) <= reach]
            before = [v for n, v in near if n <= moment.completed]
            after = [v for n, v in near if n > moment.completed]
            if before and after:
                return key, sum(before) / len(before), sum(after) / len(after)
    return "", math.nan, math.nan


def evidence_table(project: Project) -> Table | None:
    """Every piece of evidence: how it was got, how much of it there is, its digest."""
    rows = project.observed.evidence
    if not rows:
        return None
    body = tuple(
        (_short(row.digest), row.text, row.relation, row.access, row.completeness, row.time)
        for row in rows[-MAX_EVIDENCE:]
    )
    note = f"{plural(len(rows), 'piece')} of evidence; digests are shortened, the journal has them."
    columns = ("SHA-256", "What", "Relation", "Access", "Completeness", "Fetched, UTC")
    return Table("Evidence", columns, body, note, wraps=True)


def _short(digest: str) -> str:
    return f"{digest[:12]}…" if len(digest) == 64 else digest or MISSING
