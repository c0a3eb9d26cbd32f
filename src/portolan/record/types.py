"""Schemas of the record's bodies: what each type must say before it may enter the journal."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from portolan.canonical import digest, stringify_floats
from portolan.record.quantities import UNKNOWN_WORDS, Quantity
from portolan.record.redact import scrub_arguments, scrub_environment
from portolan.record.schema import (
    ID_PATTERN,
    Body,
    Count,
    DecimalText,
    Hash,
    HashOrUnknown,
    Mark,
    NonEmptyMap,
    Part,
    RecordId,
    RelativePath,
    SchemaError,
    StepPoint,
    Text,
    Time,
)


class Genesis(Body):
    """Line 0: the journal's name, its first public key and its policy."""

    record_type: ClassVar[str] = "genesis"

    name: Text
    key: Hash | Literal["none"]
    policy: Text = "append only; a correction supersedes"
    text: Text = "start of the record"


class KeyChange(Body):
    """A new public key; the head that covers this line is signed by the old one."""

    record_type: ClassVar[str] = "key"

    key: Hash
    reason: Text


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


class Fork(Part):
    """Where a run leaves its parent, on all three clocks; row must be checkpoint - 1."""

    checkpoint: Count
    row: Annotated[int, Field(ge=-1, strict=True)]
    tracker_step: Annotated[int, Field(strict=True)] | Mark

    @model_validator(mode="after")
    def _clocks_agree(self) -> "Fork":
        if self.row != self.checkpoint - 1:
            raise ValueError(
                f"checkpoint {self.checkpoint} follows row {self.checkpoint - 1}, not {self.row}"
            )
        return self


class Run(Body):
    """A run: one output folder, one place in a lineage."""

    record_type: ClassVar[str] = "run"

    name: Text
    lineage: Text
    parent: Text | None = None
    fork: Fork
    role: Literal["production", "trial", "control", "rolled_back", "ablation"]
    tracker_ids: tuple[Text, ...] = ()
    change: RecordId | None = None


CheckpointName = Annotated[
    str, StringConstraints(pattern=rf"^(fresh|{ID_PATTERN}|([\w.-]+/)*step-\d+)$")
]
"""`fresh`, the id of an artifact record, or the name of a checkpoint folder."""


class Attempt(Body):
    """One process group working on a run, with everything that fixes its numbers."""

    record_type: ClassVar[str] = "attempt"

    run: Text
    ordinal: Annotated[int, Field(ge=1, strict=True)]
    start: Time
    end: Time | None = None
    restored_from: CheckpointName
    container_digest: HashOrUnknown
    lock_digest: HashOrUnknown
    code_commit: Text
    tree_state: Literal["clean", "dirty", "unknown", "not_stated"]
    patch_digest: Hash | None = None
    config_digest: HashOrUnknown
    data_manifest_digest: HashOrUnknown
    argv: Annotated[tuple[str, ...], AfterValidator(scrub_arguments)]
    env: Annotated[dict[str, str], AfterValidator(scrub_environment)]
    hosts_digest: HashOrUnknown
    exit_evidence: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _patch_named(self) -> "Attempt":
        if self.tree_state == "dirty" and self.patch_digest is None:
            raise ValueError("tree_state is dirty and patch_digest is absent")
        return self


class Cause(Part):
    """Why something happened and how sure that is."""

    text: Text
    status: Literal["confirmed", "likely", "unknown", "withdrawn"]


class Cost(Part):
    """What an incident cost; figures are whole numbers or decimal strings."""

    steps_replayed: Count | Mark = "not_stated"
    idle_seconds: DecimalText = "not_stated"
    device_hours: DecimalText = "not_stated"


class Event(Body):
    """Something that happened, with evidence, and what follows from it."""

    record_type: ClassVar[str] = "event"

    kind: Literal[
        "incident",
        "save",
        "restore",
        "alarm",
        "hang",
        "preempt",
        "log_gap",
        "tracker_gap",
        "quota",
        "decision",
        "correction",
        "control",
        "journal_recovery",
    ]
    step: StepPoint | Mark
    run: Text | None = None
    evidence: tuple[Text, ...] = ()
    cause: Cause | None = None
    first_missing_party: Text | None = None
    cost: Cost | None = None
    decision: Text | None = None
    decider: Text | None = None
    next: Text | None = None
    detail: Annotated[dict[str, int | str], BeforeValidator(stringify_floats)] = Field(
        default_factory=dict
    )


class Expected(Part):
    """The effect a change is expected to have."""

    metric: Text
    direction: Literal["up", "down", "none", "unknown"]
    size: Text
    tolerance: Text


class Changed(Part):
    """What a change touches; at least one of the four."""

    code: Text | None = None
    config: Text | None = None
    data: Text | None = None
    infrastructure: Text | None = None

    @model_validator(mode="after")
    def _some(self) -> "Changed":
        if not any((self.code, self.config, self.data, self.infrastructure)):
            raise ValueError("the change names no code, config, data or infrastructure difference")
        return self


class Change(Body):
    """A change to a running system, recorded before it is made."""

    record_type: ClassVar[str] = "change"

    planned: bool
    what: Changed
    from_step: StepPoint
    expected: Expected
    not_exercised: tuple[Text, ...]
    gate: Text
    control_window: Text
    result: Text | None = None
    bundle: tuple[Text, ...] = ()
    verdict: Literal["pending", "accepted", "accepted_stability_unproved", "rolled_back"] = (
        "pending"
    )


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


class FileEntry(Part):
    """One file of an artifact: path relative to the project, size in bytes and SHA-256."""

    path: RelativePath
    bytes: Count
    sha256: Hash


COMPLETENESS = (
    "submitted",
    "committed",
    "marked",
    "listed",
    "bytes_verified",
    "restored",
    "replay_matched",
)


class Artifact(Body):
    """Bytes that exist: what they are, where they lie, under which licence, how far checked."""

    record_type: ClassVar[str] = "artifact"

    kind: Literal[
        "checkpoint",
        "dataset",
        "mixture",
        "tokenizer",
        "metrics",
        "forecast",
        "container",
        "wheel",
        "report",
        "log_bundle",
        "eval_output",
        "snapshot",
        "release",
    ]
    name: Text = "not_stated"
    files: tuple[FileEntry, ...] = ()
    digests: Annotated[dict[str, Hash], Field(min_length=1)]
    bytes: Count
    manifest_digest: Hash | None = None
    locations: tuple[Text, ...] = ()
    licence_declared: Text
    licence_concluded: Text
    redistribution: Literal["public", "gated", "metadata_only", "withheld"]
    derived_from: tuple[RecordId, ...] = ()
    retain_until: Text
    completeness: Literal[
        "submitted",
        "committed",
        "marked",
        "listed",
        "bytes_verified",
        "restored",
        "replay_matched",
    ]

    @model_validator(mode="after")
    def _files_add_up(self) -> "Artifact":
        if self.files and sum(entry.bytes for entry in self.files) != self.bytes:
            raise ValueError(f"bytes is {self.bytes}, its files hold another number")
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a path occurs twice in files")
        return self


class Check(Body):
    """The outcome of a rule that anyone can run again offline."""

    record_type: ClassVar[str] = "check"

    rule: Text
    version: Text
    inputs: NonEmptyMap
    result: NonEmptyMap
    tool_digest: HashOrUnknown


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
        Check,
    )
}


def files_digest(files: tuple[FileEntry, ...]) -> str:
    """Digest of a list of files in path order: equal for equal names and bytes."""
    ordered = sorted(files, key=lambda entry: entry.path)
    return digest([entry.model_dump(mode="json") for entry in ordered])


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
