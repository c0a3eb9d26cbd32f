"""The index of test items: sorted window hashes, and which items hold each of them."""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.curation_settings import DecontaminationSettings
from portolan.data.decontamination.features import (
    WINDOW_TOKENS,
    Fold,
    Laid,
    NgramHash,
    is_short_item,
    paragraphs,
)
from portolan.data.decontamination.registry import EvaluationSet, Item, Registry, with_rows
from portolan.data.documents import COMPLETE, EMPTY, Stage, read_tables, run_stage, write_shard
from portolan.errors import UsageError
from portolan.files import sha256_file

VERSION = 1
MAX_ARRAY_BYTES = 1 << 30
FALSE_HITS = 1e-9
ITEMS_NAME = "items.parquet"
ITEM_SCHEMA = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("windows", pa.int64(), nullable=False),
        pa.field("short", pa.bool_(), nullable=False),
    ]
)
_PREFILTER_BITS, _LARGEST_PREFILTER = 4, 24
_BATCH_ITEMS = 512
_PARTS = ("hashes", "offsets", "items")


@dataclass(frozen=True)
class HashTable:
    """hashes: sorted distinct uint64[n]; items of hash i: items[offsets[i]:offsets[i+1]]."""

    hashes: np.ndarray
    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray, items: np.ndarray) -> "HashTable":
        """Table of pairs in any order."""
        order = np.lexsort((items, hashes))
        hashes, items = hashes[order], items[order].astype(np.int32)
        first = np.ones(len(hashes), bool)
        first[1:] = (hashes[1:] != hashes[:-1]) | (items[1:] != items[:-1])
        hashes, items = hashes[first], items[first]
        distinct, begins = np.unique(hashes, return_index=True)
        return cls(distinct, np.append(begins, len(hashes)).astype(np.int64), items)

    def items_of(self, hashed: int) -> list[int]:
        """Numbers of the items that hold a window."""
        place = int(np.searchsorted(self.hashes, np.uint64(hashed)))
        if place == len(self.hashes) or int(self.hashes[place]) != hashed:
            return []
        return self.items[self.offsets[place] : self.offsets[place + 1]].tolist()


class SortedHashes:
    """Membership in a sorted array, behind a table of low bits that turns most probes away."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = hashes
        bits = math.ceil(math.log2(max(2, len(hashes)))) + _PREFILTER_BITS
        self.mask = np.uint64((1 << min(bits, _LARGEST_PREFILTER)) - 1)
        self.low = np.zeros(int(self.mask) + 1, bool)
        self.low[hashes & self.mask] = True

    def contains(self, probes: np.ndarray) -> np.ndarray:
        """Whether each probe is in the array, bool[n]."""
        found = np.zeros(len(probes), bool)
        if len(self.hashes):
            likely = np.flatnonzero(self.low[probes & self.mask])
            places = np.searchsorted(self.hashes, probes[likely])
            places = np.minimum(places, len(self.hashes) - 1)
            found[likely] = self.hashes[places] == probes[likely]
        return found


class BloomFilter:
    """Set of uint64, false hits at a rate p: m = -n ln p / (ln 2)^2 bits, k = -log2 p probes."""

    def __init__(self, size: int, false_hits: float = FALSE_HITS) -> None:
        self.num_bits = max(8, math.ceil(-size * math.log(false_hits) / math.log(2) ** 2))
        self.num_probes = round(-math.log2(false_hits))
        self.bits = np.zeros((self.num_bits + 7) // 8, np.uint8)

    def _probes(self, values: np.ndarray) -> Iterator[np.ndarray]:
        step = (values >> np.uint64(32)) | np.uint64(1)
        place = values
        for _ in range(self.num_probes):
            place = place * np.uint64(0x9E3779B97F4A7C15) + step
            yield place % np.uint64(self.num_bits)

    def add(self, values: np.ndarray) -> None:
        """Add values."""
        for place in self._probes(values):
            bit = np.uint8(1) << (place & np.uint64(7)).astype(np.uint8)
            np.bitwise_or.at(self.bits, (place >> np.uint64(3)).astype(np.int64), bit)

    def contains(self, probes: np.ndarray) -> np.ndarray:
        """Whether each value may be in the set, bool[n]."""
        found = np.ones(len(probes), bool)
        for place in self._probes(probes):
            byte = self.bits[(place >> np.uint64(3)).astype(np.int64)]
            found &= ((byte >> (place & np.uint64(7)).astype(np.uint8)) & np.uint8(1)).astype(bool)
            if not found.any():
                break
        return found

    def merge(self, other: "BloomFilter") -> None:
        """Add all values of another filter.

        Raises:
            UsageError: their sizes differ, so that their bits mean different values.
        """
        if (self.num_bits, self.num_probes) != (other.num_bits, other.num_probes):
            raise UsageError(
                f"Bloom filters of {self.num_bits} and {other.num_bits} bits cannot be joined",
                remedy="build both for the same number of values",
            )
        self.bits |= other.bits


class EvaluationIndex:
    """The index of a folder, opened for probing.

    Hashes are mapped from the file. Above `MAX_ARRAY_BYTES` of them a Bloom filter in memory
    stands before the file; what it lets through is looked up, so every hit is one.
    """

    def __init__(self, folder: Path, *, max_array_bytes: int = MAX_ARRAY_BYTES) -> None:
        self.windows, self.short = (_open_table(folder, name) for name in ("windows", "short"))
        self.items = [
            f"{name}:{item}"
            for name, item in zip(*_read_columns(folder, ("set", "item")), strict=True)
        ]
        self.probe: SortedHashes | BloomFilter
        if self.windows.hashes.nbytes <= max_array_bytes:
            self.probe = SortedHashes(self.windows.hashes)
        else:
            self.probe = BloomFilter(len(self.windows.hashes))
            self.probe.add(self.windows.hashes)
        self.short_probe = SortedHashes(self.short.hashes)

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each window is one of an item, bool[n]."""
        found = self.probe.contains(hashes)
        if isinstance(self.probe, BloomFilter):
            likely = np.flatnonzero(found)
            table = self.windows.hashes
            places = np.minimum(np.searchsorted(table, hashes[likely]), max(len(table) - 1, 0))
            found[likely] = table[places] == hashes[likely]
        return found

    def contains_short(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each whole paragraph is a short item, bool[n]."""
        return self.short_probe.contains(hashes)


@lru_cache(maxsize=2)
def open_index(folder: str) -> EvaluationIndex:
    """The index of a folder; a process keeps the last two."""
    return EvaluationIndex(Path(folder))


def _array_path(folder: Path, table: str, part: str) -> Path:
    return folder / f"{table}-{part}.npy"


def _open_table(folder: Path, name: str) -> HashTable:
    """A table whose arrays stay in their files until they are read."""
    return HashTable(*(np.load(_array_path(folder, name, part), mmap_mode="r") for part in _PARTS))


def _write_table(folder: Path, name: str, table: HashTable) -> list[dict[str, Any]]:
    entries = []
    for part in _PARTS:
        path, array = _array_path(folder, name, part), getattr(table, part)
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        entries.append(
            {
                "name": path.name,
                "rows": len(array),
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
                "status": COMPLETE if len(array) else EMPTY,
            }
        )
    return entries


def _read_columns(folder: Path, names: Sequence[str]) -> list[list[Any]]:
    tables = list(read_tables(folder / ITEMS_NAME, names))
    return [[value for table in tables for value in table[name].to_pylist()] for name in names]


class _Builder:
    """Collects the features of items in batches."""

    def __init__(self, fold: Fold, hashing: NgramHash) -> None:
        self.fold: Fold = fold
        self.hashing: NgramHash = hashing
        self.rows: list[dict[str, Any]] = []
        self.windows: list[tuple[np.ndarray, np.ndarray]] = []
        self.short: list[tuple[np.ndarray, np.ndarray]] = []

    def add_set(self, found: EvaluationSet) -> int:
        """Add the items of a set, return their number.

        Raises:
            UsageError: the set is required and none of its items can be found in any text.
        """
        begin, usable = len(self.rows), 0
        items = found.items()
        while batch := list(itertools.islice(items, _BATCH_ITEMS)):
            usable += self._add(found.name, batch)
        if not usable and found.source.required:
            raise UsageError(
                f"evaluation set {found.name!r} has no passage that could be found: all are "
                f"shorter than {WINDOW_TOKENS} tokens and none is a short item",
                remedy="correct `fields` of the set, or set required = false",
            )
        return len(self.rows) - begin

    def _add(self, name: str, batch: Sequence[Item]) -> int:
        """A passage is a document here: windows across its lines, short if it is short."""
        first = len(self.rows)
        passages = [
            (first + place, paragraphs(text, self.fold))
            for place, item in enumerate(batch)
            for text in item.passages
        ]
        owners = np.array([owner for owner, _ in passages], np.int64)
        laid = Laid.of([[" ".join(lines)] if lines else [] for _, lines in passages])
        windows = laid.windows(self.hashing)
        held = np.repeat(owners, np.diff(windows.offsets))
        self.windows.append((windows.hashes, held))
        is_short = np.array([is_short_item(" ".join(lines).split()) for _, lines in passages], bool)
        lines, hashes = laid.short_paragraphs(self.hashing)
        document = np.searchsorted(laid.first_paragraph, lines, side="right") - 1
        keep = is_short[document] if len(document) else np.zeros(0, bool)
        self.short.append((hashes[keep], owners[document[keep]]))
        counts = np.bincount(held - first, minlength=len(batch))
        shorts = np.zeros(len(batch), bool)
        shorts[owners[is_short] - first] = True
        for item, count, short in zip(batch, counts.tolist(), shorts.tolist(), strict=True):
            self.rows.append({"set": name, "item": item.name, "windows": count, "short": short})
        return int(np.count_nonzero((counts > 0) | shorts))

    def tables(self) -> dict[str, HashTable]:
        """The finished tables."""
        empty = (np.zeros(0, np.uint64), np.zeros(0, np.int64))
        return {
            name: HashTable.of(*(np.concatenate(part) for part in zip(empty, *found, strict=True)))
            for name, found in (("windows", self.windows), ("short", self.short))
        }


def build_index(
    registry: Registry, settings: DecontaminationSettings, corpus: Path
) -> tuple[Path, dict[str, Any]]:
    """Build the index of all registered sets, unless it is there; return folder and manifest.

    Memory: 12 bytes a window of the items, three times while they are sorted.

    Raises:
        UsageError: a set has another number of rows than stated, or nothing that can be found.
    """
    params = {
        "fold": settings.fold,
        "ngram_hash": settings.ngram_hash,
        "window_tokens": WINDOW_TOKENS,
        "sets": registry.identity,
        "rows": {found.name: found.source.rows for found in registry.sets},
    }

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        builder = _Builder(settings.fold, settings.ngram_hash)
        sets = []
        for found in registry.sets:
            recorded = with_rows(found, builder.add_set(found))
            sets.append(
                {**recorded.identity, **recorded.source.model_dump(mode="json"), "path": ""}
            )
        entries = [
            entry
            for name, table in builder.tables().items()
            for entry in _write_table(folder, name, table)
        ]
        rows = pa.Table.from_pylist(builder.rows, schema=ITEM_SCHEMA)
        entries.append(write_shard(folder, ITEMS_NAME, ITEM_SCHEMA, [rows]))
        fields = {"sets": sets, "excluded": dict(registry.excluded)}
        return entries, {**fields, "missing": list(registry.missing)}

    stage = Stage("eval_index", VERSION, params)
    folder, manifest, _ = run_stage(corpus / "attributes", stage, build)
    return folder, manifest
