"""Bodies that state or support something: claims, evidence, observations, checks, reviews."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from portolan.record.bases import Layer, parse_basis
from portolan.record.completeness import check_completeness
from portolan.record.quantities import ClaimedQuantity
from portolan.record.schema import (
    Body,
    Count,
    HashOrUnknown,
    Mark,
    NonEmptyMap,
    Part,
    RecordId,
    StepPoint,
    Text,
    Time,
)

Day = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d$")]
BlobReference = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Completeness = Annotated[str, AfterValidator(check_completeness)]


class Claim(Body):
    """A statement of somebody about something, with its exact place and the layer it belongs to.

    `due` names the step that must be reached before the statement can be judged.
    """

    record_type: ClassVar[str] = "claim"

    statement: Text
    subject: Text
    quantity: ClaimedQuantity | None = None
    predicate: Text | None = None
    made_by: Text
    date: Time | Day | Mark
    locator: Text
    snapshot_digest: HashOrUnknown = "not_stated"
    layer: Layer
    due: StepPoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """The statement serves as the text."""
        return {"text": data.get("statement"), **data} if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _one_content(self) -> "Claim":
        if (self.quantity is None) == (self.predicate is None):
            raise ValueError("a claim holds either a quantity or a predicate")
        return self


class Obtained(Part):
    """How evidence was fetched: what was asked, with which arguments, by which tool version."""

    query: Text
    arguments: Annotated[dict[str, str], Field(default_factory=dict)]
    tool_version: Text


class Evidence(Body):
    """Bytes that speak for or against the records in `refs`, and how they were obtained."""

    record_type: ClassVar[str] = "evidence"

    snapshot_digest: HashOrUnknown
    obtained_by: Obtained
    time: Time
    access: Literal["anonymous", "credentialed"]
    completeness: Completeness
    relation: Literal["supports", "contradicts", "context"]


class Observation(Body):
    """A series of a run as read from a source; replayed rows are kept, views choose among them."""

    record_type: ClassVar[str] = "observation"

    series: Text
    basis: Text
    run: Text
    attempt: Annotated[int, Field(ge=1, strict=True)] | Mark
    clock: Literal["completed", "row", "tracker"]
    points: BlobReference
    num_points: Count | None = None
    source: RecordId

    @model_validator(mode="after")
    def _known(self) -> "Observation":
        parse_basis(self.basis)
        if not re.match(r"evidence:", self.source):
            raise ValueError("source must be the id of an evidence record")
        return self


class Check(Body):
    """The outcome of a rule that anyone can run again offline."""

    record_type: ClassVar[str] = "check"

    rule: Text
    version: Text
    inputs: NonEmptyMap
    result: NonEmptyMap
    tool_digest: HashOrUnknown


class Review(Body):
    """What somebody examined, how independent they are, what they found, what came of it."""

    record_type: ClassVar[str] = "review"

    who: Text
    independence: Text
    scope: Text
    findings: tuple[Text, ...]
    dispositions: tuple[Text, ...]

    @model_validator(mode="after")
    def _each_answered(self) -> "Review":
        if len(self.findings) != len(self.dispositions):
            raise ValueError(
                f"{len(self.findings)} findings and {len(self.dispositions)} dispositions: "
                "each finding has one"
            )
        return self
