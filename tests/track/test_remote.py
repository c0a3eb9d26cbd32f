import hashlib
import struct
import threading

import pytest

from portolan.track.remote import RETRIES, Gap, RemoteQueue
from portolan.track.tracker import Tracker, metrics_digest


class Remote:
    """An adapter that hangs until released, raises on chosen rows, or works."""

    name = "remote"

    def __init__(self, *, hang=False, failing=()):
        self.rows: list[int] = []
        self.calls = 0
        self.finished = False
        self.entered = threading.Event()
        self.release = threading.Event()
        self._failing = failing
        if not hang:
            self.release.set()

    def log(self, row, attempt, values):
        self.calls += 1
        self.entered.set()
        self.release.wait()
        if row in self._failing:
            raise ConnectionError("lower steps are refused")
        self.rows.append(row)

    def finish(self):
        self.finished = True


def open_queue(remote, gaps, **options):
    options = {"retry_seconds": 0.0, "circuit_seconds": 0.0, **options}
    return RemoteQueue(remote, gaps.append, **options)


def test_a_working_remote_gets_every_row():
    remote, gaps = Remote(), []
    queue = open_queue(remote, gaps)
    for row in range(100):
        queue.submit(row, 1, {"x": 1.0})
    queue.finish()
    assert remote.rows == list(range(100)) and remote.finished
    assert (gaps, queue.num_lost) == ([], 0)


def test_a_hanging_remote_loses_counted_rows_only():
    remote, gaps = Remote(hang=True), []
    queue = open_queue(remote, gaps, capacity=50)
    queue.submit(0, 1, {"x": 1.0})
    assert remote.entered.wait(5)
    for row in range(1, 121):
        queue.submit(row, 1, {"x": 1.0})
    queue.finish(timeout_seconds=0.05)
    assert {(gap.from_row, gap.to_row, gap.count) for gap in gaps} == {(51, 120, 70), (0, 50, 51)}
    assert queue.num_lost == 121 and not remote.finished
    assert gaps[0].detail()["adapter"] == "remote"
    remote.release.set()


def test_a_gap_ends_where_rows_get_through_again():
    remote, gaps = Remote(failing={3, 4, 5, 9}), []
    queue = open_queue(remote, gaps)
    for row in range(12):
        queue.submit(row, 1, {"x": 1.0})
    queue.finish()
    assert gaps == [Gap("remote", 3, 5, 3), Gap("remote", 9, 9, 1)]
    assert remote.rows == [0, 1, 2, 6, 7, 8, 10, 11] and queue.num_lost == 4


def test_retries_are_bounded_and_the_circuit_opens():
    remote, gaps = Remote(failing=range(1000)), []
    queue = open_queue(remote, gaps, circuit_seconds=1000.0)
    for row in range(1000):
        queue.submit(row, 1, {"x": 1.0})
    queue.finish()
    assert remote.calls <= RETRIES
    assert gaps == [Gap("remote", 0, 999, 1000)] and queue.num_lost == 1000


def test_a_failing_gap_callback_is_harmless():
    remote = Remote(failing={0})
    queue = RemoteQueue(remote, lambda gap: 1 / 0, retry_seconds=0.0, circuit_seconds=0.0)
    queue.submit(0, 1, {})
    queue.submit(1, 1, {})
    queue.finish()
    assert remote.rows == [1]


@pytest.mark.parametrize("remote", [Remote(hang=True), Remote(failing=range(1000)), None])
def test_the_local_record_is_the_same_whatever_the_remote_does(tmp_path, remote):
    gaps: list[Gap] = []
    queues = [] if remote is None else [open_queue(remote, gaps, capacity=10)]
    tracker = Tracker(tmp_path, 1, 0, remotes=queues)
    for row in range(200):
        tracker.log(row, {"loss": 1 / (row + 1)})
    for queue in queues:
        queue.finish(timeout_seconds=0.05)
    tracker.close()
    assert sum(gap.count for gap in gaps) == (200 if remote else 0)
    # The digest computed independently: key, its rows, its float64 bits.
    content = struct.pack("<qq4s", 4, 200, b"loss") + struct.pack("<200q", *range(200))
    content += struct.pack("<200d", *(1 / (row + 1) for row in range(200)))
    assert metrics_digest(tmp_path) == hashlib.sha256(content).hexdigest()
    if remote:
        remote.release.set()
