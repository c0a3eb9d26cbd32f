"""Series of a run in a plain table, summarised in one pass: bounded memory, whatever its length."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

from portolan.errors import UsageError
from portolan.record.bases import NOT_STATED, parse_basis
from portolan.record.completeness import classify_rows
from portolan.record.lineage import completed_of

COLUMNS = ("series", "basis", "clock", "n", "value", "unit")
"""Columns that a table of telemetry must have; `run` and `public_source` may follow."""


@dataclass
class Series:
    """What one pass keeps of a series: ends, extremes, number of points, and wanted points.

    Steps are completed updates. `is_ordered` is False if a step repeats or goes back, which a
    stitched history does; such a series is never `full`.
    """

    name: str
    basis: str
    unit: str
    source: str
    first: int
    last: int
    last_value: Decimal
    low: Decimal
    high: Decimal
    num_points: int = 1
    is_ordered: bool = True
    points: dict[int, Decimal] = field(default_factory=dict)

    @property
    def completeness(self) -> str:
        """`full`, `sampled n of m`, or `truncated` when steps repeat or go back."""
        if not self.is_ordered:
            return "truncated"
        return classify_rows(self.num_points, self.first, self.last)

    def add(self, completed: int, value: Decimal, *, keep: bool) -> None:
        """Take one more point into account."""
        self.num_points += 1
        self.is_ordered &= completed > self.last
        if completed >= self.last:
            self.last, self.last_value = completed, value
        self.first = min(self.first, completed)
        self.low, self.high = min(self.low, value), max(self.high, value)
        if keep:
            self.points[completed] = value


def read_telemetry(paths: Iterable[Path], wanted: frozenset[int] = frozenset()) -> list[Series]:
    """Series of telemetry tables (CSV), one row a point; values at `wanted` steps are kept.

    `clock` is `row` or `completed`. UsageError names file, row and column of what is wrong.
    """
    found: dict[tuple[str, str, str], Series] = {}
    for path in paths:
        for place, row in _rows(path):
            completed, value = _step(row, place), _number(row["value"], place)
            key = (row["series"], row["basis"], row.get("run") or "")
            series = found.get(key)
            if series is not None:
                series.add(completed, value, keep=completed in wanted)
                continue
            try:
                parse_basis(row["basis"])
            except ValueError as error:
                raise UsageError(f"{place}: {error}") from error
            found[key] = Series(
                row["series"],
                row["basis"],
                row["unit"],
                row.get("public_source") or NOT_STATED,
                completed,
                completed,
                value,
                value,
                value,
                points={completed: value} if completed in wanted else {},
            )
    return list(found.values())


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    if not path.is_file():
        raise UsageError(f"there is no telemetry {path}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for row in (reader := csv.DictReader(file, strict=True)):
                place = f"{path.name}, row {reader.line_num}"
                if missing := [name for name in COLUMNS if not (row.get(name) or "").strip()]:
                    raise UsageError(f"{place}: the column {missing[0]} is missing or empty")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path.name} cannot be read: {error}") from error


def _step(row: dict[str, str], place: str) -> int:
    clock, text = row["clock"], row["n"]
    if clock not in ("row", "completed") or not text.isdecimal() or len(text) > 15:
        raise UsageError(
            f"{place}: the step {clock} {text} is not a row or a number of completed updates",
            remedy="a tracker's own counter needs its table of rows first",
        )
    return completed_of(int(text)) if clock == "row" else int(text)


def _number(text: str, place: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite():
        raise UsageError(f"{place}: the value {text!r} is not a finite number")
    return value
