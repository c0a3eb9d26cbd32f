"""Files of sorted runs between two kinds of tasks: who writes many partitions, who merges one.

A writing task leaves one Arrow file of runs; a run is sorted by (partition, *by) and cut into one
segment a partition. A merging task reads its segments of all files, in (file, run) order.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from portolan.data.documents import WORK, hidden_path, row_group_bounds
from portolan.data.engine.streams import merge_sorted, rebatch, row_bytes, sort_rows
from portolan.errors import PortolanError

SEGMENTS = f"{WORK}/segments"
SEGMENT_INDEX = f"{WORK}/segments.npy"
# A run beside its sorted copy and the sort itself, or the tables of a merge (two of 1 MiB a stream)
# beside their sorted copy, fit into the budget.
RUN_SHARE, MERGE_SHARE = 4, 8
BATCH_BYTES = 1 << 20
PARTITION = "\0partition"


def segments_name(number: int, suffix: str = ".arrow") -> str:
    """File of the writing task `number`, relative to the folder of its stage."""
    return f"{SEGMENTS}/{number:06d}{suffix}"


def write_runs(
    folder: Path,
    number: int,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    *,
    by: Sequence[str],
    partitions: int,
    partition_of: Callable[[pa.Table], np.ndarray],
    task_bytes: int,
) -> dict[str, Any]:
    """Write the rows of a task, and beside them where the segments of each run begin.

    `partition_of` gives int64[rows]. Memory: `task_bytes`.

    Raises:
        PortolanError: a column of `by` has null values.
    """
    path = folder / segments_name(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = hidden_path(path)
    runs: list[np.ndarray] = []
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    try:
        with (
            pa.OSFile(str(hidden), "wb") as sink,
            pa.ipc.new_file(sink, schema, options=options) as writer,
        ):
            for table in _runs(tables, by, task_bytes // RUN_SHARE):
                parts = partition_of(table)
                table = sort_rows(table.append_column(PARTITION, pa.array(parts)), (PARTITION, *by))
                table = table.drop_columns([PARTITION]).cast(schema)
                runs.append(_write_run(writer, table, np.bincount(parts, minlength=partitions)))
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    table = np.array(runs, np.int64).reshape(len(runs), 3, partitions)
    _save(path.with_suffix(".npy"), table)
    names = (segments_name(number), segments_name(number, ".npy"))
    files = [{"name": name, "bytes": (folder / name).stat().st_size} for name in names]
    return {"files": files, "num_runs": len(runs)}


def _save(path: Path, array: np.ndarray) -> None:
    hidden = hidden_path(path)
    with hidden.open("wb") as file:
        np.save(file, array)
    hidden.replace(path)


def _runs(tables: Iterable[pa.Table], by: Sequence[str], run_bytes: int) -> Iterator[pa.Table]:
    """Consecutive rows in tables of about `run_bytes`."""
    pending: list[pa.Table] = []
    size = 0
    for table in itertools.chain.from_iterable(rebatch([table], run_bytes) for table in tables):
        for name in by:
            if table[name].null_count:
                raise PortolanError(f"column {name!r} has null values: rows cannot be sorted by it")
        if pending and size + table.nbytes > run_bytes:
            yield pa.concat_tables(pending)
            pending, size = [], 0
        pending.append(table)
        size += table.nbytes
    if pending:
        yield pa.concat_tables(pending)


def _write_run(writer: Any, table: pa.Table, rows: np.ndarray) -> np.ndarray:
    """Write a sorted run; batches, rows and bytes of each partition, int64[3, partitions]."""
    table = table.combine_chunks()
    sizes, ends = row_bytes(table), np.cumsum(rows)
    counts = np.zeros((3, len(rows)), np.int64)
    counts[1] = rows
    for part in np.flatnonzero(rows):
        begin, end = ends[part] - rows[part], ends[part]
        bounds = row_group_bounds(sizes[begin:end], BATCH_BYTES)
        for low, high in bounds:
            writer.write_table(table.slice(begin + low, high - low), max_chunksize=high - low)
        counts[0, part], counts[2, part] = len(bounds), sizes[begin:end].sum()
    return counts


def write_index(
    folder: Path, records: Sequence[dict[str, Any]], partitions: int
) -> tuple[list[int], list[int]]:
    """Write the sidecar of all runs, int64[runs, 2 + partitions]: file number, then batch numbers.

    A merging task reads three columns of it instead of every footer. Returns rows and bytes of
    each partition.
    """
    num_runs = sum(record["num_runs"] for record in records)
    index = np.zeros((num_runs, 2 + partitions), np.int64)
    totals = np.zeros((3, partitions), np.int64)
    line = 0
    for number, record in enumerate(records):
        runs = np.load(folder / segments_name(number, ".npy"))
        totals += runs.sum(axis=0)
        lines = index[line : line + record["num_runs"]]
        lines[:, 0] = number
        # Batches are numbered through the file: run after run, partition after partition.
        ends = np.cumsum(runs[:, 0]).reshape(-1, partitions)
        lines[:, 2:] = ends
        lines[:, 1] = ends[:, 0] - runs[:, 0, 0]
        line += record["num_runs"]
    _save(folder / SEGMENT_INDEX, index)
    return totals[1].tolist(), totals[2].tolist()


def merge_partition(
    folder: Path,
    partition: int,
    *,
    by: Sequence[str],
    num_bytes: int,
    task_bytes: int,
    prepare: Callable[[int, pa.Table], pa.Table] | None = None,
) -> Iterator[pa.Table]:
    """Rows of a partition in the order of `by`, equal ones in (file, run, row) order.

    A small partition is sorted at once; a larger one is merged as a stream, in several passes when
    its runs are many. `prepare(file_number, table)` may drop rows and add columns. Memory:
    `task_bytes`, or one row of every run where a row is larger than 1 MiB.
    """
    index = np.load(folder / SEGMENT_INDEX, mmap_mode="r")
    places = index[:, [0, 1 + partition, 2 + partition]].tolist()
    streams = [
        _read_segment(folder, number, begin, end, prepare)
        for number, begin, end in places
        if end > begin
    ]
    if num_bytes <= task_bytes // RUN_SHARE:
        if tables := list(itertools.chain.from_iterable(streams)):
            yield sort_rows(pa.concat_tables(tables), by)
        return
    fan_in = max(2, task_bytes // MERGE_SHARE // BATCH_BYTES)
    passed: list[Path] = []
    try:
        while len(streams) > fan_in:
            groups = [streams[i : i + fan_in] for i in range(0, len(streams), fan_in)]
            used, streams = passed, []
            passed = [hidden_path(folder / WORK / f"merge-{partition}") for _ in groups]
            for group, path in zip(groups, passed, strict=True):
                streams.append(_write_pass(path, merge_sorted(group, by)))
            for path in used:
                path.unlink(missing_ok=True)
        yield from merge_sorted(streams, by)
    finally:
        for path in passed:
            path.unlink(missing_ok=True)


def _read_segment(
    folder: Path,
    number: int,
    begin: int,
    end: int,
    prepare: Callable[[int, pa.Table], pa.Table] | None,
) -> Iterator[pa.Table]:
    for table in _read_batches(folder / segments_name(number), begin, end):
        yield table if prepare is None else prepare(number, table)


def _read_batches(path: Path, begin: int, end: int | None) -> Iterator[pa.Table]:
    """Batches of a file that is open only while they are read."""
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as file:
        for number in range(begin, file.num_record_batches if end is None else end):
            yield pa.Table.from_batches([file.get_batch(number)])


def _write_pass(path: Path, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Write a merged stream; return the stream that reads it back."""
    blocks = rebatch(tables, BATCH_BYTES)
    if (first := next(blocks, None)) is None:
        return iter(())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
        for table in itertools.chain([first], blocks):
            writer.write_table(table.combine_chunks())
    return _read_batches(path, 0, None)
