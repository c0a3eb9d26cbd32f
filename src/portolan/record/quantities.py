"""Typed quantities: what a number means, before its value."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from portolan.canonical import decimal
from portolan.errors import PortolanError
from portolan.record.bases import NOT_STATED, parse_basis
from portolan.record.times import check_time

UNKNOWN_WORDS = ("unknown", "not_stated", "withheld")

_VALUE = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e-?\d+)?")
_SCOPE = re.compile(r"plan|(attempt|segment|lineage|artifact):\S+")
_ROUNDING = re.compile(r"exact|sig:[1-9]\d*")


class BasisMismatch(PortolanError, ValueError):
    """Two quantities of different basis, scope or unit were compared."""


def significant_digits(value: str) -> str:
    """Rounding read from a decimal string: `exact` for an integer, else `sig:<k>` digits written.

    Leading zeros do not count: `18e12` has 2, `22.76e9` 4 and `0.0076` 2.
    """
    if "." not in value and "e" not in value:
        return "exact"
    digits = value.lstrip("-").partition("e")[0].replace(".", "").lstrip("0")
    return f"sig:{len(digits) or 1}"


def last_place(value: str, rounding: str) -> Decimal:
    """Place value of the last stated digit, 10^(floor(log10 |v|) - k + 1); 0 if it is exact.

    `18e12` gives 1e12, `22.76e9` 1e7. A zero has the place that it is written with.
    """
    if rounding == "exact":
        return Decimal(0)
    number = Decimal(value)
    if number.is_zero():
        exponent = number.as_tuple().exponent
        return Decimal(1).scaleb(int(exponent))
    return Decimal(1).scaleb(number.adjusted() - int(rounding.removeprefix("sig:")) + 1)


def agree_within(first: Decimal, second: Decimal, place: Decimal) -> bool:
    """Rule R2: |first - second| <= place / 2, `place` being the coarser of the two last places."""
    return abs(first - second) <= place / 2


class AsOf(BaseModel):
    """When a quantity was read: a time, a clock reading, a window, or several of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: Annotated[str, AfterValidator(check_time)] | None = None
    clock: Literal["completed", "row", "tracker"] | None = None
    n: int | None = None
    window: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "AsOf":
        if (self.clock is None) != (self.n is None):
            raise ValueError("a clock reading needs both clock and n")
        if self.time is None and self.clock is None and not (self.window or "").strip():
            raise ValueError("as_of names no time, no clock reading and no window")
        return self


class Quantity(BaseModel):
    """A number with its meaning: basis of the registry, scope, moment, rounding, uncertainty.

    `value` may be given as int or float; it is kept as a decimal string. With unit `category` it
    is a word and with unit `time` a time of the record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: str
    unit: str
    basis: str
    scope: str
    as_of: AsOf | Literal["unknown", "not_stated", "withheld"] = "not_stated"
    rounding: str = ""
    uncertainty: str = "not_stated"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        value = filled.get("value")
        if isinstance(value, int) and not isinstance(value, bool):
            filled["value"] = str(value)
        elif isinstance(value, float):
            filled["value"] = decimal(value)
        if not filled.get("rounding"):
            numeric = isinstance(filled.get("value"), str) and _VALUE.fullmatch(filled["value"])
            filled["rounding"] = significant_digits(filled["value"]) if numeric else "exact"
        return filled

    @model_validator(mode="after")
    def _check(self) -> "Quantity":
        if self.unit == "time":
            check_time(self.value)
        elif self.unit == "category":
            if not self.value.strip() or _VALUE.fullmatch(self.value):
                raise ValueError(f"the category {self.value!r} is not a word")
        elif not _VALUE.fullmatch(self.value):
            raise ValueError(f"the value {self.value!r} is not a decimal number")
        if not self.unit.strip() or not self.uncertainty.strip():
            raise ValueError("unit or uncertainty is blank; write not_stated")
        self._check_basis()
        if not _SCOPE.fullmatch(self.scope):
            raise ValueError(f"the scope {self.scope!r} is not plan, attempt:<id>, segment:<id>, …")
        if not _ROUNDING.fullmatch(self.rounding):
            raise ValueError(f"the rounding {self.rounding!r} is not exact or sig:<k>")
        return self

    def _check_basis(self) -> None:
        parse_basis(self.basis)


class ClaimedQuantity(Quantity):
    """A quantity as somebody stated it: its basis may be `not_stated`, which only claims allow."""

    def _check_basis(self) -> None:
        if self.basis != NOT_STATED:
            parse_basis(self.basis)


def plan_quantity(value: float | int, unit: str, basis: str) -> Quantity:
    """A number of the plan; integers are exact, floats keep their shortest decimal digits."""
    return Quantity.model_validate({"value": value, "unit": unit, "basis": basis, "scope": "plan"})


def difference(first: Quantity, second: Quantity) -> Decimal:
    """`first - second` exactly; BasisMismatch if basis, scope or unit differ."""
    for field in ("basis", "scope", "unit"):
        a, b = getattr(first, field), getattr(second, field)
        if a != b:
            raise BasisMismatch(
                f"{first.value} and {second.value} cannot be compared: {field} {a!r} and {b!r}",
                remedy="compare figures of one basis, or register a mapping between the two",
            )
    if first.unit in ("category", "time"):
        raise BasisMismatch(f"quantities of unit {first.unit} have no difference")
    return Decimal(first.value) - Decimal(second.value)
