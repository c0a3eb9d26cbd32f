"""The signals that Portolan's own runs leave: metrics, attempts, checkpoints, room on the disk.

Rules over schedulers, links, collectives and host memory need signals that only a cluster has;
they come from a trace and count as not measured here.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.files import read_json
from portolan.health.attempts import FINISHED
from portolan.health.signals import Signal, from_metric
from portolan.record.chain import Record
from portolan.record.lineage import LineageError, check_spans
from portolan.record.status import Signals, derive_status
from portolan.record.times import parse_time

METRIC_PREFIXES = (
    "train/cross_entropy",
    "train/loss",
    "norm/gradient/global",
    "router/drop_fraction/",
    "router/entropy/",
    "router/bias_",
    "throughput/tokens_per_second",
    "throughput/mfu",
    "eval_",
)
"""Metrics that some rule reads."""
LOSS_KEY = "train/cross_entropy"
SETTLE_SECONDS = 3600.0
"""After a finished run the clock runs on, so that what belonged to its last minutes is over."""
LOCK, FINISHED_FILE = ".lock", "finished.json"
FRESH_SECONDS = 60.0


@dataclass(frozen=True)
class LocalRun:
    """A run folder, its plan, and what the journal says of its attempts and changes.

    `now` is the present time while the run is alive, None once it is not.
    """

    folder: Path
    run_id: str
    steps: int
    records: Sequence[Record]
    now: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the success mark is there."""
        return (self.folder / FINISHED_FILE).is_file()


def is_training(folder: Path, now: float) -> bool:
    """Whether a process holds the run's lock; where none can be read, whether metrics are new."""
    lock = folder / LOCK
    if not lock.is_file():
        return False
    try:
        table = Path("/proc/locks").read_text("ascii")
    except OSError:
        tail = folder / "metrics.jsonl"
        return tail.is_file() and now - tail.stat().st_mtime < FRESH_SECONDS
    # The device is left out: layered file systems show another one than `stat` does.
    inode = f":{lock.stat().st_ino}"
    held = (line.split() for line in table.splitlines() if "FLOCK" in line)
    return any(word.endswith(inode) for words in held for word in words)


def collect(run: LocalRun) -> list[Signal]:
    """Every signal of a run in order of time; bounded by the number of its metric rows."""
    signals = list(_metrics(run))
    last = max((signal.time for signal in signals), default=0.0)
    signals += _attempts(run, last)
    signals += _checkpoints(run)
    signals += _resumes(run)
    rows = [signal.row for signal in signals if signal.name == LOSS_KEY and signal.row is not None]
    signals += _changes(run, last, max(rows, default=-1) + 1)
    if run.now is not None:
        signals += _room(run, run.now)
        signals.append(Signal(run.now, "clock", 0))
    order = {"attempt/start": 0, "attempt/end": 2}
    signals.sort(key=lambda signal: (signal.time, order.get(signal.name, 1)))
    if run.now is None and signals and run.finished:
        signals.append(Signal(signals[-1].time, "phase", FINISHED))
        signals.append(Signal(signals[-1].time + SETTLE_SECONDS, "clock", 0))
    return signals


def _metrics(run: LocalRun) -> Iterator[Signal]:
    import polars as pl

    from portolan.track.tracker import read_metrics

    frame = read_metrics(run.folder)
    wanted = pl.any_horizontal(pl.col("key").str.starts_with(p) for p in METRIC_PREFIXES)
    frame = frame.filter(wanted).sort("time", maintain_order=True)
    seconds = frame["time"].dt.timestamp("ms") / 1000
    columns = (seconds, frame["key"], frame["value"], frame["row"])
    for time, key, value, row in zip(*columns, strict=True):
        yield from_metric(time, key, value, row)


def _newest_attempts(run: LocalRun) -> list[Mapping[str, Any]]:
    """Newest record of each attempt, by ordinal."""
    found: dict[int, Mapping[str, Any]] = {}
    for record in run.records:
        if record.type == "attempt" and record.body.get("run") == run.run_id:
            found[int(record.body["ordinal"])] = record.body
    return [found[ordinal] for ordinal in sorted(found)]


def _attempts(run: LocalRun, last: float) -> Iterator[Signal]:
    """Starts with their digests, ends with their derived status."""
    changes = [
        parse_time(record.time).timestamp() for record in run.records if record.type == "change"
    ]
    attempts, before = _newest_attempts(run), 0.0
    for body in attempts:
        start = parse_time(body["start"]).timestamp()
        declared = any(before <= time <= start + 1 for time in changes)
        yield Signal(
            start,
            "attempt/start",
            {
                "ordinal": body["ordinal"],
                "change": "recorded" if declared else "",
                "config": body.get("config_digest", ""),
                "code": body.get("code_commit", ""),
                "data": body.get("data_manifest_digest", ""),
            },
        )
        newest = body is attempts[-1]
        end = body.get("end")
        if end is not None or (newest and run.now is None):
            time = last if end is None else parse_time(end).timestamp()
            # A live process is a retry: the attempt before it did not end the run.
            yield Signal(time, "attempt/end", _end(run, body, newest and run.now is None))
        before = start


def _end(run: LocalRun, body: Mapping[str, Any], newest: bool) -> dict[str, Any]:
    """Status of an attempt that is over, from what it left and not from its own word alone.

    A person who interrupts a run resumes it by the same command, so that counts as a retry left.
    """
    note_path = run.folder / f"attempt-{body['ordinal']}.json"
    note = read_json(note_path) if note_path.is_file() else {}
    reason = str(note.get("reason") or "the process is gone and left no reason")
    completed = int(note.get("end") or 0)
    status, disputed = "failed", False
    if newest:
        complete = completed >= run.steps
        saved = (run.folder / "checkpoints" / "permanent" / f"step-{completed}").is_dir()
        derived = derive_status(
            Signals(
                mark=run.finished,
                final_step=complete or run.finished,
                final_checkpoint=saved if run.finished else None,
                final_row=complete or run.finished,
                exit_success=reason == "finished",
                error=reason not in ("finished", "interrupted"),
                cancelled=reason == "interrupted",
                ended=True,
            )
        )
        status, disputed = derived.word, derived.disputed and reason != "interrupted"
    elif reason == "interrupted":
        status = "cancelled"
    return {
        "ordinal": body["ordinal"],
        "status": status,
        "disputed": disputed,
        "reason": reason,
        "completed": completed,
        "retries_left": int(not newest or status == "cancelled"),
    }


def _checkpoints(run: LocalRun) -> Iterator[Signal]:
    for kind in ("permanent", "temporary"):
        for marker in (run.folder / "checkpoints" / kind).glob("step-*/COMMIT*"):
            step = int(marker.parent.name.removeprefix("step-"))
            yield Signal(marker.stat().st_mtime, "checkpoint/marked", {"step": step, "kind": kind})


def _room(run: LocalRun, now: float) -> Iterator[Signal]:
    """How many more saves of the newest checkpoint's size fit on the disk."""
    folders = list((run.folder / "checkpoints").glob("*/step-*"))
    if not folders:
        return
    newest = max(folders, key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    if size:
        free = shutil.disk_usage(run.folder).free
        yield Signal(now, "storage/headroom_saves", free / size)


def _resumes(run: LocalRun) -> Iterator[Signal]:
    """Loss of repeated rows against the attempt before, and attempts that cannot fit together."""
    import polars as pl

    from portolan.track.tracker import attempt_starts, read_raw

    starts = attempt_starts(run.folder)
    if len(starts) < 2:
        return
    frame = read_raw(run.folder, [LOSS_KEY]).sort("attempt", "row")
    pairs = frame.join(frame, on="row", suffix="_before").filter(
        pl.col("attempt") == pl.col("attempt_before") + 1
    )
    for time, row, value, before in zip(
        pairs["time"].dt.timestamp("ms") / 1000,
        pairs["row"],
        pairs["value"],
        pairs["value_before"],
        strict=True,
    ):
        difference = {"phase": "catch_up", "difference": value - before, "loss": before}
        yield Signal(time, "resume/check", difference, row)
    ends = dict(frame.group_by("attempt").agg(pl.col("completed").max()).iter_rows())
    spans = [(start, max(start, ends.get(ordinal, start))) for ordinal, start in starts.items()]
    try:
        check_spans(spans)
        fault = ""
    except LineageError as error:
        fault = error.message
    time = float(frame["time"].dt.timestamp("ms").max() or 0) / 1000  # type: ignore[arg-type]
    yield Signal(time, "view/fault", fault)


def _changes(run: LocalRun, last: float, completed: int) -> Iterator[Signal]:
    """Changes called accepted, with the updates that the run has made since."""
    identities = {r.id for r in run.records if r.type == "run" and r.body["name"] == run.run_id}
    for record in _newest(run.records, "change"):
        if identities.intersection(record.body.get("refs", ())):
            step = int(record.body["from_step"]["n"])
            value = {
                "change": record.id,
                "verdict": record.body.get("verdict", "pending"),
                "clean_steps": max(0, completed - step),
            }
            yield Signal(last, "change/verdict", value)


def _newest(records: Iterable[Record], kind: str) -> list[Record]:
    """Records of a type that no later one supersedes."""
    kept = [record for record in records if record.type == kind]
    gone = {identity for record in kept for identity in record.supersedes}
    return [record for record in kept if record.id not in gone]
