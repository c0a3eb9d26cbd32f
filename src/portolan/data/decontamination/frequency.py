"""Test windows that are common in training text: without leaving them out, precision collapses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars
import pyarrow as pa

from portolan.data.dedup import NormalizedSource
from portolan.data.engine import Dataset
from portolan.data.fuzzy.candidates import is_taken, listed_ids, removed_of
from portolan.data.ngrams import hash_strings

SAMPLE_SEED = 0
SAMPLE_DOCUMENTS = 5_000
MIN_DOCUMENTS, DOCUMENTS_PER_SAMPLE = 5, 200
COUNTED_DOCUMENTS = 1_000_000
COMMON_DOCUMENTS, COMMON_SOURCES = 50, 3
PARAMS = {
    "sample": [SAMPLE_SEED, SAMPLE_DOCUMENTS, MIN_DOCUMENTS, DOCUMENTS_PER_SAMPLE],
    "common": [COUNTED_DOCUMENTS, COMMON_DOCUMENTS, COMMON_SOURCES],
}


def threshold(sampled: int) -> int:
    """Documents of a sample that make a window common: 0.5 % of them, at least 5."""
    return max(MIN_DOCUMENTS, -(-sampled // DOCUMENTS_PER_SAMPLE))


@dataclass(frozen=True)
class SourceFrequency:
    """hashes uint64[n] common in a source's sample, or in `counted` documents of the source."""

    in_sample: np.ndarray
    in_source: np.ndarray
    sampled: int


def measure_source(
    source: NormalizedSource, hits: Dataset, removed: Sequence[Dataset]
) -> SourceFrequency:
    """Document frequency of the hit windows, among documents that are still there.

    The sample are the documents of the smallest XXH3-64(`seed:source:id`). Memory: ranks of a
    source's documents (8 bytes each) and its distinct (document, window) pairs.
    """
    ranks = [np.zeros(0, np.uint64)]
    frames = [polars.DataFrame(schema={"hash": polars.UInt64, "rank": polars.UInt64})]
    attributes = removed_of(removed, source)
    documents = Dataset(source.folder, source.manifest)
    for name in source.shard_names:
        taken = [listed_ids(attribute.read(name)) for attribute in attributes]
        for table in documents.read(name, ["id"]):
            ranks.append(_ranks(source.key, _left(table, taken)["id"]))
        for table in hits.read(name, ["id", "hash"]):
            table = _left(table, taken)
            rank = pa.array(_ranks(source.key, table["id"]), pa.uint64())
            frame = polars.from_arrow(pa.table({"hash": table["hash"], "rank": rank}))
            assert isinstance(frame, polars.DataFrame)
            frames.append(frame.unique())
    ranked = np.concatenate(ranks)
    pairs = polars.concat(frames).unique()
    sampled = min(len(ranked), SAMPLE_DOCUMENTS)
    return SourceFrequency(
        _common(pairs, ranked, SAMPLE_DOCUMENTS, threshold(sampled)),
        _common(pairs, ranked, COUNTED_DOCUMENTS, COMMON_DOCUMENTS),
        sampled,
    )


def _left(table: pa.Table, taken: Sequence[pa.Array]) -> pa.Table:
    return table.filter(pa.array(~is_taken(table["id"], taken)))


def _ranks(key: str, ids: pa.ChunkedArray) -> np.ndarray:
    return hash_strings([f"{SAMPLE_SEED}:{key}:{name}" for name in ids.to_pylist()])


def _common(pairs: polars.DataFrame, ranks: np.ndarray, count: int, documents: int) -> np.ndarray:
    """Windows in at least so many of the `count` documents with the smallest ranks, sorted."""
    if len(ranks) > count:
        pairs = pairs.filter(polars.col("rank") <= np.partition(ranks, count - 1)[count - 1])
    counted = pairs.group_by("hash").len().filter(polars.col("len") >= documents)
    return np.sort(counted["hash"].to_numpy())


def common_everywhere(found: Sequence[SourceFrequency]) -> np.ndarray:
    """Windows in at least 50 documents of at least 3 sources, sorted."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *(source.in_source for source in found)])
    distinct, counts = np.unique(hashes, return_counts=True)
    return distinct[counts >= COMMON_SOURCES]
