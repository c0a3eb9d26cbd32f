"""Typed quantities and the registry of metric bases: what a number means, before its value."""

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from portolan.canonical import decimal
from portolan.errors import PortolanError
from portolan.record.times import check_time

UNKNOWN_WORDS = ("unknown", "not_stated", "withheld")

# Bases whose id needs a qualifier: after "@" or, for progress, in parentheses.
BASES: Mapping[str, str] = MappingProxyType(
    {
        "step.completed": "optimizer updates finished, N; checkpoint step-N",
        "step.row": "zero-based training row, N - 1, written by update N",
        "step.tracker": "counter kept by a tracker; looked up in a table, never computed",
        "steps.planned": "optimizer steps in the plan or launch",
        "tokens.planned": "tokens of the plan",
        "tokens.nominal": "updates x sequences per batch x tokens per sequence",
        "tokens.nonpad": "tokens without padding",
        "tokens.unique": "distinct corpus tokens seen",
        "tokens.mixture_reference": "budget that only scales mixture weights and exposure",
        "data.pool.tokens@": "tokens in the corpus build named after @",
        "params.total": "all parameters",
        "params.active": "parameters used by one token, embeddings excluded",
        "flops.6nd": "6 x active parameters x tokens",
        "flops.model.fwd_bwd": "analytic forward and backward operations, attention included",
        "flops.hardware": "operations executed, with recomputation and padding",
        "devices.mesh": "product of the mesh axes",
        "devices.installed": "devices in the racks",
        "devices.allocated": "devices leased",
        "peak.flops@": "peak operations a second of the dtype and device named after @",
        "mfu.segment@": "model operations over peak x devices x seconds, in one window",
        "mfu.run": "sum of operations over peak x devices x sum of seconds (time-weighted)",
        "time.step@": "seconds a step in one window",
        "time.wall": "elapsed time",
        "time.effective": "seconds of valid steps over elapsed seconds",
        "batch.sequences": "sequences a step",
        "seq.tokens": "tokens a sequence",
        "racks": "racks used",
        "tasks": "processes of the job",
        "tokens_per_active_param": "tokens over active parameters",
        "schedule.lr": "learning rate of the schedule",
        "clusters.fine": "clusters of the first k-means",
        "clusters.final": "domains after merging",
        "rungs.finished": "ladder rungs trained to their planned end",
        "loss.train.total": "training loss with all its terms",
        "ce.train.nats": "training cross-entropy alone, nats a token",
        "paloma.macro.dropless": "equal-weight mean over domains, token drops disabled",
        "paloma.macro.as_trained@": "the same with drops at the batch named after @",
        "eval.macro.nats": "equal-weight mean over the domains of the project's held-out set, nats",
        "eval.micro.nats": "token-weighted mean over the project's held-out set, nats",
        "eval.macro.bpb": "equal-weight mean over domains, bits per UTF-8 byte",
        "eval.micro.bpb": "byte-weighted mean, bits per UTF-8 byte",
        "drop.assignment@": "dropped routed assignments over all, in one window",
        "norm.params.pre_update": "parameter norm before the update of the same row",
        "progress.tokens()": "share of tokens; the denominator is in the parentheses",
        "progress.steps()": "share of steps; the denominator is in the parentheses",
        "policy.guidance": "written practice",
        "policy.run": "a run's own registered setting",
        "retries.task": "retries left to one process",
        "retries.job": "retries left to the job",
        "retries.coordinator": "retries left to the coordinator",
        "ckpt.bytes_per_param": "checkpoint bytes over all parameters",
        "duration.compute": "steps x seconds a step",
        "duration.calendar": "days by the calendar",
        "status.scheduler": "the scheduler's opinion, never a terminal status",
        "status.exit": "the exit code's opinion, never a terminal status",
        "status.log": "the log's opinion, never a terminal status",
    }
)
_WINDOW_BASES = ("mfu.segment@", "time.step@", "drop.assignment@")
_VALUE = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e-?\d+)?")
_SCOPE = re.compile(r"plan|(attempt|segment|lineage|artifact):\S+")
_ROUNDING = re.compile(r"exact|sig:[1-9]\d*")


class BasisMismatch(PortolanError, ValueError):
    """Two quantities of different basis, scope or unit were compared."""


def parse_basis(basis: str) -> tuple[str, str]:
    """Split a basis into its registered id and its qualifier (empty if it has none).

    `mfu.segment@rows 0-99` gives (`mfu.segment@`, `rows 0-99`); unknown ids raise ValueError.
    """
    name, mark, qualifier = basis.partition("@")
    name += mark
    if not mark and basis.endswith(")") and "(" in basis:
        name, _, qualifier = basis[:-1].partition("(")
        name += "()"
    if name not in BASES:
        raise ValueError(f"the basis {basis!r} is not in the registry")
    if name.endswith(("@", ")")) and not qualifier.strip():
        raise ValueError(f"the basis {basis!r} lacks its qualifier")
    return name, qualifier


def significant_digits(value: str) -> str:
    """Rounding read from a decimal string: `exact` for an integer, else `sig:<k>` digits written.

    Leading zeros do not count: `18e12` has 2, `22.76e9` 4 and `0.0076` 2.
    """
    if "." not in value and "e" not in value:
        return "exact"
    digits = value.lstrip("-").partition("e")[0].replace(".", "").lstrip("0")
    return f"sig:{len(digits) or 1}"


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
        parse_basis(self.basis)
        if not _SCOPE.fullmatch(self.scope):
            raise ValueError(f"the scope {self.scope!r} is not plan, attempt:<id>, segment:<id>, …")
        if not _ROUNDING.fullmatch(self.rounding):
            raise ValueError(f"the rounding {self.rounding!r} is not exact or sig:<k>")
        return self


def plan_quantity(value: float | int, unit: str, basis: str) -> Quantity:
    """A number of the plan; integers are exact, floats keep their shortest decimal digits."""
    return Quantity.model_validate({"value": value, "unit": unit, "basis": basis, "scope": "plan"})


def same_basis(first: str, second: str) -> bool:
    """Whether two bases are one: windows differ in time only, and `status.*` is one group."""
    name_first, qualifier_first = parse_basis(first)
    name_second, qualifier_second = parse_basis(second)
    if name_first.startswith("status.") and name_second.startswith("status."):
        return True
    if name_first != name_second:
        return False
    return name_first in _WINDOW_BASES or qualifier_first == qualifier_second


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
