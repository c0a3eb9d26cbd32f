"""Streams: cuts, alignment, groups and merges against plain Python."""

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.engine.exchange import partition_of
from portolan.data.engine.streams import (
    align,
    group_tables,
    join_groups,
    merge_sorted,
    rebatch,
    row_bytes,
    sort_rows,
)
from portolan.errors import PortolanError

keys = st.lists(st.sampled_from(["", "a", "b", "é", "e\u0301", "\U0001f6a2", "z"]), max_size=30)
cut_points = st.lists(st.integers(0, 30), max_size=5)


def cut(table, points):
    bounds = [0, *sorted(min(point, table.num_rows) for point in points), table.num_rows]
    return [table.slice(begin, end - begin) for begin, end in itertools.pairwise(bounds)]


def numbered(values, first=0):
    return pa.table({"key": pa.array(values, pa.string()), "n": range(first, first + len(values))})


def test_row_bytes():
    table = pa.table(
        {
            "text": ["ab", None, "é"],
            "n": pa.array([1, 2, 3], pa.int32()),
            "pair": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
            "words": [["a", "bc"], [], None],
            "point": [{"x": 1.0, "s": "abc"}, {"x": 2.0, "s": None}, None],
        }
    )
    assert row_bytes(table).tolist() == [2 + 4 + 2 + 3 + 11, 4 + 8, 2 + 4 + 2 + 8]


@given(st.lists(st.integers(0, 40), max_size=60), cut_points, st.sampled_from([1, 50, 10_000]))
def test_cuts_depend_on_rows_alone(lengths, points, limit):
    table = pa.table({"text": ["x" * length for length in lengths]})
    whole = list(rebatch([table], limit))
    assert [t.to_pydict() for t in rebatch(cut(table, points), limit)] == [
        t.to_pydict() for t in whole
    ]
    assert [row for t in whole for row in t["text"].to_pylist()] == table["text"].to_pylist()
    sizes = [sum(map(len, t["text"].to_pylist())) for t in whole]
    assert all(t.num_rows == 1 or size <= limit for t, size in zip(whole, sizes, strict=True))


def test_tables_hold_at_most_8192_rows():
    sizes = [table.num_rows for table in rebatch([numbered(["a"] * 20_000)])]
    assert sizes == [8192, 8192, 3616]


@given(st.integers(0, 20), cut_points, cut_points)
def test_aligned_rows_stand_side_by_side(rows, one, other):
    left, right = pa.table({"a": range(rows)}), pa.table({"b": range(rows)})
    pairs = list(align(cut(left, one), cut(right, other)))
    assert [n for a, _ in pairs for n in a["a"].to_pylist()] == list(range(rows))
    assert all(a["a"].to_pylist() == b["b"].to_pylist() for a, b in pairs)


def test_unequal_streams_do_not_align():
    with pytest.raises(PortolanError, match="differ in their number of rows"):
        list(align([pa.table({"a": [1, 2]})], [pa.table({"a": [1]})]))


@given(keys, cut_points, st.booleans())
def test_groups(values, points, skip):
    values = sorted(values)
    expected = [(key, len(list(rows))) for key, rows in itertools.groupby(values)]
    groups = group_tables(cut(numbered(values), points), "key")
    if skip:
        assert [key for key, _ in groups] == [key for key, _ in expected]
    else:
        assert [(key, sum(t.num_rows for t in tables)) for key, tables in groups] == expected


def test_unsorted_keys_are_refused():
    with pytest.raises(PortolanError, match="'key' is not sorted: 'a' after 'b'"):
        list(group_tables([numbered(["a", "b", "a"])], "key"))


@given(keys, keys, cut_points)
def test_join_covers_both_sides(one, other, points):
    one, other = sorted(one), sorted(other)
    joined = join_groups(cut(numbered(one), points), cut(numbered(other), points), "key")
    found = [(key, *(sum(t.num_rows for t in side) for side in sides)) for key, *sides in joined]
    assert found == [(k, one.count(k), other.count(k)) for k in sorted({*one, *other})]


@given(st.lists(keys, max_size=5), cut_points)
def test_merge_keeps_the_order_of_equal_rows(streams, points):
    tables = [numbered(sorted(values), 100 * rank) for rank, values in enumerate(streams)]
    merged = list(merge_sorted([cut(table, points) for table in tables], ["key"]))
    rows = [row for table in tables for row in zip(*table.to_pydict().values(), strict=True)]
    found = [row for t in merged for row in zip(*t.to_pydict().values(), strict=True)]
    assert found == sorted(rows, key=lambda row: row[0])


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("ab")), max_size=40))
def test_sort_is_stable(rows):
    table = pa.table({"a": [a for a, _ in rows], "b": [b for _, b in rows], "n": range(len(rows))})
    expected = sorted(range(len(rows)), key=lambda n: rows[n])
    assert sort_rows(table, ["a", "b"])["n"].to_pylist() == expected


def test_partitions_by_hash():
    # Golden: the first halves of XXH3-64 of "" (2d06800538d394c2) and "a" (e6c632b61e964e1f).
    found = partition_of(pa.array(["", "a"]), 1 << 16)
    assert found.tolist() == [0x2D06, 0xE6C6]
    for kind in (pa.int64(), pa.uint64(), pa.int32()):
        values = pa.array([1, 258], kind)
        raw = pa.array([n.to_bytes(8, "little") for n in (1, 258)], pa.binary())
        assert (partition_of(values, 997) == partition_of(raw, 997)).all()
    many = partition_of(pa.array(random.Random(0).sample(range(10**9), 5000)), 7)
    assert np.bincount(many, minlength=7).min() > 600
