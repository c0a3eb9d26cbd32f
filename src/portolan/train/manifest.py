"""What a checkpoint holds and how its bytes are named: leaves, content digest, manifest, marker."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from portolan.errors import PortolanError, UsageError
from portolan.files import sha256_file

FORMAT = "portolan.checkpoint.v1"
ARRAYS = "arrays"
MANIFEST = "manifest.json"
LEAF_PATH = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")

State = dict[str, np.ndarray]


class CheckpointInvalid(PortolanError):
    """A checkpoint whose marker, manifest or bytes are not what was saved.

    Args:
        file: the offending file, relative to the attempt folder; empty for the checkpoint itself.
        leaf: path of the state leaf the file belongs to; empty when it belongs to none.
    """

    def __init__(self, message: str, *, file: str = "", leaf: str = "") -> None:
        super().__init__(message, remedy="restore an older checkpoint or a copy of this one")
        self.file = file
        self.leaf = leaf


@dataclass(frozen=True)
class Marker:
    """Content of a COMMIT file: which attempt folder of a step counts, and its manifest."""

    step: int
    attempt: int
    manifest_sha256: str

    def encode(self) -> bytes:
        """Canonical JSON, one line."""
        return canonical(
            {
                "attempt": self.attempt,
                "format": FORMAT,
                "manifest_sha256": self.manifest_sha256,
                "step": self.step,
            }
        )


def canonical(value: dict[str, Any]) -> bytes:
    """RFC 8785 bytes of an object with ASCII keys and no floats."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def leaf_folder(path: str) -> str:
    """Folder of a leaf below `arrays/`: `opt/count` is stored in `opt.count`."""
    return path.replace("/", ".")


def host_arrays(state: Mapping[str, Any]) -> State:
    """The leaves as NumPy arrays in host memory, native byte order, sorted by path.

    Raises:
        UsageError: a leaf whose path or type cannot be stored, named by its path.
    """
    if not state:
        raise UsageError("the state to save has no leaves", remedy="pass {path: array}")
    return {path: _host_array(path, state[path]) for path in sorted(state)}


def _host_array(path: str, value: Any) -> np.ndarray:
    if not LEAF_PATH.fullmatch(path):
        raise UsageError(
            f"state leaf {path!r}: a path is words of letters, digits, '_' and '-' joined by '/'",
            remedy="rename the leaf",
        )
    if not getattr(value, "is_fully_addressable", True):
        raise UsageError(
            f"state leaf {path}: its shards are spread over several processes",
            remedy="gather it to one process before saving",
        )
    try:
        array = np.asarray(value)
    except TypeError as error:
        raise UsageError(
            f"state leaf {path}: {error}", remedy="save random keys as jax.random.key_data(key)"
        ) from error
    if array.dtype.kind not in "biufc" and not hasattr(ml_dtypes, array.dtype.name):
        raise UsageError(
            f"state leaf {path}: type {array.dtype} is not numeric", remedy="put it in the metadata"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def content_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 of the leaves in path order, each a canonical header and its little-endian bytes.

    Equal states have equal digests whatever the attempt, the time, the writer or the file layout.
    """
    digest = hashlib.sha256()
    for path, array in host_arrays(state).items():
        header = {"dtype": array.dtype.name, "path": path, "shape": list(array.shape)}
        digest.update(canonical(header))
        contiguous = np.ascontiguousarray(array)
        digest.update(contiguous.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def describe_leaves(arrays: State) -> list[dict[str, Any]]:
    """The tree schema: path, shape, dtype and layout of every leaf, in path order."""
    return [
        {"path": path, "shape": list(array.shape), "dtype": array.dtype.name, "layout": "c_order"}
        for path, array in arrays.items()
    ]


def describe_files(folder: Path, leaves: Iterable[str]) -> list[dict[str, Any]]:
    """Path, bytes, SHA-256 and leaf of every file below `folder`, sorted by path."""
    owners = {leaf_folder(path): path for path in leaves}

    def describe(name: str) -> dict[str, Any]:
        path = Path(folder, name)
        leaf = owners.get(name.split("/")[1], "")
        size = path.stat().st_size
        return {"path": name, "bytes": size, "sha256": sha256_file(path), "leaf": leaf}

    return [describe(name) for name in walk_files(folder)]


def walk_files(folder: Path) -> list[str]:
    """Names of all files below `folder`, relative to it, with `/`, sorted."""
    found = []
    for parent, _, names in os.walk(folder):
        prefix = Path(parent).relative_to(folder).as_posix()
        found += [name if prefix == "." else f"{prefix}/{name}" for name in names]
    return sorted(found)


def utc_now() -> str:
    """This moment as RFC 3339 UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes: indented JSON with sorted keys; NaN and infinity are refused."""
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as it will be read back from JSON.

    Raises:
        UsageError: a value that JSON cannot hold.
    """
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"checkpoint metadata cannot be written as JSON: {error}",
            remedy="use strings, integers, finite floats, lists and dicts",
        ) from error


def parse_marker(content: bytes, step: int) -> Marker | None:
    """The marker in a COMMIT file, or None if the bytes are not one for this step."""
    try:
        value = json.loads(content)
        marker = Marker(value["step"], value["attempt"], value["manifest_sha256"])
    except (ValueError, KeyError, TypeError):
        return None
    return marker if marker.step == step and marker.encode() == content else None


def parse_manifest(content: bytes, marker: Marker, name: str) -> dict[str, Any]:
    """The manifest of checkpoint `name` that `marker` points to.

    Raises:
        CheckpointInvalid: its bytes have another digest, or it describes something else.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != marker.manifest_sha256:
        raise CheckpointInvalid(
            f"{name}: file {MANIFEST} has digest {found[:12]}…, "
            f"COMMIT names {marker.manifest_sha256[:12]}…",
            file=MANIFEST,
        )
    manifest = json.loads(content)
    if manifest.get("format") != FORMAT or manifest["step"]["completed"] != marker.step:
        raise CheckpointInvalid(f"{name}: file {MANIFEST} is not a {FORMAT}", file=MANIFEST)
    for file in manifest["files"]:
        path = PurePosixPath(file["path"])
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointInvalid(f"{name}: file {path} lies outside", file=MANIFEST)
    return manifest


def schema_of(leaves: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """{path: (shape, dtype name)} of arrays, shape structs or (shape, dtype) pairs."""
    result = {}
    for path, leaf in leaves.items():
        shape, dtype = leaf if isinstance(leaf, tuple) else (leaf.shape, leaf.dtype)
        result[path] = (tuple(shape), np.dtype(dtype).name)
    return result


def schema_differences(saved: list[dict[str, Any]], target: Mapping[str, Any]) -> Iterator[str]:
    """One sentence per leaf that the saved state and the target schema do not share."""
    found = {leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in saved}
    wanted = schema_of(target)
    for path in sorted(found.keys() | wanted.keys()):
        if path not in found:
            yield f"{path} is not in the checkpoint"
        elif path not in wanted:
            yield f"{path} is in the checkpoint only"
        elif found[path] != wanted[path]:
            yield f"{path} is {_show(found[path])} there and {_show(wanted[path])} here"


def _show(leaf: tuple[tuple[int, ...], str]) -> str:
    return f"{leaf[1]}{list(leaf[0])}"
