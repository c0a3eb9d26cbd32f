"""The engine on a toy pipeline: equal bytes wherever it runs, and nothing done twice."""

import itertools
import random
import shutil
from collections import Counter, defaultdict
from multiprocessing import resource_tracker

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.engine import toy

from portolan.data.documents import Stage, check_shards, run_stage, shard_name, write_shard
from portolan.data.engine import (
    Dataset,
    Engine,
    LocalExecutor,
    RayExecutor,
    exchange,
    map_shards,
    reduce_groups,
)
from portolan.data.engine.exchange import partition_of
from portolan.errors import PortolanError


def rows_of(dataset):
    return [row for path in dataset.paths for row in pq.read_table(path).to_pylist()]


def test_the_toy_pipeline_is_right(expected):
    root, _ = expected
    counts, grouped, totals, shares = toy.run_toy(Engine(), root)
    texts = [row for source in toy.write_sources(root).values() for row in rows_of(source)]
    assert len(texts) == 5700
    by_first = defaultdict(list)
    for row in texts:
        words = row["text"].split()
        by_first[words[0]].append((len(words), row["id"]))
    assert len(by_first["ship"]) > 0.9 * len(texts)
    assert [row["id"] for dataset in counts for row in rows_of(dataset)] == [
        row["id"] for row in texts
    ]
    parts = dict(zip(by_first, partition_of(pa.array(list(by_first)), 3), strict=True))
    for part, path in enumerate(grouped.paths):
        rows = pq.read_table(path, columns=["first", "words", "id"]).to_pydict()
        found = list(zip(*rows.values(), strict=True))
        inside = [(f, *row) for f, pairs in by_first.items() if parts[f] == part for row in pairs]
        assert found == sorted(inside)
    assert {row["first"]: (row["documents"], row["words"]) for row in rows_of(totals)} == {
        first: (len(pairs), sum(words for words, _ in pairs)) for first, pairs in by_first.items()
    }
    total = {first: sum(words for words, _ in pairs) for first, pairs in by_first.items()}
    assert Counter((row["id"], row["of"], row["share"]) for row in rows_of(shares)) == Counter(
        (name, total[first], words / total[first])
        for first, pairs in by_first.items()
        for words, name in pairs
    )


def test_manifests_say_what_the_files_hold(expected):
    root, _ = expected
    for manifest in root.glob("*/*/manifest.json"):
        dataset = Dataset.open(manifest.parent)
        assert check_shards(manifest.parent) == []
        for shard in dataset.shards:
            assert pq.read_metadata(shard.path).num_rows == shard.rows
            assert shard.status == ("complete" if shard.rows else "empty")
        assert str(root) not in manifest.read_text()


@pytest.mark.parametrize(
    ("workers", "task_bytes"),
    [(1, 1 << 14), pytest.param(8, 1 << 16, marks=pytest.mark.slow)],
)
def test_equal_bytes_for_any_workers_and_memory(expected, tmp_path, workers, task_bytes):
    with Engine(LocalExecutor(workers), task_bytes=task_bytes) as engine:
        toy.run_toy(engine, tmp_path)
    assert toy.tree(tmp_path) == expected[1]


# Ray forks to start its processes; JAX, which other tests have imported, warns of that.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_equal_bytes_on_ray(expected, tmp_path, ray_cluster):
    with Engine(RayExecutor(), task_bytes=1 << 16) as engine:
        toy.run_toy(engine, tmp_path)
    assert toy.tree(tmp_path) == expected[1]
    # An executor ends only what it started.
    assert ray_cluster.is_initialized()


def test_two_workers_open_no_port_and_leave_no_process(expected, tmp_path):
    # Python's own tracker of semaphores lives as long as this process.
    resource_tracker.ensure_running()
    me = psutil.Process()
    before, ports = set(me.children(recursive=True)), set()
    known = {connection.laddr for connection in me.net_connections()}

    def look(_):
        for process in {me, *me.children(recursive=True)} - before:
            ports.update(c.laddr for c in process.net_connections() if c.laddr not in known)
            workers.add(process.pid)

    workers = set()
    with Engine(LocalExecutor(2), report=look) as engine:
        toy.run_toy(engine, tmp_path)
    assert len(workers - {me.pid}) >= 2
    assert not ports
    assert set(me.children(recursive=True)) <= before
    assert toy.tree(tmp_path) == expected[1]


def dataset_of(root, label, rows, num_shards=1):
    """(key, n) rows as shards of consecutive rows."""
    schema = pa.schema([("key", pa.string()), ("n", pa.int64())])

    def build(folder):
        entries = []
        for shard in range(num_shards):
            part = rows[shard * len(rows) // num_shards : (shard + 1) * len(rows) // num_shards]
            table = pa.table([[k for k, _ in part], [n for _, n in part]], schema=schema)
            entries.append(write_shard(folder, shard_name(shard, num_shards), schema, [table]))
        return entries, {}

    folder, manifest, _ = run_stage(root, Stage("rows", 1, {"label": label}, label=label), build)
    return Dataset(folder, manifest)


@settings(max_examples=12)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcé"), st.integers(0, 3)), max_size=40),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1 << 6, 1 << 9, 1 << 29]),
)
def test_exchange_equals_a_sort(tmp_path_factory, inputs, partitions, ordered, task_bytes):
    root = tmp_path_factory.mktemp("exchange")
    datasets = [dataset_of(root, str(i), rows, 2) for i, rows in enumerate(inputs)]
    stage = Stage("moved", 1, {}, tuple(d.key for d in datasets))
    moved = exchange(
        Engine(task_bytes=task_bytes),
        root,
        stage,
        datasets,
        key="key",
        partitions=partitions,
        order=("n",) if ordered else (),
    )
    rows = sorted(itertools.chain(*inputs), key=lambda row: row if ordered else row[0])
    parts = partition_of(pa.array([key for key, _ in rows], pa.string()), partitions)
    for index, shard in enumerate(moved.shards):
        found = [tuple(row.values()) for table in shard.read() for row in table.to_pylist()]
        assert found == [row for row, part in zip(rows, parts, strict=True) if part == index]


def test_shuffled_input_gives_equal_digests(tmp_path):
    rows = [(f"k{n % 7}", n) for n in range(500)]
    digests = set()
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        dataset = dataset_of(tmp_path / str(seed), str(seed), rows, 1 + seed)
        stage = Stage("moved", 1, {}, (dataset.key,))
        moved = exchange(
            Engine(task_bytes=2048),
            tmp_path / str(seed),
            stage,
            [dataset],
            key="key",
            partitions=3,
            order=("n",),
        )
        digests.add(tuple(shard.digest for shard in moved.shards))
    assert len(digests) == 1


def test_every_parameter_of_an_exchange_changes_its_key(tmp_path):
    dataset = dataset_of(tmp_path, "a", [("x", 1), ("y", 2)])
    keys = {
        exchange(
            Engine(),
            tmp_path,
            Stage("moved", 1, {}, (dataset.key,)),
            [dataset],
            key=key,
            partitions=partitions,
            order=order,
        ).key
        for key, partitions, order in [
            ("key", 1, ()),
            ("n", 1, ()),
            ("key", 2, ()),
            ("key", 1, ("n",)),
        ]
    }
    assert len(keys) == 4


def test_moving_the_tree_or_other_workers_recompute_nothing(expected, tmp_path):
    shutil.copytree(expected[0], tmp_path / "moved", copy_function=shutil.copy2)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "moved").rglob("*.parquet")}
    with Engine(LocalExecutor(2)) as engine:
        toy.run_toy(engine, tmp_path / "moved", toy.fail_if_called)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert toy.tree(tmp_path / "moved") == expected[1]


def test_a_new_source_reruns_no_step_of_another(expected, tmp_path):
    shutil.copytree(expected[0], tmp_path, dirs_exist_ok=True)
    engine, sources = Engine(), toy.write_sources(tmp_path)
    counts = [
        toy.count_source(engine, tmp_path, key, source, toy.fail_if_called)
        for key, source in sources.items()
    ]
    added = toy.write_source(tmp_path, "web/new", 50, 1)
    counts.append(toy.count_source(engine, tmp_path, "web/new", added))
    _, totals, _ = toy.combine(engine, tmp_path, counts)
    assert sum(row["documents"] for row in rows_of(totals)) == 5750


def test_within_tells_sources_apart(tmp_path):
    schema = pa.schema([("id", pa.string())])

    def build(folder):
        return [
            write_shard(folder, f"{source}/part-0.parquet", schema, [pa.table({"id": [source]})])
            for source in ("a", "a~b")
        ], {}

    folder, _, _ = run_stage(tmp_path, Stage("two", 1, {}), build)
    dataset = Dataset.open(folder)
    assert dataset.shards == ()
    for source in ("a", "a~b"):
        (table,) = dataset.within(source).read("part-0.parquet")
        assert table["id"].to_pylist() == [source]


def test_misuse_is_refused_before_anything_starts(tmp_path):
    dataset = dataset_of(tmp_path, "a", [("x", 1)])
    other = dataset_of(tmp_path, "b", [("x", 1)], 2)
    keys = (dataset.key, other.key)
    schema = dataset.schema

    def run(function, inputs, stage_inputs=keys):
        map_shards(Engine(), tmp_path, Stage("s", 1, {}, stage_inputs), function, inputs, schema)

    with pytest.raises(PortolanError, match="cannot be sent to another process"):
        run(lambda params, tables: tables, [dataset])
    with pytest.raises(PortolanError, match="whose key is not in its inputs"):
        run(toy.count_words, [dataset], ())
    with pytest.raises(
        PortolanError, match="not co-partitioned: only one has shard 'part-00000-of"
    ):
        run(toy.count_words, [dataset, other])
    with pytest.raises(PortolanError, match="has no column 'words', only key, n"):
        exchange(
            Engine(),
            tmp_path,
            Stage("moved", 1, {}, keys),
            [dataset],
            key="words",
            partitions=2,
        )
    assert {path.name for path in tmp_path.iterdir()} == {dataset.folder.name, other.folder.name}


def test_progress_counts_documents_and_bytes(tmp_path):
    reports = []
    engine = Engine(report=reports.append)
    source = toy.write_source(tmp_path, "manual", 300, 3)
    toy.count_source(engine, tmp_path, "manual", source)
    assert [(r.stage, r.tasks, r.num_tasks, r.documents) for r in reports] == [
        ("count-manual", n, 3, 100 * n) for n in (1, 2, 3)
    ]
    assert reports[-1].bytes == sum(shard.bytes for shard in source.shards)
    assert reports[0].seconds_left > 0 == reports[-1].seconds_left
    toy.count_source(engine, tmp_path, "manual", source)
    assert len(reports) == 3


def test_reduce_may_leave_a_group_unread(tmp_path):
    dataset = dataset_of(tmp_path, "a", sorted((f"k{n % 3}", n) for n in range(99)))
    stage = Stage("heads", 1, {}, (dataset.key,))
    found = reduce_groups(
        Engine(), tmp_path, stage, dataset, key="key", function=first_row, schema=dataset.schema
    )
    assert [row["n"] for row in rows_of(found)] == [0, 1, 2]


def first_row(params, key, tables):
    yield next(tables).slice(0, 1)
