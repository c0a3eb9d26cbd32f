"""Immutable bytes of a record, named by their SHA-256."""

import hashlib
from pathlib import Path

from portolan.errors import PortolanError
from portolan.files import sha256_file, write_bytes_atomic


def blob_path(folder: Path, digest: str) -> Path:
    """Place of a blob in the record folder."""
    return folder / "blobs" / "sha256" / digest[:2] / digest


def add_blob(folder: Path, content: bytes) -> str:
    """Store `content` once and return its digest."""
    digest = hashlib.sha256(content).hexdigest()
    path = blob_path(folder, digest)
    if not path.exists():
        write_bytes_atomic(path, content)
    return digest


def read_blob(folder: Path, digest: str) -> bytes:
    """Bytes of a blob; PortolanError if they are missing or not what their name says."""
    path = blob_path(folder, digest)
    content = path.read_bytes() if path.is_file() else None
    if content is None or hashlib.sha256(content).hexdigest() != digest:
        state = "missing" if content is None else "changed"
        raise PortolanError(f"the blob {path} is {state}", remedy="restore it from a copy")
    return content


def blob_fault(folder: Path, digest: str) -> str:
    """`missing`, `changed`, or empty when the blob is as its name says."""
    path = blob_path(folder, digest)
    if not path.is_file():
        return "missing"
    return "" if sha256_file(path) == digest else "changed"
