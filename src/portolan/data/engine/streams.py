"""Streams of tables: equal row groups, aligned rows, groups of equal keys, merges in order."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portolan.data.documents import ROW_GROUP_DOCUMENTS, ROW_GROUP_TEXT_BYTES, row_group_bounds
from portolan.errors import PortolanError


def row_bytes(table: pa.Table) -> np.ndarray:
    """Bytes of each row, int64[n]: lengths of strings and lists, widths of numbers."""
    sizes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        sizes += _value_bytes(pa.concat_arrays(column.chunks) if column.num_chunks else column)
    return sizes


def _value_bytes(values: Any) -> np.ndarray:
    """Bytes of each value of an Arrow array, int64[n]."""
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        lengths = pc.binary_length(values).fill_null(0)  # pyright: ignore
        return np.asarray(lengths).astype(np.int64)
    if pa.types.is_struct(kind):
        return sum((_value_bytes(child) for child in values.flatten()), np.zeros(len(values), int))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        counts = np.asarray(pc.list_value_length(values).fill_null(0)).astype(np.int64)  # pyright: ignore
        inner = np.concatenate([[0], np.cumsum(_value_bytes(pc.list_flatten(values)))])  # pyright: ignore
        ends = np.cumsum(counts)
        return inner[ends] - inner[ends - counts]
    return np.full(len(values), max(1, kind.bit_width // 8), np.int64)


def rebatch(
    tables: Iterable[pa.Table],
    max_bytes: int = ROW_GROUP_TEXT_BYTES,
    *,
    sizes: Callable[[pa.Table], np.ndarray] = row_bytes,
) -> Iterator[pa.Table]:
    """The same rows in tables of 8,192 rows, or fewer where those would exceed `max_bytes`.

    `sizes` gives the bytes of each row, int64[n]. Where the cuts fall depends on the rows alone,
    not on the tables that brought them.
    """
    rest: list[pa.Table] = []
    known = np.zeros(0, np.int64)
    for block in _gather(tables, max_bytes):
        known = np.concatenate([known, sizes(block)])
        block = pa.concat_tables([*rest, block])
        *whole, (last, _) = row_group_bounds(known, max_bytes)
        for begin, end in whole:
            yield block.slice(begin, end - begin)
        rest, known = [block.slice(last)], known[last:]
    yield from rest


def _gather(tables: Iterable[pa.Table], max_bytes: int) -> Iterator[pa.Table]:
    """Join small tables, so that a stream of single rows costs little."""
    pending: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        if not table.num_rows:
            continue
        pending.append(table)
        rows += table.num_rows
        size += table.nbytes
        if rows >= ROW_GROUP_DOCUMENTS or size >= max_bytes:
            yield pa.concat_tables(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.concat_tables(pending)


def align(*streams: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, ...]]:
    """Cut streams of co-partitioned rows into tuples of tables with equal numbers of rows.

    Raises:
        PortolanError: one stream has more rows than another.
    """
    iterators = [iter(stream) for stream in streams]
    heads: list[pa.Table | None] = [None] * len(iterators)
    while True:
        for index, iterator in enumerate(iterators):
            head = heads[index]
            while head is None or not head.num_rows:
                head = next(iterator, None)
                if head is None:
                    break
            heads[index] = head
        tables = [head for head in heads if head is not None]
        if not tables:
            return
        if len(tables) < len(heads):
            raise PortolanError(
                f"{len(heads)} co-partitioned shards differ in their number of rows",
                remedy="delete the attribute folders named in the error and run again",
            )
        rows = min(table.num_rows for table in tables)
        yield tuple(table.slice(0, rows) for table in tables)
        heads = [table.slice(rows) for table in tables]


def group_tables(tables: Iterable[pa.Table], key: str) -> Iterator[tuple[Any, Iterator[pa.Table]]]:
    """(value, its tables) for each value of a sorted column; a group is a stream, never held.

    The stream of a group is spent when the next group is asked for.

    Raises:
        PortolanError: the values do not rise.
    """
    previous = None
    for value, runs in itertools.groupby(_equal_runs(tables, key), key=itemgetter(0)):
        if previous is not None and value < previous:
            raise PortolanError(f"column {key!r} is not sorted: {value!r} after {previous!r}")
        previous = value
        yield value, (table for _, table in runs)


def _equal_runs(tables: Iterable[pa.Table], key: str) -> Iterator[tuple[Any, pa.Table]]:
    for table in tables:
        if not table.num_rows:
            continue
        column = table[key].combine_chunks()
        changes = np.asarray(pc.not_equal(column[1:], column[:-1]))  # pyright: ignore
        begins = np.concatenate([[0], np.flatnonzero(changes) + 1])
        ends = [*begins[1:], table.num_rows]
        values = column.take(pa.array(begins)).to_pylist()
        for value, begin, end in zip(values, begins, ends, strict=True):
            yield value, table.slice(begin, end - begin)


def join_groups(
    left: Iterable[pa.Table], right: Iterable[pa.Table], key: str
) -> Iterator[tuple[Any, Iterator[pa.Table], Iterator[pa.Table]]]:
    """(value, left tables, right tables) for each value on either side, in order."""
    lefts, rights = group_tables(left, key), group_tables(right, key)
    one, other = next(lefts, None), next(rights, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            assert one is not None
            yield one[0], one[1], iter(())
            one = next(lefts, None)
        elif one is None or other[0] < one[0]:
            yield other[0], iter(()), other[1]
            other = next(rights, None)
        else:
            yield one[0], one[1], other[1]
            one, other = next(lefts, None), next(rights, None)


def sort_rows(table: pa.Table, by: Sequence[str]) -> pa.Table:
    """Rows in rising order of the columns; rows with equal values keep their order."""
    row = "\0row"
    numbered = table.select(list(by)).append_column(row, pa.array(np.arange(table.num_rows)))
    keys = [(name, "ascending") for name in (*by, row)]
    return table.take(pc.sort_indices(numbered, sort_keys=keys))  # pyright: ignore


class _Head:
    """What was read and not yet merged of a sorted stream: at most two of its tables."""

    def __init__(self, rank: int, stream: Iterator[pa.Table], by: Sequence[str]) -> None:
        self.rank, self.stream, self.by = rank, stream, by
        self.rows = self.least_rows = 0

    def fill(self) -> bool:
        """Read on while less than a table is held; False when nothing is left.

        Heads of like size let a round of the merge pass on a large part of each.
        """
        while self.rows <= self.least_rows // 2 and (table := next(self.stream, None)) is not None:
            self.least_rows = max(self.least_rows, table.num_rows)
            self.hold(pa.concat_tables([self.table, table]) if self.rows else table)
        return self.rows > 0

    def hold(self, table: pa.Table) -> None:
        self.table, self.rows = table, table.num_rows
        self.columns = [table[name] for name in self.by]
        self.last = (*self.values(self.rows - 1), self.rank) if self.rows else ()

    def values(self, row: int) -> tuple[Any, ...]:
        return tuple(column[row].as_py() for column in self.columns)

    def take(self, bound: tuple[Any, ...]) -> pa.Table:
        """Remove and return the rows up to `bound`, values and rank."""
        *values, rank = bound
        search = bisect_right if self.rank <= rank else bisect_left
        rows = search(range(self.rows), tuple(values), key=self.values)
        taken = self.table.slice(0, rows)
        self.hold(self.table.slice(rows))
        return taken


def merge_sorted(streams: Sequence[Iterable[pa.Table]], by: Sequence[str]) -> Iterator[pa.Table]:
    """Merge streams sorted by `by`; equal rows come in the order of the streams.

    Each round takes all rows up to the least last row that is held. Memory: two tables a stream,
    and twice what a round takes of them.
    """
    heads = [_Head(rank, iter(stream), by) for rank, stream in enumerate(streams)]
    heads = [head for head in heads if head.fill()]
    while len(heads) > 1:
        bound = min(head.last for head in heads)
        taken = [head.take(bound) for head in heads]
        parts = [table for table in taken if table.num_rows]
        yield parts[0] if len(parts) == 1 else sort_rows(pa.concat_tables(parts), by)
        heads = [head for head in heads if head.fill()]
    for head in heads:
        yield head.table
        yield from head.stream
