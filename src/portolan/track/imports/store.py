"""Writes an imported history as the metrics of a run, with replays told apart as attempts."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from portolan.errors import PortolanError, UsageError
from portolan.files import storage_errors, write_json_atomic
from portolan.track.imports.source import Chunk, HistorySource, SourceRun
from portolan.track.segments import schema, write_table

if TYPE_CHECKING:
    import polars as pl

SEGMENT_VALUES = 500_000
"""Values of a segment file; bounds the memory of an import."""
MAX_ATTEMPTS = 10_000
STEP_KEY = "tracker/step"
"""Key under which the tracker's own counter of each row is kept: a table to look up, not a rule."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


ClockKind = Literal["row", "completed", "tracker"]


@dataclass(frozen=True)
class Clock:
    """Which field of a line counts its steps, and on which of the three clocks.

    `row`: zero-based training rows; `completed`: updates done; `tracker`: the tracker's own
    counter, which then stands in for the row and is said to be that.
    """

    field: str
    kind: ClockKind

    @property
    def offset(self) -> int:
        """What is added to the field to get the row."""
        return -1 if self.kind == "completed" else 0


@dataclass
class AttemptSpan:
    """An attempt: updates done when it began and when it ended; first time in ms, if known."""

    start: int
    completed: int = 0
    first_time: int | None = None


@dataclass
class Imported:
    """What an import wrote: counts, coverage and the attempts that it told apart."""

    source: SourceRun
    num_lines: int = 0
    num_values: int = 0
    num_without_step: int = 0
    first_row: int | None = None
    last_row: int | None = None
    attempts: "list[AttemptSpan]" = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def completeness(self) -> str:
        """`full`, `truncated`, or `sampled n of m` (rule R8: no extremes from the latter)."""
        reported = self.source.num_lines
        if self.source.sampled:
            total = max(reported or 0, (self.source.last_step or -1) + 1)
            return f"sampled {self.num_lines} of {total}" if self.num_lines < total else "full"
        if reported is not None and self.num_lines < reported:
            return "truncated"
        return "full"

    def to_json(self) -> dict[str, Any]:
        """The note `import.json` of the run's folder."""
        return {
            "kind": self.source.kind,
            "locator": self.source.locator,
            "name": self.source.name,
            "state": self.source.state,
            "created": self.source.created,
            "query": self.source.query,
            "arguments": self.source.arguments,
            "tool_version": self.source.tool_version,
            "completeness": self.completeness,
            "lines": self.num_lines,
            "lines_reported": self.source.num_lines,
            "values": self.num_values,
            "lines_without_step": self.num_without_step,
            "first_row": self.first_row,
            "last_row": self.last_row,
            "attempts": [[span.start, span.completed] for span in self.attempts],
            "skipped_fields": dict(sorted(self.skipped.items())),
        }


def import_history(
    source: HistorySource,
    folder: Path,
    clock: Clock,
    *,
    keep_raw: Callable[[bytes], None],
    run_facts: Mapping[str, Any],
    start: int = 0,
    replace: bool = False,
) -> Imported:
    """Write `folder/metrics/*.parquet`, `import.json` and `run.json` from a source.

    A line whose step has been seen before for one of its keys starts a new attempt there: the run
    was resumed and replays. The first attempt began after `start` updates. `keep_raw` receives
    the source's own bytes in order. The folder appears whole or not at all. Memory: a chunk and
    SEGMENT_VALUES values.

    Raises:
        UsageError: the folder exists and `replace` is false, or its name is no run id.
        PortolanError: the history holds no number on the chosen clock.
    """
    if not _RUN_ID.fullmatch(folder.name):
        raise UsageError(
            f"{folder.name!r} is no run id", remedy="use letters, digits, '.', '_' and '-'"
        )
    if folder.exists() and not replace:
        raise UsageError(
            f"the run {folder.name} exists already",
            remedy="give another --run-id, or --replace to import it anew",
        )
    staging = folder.with_name(f".{folder.name}.importing")
    with storage_errors(staging):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    try:
        result = _write(source, staging, clock, start, keep_raw)
        note = result.to_json() | {"clock": clock.kind, "step_field": clock.field}
        write_json_atomic(staging / "import.json", note)
        write_json_atomic(staging / "run.json", {"id": folder.name, **run_facts})
        with storage_errors(folder):
            if folder.exists():
                shutil.rmtree(folder)
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return result


def _write(
    source: HistorySource,
    folder: Path,
    clock: Clock,
    start: int,
    keep_raw: Callable[[bytes], None],
) -> Imported:
    import polars as pl

    result = Imported(source.describe())
    splitter = _AttemptSplitter(start)
    held: list[pl.DataFrame] = []
    for chunk in source.chunks(clock.field):
        keep_raw(chunk.raw)
        frame = _on_rows(chunk, clock, result)
        for attempt, part in splitter.split(frame, chunk.attempt):
            if held and (held[0]["attempt"][0] != attempt or sum(map(len, held)) >= SEGMENT_VALUES):
                _flush(held, folder)
            held.append(part.with_columns(attempt=pl.lit(attempt, pl.Int32)))
    if held:
        _flush(held, folder)
    if result.num_values == 0:
        raise PortolanError(
            f"{result.source.locator} has no number with a step in the field {clock.field!r}",
            remedy="name the field that counts steps with --step-key",
        )
    result.attempts = splitter.spans
    for ordinal, span in enumerate(splitter.spans, start=1):
        write_json_atomic(
            folder / "metrics" / f"attempt-{ordinal}.json",
            {"attempt": ordinal, "start_row": span.start},
        )
    return result


def _on_rows(chunk: Chunk, clock: Clock, result: Imported) -> "pl.DataFrame":
    """The chunk's values with their rows; lines without a step are counted and left out."""
    import polars as pl

    result.num_lines += chunk.num_lines
    result.skipped += chunk.skipped
    with_step = chunk.frame.filter(pl.col("step").is_not_null())
    result.num_without_step += chunk.num_lines - with_step["line"].n_unique()
    tracker_field = result.source.tracker_field
    if tracker_field != clock.field:
        with_step = with_step.filter(pl.col("key") != clock.field)
    frame = with_step.with_columns(
        row=pl.col("step") + clock.offset,
        key=pl.col("key").replace({tracker_field: STEP_KEY}),
    )
    if len(frame):
        low, high = int(frame["row"].min()), int(frame["row"].max())  # type: ignore[arg-type]
        result.first_row = low if result.first_row is None else min(low, result.first_row)
        result.last_row = high if result.last_row is None else max(high, result.last_row)
        result.num_values += len(frame)
    return frame


class _AttemptSplitter:
    """Splits values in order into attempts: a key that returns to a row was replayed."""

    def __init__(self, start: int) -> None:
        self.spans: list[AttemptSpan] = []
        self._start = start
        self._last: dict[str, int] = {}
        self._given: dict[int, int] = {}

    def split(
        self, frame: "pl.DataFrame", given: int | None
    ) -> Iterator[tuple[int, "pl.DataFrame"]]:
        """Parts of a chunk with the ordinal of their attempt; `given` is the source's own."""
        import polars as pl

        if frame.is_empty():
            return
        if given is not None:
            if given not in self._given:
                self._given[given] = self._open(int(frame["row"].min()))  # type: ignore[arg-type]
            yield self._count(self._given[given], frame), frame
            return
        if not self.spans:
            self._open(int(frame["row"][0]))
        while len(frame):
            replayed = frame.filter(pl.col("row") <= self._rows_before(frame))
            line = int(replayed["line"][0]) if len(replayed) else None
            kept = frame if line is None else frame.filter(pl.col("line") < line)
            if len(kept):
                yield self._count(len(self.spans), kept), kept
            if line is None:
                return
            self._open(int(replayed["row"][0]))
            frame = frame.filter(pl.col("line") >= line)

    def _rows_before(self, frame: "pl.DataFrame") -> "pl.Series":
        """For each value the row of its key's value in an earlier line, null if there is none."""
        import polars as pl

        known = pl.DataFrame(
            {"key": list(self._last), "known": list(self._last.values())},
            schema={"key": pl.String, "known": pl.Int64},
        )
        return (
            frame.join(known, on="key", how="left", maintain_order="left")
            .with_columns(before=pl.col("row").shift(1).over("key"))
            .select(pl.coalesce("before", "known"))
            .to_series()
        )

    def _open(self, row: int) -> int:
        if len(self.spans) == MAX_ATTEMPTS:
            raise PortolanError(
                f"the step went back {MAX_ATTEMPTS} times: the chosen field counts no steps",
                remedy="name the field that counts steps with --step-key",
            )
        self.spans.append(AttemptSpan(max(0, row) if self.spans else self._start))
        self._last = {}
        return len(self.spans)

    def _count(self, attempt: int, frame: "pl.DataFrame") -> int:
        import polars as pl

        newest = frame.group_by("key").agg(pl.col("row").max())
        self._last.update(newest.rows())
        span = self.spans[attempt - 1]
        span.completed = max(span.completed, int(newest["row"].max()) + 1)  # type: ignore[arg-type]
        earliest = frame["time"].min()
        if span.first_time is None and earliest is not None:
            span.first_time = int(earliest)  # type: ignore[arg-type]
        return attempt


def _flush(held: "list[pl.DataFrame]", folder: Path) -> None:
    """Write the held values of one attempt as a segment, sorted by row and key."""
    import polars as pl

    frame = (
        pl.concat(held)
        .unique(["row", "key"], keep="last", maintain_order=True)
        .sort("row", "key")
        .with_columns(completed=pl.col("row") + 1)
        .select("row", "completed", "attempt", "time", "key", "value")
        .with_columns(pl.col("time").cast(pl.Datetime("ms", "UTC")))
    )
    table = frame.to_arrow()
    place = table.schema.get_field_index("key")
    table = table.set_column(place, "key", table["key"].cast("string").dictionary_encode())
    write_table(folder, int(frame["attempt"][0]), table.cast(schema()))
    held.clear()
