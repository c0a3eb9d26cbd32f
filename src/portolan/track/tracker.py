"""The local tracker: a run's metrics on disk, complete after any crash, and the curve they make."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.errors import StorageError
from portolan.files import read_json, write_json_atomic
from portolan.track.remote import RemoteQueue
from portolan.track.segments import list_segments, schema, to_table, without_stored, write_segments
from portolan.track.tail import Entry, TailWriter, encode_values, milliseconds, read_tail

if TYPE_CHECKING:
    import polars as pl

TAIL_NAME = "metrics.jsonl"
TIMING_KEYS = ("throughput/*", "time/*", "system/*")
"""Patterns of keys that measure time, rates or the machine and differ between equal runs."""


class Tracker:
    """Metrics of one attempt at a run: `metrics.jsonl` while it runs, Parquet at checkpoints.

    Args:
        run_folder: folder of the run; created when missing.
        attempt: ordinal of this attempt, from 1.
        start_row: completed updates at which the attempt was restored.
        remotes: queues that receive a copy of every row and can never hold up `log`.
        clock: source of times.

    Opening keeps every complete line that an earlier process left in the tail and turns it into
    segments; `num_dropped_lines` counts the torn ones, `num_dropped_values` what was no number.
    """

    def __init__(
        self,
        run_folder: Path,
        attempt: int,
        start_row: int,
        *,
        remotes: Sequence[RemoteQueue] = (),
        clock: Any = None,
    ) -> None:
        self.run_folder = run_folder
        self.attempt = attempt
        self.num_dropped_values = 0
        self._clock = clock or (lambda: datetime.now(UTC))
        self._remotes = tuple(remotes)
        self._pending: list[tuple[int, int, dict[str, float]]] = []
        self._closed = False
        path = run_folder / TAIL_NAME
        entries, self.num_dropped_lines = read_tail(path)
        write_json_atomic(
            run_folder / "metrics" / f"attempt-{attempt}.json",
            {"attempt": attempt, "start_row": start_row},
        )
        write_segments(run_folder, without_stored(run_folder, entries))
        self._tail = TailWriter(path)

    @classmethod
    def open(cls, run_folder: Path, attempt: int, start_row: int, **options: Any) -> "Tracker":
        """The same as calling the class; reads better after a crash."""
        return cls(run_folder, attempt, start_row, **options)

    def log(self, row: int, values: Mapping[str, Any]) -> None:
        """Record numbers of zero-based training row `row` (-1: before the first update).

        What is not a number is dropped and counted. Raises only StorageError, when the disk is
        full or read-only; the values stay in memory for the next `flush_segment`.
        """
        if self._closed:
            self.num_dropped_values += len(values)
            return
        kept: dict[str, float] = {}
        for key, value in dict(values).items():
            try:
                kept[key if isinstance(key, str) else str(key)] = float(value)
            except Exception:
                self.num_dropped_values += 1
        try:
            row, time = int(row), milliseconds(self._clock())
        except (TypeError, ValueError, OverflowError):
            self.num_dropped_values += len(kept)
            return
        if not kept:
            return
        self._pending.append((row, time, kept))
        for remote in self._remotes:
            remote.submit(row, self.attempt, kept)
        self._tail.write(encode_values(row, self.attempt, time, kept))

    def flush_segment(self) -> list[Path]:
        """Write what was logged since the last call as a Parquet segment, then empty the tail."""
        entries = [
            Entry(row, self.attempt, time, key, value)
            for row, time, values in self._pending
            for key, value in values.items()
        ]
        if not entries:
            return []
        paths = write_segments(self.run_folder, entries)
        self._pending.clear()
        self._tail.clear()
        return paths

    def close(self) -> None:
        """Write the last segment, stop the threads, and wait at most 30 s for remotes."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush_segment()
        finally:
            self._tail.close()
            for remote in self._remotes:
                remote.finish()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_raw(run_folder: Path, keys: Sequence[str] | None = None) -> "pl.DataFrame":
    """Every value of a run, replays included, sorted by key, row and attempt.

    Columns row, completed, attempt, time, key, value. Of a value that one attempt wrote twice
    for the same row and key the last is kept.
    """
    import polars as pl
    import pyarrow as pa

    # The tail is read first: a segment written meanwhile then shows rows twice, never not at all.
    entries, _ = read_tail(run_folder / TAIL_NAME)
    tables = [_read_segment(segment.path) for segment in list_segments(run_folder)]
    tables.append(to_table(entries) if entries else schema().empty_table())
    frames = []
    for table in tables:
        plain = table.set_column(4, "key", table["key"].cast(pa.string()))
        frame = pl.DataFrame(plain)
        frames.append(frame if keys is None else frame.filter(pl.col("key").is_in(list(keys))))
    return (
        pl.concat(frames)
        .unique(["attempt", "row", "key"], keep="last", maintain_order=True)
        .sort("key", "row", "attempt")
    )


def read_metrics(
    run_folder: Path,
    attempts_intervals: Mapping[int, tuple[int, int]] | None = None,
    keys: Sequence[str] | None = None,
) -> "pl.DataFrame":
    """The canonical curve: of rows that a later attempt replayed, the replay alone.

    Attempt a, restored at s_a, counts on rows [s_a, min over later b of s_b). Columns as in
    `read_raw`. `attempts_intervals` (attempt to [start, end)) replaces the intervals that the
    run folder itself tells. Row -1, before the first update, goes with row 0.
    """
    import polars as pl

    frame = read_raw(run_folder, keys)
    if attempts_intervals is None:
        attempts = frame["attempt"].unique().to_list()
        attempts_intervals = _own_intervals(run_folder, attempts)
    first = min((start for start, end in attempts_intervals.values() if end > start), default=0)
    conditions = [
        (pl.col("attempt") == attempt)
        & (pl.col("row") < end)
        & ((pl.col("row") >= start) | ((pl.col("row") < first) & (start == first)))
        for attempt, (start, end) in attempts_intervals.items()
        if end > start
    ]
    return frame.filter(pl.any_horizontal(conditions) if conditions else pl.lit(False))


def metrics_digest(run_folder: Path, exclude: Sequence[str] = TIMING_KEYS) -> str:
    """SHA-256 over key, row and float64 bits of the canonical curve, in order of key and row.

    Equal for equal curves whatever the attempts, times and segments. `exclude` lists keys or
    patterns (`throughput/*`); every NaN counts as one value.
    """
    frame = read_metrics(run_folder)
    digest = hashlib.sha256()
    for (key,), part in frame.group_by("key", maintain_order=True):
        if any(fnmatchcase(str(key), pattern) for pattern in exclude):
            continue
        name = str(key).encode()
        digest.update(struct.pack("<qq", len(name), part.height) + name)
        digest.update(part["row"].to_numpy().astype("<i8").tobytes())
        values = part["value"].to_numpy().astype("<f8")
        values[values != values] = float("nan")
        digest.update(values.tobytes())
    return digest.hexdigest()


def attempt_starts(run_folder: Path) -> dict[int, int]:
    """Completed updates at which each attempt was restored, by ordinal."""
    starts = {}
    for path in (run_folder / "metrics").glob("attempt-*.json"):
        content = read_json(path)
        starts[int(content["attempt"])] = int(content["start_row"])
    return dict(sorted(starts.items()))


def _own_intervals(run_folder: Path, attempts: Sequence[int]) -> dict[int, tuple[int, int]]:
    starts = attempt_starts(run_folder)
    intervals: dict[int, tuple[int, int]] = {}
    bound = 2**62
    for attempt in sorted(set(starts) | set(attempts), reverse=True):
        # An attempt without its note is taken to have started at the first row.
        start = starts.get(attempt, 0)
        intervals[attempt] = (start, bound)
        bound = min(bound, start)
    return intervals


def _read_segment(path: Path) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read().cast(schema())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read as a metric segment: {error}",
            remedy="run portolan verify, then restore the file from a copy",
        ) from error
