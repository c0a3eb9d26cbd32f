"""Signals of a run folder: finished, killed, interrupted, resumed."""

import fcntl
import json
import os
from datetime import UTC, datetime

import pytest

from portolan.health.local import LocalRun, collect, is_training
from portolan.health.monitor import Monitor
from portolan.health.rules import Settings
from portolan.record.chain import Record
from portolan.record.times import format_time
from portolan.track.tracker import Tracker

START = datetime(2026, 3, 1, 10, tzinfo=UTC).timestamp()
STEPS = 40


class Folder:
    """A run folder written attempt by attempt."""

    def __init__(self, root):
        self.root = root / "run"
        self.records = []
        self.time = START

    def attempt(self, ordinal, start, end, reason, *, shift=0.0, ended=True, **digests):
        begin = format_time(datetime.fromtimestamp(self.time, UTC))
        clock = lambda: datetime.fromtimestamp(self.time, UTC)  # noqa: E731
        with Tracker(self.root, ordinal, start, clock=clock) as tracker:
            for row in range(start, end):
                self.time += 1.0
                loss = 3.0 - 0.01 * row + shift
                values = {"train/cross_entropy": loss, "norm/gradient/global": 0.3}
                tracker.log(row, values | {"router/entropy/0": 3.4})
        note = {"ordinal": ordinal, "start": start, "end": end if ended else None}
        (self.root / f"attempt-{ordinal}.json").write_text(
            json.dumps(note | ({"reason": reason} if ended else {}))
        )
        body = {"run": "r", "ordinal": ordinal, "start": begin, "config_digest": "c"} | digests
        if ended:
            body["end"] = format_time(datetime.fromtimestamp(self.time, UTC))
        self.record("attempt", body)
        self.time += 5.0
        return self

    def record(self, kind, body):
        moment = format_time(datetime.fromtimestamp(self.time, UTC))
        place = len(self.records)
        self.records.append(Record(place, f"{kind}:{place}", kind, moment, body, (), "", ""))

    def finish(self):
        step = self.root / "checkpoints" / "permanent" / f"step-{STEPS}"
        step.mkdir(parents=True)
        (step / "COMMIT").write_text("{}")
        os.utime(step / "COMMIT", (self.time, self.time))
        (self.root / "finished.json").write_text(json.dumps({"completed": STEPS}))
        return self

    def alarms(self, now=None):
        run = LocalRun(self.root, "r", STEPS, self.records, now)
        return Monitor(Settings(num_experts=32)).run(collect(run))


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def ids(alarms, *, active=True):
    return {alarm.rule.id for alarm in alarms if alarm.active or not active}


def test_a_finished_run_is_silent(folder):
    alarms = folder.attempt(1, 0, STEPS, "finished").finish().alarms()
    assert ids(alarms, active=False) == set()


def test_a_killed_run_is_paged(folder):
    found = folder.attempt(1, 0, 20, "", ended=False).alarms()
    assert ids(found) == {"H01"}
    assert "nothing left to retry" in found[0].text


def test_a_success_mark_without_the_end_is_disputed(folder):
    folder.attempt(1, 0, STEPS, "finished").finish()
    (folder.root / "checkpoints" / "permanent" / f"step-{STEPS}" / "COMMIT").unlink()
    (folder.root / "checkpoints" / "permanent" / f"step-{STEPS}").rmdir()
    found = folder.alarms()
    assert ids(found) == {"H01"} and "disputed" in found[0].text


def test_an_interrupted_run_waits_for_its_owner(folder):
    assert ids(folder.attempt(1, 0, 20, "interrupted").alarms()) == set()


def test_failures_at_one_place_stop(folder):
    folder.attempt(1, 0, 20, "it broke").attempt(2, 0, 21, "it broke")
    assert {"H01", "H16"} <= ids(folder.alarms())


def test_a_live_process_is_a_retry(folder):
    folder.attempt(1, 0, 20, "it broke")
    assert "H01" in ids(folder.alarms())
    assert "H01" not in ids(folder.alarms(now=folder.time + 1))


def test_a_running_one_is_judged_by_the_present_time(folder):
    folder.attempt(1, 0, 20, "", ended=False)
    assert ids(folder.alarms(now=folder.time + 60)) == set()
    late = ids(folder.alarms(now=folder.time + 1000))
    assert {"H02", "H03"} <= late and "H01" not in late


@pytest.mark.parametrize(("shift", "expected"), [(0.0, False), (0.003, True)])
def test_repeated_rows_must_agree(folder, shift, expected):
    folder.attempt(1, 0, 20, "interrupted").attempt(2, 10, 30, "interrupted", shift=shift)
    assert ("H20" in ids(folder.alarms())) == expected


def test_a_changed_digest_needs_a_record(folder):
    folder.attempt(1, 0, 20, "interrupted").attempt(2, 20, 30, "interrupted", config_digest="d")
    assert "H21" in ids(folder.alarms())


def test_a_declared_change_is_silent(folder):
    folder.attempt(1, 0, 20, "interrupted")
    folder.record("change", {"from_step": {"n": 20}, "planned": False, "refs": []})
    folder.attempt(2, 20, 30, "interrupted", config_digest="d")
    assert "H21" not in ids(folder.alarms())


def test_a_start_where_nothing_was_saved_breaks_the_curve(folder):
    folder.attempt(1, 0, 20, "interrupted").attempt(2, 25, 30, "interrupted")
    folder.time += 600
    assert "H22" in ids(folder.alarms(now=folder.time))


def test_the_lock_says_whether_a_process_trains(tmp_path):
    lock = tmp_path / ".lock"
    assert not is_training(tmp_path, START)
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR)
    assert not is_training(tmp_path, START)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert is_training(tmp_path, START)
    os.close(descriptor)
    assert not is_training(tmp_path, START)
