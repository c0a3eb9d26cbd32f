"""Bodies written before a run starts: the registration of its plan, and the forecast."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from portolan.canonical import stringify_floats
from portolan.record.quantities import UNKNOWN_WORDS, Quantity
from portolan.record.schema import (
    Body,
    HashOrUnknown,
    NonEmptyMap,
    Part,
    RecordId,
    Text,
    Time,
)


class Plan(Part):
    """Planned size of a run; every figure is a number with a basis."""

    tokens: Quantity
    steps: Quantity
    batch: Quantity
    sequence: Quantity
    devices: Quantity
    flops: Quantity

    @model_validator(mode="after")
    def _numbers(self) -> "Plan":
        for name, quantity in self:
            if quantity.unit in ("category", "time"):
                raise ValueError(f"plan.{name} is {quantity.value!r}, not a number")
        return self


class FieldDiff(Part):
    """One field of an amended registration, before and after."""

    field: Text
    before: Text
    after: Text


class Registration(Body):
    """What a run is for and what will count as failure, fixed before it starts."""

    record_type: ClassVar[str] = "registration"

    lineage: Text
    question: Text
    hypothesis: Text
    plan: Plan
    data_manifest: HashOrUnknown
    code_ref: Text
    primary_metric: Text
    stop_rule: Text
    analysis: Text
    failure: Text
    forecasts: tuple[RecordId, ...] = ()
    retention: Text
    rollback_depth: Text
    recovery_policy: Text
    responsible: Text
    inferred: tuple[Text, ...]
    amends: tuple[FieldDiff, ...] = ()

    @model_validator(mode="after")
    def _no_question_marks(self) -> "Registration":
        for name, value in self:
            if isinstance(value, str) and value.strip(" ?") == "":
                raise ValueError(f"{name} is {value!r}: an empty registration is refused")
            if name in _STATED and value in UNKNOWN_WORDS:
                raise ValueError(f"{name} is {value!r}: state it or do not register")
        return self


_STATED = ("question", "hypothesis", "primary_metric", "stop_rule", "failure", "responsible")


class Condition(Part):
    """One condition under which a forecast is scored."""

    field: Text
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in"]
    value: Annotated[Any, BeforeValidator(stringify_floats)]


class Forecast(Body):
    """A forecast with quantiles, bands, conditions and consequences; others are refused."""

    record_type: ClassVar[str] = "forecast"

    title: Text
    author: Text
    made_at: Time
    metric: NonEmptyMap
    target: NonEmptyMap
    recipe: NonEmptyMap
    inputs: Annotated[
        dict[str, Any] | list[Any], Field(min_length=1), BeforeValidator(stringify_floats)
    ]
    method: NonEmptyMap
    quantiles: NonEmptyMap
    conditions: Annotated[tuple[Condition, ...], Field(min_length=1)]
    expiry: Text = "not_stated"
    bands: Annotated[
        dict[str, Any] | list[Any], Field(min_length=1), BeforeValidator(stringify_floats)
    ]
    scoring: NonEmptyMap
    baseline: NonEmptyMap | None = None
    known_before: Annotated[dict[str, Any] | int, BeforeValidator(stringify_floats)]
    reason: Text | None = None
    changes: tuple[RecordId, ...] = ()
    on_failure: Text

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """The title serves as text; a first forecast has no reason, so a blank one is dropped."""
        if not isinstance(data, Mapping):
            return data
        filled = {name: value for name, value in data.items() if (name, value) != ("reason", "")}
        return {"text": filled.get("title"), **filled}
