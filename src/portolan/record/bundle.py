"""The bundle: one archive with all that a stranger needs to check a sealed record offline."""

import hashlib
import html
import json
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.canonical import canonical, parse
from portolan.errors import PortolanError, UsageError
from portolan.files import atomic_file, sha256_file
from portolan.record.blobs import blob_path
from portolan.record.bundle_names import check_names
from portolan.record.bundle_read import MAX_FILES
from portolan.record.chain import Record
from portolan.record.exports import (
    BundledFile,
    attempt_statement,
    seal_statement,
    sign_statement,
)
from portolan.record.exports_crate import CRATE_FILE, describe_crate
from portolan.record.exports_croissant import CROISSANT_FILE, describe_data
from portolan.record.journal import Journal
from portolan.record.licences import SOURCE_ROW
from portolan.record.reach_locators import records_in_force
from portolan.record.rules import blobs_in
from portolan.record.seal_body import Seal
from portolan.record.visible import visible

STATEMENT_FILE = "statement.dsse.json"
GUIDE_FILE = "README.txt"
SITE = "site"
METADATA_KINDS = ("metrics", "forecast", "report")
"""Figures about a run: they hold neither text of the corpus nor weights."""

BULK_KINDS = ("checkpoint", "dataset", "release", "container")
"""Named by digest only, however they may be passed on."""

GUIDE = """\
This archive is the sealed record of a training run.

  portolan verify FILE

checks it without a network. By hand: `sha256sum` of each file must be as statement.dsse.json says
(its payload is base64), and each line of record/journal.jsonl holds the SHA-256 of the line before
as `prev`. The whole procedure is in docs/record-format.md of the program.

site/index.html is the page of the run: it opens in a browser, also without a network.

Hashes prove sameness, not truth. `portolan verify --limits` says what cannot be shown.
"""

LEFT_OUT = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Page left out</title>
<p>This page quotes documents of the corpus, and not all of them may be passed on: {reason}. It is
in the project that this archive was made from. <a href="index.html">Other pages</a></p>
</html>
"""

_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Entry:
    """A file of the bundle: either bytes, or a place on disk that is read twice in pieces."""

    name: str
    content: bytes = b""
    path: Path | None = None

    def describe(self) -> BundledFile:
        if self.path is None:
            digest = hashlib.sha256(self.content).hexdigest()
            return BundledFile(self.name, len(self.content), digest)
        return BundledFile(self.name, self.path.stat().st_size, sha256_file(self.path))


def write_bundle(
    project: Path, target: Path, journal: Journal, quoting: Collection[str] = ()
) -> list[BundledFile]:
    """Write the bundle of a sealed project; the same record and pages give the same bytes.

    `quoting` names pages, relative to the project, that quote documents of the corpus: they enter
    only if every source may be passed on. UsageError without a seal, PortolanError if a blob or a
    file is missing or the archive would be too large. Never contains a private key, weights or
    token shards.
    """
    records = list(journal.records())
    seal = next((record for record in reversed(records) if record.type == "seal"), None)
    if seal is None:
        raise UsageError("the record has no seal", remedy="run `portolan seal` first")
    entries = [
        *_record_entries(journal, records),
        *_project_entries(project, journal, records, seal, quoting),
    ]
    entries += _statements(journal, records)
    entries.append(_Entry(GUIDE_FILE, GUIDE.encode()))
    entries.sort(key=lambda entry: entry.name)
    files = [entry.describe() for entry in entries]
    name = str(records[0].body.get("name", "a run"))
    crate = describe_crate(name, seal.time, files, [STATEMENT_FILE])
    entries.append(_Entry(CRATE_FILE, _json(crate)))
    files.append(entries[-1].describe())
    envelope = sign_statement(journal, seal_statement(files, seal))
    entries.append(_Entry(STATEMENT_FILE, canonical(envelope) + b"\n"))
    files.append(entries[-1].describe())
    check_names(entry.name for entry in entries)
    _write_archive(target, entries, files)
    return files


def _record_entries(journal: Journal, records: Iterable[Record]) -> Iterator[_Entry]:
    folder = journal.folder
    yield _Entry("record/journal.jsonl", path=journal.path)
    for part in ("heads", "witness"):
        for path in sorted((folder / part).glob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield _Entry(f"record/{part}/{path.name}", path=path)
    digests = {digest for record in records for digest in blobs_in(record.body)}
    for digest in sorted(digests):
        path = blob_path(folder, digest)
        if not path.is_file():
            raise PortolanError(f"the blob {digest} is missing", remedy="run `portolan verify`")
        yield _Entry(f"record/blobs/sha256/{digest[:2]}/{digest}", path=path)


def _project_entries(
    project: Path,
    journal: Journal,
    records: Iterable[Record],
    seal: Record,
    quoting: Collection[str],
) -> Iterator[_Entry]:
    """The pages, the files that may be passed on, and the description of the data."""
    rows = parse(journal.read_blob(seal.body["licences"]))
    pages = {entry.name: entry for entry in _pages(project, quoting, _why_not_quoted(rows))}
    yield from pages.values()
    redistribution = {row["name"]: row["redistribution"] for row in rows}
    found: dict[str, Path] = {}
    for record in records_in_force(records):
        if record.type == "artifact" and _may_enter(record, redistribution):
            for entry in record.body.get("files", ()):
                found[entry["path"]] = project / entry["path"]
    for name, path in found.items():
        if name in pages:
            continue
        if not path.is_file():
            raise PortolanError(f"the file {name} is missing", remedy="run `portolan verify`")
        yield _Entry(name, path=path)
    if seal.body["data_manifest"] != "not_stated":
        manifest = parse(journal.read_blob(seal.body["data_manifest"]))
        runs = Seal.model_validate(seal.body).runs
        yield _Entry(CROISSANT_FILE, _json(describe_data(manifest, runs, seal.time)))


def _why_not_quoted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why documents of the corpus may not be quoted, empty if they may."""
    sources = [row for row in rows if row["name"].startswith(SOURCE_ROW)]
    if not sources:
        return "the licence table names no source"
    closed = [row for row in sources if row["redistribution"] != "public"]
    return "; ".join(f"{row['name']} is {row['redistribution']}" for row in closed)


def _pages(project: Path, quoting: Collection[str], reason: str) -> Iterator[_Entry]:
    """Every page of the site, with a note in place of those that may not be passed on."""
    for path in sorted((project / SITE).rglob("*.html")):
        name = path.relative_to(project).as_posix()
        if reason and name in quoting:
            yield _Entry(name, LEFT_OUT.format(reason=html.escape(visible(reason))).encode())
        else:
            yield _Entry(name, path=path)


def _may_enter(record: Record, redistribution: Mapping[str, str]) -> bool:
    kind = record.body["kind"]
    access = redistribution.get(record.id, record.body["redistribution"])
    if kind in METADATA_KINDS:
        return access in ("public", "metadata_only")
    return access == "public" and kind not in BULK_KINDS


def _statements(journal: Journal, records: Iterable[Record]) -> Iterator[_Entry]:
    """Provenance of each attempt; an artifact counts for the attempt that ran when it was made."""
    kept = list(records)
    starts: dict[tuple[str, int], int] = {}
    for record in kept:
        if record.type == "attempt":
            starts.setdefault((record.body["run"], record.body["ordinal"]), record.seq)
    in_force = records_in_force(kept)
    made: dict[tuple[str, int], list[Record]] = {}
    for record in in_force:
        if record.type == "artifact" and "name" in record.body:
            run = record.body["name"].partition(" ")[0]
            own = [(seq, key) for key, seq in starts.items() if key[0] == run and seq < record.seq]
            if own:
                made.setdefault(max(own)[1], []).append(record)
    for record in in_force:
        if record.type == "attempt":
            key = (record.body["run"], record.body["ordinal"])
            envelope = sign_statement(journal, attempt_statement(record, made.get(key, ())))
            yield _Entry(f"provenance/attempt-{starts[key]}.dsse.json", canonical(envelope) + b"\n")


def _write_archive(target: Path, entries: list[_Entry], files: list[BundledFile]) -> None:
    if len(entries) > MAX_FILES:
        raise PortolanError(f"the bundle would hold {len(entries)} files, at most {MAX_FILES} fit")
    with atomic_file(target) as temporary:
        try:
            with zipfile.ZipFile(temporary, "w", allowZip64=False) as archive:
                for entry, described in zip(entries, files, strict=True):
                    _add(archive, entry, described)
        except zipfile.LargeZipFile as error:
            raise PortolanError(
                "the bundle would be larger than 4 GiB",
                remedy="mark large artifacts metadata_only in licences.toml and seal again",
            ) from error


def _add(archive: zipfile.ZipFile, entry: _Entry, described: BundledFile) -> None:
    """Files are stored as they are: no packing library can then change the archive's bytes."""
    info = zipfile.ZipInfo(entry.name, _EPOCH)
    info.create_system = 3
    info.external_attr = 0o100644 << 16
    info.file_size = described.num_bytes
    if entry.path is None:
        archive.writestr(info, entry.content)
        return
    with entry.path.open("rb") as source, archive.open(info, "w") as output:
        while chunk := source.read(_CHUNK_BYTES):
            output.write(chunk)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
