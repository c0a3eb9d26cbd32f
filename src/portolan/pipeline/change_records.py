"""The journal's side of changes: what was planned, what was decided, and what came of it.

The journal is the only source of a change; `changes.json` in the folder of a run is a copy.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portolan.canonical import canonical, parse
from portolan.files import write_json_atomic
from portolan.pipeline.course import (
    KINDS,
    Change,
    ContextChange,
    Course,
    MixtureChange,
    change_from_json,
    change_to_json,
    plan_course,
)
from portolan.pipeline.recorder import ProjectRecord
from portolan.project import Project
from portolan.record.schema import StepPoint
from portolan.record.types import Change as ChangeBody
from portolan.record.types import Changed, Expected

if TYPE_CHECKING:
    from portolan.pipeline.runs import PlannedRun

CHANGES_FILE = "changes.json"
WINDOW_UPDATES = 10
"""Updates before and after a change whose losses are compared."""
TOLERANCE_NATS = 0.2
"""Noise of single updates of small runs; the gate is on the largest of the window."""
TRAIN_METRIC = "train/cross_entropy"
HEADLINE = "eval_dropless/heldout/macro_loss"


def planned_course(project: Project, run: "PlannedRun") -> Course:
    """What the recipe says about a run."""
    return plan_course(project.recipe, run.order, extend=run.is_target)


def run_course(project: Project, record: ProjectRecord, run: "PlannedRun") -> Course:
    """What the recipe says about a run, with the changes recorded since."""
    course = planned_course(project, run)
    for change in recorded_changes(record, run.run_id):
        course = course.apply(change)
    return course


def recorded_changes(record: ProjectRecord, run_id: str) -> list[Change]:
    """Changes decided while a run went on, in the order of their decision."""
    return [entry.change for entry in _entries(record, run_id) if not entry.body["planned"]]


def changes_in_force(record: ProjectRecord, run_id: str) -> list[Change]:
    """All changes of a run, planned ones too, in the order in which they were first recorded."""
    return [entry.change for entry in _entries(record, run_id)]


class Entry(NamedTuple):
    """A change and the newest record of it."""

    record_id: str
    change: Change
    body: dict[str, Any]


def _entries(record: ProjectRecord, run_id: str) -> list[Entry]:
    """Changes of a run in the order in which they were first recorded."""
    runs = {entry.id for entry in record.find("run", name=run_id)}
    found: list[Entry] = []
    for entry in record.find("change"):
        change = _parsed(entry.body)
        if change is None or not runs.intersection(entry.body["refs"]):
            continue
        places = [i for i, earlier in enumerate(found) if earlier.record_id in entry.supersedes]
        place = places[0] if places else len(found)
        found[place : place + 1] = [Entry(entry.id, change, entry.body)]
    return found


def _parsed(body: dict[str, Any]) -> Change | None:
    """The change in a body, or None for one of code or infrastructure."""
    for text in (body["what"].get("config"), body["what"].get("data")):
        if text and text.startswith("{"):
            content = parse(text)
            if content.get("kind") in KINDS:
                return change_from_json(content)
    return None


def append_change(
    record: ProjectRecord,
    run_id: str,
    change: Change,
    text: str,
    *,
    planned: bool,
    supersedes: tuple[str, ...] = (),
) -> str:
    """Record a change of a run before it is made; returns its id."""
    content = canonical(change_to_json(change)).decode()
    is_data = isinstance(change, MixtureChange)
    body = ChangeBody(
        text=text,
        refs=tuple(entry.id for entry in record.find("run", name=run_id)),
        planned=planned,
        what=Changed(data=content) if is_data else Changed(config=content),
        from_step=StepPoint(clock="completed", n=change.from_step),
        expected=Expected(
            metric=TRAIN_METRIC,
            direction="unknown" if is_data else "none",
            size="not_stated" if is_data else "0",
            tolerance=f"{TOLERANCE_NATS:g} nats per token",
        ),
        not_exercised=("a retry of the switch", "the change undone"),
        gate=(
            f"the largest loss of the {WINDOW_UPDATES} updates after it exceeds the mean of the "
            f"{WINDOW_UPDATES} before it by at most the tolerance"
        ),
        control_window=f"the {WINDOW_UPDATES} updates before and after it, of one run",
    )
    return record.journal.append("change", body, supersedes=supersedes)


def record_course(project: Project, record: ProjectRecord, run: "PlannedRun") -> None:
    """Record what the recipe plans to change, once, and write the copy for readers."""
    if not _entries(record, run.run_id):
        for change in _later_changes(planned_course(project, run)):
            text = f"planned in the recipe of {run.run_id}: {describe(change)}"
            append_change(record, run.run_id, change, text, planned=True)
    write_changes(project, record, run.run_id)


def move_planned(record: ProjectRecord, run_id: str, course: Course) -> None:
    """Record where a change of the horizon moved what the recipe had planned."""
    starts = {_identity(change): change for change in _later_changes(course)}
    for entry in _entries(record, run_id):
        moved = starts.get(_identity(entry.change))
        if entry.body["planned"] and moved not in (None, entry.change):
            text = f"moved with the horizon of {run_id}: {describe(moved)}"
            append_change(record, run_id, moved, text, planned=True, supersedes=(entry.record_id,))


def _later_changes(course: Course) -> Iterator[Change]:
    for stage in course.stages[1:]:
        yield ContextChange(stage.start_step, stage.sequence_length, stage.qk_multiplier)
    for phase in course.phases[1:]:
        yield MixtureChange(phase.start_step, phase.name, phase.weights)


def _identity(change: Change) -> int | str:
    """What stays of a change of the recipe when it moves."""
    if isinstance(change, ContextChange):
        return change.sequence_length
    return change.name if isinstance(change, MixtureChange) else change.horizon


def write_changes(project: Project, record: ProjectRecord, run_id: str) -> None:
    """Write the copy of the recorded changes into the folder of the run, if there are any."""
    content = [
        {"record": entry.record_id, "planned": entry.body["planned"]} | change_to_json(entry.change)
        for entry in _entries(record, run_id)
    ]
    if content:
        write_json_atomic(project.runs / run_id / CHANGES_FILE, {"changes": content})


def describe(change: Change) -> str:
    """One line for a person."""
    start = f"from update {change.from_step} on"
    if isinstance(change, ContextChange):
        return (
            f"rows of {change.sequence_length} tokens, qk multiplier {change.qk_multiplier:.6g}, "
            f"{start}"
        )
    if isinstance(change, MixtureChange):
        return f"mixture phase {change.name!r} {start}"
    return f"end after {change.horizon} updates, rates re-timed {start}"


def conclude_changes(
    project: Project, record: ProjectRecord, run_id: str
) -> Iterator[tuple[Change, str]]:
    """Record what came of every change whose window is over; yields the change and its result."""
    from portolan.track.tracker import read_metrics

    pending = [e for e in _entries(record, run_id) if e.body["verdict"] == "pending"]
    if not pending:
        return
    table = read_metrics(project.runs / run_id, keys=[TRAIN_METRIC, HEADLINE])
    columns = ("key", "completed", "value")
    curves: dict[str, dict[int, float]] = {TRAIN_METRIC: {}, HEADLINE: {}}
    for key, completed, value in zip(*(table[name] for name in columns), strict=True):
        curves[key][completed] = value
    for identity, change, body in pending:
        found = _result(curves, change.from_step)
        if found is None:
            continue
        result, rise = found
        verdict = "accepted" if rise <= TOLERANCE_NATS else "accepted_stability_unproved"
        body = ChangeBody.model_validate(body | {"result": result, "verdict": verdict})
        record.journal.append("change", body, supersedes=[identity])
        yield change, result
    write_changes(project, record, run_id)


def _result(curves: dict[str, dict[int, float]], step: int) -> tuple[str, float] | None:
    """Losses around a change, and by how much the largest after it exceeds the mean before it."""
    losses, evaluations = curves[TRAIN_METRIC], curves[HEADLINE]
    before = [losses[n] for n in range(step - WINDOW_UPDATES + 1, step + 1) if n in losses]
    after = [losses[n] for n in range(step + 1, step + WINDOW_UPDATES + 1) if n in losses]
    if not before or len(after) < WINDOW_UPDATES:
        return None
    mean, later = sum(before) / len(before), sum(after) / len(after)
    text = (
        f"nats per token: {before[-1]:.4f} at the last update before, {after[0]:.4f} at the first "
        f"after; mean {mean:.4f} of {len(before)} before, {later:.4f} of {len(after)} after, "
        f"largest after {max(after):.4f}"
    )
    marks = [
        max((n for n in evaluations if n <= step), default=0),
        min((n for n in evaluations if n > step), default=0),
    ]
    shown = [f"{evaluations[n]:.4f} after {n} updates" for n in marks if n]
    if shown:
        text += f"; held-out macro loss {', '.join(shown)}"
    return text, max(after) - mean


def completed_updates(folder: Path) -> int:
    """Updates that a run has ever completed, also those after its newest checkpoint."""
    from portolan.track.tracker import read_raw

    if not folder.is_dir():
        return 0
    return max(read_raw(folder, [TRAIN_METRIC])["completed"].to_list(), default=0)
