"""Components of candidate groups: in memory, in rounds on disk, and when rounds do not end."""

import random

import numpy as np
import pyarrow as pa
import pytest
from tests.data.normalized import rows_of, write_sources

from portolan.data.documents import Stage, run_stage, write_shard
from portolan.data.engine import Dataset, Engine
from portolan.data.fuzzy.candidates import EDGE_SCHEMA, list_edges
from portolan.data.fuzzy.components import find_components, node_key
from portolan.data.fuzzy.label_rounds import NotConverged


def edge_dataset(folder, nodes, pairs):
    """Edges between nodes (source, id), cut into tables and shards."""

    def row(pair):
        values = []
        for node in pair:
            rank, name = nodes[node]
            values += [rank, int(name[:16], 16), int(name[16:], 16)]
        return dict(zip(EDGE_SCHEMA.names, values, strict=True))

    def build(partial):
        rows = [row(pair) for pair in pairs]
        entries = []
        for shard in range(2):
            part = rows[shard::2]
            pieces = [part[:5], part[5:]]
            tables = [pa.Table.from_pylist(piece, schema=EDGE_SCHEMA) for piece in pieces]
            entries.append(write_shard(partial, f"part-{shard}.parquet", EDGE_SCHEMA, tables))
        return entries, {}

    path, manifest, _ = run_stage(folder, Stage("edges", 1, {"pairs": len(pairs)}), build)
    return Dataset(path, manifest)


def listed_nodes(sources):
    """(rank, id) of every document."""
    return [
        (rank, row["id"])
        for rank, source in enumerate(sources)
        for row in rows_of(Dataset(source.folder, source.manifest))
    ]


def find(folder, sources, edges, **options):
    found = find_components(
        Engine(), sources, edges, 10**6, options.pop("max_rounds", 50), folder, **options
    )
    return {
        (source.key, row["id"]): (row["component"], row["component_size"])
        for source in sources
        for row in rows_of(found.within(source.key.replace("/", "~")))
    }


def test_rounds_on_disk_give_the_components_of_memory(tmp_path):
    texts = [f"text {number}" for number in range(120)]
    sources = write_sources(tmp_path, {"a": texts[:70], "a/b": texts[60:]})
    nodes = listed_nodes(sources)
    generator = random.Random(5)
    pairs = [tuple(generator.sample(range(len(nodes)), 2)) for _ in range(90)]
    pairs += [(i, i + 1) for i in range(20)]
    edges = edge_dataset(tmp_path, nodes, pairs)
    in_memory = find(tmp_path / "memory", sources, edges, max_nodes_in_memory=10**7)
    on_disk = find(tmp_path / "disk", sources, edges, max_nodes_in_memory=1)
    assert in_memory == on_disk
    groups = {node: {node} for node in range(len(nodes))}
    for first, second in pairs:
        if groups[first] is not groups[second]:
            groups[first] |= groups[second]
            for node in groups[second]:
                groups[node] = groups[first]
    names = [(sources[rank].key, name) for rank, name in nodes]
    for node, group in groups.items():
        if len(group) > 1:
            component = min(node_key(*names[member]) for member in group)
            assert in_memory[names[node]] == (component, len(group))
    assert len(in_memory) == sum(len(group) > 1 for group in groups.values())


def test_a_long_path_does_not_converge_in_3_rounds_and_publishes_nothing(tmp_path):
    sources = write_sources(tmp_path, {"a": [f"text {number}" for number in range(1000)]})
    nodes = listed_nodes(sources)
    edges = edge_dataset(tmp_path, nodes, [(i, i + 1) for i in range(999)])
    with pytest.raises(NotConverged, match="round 3") as raised:
        find(tmp_path / "disk", sources, edges, max_nodes_in_memory=1, max_rounds=3)
    assert raised.value.rounds == 3 and raised.value.changed > 0
    assert not list((tmp_path / "disk").glob("fuzzy_component_*"))
    found = find(tmp_path / "disk", sources, edges, max_nodes_in_memory=1)
    assert set(found.values()) == {(min(node_key("a", name) for _, name in nodes), 1000)}


def test_node_key_is_golden():
    name = "b5e9c1ad071b3e7fc779cfaa5e523818"
    assert node_key("source_007", name) == "e7ed7d5328fe61bc556c9a91a36d5638"
    assert node_key("source_008", name) != node_key("source_007", name)


def test_a_bucket_is_joined_to_its_first_node_wherever_tables_are_cut():
    buckets = np.repeat(np.arange(6, dtype=np.uint64), [1, 3, 2, 1, 4, 1])
    low = np.arange(12, dtype=np.uint64)
    zero = np.zeros(12, np.uint64)
    table = pa.table({"bucket": buckets, "source": zero.astype(np.int32), "high": zero, "low": low})
    expected = [(2, 1), (3, 1), (5, 4), (8, 7), (9, 7), (10, 7)]
    for cut in range(13):
        parts = [part for part in (table.slice(0, cut), table.slice(cut)) if part.num_rows]
        edges = [row for part in list_edges({}, iter(parts)) for row in part.to_pylist()]
        assert [(row["low"], row["to_low"]) for row in edges] == expected
