"""Files from elsewhere, copied into the project before they are read.

A copy is complete, of the stated size and version, and digested, or it is not there. What a killed
or broken run has fetched is kept, and the next run goes on from it.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from portolan.data.readers import CHUNK_BYTES, InputFile, list_files, open_file_system
from portolan.errors import UsageError
from portolan.files import PARTIAL_SUFFIX, read_json, sha256_file, storage_errors, write_json_atomic

MANIFEST = "manifest.json"
JOURNAL = "fetched.jsonl"
ATTEMPTS = 3
RETRY_SECONDS = 0.5
# What file systems call the version of a file; the first that is there counts.
VERSION_FIELDS = (
    *("etag", "ETag", "xet_hash", "blob_id", "md5Hash", "md5", "mtime", "LastModified"),
    *("last_modified", "Last-Modified", "modified", "created"),
)
AGAIN = "run the same command again: what has been fetched is kept"


@dataclass(frozen=True)
class StagedFile:
    """A file that was fetched whole: relative path, bytes, the upstream's version, SHA-256."""

    path: str
    size: int
    version: str
    sha256: str


Choose = Callable[[Sequence[InputFile]], Sequence[InputFile]]


def stage_files(
    key: str, root: str, folder: Path, extensions: Sequence[str], choose: Choose
) -> list[StagedFile]:
    """Fetch the chosen files below the URL `root` into `folder / "files"`, in order of their paths.

    A complete folder is taken as it is, without a request. Memory: one chunk.

    Raises:
        UsageError: the place cannot be listed, nothing is chosen, or a file vanishes, changes while
            it is read, or is cut short.
        StorageError: the disk is full or cannot be written.
    """
    if (known := _complete(folder)) is not None:
        return known
    chosen = sorted(choose(list_files(root, extensions)), key=lambda file: file.path.encode())
    with storage_errors(folder):
        (folder / "files").mkdir(parents=True, exist_ok=True)
        fetched = _read_journal(folder)
        staged = []
        for file in chosen:
            entry = fetched.get(file.path)
            if entry is None or _size_of(folder / "files" / file.path) != entry.size:
                entry = _Download(key, file, folder / "files" / file.path).run()
                with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps(asdict(entry)) + "\n")
            staged.append(entry)
        write_json_atomic(folder / MANIFEST, {"files": [asdict(entry) for entry in staged]})
        (folder / JOURNAL).unlink(missing_ok=True)
    return staged


def _complete(folder: Path) -> list[StagedFile] | None:
    """Entries of a folder whose files all have their sizes, or None."""
    try:
        staged = [StagedFile(**entry) for entry in read_json(folder / MANIFEST)["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_whole = all(_size_of(folder / "files" / file.path) == file.size for file in staged)
    return staged if is_whole else None


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _read_journal(folder: Path) -> dict[str, StagedFile]:
    """Files that an unfinished run has fetched; a torn last line is passed over."""
    fetched: dict[str, StagedFile] = {}
    if (folder / JOURNAL).is_file():
        for line in (folder / JOURNAL).read_text("utf-8").splitlines():
            try:
                entry = StagedFile(**json.loads(line))
            except (ValueError, TypeError):
                continue
            fetched[entry.path] = entry
    return fetched


@dataclass
class _Download:
    """One file on its way: `target` appears when all of it is there."""

    key: str
    file: InputFile
    target: Path

    def run(self) -> StagedFile:
        """Fetch the file; a broken connection is tried again from where it broke."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        partial = self.target.with_name(f".{self.target.name}{PARTIAL_SUFFIX}")
        stamp = self.target.with_name(f".{self.target.name}.version")
        size, version = self._describe()
        if not version or not stamp.is_file() or stamp.read_text("utf-8") != version:
            partial.unlink(missing_ok=True)
            stamp.write_text(version, "utf-8")
        for attempt in range(ATTEMPTS):
            try:
                self._copy(partial)
                break
            except _BrokenRead as broken:
                if attempt + 1 == ATTEMPTS:
                    raise self._error(f"breaks off: {broken.cause}", AGAIN) from broken.cause
                time.sleep(RETRY_SECONDS * (attempt + 1))
        found = partial.stat().st_size
        if self._describe() != (size, version):
            partial.unlink()
            raise self._error("changed while it was read", "run again, or pin another revision")
        if size is not None and found != size:
            partial.unlink()
            raise self._error(f"has {found} bytes, its server says {size}", AGAIN)
        digest = sha256_file(partial)
        partial.replace(self.target)
        stamp.unlink()
        return StagedFile(self.file.path, found, version, digest)

    def _describe(self) -> tuple[int | None, str]:
        """Size, if the server states it, and version of the file upstream."""
        try:
            system, path = open_file_system(self.file.url)
            if "hf" not in _protocols(system):  # a commit cannot change, and listing it takes long
                system.invalidate_cache()
            facts = system.info(path)
        except Exception as error:
            raise self._error(f"has gone: {error or type(error).__name__}", AGAIN) from error
        version = next((str(facts[name]) for name in VERSION_FIELDS if facts.get(name)), "")
        return facts.get("size"), version

    def _copy(self, partial: Path) -> None:
        """Append what `partial` lacks; from the beginning where a server cannot skip."""
        offset = _size_of(partial) or 0
        with partial.open("ab") as sink:
            try:
                with self._open(offset) as stream:
                    while chunk := _read(stream):
                        sink.write(chunk)
            except _CannotSkip:
                sink.truncate(0)
                with self._open(0) as stream:
                    while chunk := _read(stream):
                        sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())

    def _open(self, offset: int) -> Any:
        system, path = open_file_system(self.file.url)
        streams = offset == 0 and _protocols(system) & {"http", "https", "hf"}
        try:
            stream = system.open(path, "rb", **({"block_size": 0} if streams else {}))
        except Exception as error:
            raise _BrokenRead(error) from error
        if offset:
            try:
                stream.seek(offset)
                stream.read(0)
            except ValueError as error:
                stream.close()
                raise _CannotSkip from error
        return stream

    def _error(self, problem: str, remedy: str) -> UsageError:
        return UsageError(f"source {self.key!r}: {self.file.url} {problem}", remedy=remedy)


class _BrokenRead(Exception):
    """Reading from elsewhere failed; file systems raise whatever their library raises."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _CannotSkip(Exception):
    """The server sends a file only from its beginning."""


def _protocols(system: Any) -> set[str]:
    names = system.protocol
    return {names} if isinstance(names, str) else set(names)


def _read(stream: Any) -> bytes:
    try:
        return stream.read(CHUNK_BYTES)
    except ValueError as error:
        if "range" in str(error).lower():
            raise _CannotSkip from error
        raise _BrokenRead(error) from error
    except Exception as error:
        raise _BrokenRead(error) from error
