"""Parquet segments of a run's metrics: immutable, sorted, one per attempt and range of rows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.files import atomic_file
from portolan.track.tail import Entry

_NAME = re.compile(r"segment-(\d+)-(-?\d+)-(-?\d+)(?:\.(\d+))?\.parquet")


@dataclass(frozen=True, order=True)
class Segment:
    """A segment file; `part` counts those of one attempt and one range of rows, from 1."""

    attempt: int
    first_row: int
    last_row: int
    part: int
    path: Path


def schema() -> Any:
    """Columns row, completed, attempt, time (ms, UTC), key (dictionary) and value."""
    import pyarrow as pa

    return pa.schema(
        [
            ("row", pa.int64()),
            ("completed", pa.int64()),
            ("attempt", pa.int32()),
            ("time", pa.timestamp("ms", tz="UTC")),
            ("key", pa.dictionary(pa.int32(), pa.string())),
            ("value", pa.float64()),
        ]
    )


def list_segments(run_folder: Path) -> list[Segment]:
    """Segments of a run by attempt, first row, last row and part."""
    found = []
    for path in (run_folder / "metrics").glob("segment-*.parquet"):
        if match := _NAME.fullmatch(path.name):
            attempt, first_row, last_row, part = (int(text or 1) for text in match.groups())
            found.append(Segment(attempt, first_row, last_row, part, path))
    return sorted(found)


def to_table(entries: Iterable[Entry]) -> Any:
    """Arrow table of entries sorted by row and key; of repeated ones the last is kept."""
    import pyarrow as pa

    kept = {(entry.row, entry.key, entry.attempt): entry for entry in entries}
    ordered = [kept[name] for name in sorted(kept)]
    keys = sorted({entry.key for entry in ordered})
    places = {key: place for place, key in enumerate(keys)}
    columns = [
        [entry.row for entry in ordered],
        [entry.row + 1 for entry in ordered],
        [entry.attempt for entry in ordered],
        [entry.time for entry in ordered],
        pa.DictionaryArray.from_arrays(
            pa.array([places[entry.key] for entry in ordered], pa.int32()),
            pa.array(keys, pa.string()),
        ),
        [entry.value for entry in ordered],
    ]
    fields = schema()
    arrays = [
        column if isinstance(column, pa.DictionaryArray) else pa.array(column, field.type)
        for column, field in zip(columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=fields)


def write_segments(run_folder: Path, entries: Sequence[Entry]) -> list[Path]:
    """Write one segment an attempt, atomically; equal entries give equal bytes."""
    attempts = sorted({entry.attempt for entry in entries})
    own = {attempt: [e for e in entries if e.attempt == attempt] for attempt in attempts}
    return [write_table(run_folder, attempt, to_table(own[attempt])) for attempt in attempts]


def write_table(run_folder: Path, attempt: int, table: Any) -> Path:
    """Write the values of one attempt, a table of `schema()` sorted by row, as a new segment."""
    import pyarrow.parquet as pq

    path = _free_path(run_folder, attempt, table["row"][0].as_py(), table["row"][-1].as_py())
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return path


def without_stored(run_folder: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Entries that no segment holds yet: a crash may have left them in both places."""
    import pyarrow.parquet as pq

    stored: set[tuple[int, int, str]] = set()
    attempts = {entry.attempt for entry in entries}
    for segment in list_segments(run_folder):
        if segment.attempt in attempts:
            table = pq.ParquetFile(segment.path).read(["row", "key"]).to_pydict()
            rows = zip(table["row"], table["key"], strict=True)
            stored |= {(segment.attempt, row, key) for row, key in rows}
    return [entry for entry in entries if (entry.attempt, entry.row, entry.key) not in stored]


def _free_path(run_folder: Path, attempt: int, first_row: int, last_row: int) -> Path:
    name = f"segment-{attempt}-{first_row}-{last_row}"
    path = run_folder / "metrics" / f"{name}.parquet"
    part = 1
    while path.exists():
        part += 1
        path = path.with_name(f"{name}.{part}.parquet")
    return path
