"""What a journal says of lineages, of incidents and changes on a curve, and of evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portolan.errors import PortolanError
from portolan.record.chain import Record
from portolan.record.lineage_view import LineageView, read_lineages
from portolan.report.values import as_text

MARKED_KINDS = frozenset({"incident", "alarm", "hang", "preempt", "log_gap", "tracker_gap",
                          "quota", "decision", "correction", "control"})  # fmt: skip


@dataclass(frozen=True)
class CurveMoment:
    """An incident or a change that stands at a place of a curve, in completed updates."""

    completed: int
    run: str
    what: str
    text: str
    cause: str
    superseded: bool


@dataclass(frozen=True)
class EvidenceRow:
    """One piece of evidence, in words."""

    text: str
    access: str
    completeness: str
    relation: str
    time: str
    digest: str


@dataclass(frozen=True)
class Observed:
    """What the journal says about runs, moments and evidence."""

    lineages: tuple[LineageView, ...] = ()
    moments: tuple[CurveMoment, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    problem: str = ""


def read_observed(records: Sequence[Record]) -> Observed:
    """Lineages, moments and evidence of a journal; contradictory forks become `problem`."""
    problem = ""
    lineages: tuple[LineageView, ...] = ()
    try:
        lineages = tuple(read_lineages(records))
    except PortolanError as error:
        problem = error.message
    replaced = {identity for record in records for identity in record.supersedes}
    moments = (moment for record in records if (moment := _moment(record, replaced)))
    rows = [_evidence(record.body) for record in records if record.type == "evidence"]
    return Observed(
        lineages,
        tuple(sorted(moments, key=lambda moment: moment.completed)),
        tuple(rows),
        problem,
    )


def _moment(record: Record, replaced: set[str]) -> CurveMoment | None:
    body = record.body
    point = body.get("from_step") if record.type == "change" else body.get("step")
    is_marked = record.type == "change" or (
        record.type == "event" and body.get("kind") in MARKED_KINDS
    )
    if not is_marked or not isinstance(point, Mapping) or point.get("clock") == "tracker":
        return None
    cause = body.get("cause")
    status = ""
    if isinstance(cause, Mapping):
        status = f"{as_text(cause.get('text'))} ({as_text(cause.get('status'))})"
    return CurveMoment(
        completed=int(point["n"]) + (1 if point.get("clock") == "row" else 0),
        run=as_text(body.get("run")),
        what="change" if record.type == "change" else as_text(body.get("kind")),
        text=as_text(body.get("text")),
        cause=status or (as_text(body.get("verdict")) if record.type == "change" else ""),
        superseded=record.id in replaced,
    )


def _evidence(body: Mapping[str, Any]) -> EvidenceRow:
    return EvidenceRow(
        text=as_text(body.get("text")),
        access=as_text(body.get("access")),
        completeness=as_text(body.get("completeness")),
        relation=as_text(body.get("relation")),
        time=as_text(body.get("time"))[:19].replace("T", " "),
        digest=as_text(body.get("snapshot_digest")),
    )
