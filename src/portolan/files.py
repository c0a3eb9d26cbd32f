"""Atomic writes and digests of files."""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portolan.errors import StorageError

READ_CHUNK_BYTES = 1 << 20
PARTIAL_SUFFIX = ".partial"


def sha256_file(path: Path) -> str:
    """SHA-256 of a file as 64 lower-case hex digits, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_directory(path: Path) -> None:
    """Make the names inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


STORAGE_REMEDIES = {
    errno.ENOSPC: "free some space on this disk and run the same command again",
    errno.EDQUOT: "free some of your quota and run the same command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) and run the same command again",
    errno.EROFS: "this file system is read-only: choose another project folder with -C",
    errno.EACCES: "make the folder writable or choose another project folder with -C",
    errno.EPERM: "make the folder writable or choose another project folder with -C",
    errno.ENOTDIR: "move away the file that stands where a folder is expected",
    errno.EIO: "check the disk: it reported a failure of its own",
}
"""What a user can do about an error of the storage, by its number."""


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn "no space", "read-only" and the like into a StorageError naming `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in STORAGE_REMEDIES:
            raise
        raise StorageError(
            f"cannot write {path}: {os.strerror(error.errno)}",
            remedy=STORAGE_REMEDIES[error.errno],
        ) from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success fsync it and rename it into place.

    On any failure the temporary file is removed and `path` keeps its old content.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX, dir=path.parent
        )
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
            fsync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old bytes or all the new ones."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write indented JSON with sorted keys and a final newline; floats by shortest round trip."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes_atomic(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read a JSON file written by this package."""
    return json.loads(path.read_bytes())
