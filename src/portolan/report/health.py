"""The status that `portolan watch` left beside the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from portolan.report.values import as_count, as_number, as_text


class Reason(NamedTuple):
    """Why the verdict is not clear, and what to try."""

    severity: str
    text: str
    advice: str


class Item(NamedTuple):
    """One item of the checklist."""

    number: int
    title: str
    verdict: str
    found: str
    unmeasured: tuple[str, ...]


class Shape(NamedTuple):
    """A signal beside the rungs at one share of the run; `kind` is level or slope."""

    signal: str
    kind: str
    fraction: float
    value: float
    low: float
    high: float
    inside: bool
    nearest: str


@dataclass(frozen=True)
class Health:
    """A status: verdict, its reasons, the checklist, and the band of each evaluation by mark."""

    verdict: str
    state: str
    completed: int | None
    steps: int | None
    reasons: tuple[Reason, ...]
    items: tuple[Item, ...]
    shapes: tuple[Shape, ...]
    bands: tuple[tuple[float, str], ...]
    early: str
    peak: str
    num_unmeasured_rules: int


def read_health(facts: Mapping[str, Any]) -> Health | None:
    """The content of `status.json`, leniently; None when there is none."""
    if not facts.get("verdict"):
        return None
    early = facts.get("first_three_percent") or {}
    return Health(
        verdict=as_text(facts.get("verdict")),
        state=as_text(facts.get("state")),
        completed=as_count(facts.get("completed")),
        steps=as_count(facts.get("steps")),
        reasons=tuple(
            Reason(*(as_text(row.get(name)) for name in Reason._fields))
            for row in _rows(facts.get("reasons"))
        ),
        items=tuple(_item(row) for row in _rows(facts.get("checklist"))),
        shapes=tuple(_shape(row) for row in _rows(facts.get("shapes"))),
        bands=tuple(
            (round(as_number(row.get("fraction")) or 0.0, 4), as_text(row.get("status")))
            for row in _rows(facts.get("evaluations"))
        ),
        early=f"{'clear' if early.get('clear') else 'not clear'} ({as_text(early.get('reason'))})",
        peak=as_text(facts.get("gradient_peak")),
        num_unmeasured_rules=len(facts.get("rules_not_measured") or ()),
    )


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _item(row: Mapping[str, Any]) -> Item:
    windows = row.get("windows")
    unmeasured = [
        str(name)
        for name, word in (windows.items() if isinstance(windows, Mapping) else ())
        if word == "not measured"
    ]
    return Item(
        as_count(row.get("item")) or 0,
        as_text(row.get("title")),
        as_text(row.get("verdict")),
        as_text(row.get("reason")),
        tuple(unmeasured),
    )


def _shape(row: Mapping[str, Any]) -> Shape:
    fraction, value, low, high = (
        as_number(row.get(name)) or 0.0 for name in ("fraction", "value", "low", "high")
    )
    return Shape(
        as_text(row.get("signal")),
        as_text(row.get("kind")),
        fraction,
        value,
        low,
        high,
        bool(row.get("inside")),
        as_text(row.get("nearest_rung")),
    )
