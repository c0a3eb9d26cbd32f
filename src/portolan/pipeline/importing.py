"""Runs of other trackers, brought into a project: metrics, raw snapshot, records."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import zstandard

from portolan.canonical import canonical, stringify_floats
from portolan.console import say
from portolan.errors import UsageError
from portolan.files import fsync_directory, storage_errors
from portolan.record.artifacts import artifact_of
from portolan.record.bases import parse_basis
from portolan.record.blobs import add_blob, blob_path
from portolan.record.journal import Journal
from portolan.record.lineage import row_of
from portolan.record.rules import BLOB_PREFIX
from portolan.record.times import format_time, now
from portolan.record.types import Attempt, Evidence, Fork, Observation, Run
from portolan.record.types_runs import RunRole
from portolan.record.types_statements import Obtained
from portolan.track.imports.source import HistorySource
from portolan.track.imports.store import Clock, ClockKind, Imported, import_history
from portolan.track.tracker import read_raw

ROLES: tuple[RunRole, ...] = get_args(RunRole)


@dataclass(frozen=True)
class Placement:
    """Where an imported run belongs: its id here, its lineage, and where it left its parent."""

    run_id: str
    lineage: str
    role: RunRole = "production"
    parent: str = ""
    fork_completed: int = 0
    fork_tracker_step: int | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"role {self.role!r} is unknown", remedy=f"use {', '.join(ROLES)}")
        if bool(self.parent) != bool(self.fork_completed):
            raise UsageError(
                "a run that continues another needs both --parent and --fork-completed",
                remedy="give the parent's run id and the updates that the checkpoint completed",
            )


def open_source(
    kind: str, place: str, *, name: str = "", samples: int | None = None, base_url: str = ""
) -> HistorySource:
    """The run that `kind` finds at `place`; UsageError for an unknown kind or a missing place."""
    if kind == "wandb":
        from portolan.track.imports.wandb import WandbRun

        return WandbRun(place, samples=samples, base_url=base_url)
    if kind == "tensorboard":
        from portolan.track.imports.tensorboard import TensorBoardFolder

        return TensorBoardFolder(Path(place))
    if kind == "trackio":
        from portolan.track.imports.trackio import TrackioRun

        return TrackioRun(Path(place), name)
    if kind in ("csv", "json"):
        from portolan.track.imports.tables import CsvFile, JsonFile

        return (CsvFile if kind == "csv" else JsonFile)(Path(place))
    raise UsageError(
        f"cannot import from {kind!r}", remedy="use wandb, tensorboard, trackio, csv or json"
    )


def parse_clock(kind: str, step_key: str, clock: str) -> Clock:
    """The clock of the options --step-key and --clock, with the defaults of a kind of source."""
    clock = clock or ("tracker" if kind in ("wandb", "trackio") else "row")
    clocks = get_args(ClockKind)
    if clock not in clocks:
        raise UsageError(f"clock {clock!r} is unknown", remedy=f"use {', '.join(clocks)}")
    default = "_step" if kind == "wandb" else "step"
    return Clock(step_key or default, clock)  # type: ignore[arg-type]


def parse_bases(pairs: Sequence[str]) -> dict[str, str]:
    """Keys and bases of KEY=BASIS options; UsageError if one is not of this form or unknown."""
    bases = {}
    for pair in pairs:
        key, separator, basis = pair.rpartition("=")
        if not separator or not key:
            raise UsageError(
                f"--basis {pair!r} is not KEY=BASIS", remedy="write loss=ce.train.nats"
            )
        try:
            parse_basis(basis)
        except ValueError as error:
            raise UsageError(f"--basis {pair}: {error}") from None
        bases[key] = basis
    return bases


def import_run(
    root: Path,
    source: HistorySource,
    clock: Clock,
    placement: Placement,
    *,
    bases: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Imported:
    """Write the run's folder and record it: evidence, run, attempts, observations.

    `bases` maps keys to ids of the metric-basis registry; each becomes an observation that
    `portolan reconcile` can use. The source's own bytes are kept as a compressed blob.

    Raises:
        UsageError: a basis or the run id is refused.
        PortolanError: the source cannot be read; nothing is recorded then.
    """
    record = root / "record"
    facts = {
        "role": "imported",
        "lineage": placement.lineage,
        "imported_role": placement.role,
        "parent": placement.parent,
        "fork_completed": placement.fork_completed,
    }
    with _RawBlob(record) as raw:
        result = import_history(
            source,
            root / "runs" / placement.run_id,
            clock,
            keep_raw=raw.write,
            run_facts=facts,
            start=placement.fork_completed,
            replace=replace,
        )
        raw.keep()
    journal = Journal.open_or_create(record, root.resolve().name)
    evidence = _record_evidence(journal, record, result, raw.digest)
    _record_run(journal, result, placement, evidence)
    files = artifact_of(
        root,
        [root / "runs" / placement.run_id],
        kind="snapshot",
        name=placement.run_id,
        text=f"Metrics of {placement.run_id}, derived from the history.",
        derived_from=(evidence,),
    )
    journal.append("artifact", files)
    for key, basis in sorted((bases or {}).items()):
        _observe(journal, root, placement.run_id, key, basis, clock, evidence)
    journal.sign_head()
    _report(placement, clock, result)
    return result


class _RawBlob:
    """The source's bytes, compressed as they come, then stored as a blob under their digest."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self.digest = ""

    def __enter__(self) -> "_RawBlob":
        with storage_errors(self._record):
            folder = self._record / "blobs" / "sha256"
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".raw.", dir=folder)
        self._path = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._writer = zstandard.ZstdCompressor().stream_writer(self._file, closefd=False)
        return self

    def write(self, content: bytes) -> None:
        with storage_errors(self._path):
            self._writer.write(content)

    def keep(self) -> None:
        """Finish the file and give it its place."""
        with storage_errors(self._path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            with self._path.open("rb") as file:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
            place = blob_path(self._record, self.digest)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._path.chmod(0o644)
            self._path.replace(place)
            fsync_directory(place.parent)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _record_evidence(journal: Journal, record: Path, result: Imported, digest: str) -> str:
    """Evidence for the description and for the history; returns the id of the latter."""
    source = result.source
    access = "anonymous" if source.anonymous else "credentialed"
    described = {"config": source.config, "summary": source.summary, "name": source.name}
    content = canonical(stringify_floats(json.loads(json.dumps(described, default=str))))
    common: dict[str, Any] = {"time": now(), "access": access}
    description = add_blob(record, content)

    def obtained(stored: str) -> Obtained:
        arguments = source.arguments | {"stored_as": f"{BLOB_PREFIX}{stored}"}
        return Obtained(query=source.query, arguments=arguments, tool_version=source.tool_version)

    journal.append(
        "evidence",
        Evidence(
            text=f"Configuration and summary that {source.kind} gives for {source.name}. "
            f"Its own word for the state is {source.state!r}.",
            snapshot_digest=description,
            obtained_by=obtained(description),
            completeness="full",
            relation="context",
            **common,
        ),
    )
    return journal.append(
        "evidence",
        Evidence(
            text=f"History of {source.name} from {source.locator}: {result.num_lines} lines as "
            "the source gave them, one JSON object or CSV line each, compressed with zstd.",
            snapshot_digest=digest,
            obtained_by=obtained(digest),
            completeness=result.completeness,
            relation="context",
            **common,
        ),
    )


def _record_run(journal: Journal, result: Imported, placement: Placement, evidence: str) -> None:
    tracker_step = placement.fork_tracker_step
    run = Run(
        text=f"Imported from {result.source.locator}.",
        refs=(evidence,),
        name=placement.run_id,
        lineage=placement.lineage,
        parent=placement.parent or None,
        fork=Fork(
            checkpoint=placement.fork_completed,
            row=row_of(placement.fork_completed),
            tracker_step="not_stated" if tracker_step is None else tracker_step,
        ),
        role=placement.role,
        tracker_ids=(result.source.locator,),
    )
    journal.append("run", run)
    for ordinal, span in enumerate(result.attempts, start=1):
        moment = datetime.fromtimestamp((span.first_time or 0) / 1000, UTC)
        known = (
            "" if span.first_time is not None else " Its start is not known: 1970 stands for it."
        )
        attempt = Attempt(
            text=f"Told from the history: the rows begin anew here.{known}"
            if ordinal > 1
            else f"Told from the history.{known}",
            refs=(evidence,),
            run=placement.run_id,
            ordinal=ordinal,
            start=format_time(moment),
            restored_from="fresh" if span.start == 0 else f"step-{span.start}",
            from_completed=span.start,
            to_completed=max(span.start, span.completed),
            container_digest="not_stated",
            lock_digest="not_stated",
            code_commit="not_stated",
            tree_state="not_stated",
            config_digest="not_stated",
            data_manifest_digest="not_stated",
            argv=(),
            env={},
            hosts_digest="not_stated",
        )
        journal.append("attempt", attempt)


def _observe(
    journal: Journal, root: Path, run_id: str, key: str, basis: str, clock: Clock, evidence: str
) -> None:
    """Record a series whose meaning the user states; its points are a blob of JSON lines."""
    frame = read_raw(root / "runs" / run_id, [key])
    if frame.is_empty():
        raise UsageError(
            f"the run {run_id} has no series {key!r}", remedy="check the key given with --basis"
        )
    for (attempt,), part in frame.group_by("attempt", maintain_order=True):
        rows = part.select("row", "value").rows()
        lines = [canonical(stringify_floats({"n": row, "value": value})) for row, value in rows]
        digest = add_blob(root / "record", b"".join(line + b"\n" for line in lines))
        body = Observation(
            text=f"Series {key} of {run_id}, attempt {attempt}.",
            series=key,
            basis=basis,
            run=run_id,
            attempt=int(attempt),  # type: ignore[arg-type]
            clock="tracker" if clock.kind == "tracker" else "row",
            points=f"{BLOB_PREFIX}{digest}",
            num_points=len(rows),
            source=evidence,
        )
        journal.append("observation", body)


def _report(placement: Placement, clock: Clock, result: Imported) -> None:
    say(f"{placement.run_id}: {result.num_values:,} values in {result.num_lines:,} lines")
    say(f"rows {result.first_row} to {result.last_row} ({clock.kind}), {result.completeness}")
    for ordinal, span in enumerate(result.attempts, start=1):
        say(f"attempt {ordinal}: updates {span.start} to {span.completed}")
    if result.num_without_step:
        say(f"{result.num_without_step} lines had no step in {clock.field!r} and were left out")
    if result.skipped:
        fields = ", ".join(
            f"{name} ({count})" for name, count in sorted(result.skipped.items())[:8]
        )
        say(f"fields that are no numbers, kept in the snapshot only: {fields}")
