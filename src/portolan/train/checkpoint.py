"""Checkpoints that survive a kill at any moment and are never trusted unread.

A save runs in phases: P1 stage to host, P2 write data, P3 fsync, P4 write the manifest and create
the files' final names, P5 create COMMIT, P6 read back, P7 report, P8 prune. The protected root
`permanent/` sees only create operations; files are finished in `staging/` and hard-linked from
there. A checkpoint without COMMIT is unknown: neither restored nor deleted.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from portolan.errors import PortolanError, ResumeRefused, StorageError, UsageError
from portolan.files import read_json, storage_errors, write_json_atomic
from portolan.train import arrays as array_files
from portolan.train import staging as staged_files
from portolan.train.manifest import (
    ARRAYS,
    FORMAT,
    MANIFEST,
    CheckpointInvalid,
    Marker,
    State,
    content_digest,
    describe_files,
    describe_leaves,
    encode_manifest,
    encode_metadata,
    host_arrays,
    utc_now,
    walk_files,
)
from portolan.train.restore import (
    OWN_ENTRY,
    ROOTS,
    Candidate,
    Inventory,
    SavedCheckpoint,
    describe,
    first_trusted,
    read_manifest,
    read_state,
    refuse_other_recipe,
    take_inventory,
)
from portolan.train.retention import KEPT_VERIFIED, kept_steps, required_free_bytes

__all__ = ["CheckpointInvalid", "CheckpointStore", "SavedCheckpoint", "content_digest"]

FILE_OVERHEAD_BYTES = 4096
WATERMARKS = "watermarks.json"
STAGES = ("submitted", "committed", "marked", "verified", "restored")


@dataclass
class PendingSave:
    """One save in progress."""

    step: int
    kind: str
    attempt: int
    metadata: dict[str, Any]
    parent: dict[str, Any]
    staging: Path
    arrays: State
    digest: str = ""
    placed: Path | None = None


class CheckpointStore:
    """The checkpoints of one run: `save`, `restore`, `latest`.

    Args:
        run_folder: everything is kept below `run_folder/checkpoints`.
        keep_temporary: temporary checkpoints that survive pruning, at least 1.
        on_event: called with (kind, text); kinds are save, restore, incident, quota.
        on_phase: called at the start of each phase ("P1" … "P8") and at points inside it.
        free_bytes: room left, where a quota counts and not the disk.
        growth_bytes: other growth to leave room for until the next prune.
    """

    def __init__(
        self,
        run_folder: Path | str,
        *,
        keep_temporary: int = 2,
        on_event: Callable[[str, str], None] | None = None,
        on_phase: Callable[[str], None] | None = None,
        free_bytes: Callable[[], int] | None = None,
        growth_bytes: int = 0,
    ) -> None:
        if keep_temporary < 1:
            raise UsageError(
                f"keep_temporary is {keep_temporary}", remedy="keep at least one; two is safer"
            )
        self.folder = Path(run_folder) / "checkpoints"
        self.keep_temporary = keep_temporary
        self.pinned: set[int] = set()
        self.writers = ["process-0"]
        self.restored: SavedCheckpoint | None = None
        self._staging = self.folder / "staging"
        self._on_event = on_event
        self._phase = on_phase or (lambda _: None)
        self._free_bytes = free_bytes or self._disk_free_bytes
        self._growth_bytes = growth_bytes
        self._distrusted: set[str] = set()
        self._remove_stale_staging()

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        kind: str = "permanent",
        attempt: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> SavedCheckpoint:
        """Save `state` ({path: array}) as it is after `step` completed updates.

        `metadata` is any JSON: data cursor, random-number derivation, horizon events, digests of
        group table, configuration, code, lock file and data. Saving again what is already there
        returns the existing checkpoint.

        Raises:
            StorageError: it does not fit, the disk refused, or what was read back differs; nothing
                new is trusted then, and training may go on and ask again.
        """
        if kind not in ROOTS:
            raise UsageError(f"checkpoint kind {kind!r}", remedy=f"use one of {', '.join(ROOTS)}")
        started = time.perf_counter()
        try:
            with storage_errors(self.folder):
                saved = self._save(state, step, kind, attempt, encode_metadata(metadata or {}))
        except (StorageError, OSError, CheckpointInvalid) as error:
            text = f"save of {kind}/step-{step} failed: {getattr(error, 'message', error)}"
            self._event("incident", f"{text}; class whole-job, to be asked for again")
            if isinstance(error, StorageError):
                raise
            raise StorageError(text, remedy="check the disk; training may continue") from error
        return replace(saved, seconds=time.perf_counter() - started)

    def latest(self) -> SavedCheckpoint | None:
        """The newest checkpoint whose marker, manifest and file sizes agree; None if none does."""
        return first_trusted(
            take_inventory(self.folder).marked,
            lambda candidate: describe(candidate, read_manifest(candidate), "listed"),
            lambda candidate, problem: None,
        )

    def list_saved(self) -> list[SavedCheckpoint]:
        """All checkpoints whose marker, manifest and file sizes agree, newest first."""
        found = []
        for candidate in take_inventory(self.folder).marked:
            with contextlib.suppress(CheckpointInvalid):
                found.append(describe(candidate, read_manifest(candidate), "listed"))
        return found

    def restore(
        self,
        target_schema: Mapping[str, Any] | None = None,
        *,
        verify: str = "full",
        expected_metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
        lineage_step: int = 0,
        allow_fresh: bool = False,
    ) -> tuple[State, dict[str, Any]] | None:
        """Leaves and metadata of the newest checkpoint that validates; None if there is none.

        Args:
            target_schema: {path: array, shape struct or (shape, dtype)} that the state must have.
            verify: "full", or "sampled": the digests of every 16th file, and said so.
            expected_metadata: keys whose saved values must be equal, e.g. the group table digest.
            step: consider only this step.
            lineage_step: newest step that the record knows to have been marked.
            allow_fresh: return None instead of refusing when nothing validates.

        Raises:
            ResumeRefused: checkpoints existed and none validates, or the newest valid one belongs
                to another model, optimizer or recipe.
            StorageError: something may not be read.
        """
        inventory = take_inventory(self.folder)
        marked = [item for item in inventory.marked if step in (None, item.step)]
        expected = expected_metadata or {}

        def read(candidate: Candidate) -> tuple[State, SavedCheckpoint, str]:
            manifest = read_manifest(candidate)
            refuse_other_recipe(candidate, manifest, target_schema, expected)
            arrays, verified = self._read(candidate, manifest, verify)
            return arrays, describe(candidate, manifest, "restored"), verified

        found = first_trusted(marked, read, self._quarantine)
        self._report_unmarked(inventory, newer_than=found[1].step if found else -1)
        if found is None:
            self._refuse_fresh_start(inventory, step, lineage_step, allow_fresh)
            return None
        arrays, saved, verified = found
        self.restored = saved
        self._event("restore", f"restored {self._locate(saved)}, bytes verified: {verified}")
        return arrays, saved.metadata

    def verify(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Read all bytes of a checkpoint again.

        Raises:
            CheckpointInvalid: names the file and the leaf that differ.
        """
        for candidate in take_inventory(self.folder).marked:
            if candidate.folder == saved.folder:
                read_state(candidate, read_manifest(candidate))
                return replace(saved, completeness="bytes_verified")
        raise CheckpointInvalid(f"{self._locate(saved)} has no COMMIT")

    def watermarks(self) -> dict[str, int]:
        """Highest step submitted, committed, marked, verified, restored; empty if never saved."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = read_json(self.folder / WATERMARKS)
            return {stage: int(found[stage]) for stage in STAGES}
        return {}

    def prune(self) -> list[int]:
        """Delete temporary checkpoints that nothing requires any more; returns their steps."""
        trusted: dict[str, set[int]] = {kind: set() for kind in ROOTS}
        for candidate in take_inventory(self.folder).marked:
            enough = candidate.kind == "permanent" and len(trusted["permanent"]) >= KEPT_VERIFIED
            if enough or candidate.name in self._distrusted:
                continue
            with contextlib.suppress(CheckpointInvalid):
                read_manifest(candidate)
                trusted[candidate.kind].add(candidate.step)
        kept = kept_steps(
            trusted["temporary"],
            trusted["permanent"],
            keep_temporary=self.keep_temporary,
            pinned=self.pinned,
        )
        pruned = sorted(trusted["temporary"] - kept)
        for step in pruned:
            self._remove_temporary(step)
        return pruned

    def close(self) -> None:
        """Let another process save to this run."""
        staged_files.release_writer_lock(self._staging)

    def _read(
        self, candidate: Candidate, manifest: dict[str, Any], verify: str
    ) -> tuple[State, str]:
        """Leaves of a checkpoint, checked, and how far its bytes were verified."""
        return read_state(candidate, manifest, verify)

    def _save(
        self, state: Mapping[str, Any], step: int, kind: str, attempt: int, metadata: dict[str, Any]
    ) -> SavedCheckpoint:
        if staged_files.acquire_writer_lock(self._staging):
            staged_files.remove_stale(self._staging)
        self._phase("P1")
        arrays = host_arrays(state)
        digest = content_digest(arrays)
        if existing := self._same_checkpoint(kind, step, digest, metadata):
            return existing
        self._check_room(arrays, kind, step)
        self._advance("submitted", step)
        if self.restored:
            self._advance("restored", self.restored.step)
        with self._staging_folder() as folder:
            save = PendingSave(
                step, kind, attempt, metadata, self._parent(), folder, arrays, digest
            )
            try:
                self._write(save)
                saved = self._publish(save)
            except BaseException:
                self._discard(save)
                raise
        return self._announce(saved)

    def _parent(self) -> dict[str, Any]:
        if self.restored is None:
            return {"step": 0, "content_digest": "fresh"}
        return {"step": self.restored.step, "content_digest": self.restored.content_digest}

    def _publish(self, save: PendingSave) -> SavedCheckpoint:
        """Give written arrays their place and marker, and read them back from there."""
        self._place(save)
        return self._read_back(self._mark(save), save.digest)

    def _announce(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Tell of a save and prune what it makes needless."""
        self._phase("P7")
        size = f"{saved.num_bytes} bytes, content {saved.content_digest}"
        self._event("save", f"saved {self._locate(saved)}: {size}")
        self._phase("P8")
        try:
            self.prune()
        except (OSError, PortolanError) as error:
            text = f"pruning after step {saved.step} failed, the save holds: {error}"
            self._event("incident", text)
        return saved

    def _write(self, save: PendingSave) -> None:
        self._phase("P2")
        array_files.write_arrays(save.staging / ARRAYS, save.arrays)
        self._phase("P2:written")
        self._phase("P3")
        staged_files.sync_paths(save.staging / name for name in walk_files(save.staging))

    def _place(self, save: PendingSave) -> None:
        """Write the manifest and give all files their final names."""
        self._phase("P4")
        files = describe_files(save.staging, save.arrays)
        step_folder = self.folder / save.kind / f"step-{save.step}"
        save.placed = staged_files.create_attempt(step_folder, save.attempt)
        manifest = {
            "format": FORMAT,
            "kind": save.kind,
            "attempt": save.attempt,
            "step": {
                "completed": save.step,
                "row": save.step - 1 if save.step else "none",
                "tracker": save.metadata.get("tracker_step", "unknown"),
            },
            "time": utc_now(),
            "writers": self.writers,
            "parent": save.parent,
            "content_digest": save.digest,
            "leaves": describe_leaves(save.arrays),
            "files": files,
            "metadata": save.metadata,
        }
        staged_files.write_synced(save.staging / MANIFEST, encode_manifest(manifest))
        self._phase("P4:linking")
        staged_files.link_tree(save.staging, save.placed)

    def _mark(self, save: PendingSave) -> Candidate:
        self._phase("P5")
        assert save.placed is not None
        digest = hashlib.sha256((save.staging / MANIFEST).read_bytes()).hexdigest()
        marker = Marker(save.step, int(save.placed.name.removeprefix("attempt-")), digest)
        step_folder = save.placed.parent
        path = staged_files.publish_marker(save.staging, step_folder, marker)
        number = int(path.suffix.removeprefix(".") or 0)
        self._phase("P5:marked")
        return Candidate(save.kind, save.step, number, marker, step_folder)

    def _read_back(self, candidate: Candidate, digest: str) -> SavedCheckpoint:
        self._phase("P6")
        try:
            manifest = read_manifest(candidate)
            self._read(candidate, manifest, "full")
        except CheckpointInvalid:
            self._distrusted.add(candidate.name)
            raise
        assert manifest["content_digest"] == digest
        self._advance("verified", candidate.step)
        return describe(candidate, manifest, "bytes_verified")

    def _discard(self, save: PendingSave) -> None:
        """Remove our own unmarked files from the temporary root; the protected one keeps them."""
        if save.kind != "temporary" or save.placed is None:
            return
        marked = take_inventory(self.folder).marked
        if not any(candidate.folder == save.placed for candidate in marked):
            shutil.rmtree(save.placed, ignore_errors=True)
            with contextlib.suppress(OSError):
                save.placed.parent.rmdir()

    @contextlib.contextmanager
    def _staging_folder(self) -> Iterator[Path]:
        folder = self._staging / uuid4().hex
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _same_checkpoint(
        self, kind: str, step: int, digest: str, metadata: dict[str, Any]
    ) -> SavedCheckpoint | None:
        for candidate in take_inventory(self.folder).marked:
            if (candidate.kind, candidate.step) == (kind, step):
                with contextlib.suppress(CheckpointInvalid):
                    manifest = read_manifest(candidate)
                    if (manifest["content_digest"], manifest["metadata"]) == (digest, metadata):
                        read_state(candidate, manifest)
                        return describe(candidate, manifest, "bytes_verified")
        return None

    def _check_room(self, arrays: State, kind: str, step: int) -> None:
        """Health rule H18: warn below two saves of room, refuse when not even one fits."""
        needed = sum(array.nbytes + 2 * FILE_OVERHEAD_BYTES for array in arrays.values())
        required = required_free_bytes(needed) + self._growth_bytes
        free = self._free_bytes()
        if free < required:
            self._event("quota", f"H18: {free} bytes free before step {step}, {required} wanted")
        if free < needed:
            raise StorageError(
                f"{kind}/step-{step} needs {needed} bytes, {free} are free at {self.folder}",
                remedy="free some space; nothing was written and nothing was deleted",
            )

    def _disk_free_bytes(self) -> int:
        return shutil.disk_usage(self._staging).free

    def _quarantine(self, candidate: Candidate, problem: CheckpointInvalid) -> None:
        self._distrusted.add(candidate.name)
        self._event("incident", f"quarantined, left in place: {problem.message}")

    def _report_unmarked(self, inventory: Inventory, newer_than: int) -> None:
        for item in inventory.unmarked:
            if item.step > newer_than:
                self._event("incident", f"{item.name} is unknown, left in place: {item.reason}")

    def _refuse_fresh_start(
        self, inventory: Inventory, step: int | None, lineage_step: int, allow_fresh: bool
    ) -> None:
        """Start at step 0 only where no save was ever marked, or where the user says so."""
        if step is not None:
            raise ResumeRefused(
                f"no checkpoint of step {step} in {self.folder} validates",
                remedy=f"choose one of {sorted({item.step for item in self.list_saved()})}",
            )
        watermarks = self.watermarks()
        marked_step = max(lineage_step, watermarks.get("marked", 0))
        # Without COMMIT and watermarks a folder may be a copy that lost its marker; with
        # watermarks that know of no marked step it can only be what a killed first save left.
        lost = [item for item in inventory.unmarked if item.has_commit or not watermarks]
        if allow_fresh or not (inventory.marked or lost or marked_step):
            return
        num_folders = len(inventory.marked) + len(inventory.unmarked)
        known = f", step {marked_step} was saved once" if marked_step else ""
        raise ResumeRefused(
            f"none of {num_folders} checkpoints in {self.folder} validates{known}",
            remedy="bring back a copy, or start at step 0 with --allow-fresh",
        )

    def _remove_temporary(self, step: int) -> None:
        """Move a step out of the temporary root in one rename, then delete it."""
        source = self.folder / "temporary" / f"step-{step}"
        foreign = [entry.name for entry in source.iterdir() if not OWN_ENTRY.fullmatch(entry.name)]
        if foreign:
            self._event("incident", f"temporary/step-{step} is not pruned, it holds {foreign[0]}")
            return
        with self._staging_folder() as folder:
            source.rename(folder / source.name)
            self._phase("P8:moved")

    def _remove_stale_staging(self) -> None:
        """Clear what a killed attempt left in staging, unless a living process is saving."""
        with contextlib.suppress(OSError, UsageError):
            if self._staging.is_dir() and staged_files.acquire_writer_lock(self._staging):
                staged_files.remove_stale(self._staging)
                staged_files.release_writer_lock(self._staging)

    def _advance(self, stage: str, step: int) -> None:
        """Raise the watermark of a stage and of those before it."""
        marks = self.watermarks() or dict.fromkeys(STAGES, 0)
        raised = {
            earlier: max(marks[earlier], step) for earlier in STAGES[: STAGES.index(stage) + 1]
        }
        if marks == marks | raised:
            return
        try:
            write_json_atomic(self.folder / WATERMARKS, marks | raised)
        except (OSError, StorageError) as error:
            self._event("incident", f"watermarks were not written, the save goes on: {error}")

    def _locate(self, saved: SavedCheckpoint) -> str:
        with contextlib.suppress(ValueError):
            return saved.folder.relative_to(self.folder).as_posix()
        return os.fspath(saved.folder)

    def _event(self, kind: str, text: str) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(kind, text)
        except Exception:
            # A record that cannot be written must not cost the checkpoint it would describe.
            logging.getLogger(__name__).exception("checkpoint event lost: %s %s", kind, text)
