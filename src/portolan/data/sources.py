"""Source registry: each source of the recipe with its files, content digest and licence facts."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from portolan.data.installed import READERS as INSTALLED_READERS
from portolan.data.installed import TRANSFORMS, list_installed
from portolan.data.licenses import LicenseFacts, classify_license, join_expressions
from portolan.data.readers import (
    CHUNK_BYTES,
    EXTENSIONS,
    InputFile,
    ReadOptions,
    list_files,
    open_input,
    unreadable,
)
from portolan.errors import UsageError
from portolan.files import read_json, write_json_atomic
from portolan.recipe import DataSettings, SourceSettings

MAX_WHITESPACE = 128
CATEGORIES = ("web", "code", "math", "multilingual", "specialized", "agentic")
DIGEST_CACHE = "input-digests.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_FIELDS_OF_RECORDS = ("text_field", "id_field")


@dataclass(frozen=True)
class Source:
    """One source of a run, resolved: what will be read, pinned by a digest, and on what terms.

    `revision` is the pinned revision, or the SHA-256 over the lines `sha256  path` of its files.
    `refused` counts files left out because of the licence of their distribution.
    """

    settings: SourceSettings
    options: ReadOptions
    files: tuple[InputFile, ...] = field(repr=False)
    revision: str
    license_facts: LicenseFacts
    refused: tuple[InputFile, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique name of the source, which is also the name of its domain."""
        return self.settings.key

    @property
    def license_per_document(self) -> bool:
        """True if documents of this source differ in licence."""
        return len({file.license for file in self.files}) > 1

    @property
    def transform(self) -> str:
        """One line: how the text differs from what was found."""
        stated = self.settings.transform or TRANSFORMS.get(self.options.kind, "")
        return "; ".join(filter(None, [stated, f"whitespace runs cut to {MAX_WHITESPACE}"]))


def check_settings(settings: DataSettings) -> None:
    """Refuse keys that cannot name a folder, unknown categories and fields that nobody would read.

    Raises:
        UsageError: names the source, the field and the remedy.
    """
    folded: dict[str, str] = {}
    for source in settings.sources:
        place = f"source {source.key!r}"
        if not _KEY.fullmatch(source.key):
            raise UsageError(
                f"{place}: this key cannot name a folder",
                remedy="use letters, digits, '.', '_', '-', and '/' between such words",
            )
        if (other := folded.setdefault(source.key.lower(), source.key)) != source.key:
            raise UsageError(
                f"{place} and source {other!r} differ only in upper and lower case",
                remedy="rename one: some file systems would mix their folders",
            )
        if source.category not in CATEGORIES:
            raise UsageError(
                f"{place}: unknown category {source.category!r}",
                remedy=f"use one of {', '.join(CATEGORIES)}",
            )
        unread = [] if source.kind in ("jsonl", "parquet") else list(_FIELDS_OF_RECORDS)
        if source.kind == "installed":
            unread += ["path", "content_key", "extensions", "revision", "license_spdx"]
        for name in unread:
            if getattr(source, name) != SourceSettings.model_fields[name].default:
                raise UsageError(
                    f"{place}: {name} means nothing for kind {source.kind!r}",
                    remedy=f"remove {name} from this source",
                )


def resolve_source(
    source: SourceSettings, settings: DataSettings, project_folder: Path, cache: "DigestCache"
) -> Source:
    """List the files of a source, check its licence, and digest its contents.

    Raises:
        UsageError: nothing is there, or the licence class is not accepted.
    """
    kind = INSTALLED_READERS[source.key] if source.kind == "installed" else source.kind
    options = ReadOptions(
        kind=kind,
        max_document_bytes=settings.max_document_bytes,
        text_field=source.text_field,
        id_field=source.id_field,
        content_key=source.content_key,
    )
    refused: list[InputFile] = []
    if source.kind == "installed":
        listed = list_installed(source.key)
        accepted = {
            name: _is_accepted(name or "", source, settings)
            for name in {file.license for file in listed}
        }
        files = [file for file in listed if accepted[file.license]]
        refused = [file for file in listed if not accepted[file.license]]
        facts = classify_license(join_expressions({file.license or "" for file in files or listed}))
        if refused and not files:
            raise _refusal(source, facts, settings)
    else:
        facts = classify_license(source.license_spdx)
        if not _is_accepted(source.license_spdx, source, settings):
            raise _refusal(source, facts, settings)
        files = _list_own_files(source, project_folder)
    warnings = tuple(
        f"source {source.key!r}: unknown licence {name!r} counts as class 'unknown'"
        for name in facts.unknown
    )
    revision = source.revision or cache.digest(source.key, files)
    return Source(source, options, tuple(files), revision, facts, tuple(refused), warnings)


def _list_own_files(source: SourceSettings, project_folder: Path) -> list[InputFile]:
    extensions = _extensions(source)
    files = list_files(_address(source.path, project_folder), extensions)
    if not files:
        ending = f" that end with {', '.join(extensions)}" if extensions else ""
        raise UsageError(
            f"source {source.key!r}: no files in {source.path!r}{ending}",
            remedy="put files there, or correct path, kind or extensions of this source",
        )
    return [replace(file, license=source.license_spdx) for file in files]


def _extensions(source: SourceSettings) -> tuple[str, ...]:
    return tuple(name.lower() for name in source.extensions) or EXTENSIONS[source.kind]


def _address(path: str, project_folder: Path) -> str:
    return path if "://" in path else str(project_folder.resolve() / Path(path).expanduser())


def _is_accepted(expression: str, source: SourceSettings, settings: DataSettings) -> bool:
    facts = classify_license(expression)
    return bool(source.accept) or facts.license_class in settings.accepted_license_classes


def _refusal(source: SourceSettings, facts: LicenseFacts, settings: DataSettings) -> UsageError:
    return UsageError(
        f"source {source.key!r}: licence {facts.expression!r} is of class "
        f"{facts.license_class!r}; this recipe accepts "
        f"{', '.join(settings.accepted_license_classes)}",
        remedy="state its licence in license_spdx, add the class to accepted_license_classes, or "
        'give the reason why this source may be used in accept = "..."',
    )


def _sha256_of(file: InputFile) -> str:
    digest = hashlib.sha256()
    with open_input(file.url) as stream:
        try:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        except OSError as error:
            raise unreadable(file.url, error) from error
    return digest.hexdigest()


def content_digest(files: Sequence[InputFile], known: dict[InputFile, str] | None = None) -> str:
    """SHA-256 over the lines `sha256  path` of files in order, as sha256sum prints them.

    `known` remembers digests of files between calls.
    """
    known = {} if known is None else known
    with ThreadPoolExecutor(max_workers=2) as pool:
        missing = [file for file in files if file not in known]
        known |= zip(missing, pool.map(_sha256_of, missing), strict=True)
    total = hashlib.sha256()
    for file in files:
        total.update(f"{known[file]}  {file.path}\n".encode())
    return total.hexdigest()


class DigestCache:
    """Content digests of local sources, remembered by path, size and modification time.

    It saves reading a large corpus again only to learn that nothing changed. Losing it costs time,
    never correctness.
    """

    def __init__(self, corpus: Path) -> None:
        self.path = corpus / DIGEST_CACHE
        self.files: dict[InputFile, str] = {}
        try:
            self.known: dict[str, Any] = dict(read_json(self.path))
        except (OSError, ValueError, TypeError):
            self.known = {}

    def digest(self, key: str, files: Sequence[InputFile]) -> str:
        """Content digest of the files of source `key`."""
        if any(file.modified_ns is None for file in files):
            return content_digest(files)
        state = xxhash.xxh3_128()
        for file in files:
            state.update(f"{file.path}\0{file.size}\0{file.modified_ns}\n".encode())
        status = state.hexdigest()
        entry = self.known.get(key)
        if isinstance(entry, dict) and entry.get("status") == status and "digest" in entry:
            return entry["digest"]
        digest = content_digest(files, self.files)
        self.known[key] = {"status": status, "digest": digest}
        write_json_atomic(self.path, self.known)
        return digest
