"""Steps over one shard at a time: map, reduce and join."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from portolan.data.documents import Stage, write_shard
from portolan.data.engine.core import Engine
from portolan.data.engine.dataset import Dataset, Shard
from portolan.data.engine.streams import group_tables, join_groups, rebatch
from portolan.data.engine.tasks import Task, build_stage, check_function, check_inputs, run_tasks
from portolan.errors import PortolanError

MapFunction = Callable[..., Iterator[pa.Table]]
Work = Callable[..., Iterable[pa.Table]]


def map_shards(
    engine: Engine,
    parent: Path,
    stage: Stage,
    function: MapFunction,
    inputs: Sequence[Dataset],
    schema: pa.Schema,
) -> Dataset:
    """One task a shard name: `function(params, *table_iterators)` yields the rows of the output.

    The inputs are co-partitioned: same shard names. `params` are those of the stage. The function
    stands at the top level of a module; `functools.partial` adds what is not hashed, such as a
    path. Memory: what the function holds, and one row group.

    Raises:
        PortolanError: the inputs differ in their shard names, or a task failed.
    """
    return _run(engine, parent, stage, _apply, function, inputs, schema)


def reduce_groups(
    engine: Engine,
    parent: Path,
    stage: Stage,
    dataset: Dataset,
    *,
    key: str,
    function: MapFunction,
    schema: pa.Schema,
) -> Dataset:
    """Call `function(params, key_value, table_iterator)` for each value of a sorted column.

    The dataset comes from `exchange`. A group is an iterator, so memory does not depend on its
    size; what the function leaves of it is skipped.
    """
    return _run(engine, parent, stage, _reduce, function, [dataset], schema, key)


def join_sorted(
    engine: Engine,
    parent: Path,
    stage: Stage,
    left: Dataset,
    right: Dataset,
    *,
    key: str,
    function: MapFunction,
    schema: pa.Schema,
) -> Dataset:
    """Call `function(params, key_value, left_tables, right_tables)` for each value on either side.

    Both datasets come from `exchange` with the same key and number of partitions. A side without
    the value is an empty iterator.
    """
    return _run(engine, parent, stage, _join, function, [left, right], schema, key)


def _apply(function: MapFunction, params: Mapping[str, Any], shards: Sequence[Shard]) -> Any:
    return function(params, *(shard.read() for shard in shards))


def _reduce(
    function: MapFunction, params: Mapping[str, Any], shards: Sequence[Shard], key: str
) -> Iterator[pa.Table]:
    (shard,) = shards
    for value, tables in group_tables(shard.read(), key):
        yield from function(params, value, tables)


def _join(
    function: MapFunction, params: Mapping[str, Any], shards: Sequence[Shard], key: str
) -> Iterator[pa.Table]:
    left, right = shards
    for value, one, other in join_groups(left.read(), right.read(), key):
        yield from function(params, value, one, other)


def _run(
    engine: Engine,
    parent: Path,
    stage: Stage,
    work: Work,
    function: MapFunction,
    inputs: Sequence[Dataset],
    schema: pa.Schema,
    *arguments: Any,
) -> Dataset:
    """A stage with one task a shard name of the inputs."""
    check_function(function)
    check_inputs(stage, inputs)
    names = _common_names(stage, inputs)

    def build(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        tasks = []
        for name in names:
            shards = tuple(dataset.shard(name) for dataset in inputs)
            extra = (name, schema, work, function, dict(stage.params), shards, arguments)
            rows, size = shards[0].rows, sum(shard.bytes for shard in shards)
            tasks.append(Task(name, _write, extra, rows, size))
        records = run_tasks(engine, stage, folder, stage.name, tasks)
        return [file for record in records for file in record["files"]], {}

    return build_stage(parent, stage, build)[0]


def _common_names(stage: Stage, inputs: Sequence[Dataset]) -> list[str]:
    if not inputs:
        raise PortolanError(f"stage {stage.name!r} has no input")
    names = inputs[0].names
    for dataset in inputs[1:]:
        if different := sorted(set(names) ^ set(dataset.names)):
            raise PortolanError(
                f"stage {stage.name!r}: {inputs[0].folder.name} and {dataset.folder.name} are not "
                f"co-partitioned: only one has shard {different[0]!r}",
            )
    return names


def _write(
    folder: Path,
    name: str,
    schema: pa.Schema,
    work: Work,
    function: MapFunction,
    params: Mapping[str, Any],
    shards: Sequence[Shard],
    arguments: Sequence[Any],
) -> dict[str, Any]:
    """The task: write one shard."""
    tables = work(function, params, shards, *arguments)
    return {"files": [write_shard(folder, name, schema, rebatch(_cast(tables, schema)))]}


def _cast(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """The columns of the schema, so that cuts do not depend on how the function typed them."""
    for table in tables:
        if table.schema.equals(schema):
            yield table
            continue
        if absent := [name for name in schema.names if name not in table.schema.names]:
            raise PortolanError(
                f"the function yields no column {absent[0]!r}, only {', '.join(table.column_names)}"
            )
        yield table.select(schema.names).cast(schema)
