"""Candidate groups: documents that share a bucket, and those reached through them.

A document is (source, high, low): the rank of its source and the halves of its id. In a bucket all
are joined to the first, which costs one edge a document and gives the same components as all pairs.

Most buckets hold one document. A table of bits, one a hash slot, drops those before anything is
sorted; a slot that two buckets share only lets rows through that form no edge.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import COMPLETE, Stage, run_stage, source_folder_name
from portolan.data.engine import Dataset, Engine, exchange, map_shards

VERSION = 1
ROWS_PER_PARTITION = 4_000_000
MIN_SLOT_BITS, MAX_SLOT_BITS, SLOTS_PER_ROW = 16, 27, 8
SHARED_NAME = "shared.npy"
BAND_SCHEMA = pa.schema(
    [
        pa.field("bucket", pa.uint64(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("high", pa.uint64(), nullable=False),
        pa.field("low", pa.uint64(), nullable=False),
    ]
)
NODE_COLUMNS = ("source", "high", "low")
EDGE_SCHEMA = pa.schema(
    [
        *(BAND_SCHEMA.field(name) for name in NODE_COLUMNS),
        *(BAND_SCHEMA.field(name).with_name(f"to_{name}") for name in NODE_COLUMNS),
    ]
)


def removed_of(removed: Sequence[Dataset], source: NormalizedSource) -> list[Dataset]:
    """The shards of attributes that belong to a source; an attribute may know nothing of it."""
    within = (dataset.within(source_folder_name(source.key)) for dataset in removed)
    return [dataset for dataset in within if dataset.shards]


def listed_ids(attribute: Iterator[pa.Table]) -> pa.Array:
    """Ids that an attribute shard takes away: all it lists, or those marked `contaminated`."""
    found = []
    for table in attribute:
        if "contaminated" in table.schema.names:
            table = table.filter(table["contaminated"])
        found.append(table["id"].combine_chunks())
    return pa.concat_arrays([pa.array([], pa.string()), *found])


def is_taken(ids: pa.ChunkedArray, taken: Sequence[pa.Array]) -> np.ndarray:
    """Whether each id stands in one of the lists, bool[n]."""
    result = np.zeros(len(ids), bool)
    for listed in taken:
        result |= np.asarray(pc.is_in(ids, value_set=listed))  # pyright: ignore
    return result


def id_halves(ids: Sequence[str]) -> np.ndarray:
    """First and last 16 hex digits of each id, uint64[n, 2]."""
    content = bytes.fromhex("".join(ids))
    return np.frombuffer(content, ">u8").reshape(-1, 2).astype(np.uint64)


def _buckets(
    signatures: Iterator[pa.Table], removed: Sequence[Iterator[pa.Table]]
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Ids and buckets uint64[n * bands] of documents that are still there and have buckets."""
    taken = [listed_ids(attribute) for attribute in removed]
    for table in signatures:
        keep = ~is_taken(table["id"], taken) & np.asarray(table["buckets"].is_valid())
        table = table.filter(pa.array(keep))
        yield table["id"].to_pylist(), np.asarray(pc.list_flatten(table["buckets"]))  # pyright: ignore


def list_bands(
    params: Mapping[str, Any],
    signatures: Iterator[pa.Table],
    *removed: Iterator[pa.Table],
    shared: str,
) -> Iterator[pa.Table]:
    """One row a document and bucket, of the buckets whose slot two documents share."""
    table = np.load(shared, mmap_mode="r")
    for ids, buckets in _buckets(signatures, removed):
        places = np.flatnonzero(table[_slots(buckets, len(table))])
        halves = id_halves(ids)[places // params["bands"]]
        source = np.full(len(places), params["source"], np.int32)
        arrays = [buckets[places], source, halves[:, 0], halves[:, 1]]
        yield pa.table([pa.array(array) for array in arrays], schema=BAND_SCHEMA)


def _slots(buckets: np.ndarray, count: int) -> np.ndarray:
    return buckets >> np.uint64(64 - count.bit_length() + 1)


def find_shared_slots(
    sources: Sequence[NormalizedSource],
    signatures: Sequence[Dataset],
    removed: Sequence[Dataset],
    bands: int,
    work: Path,
) -> tuple[str, str]:
    """Path and key of bool[2^b], true where two documents have a bucket; b <= 27: 256 MiB."""
    rows = 1 + bands * sum(source.kept for source in sources)
    bits = math.ceil(math.log2(rows * SLOTS_PER_ROW))
    bits = min(max(bits, MIN_SLOT_BITS), MAX_SLOT_BITS)
    keys = tuple(dataset.key for dataset in (*signatures, *removed))
    stage = Stage("fuzzy_shared", VERSION, {"bits": bits}, keys)

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        once, twice = np.zeros(1 << bits, bool), np.zeros(1 << bits, bool)
        for source, signed in zip(sources, signatures, strict=True):
            attributes = removed_of(removed, source)
            for name in signed.names:
                taken = [attribute.read(name) for attribute in attributes]
                for _, buckets in _buckets(signed.read(name, ["id", "buckets"]), taken):
                    slots = np.sort(_slots(buckets, 1 << bits))
                    twice[slots[once[slots]]] = True
                    twice[slots[1:][slots[1:] == slots[:-1]]] = True
                    once[slots] = True
        np.save(folder / SHARED_NAME, twice)
        size = (folder / SHARED_NAME).stat().st_size
        return [{"name": SHARED_NAME, "bytes": size, "status": COMPLETE}], {}

    folder, _, _ = run_stage(work, stage, build)
    return str(folder / SHARED_NAME), stage.key


def list_edges(params: Mapping[str, Any], bands: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Edges from every document of a bucket to its first; bands are sorted by bucket and node."""
    previous: list[np.ndarray] | None = None
    for table in bands:
        columns = [np.asarray(table[name]) for name in BAND_SCHEMA.names]
        if previous is not None:
            columns = [
                np.concatenate([first, column])
                for first, column in zip(previous, columns, strict=True)
            ]
        begins = np.append(True, columns[0][1:] != columns[0][:-1])
        centres = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
        others = np.flatnonzero(~begins)
        nodes = columns[1:]
        # The row carried over leads its bucket, so it is never an edge of its own.
        ends = [column[others] for column in nodes]
        middles = [column[centres[others]] for column in nodes]
        yield pa.table([pa.array(column) for column in ends + middles], schema=EDGE_SCHEMA)
        last = centres[-1:]
        previous = [column[last] for column in columns]


def find_edges(
    engine: Engine,
    sources: Sequence[NormalizedSource],
    signatures: Sequence[Dataset],
    removed: Sequence[Dataset],
    bands: int,
    work: Path,
) -> Dataset:
    """Edges between documents that share a bucket.

    Memory: that of an exchange; no bucket is ever held whole.
    """
    shared, shared_key = find_shared_slots(sources, signatures, removed, bands, work)
    function = partial(list_bands, shared=shared)
    listed = []
    for rank, (source, signed) in enumerate(zip(sources, signatures, strict=True)):
        inputs = [signed, *removed_of(removed, source)]
        stage = Stage(
            "fuzzy_bands",
            VERSION,
            {"source": rank, "bands": bands},
            (*(dataset.key for dataset in inputs), shared_key),
        )
        listed.append(map_shards(engine, work, stage, function, inputs, BAND_SCHEMA))
    keys = tuple(dataset.key for dataset in listed)
    partitions = 1 + sum(dataset.num_rows for dataset in listed) // ROWS_PER_PARTITION
    stage = Stage("fuzzy_buckets", VERSION, {"partitions": partitions}, keys)
    sorted_bands = exchange(
        engine, work, stage, listed, key="bucket", partitions=partitions, order=NODE_COLUMNS
    )
    stage = Stage("fuzzy_edges", VERSION, {}, (sorted_bands.key,))
    return map_shards(engine, work, stage, list_edges, [sorted_bands], EDGE_SCHEMA)
