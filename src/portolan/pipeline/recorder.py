"""The project's journal, as the stages write it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portolan.files import sha256_file
from portolan.pipeline.provenance import build_attempt
from portolan.project import Project
from portolan.record.journal import Journal
from portolan.record.schema import StepPoint
from portolan.record.times import now
from portolan.record.types import Artifact, Event, FileEntry, Fork, Run, files_digest

RETAIN = "as long as the project folder is kept"


@dataclass
class ProjectRecord:
    """Appends what the stages did; reading back is by `find`."""

    project: Project
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        """Open the journal, or start it."""
        self.journal = Journal.open_or_create(self.project.record, self.project.recipe.name)

    def find(self, record_type: str, **fields: Any) -> list[Any]:
        """Records of a type whose body has these values, oldest first."""
        return [
            record
            for record in self.journal.records()
            if record.type == record_type
            and all(record.body.get(name) == value for name, value in fields.items())
        ]

    def sign(self) -> None:
        """Sign the head of the journal."""
        self.journal.sign_head()

    def artifact(
        self,
        kind: str,
        name: str,
        paths: Iterable[Path],
        text: str,
        *,
        digests: Mapping[str, str] | None = None,
        licence: str = "NOASSERTION",
        derived_from: tuple[str, ...] = (),
    ) -> str:
        """Record files of the project with their SHA-256; returns the record's id."""
        files = tuple(
            FileEntry(
                path=self.project.relative(path),
                bytes=path.stat().st_size,
                sha256=sha256_file(path),
            )
            for path in sorted(paths)
        )
        body = Artifact(
            text=text,
            kind=kind,  # type: ignore[arg-type]
            name=name,
            files=files,
            digests=dict(digests or {}) | {"files": files_digest(files)},
            bytes=sum(entry.bytes for entry in files),
            licence_declared=licence,
            licence_concluded=licence,
            redistribution="metadata_only",
            derived_from=derived_from,
            retain_until=RETAIN,
            completeness="bytes_verified",
        )
        return self.journal.append("artifact", body)

    def run(self, run_id: str, role: str, text: str) -> None:
        """Record a run once; the target's lineage is the recipe's name, the rungs have another."""
        if self.find("run", name=run_id):
            return
        name = self.project.recipe.name
        body = Run(
            text=text,
            name=run_id,
            lineage=name if role == "production" else f"{name}-ladder",
            fork=Fork(checkpoint=0, row=-1, tracker_step="not_stated"),
            role=role,  # type: ignore[arg-type]
        )
        self.journal.append("run", body)

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        """Record an event of a run at `completed` updates."""
        body = Event(
            text=text,
            kind=kind,  # type: ignore[arg-type]
            step=StepPoint(clock="completed", n=completed),
            run=run_id,
        )
        self.journal.append("event", body)


@dataclass
class RunRecorder:
    """What a training loop tells the journal about one run."""

    record: ProjectRecord
    config_digest: str
    data_digest: str
    _open: dict[str, Any] = field(default_factory=dict)

    def last_attempt(self, run_id: str) -> int:
        """Ordinal of the newest attempt in the journal, 0 if none: a folder may be deleted."""
        attempts = self.record.find("attempt", run=run_id)
        return max((record.body["ordinal"] for record in attempts), default=0)

    def attempt_started(self, run_id: str, ordinal: int, start: int, restored: str) -> None:
        """Record that an attempt begins; a restored checkpoint is named by its record."""
        reference = "fresh" if restored == "fresh" else self._restored(run_id, start, restored)
        self._open = {
            "start": now(),
            "restored_from": reference,
            "from_completed": start,
            "config_digest": self.config_digest,
            "data_digest": self.data_digest,
        }
        text = f"attempt {ordinal} at {run_id} starts after {start} updates"
        body = build_attempt(run_id, ordinal, text=text, **self._open)
        self._open["id"] = self.record.journal.append("attempt", body)
        self.record.sign()

    def attempt_ended(self, run_id: str, ordinal: int, completed: int, reason: str) -> None:
        """Supersede the attempt's record with its end."""
        started = self._open.pop("id")
        body = build_attempt(
            run_id,
            ordinal,
            text=f"attempt {ordinal} at {run_id} ends after {completed} updates: {reason}",
            to_completed=completed,
            end=now(),
            evidence=(reason,),
            **self._open,
        )
        self.record.journal.append("attempt", body, supersedes=[started])
        self.record.sign()

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        """Record an event."""
        self.record.event(run_id, kind, completed, text)

    def checkpoint_saved(self, run_id: str, saved: Any) -> None:
        """Record a permanent checkpoint with all of its files."""
        files = [path for path in saved.folder.rglob("*") if path.is_file()]
        files += [path for path in saved.folder.parent.glob("COMMIT*") if path.is_file()]
        self.record.artifact(
            "checkpoint",
            f"{run_id} step-{saved.step}",
            files,
            f"checkpoint of {run_id} after {saved.step} updates",
            digests={"content": saved.content_digest},
        )
        self.record.sign()

    def _restored(self, run_id: str, step: int, digest: str) -> str:
        """Id of a record that names the restored state by its content digest.

        A temporary checkpoint is pruned later, so its record lists no files.
        """
        name = f"{run_id} step-{step}"
        for found in self.record.find("artifact", kind="checkpoint", name=name):
            if found.body["digests"].get("content") == digest:
                return found.id
        body = Artifact(
            text=f"state of {run_id} after {step} updates, restored from a temporary checkpoint",
            kind="checkpoint",
            name=name,
            digests={"content": digest},
            bytes=0,
            licence_declared="NOASSERTION",
            licence_concluded="NOASSERTION",
            redistribution="withheld",
            retain_until="pruned when newer checkpoints exist",
            completeness="restored",
        )
        return self.record.journal.append("artifact", body)
