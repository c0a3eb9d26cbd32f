"""Finding checkpoints and deciding which of them can be trusted."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portolan.errors import ResumeRefused, StorageError
from portolan.files import sha256_file
from portolan.train.arrays import read_arrays
from portolan.train.manifest import (
    ARRAYS,
    MANIFEST,
    CheckpointInvalid,
    Marker,
    State,
    content_digest,
    encode_metadata,
    parse_manifest,
    parse_marker,
    schema_differences,
)
from portolan.train.staging import COMMIT

ROOTS = ("permanent", "temporary")
STEP_FOLDER = re.compile(r"step-(\d+)")
OWN_ENTRY = re.compile(rf"{COMMIT}(\.\d+)?|attempt-\d+")
COMMIT_FILE = re.compile(rf"{COMMIT}(?:\.([1-9]\d*))?")
SAMPLE_EVERY = 16


@dataclass(frozen=True)
class SavedCheckpoint:
    """A marked checkpoint as its manifest describes it.

    `attempt` is the training attempt, `folder` its place on disk (a retry at the same step takes
    the next free folder); `completeness` is `marked` until its bytes were read and compared.
    """

    step: int
    kind: str
    attempt: int
    folder: Path
    manifest_sha256: str
    content_digest: str
    num_bytes: int
    num_files: int
    completeness: str
    metadata: dict[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A marked checkpoint, not yet checked."""

    kind: str
    step: int
    number: int
    marker: Marker
    step_folder: Path

    @property
    def folder(self) -> Path:
        """The attempt folder with the manifest and the arrays."""
        return self.step_folder / f"attempt-{self.marker.attempt}"

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.kind}/step-{self.step}/{self.folder.name}"


@dataclass(frozen=True)
class Unmarked:
    """A step folder without a readable COMMIT: unknown, neither trusted nor garbage."""

    kind: str
    step: int
    has_commit: bool

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.kind}/step-{self.step}"

    @property
    def reason(self) -> str:
        """Why it is not trusted."""
        return "its COMMIT does not parse" if self.has_commit else "it has no COMMIT"


@dataclass
class Inventory:
    """All step folders of a run, newest first; of one step the newest marker first."""

    marked: list[Candidate] = field(default_factory=list)
    unmarked: list[Unmarked] = field(default_factory=list)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A refused read is an error of its own, never "not found"."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ESTALE):
            raise
        raise StorageError(
            f"cannot read {error.filename or path}: {os.strerror(error.errno)}",
            remedy="make it readable; nothing was resumed or started in its place",
        ) from error


def take_inventory(folder: Path) -> Inventory:
    """Read the markers of both roots below `folder`.

    Raises:
        StorageError: a folder or marker that exists and may not be read.
    """
    inventory = Inventory()
    for kind in ROOTS:
        root = folder / kind
        with reading(root):
            if not root.is_dir():
                continue
            for step_folder in root.iterdir():
                if match := STEP_FOLDER.fullmatch(step_folder.name):
                    _read_step(inventory, kind, int(match.group(1)), step_folder)
    order = {kind: index for index, kind in enumerate(ROOTS)}
    inventory.marked.sort(key=lambda item: (-item.step, order[item.kind], -item.number))
    inventory.unmarked.sort(key=lambda item: (-item.step, order[item.kind]))
    return inventory


def _read_step(inventory: Inventory, kind: str, step: int, step_folder: Path) -> None:
    has_commit = marked = False
    for entry in step_folder.iterdir():
        if match := COMMIT_FILE.fullmatch(entry.name):
            has_commit = True
            if marker := parse_marker(entry.read_bytes(), step):
                number = int(match.group(1) or 0)
                inventory.marked.append(Candidate(kind, step, number, marker, step_folder))
                marked = True
    if not marked:
        inventory.unmarked.append(Unmarked(kind, step, has_commit))


def read_manifest(candidate: Candidate) -> dict[str, Any]:
    """The manifest, after its digest, and the presence and size of every file it lists.

    Raises:
        CheckpointInvalid: names the file and, for array data, the leaf.
    """
    path = candidate.folder / MANIFEST
    with _damage(candidate, MANIFEST), reading(path):
        manifest = parse_manifest(path.read_bytes(), candidate.marker, candidate.name)
    folder = candidate.folder
    for file in manifest["files"]:
        with _damage(candidate, file["path"], file["leaf"]), reading(folder):
            size = Path(folder, file["path"]).stat().st_size
        if size != file["bytes"]:
            raise _bad_file(candidate, file, f"has {size} bytes instead of {file['bytes']}")
    return manifest


def check_files(candidate: Candidate, manifest: dict[str, Any], verify: str) -> str:
    """Compare digests of the files: all of them, or every 16th; says which, for the record."""
    files = manifest["files"]
    chosen = files if verify == "full" else files[::SAMPLE_EVERY]
    folder = candidate.folder
    for file in chosen:
        with _damage(candidate, file["path"], file["leaf"]), reading(folder):
            found = sha256_file(Path(folder, file["path"]))
        if found != file["sha256"]:
            raise _bad_file(candidate, file, "has changed bytes (SHA-256 differs)")
    return "full" if verify == "full" else f"sampled {len(chosen)} of {len(files)} files"


def read_state(
    candidate: Candidate, manifest: dict[str, Any], verify: str = "full"
) -> tuple[State, str]:
    """Check and decode a checkpoint; returns its leaves and how far the bytes were verified.

    Raises:
        CheckpointInvalid: anything differs from what was saved.
    """
    if verify not in ("full", "sampled"):
        raise ValueError(f"verify is {verify!r}, it must be 'full' or 'sampled'")
    verified = check_files(candidate, manifest, verify)
    with _damage(candidate, ARRAYS), reading(candidate.folder):
        try:
            arrays = read_arrays(candidate.folder / ARRAYS, manifest["leaves"])
        except CheckpointInvalid as problem:
            problem.message = f"{candidate.name}: {problem.message}"
            raise
    if verify == "full" and content_digest(arrays) != manifest["content_digest"]:
        raise CheckpointInvalid(f"{candidate.name}: the decoded state has another content digest")
    return arrays, verified


def first_trusted(
    candidates: list[Candidate],
    attempt: Callable[[Candidate], Any],
    quarantine: Callable[[Candidate, CheckpointInvalid], None],
) -> Any | None:
    """Result of `attempt` for the first candidate it accepts; the others are quarantined."""
    for candidate in candidates:
        try:
            return attempt(candidate)
        except CheckpointInvalid as problem:
            quarantine(candidate, problem)
    return None


@contextlib.contextmanager
def _damage(candidate: Candidate, file: str, leaf: str = "") -> Iterator[None]:
    """A missing or unreadable file, or JSON that does not parse, condemns the checkpoint."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
        raise _bad_file(candidate, {"path": file, "leaf": leaf}, what) from error


def _bad_file(candidate: Candidate, file: dict[str, Any], what: str) -> CheckpointInvalid:
    of_leaf = f" of leaf {file['leaf']}" if file["leaf"] else ""
    return CheckpointInvalid(
        f"{candidate.name}: file {file['path']}{of_leaf} {what}",
        file=file["path"],
        leaf=file["leaf"],
    )


def describe(candidate: Candidate, manifest: dict[str, Any], completeness: str) -> SavedCheckpoint:
    """What a checked manifest says, for the caller and the record."""
    return SavedCheckpoint(
        step=candidate.step,
        kind=candidate.kind,
        attempt=manifest["attempt"],
        folder=candidate.folder,
        manifest_sha256=candidate.marker.manifest_sha256,
        content_digest=manifest["content_digest"],
        num_bytes=sum(file["bytes"] for file in manifest["files"]),
        num_files=len(manifest["files"]),
        completeness=completeness,
        metadata=manifest["metadata"],
    )


def refuse_other_recipe(
    candidate: Candidate,
    manifest: dict[str, Any],
    target_schema: Mapping[str, Any] | None,
    expected: Mapping[str, Any],
) -> None:
    """A checkpoint of another model or optimizer is intact; falling back would not help."""
    problems = []
    if target_schema is not None:
        problems += schema_differences(manifest["leaves"], target_schema)
    for key, wanted in encode_metadata(expected).items():
        saved = manifest["metadata"].get(key, "unknown")
        if saved != wanted:
            problems.append(f"{key} is {saved!r} there and {wanted!r} here")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ResumeRefused(
            f"{candidate.name} was written by another recipe: {'; '.join(problems[:5])}{more}",
            remedy="resume with the recipe that wrote it, or train in a new run",
        )
