"""Source registry: each source of the recipe with its files, content digest and licence facts."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from portolan.canonical import step_key
from portolan.data.documents import source_folder_name
from portolan.data.huggingface import CARD, choose_files, read_card
from portolan.data.installed import READERS as INSTALLED_READERS
from portolan.data.installed import TRANSFORMS, list_installed
from portolan.data.licenses import LicenseFacts, classify_license, join_expressions
from portolan.data.readers import (
    CHUNK_BYTES,
    EXTENSIONS,
    InputFile,
    ReadOptions,
    list_files,
    open_file_system,
    open_input,
    unreadable,
)
from portolan.data.staging import stage_files
from portolan.errors import UsageError
from portolan.files import read_json, write_json_atomic
from portolan.recipe import DataSettings
from portolan.source_settings import SourceSettings

MAX_WHITESPACE = 128
CATEGORIES = ("web", "code", "math", "multilingual", "specialized", "agentic")
DIGEST_CACHE = "input-digests.json"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_KINDS_OF_RECORDS = ("jsonl", "parquet", "huggingface")
_FIELDS_OF_RECORDS = ("text_field", "id_field", "license_field")


@dataclass(frozen=True)
class Source:
    """One source of a run, resolved: what will be read, pinned by a digest, and on what terms.

    `content` is the SHA-256 over the lines `sha256  path` of its files. `refused` counts files left
    out because of the licence of their distribution.
    """

    settings: SourceSettings
    options: ReadOptions
    files: tuple[InputFile, ...] = field(repr=False)
    content: str
    license_facts: LicenseFacts
    refused: tuple[InputFile, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique name of the source, which is also the name of its domain."""
        return self.settings.key

    @property
    def revision(self) -> str:
        """The pinned revision, or the content digest of what has none."""
        return self.settings.revision or self.content

    @property
    def license_column(self) -> str:
        """Column of the licence where the documents of this source may differ in it, or empty."""
        if self.settings.license_field:
            return self.settings.license_field
        return "license" if len({file.license for file in self.files}) > 1 else ""

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
        for name in _unread_fields(source.kind):
            if getattr(source, name) != SourceSettings.model_fields[name].default:
                raise UsageError(
                    f"{place}: {name} means nothing for kind {source.kind!r}",
                    remedy=f"remove {name} from this source",
                )
        _check_revision(source)
    _check_named_sources(settings)


def _check_named_sources(settings: DataSettings) -> None:
    """Refuse lists that name a source which the recipe does not have."""
    known = {source.key for source in settings.sources}
    lists = {
        "exempt_sources": settings.fuzzy.exempt_sources,
        "source_rank": settings.fuzzy.source_rank,
        "reviewed_losses": tuple(loss.source for loss in settings.fuzzy.reviewed_losses),
    }
    for name, keys in lists.items():
        if unknown := sorted(set(keys) - known):
            raise UsageError(
                f"data.fuzzy.{name} names {unknown[0]!r}, which is not a source",
                remedy=f"use {', '.join(sorted(known))}",
            )


def _unread_fields(kind: str) -> list[str]:
    """Settings that would change nothing."""
    unread: list[str] = [] if kind in _KINDS_OF_RECORDS else list(_FIELDS_OF_RECORDS)
    if kind == "installed":
        unread += ["path", "content_key", "extensions", "revision", "license_spdx"]
    return unread if kind == "huggingface" else [*unread, "split"]


def is_remote(source: SourceSettings) -> bool:
    """True if the files must be fetched: from a URL that is no local path, or from the hub."""
    if source.kind == "huggingface":
        return not source.path.startswith((".", "/", "~")) and not source.path.startswith("file:")
    return "://" in source.path and not source.path.startswith("file://")


def _check_revision(source: SourceSettings) -> None:
    """Refuse a remote source that may become another one unnoticed."""
    if not is_remote(source):
        return
    if source.kind == "huggingface":
        if not _COMMIT.fullmatch(source.revision):
            raise UsageError(
                f"source {source.key!r}: revision {source.revision!r} of dataset {source.path!r} "
                "is not a commit; a branch moves",
                remedy="set revision to the 40 hex digits of a commit of its history on the hub; "
                "a local copy is written ./folder",
            )
    elif not source.revision:
        raise UsageError(
            f"source {source.key!r}: {source.path} has no revision, so its text could change "
            "between two runs",
            remedy='set revision to the version you mean, e.g. revision = "2026-06-28"; '
            "with sha256: and a content digest it is checked",
        )


def resolve_source(
    source: SourceSettings, settings: DataSettings, project_folder: Path, cache: "DigestCache"
) -> Source:
    """List the files of a source, check its licence, and digest its contents.

    Raises:
        UsageError: nothing is there, or the licence class is not accepted.
    """
    kind = INSTALLED_READERS[source.key] if source.kind == "installed" else source.kind
    checks_documents = bool(source.license_field) and not source.accept
    options = ReadOptions(
        kind=kind,
        max_document_bytes=settings.max_document_bytes,
        text_field=source.text_field,
        id_field=source.id_field,
        content_key=source.content_key,
        license_field=source.license_field,
        license_classes=settings.accepted_license_classes if checks_documents else (),
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
        if not source.license_field and not _is_accepted(source.license_spdx, source, settings):
            raise _refusal(source, facts, settings)
        files = _fetch(source, cache) if is_remote(source) else _list_own(source, project_folder)
    warnings = tuple(
        f"source {source.key!r}: unknown licence {name!r} counts as class 'unknown'"
        for name in facts.unknown
    )
    content = cache.digest(source.key, files)
    if source.revision.startswith("sha256:") and source.revision != f"sha256:{content}":
        raise UsageError(
            f"source {source.key!r}: the content digest of its files is {content}, the revision "
            f"says {source.revision}",
            remedy="fetch the version that you mean, or correct revision",
        )
    return Source(source, options, tuple(files), content, facts, tuple(refused), warnings)


def _fetch(source: SourceSettings, cache: "DigestCache") -> list[InputFile]:
    """Copies of the files of a remote source, below `corpus/inputs`."""
    root, extensions = source.path, _extensions(source)
    if source.kind == "huggingface":
        root = f"hf://datasets/{source.path}@{source.revision}"
    identity = {
        "root": root,
        "revision": source.revision,
        "subset": source.subset,
        "split": source.split,
        "extensions": list(extensions),
    }
    name = f"{source_folder_name(source.key)}_{step_key('inputs', 1, identity, [])}"
    folder = cache.corpus / "inputs" / name

    def choose(files: Sequence[InputFile]) -> Sequence[InputFile]:
        return _choose(source, files, root, extensions)

    return cache.adopt(
        [
            (
                InputFile(
                    str(folder / "files" / staged.path),
                    staged.path,
                    staged.size,
                    (folder / "files" / staged.path).stat().st_mtime_ns,
                    source.license_spdx,
                ),
                staged.sha256,
            )
            for staged in stage_files(source.key, root, folder, extensions, choose)
        ]
    )


def _choose(
    source: SourceSettings, files: Sequence[InputFile], root: str, extensions: Sequence[str]
) -> Sequence[InputFile]:
    """The files of a source out of those listed; a dataset's card has a say in it."""
    if not files:
        ending = f" that end with {', '.join(extensions)}" if extensions else ""
        raise UsageError(
            f"source {source.key!r}: no files in {source.path!r}{ending}",
            remedy="put files there, or correct path, kind or extensions of this source",
        )
    if source.kind != "huggingface":
        return files
    try:
        system, top = open_file_system(f"{root}/{CARD}")
        text = system.cat_file(top).decode() if system.exists(top) else ""
    except Exception as error:  # file systems raise whatever their library raises
        raise unreadable(f"{root}/{CARD}", error) from error
    card = read_card(text, source.key)
    return choose_files(files, card, key=source.key, subset=source.subset, split=source.split)


def _list_own(source: SourceSettings, project_folder: Path) -> list[InputFile]:
    extensions = _extensions(source)
    root = _address(source.path, project_folder)
    files = _choose(source, list_files(root, extensions), root, extensions)
    return [replace(file, license=source.license_spdx) for file in files]


def _extensions(source: SourceSettings) -> tuple[str, ...]:
    return tuple(name.lower() for name in source.extensions) or EXTENSIONS[source.kind]


def _address(path: str, project_folder: Path) -> str:
    path = path.removeprefix("file://")
    return str(project_folder.resolve() / Path(path).expanduser())


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
        self.corpus, self.path = corpus, corpus / DIGEST_CACHE
        self.files: dict[InputFile, str] = {}
        try:
            self.known: dict[str, Any] = dict(read_json(self.path))
        except (OSError, ValueError, TypeError):
            self.known = {}

    def adopt(self, digested: Sequence[tuple[InputFile, str]]) -> list[InputFile]:
        """Take over SHA-256 sums that are known already; returns their files."""
        self.files.update(digested)
        return [file for file, _ in digested]

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
