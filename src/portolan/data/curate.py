"""Curation in order: normalise, exact dedup, held-out documents, and what is left for training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from portolan.data.curation_steps import (
    Report,
    StepClock,
    find_copies,
    map_documents,
    text_size,
)
from portolan.data.dedup import NormalizedSource, find_duplicates, in_key_order
from portolan.data.documents import MANIFEST, read_tables, remove_partial, source_folder_name
from portolan.data.engine import Dataset, Engine
from portolan.data.heldout import HELDOUT, NEAR_HELDOUT, HeldOut, take_heldout
from portolan.data.installed import forget_listings
from portolan.data.licenses import classify_license, join_expressions
from portolan.data.normalize import normalize_source
from portolan.data.provenance import provenance_row, read_provenance, write_provenance
from portolan.data.readers import INVALID_UNICODE, INVALID_UTF8, MISSING_TEXT, NOT_JSON
from portolan.data.sources import DigestCache, Source, check_settings, resolve_source
from portolan.data.store_writing import ShardPart
from portolan.data.training_documents import (
    GLOBAL_DUP,
    Attributes,
    write_training_documents,
)
from portolan.errors import PortolanError, UsageError
from portolan.files import read_json
from portolan.recipe import DataSettings

# A source that loses more than this share to the overlap with held-out text is worth a look, and
# so is one of which a tenth cannot be read.
LARGE_LOSS, LARGE_DAMAGE = 0.5, 0.1
DAMAGE = (INVALID_UTF8, INVALID_UNICODE, NOT_JSON, MISSING_TEXT)


@dataclass(frozen=True)
class CuratedSource:
    """What is left of a source: documents for training by cell, held-out ones, and what went where.

    `dropped` counts documents by the first reason that removed them, held-out ones included, and
    `dropped_bytes` their text where it was kept; read = sum of dropped + train_documents. `cells`
    names the row groups of the training shards that hold each cell, `cell_counts` its documents and
    bytes.
    """

    key: str
    category: str
    train_shards: tuple[Path, ...]
    cells: Mapping[str, tuple[ShardPart, ...]]
    cell_counts: Mapping[str, tuple[int, int]]
    heldout_shards: tuple[Path, ...]
    documents_manifest: Path
    read: int
    dropped: dict[str, int]
    dropped_bytes: dict[str, int]
    train_documents: int
    train_text_bytes: int
    heldout_documents: int
    heldout_text_bytes: int

    @property
    def is_empty(self) -> bool:
        """True if nothing of the source is left for training."""
        return self.train_documents == 0


@dataclass(frozen=True)
class CuratedCorpus:
    """The curated text of a project. `key` changes whenever a byte of the training text may.

    `manifests` are those of all stages that the training documents depend on.
    """

    key: str
    folder: Path
    sources: tuple[CuratedSource, ...]
    heldout_key: str
    normalized: tuple[NormalizedSource, ...]
    train: Dataset
    manifests: tuple[Path, ...]
    provenance: tuple[dict[str, Any], ...] = field(repr=False)
    warnings: tuple[str, ...]
    skipped: bool

    @property
    def domains(self) -> tuple[CuratedSource, ...]:
        """Sources with training text, in the byte order of their keys."""
        return tuple(source for source in self.sources if not source.is_empty)

    @cached_property
    def cells(self) -> dict[str, list[tuple[str, tuple[ShardPart, ...]]]]:
        """(source key, row groups) of every cell, cells in byte order of their names."""
        names = sorted({name for source in self.sources for name in source.cells}, key=str.encode)
        return {
            name: [(s.key, s.cells[name]) for s in self.sources if name in s.cells]
            for name in names
        }


def curate_documents(
    settings: DataSettings,
    project_folder: Path,
    *,
    engine: Engine | None = None,
    progress: Report | None = None,
    refit: bool = False,
) -> CuratedCorpus:
    """Curate the sources of a recipe into `project_folder/corpus`; finished steps are not repeated.

    The bytes written do not depend on where the engine runs its tasks. `refit` draws the sample
    that domains and quality are fitted to anew; without it a new source repeats no fit.

    Raises:
        UsageError: a source is missing, damaged, unlicensed, or nothing remains of it.
        StorageError: the disk is full or cannot be written.
    """
    check_settings(settings)
    engine = engine or Engine()
    corpus = project_folder / "corpus"
    remove_partial(corpus)
    clock = StepClock(corpus, progress)
    resolved = _resolve(settings, project_folder, corpus)
    num_bytes = sum(file.size for source in resolved for file in source.files)
    clock.finish("list", "", sum(len(source.files) for source in resolved), num_bytes)
    normalized = []
    for source in resolved:
        folder, manifest, _ = normalize_source(engine, source, settings.seed, corpus / "documents")
        normalized.append(NormalizedSource(source.key, folder, manifest))
        counts = manifest["counts"]
        clock.finish("normalise", source.key, counts["read"], counts["kept_text_bytes"])
    if not any(source.kept for source in normalized):
        raise UsageError(
            "no source has any text on this machine", remedy="name other sources in the recipe"
        )
    sources = in_key_order(normalized)
    curated = _combine(engine, settings, corpus, resolved, sources, clock, refit)
    remove_partial(corpus, resumable=True)
    return curated


def _resolve(settings: DataSettings, project_folder: Path, corpus: Path) -> list[Source]:
    forget_listings()
    cache = DigestCache(corpus)
    return [resolve_source(source, settings, project_folder, cache) for source in settings.sources]


def _combine(
    engine: Engine,
    settings: DataSettings,
    corpus: Path,
    resolved: Sequence[Source],
    sources: Sequence[NormalizedSource],
    clock: StepClock,
    refit: bool,
) -> CuratedCorpus:
    """The steps across sources."""
    size = text_size(sources)
    folder, manifest, _ = find_duplicates(engine, sources, corpus / "attributes")
    duplicates = Dataset(folder, manifest)
    clock.finish("dedup", "", *size)
    heldout = take_heldout(engine, sources, duplicates, settings, corpus)
    clock.finish("heldout", "", *size)
    removals = {GLOBAL_DUP: duplicates, HELDOUT: heldout.attribute}
    removals |= find_copies(engine, settings, corpus, sources, removals, heldout, clock)
    categories = {source.key: source.settings.category for source in resolved}
    found = map_documents(engine, settings, corpus, sources, removals, categories, clock, refit)
    attributes = Attributes(removals, found.domains, found.buckets)
    train = write_training_documents(engine, sources, attributes, corpus)
    clock.finish("train", "", *size)
    by_key = {source.key: source for source in resolved}
    curated = [_curate_source(source, by_key[source.key], heldout, train) for source in sources]
    rows = _write_rows(corpus, by_key, curated)
    return CuratedCorpus(
        key=train.key,
        folder=corpus,
        sources=tuple(curated),
        heldout_key=heldout.documents.key,
        normalized=tuple(sources),
        train=train,
        manifests=tuple(stages_behind(corpus, [train.key])),
        provenance=tuple(rows),
        warnings=(*_warnings(resolved, curated), *found.warnings),
        skipped=clock.skipped,
    )


def stages_behind(corpus: Path, keys: Sequence[str]) -> list[Path]:
    """Manifests of the stages with these keys and of all that they depend on, by path."""
    manifests = {}
    for path in corpus.glob(f"*/*/{MANIFEST}"):
        manifest = read_json(path)
        if "key" in manifest:
            manifests[manifest["key"]] = (path, manifest["inputs"])
    found: set[Path] = set()
    waiting = list(keys)
    while waiting:
        path, inputs = manifests.get(waiting.pop(), (None, ()))
        if path is not None and path not in found:
            found.add(path)
            waiting += inputs
    return sorted(found)


def _curate_source(
    source: NormalizedSource, resolved: Source, heldout: HeldOut, train: Dataset
) -> CuratedSource:
    """Collect the counts of a source and check that every document read is accounted for."""
    counts, held = source.manifest["counts"], heldout.counts(source.key)
    found = train.manifest["domains"][source.key]
    removed = {reason: number for reason, (number, _) in found["removed"].items()}
    removed_bytes = {reason: size for reason, (_, size) in found["removed"].items()}
    documents = sum(number for number, _ in found["cells"].values())
    text_bytes = sum(size for _, size in found["cells"].values())
    own = set(train.within(source_folder_name(source.key)).paths)
    shards = [entry for entry in train.manifest["shards"] if train.folder / entry["name"] in own]
    curated = CuratedSource(
        key=source.key,
        category=resolved.settings.category,
        train_shards=tuple(train.folder / entry["name"] for entry in shards),
        cells={
            cell: tuple(
                ShardPart(train.folder / entry["name"], *entry["cells"][cell])
                for entry in shards
                if cell in entry["cells"]
            )
            for cell in found["cells"]
        },
        cell_counts={name: (count[0], count[1]) for name, count in found["cells"].items()},
        heldout_shards=tuple(heldout.paths(source.key)),
        documents_manifest=source.folder / MANIFEST,
        read=counts["read"],
        dropped={**counts["dropped"], **removed},
        dropped_bytes=removed_bytes,
        train_documents=documents,
        train_text_bytes=text_bytes,
        heldout_documents=held["heldout"],
        heldout_text_bytes=held["heldout_text_bytes"],
    )
    _check_identity(curated, counts, source.folder.parent)
    return curated


def _check_identity(source: CuratedSource, counts: Mapping[str, Any], folder: Path) -> None:
    """Read = dropped + kept in documents, normalised = dropped + kept in bytes of text."""
    kept_bytes = sum(source.dropped_bytes.values()) + source.train_text_bytes
    sums = {
        "documents": (source.read, sum(source.dropped.values()) + source.train_documents),
        "bytes of text": (counts["kept_text_bytes"], kept_bytes),
    }
    for unit, (read, found) in sums.items():
        if read != found:
            raise PortolanError(
                f"source {source.key!r}: {read} {unit} read, but those dropped ({source.dropped}) "
                f"and kept do not add up to it: {found}",
                remedy=f"delete {folder} and run again; report it if it comes back",
            )


def _write_rows(
    corpus: Path, resolved: Mapping[str, Source], curated: Sequence[CuratedSource]
) -> list[dict[str, Any]]:
    """Write the provenance table unless it says the same already, tokens apart."""
    rows = [
        provenance_row(
            resolved[source.key],
            documents=source.train_documents,
            text_bytes=source.train_text_bytes,
            license_facts=_license_of(resolved[source.key], source),
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


def _license_of(resolved: Source, source: CuratedSource) -> Any:
    """Licence of a source: stated, or all those of the documents that stay."""
    if not resolved.settings.license_field:
        return resolved.license_facts
    found = {
        name
        for path in source.train_shards
        for table in read_tables(path, ["license"])
        for name in table["license"].unique().to_pylist()
    }
    return classify_license(join_expressions(name or "" for name in found))


def _warnings(resolved: Sequence[Source], curated: Sequence[CuratedSource]) -> list[str]:
    messages = [message for source in resolved for message in source.warnings]
    for source in curated:
        damaged = {name: source.dropped[name] for name in DAMAGE if name in source.dropped}
        if sum(damaged.values()) > LARGE_DAMAGE * source.read:
            reasons = ", ".join(f"{number} {name}" for name, number in damaged.items())
            messages.append(
                f"source {source.key!r}: {reasons} of {source.read} documents; "
                "is it UTF-8, and is text_field right?"
            )
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
