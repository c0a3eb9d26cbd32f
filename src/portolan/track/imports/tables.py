"""Histories in plain files: CSV and JSON, with one line a step or one line a value."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portolan.errors import PortolanError, UsageError
from portolan.track.imports.source import (
    NUMBER_WORDS,
    Chunk,
    SourceRun,
    as_number,
    chunk_of_lines,
    in_chunks,
)

if TYPE_CHECKING:
    import polars as pl

TIME_FIELDS = ("time", "timestamp", "_timestamp", "wall_time")
KEY_FIELD, VALUE_FIELD, ATTEMPT_FIELD = "key", "value", "attempt"
"""A CSV file with these columns has one line a value; any other has one line a step."""
BATCH_BYTES = 4 << 20


class CsvFile:
    """A CSV file with a header. Memory: batches of BATCH_BYTES."""

    def __init__(self, path: Path) -> None:
        _require(path)
        self.path = path
        self.default_id = path.stem

    def describe(self) -> SourceRun:
        """Name and place of the file."""
        import pyarrow

        return _file_run(self.path, "csv", f"pyarrow {pyarrow.__version__}")

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """The lines of the file in batches."""
        import polars as pl
        import pyarrow as pa
        from pyarrow import csv

        line = 0
        try:
            with self.path.open("rb") as file:
                header = file.readline().decode("utf-8-sig").strip()
            names = next(iter(_csv_fields(header)))
            text = csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True
            )
            read = csv.ReadOptions(block_size=BATCH_BYTES)
            with csv.open_csv(self.path, read_options=read, convert_options=text) as batches:
                for batch in batches:
                    table = pl.DataFrame(pa.Table.from_batches([batch]))
                    _require_field(step_key, table.columns, self.path)
                    yield from _csv_chunks(table, line, step_key)
                    line += table.height
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise PortolanError(
                f"{self.path} is no CSV table: {error}", remedy="check its header and separators"
            ) from error


class JsonFile:
    """A JSON array of objects, or one JSON object a line (.jsonl)."""

    def __init__(self, path: Path) -> None:
        _require(path)
        self.path = path
        self.default_id = path.stem

    def describe(self) -> SourceRun:
        """Name and place of the file."""
        return _file_run(self.path, "json", "json")

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """The objects of the file; nested ones are joined with `/`."""
        line = 0
        for lines in in_chunks(self._lines()):
            time_key = next((name for name in TIME_FIELDS if name in lines[0]), TIME_FIELDS[0])
            for item in lines:
                item[time_key] = _seconds(item.get(time_key))  # type: ignore[index]
            yield chunk_of_lines(lines, line, step_key, time_key)
            line += len(lines)

    def _lines(self) -> Iterator[dict[str, Any]]:
        with self.path.open("r", encoding="utf-8") as file:
            first = file.read(1)
            file.seek(0)
            try:
                items = (
                    json.load(file) if first == "[" else (json.loads(x) for x in file if x.strip())
                )
                for number, item in enumerate(items, start=1):
                    if not isinstance(item, dict):
                        raise PortolanError(
                            f"{self.path}, item {number} is no JSON object",
                            remedy="write one object a line, or an array of objects",
                        )
                    yield _flat(item)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise PortolanError(f"{self.path} is no JSON: {error}") from error


def _csv_fields(header: str) -> Iterator[list[str]]:
    import csv

    yield from csv.reader([header])


def _csv_chunks(table: "pl.DataFrame", line: int, step_key: str) -> Iterator[Chunk]:
    """A batch of a CSV table as chunks, one an attempt if the table names attempts."""
    import polars as pl

    raw = table.write_csv(include_header=line == 0).encode()
    table = table.with_columns(line=pl.int_range(line, line + table.height, dtype=pl.Int64))
    names = table.columns
    time_key = next((name for name in TIME_FIELDS if name in names), "")
    moments = [_seconds(x) for x in table[time_key]] if time_key else [None] * table.height
    table = table.with_columns(
        step=_numbers(step_key).cast(pl.Int64, strict=False),
        time=pl.Series([None if m is None else int(m * 1000) for m in moments], dtype=pl.Int64),
    )
    parts = [(None, table)]
    if ATTEMPT_FIELD in names:
        groups = table.with_columns(_numbers(ATTEMPT_FIELD).cast(pl.Int64, strict=False))
        parts = [
            (_ordinal(group), part)
            for group, part in groups.group_by(ATTEMPT_FIELD, maintain_order=True)
        ]
    for attempt, part in parts:
        frame, skipped = _long(part, step_key, time_key)
        yield Chunk(frame, raw, part.height, skipped, attempt)
        raw = b""


def _ordinal(group: tuple[Any, ...]) -> int | None:
    return None if group[0] is None else int(group[0])


def _long(
    table: "pl.DataFrame", step_key: str, time_key: str
) -> "tuple[pl.DataFrame, Counter[str]]":
    """One row a value, in the order of lines."""
    import polars as pl

    ids = ["line", "step", "time"]
    if KEY_FIELD in table.columns and VALUE_FIELD in table.columns:
        frame = table.select(*ids, pl.col(KEY_FIELD), pl.col(VALUE_FIELD))
    else:
        left_out = {*ids, time_key, ATTEMPT_FIELD} - {step_key}
        on = [name for name in table.columns if name not in left_out]
        frame = table.unpivot(on=on, index=ids, variable_name=KEY_FIELD, value_name=VALUE_FIELD)
        frame = frame.sort("line", maintain_order=True)
    frame = frame.filter(pl.col(VALUE_FIELD).is_not_null())
    numbers = frame.with_columns(_numbers(VALUE_FIELD).alias(VALUE_FIELD))
    bad = frame.filter(numbers[VALUE_FIELD].is_null())
    skipped = Counter(dict(bad[KEY_FIELD].value_counts().rows())) if len(bad) else Counter()
    return numbers.filter(pl.col(VALUE_FIELD).is_not_null()), skipped


def _numbers(column: str) -> "pl.Expr":
    """Text as float64, with the words for NaN and infinity; null where it is no number."""
    import polars as pl

    text = pl.col(column).cast(pl.String).str.strip_chars()
    words = text.replace_strict(NUMBER_WORDS, default=None, return_dtype=pl.Float64)
    return pl.coalesce(text.cast(pl.Float64, strict=False), words)


def _seconds(value: Any) -> float | None:
    """Seconds since 1970 of a number or of an ISO time (a time without zone is taken as UTC)."""
    if value is None or (number := as_number(value)) is not None:
        return None if value is None else number
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _flat(item: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _require(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", remedy="check the path")


def _require_field(name: str, names: list[str], path: Path) -> None:
    if name not in names:
        raise UsageError(
            f"{path} has no column {name!r}",
            remedy=f"name the one that counts steps with --step-key: {', '.join(names)}",
        )


def _file_run(path: Path, kind: str, version: str) -> SourceRun:
    return SourceRun(
        kind=kind,
        locator=f"file:{path.name}",
        name=path.stem,
        tool_version=version,
        query="file",
        arguments={"name": path.name},
        anonymous=True,
    )
