"""Checkpoints of a run of several processes: each writes and reads the shards that it holds.

The processes see one file system. The lead makes the folders, names the files in the manifest and
marks the checkpoint, so that a reader finds what one process would have written, cut into more
files. It verifies in pieces of at most `PIECE_BYTES`; no process ever holds a whole state.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from portolan.files import read_json
from portolan.train import staging as staged_files
from portolan.train.checkpoint import CheckpointStore, PendingSave, SavedCheckpoint
from portolan.train.crew import Crew
from portolan.train.manifest import (
    ARRAYS,
    MANIFEST,
    CheckpointInvalid,
    canonical,
    describe_leaves,
    leaf_folder,
)
from portolan.train.restore import Candidate, check_files

PIECE_BYTES = 1 << 28


class StoredLeaf:
    """A saved array that is read part by part: `leaf[index]` is a NumPy array."""

    def __init__(self, folder: Path, leaf: Mapping[str, Any]) -> None:
        self.shape, self.dtype = tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        self._store = _open(folder / leaf_folder(leaf["path"])) if 0 not in self.shape else None

    def __getitem__(self, index: Any) -> np.ndarray:
        if self._store is None:
            return np.zeros(self.shape, self.dtype)[index]
        return np.asarray(self._store[index].read().result())


def _open(folder: Path, **options: Any) -> Any:
    import tensorstore

    store = {"driver": "file", "path": f"{folder.absolute()}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, **options).result()


def create_leaves(folder: Path, state: Mapping[str, Any]) -> None:
    """Make the folder of every leaf, cut into chunks as its shards are."""
    import tensorstore

    folder.mkdir()
    for path, leaf in state.items():
        if not leaf.size:
            continue
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{(folder / leaf_folder(path)).absolute()}/"},
            "metadata": {
                "shape": list(leaf.shape),
                "chunks": [max(1, size) for size in leaf.sharding.shard_shape(leaf.shape)],
                "dtype": np.dtype(leaf.dtype).newbyteorder("<").str,
                "compressor": None,
            },
        }
        tensorstore.open(spec, create=True).result()


def write_shards(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the shards whose first copy is on a device of this process, and make them durable.

    Raises:
        OSError: the disk refused a write.
    """
    writing = {}
    for path, leaf in state.items():
        if leaf.size:
            place = folder / leaf_folder(path)
            store = _open(place, write=True)
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    chunk = place / _chunk_name(shard.index, shard.data.shape)
                    writing[chunk] = store[shard.index].write(np.asarray(shard.data))
    try:
        for future in writing.values():
            future.result()
    except ValueError as error:
        raise OSError(str(error)) from error
    staged_files.sync_paths(path for path in writing if path.exists())


def _chunk_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """File of a shard in a Zarr folder; one that holds only zeros has none."""
    starts = ((part.start or 0) // size for part, size in zip(index, shape, strict=True))
    return ".".join(map(str, starts)) or "0"


def stream_digest(folder: Path, leaves: list[dict[str, Any]]) -> str:
    """The content digest of saved leaves, read in pieces."""
    digest = hashlib.sha256()
    for leaf in leaves:
        header = {"dtype": leaf["dtype"], "path": leaf["path"], "shape": leaf["shape"]}
        digest.update(canonical(header))
        for piece in _pieces(StoredLeaf(folder, leaf)):
            digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _pieces(leaf: StoredLeaf, index: tuple[Any, ...] = ()) -> Iterator[np.ndarray]:
    """A leaf in C order, cut along its leading dimensions."""
    shape = leaf.shape[len(index) :]
    if not shape or math.prod(shape) * leaf.dtype.itemsize <= PIECE_BYTES:
        yield leaf[index]
        return
    for position in range(shape[0]):
        yield from _pieces(leaf, (*index, position))


class SharedCheckpointStore(CheckpointStore):
    """`CheckpointStore` of all processes of a run; every method is called by all of them.

    Args:
        crew: the processes.
        others: as of `CheckpointStore`.
    """

    def __init__(self, run_folder: Path | str, *, crew: Crew, **options: Any) -> None:
        self.crew = crew
        if crew.leads:
            super().__init__(run_folder, **options)
        crew.tell(None)
        if not crew.leads:
            super().__init__(run_folder, **options)
        self.writers = [f"process-{index}" for index in range(crew.size)]

    def restore(self, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The newest checkpoint that validates, its leaves to be read part by part."""

        def choose() -> dict[str, Any] | None:
            found = super(SharedCheckpointStore, self).restore(*args, **options)
            return found and _to_json(self.restored)

        told = self.crew.decide(choose)
        if told is None:
            return None
        self.restored = _from_json(told)
        folder = self.restored.folder
        leaves = told["leaves"]
        arrays = {leaf["path"]: StoredLeaf(folder / ARRAYS, leaf) for leaf in leaves}
        return arrays, self.restored.metadata

    def close(self) -> None:
        """Let another process save to this run."""
        if self.crew.leads:
            super().close()

    def _remove_stale_staging(self) -> None:
        if self.crew.leads:
            super()._remove_stale_staging()

    def _read(
        self, candidate: Candidate, manifest: dict[str, Any], verify: str
    ) -> tuple[dict[str, Any], str]:
        """Check bytes and content without holding more than a piece."""
        verified = check_files(candidate, manifest, verify)
        folder = candidate.folder / ARRAYS
        try:
            arrays = {leaf["path"]: StoredLeaf(folder, leaf) for leaf in manifest["leaves"]}
            content = stream_digest(folder, manifest["leaves"])
        except (OSError, ValueError) as error:
            raise CheckpointInvalid(f"{candidate.name} cannot be decoded: {error}") from error
        if verify == "full" and content != manifest["content_digest"]:
            raise CheckpointInvalid(f"{candidate.name}: the state has another content digest")
        return arrays, verified

    def _save(
        self, state: Mapping[str, Any], step: int, kind: str, attempt: int, metadata: dict[str, Any]
    ) -> SavedCheckpoint:
        leaves = dict(sorted(state.items()))
        save = PendingSave(step, kind, attempt, metadata, self._parent(), Path(), leaves)
        save.staging = Path(self.crew.decide(lambda: self._prepare(save)))
        self.crew.together(lambda: write_shards(save.staging / ARRAYS, leaves))
        return _from_json(self.crew.decide(lambda: _to_json(self._finish(save))))

    def _prepare(self, save: PendingSave) -> str:
        """Room, folders and chunks, by the lead."""
        if staged_files.acquire_writer_lock(self._staging):
            staged_files.remove_stale(self._staging)
        self._phase("P1")
        self._check_room(save.arrays, save.kind, save.step)
        self._advance("submitted", save.step)
        folder = self._staging / uuid4().hex
        folder.mkdir(parents=True)
        self._phase("P2")
        create_leaves(folder / ARRAYS, save.arrays)
        return os.fspath(folder)

    def _finish(self, save: PendingSave) -> SavedCheckpoint:
        """Digest, place, mark and verify what all have written, by the lead."""
        self._phase("P3")
        save.digest = stream_digest(save.staging / ARRAYS, describe_leaves(save.arrays))
        try:
            same = self._same_checkpoint(save.kind, save.step, save.digest, save.metadata)
            return same or self._announce(self._publish(save))
        except BaseException:
            self._discard(save)
            raise
        finally:
            staged_files.remove_stale(self._staging)

    def _same_checkpoint(
        self, kind: str, step: int, digest: str, metadata: dict[str, Any]
    ) -> SavedCheckpoint | None:
        for saved in self.list_saved():
            known = (saved.kind, saved.step, saved.content_digest, saved.metadata)
            if known == (kind, step, digest, metadata):
                return self.verify(saved)
        return None


def open_store(run_folder: Path, crew: Crew, **options: Any) -> CheckpointStore:
    """The checkpoints of a run, for as many processes as train it."""
    if crew.is_alone:
        return CheckpointStore(run_folder, **options)
    return SharedCheckpointStore(run_folder, crew=crew, **options)


def _to_json(saved: SavedCheckpoint | None) -> dict[str, Any]:
    assert saved is not None
    manifest = read_json(saved.folder / MANIFEST)
    return asdict(saved) | {"folder": os.fspath(saved.folder), "leaves": manifest["leaves"]}


def _from_json(told: Mapping[str, Any]) -> SavedCheckpoint:
    fields: dict[str, Any] = {name: value for name, value in told.items() if name != "leaves"}
    fields["folder"] = Path(told["folder"])
    return SavedCheckpoint(**fields)
