"""The lineage of a project: which run wrote which updates of the canonical curve."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portolan.record.chain import Record
from portolan.record.lineage import (
    Interval,
    check_spans,
    redone_steps,
    valid_intervals,
)


@dataclass(frozen=True)
class RunSpan:
    """A run of a lineage: its fork and the updates it had completed when last seen.

    `attempts` holds (restored at, completed) of its attempts in order; empty if not recorded.
    """

    name: str
    role: str
    fork: int
    completed: int
    parent: str = ""
    attempts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LineageView:
    """The canonical intervals of a lineage, run by run, and what does not count."""

    name: str
    runs: tuple[RunSpan, ...]
    intervals: tuple[Interval, ...]
    excluded: tuple[RunSpan, ...] = ()
    incomplete: tuple[str, ...] = field(default=())

    @property
    def num_rows(self) -> int:
        """Rows of the canonical curve, each counted once."""
        return sum(interval.num_rows for interval in self.intervals)

    @property
    def num_redone(self) -> int:
        """Updates that attempts of the counted runs repeated."""
        return sum(sum(redone_steps(run.attempts)) for run in self.runs)


def view_lineage(
    name: str, runs: Sequence[RunSpan], gaps: Sequence[tuple[int, int]] = ()
) -> LineageView:
    """Canonical intervals over the production runs, in order of their forks.

    Trials, controls, ablations and rolled-back runs never enter. LineageError if a fork lies where
    no earlier run can have saved a checkpoint, unless `gaps` names the hole.
    """
    counted = sorted((run for run in runs if run.role == "production"), key=lambda run: run.fork)
    spans = [(run.fork, run.completed) for run in counted]
    check_spans(spans, gaps)
    for run in counted:
        check_spans(run.attempts, gaps)
    excluded = tuple(run for run in runs if run.role != "production")
    return LineageView(name, tuple(counted), tuple(valid_intervals(spans)), excluded)


def read_lineages(records: Iterable[Record]) -> list[LineageView]:
    """The lineages of a journal, from its run, attempt and log_gap records in force.

    A run none of whose attempts says where it started is listed as incomplete, not guessed.
    """
    runs: dict[str, Mapping[str, Any]] = {}
    attempts: dict[str, dict[int, tuple[int, int | None]]] = {}
    gaps: list[tuple[int, int]] = []
    for record in records:
        body = record.body
        if record.type == "run":
            runs[body["name"]] = body
        elif record.type == "attempt" and "from_completed" in body:
            span = (body["from_completed"], body.get("to_completed"))
            attempts.setdefault(body["run"], {})[body["ordinal"]] = span
        elif record.type == "event" and body.get("kind") == "log_gap":
            detail = body.get("detail", {})
            if "first_row" in detail and "last_row" in detail:
                gaps.append((int(detail["first_row"]), int(detail["last_row"]) + 1))
    views = []
    for lineage in dict.fromkeys(body["lineage"] for body in runs.values()):
        own = {name: body for name, body in runs.items() if body["lineage"] == lineage}
        spans = [
            _span(name, body, attempts[name]) for name, body in own.items() if name in attempts
        ]
        view = view_lineage(lineage, spans, gaps)
        missing = tuple(name for name in own if name not in attempts)
        views.append(LineageView(lineage, view.runs, view.intervals, view.excluded, missing))
    return views


def _span(
    name: str, body: Mapping[str, Any], found: Mapping[int, tuple[int, int | None]]
) -> RunSpan:
    """An attempt that was killed left no end: the next one's start shows how far it came."""
    ordered = [span for _, span in sorted(found.items())]
    following = [start for start, _ in ordered[1:]] + [0]
    attempts = tuple(
        (start, max(start, reached) if end is None else end)
        for (start, end), reached in zip(ordered, following, strict=True)
    )
    return RunSpan(
        name,
        body["role"],
        int(body["fork"]["checkpoint"]),
        max(interval.end for interval in valid_intervals(attempts)),
        str(body.get("parent", "")),
        attempts,
    )
