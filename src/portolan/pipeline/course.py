"""What a run does from which update on: length of its rows, mixture, horizon.

A course is planned from the recipe; changes decided while the run goes on are applied to it in the
order in which they were recorded. A change never moves what began before it. Rows and weights
change at whole mixture blocks: a fraction of the run is snapped down to one, an update up.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from portolan.canonical import digest, stringify_floats
from portolan.data.order import Geometry, count_sequences
from portolan.errors import UsageError
from portolan.optim.schedule import HorizonEvent
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung
from portolan.shapes import QK_MULTIPLIER_AT_START, qk_multiplier
from portolan.timetable import MAIN_PHASE, ContextStage


@dataclass(frozen=True)
class Stage:
    """Rows of `sequence_length` from update `start_step` on.

    `fraction` is where in the run the recipe wants it; it moves with the horizon.
    """

    start_step: int
    sequence_length: int
    batch_sequences: int
    qk_multiplier: float
    fraction: Fraction | None = None


@dataclass(frozen=True)
class WeightPhase:
    """Weights by domain from update `start_step` on, proportional to tokens when there are none."""

    start_step: int
    name: str
    weights: Mapping[str, float] = field(hash=False)
    fraction: Fraction | None = None


Entry = Stage | WeightPhase
EntryType = TypeVar("EntryType", Stage, WeightPhase)


@dataclass(frozen=True)
class ContextChange:
    """Rows of another length from update `from_step` on."""

    from_step: int
    sequence_length: int
    qk_multiplier: float


@dataclass(frozen=True)
class MixtureChange:
    """Other weights from update `from_step` on."""

    from_step: int
    name: str
    weights: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True)
class HorizonChange:
    """The run ends after `horizon` updates; from `from_step` on the rates fall towards that end."""

    from_step: int
    horizon: int


Change = ContextChange | MixtureChange | HorizonChange
KINDS: dict[str, type] = {
    "context": ContextChange,
    "mixture": MixtureChange,
    "horizon": HorizonChange,
}


def change_to_json(change: Change) -> dict[str, Any]:
    """A change as the journal keeps it, floats as decimal text."""
    kind = next(name for name, cls in KINDS.items() if isinstance(change, cls))
    return stringify_floats({"kind": kind} | dataclasses.asdict(change))


def change_from_json(content: Mapping[str, Any]) -> Change:
    """The change that `change_to_json` wrote."""
    values = dict(content)
    cls = KINDS[values.pop("kind")]
    if "weights" in values:
        values["weights"] = {name: float(weight) for name, weight in values["weights"].items()}
    if "qk_multiplier" in values:
        values["qk_multiplier"] = float(values["qk_multiplier"])
    return cls(**values)


@dataclass(frozen=True)
class Course:
    """A run in time.

    `steps` and `warmup_steps` are those of the original plan, `block_sequences` the sequences of a
    mixture block. Stages and phases are in order of their start, the first of each at update 0.
    """

    steps: int
    tokens_per_step: int
    block_sequences: int
    stages: tuple[Stage, ...]
    phases: tuple[WeightPhase, ...]
    horizons: tuple[HorizonEvent, ...] = ()

    @property
    def num_updates(self) -> int:
        """Updates of the run after all changes of its horizon."""
        return self.horizons[-1].horizon if self.horizons else self.steps

    @property
    def geometry(self) -> tuple[Geometry, ...]:
        """Batch and row length by update, as the loader needs them."""
        return tuple(
            Geometry(stage.start_step, stage.batch_sequences, stage.sequence_length)
            for stage in self.stages
        )

    def stage_at(self, step: int) -> Stage:
        """Rows of update `step`."""
        return [stage for stage in self.stages if stage.start_step <= step][-1]

    def block_start(self, step: int, *, up: bool) -> int:
        """The last update at or before `step`, or the first at or after, that begins a block."""
        stage = self.stage_at(step)
        unit = self.block_sequences // math.gcd(self.block_sequences, stage.batch_sequences)
        inside = step - stage.start_step
        start = step - inside % unit
        if up and start < step:
            start += unit
        assert count_sequences(self.geometry, start) % self.block_sequences == 0
        return start

    def apply(self, change: Change) -> "Course":
        """This course after a change; what has begun before the change stays as it is.

        Raises:
            UsageError: the change cannot be followed.
        """
        if not 0 < change.from_step < self.num_updates:
            raise UsageError(
                f"a change from update {change.from_step} on lies outside a run of "
                f"{self.num_updates} updates",
                remedy=f"use 1 to {self.num_updates - 1}",
            )
        begun = [entry for entry in self._entries() if entry.start_step < change.from_step]
        pending = [entry for entry in self._entries() if entry.start_step >= change.from_step]
        horizons = self.horizons
        if isinstance(change, HorizonChange):
            horizons = (*horizons, HorizonEvent(change.from_step, change.horizon))
        else:
            pending.append(self._entry(change))
        base = dataclasses.replace(
            self, stages=_only(Stage, begun), phases=_only(WeightPhase, begun), horizons=horizons
        )
        return base._settle(pending, earliest=change.from_step)

    def _entries(self) -> list[Entry]:
        return [*self.stages, *self.phases]

    def _entry(self, change: ContextChange | MixtureChange) -> Entry:
        if isinstance(change, MixtureChange):
            return WeightPhase(change.from_step, change.name, change.weights)
        batch = batch_of(change.sequence_length, self.tokens_per_step)
        return Stage(change.from_step, change.sequence_length, batch, change.qk_multiplier)

    def _settle(self, pending: Iterable[Entry], earliest: int) -> "Course":
        """Add entries in order of where they are wanted, each at a block from `earliest` on."""

        def wanted(entry: Entry) -> int:
            if entry.fraction is None:
                return entry.start_step
            return max(earliest, math.floor(entry.fraction * self.num_updates))

        course = self
        for entry in sorted(pending, key=wanted):
            start = course.block_start(wanted(entry), up=entry.fraction is None)
            if start < earliest:
                start = course.block_start(earliest, up=True)
            course = course._add(dataclasses.replace(entry, start_step=start))
        return course

    def _add(self, entry: Entry) -> "Course":
        """The course with one more entry; none where the run has ended before it."""
        name = "stages" if isinstance(entry, Stage) else "phases"
        before = getattr(self, name)
        if entry.start_step >= self.num_updates:
            return self
        if entry.start_step <= before[-1].start_step:
            raise UsageError(
                f"two {name} of the run would begin at update {entry.start_step}: mixture blocks "
                f"of {self.block_sequences} sequences are the places where one may",
                remedy="set them farther apart, later in the run, or make the run longer",
            )
        return dataclasses.replace(self, **{name: (*before, entry)})

    def describe_stages(self) -> str:
        """`from 0: 16 x 256 (qk 1.3); from 400: ...`."""
        return "; ".join(
            f"from {stage.start_step}: {stage.batch_sequences} x {stage.sequence_length} "
            f"(qk {stage.qk_multiplier:.6g})"
            for stage in self.stages
        )

    def describe_phases(self) -> str:
        """`main from 0, cooldown from 9120`."""
        return ", ".join(f"{phase.name} from {phase.start_step}" for phase in self.phases)

    def data_changes(self) -> tuple[tuple[int, str], ...]:
        """(first update, digest of the weights) of every phase after the first."""
        return tuple(
            (phase.start_step, digest(stringify_floats(dict(phase.weights))))
            for phase in self.phases[1:]
        )


def _only(cls: type[EntryType], entries: Iterable[Entry]) -> tuple[EntryType, ...]:
    return tuple(entry for entry in entries if isinstance(entry, cls))


def batch_of(sequence_length: int, tokens_per_step: int) -> int:
    """Sequences an update, so that its tokens stay the same.

    Raises:
        UsageError: they cannot.
    """
    if sequence_length < 2 or tokens_per_step % sequence_length:
        raise UsageError(
            f"rows of {sequence_length} tokens do not divide the {tokens_per_step} tokens of an "
            "update: batch times length must stay the same",
            remedy="use a divisor, such as the present length times a power of two",
        )
    return tokens_per_step // sequence_length


def extended_multiplier(rung: Rung, sequence_length: int) -> float:
    """The shape's multiplier times 1 + 0.1 ln(S / S_0), S_0 the length the run starts with."""
    config = rung.config
    factor = qk_multiplier(sequence_length, config.sequence_length) / QK_MULTIPLIER_AT_START
    return config.qk_multiplier * factor


def plan_course(recipe: Recipe, rung: Rung, *, extend: bool = False) -> Course:
    """The course of one width of a recipe; `extend` adds the context stages of the target.

    Raises:
        UsageError: two stages or two phases fall together, or tokens an update cannot stay the
            same.
    """
    config = rung.config
    first = Stage(0, config.sequence_length, rung.batch_sequences, config.qk_multiplier)
    course = Course(
        steps=rung.steps,
        tokens_per_step=rung.tokens_per_step,
        block_sequences=rung.mixture_block,
        stages=(first,),
        phases=(WeightPhase(0, MAIN_PHASE, recipe.mixture.weights),),
    )
    pending: list[Entry] = [
        WeightPhase(0, phase.name, phase.weights, _exact(phase.from_fraction))
        for phase in recipe.mixture.phases
    ]
    if extend:
        pending += [_planned_stage(stage, rung) for stage in recipe.context.stages]
    return course._settle(pending, earliest=1) if pending else course


def _planned_stage(stage: ContextStage, rung: Rung) -> Stage:
    length = stage.sequence_length
    batch = batch_of(length, rung.tokens_per_step)
    multiplier = stage.qk_multiplier or extended_multiplier(rung, length)
    fraction = None if stage.from_fraction is None else _exact(stage.from_fraction)
    return Stage(stage.from_step or 0, length, batch, multiplier, fraction)


def _exact(fraction: float) -> Fraction:
    return Fraction(repr(fraction))
