"""Figures to be reconciled: a value with its meaning, its layer, and where it was stated."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from portolan.errors import UsageError
from portolan.record.bases import BASES, LAYERS, NOT_STATED, Layer, parse_basis
from portolan.record.chain import Record
from portolan.record.quantities import UNKNOWN_WORDS, last_place, significant_digits
from portolan.record.times import parse_time

COLUMNS = ("id", "quantity", "value", "unit", "basis", "layer", "stated_by", "date")
"""Columns that must not be empty; `public_source`, case, scope, as_of, due and url may be."""
MAX_TABLE_BYTES = 64 << 20

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e-?\d+)?")
_STEP = re.compile(r"(completed|row):(\d+)")
_SUCCESS = frozenset({"succeeded", "success", "finished", "completed", "ok", "0", "exit 0"})


@dataclass(frozen=True)
class Figure:
    """One stated or derived value.

    `scope` is `plan`, `attempt:`, `segment:`, `lineage:` or `artifact:<id>`, or empty; `as_of`
    and `due` count completed updates: when it was read, and what must be reached before it can be
    judged. `arithmetic` shows how a derived value came about, `known_to` the last place that the
    rounding of its inputs leaves it.
    """

    id: str
    name: str
    value: str
    unit: str
    basis: str
    layer: Layer
    stated_by: str = NOT_STATED
    date: str = NOT_STATED
    source: str = NOT_STATED
    url: str = ""
    case: str = ""
    scope: str = ""
    as_of: int | None = None
    due: int | None = None
    rounding: str = ""
    arithmetic: str = ""
    known_to: Decimal = Decimal(0)

    @property
    def number(self) -> Decimal | None:
        """Its value; None for a word or a time."""
        return Decimal(self.value) if self.is_numeric else None

    @property
    def is_numeric(self) -> bool:
        """Whether it has digits to compare."""
        return self.unit not in ("category", "time")

    @property
    def unit_key(self) -> str:
        """Its unit without plurals: `tokens` and `token` are one unit."""
        return unit_key(self.unit)

    @property
    def place(self) -> Decimal:
        """Place value of its last digit that means something, 0 if it is exact or no number."""
        if not self.is_numeric:
            return Decimal(0)
        stated = last_place(self.value, self.rounding or significant_digits(self.value))
        return max(stated, self.known_to)

    @property
    def basis_name(self) -> str:
        """Registered id of its basis, without the qualifier; empty when the basis is not stated."""
        return "" if self.basis == NOT_STATED else parse_basis(self.basis)[0]

    @property
    def qualifier(self) -> str:
        """Text after `@` or in parentheses of its basis."""
        return "" if self.basis == NOT_STATED else parse_basis(self.basis)[1]

    @property
    def subject(self) -> str:
        """The lineage or artifact it is about; empty for the run itself, its parts and plans."""
        return self.scope if self.scope.startswith(("lineage:", "artifact:")) else ""

    @property
    def has_locator(self) -> bool:
        """Whether it says where it was stated, or follows by arithmetic."""
        return self.layer == "derived" or self.source not in ("", *UNKNOWN_WORDS)

    @property
    def says_success(self) -> bool:
        """Of a figure of basis `status.*`: whether the word means success."""
        return self.value.strip().lower().replace("_", " ") in _SUCCESS


def read_claims(path: Path) -> list[Figure]:
    """Figures of a table of claims, `.csv` or `.json` (a list of objects with the same names).

    UsageError names file, row and column of the first thing that is wrong.
    """
    figures: list[Figure] = []
    seen: set[str] = set()
    for number, row in _rows(path):
        figure = _figure(row, f"{path.name}, row {number}")
        if figure.id in seen:
            raise UsageError(f"{path.name}, row {number}: the id {figure.id} is repeated")
        seen.add(figure.id)
        figures.append(figure)
    return figures


def figures_of_claims(records: Iterable[Record]) -> Iterator[Figure]:
    """Figures of the quantitative claim records of a journal, superseded ones left out."""
    claims: dict[str, Record] = {}
    for record in records:
        for earlier in record.supersedes:
            claims.pop(earlier, None)
        if record.type == "claim" and "quantity" in record.body:
            claims[record.id] = record
    for record in claims.values():
        body, quantity = record.body, record.body["quantity"]
        due = body.get("due")
        yield Figure(
            id=f"{record.type}:{record.id.partition(':')[2][:10]}",
            name=body["statement"],
            value=quantity["value"],
            unit=quantity["unit"],
            basis=quantity["basis"],
            layer=body["layer"],
            stated_by=body["made_by"],
            date=body["date"],
            source=body["locator"],
            case=body["subject"],
            scope=quantity["scope"],
            due=None if due is None else due["n"] + (due["clock"] == "row"),
            rounding=quantity["rounding"],
        )


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.is_file() or path.stat().st_size > MAX_TABLE_BYTES:
        raise UsageError(
            f"{path} is not a table of claims of at most {MAX_TABLE_BYTES >> 20} MiB",
            remedy="give a .csv or .json file with the columns " + ", ".join(COLUMNS),
        )
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text("utf-8"), parse_float=str, parse_int=str)
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file, strict=True))
    except (ValueError, csv.Error, RecursionError) as error:
        raise UsageError(f"{path.name} cannot be read: {error or 'nested too deeply'}") from error
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(f"{path.name} is not a list of rows with named columns")
    yield from enumerate(rows, 2 if path.suffix == ".csv" else 1)


def _figure(row: Mapping[str, Any], place: str) -> Figure:
    def cell(name: str) -> str:
        value = row.get(name)
        return value.strip() if isinstance(value, str) else ""

    for name in COLUMNS:
        if not cell(name):
            raise UsageError(
                f"{place}: the column {name} is missing or empty",
                remedy="write not_stated or unknown where nothing is known",
            )
    identity, unit, basis = cell("id"), cell("unit"), cell("basis")
    _check_value(cell("value"), unit, place)
    try:
        if basis != NOT_STATED:
            parse_basis(basis)
    except ValueError as error:
        raise UsageError(
            f"{place}: {error}",
            remedy=f"use not_stated, or one of {', '.join(BASES)}",
        ) from error
    if cell("layer") not in LAYERS:
        raise UsageError(f"{place}: the layer {cell('layer')!r} is not one of {', '.join(LAYERS)}")
    return Figure(
        id=identity,
        name=cell("quantity"),
        value=cell("value"),
        unit=unit,
        basis=basis,
        layer=cell("layer"),  # type: ignore[arg-type]
        stated_by=cell("stated_by"),
        date=cell("date"),
        source=cell("public_source") or NOT_STATED,
        url=cell("url"),
        case=cell("case") or identity.rpartition("-")[0],
        scope=cell("scope"),
        as_of=_completed(cell("as_of"), f"{place}: as_of"),
        due=_completed(cell("due"), f"{place}: due"),
    )


def _completed(text: str, place: str) -> int | None:
    """Completed updates of `completed:<n>` or `row:<n>`; None for an empty cell."""
    match = _STEP.fullmatch(text)
    if text and not match:
        raise UsageError(f"{place} is {text!r}, not completed:<n> or row:<n>")
    return int(match[2]) + (match[1] == "row") if match else None


def _check_value(value: str, unit: str, place: str) -> None:
    if unit == "category":
        return
    if unit == "time":
        try:
            parse_time(value)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
        return
    try:
        finite = _NUMBER.fullmatch(value) and Decimal(value).is_finite()
    except InvalidOperation:
        finite = False
    if not finite or abs(Decimal(value).adjusted()) > 400:
        raise UsageError(
            f"{place}: the value {value!r} is not a decimal number",
            remedy="write digits, a point and an exponent only, e.g. 390251 or 2.7e24",
        )


def unit_key(unit: str) -> str:
    """A unit with its plurals removed, part by part."""
    return "/".join(part.strip().removesuffix("s") for part in unit.split("/"))


def strongest(figures: Sequence[Figure]) -> Figure | None:
    """The figure of the weightiest layer, the first one among equals."""
    return max(figures, key=lambda figure: LAYERS.index(figure.layer), default=None)
