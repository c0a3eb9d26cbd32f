"""Held-out documents: chosen per domain before training, and kept out of it with evidence.

Two checks follow the choice. No held-out id may stand among the training documents, and training
documents that overlap a held-out document by 13-word windows are taken out of training:
`own_windows`, at least half of the training document's windows stand in one held-out document;
`heldout_windows`, it holds at least half of a held-out document's windows, not counting windows
that are common in the corpus (licence headers would otherwise empty whole sources).
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from portolan.data.dedup import NormalizedSource, in_key_order, read_ids
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    read_tables,
    row_group_bounds,
    run_stage,
    shard_of,
    source_folder_name,
    write_shard,
)
from portolan.data.engine import Dataset, Engine
from portolan.data.engine.streams import rebatch
from portolan.data.normalize import Budget, location_rank
from portolan.errors import UsageError
from portolan.recipe import DataSettings

VERSION = 2
WINDOW_WORDS = 13
OVERLAP = Fraction(1, 2)
# A window in so many training documents, or such a share of them, says nothing about a copy.
COMMON_DOCUMENTS, COMMON_SHARE = 5, Fraction(1, 200)
HELDOUT_NAME = "part-00000-of-00001.parquet"
HELDOUT, NEAR_HELDOUT = "heldout", "near_heldout"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

HELDOUT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("rule", pa.string()),
        pa.field("heldout_source", pa.string()),
        pa.field("heldout_id", pa.string()),
        pa.field("num_shared", pa.int64()),
        pa.field("num_windows", pa.int64()),
    ]
)
"""Sparse attribute: documents held out, and training documents too close to them, with evidence."""


def window_hashes(text: str) -> np.ndarray:
    """Hashes uint64[n] of every window of 13 consecutive words, folded by NFKC and case.

    A shorter text has one window, all of it. The hash of a window is a polynomial in the XXH3-64
    hashes of its words, modulo 2^64, so that all windows cost one pass.
    """
    folded = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    tokens = folded.split()
    hashed = (xxhash.xxh3_64_intdigest(token.encode()) for token in tokens)
    words = np.fromiter(hashed, np.uint64, len(tokens))
    size = min(WINDOW_WORDS, len(tokens))
    num_windows = len(tokens) - size + 1
    total = np.full(num_windows, size, np.uint64)
    for offset in range(size):
        total = total * _MULTIPLIER + words[offset : offset + num_windows]
    return total


@dataclass(frozen=True)
class WindowIndex:
    """Windows of the held-out documents.

    hashes: sorted distinct uint64[n]; offsets int64[n+1] into owners, int32: the held-out documents
    that hold each window; num_windows int64[d]: distinct windows of each document.
    """

    hashes: np.ndarray
    offsets: np.ndarray
    owners: np.ndarray
    num_windows: np.ndarray

    @classmethod
    def build(cls, texts: Sequence[str]) -> "WindowIndex":
        """Index the windows of some texts."""
        distinct = [np.unique(window_hashes(text)) for text in texts]
        hashes = np.concatenate([np.zeros(0, np.uint64), *distinct])
        owners = np.repeat(np.arange(len(texts), dtype=np.int32), [len(part) for part in distinct])
        order = np.lexsort((owners, hashes))
        unique, first = np.unique(hashes[order], return_index=True)
        offsets = np.append(first, len(hashes)).astype(np.int64)
        sizes = np.array([len(part) for part in distinct], np.int64)
        return cls(unique, offsets, owners[order], sizes)

    def hits(self, windows: np.ndarray) -> np.ndarray:
        """Index of the window of each hash that is held out, int64[at most n]."""
        if not len(self.hashes):
            return np.zeros(0, np.int64)
        places = np.minimum(np.searchsorted(self.hashes, windows), len(self.hashes) - 1)
        return places[self.hashes[places] == windows]

    def count_by_document(self, places: np.ndarray) -> np.ndarray:
        """How many of the windows at `places` each held-out document holds, int64[d]."""
        counts = self.offsets[places + 1] - self.offsets[places]
        begins = np.repeat(self.offsets[places] - np.cumsum(counts) + counts, counts)
        owners = self.owners[begins + np.arange(counts.sum())]
        return np.bincount(owners, minlength=len(self.num_windows))


@dataclass(frozen=True)
class ScanTask:
    """One shard to compare with the held-out windows; `excluded` ids are not training documents."""

    path: Path
    excluded: frozenset[str]
    index: WindowIndex


@dataclass(frozen=True)
class Hit:
    """A training document that shares windows: hits uint64 places, repeated as they occur."""

    document_id: str
    num_windows: int
    places: np.ndarray


def scan_shard(task: ScanTask) -> tuple[int, list[Hit]]:
    """Number of training documents of a shard, and those that share a window."""
    found, num_documents = [], 0
    for table in read_tables(task.path, ["id", "text"]):
        for name, text in zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True):
            if name in task.excluded:
                continue
            num_documents += 1
            windows = window_hashes(text)
            places = task.index.hits(windows)
            if len(places):
                found.append(Hit(name, len(windows), places.astype(np.int32)))
    return num_documents, found


def choose_heldout(
    key: str, ids: Sequence[str], num_bytes: Sequence[int], settings: DataSettings
) -> list[str]:
    """Ids held out of a domain, sorted: smallest XXH3-64(`seed:source:id`) within the budgets.

    Budgets: documents, bytes, and the largest fraction of the domain in either.
    """
    fraction = Fraction(settings.heldout_fraction_max)
    max_documents = min(settings.heldout_documents_per_domain, int(fraction * len(ids)))
    budget = Budget(min(settings.heldout_bytes_per_domain, int(fraction * sum(num_bytes))))
    ranked = sorted(
        (location_rank(settings.seed, key, name), name, size)
        for name, size in zip(ids, num_bytes, strict=True)
    )
    chosen: list[str] = []
    for _, name, size in ranked:
        if len(chosen) >= max_documents or budget.is_full:
            break
        if budget.takes(size):
            chosen.append(name)
    return sorted(chosen)


def heldout_stage(
    sources: Sequence[NormalizedSource], dedup_key: str, settings: DataSettings
) -> Stage:
    """Identity of the step."""
    ordered = in_key_order(sources)
    params = {
        "sources": [source.key for source in ordered],
        "seed": settings.seed,
        "documents_per_domain": settings.heldout_documents_per_domain,
        "bytes_per_domain": settings.heldout_bytes_per_domain,
        "fraction_max": repr(settings.heldout_fraction_max),
        "window_words": WINDOW_WORDS,
        "overlap": str(OVERLAP),
        "common": [COMMON_DOCUMENTS, str(COMMON_SHARE)],
    }
    inputs = (*(source.stage_key for source in ordered), dedup_key)
    return Stage("heldout_documents", VERSION, params, inputs)


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents, one dataset a source, and the attribute of what leaves training."""

    documents: Dataset
    attribute: Dataset

    def paths(self, key: str) -> list[Path]:
        """Shards of the held-out documents of a source."""
        return self.documents.within(source_folder_name(key)).paths

    def counts(self, key: str) -> Mapping[str, int]:
        """Documents held out and too close to them, and text bytes held out, of a source."""
        return self.attribute.manifest["domains"][key]


def take_heldout(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    duplicates: Dataset,
    settings: DataSettings,
    corpus: Path,
) -> HeldOut:
    """Choose the held-out documents of each domain and the training documents too close to them.

    `heldout/heldout_documents_<key>/<source>` holds the documents, the evidence is an attribute.
    Memory: ids of one source, the held-out texts, and the windows shared with them.

    Raises:
        UsageError: no domain has a document to hold out.
    """
    ordered = in_key_order(sources)
    stage = heldout_stage(sources, duplicates.key, settings)

    def choose(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return _choose_all(ordered, duplicates, settings, folder)

    folder, manifest, _ = run_stage(corpus / "heldout", stage, choose)
    documents = Dataset(folder, manifest)
    near = Stage("heldout", VERSION, stage.params, (*stage.inputs, documents.key))

    def compare(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return _compare_all(engine, ordered, duplicates, documents, folder)

    folder, manifest, _ = run_stage(corpus / "attributes", near, compare)
    return HeldOut(documents, Dataset(folder, manifest))


def _survivors(source: NormalizedSource, duplicates: Dataset) -> tuple[list[str], list[int]]:
    """Ids and text bytes of a source's documents that no other source owns."""
    ids: list[str] = []
    sizes: list[int] = []
    attribute = duplicates.within(source_folder_name(source.key))
    for name, path in zip(source.shard_names, source.shard_paths, strict=True):
        lost = read_ids(attribute.shard(name).path)
        for table in read_tables(path, ["id", "text"]):
            lengths = pc.binary_length(table["text"]).to_pylist()  # pyright: ignore
            for identifier, size in zip(table["id"].to_pylist(), lengths, strict=True):
                if identifier not in lost:
                    ids.append(identifier)
                    sizes.append(size)
    return ids, sizes


def _read_documents(source: NormalizedSource, ids: Sequence[str]) -> pa.Table:
    wanted = pa.array(ids, pa.string())
    tables = [
        table.filter(pc.is_in(table["id"], value_set=wanted))  # pyright: ignore
        for path in source.shard_paths
        for table in read_tables(path)
    ]
    return pa.concat_tables([DOCUMENT_SCHEMA.empty_table(), *tables]).cast(DOCUMENT_SCHEMA)


def _row_groups(table: pa.Table) -> list[pa.Table]:
    lengths = np.asarray(pc.binary_length(table["text"]))  # pyright: ignore
    return [table.slice(begin, end - begin) for begin, end in row_group_bounds(lengths)]


def _choose_all(
    sources: Sequence[NormalizedSource],
    duplicates: Dataset,
    settings: DataSettings,
    folder: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    shards: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    for source in sources:
        ids, sizes = _survivors(source, duplicates)
        chosen = choose_heldout(source.key, ids, sizes, settings)
        tables = _row_groups(_read_documents(source, chosen))
        name = f"{source_folder_name(source.key)}/{HELDOUT_NAME}"
        entry = write_shard(folder, name, DOCUMENT_SCHEMA, tables)
        shards.append(entry)
        counts[source.key] = {
            "candidates": len(ids),
            "heldout": len(chosen),
            "heldout_text_bytes": entry["text_bytes"],
        }
    if not any(count["heldout"] for count in counts.values()):
        raise UsageError(
            "no domain has a document to hold out of training",
            remedy="raise heldout_fraction_max or heldout_bytes_per_domain, or add documents",
        )
    return shards, {"domains": counts}


def _compare_all(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    duplicates: Dataset,
    documents: Dataset,
    folder: Path,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write the attribute: the held-out ids, and the near-copies of them."""
    counts: dict[str, dict[str, int]] = {
        key: dict(count) for key, count in documents.manifest["domains"].items()
    }
    texts: list[str] = []
    owners: list[tuple[str, str]] = []
    for source in sources:
        for table in read_tables(documents.within(source_folder_name(source.key)).paths[0]):
            texts += table["text"].to_pylist()
            owners += [(source.key, identifier) for identifier in table["id"].to_pylist()]
    near, checks = _find_near(engine, sources, duplicates, texts, owners)
    held: dict[tuple[str, str], list[dict[str, Any]]] = {}
    names = {source.key: source.shard_names for source in sources}
    for key, identifier in owners:
        name = names[key][shard_of(identifier, len(names[key]))]
        held.setdefault((key, name), []).append({"id": identifier, "reason": HELDOUT})
    shards: list[dict[str, Any]] = []
    for source in sources:
        close = [near[source.key, name] for name in source.shard_names]
        counts[source.key][NEAR_HELDOUT] = sum(map(len, close))
        for name, found in zip(source.shard_names, close, strict=True):
            rows = sorted([*held.get((source.key, name), []), *found], key=itemgetter("id"))
            table = pa.Table.from_pylist(rows, schema=HELDOUT_SCHEMA)
            target = f"{source_folder_name(source.key)}/{name}"
            shards.append(write_shard(folder, target, HELDOUT_SCHEMA, rebatch([table])))
    return shards, {"domains": counts, "checks": checks}


def _find_near(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    duplicates: Dataset,
    texts: Sequence[str],
    owners: Sequence[tuple[str, str]],
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[str, Any]]:
    """Near-copies by source and shard, and the largest overlaps that stay in training."""
    index = WindowIndex.build(texts)
    heldout_of: dict[str, set[str]] = {}
    for key, identifier in owners:
        heldout_of.setdefault(key, set()).add(identifier)
    places = [(source, name) for source in sources for name in source.shard_names]
    tasks = [
        ScanTask(
            source.folder / name,
            frozenset(
                read_ids(duplicates.within(source_folder_name(source.key)).shard(name).path)
                | heldout_of.get(source.key, set())
            ),
            index,
        )
        for source, name in places
    ]
    scans = list(engine.map(scan_shard, tasks))
    num_documents = sum(count for count, _ in scans)
    judge = _Judge(index, owners, num_documents, [hit for _, hits in scans for hit in hits])
    near = {
        (source.key, name): [row for hit in hits if (row := judge.verdict(hit)) is not None]
        for (source, name), (_, hits) in zip(places, scans, strict=True)
    }
    checks = {
        "training_documents_scanned": num_documents,
        "documents_sharing_a_window": sum(len(hits) for _, hits in scans),
        "common_window_documents": judge.common_documents,
        "largest_own_share_kept": str(round(float(judge.largest_own), 6)),
        "largest_heldout_share_kept": str(round(float(judge.largest_heldout), 6)),
    }
    return near, checks


class _Judge:
    """Applies both overlap rules and remembers the largest shares it let pass."""

    def __init__(
        self,
        index: WindowIndex,
        owners: Sequence[tuple[str, str]],
        num_documents: int,
        hits: Sequence[Hit],
    ) -> None:
        self.index, self.owners = index, owners
        frequency = np.zeros(len(index.hashes), np.int64)
        for hit in hits:
            frequency[np.unique(hit.places)] += 1
        self.common_documents = max(COMMON_DOCUMENTS, -int(-COMMON_SHARE * num_documents // 1))
        self.is_rare = frequency < self.common_documents
        self.rare_windows = index.count_by_document(np.flatnonzero(self.is_rare))
        self.largest_own = self.largest_heldout = Fraction(0)

    def verdict(self, hit: Hit) -> dict[str, Any] | None:
        """Evidence row if the document is too close to a held-out one."""
        own = self.index.count_by_document(hit.places)
        best = int(np.argmax(own))
        own_share = Fraction(int(own[best]), hit.num_windows)
        distinct = np.unique(hit.places)
        held = self.index.count_by_document(distinct[self.is_rare[distinct]])
        shares = held / np.maximum(self.rare_windows, 1)
        closest = int(np.argmax(shares))
        held_share = Fraction(int(held[closest]), max(1, int(self.rare_windows[closest])))
        if own_share >= OVERLAP:
            return self._row(hit, "own_windows", best, int(own[best]), hit.num_windows)
        if held_share >= OVERLAP:
            total = int(self.rare_windows[closest])
            return self._row(hit, "heldout_windows", closest, int(held[closest]), total)
        self.largest_own = max(self.largest_own, own_share)
        self.largest_heldout = max(self.largest_heldout, held_share)
        return None

    def _row(self, hit: Hit, rule: str, place: int, shared: int, windows: int) -> dict[str, Any]:
        source, identifier = self.owners[place]
        return {
            "id": hit.document_id,
            "reason": NEAR_HELDOUT,
            "rule": rule,
            "heldout_source": source,
            "heldout_id": identifier,
            "num_shared": shared,
            "num_windows": windows,
        }
