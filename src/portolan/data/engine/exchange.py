"""Exchange: rows to partitions by the hash of their key, each partition sorted."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.data.documents import Stage, shard_name, write_shard
from portolan.data.engine.core import Engine
from portolan.data.engine.dataset import Dataset, Shard
from portolan.data.engine.segments import merge_partition, write_index, write_runs
from portolan.data.engine.streams import rebatch
from portolan.data.engine.tasks import Task, build_stage, check_inputs, run_tasks
from portolan.data.ngrams import hash_rows, hash_values
from portolan.errors import PortolanError


def partition_of(keys: Any, partitions: int) -> np.ndarray:
    """Partition of each key, int64[n]: the upper half of its XXH3-64 scaled to `partitions`.

    Strings and bytes are hashed as they are, integers as 8 bytes little-endian.
    """
    if pa.types.is_integer(keys.type):
        kind = "<u8" if pa.types.is_unsigned_integer(keys.type) else "<i8"
        digests = hash_rows(np.asarray(keys).astype(kind)[:, None])
    else:
        digests = hash_values(keys.cast(pa.binary()))
    return ((digests >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int64)


def exchange(
    engine: Engine,
    parent: Path,
    stage: Stage,
    inputs: Sequence[Dataset],
    *,
    key: str,
    partitions: int,
    order: Sequence[str] = (),
) -> Dataset:
    """Bring the rows of all inputs into `partitions` shards by the hash of their key.

    Inside a shard rows rise by (key, *order); equal ones stand in (input, shard, row) order. Key,
    partitions and order become parameters of the stage, so its key is that of the result. Keys are
    strings, bytes or integers and never null; neither are the columns of `order`. Memory: the
    budget of a task, whatever the number of rows of one key.

    Raises:
        PortolanError: the inputs differ in their schema or lack a column, or a task failed.
    """
    check_inputs(stage, inputs)
    by = (key, *order)
    schema = _common_schema(stage, inputs, by)
    params = {**stage.params, "key": key, "partitions": partitions, "order": list(order)}
    stage = Stage(stage.name, stage.version, params, stage.inputs, stage.label)
    shards = [shard for dataset in inputs for shard in dataset.shards]

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        spills = [
            Task(
                f"spill-{number:06d}",
                _spill,
                (number, shard, schema, by, partitions, engine.task_bytes),
                shard.rows,
                shard.bytes,
            )
            for number, shard in enumerate(shards)
        ]
        records = run_tasks(engine, stage, folder, "spill", spills)
        rows, size = write_index(folder, records, partitions)
        merges = [
            Task(
                shard_name(index, partitions),
                _merge,
                (index, partitions, schema, by, size[index], engine.task_bytes),
                rows[index],
                size[index],
            )
            for index in range(partitions)
        ]
        merged = run_tasks(engine, stage, folder, "merge", merges)
        return [file for record in merged for file in record["files"]], {}

    return build_stage(parent, stage, build)[0]


def _common_schema(stage: Stage, inputs: Sequence[Dataset], by: Sequence[str]) -> pa.Schema:
    if not inputs:
        raise PortolanError(f"stage {stage.name!r} has no input")
    schema = inputs[0].schema
    for dataset in inputs[1:]:
        if not dataset.schema.equals(schema):
            raise PortolanError(
                f"stage {stage.name!r}: {inputs[0].folder.name} and {dataset.folder.name} differ "
                f"in their schema:\n{schema}\nand\n{dataset.schema}"
            )
    if absent := [name for name in by if name not in schema.names]:
        raise PortolanError(
            f"stage {stage.name!r}: {inputs[0].folder.name} has no column {absent[0]!r}, only "
            f"{', '.join(schema.names)}"
        )
    return schema


def _key_partitions(key: str, partitions: int, table: pa.Table) -> np.ndarray:
    return partition_of(table[key].combine_chunks(), partitions)


def _spill(
    folder: Path,
    number: int,
    shard: Shard,
    schema: pa.Schema,
    by: Sequence[str],
    partitions: int,
    task_bytes: int,
) -> dict[str, Any]:
    """The first task: write the sorted runs of one input shard."""
    return write_runs(
        folder,
        number,
        schema,
        shard.read(),
        by=by,
        partitions=partitions,
        partition_of=partial(_key_partitions, by[0], partitions),
        task_bytes=task_bytes,
    )


def _merge(
    folder: Path,
    partition: int,
    partitions: int,
    schema: pa.Schema,
    by: Sequence[str],
    num_bytes: int,
    task_bytes: int,
) -> dict[str, Any]:
    """The second task: write one sorted partition."""
    tables = merge_partition(folder, partition, by=by, num_bytes=num_bytes, task_bytes=task_bytes)
    name = shard_name(partition, partitions)
    return {"files": [write_shard(folder, name, schema, rebatch(tables))]}
