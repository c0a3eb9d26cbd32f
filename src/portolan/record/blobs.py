"""Immutable bytes of a record, named by their SHA-256."""

import hashlib
import re
import stat
from pathlib import Path

from portolan.errors import PortolanError
from portolan.files import sha256_file, write_bytes_atomic

_DIGEST = re.compile(r"[0-9a-f]{64}")


def blob_path(folder: Path, digest: str) -> Path:
    """Place of a blob in the record folder.

    Raises:
        PortolanError: the name is not a SHA-256, for instance a path.
    """
    if not _DIGEST.fullmatch(digest):
        raise PortolanError(
            f"{digest[:80]!r} does not name a blob",
            remedy="a blob is named by the 64 hex digits of its SHA-256",
        )
    return folder / "blobs" / "sha256" / digest[:2] / digest


def add_blob(folder: Path, content: bytes) -> str:
    """Store `content` once and return its digest."""
    digest = hashlib.sha256(content).hexdigest()
    path = blob_path(folder, digest)
    if _kind(path) != "":
        write_bytes_atomic(path, content)
    return digest


def read_blob(folder: Path, digest: str) -> bytes:
    """Bytes of a blob; PortolanError if they are missing, linked, or not what their name says."""
    path = blob_path(folder, digest)
    state = blob_fault(folder, digest)
    if state:
        raise PortolanError(f"the blob {path} is {state}", remedy="restore it from a copy")
    return path.read_bytes()


def blob_fault(folder: Path, digest: str) -> str:
    """`missing`, `a symbolic link`, `changed`, or empty when the blob is as its name says."""
    path = blob_path(folder, digest)
    if kind := _kind(path):
        return kind
    return "" if sha256_file(path) == digest else "changed"


def _kind(path: Path) -> str:
    """What stands at a path instead of a plain file; empty for a plain file."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "" if stat.S_ISREG(mode) else "not a file"
