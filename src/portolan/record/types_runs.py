"""Bodies about running: runs, attempts, events and changes."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from portolan.canonical import stringify_floats
from portolan.record.redact import scrub_arguments, scrub_environment
from portolan.record.schema import (
    ID_PATTERN,
    Body,
    Count,
    DecimalText,
    Hash,
    HashOrUnknown,
    Mark,
    Part,
    RecordId,
    StepPoint,
    Text,
    Time,
)

RunRole = Literal["production", "trial", "control", "rolled_back", "ablation"]


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
    role: RunRole
    tracker_ids: tuple[Text, ...] = ()
    change: RecordId | None = None


CheckpointName = Annotated[
    str, StringConstraints(pattern=rf"^(fresh|{ID_PATTERN}|([\w.-]+/)*step-\d+)$")
]
"""`fresh`, the id of an artifact record, or the name of a checkpoint folder."""


class Attempt(Body):
    """One process group working on a run, with everything that fixes its numbers.

    It starts after `from_completed` updates (its checkpoint) and ends after `to_completed`.
    """

    record_type: ClassVar[str] = "attempt"

    run: Text
    ordinal: Annotated[int, Field(ge=1, strict=True)]
    start: Time
    end: Time | None = None
    restored_from: CheckpointName
    from_completed: Count | None = None
    to_completed: Count | None = None
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
        first, last = self.from_completed, self.to_completed
        if first is not None and last is not None and last < first:
            raise ValueError(f"to_completed {last} lies before from_completed {first}")
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
    basis_registry: Hash | None = None
    verdict: Literal["pending", "accepted", "accepted_stability_unproved", "rolled_back"] = (
        "pending"
    )
