"""Faults: killed drivers and workers, poison, a full disk, damaged, missing and vanished files."""

import contextlib
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.engine import toy

from portolan.data.documents import (
    WORK,
    Stage,
    open_stage,
    remove_partial,
    run_stage,
    shard_name,
    write_shard,
)
from portolan.data.engine import Dataset, Engine, LocalExecutor, exchange, map_shards, tasks
from portolan.data.engine.executors import WorkerDied
from portolan.data.engine.tasks import TaskFailed
from portolan.errors import PortolanError, StorageError

REPOSITORY = Path(__file__).resolve().parents[3]


def finished_shards(root: Path) -> dict[Path, tuple[int, int]]:
    """Time and inode of the shards of finished tasks, by the place they will have at the end."""
    found = {}
    for record in root.glob(f"*/.*.partial/{WORK}/tasks/*.json"):
        partial_folder = record.parents[2]
        final = partial_folder.with_name(partial_folder.name[1 : -len(".partial")])
        for file in json.loads(record.read_text())["files"]:
            status = (partial_folder / file["name"]).stat()
            if not file["name"].startswith(WORK):
                found[final / file["name"]] = (status.st_mtime_ns, status.st_ino)
    for path in root.glob("*/*/part-*.parquet"):
        if not path.parent.name.startswith("."):
            found[path] = (path.stat().st_mtime_ns, path.stat().st_ino)
    return found


def num_shards(root: Path) -> int:
    """Shards seen so far, of a run that moves folders meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return sum(1 for _ in root.glob("*/*/part-*.parquet"))
    return 0


def num_records(root: Path) -> int:
    return sum(1 for _ in root.glob(f"*/.*.partial/{WORK}/tasks/*.json"))


def test_a_killed_run_goes_on_where_it_was(expected, tmp_path):
    toy.write_sources(tmp_path)
    command = [sys.executable, "-m", "tests.data.engine.toy", str(tmp_path), "2"]
    finished = finished_shards(tmp_path)
    kills, generator = 0, random.Random(7)
    for _ in range(2):
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            goal = len(finished) + generator.randint(1, 9)
            while process.poll() is None and num_shards(tmp_path) < goal:
                time.sleep(0.002)
            time.sleep(generator.random() * 0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        kills += process.returncode == -signal.SIGKILL
        psutil.wait_procs(children, timeout=10)
        assert not any(child.is_running() for child in children)
        now = finished_shards(tmp_path)
        assert finished.items() <= now.items()
        finished = now
        remove_partial(tmp_path)
    assert kills == 2
    # Nine shards were there before.
    assert len(finished) > 9
    toy.run_toy(Engine(task_bytes=1 << 16), tmp_path)
    assert toy.tree(tmp_path) == expected[1]
    assert finished.items() <= finished_shards(tmp_path).items()


@pytest.mark.slow
def test_killed_workers_lose_no_row(expected, tmp_path):
    generator, kills = random.Random(3), []

    def kill_one(progress):
        if progress.step != "totals" and progress.tasks == 2 and len(kills) < 4:
            process = generator.choice(list(executor.pool._processes))
            kills.append(process)
            os.kill(process, signal.SIGKILL)

    executor = LocalExecutor(2)
    with Engine(executor, report=kill_one) as engine:
        toy.run_toy(engine, tmp_path)
    assert len(kills) == 4
    assert toy.tree(tmp_path) == expected[1]


def test_a_task_that_kills_its_worker_is_named(expected, tmp_path):
    flag = tmp_path / "flag"
    flag.write_text("manual")
    root = tmp_path / "run"
    with Engine(LocalExecutor(2)) as engine:
        with pytest.raises(
            WorkerDied, match=r"died 3 times while it ran task part-0000\d-of-00003"
        ):
            toy.run_toy(engine, root, partial(toy.die, flag))
        flag.unlink()
        toy.run_toy(engine, root)
    assert toy.tree(root) == expected[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_is_named_at_once_and_keeps_the_rest(tmp_path, workers):
    source = toy.write_source(tmp_path, "web", 400, 4)
    flag = tmp_path / "flag"
    with Engine(LocalExecutor(workers)) as engine:
        toy.count_source(engine, tmp_path / "clean", "web", source)
        flag.touch()
        with pytest.raises(TaskFailed, match=r"web, task part-0000\d\S*: ValueError: a word is"):
            toy.count_source(engine, tmp_path, "web", source, partial(toy.refuse, flag))
        (folder,) = (tmp_path / "attributes").glob(".*.partial")
        manifest = json.loads((folder / "manifest.json").read_text())
        assert [entry["status"] for entry in manifest["shards"]].count("failed") == 1
        assert open_stage(folder, manifest["key"]) is None
        flag.unlink()
        done = toy.count_source(engine, tmp_path, "web", source, partial(toy.refuse, flag))
    assert done.num_rows == 400
    assert toy.tree(tmp_path / "clean/attributes") == toy.tree(tmp_path / "attributes")


def test_a_lost_connection_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RETRY_SECONDS", 0.0)
    source = toy.write_source(tmp_path, "web", 40, 1)
    function = partial(toy.lose_connection, tmp_path / "flag")
    assert toy.count_source(Engine(), tmp_path, "web", source, function).num_rows == 40
    assert (tmp_path / "flag.calls").read_text() == "xxx"
    monkeypatch.setattr(tasks, "MAX_RETRIES", 1)
    (tmp_path / "flag.calls").unlink()
    with pytest.raises(TaskFailed, match="ConnectionResetError: by peer"):
        toy.count_source(Engine(), tmp_path / "again", "web", source, function)


def test_finished_tasks_are_not_redone_after_an_exception(tmp_path):
    source = toy.write_source(tmp_path, "web", 400, 4)
    flag, calls = tmp_path / "flag", tmp_path / "flag.calls"
    third = source.shards[2].path
    content = third.read_bytes()
    third.write_bytes(content[:200])
    function = partial(toy.refuse, flag)
    with pytest.raises(PortolanError, match=r"task part-00002.*shard .* is damaged: ") as caught:
        toy.count_source(Engine(), tmp_path, "web", source, function)
    assert f"delete {source.folder} and run again" in caught.value.remedy
    assert calls.read_text() == "xxx"
    third.write_bytes(content)
    toy.count_source(Engine(), tmp_path, "web", source, function)
    assert calls.read_text() == "xxxxx"


def test_a_source_that_disappears_is_named(expected, tmp_path):
    counts = []
    for key, source in toy.write_sources(tmp_path).items():
        counts.append(toy.count_source(Engine(), tmp_path, key, source))
    gone = counts[1].paths[1]
    shutil.move(gone, tmp_path / "away")
    with pytest.raises(PortolanError, match=r"task spill-000004: shard .* is missing"):
        toy.combine(Engine(), tmp_path, counts)
    shutil.move(tmp_path / "away", gone)
    toy.combine(Engine(), tmp_path, counts)
    assert toy.tree(tmp_path) == expected[1]


@pytest.mark.parametrize("step", ["count", "combine"])
def test_a_full_disk_is_named_and_resumable(expected, tmp_path, step):
    """A limit on the size of files stands for a full disk: writing fails in the same way."""
    sources = toy.write_sources(tmp_path)

    def run():
        counts = [toy.count_source(Engine(), tmp_path, key, s) for key, s in sources.items()]
        toy.combine(Engine(), tmp_path, counts)

    if step == "combine":
        for key, source in sources.items():
            toy.count_source(Engine(), tmp_path, key, source)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = 1000 if step == "count" else 4000
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*[Ff]ile too large") as caught:
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "run the same command again" in caught.value.remedy
    run()
    assert toy.tree(tmp_path) == expected[1]


def test_empty_missing_and_failed_differ(tmp_path):
    schema = pa.schema([("key", pa.string())])

    def build(folder):
        rows = ([], ["a"], ["b"])
        return [
            write_shard(folder, shard_name(i, 3), schema, [pa.table({"key": part}, schema=schema)])
            for i, part in enumerate(rows)
        ], {}

    folder, manifest, _ = run_stage(tmp_path, Stage("three", 1, {}), build)
    manifest["shards"][2] = {
        "name": shard_name(2, 3),
        "status": "failed",
        "error": "ValueError: no",
    }
    (folder / shard_name(1, 3)).unlink()
    dataset = Dataset(folder, manifest)
    empty, missing, failed = dataset.shards
    assert (empty.status, list(empty.read())) == ("empty", [])
    assert pq.read_schema(empty.path).equals(schema)
    with pytest.raises(PortolanError, match="is missing"):
        list(missing.read())
    with pytest.raises(PortolanError, match="failed: ValueError: no"):
        list(failed.read())
    with pytest.raises(PortolanError, match="has no shard 'part-9'"):
        dataset.read("part-9")
    assert open_stage(folder, manifest["key"]) is None


def test_wrong_columns_are_named(tmp_path):
    source = toy.write_source(tmp_path, "web", 40, 1)
    with pytest.raises(PortolanError, match="has no column 'body'"):
        list(source.shards[0].read(["id", "body"]))
    stage = Stage("count", 1, {"source": "web"}, (source.key,))
    with pytest.raises(PortolanError, match=r"task part-00000.*no column 'first', only id, text"):
        map_shards(Engine(), tmp_path, stage, pass_on, [source], toy.COUNTS)
    nulls = pa.table({"id": ["a", None]})

    def build(folder):
        return [write_shard(folder, "part-0.parquet", nulls.schema, [nulls])], {}

    folder, manifest, _ = run_stage(tmp_path, Stage("nulls", 1, {}), build)
    stage = Stage("moved", 1, {}, (manifest["key"],))
    with pytest.raises(PortolanError, match="column 'id' has null values"):
        exchange(Engine(), tmp_path, stage, [Dataset(folder, manifest)], key="id", partitions=2)


def pass_on(params, tables):
    yield from tables


def test_two_runs_do_not_build_one_stage(tmp_path):
    source = toy.write_source(tmp_path, "web", 40, 2)
    held = source.shards[1].path.rename(tmp_path / "held")
    with pytest.raises(PortolanError, match="is missing"):
        toy.count_source(Engine(), tmp_path, "web", source)
    held.rename(source.shards[1].path)
    (lock,) = tmp_path.glob(f"attributes/.*.partial/{tasks.LOCK}")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PortolanError, match="another process is building"):
            toy.count_source(Engine(), tmp_path, "web", source)
    assert toy.count_source(Engine(), tmp_path, "web", source).num_rows == 40


def test_unfinished_stages_stay_until_a_run_is_complete(tmp_path):
    source = toy.write_source(tmp_path, "web", 40, 2)
    source.shards[1].path.unlink()
    with pytest.raises(PortolanError, match="is missing"):
        toy.count_source(Engine(), tmp_path, "web", source)
    assert num_records(tmp_path) == 1
    remove_partial(tmp_path)
    assert num_records(tmp_path) == 1
    remove_partial(tmp_path, resumable=True)
    assert not list(tmp_path.rglob(".*"))
