"""Rows of all sources, sorted by source and id, into files beside each source's shards."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import shard_of, source_folder_name, write_shard
from portolan.data.engine.streams import rebatch

Place = tuple[int, int]


def write_by_shard(
    folder: Path,
    sources: Sequence[NormalizedSource],
    tables: Iterable[tuple[str, pa.Table]],
    schema: pa.Schema,
    *,
    identifier: str = "id",
    within: str = "",
) -> list[dict[str, Any]]:
    """Write `<source>/<within>/<shard>` for every shard of every source; return manifest entries.

    `tables` are (source key, rows), in the order of the sources; ids, in column `identifier`, rise
    within a source. Memory: one table.
    """
    entries: dict[Place, dict[str, Any]] = {}

    def write(place: Place, rows: Iterable[pa.Table]) -> None:
        source = sources[place[0]]
        parts = [source_folder_name(source.key), within, source.shard_names[place[1]]]
        name = "/".join(part for part in parts if part)
        entries[place] = write_shard(folder, name, schema, rebatch(rows))

    pieces = _cut_by_shard(sources, tables, identifier)
    for place, found in itertools.groupby(pieces, key=itemgetter(0)):
        write(place, (table.select(schema.names).cast(schema) for _, table in found))
    places = [(i, j) for i, s in enumerate(sources) for j in range(len(s.shard_names))]
    for place in places:
        if place not in entries:
            write(place, ())
    return [entries[place] for place in places]


def _cut_by_shard(
    sources: Sequence[NormalizedSource], tables: Iterable[tuple[str, pa.Table]], identifier: str
) -> Iterator[tuple[Place, pa.Table]]:
    ranks = {source.key: rank for rank, source in enumerate(sources)}
    counts = [len(source.shard_names) for source in sources]
    for key, table in tables:
        rank = ranks[key]
        shards = [shard_of(name, counts[rank]) for name in table[identifier].to_pylist()]
        begins = np.searchsorted(shards, np.arange(counts[rank] + 1))
        for shard, (begin, end) in enumerate(itertools.pairwise(begins.tolist())):
            if begin < end:
                yield (rank, shard), table.slice(begin, end - begin)
