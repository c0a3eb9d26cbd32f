import errno
import json
import math
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.errors import StorageError
from portolan.record.lineage import valid_intervals
from portolan.track import tail as tail_module
from portolan.track.segments import list_segments
from portolan.track.tracker import Tracker, attempt_starts, metrics_digest, read_metrics, read_raw

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def loss(row: int) -> float:
    """A loss that depends on the row alone, as in a bitwise resume."""
    return 4.0 - row / 64


def train(folder, attempt, start, end, *, save_every=5, crash=False):
    """Log rows [start, end) and flush at steps divisible by `save_every`."""
    tracker = Tracker.open(folder, attempt, start)
    for row in range(start, end):
        seconds = attempt + row / 100
        tracker.log(row, {"train/loss": loss(row), "throughput/step_seconds": seconds})
        if (row + 1) % save_every == 0:
            tracker.flush_segment()
    if crash:
        tracker._tail.close()
    else:
        tracker.close()


def curve(frame):
    part = frame.filter(frame["key"] == "train/loss")
    return list(zip(part["row"].to_list(), part["attempt"].to_list(), strict=True))


def test_tail_and_segment_hold_the_same_rows(tmp_path):
    tracker = Tracker(tmp_path, 1, 0, clock=lambda: NOON)
    values = {"loss": 1.5, "norm": 2, "nan": math.nan, "up": math.inf, "down": -math.inf}
    tracker.log(-1, {"eval": 9.0})
    tracker.log(0, values)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert line == {
        "row": 0,
        "completed": 1,
        "attempt": 1,
        "time": "2026-01-01T12:00:00.000Z",
        "key": "loss",
        "value": 1.5,
    }
    live = read_metrics(tmp_path)
    (path,) = tracker.flush_segment()
    assert path.name == "segment-1--1-0.parquet"
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    stored = read_metrics(tmp_path)
    assert live.equals(stored, null_equal=True)
    assert stored.columns == ["row", "completed", "attempt", "time", "key", "value"]
    found = dict(zip(stored["key"], stored["value"], strict=True))
    assert math.isnan(found["nan"]) and (found["up"], found["down"]) == (math.inf, -math.inf)
    assert stored["time"].unique().to_list() == [NOON]
    assert read_metrics(tmp_path, keys=["loss"])["key"].to_list() == ["loss"]
    tracker.close()


def test_equal_rows_give_equal_bytes(tmp_path):
    contents = []
    for name, order in (("a", 1), ("b", -1)):
        tracker = Tracker(tmp_path / name, 1, 0, clock=lambda: NOON)
        for row in range(20):
            tracker.log(row, dict([("x", loss(row)), ("y", -loss(row))][::order]))
        (path,) = tracker.flush_segment()
        contents.append(path.read_bytes())
        tracker.close()
    assert contents[0] == contents[1]


def test_repeated_flushes_never_replace_a_segment(tmp_path):
    tracker = Tracker(tmp_path, 1, 0)
    for key in ("a", "b", "c"):
        tracker.log(9, {key: 1.0})
        tracker.flush_segment()
    assert tracker.flush_segment() == []
    tracker.close()
    names = [segment.path.name for segment in list_segments(tmp_path)]
    assert names == ["segment-1-9-9.parquet", "segment-1-9-9.2.parquet", "segment-1-9-9.3.parquet"]
    assert read_raw(tmp_path)["key"].to_list() == ["a", "b", "c"]


def test_log_never_raises_for_strange_values(tmp_path):
    class Bad:
        def __float__(self):
            raise RuntimeError("no")

    tracker = Tracker(tmp_path, 1, 0)
    tracker.log(0, {"text": "x", "none": None, "bad": Bad(), "ok": np.float32(0.5), 3: True})
    tracker.log("row", {"ok": 1.0})  # type: ignore[arg-type]
    tracker.log(1, {})
    tracker.close()
    tracker.log(2, {"late": 1.0})
    assert tracker.num_dropped_values == 5
    frame = read_raw(tmp_path)
    assert dict(zip(frame["key"], frame["value"], strict=True)) == {"ok": 0.5, "3": 1.0}


CHILD = """
import os, sys
from pathlib import Path
from portolan.track.tracker import Tracker
tracker = Tracker(Path(sys.argv[1]), 1, 0)
for row in range(50):
    tracker.log(row, {"train/loss": 4.0 - row / 64})
    if row == 19:
        tracker.flush_segment()
print("ready", flush=True)
sys.stdin.read()
"""


def test_sigkill_loses_no_row(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    child.stdin.close()
    tail = tmp_path / "metrics.jsonl"
    tail.write_bytes(tail.read_bytes() + b'{"row":50,"comple')
    assert read_metrics(tmp_path).height == 50
    tracker = Tracker.open(tmp_path, 2, 20)
    assert tracker.num_dropped_lines == 1
    assert read_raw(tmp_path)["row"].to_list() == list(range(50))
    tracker.close()
    assert [s.path.name for s in list_segments(tmp_path)] == [
        "segment-1-0-19.parquet",
        "segment-1-20-49.parquet",
    ]


def test_crash_between_segment_and_empty_tail(tmp_path):
    tracker = Tracker(tmp_path, 1, 0)
    tracker.log(0, {"x": 1.0})
    tracker.log(1, {"x": 2.0})
    tail = (tmp_path / "metrics.jsonl").read_bytes()
    tracker.close()
    (tmp_path / "metrics.jsonl").write_bytes(tail)
    assert read_raw(tmp_path)["value"].to_list() == [1.0, 2.0]
    Tracker.open(tmp_path, 2, 2).close()
    assert len(list_segments(tmp_path)) == 1


def test_replayed_rows_are_superseded(tmp_path):
    train(tmp_path, 1, 0, 13, crash=True)
    train(tmp_path, 2, 10, 18, crash=True)
    train(tmp_path, 3, 15, 15, crash=True)
    train(tmp_path, 4, 10, 20)
    frame = read_metrics(tmp_path)
    owners = [(row, 1) for row in range(10)] + [(row, 4) for row in range(10, 20)]
    assert curve(frame) == owners
    assert len(curve(read_raw(tmp_path))) == 13 + 8 + 10
    assert attempt_starts(tmp_path) == {1: 0, 2: 10, 3: 15, 4: 10}
    given = read_metrics(tmp_path, {1: (0, 10), 2: (10, 12)})
    assert curve(given)[-2:] == [(10, 2), (11, 2)]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4))
def test_canonical_view_is_the_interval_formula(tmp_path_factory, attempts):
    folder = tmp_path_factory.mktemp("run")
    spans = [(0, attempts[0][1])]
    for start, length in attempts[1:]:
        start = min(start, valid_intervals(spans)[-1].end)
        spans.append((start, start + length))
    for ordinal, (start, end) in enumerate(spans, 1):
        train(folder, ordinal, start, end, crash=True)
    expected = [
        (row, ordinal)
        for ordinal, interval in enumerate(valid_intervals(spans), 1)
        for row in range(interval.start, interval.end)
    ]
    assert curve(read_metrics(folder)) == sorted(expected)


def test_digest_compares_curves_not_histories(tmp_path):
    train(tmp_path / "whole", 1, 0, 20, save_every=7)
    train(tmp_path / "killed", 1, 0, 13, crash=True)
    train(tmp_path / "killed", 2, 10, 20)
    whole, killed = (metrics_digest(tmp_path / name) for name in ("whole", "killed"))
    assert whole == killed
    assert metrics_digest(tmp_path / "whole", exclude=()) != metrics_digest(
        tmp_path / "killed", exclude=()
    )
    tracker = Tracker(tmp_path / "killed", 3, 20)
    tracker.log(20, {"train/loss": 1.0})
    tracker.close()
    assert metrics_digest(tmp_path / "killed") != whole


def test_digest_sees_one_bit(tmp_path):
    digests = set()
    for number, value in enumerate([1.0, np.nextafter(1.0, 2.0), math.nan, -math.nan, 0.0, -0.0]):
        tracker = Tracker(tmp_path / str(number), 1, 0)
        tracker.log(0, {"x": value})
        tracker.close()
        digests.add(metrics_digest(tmp_path / str(number)))
    assert len(digests) == 5, "every NaN counts as one value, -0.0 differs from 0.0"


def test_full_disk_keeps_whole_lines_and_the_values(tmp_path, monkeypatch):
    tracker = Tracker(tmp_path, 1, 0)
    tracker.log(0, {"x": 1.0})
    real = os.pwrite

    def fill(descriptor, content, offset):
        if len(content) > 5:
            return real(descriptor, content[:5], offset)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(tail_module.os, "pwrite", fill)
    with pytest.raises(StorageError, match="metrics"):
        tracker.log(1, {"x": 2.0})
    monkeypatch.undo()
    tracker.log(2, {"x": 3.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [0, 2]
    tracker.close()
    assert read_raw(tmp_path)["value"].to_list() == [1.0, 2.0, 3.0]


def test_damaged_segment_is_named(tmp_path):
    train(tmp_path, 1, 0, 5)
    (segment,) = list_segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-20])
    with pytest.raises(StorageError, match="segment-1-0-4"):
        read_metrics(tmp_path)


def test_fsync_every_thousand_rows_or_five_seconds(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(tail_module, "FSYNC_ROWS", 3)
    tracker = Tracker(tmp_path, 1, 0)
    real = os.fsync
    monkeypatch.setattr(tail_module.os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    for row in range(3):
        tracker.log(row, {"x": 1.0})
    deadline = 200
    while not synced and deadline:
        tracker._tail._thread.join(0.01)
        deadline -= 1
    assert synced
    monkeypatch.undo()
    tracker.close()


def test_empty_run(tmp_path):
    assert read_raw(tmp_path).height == 0
    assert read_metrics(tmp_path).columns == [
        "row",
        "completed",
        "attempt",
        "time",
        "key",
        "value",
    ]
