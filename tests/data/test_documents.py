"""Stage folders: digests, shard bytes, and what a killed or damaged stage leaves behind."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.canonical import step_key
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    TableDigest,
    check_shards,
    document_id,
    open_stage,
    remove_partial,
    row_group_bounds,
    run_stage,
    shard_name,
    shard_of,
    write_shard,
)

HELLO = "b5e9c1ad071b3e7fc779cfaa5e523818"


def test_ids():
    assert document_id("hello") == HELLO
    assert document_id("\u00e9") == "90326970ab18793af7940a006cf10cb3"
    assert document_id("e\u0301") == "b23c1d2f7ba408b8dc0ba6f9447885a8"


def test_shards():
    assert (shard_of(HELLO, 7), shard_of(HELLO, 854), shard_of("f" * 32, 5)) == (4, 606, 4)
    assert shard_name(4, 7) == "part-00004-of-00007.parquet"


def test_step_key():
    assert step_key("normalise", 1, {"max_whitespace": 128}, []) == "b4ef346465680d76"


SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("flag", pa.bool_()),
    ]
)
rows = st.lists(
    st.tuples(
        st.none() | st.text(max_size=5), st.none() | st.integers(-5, 5), st.none() | st.booleans()
    ),
    max_size=12,
)


def digest(values, cuts=()):
    columns = list(zip(*values, strict=True)) or [(), (), ()]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    table = pa.table(arrays, schema=SCHEMA)
    state = TableDigest(SCHEMA)
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(values)]):
        state.update(table.slice(begin, end - begin))
    return state.hexdigest()


@given(rows, st.data())
def test_table_digest_depends_on_rows_only(values, data):
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3))
    assert digest(values, cuts) == digest(values)


@given(rows, rows)
def test_table_digest_tells_tables_apart(first, second):
    assert (digest(first) == digest(second)) == (first == second)


NESTED = pa.schema(
    [
        pa.field("words", pa.list_(pa.string())),
        pa.field("vector", pa.list_(pa.int8(), 2)),
        pa.field("point", pa.struct([("x", pa.float64()), ("name", pa.string())])),
        pa.field("key", pa.binary(2)),
    ]
)
nested_rows = st.lists(
    st.fixed_dictionaries(
        {
            "words": st.none() | st.lists(st.none() | st.sampled_from(["", "a", "ab"]), max_size=2),
            "vector": st.none() | st.lists(st.integers(-1, 1), min_size=2, max_size=2),
            "point": st.none()
            | st.fixed_dictionaries(
                {"x": st.sampled_from([0.0, 0.5]), "name": st.none() | st.just("")}
            ),
            "key": st.none() | st.sampled_from([b"ab", b"bc"]),
        }
    ),
    max_size=4,
)


def nested_digest(values, cut=0):
    table = pa.Table.from_pylist(values, NESTED)
    state = TableDigest(NESTED)
    for part in (table.slice(0, cut), table.slice(cut)):
        state.update(part)
    return state.hexdigest()


@given(nested_rows, nested_rows, st.integers(0, 4))
def test_table_digest_of_nested_columns(first, second, cut):
    assert nested_digest(first, cut) == nested_digest(first)
    assert (nested_digest(first) == nested_digest(second)) == (first == second)


def test_bytes_of_a_shard_do_not_depend_on_chunks(tmp_path):
    table = document_table([f"{n} " * 50 for n in range(4000)])
    parts = pa.concat_tables([table.slice(0, 7), table.slice(7, 2500), table.slice(2507)])
    for name, rows in (("one", table), ("three", parts)):
        write_shard(tmp_path, name, DOCUMENT_SCHEMA, [rows])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "three").read_bytes()


@given(st.lists(st.sampled_from([0, 10, 1 << 20, 40 << 20, 64 << 20, 90 << 20]), max_size=40))
def test_row_groups_cover_all_rows_within_limits(sizes):
    bounds = row_group_bounds(np.array(sizes, np.int64))
    assert [i for begin, end in bounds for i in range(begin, end)] == list(range(len(sizes)))
    for begin, end in bounds:
        assert end - begin == 1 or sum(sizes[begin:end]) <= 64 << 20


def test_row_groups_hold_at_most_8192_documents():
    assert row_group_bounds(np.ones(20000, np.int64)) == [(0, 8192), (8192, 16384), (16384, 20000)]


def document_table(texts):
    return pa.table(
        {
            "id": [document_id(text) for text in texts],
            "text": texts,
            "source_id": [None] * len(texts),
            "license": ["MIT"] * len(texts),
            "path": ["a"] * len(texts),
            "row": range(len(texts)),
            "extra": [None] * len(texts),
        },
        schema=DOCUMENT_SCHEMA,
    )


def build_of(texts):
    def build(folder):
        entry = write_shard(folder, "part-0.parquet", DOCUMENT_SCHEMA, [document_table(texts)])
        return [entry], {"counts": {"kept": len(texts)}}

    return build


def test_a_stage_is_built_once(tmp_path):
    stage = Stage("step", 1, {"a": 1}, ("x",), label="a/b")
    folder, manifest, skipped = run_stage(tmp_path, stage, build_of(["one", "two"]))
    assert folder.name == f"a~b_{stage.key}"
    assert not skipped
    assert manifest["shards"][0]["text_bytes"] == 6
    assert pq.read_table(folder / "part-0.parquet").schema.equals(DOCUMENT_SCHEMA)
    assert run_stage(tmp_path, stage, lambda _: pytest.fail("built twice"))[1:] == (manifest, True)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert check_shards(folder) == []


def test_equal_rows_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        run_stage(tmp_path / name, Stage("step", 1, {}), build_of(["one", "two"]))
    folder = Stage("step", 1, {}).folder_name
    for file in ("part-0.parquet", "manifest.json"):
        first, second = ((tmp_path / name / folder / file).read_bytes() for name in ("a", "b"))
        assert first == second


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "half_manifest", "key"])
def test_a_damaged_stage_is_built_again(tmp_path, damage):
    stage = Stage("step", 1, {})
    folder, manifest, _ = run_stage(tmp_path, stage, build_of(["one", "two"]))
    shard, manifest_path = folder / "part-0.parquet", folder / "manifest.json"
    content = shard.read_bytes()
    if damage == "truncate":
        shard.write_bytes(content[:-1])
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        manifest_path.unlink()
    elif damage == "half_manifest":
        manifest_path.write_bytes(manifest_path.read_bytes()[:50])
    else:
        manifest_path.write_text(json.dumps({**manifest, "key": "other"}))
    assert open_stage(folder, stage.key) is None
    assert run_stage(tmp_path, stage, build_of(["one", "two"]))[1:] == (manifest, False)
    assert shard.read_bytes() == content


def test_a_flipped_byte_is_named(tmp_path):
    folder, _, _ = run_stage(tmp_path, Stage("step", 1, {}), build_of(["one", "two"]))
    content = bytearray((folder / "part-0.parquet").read_bytes())
    content[20] ^= 1
    (folder / "part-0.parquet").write_bytes(content)
    assert check_shards(folder) == ["part-0.parquet"]


def test_a_failure_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        run_stage(tmp_path, Stage("step", 1, {}), build)
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "documents" / ".a_0.partial").mkdir(parents=True)
    (tmp_path / "documents" / ".tokenizer.json.x1.partial").write_text("half")
    (tmp_path / ".summary.json.x2.partial").write_text("half")
    (tmp_path / "documents" / "a_1").mkdir()
    remove_partial(tmp_path)
    assert [path.name for path in (tmp_path / "documents").iterdir()] == ["a_1"]
