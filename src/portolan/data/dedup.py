"""Exact dedup over all sources: of equal ids, the first source in key order survives."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from portolan.data.documents import WORK, Stage, read_tables, source_folder_name, write_shard
from portolan.data.engine import Engine
from portolan.data.engine.tasks import Task, build_stage, run_tasks
from portolan.files import read_json, write_json_atomic

VERSION = 1
DOCUMENTS_PER_PARTITION = 4_000_000
PLACES = f"{WORK}/places.json"
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
    engine: Engine, sources: Sequence[NormalizedSource], attributes_folder: Path
) -> tuple[Path, dict[str, Any], bool]:
    """Write the attribute `dup_doc` for every loser, co-partitioned with its source.

    One task a range of ids finds the losers, one task a source writes them. Text is neither read
    nor copied. Memory of a task: the ids of one range, at most about 4 million documents. Returns
    the stage folder, its manifest, and whether it was there.
    """
    ordered, stage = in_key_order(sources), dedup_stage(sources)
    num_ranges = stage.params["num_partitions"]

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        places = [
            {"path": str(path.absolute()), "rank": rank}
            for rank, source in enumerate(ordered)
            for path in source.shard_paths
        ]
        write_json_atomic(folder / PLACES, places)
        finds = [
            Task(f"find-{number:05d}", find_losers, (number, num_ranges))
            for number in range(num_ranges)
        ]
        found = run_tasks(engine, stage, folder, "find", finds)
        batches: dict[int, list[tuple[int, int]]] = {}
        for number, record in enumerate(found):
            for batch, place in enumerate(record["places"]):
                batches.setdefault(place, []).append((number, batch))
        writes, first = [], 0
        for source in ordered:
            folder_name = source_folder_name(source.key)
            shards = [
                (f"{folder_name}/{name}", batches.get(first + index, []))
                for index, name in enumerate(source.shard_names)
            ]
            first += len(shards)
            writes.append(Task(f"write-{folder_name}", write_losers, (shards,), source.kept))
        written = run_tasks(engine, stage, folder, "write", writes)
        counts = {
            source.key: sum(entry["rows"] for entry in record["files"])
            for source, record in zip(ordered, written, strict=True)
        }
        return [entry for record in written for entry in record["files"]], {"dup_doc": counts}

    dataset, skipped = build_stage(attributes_folder, stage, build)
    return dataset.folder, dict(dataset.manifest), skipped


def find_losers(folder: Path, number: int, num_ranges: int) -> dict[str, Any]:
    """The first task: losers of one range of ids, a batch of sorted ids for each shard with any."""
    import polars

    low, high = (f"{(p << 128) // num_ranges:032x}" for p in (number, number + 1))
    within = polars.col("id") >= low
    if number + 1 < num_ranges:
        within &= polars.col("id") < high
    frames = [
        polars.scan_parquet(place["path"], glob=False, hive_partitioning=False)
        .select("id")
        .filter(within)
        .with_columns(
            place=polars.lit(index, polars.Int32), rank=polars.lit(place["rank"], polars.Int32)
        )
        for index, place in enumerate(read_json(folder / PLACES))
    ]
    losers = (
        polars.concat(frames)
        .with_columns(first=polars.col("rank").min().over("id"))
        .filter(polars.col("rank") > polars.col("first"))
        .sort("place", "id")
        .select("place", "id")
        .collect()
    )
    places, path = [], folder / _losers_name(number)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, DUPLICATE_SCHEMA) as writer:
        for (place,), group in losers.group_by("place", maintain_order=True):
            places.append(place)
            columns = [group["id"].to_arrow().cast(pa.string()), pa.array([True] * group.height)]
            writer.write_batch(pa.record_batch(columns, schema=DUPLICATE_SCHEMA))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    files = [{"name": _losers_name(number), "bytes": path.stat().st_size}]
    return {"files": files, "places": places, "documents": 0}


def _losers_name(number: int) -> str:
    return f"{WORK}/losers-{number:05d}.arrow"


def write_losers(
    folder: Path, shards: Sequence[tuple[str, Sequence[tuple[int, int]]]]
) -> dict[str, Any]:
    """The second task: the attribute shards of one source, from (range, batch) pairs."""
    return {
        "files": [
            write_shard(folder, name, DUPLICATE_SCHEMA, _read_losers(folder, batches))
            for name, batches in shards
        ]
    }


def _read_losers(folder: Path, batches: Sequence[tuple[int, int]]) -> Iterator[pa.Table]:
    for number, batch in batches:
        path = str(folder / _losers_name(number))
        with pa.OSFile(path, "rb") as source, pa.ipc.open_file(source) as file:
            yield pa.Table.from_batches([file.get_batch(batch)])


def read_ids(path: Path) -> set[str]:
    """Ids that a sparse attribute shard lists."""
    return {name for table in read_tables(path, ["id"]) for name in table["id"].to_pylist()}
