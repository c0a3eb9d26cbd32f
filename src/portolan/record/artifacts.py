"""Artifact bodies made from files of a project."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.files import sha256_file
from portolan.record.types import Artifact, FileEntry, files_digest


def describe_files(project: Path, paths: Iterable[Path]) -> tuple[FileEntry, ...]:
    """Path relative to the project, bytes and SHA-256 of files; folders count with their files."""
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist and cannot be recorded")
        found |= {item for item in path.rglob("*") if item.is_file()} if path.is_dir() else {path}
    return tuple(
        FileEntry(
            path=item.absolute().relative_to(project.absolute()).as_posix(),
            bytes=item.stat().st_size,
            sha256=sha256_file(item),
        )
        for item in sorted(found)
    )


def artifact_of(
    project: Path, paths: Sequence[Path], *, kind: str, text: str, **fields: Any
) -> Artifact:
    """Artifact body of files or folders inside a project.

    Licences default to `NOASSERTION`, redistribution to `withheld`, completeness to
    `bytes_verified` (the bytes were just read); `fields` overrides them.
    """
    files = describe_files(project, paths)
    defaults: dict[str, Any] = {
        "digests": {"files": files_digest(files)},
        "licence_declared": "NOASSERTION",
        "licence_concluded": "NOASSERTION",
        "redistribution": "withheld",
        "retain_until": "not_stated",
        "completeness": "bytes_verified",
    }
    total = sum(entry.bytes for entry in files)
    return Artifact.model_validate(
        {**defaults, **fields, "kind": kind, "text": text, "files": files, "bytes": total}
    )
