"""Exact dedup over sources: who survives, and where the losers are written."""

import hashlib

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.data import dedup
from portolan.data.dedup import NormalizedSource, find_duplicates
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    document_id,
    run_stage,
    shard_name,
    shard_of,
    write_shard,
)
from portolan.data.engine import Engine


def make_source(folder, key, texts, num_shards=1):
    ids = {document_id(text): text for text in texts}

    def build(target):
        entries = []
        for shard in range(num_shards):
            rows = [
                {"id": name, "text": ids[name], "path": "a", "row": 0}
                for name in sorted(ids)
                if shard_of(name, num_shards) == shard
            ]
            table = DOCUMENT_SCHEMA.empty_table().from_pylist(rows, schema=DOCUMENT_SCHEMA)
            name = shard_name(shard, num_shards)
            entries.append(write_shard(target, name, DOCUMENT_SCHEMA, [table]))
        return entries, {"counts": {"kept": len(ids)}}

    digest = hashlib.sha256("\0".join(sorted(texts)).encode()).hexdigest()
    stage = Stage("normalise", 1, {"key": key, "content": digest}, label=key)
    path, manifest, _ = run_stage(folder, stage, build)
    return NormalizedSource(key, path, manifest)


def losers(folder, manifest):
    found = {}
    for entry in manifest["shards"]:
        table = pq.read_table(folder / entry["name"])
        assert all(table["dup_doc"].to_pylist())
        assert table["id"].to_pylist() == sorted(table["id"].to_pylist())
        source = entry["name"].split("/")[0].replace("~", "/")
        found.setdefault(source, set()).update(table["id"].to_pylist())
    return found


def test_first_source_in_byte_order_survives(tmp_path):
    sources = [
        make_source(tmp_path, "b", ["x", "y", "z"], num_shards=2),
        make_source(tmp_path, "a/b", ["w", "y"]),
        make_source(tmp_path, "a", ["x", "y"], num_shards=3),
        make_source(tmp_path, "Z", ["z"]),
    ]
    folder, manifest, _ = find_duplicates(Engine(), sources, tmp_path / "attributes")
    x, y, z = map(document_id, "xyz")
    assert losers(folder, manifest) == {"Z": set(), "a": set(), "a/b": {y}, "b": {x, y, z}}
    assert manifest["dup_doc"] == {"Z": 0, "a": 0, "a/b": 1, "b": 3}
    # Co-partitioned: every shard of every source has its attribute file, empty ones say so.
    names = {entry["name"] for entry in manifest["shards"]}
    assert names == {f"{s.key.replace('/', '~')}/{n}" for s in sources for n in s.shard_names}
    assert {e["status"] for e in manifest["shards"] if e["name"].startswith("Z")} == {"empty"}
    assert find_duplicates(Engine(), sources[::-1], tmp_path / "attributes") == (
        folder,
        manifest,
        True,
    )


@settings(max_examples=8)
@given(
    st.dictionaries(
        st.sampled_from(["a", "a/b", "a.b", "B", "c"]),
        st.sets(st.sampled_from("pqrstuvwxyz"), min_size=1),
        min_size=1,
    ),
    st.sampled_from([1, 3, 1000]),
)
def test_equals_the_plain_definition(tmp_path_factory, texts, per_partition):
    folder = tmp_path_factory.mktemp("dedup")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "DOCUMENTS_PER_PARTITION", per_partition)
        sources = [make_source(folder, key, sorted(texts[key]), 2) for key in texts]
        path, manifest, _ = find_duplicates(Engine(), sources, folder / "attributes")
    expected, seen = {}, set()
    for key in sorted(texts, key=str.encode):
        expected[key] = {document_id(text) for text in texts[key] & seen}
        seen |= texts[key]
    assert losers(path, manifest) == expected
