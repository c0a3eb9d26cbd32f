"""Curation in order: normalise each source, exact dedup, held-out documents, training shards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from portolan.data.dedup import NormalizedSource, find_duplicates, in_key_order, read_ids
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    read_tables,
    remove_partial,
    run_stage,
    source_folder_name,
    write_shard,
)
from portolan.data.heldout import HELDOUT_NAME, take_heldout
from portolan.data.installed import forget_listings
from portolan.data.normalize import normalize_source
from portolan.data.provenance import provenance_row, read_provenance, write_provenance
from portolan.data.sources import DigestCache, Source, check_settings, resolve_source
from portolan.data.workers import WorkerPool
from portolan.errors import PortolanError, UsageError
from portolan.recipe import DataSettings

VERSION = 1
GLOBAL_DUP, HELDOUT, NEAR_HELDOUT = "global_dup", "heldout", "near_heldout"
# A source that loses more than this share to the overlap with held-out text is worth a look.
LARGE_LOSS = 0.5


@dataclass(frozen=True)
class CurationProgress:
    """A finished step of curation: documents and text bytes it handled, and seconds it took."""

    step: str
    source: str
    documents: int
    text_bytes: int
    seconds: float
    skipped: bool


Report = Callable[[CurationProgress], None]


@dataclass(frozen=True)
class CuratedSource:
    """What is left of a source: shards for training and held-out shards, and where the rest went.

    `dropped` counts documents by the first reason that removed them, held-out ones included; read =
    sum of dropped + train_documents.
    """

    key: str
    category: str
    train_shards: tuple[Path, ...]
    heldout_shards: tuple[Path, ...]
    documents_manifest: Path
    read: int
    dropped: dict[str, int]
    train_documents: int
    train_text_bytes: int
    heldout_documents: int
    heldout_text_bytes: int
    license_class: str

    @property
    def is_empty(self) -> bool:
        """True if nothing of the source is left for training."""
        return self.train_documents == 0


@dataclass(frozen=True)
class CuratedCorpus:
    """The curated text of a project. `key` changes whenever a byte of the training text may."""

    key: str
    folder: Path
    sources: tuple[CuratedSource, ...]
    heldout_key: str
    manifests: tuple[Path, ...]
    provenance: tuple[dict[str, Any], ...] = field(repr=False)
    warnings: tuple[str, ...]
    skipped: bool

    @property
    def domains(self) -> tuple[CuratedSource, ...]:
        """Sources with training text, in the byte order of their keys: the domains of a run."""
        return tuple(source for source in self.sources if not source.is_empty)


class _Clock:
    """Reports steps with the seconds since the step before."""

    def __init__(self, report: Report | None) -> None:
        self.report, self.begin, self.skipped = report, time.monotonic(), True

    def finish(self, step: str, source: str, documents: int, num_bytes: int, skipped: bool) -> None:
        now = time.monotonic()
        self.skipped &= skipped
        if self.report is not None:
            seconds = now - self.begin
            self.report(CurationProgress(step, source, documents, num_bytes, seconds, skipped))
        self.begin = now


def curate_documents(
    settings: DataSettings,
    project_folder: Path,
    *,
    workers: int = 1,
    progress: Report | None = None,
) -> CuratedCorpus:
    """Curate the sources of a recipe into `project_folder/corpus`; finished steps are not repeated.

    The bytes written do not depend on `workers`.

    Raises:
        UsageError: a source is missing, damaged, unlicensed, or nothing remains of it.
        StorageError: the disk is full or cannot be written.
    """
    check_settings(settings)
    corpus, clock = project_folder / "corpus", _Clock(progress)
    remove_partial(corpus)
    resolved = _resolve(settings, project_folder, corpus)
    clock.finish(
        "list",
        "",
        sum(len(source.files) for source in resolved),
        sum(file.size for source in resolved for file in source.files),
        True,
    )
    with WorkerPool(workers) as pool:
        normalized = []
        for source in resolved:
            folder, manifest, skipped = normalize_source(
                source, settings.seed, corpus / "documents", pool
            )
            normalized.append(NormalizedSource(source.key, folder, manifest))
            counts = manifest["counts"]
            num_bytes = counts["kept_text_bytes"]
            clock.finish("normalise", source.key, counts["read"], num_bytes, skipped)
        if not any(source.kept for source in normalized):
            raise UsageError(
                "no source has any text on this machine", remedy="name other sources in the recipe"
            )
        return _combine(settings, corpus, resolved, in_key_order(normalized), pool, clock)


def _resolve(settings: DataSettings, project_folder: Path, corpus: Path) -> list[Source]:
    forget_listings()
    cache = DigestCache(corpus)
    return [resolve_source(source, settings, project_folder, cache) for source in settings.sources]


def _combine(
    settings: DataSettings,
    corpus: Path,
    resolved: Sequence[Source],
    sources: Sequence[NormalizedSource],
    workers: WorkerPool,
    clock: _Clock,
) -> CuratedCorpus:
    """The steps across sources."""
    num_documents = sum(source.kept for source in sources)
    num_bytes = sum(source.manifest["counts"]["kept_text_bytes"] for source in sources)
    dup_folder, dup_manifest, skipped = find_duplicates(sources, corpus / "attributes")
    clock.finish("dedup", "", num_documents, 0, skipped)
    heldout_folder, heldout_manifest, skipped = take_heldout(
        sources, dup_folder, dup_manifest["key"], settings, corpus / "heldout", workers
    )
    clock.finish("heldout", "", num_documents, num_bytes, skipped)
    train_folder, train_manifest, skipped = _write_train(
        sources, dup_folder, dup_manifest["key"], heldout_folder, heldout_manifest["key"], corpus
    )
    clock.finish("train", "", num_documents, num_bytes, skipped)
    curated = [
        _curated_source(source, settings_of, dup_manifest, heldout_manifest, train_manifest, corpus)
        for source, settings_of in _paired(sources, resolved)
    ]
    rows = _write_rows(corpus, resolved, curated)
    return CuratedCorpus(
        key=train_manifest["key"],
        folder=corpus,
        sources=tuple(curated),
        heldout_key=heldout_manifest["key"],
        manifests=tuple(
            folder / "manifest.json"
            for folder in (*(s.folder for s in sources), dup_folder, heldout_folder, train_folder)
        ),
        provenance=tuple(rows),
        warnings=tuple(_warnings(resolved, curated)),
        skipped=clock.skipped,
    )


def _paired(
    sources: Sequence[NormalizedSource], resolved: Sequence[Source]
) -> list[tuple[NormalizedSource, Source]]:
    by_key = {source.key: source for source in resolved}
    return [(source, by_key[source.key]) for source in sources]


def _write_train(
    sources: Sequence[NormalizedSource],
    dup_folder: Path,
    dup_key: str,
    heldout_folder: Path,
    heldout_key: str,
    corpus: Path,
) -> tuple[Path, dict[str, Any], bool]:
    """Shards of the documents that training may read, co-partitioned with the normalised ones."""
    stage = Stage(
        "train",
        VERSION,
        {"sources": [source.key for source in sources]},
        (*(source.stage_key for source in sources), dup_key, heldout_key),
    )

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        heldout = set[str]()
        for source in sources:
            heldout |= read_ids(heldout_folder / source_folder_name(source.key) / HELDOUT_NAME)
        shards: list[dict[str, Any]] = []
        counts: dict[str, dict[str, int]] = {}
        for source in sources:
            name_of = source_folder_name(source.key)
            entries = []
            for name in source.shard_names:
                removed = read_ids(dup_folder / name_of / name)
                removed |= read_ids(heldout_folder / name_of / "near" / name)
                tables = _without(source.folder / name, removed, heldout)
                entries.append(write_shard(folder, f"{name_of}/{name}", DOCUMENT_SCHEMA, tables))
            shards += entries
            counts[source.key] = {
                "documents": sum(entry["rows"] for entry in entries),
                "text_bytes": sum(entry["text_bytes"] for entry in entries),
            }
        _check_absent(folder, shards, heldout)
        return shards, {"domains": counts, "checks": {"heldout_ids_in_train": 0}}

    return run_stage(corpus / "documents", stage, build)


def _without(path: Path, removed: set[str], heldout: set[str]) -> Any:
    for table in read_tables(path):
        keep = [name not in removed and name not in heldout for name in table["id"].to_pylist()]
        yield table.filter(pa.array(keep, pa.bool_()))


def _check_absent(folder: Path, shards: Sequence[dict[str, Any]], heldout: set[str]) -> None:
    """Read the training shards back: no held-out id may stand in them."""
    for shard in shards:
        if both := read_ids(folder / shard["name"]) & heldout:
            raise PortolanError(
                f"held-out document {min(both)} stands in training shard {shard['name']}",
                remedy="this is a defect of Portolan: please report it with the recipe",
            )


def _curated_source(
    source: NormalizedSource,
    resolved: Source,
    dup_manifest: dict[str, Any],
    heldout_manifest: dict[str, Any],
    train_manifest: dict[str, Any],
    corpus: Path,
) -> CuratedSource:
    """Collect the counts of a source and check that every document read is accounted for."""
    counts, heldout = source.manifest["counts"], heldout_manifest["domains"][source.key]
    train = train_manifest["domains"][source.key]
    dropped = {
        **counts["dropped"],
        GLOBAL_DUP: dup_manifest["dup_doc"][source.key],
        HELDOUT: heldout["heldout"],
        NEAR_HELDOUT: heldout["near_heldout"],
    }
    if counts["read"] != sum(dropped.values()) + train["documents"]:
        raise PortolanError(
            f"source {source.key!r}: read {counts['read']} documents, but {dropped} and "
            f"{train['documents']} for training do not add up to it",
            remedy=f"delete {corpus / 'documents'} and run again; report it if it comes back",
        )
    name = source_folder_name(source.key)
    train_folder = corpus / "documents" / f"train_{train_manifest['key']}" / name
    heldout_folder = corpus / "heldout" / f"heldout_{heldout_manifest['key']}" / name
    return CuratedSource(
        key=source.key,
        category=resolved.settings.category,
        train_shards=tuple(train_folder / shard for shard in source.shard_names),
        heldout_shards=(heldout_folder / HELDOUT_NAME,),
        documents_manifest=source.folder / "manifest.json",
        read=counts["read"],
        dropped={reason: number for reason, number in dropped.items() if number},
        train_documents=train["documents"],
        train_text_bytes=train["text_bytes"],
        heldout_documents=heldout["heldout"],
        heldout_text_bytes=heldout["heldout_text_bytes"],
        license_class=resolved.license_facts.license_class,
    )


def _write_rows(
    corpus: Path, resolved: Sequence[Source], curated: Sequence[CuratedSource]
) -> list[dict[str, Any]]:
    """Write the provenance table unless it says the same already, tokens apart."""
    by_key = {source.key: source for source in resolved}
    rows = [
        provenance_row(
            by_key[source.key],
            documents=source.train_documents,
            text_bytes=source.train_text_bytes,
        )
        for source in curated
    ]
    volatile = {"tokens": None, "row_hash": None}
    try:
        known = read_provenance(corpus)
    except (OSError, pa.ArrowException):
        known = []
    if [{**row, **volatile} for row in known] == [{**row, **volatile} for row in rows]:
        return known
    write_provenance(corpus, rows)
    return rows


def _warnings(resolved: Sequence[Source], curated: Sequence[CuratedSource]) -> list[str]:
    messages = [message for source in resolved for message in source.warnings]
    for source in curated:
        if source.is_empty:
            messages.append(f"source {source.key!r}: nothing left for training")
        elif source.dropped.get(NEAR_HELDOUT, 0) > LARGE_LOSS * source.train_documents:
            messages.append(
                f"source {source.key!r}: {source.dropped[NEAR_HELDOUT]} documents were too close "
                f"to held-out text, {source.train_documents} remain"
            )
        if not source.is_empty and not source.heldout_documents:
            messages.append(f"source {source.key!r}: too small to hold a document out")
    return messages
