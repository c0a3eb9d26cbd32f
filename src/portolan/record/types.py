"""The record's types: every body by its name, and the check that each must pass."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from portolan.record.schema import Body, Hash, SchemaError, Text
from portolan.record.seal_body import Seal
from portolan.record.types_artifacts import Artifact, FileEntry, files_digest
from portolan.record.types_plans import Condition, FieldDiff, Forecast, Plan, Registration
from portolan.record.types_runs import (
    Attempt,
    Cause,
    Change,
    Changed,
    Cost,
    Event,
    Expected,
    Fork,
    Run,
)
from portolan.record.types_statements import Check, Claim, Evidence, Observation, Review

__all__ = [
    "BODIES",
    "Artifact",
    "Attempt",
    "Cause",
    "Change",
    "Changed",
    "Check",
    "Claim",
    "Condition",
    "Cost",
    "Event",
    "Evidence",
    "Expected",
    "FieldDiff",
    "FileEntry",
    "Forecast",
    "Fork",
    "Genesis",
    "KeyChange",
    "Observation",
    "Plan",
    "Registration",
    "Review",
    "Run",
    "SchemaError",
    "Seal",
    "check_body",
    "files_digest",
]


class Genesis(Body):
    """Line 0: the journal's name, its first public key and its policy."""

    record_type: ClassVar[str] = "genesis"

    name: Text
    key: Hash | Literal["none"]
    policy: Text = "append only; a correction supersedes"
    basis_registry: Hash | None = None
    text: Text = "start of the record"


class KeyChange(Body):
    """A new public key; the head that covers this line is signed by the old one."""

    record_type: ClassVar[str] = "key"

    key: Hash
    reason: Text


BODIES: Mapping[str, type[Body]] = {
    body.record_type: body
    for body in (
        Genesis,
        KeyChange,
        Registration,
        Run,
        Attempt,
        Event,
        Change,
        Forecast,
        Artifact,
        Claim,
        Evidence,
        Observation,
        Check,
        Review,
        Seal,
    )
}


def check_body(record_type: str, body: Mapping[str, Any] | Body) -> dict[str, Any]:
    """Validate a body against its schema and return the JSON value to store (secrets redacted).

    SchemaError names every wrong field; an unknown type is refused.
    """
    schema = BODIES.get(record_type)
    if schema is None:
        raise SchemaError(
            f"there is no record type {record_type!r}", remedy=f"use one of {', '.join(BODIES)}"
        )
    if isinstance(body, Body):
        if body.record_type != record_type:
            raise SchemaError(f"a body of type {body.record_type} given for {record_type}")
        return body.to_json()
    try:
        return schema.model_validate(dict(body)).to_json()
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or record_type}: {problem['msg']}"
            for problem in error.errors()
        )
        raise SchemaError(
            f"this {record_type} cannot be recorded: {problems}",
            remedy="state the missing facts; write unknown, not_stated or withheld where allowed",
        ) from error
