"""Exact dedup over all sources: of equal ids, the first source in key order survives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from portolan.data.documents import (
    ShardWriter,
    Stage,
    read_tables,
    run_stage,
    source_folder_name,
)

VERSION = 1
DOCUMENTS_PER_PARTITION = 4_000_000
DUPLICATE_SCHEMA = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("dup_doc", pa.bool_(), nullable=False)]
)


@dataclass(frozen=True)
class NormalizedSource:
    """A normalised source: its key, its stage folder and manifest."""

    key: str
    folder: Path
    manifest: Mapping[str, Any]

    @property
    def shard_names(self) -> list[str]:
        """Names of the document shards, in order of their ids."""
        names = (shard["name"] for shard in self.manifest["shards"])
        return sorted(name for name in names if name.startswith("part-"))

    @property
    def shard_paths(self) -> list[Path]:
        """Paths of the document shards."""
        return [self.folder / name for name in self.shard_names]

    @property
    def kept(self) -> int:
        """Documents in the shards."""
        return self.manifest["counts"]["kept"]

    @property
    def stage_key(self) -> str:
        """Key of the stage."""
        return self.manifest["key"]


def in_key_order(sources: Sequence[NormalizedSource]) -> list[NormalizedSource]:
    """Sources in byte order of their keys, which decides who survives."""
    return sorted(sources, key=lambda source: source.key.encode())


def dedup_stage(sources: Sequence[NormalizedSource]) -> Stage:
    """Identity of the step."""
    ordered = in_key_order(sources)
    num_partitions = 1 + sum(source.kept for source in ordered) // DOCUMENTS_PER_PARTITION
    params = {
        "survivor": "first source key",
        "sources": [source.key for source in ordered],
        "num_partitions": num_partitions,
    }
    return Stage("dup_doc", VERSION, params, tuple(source.stage_key for source in ordered))


def find_duplicates(
    sources: Sequence[NormalizedSource], attributes_folder: Path
) -> tuple[Path, dict[str, Any], bool]:
    """Write the attribute `dup_doc` for every loser, co-partitioned with its source.

    Text is neither read nor copied. Memory: the ids of one partition, at most about 4 million
    documents. Returns the stage folder, its manifest, and whether it was there.
    """
    ordered, stage = in_key_order(sources), dedup_stage(sources)

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        writers = {
            (source.key, name): ShardWriter(
                folder, f"{source_folder_name(source.key)}/{name}", DUPLICATE_SCHEMA
            )
            for source in ordered
            for name in source.shard_names
        }
        counts = dict.fromkeys((source.key for source in ordered), 0)
        for losers in _losers(ordered, stage.params["num_partitions"]):
            for (key, name), table in losers.items():
                writers[key, name].write(table)
                counts[key] += table.num_rows
        return [writer.close() for writer in writers.values()], {"dup_doc": counts}

    return run_stage(attributes_folder, stage, build)


def _losers(
    sources: Sequence[NormalizedSource], num_partitions: int
) -> Iterator[dict[tuple[str, str], pa.Table]]:
    """Losers of one range of ids after the other, by source and shard, sorted by id."""
    import polars

    places = [(source.key, name) for source in sources for name in source.shard_names]
    paths = [path for source in sources for path in source.shard_paths]
    order = {source.key: rank for rank, source in enumerate(sources)}
    for partition in range(num_partitions):
        low, high = (f"{(p << 128) // num_partitions:032x}" for p in (partition, partition + 1))
        within = polars.col("id") >= low
        if partition + 1 < num_partitions:
            within &= polars.col("id") < high
        frames = [
            polars.scan_parquet(path, glob=False, hive_partitioning=False)
            .select("id")
            .filter(within)
            .with_columns(
                place=polars.lit(place, polars.Int32), rank=polars.lit(order[key], polars.Int32)
            )
            for place, (path, (key, _)) in enumerate(zip(paths, places, strict=True))
        ]
        losers = (
            polars.concat(frames)
            .with_columns(first=polars.col("rank").min().over("id"))
            .filter(polars.col("rank") > polars.col("first"))
            .sort("place", "id")
            .select("place", "id")
            .collect()
        )
        yield {
            places[int(place)]: pa.table(
                [group["id"].to_arrow().cast(pa.string()), pa.array([True] * group.height)],
                schema=DUPLICATE_SCHEMA,
            )
            for (place,), group in losers.group_by("place", maintain_order=True)
        }


def read_ids(path: Path) -> set[str]:
    """Ids that a sparse attribute shard lists."""
    return {name for table in read_tables(path, ["id"]) for name in table["id"].to_pylist()}
