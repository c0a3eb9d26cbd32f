"""The delay simulator: what a shortened horizon would change and what it would cost in loss.

A run that is late can be cut to a share of its updates. Everything that depends on the horizon is
rebuilt here and shown before the decision; nothing is applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from portolan.canonical import stringify_floats
from portolan.errors import UsageError
from portolan.optim.schedule import Law, Schedule, token_exponent
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.ladder import evaluation_marks, phase_boundary

COST_SD_SHARE = 0.5
"""Standard deviation of the loss cost over the cost: lost tokens are not lost ladder compute."""
SHOWN_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the remaining updates at which the learning rate is printed."""


@dataclass(frozen=True)
class MixturePhase:
    """A phase of the data mixture: where it starts as a share of the run, and its weights."""

    name: str
    start: float
    weights: Mapping[str, float]


@dataclass(frozen=True)
class DelayInputs:
    """What the simulator must know of a run.

    `law` is F0's in training FLOPs without the output head; `cells` holds sequences per cell of
    the mixture; `seconds_per_step` and `now` give the end date when they are known.
    """

    schedule: Schedule
    peak_rate: float
    initial_decay: float
    tokens_per_step: int
    batch_sequences: int
    flops_per_step: float
    law: PowerLaw
    rate_law: Law = "aug"
    mixture_block: int = 1
    phases: tuple[MixturePhase, ...] = ()
    cells: Mapping[str, int] = field(default_factory=dict)
    permanent_checkpoint_steps: int | None = None
    seconds_per_step: float | None = None
    now: datetime | None = None


@dataclass(frozen=True)
class Row:
    """One line of the diff."""

    field: str
    before: Any
    after: Any

    @property
    def changed(self) -> bool:
        """Whether the horizon changes it."""
        return self.before != self.after


@dataclass(frozen=True)
class DelayPlan:
    """Simulated cut to `steps` updates at update `from_step`: the diff and the cost in nats."""

    horizon: float
    from_step: int
    steps: int
    schedule: Schedule
    rows: tuple[Row, ...]
    loss_before: float
    loss_after: float

    @property
    def cost(self) -> float:
        """Expected rise of the final loss."""
        return self.loss_after - self.loss_before

    @property
    def cost_sd(self) -> float:
        """Its standard deviation."""
        return COST_SD_SHARE * self.cost

    def record(self) -> dict[str, Any]:
        """What an amended registration attaches; numbers as decimal strings."""
        return stringify_floats(
            {
                "horizon": self.horizon,
                "from_step": self.from_step,
                "steps": self.steps,
                "diff": [
                    {"field": row.field, "before": row.before, "after": row.after}
                    for row in self.rows
                    if row.changed
                ],
                "loss_cost": self.cost,
                "loss_cost_sd": self.cost_sd,
            }
        )


def simulate(inputs: DelayInputs, horizon: float, from_step: int) -> DelayPlan:
    """Cut the run at update `from_step` to round(horizon * planned updates).

    Raises:
        UsageError: the horizon does not shorten the run, or ends before `from_step`.
    """
    planned = inputs.schedule.final_horizon
    steps = round(horizon * planned)
    if not 0 < horizon < 1 or steps <= from_step:
        raise UsageError(
            f"--horizon {horizon:g} from step {from_step} would end after {steps} of {planned} "
            "updates",
            remedy="give a share of the planned updates below 1 that lies after --from-step",
        )
    after = inputs.schedule.retime(from_step, steps)
    rows = [
        Row("updates", planned, steps),
        Row("tokens", planned * inputs.tokens_per_step, steps * inputs.tokens_per_step),
        Row(
            "training FLOPs without head",
            planned * inputs.flops_per_step,
            steps * inputs.flops_per_step,
        ),
        *_rate_rows(inputs, after, from_step, steps),
        *_decay_rows(inputs, after, from_step, steps),
        *_mixture_rows(inputs, from_step, planned, steps),
        *_mark_rows(inputs, from_step, planned, steps),
        *_date_rows(inputs, from_step, planned, steps),
        Row("peak rate that the law would give, over the planned (not applied)", 1.0,
            horizon ** token_exponent(inputs.rate_law)),
    ]  # fmt: skip
    return DelayPlan(
        horizon=horizon,
        from_step=from_step,
        steps=steps,
        schedule=after,
        rows=tuple(rows),
        loss_before=inputs.law(planned * inputs.flops_per_step),
        loss_after=inputs.law(horizon * planned * inputs.flops_per_step),
    )


def _shown_steps(from_step: int, steps: int) -> list[int]:
    return [from_step + round(share * (steps - 1 - from_step)) for share in SHOWN_FRACTIONS]


def _rate_rows(inputs: DelayInputs, after: Schedule, from_step: int, steps: int) -> Sequence[Row]:
    before = inputs.schedule
    return [
        Row(
            f"learning rate at update {step}",
            before.factor(step) * inputs.peak_rate,
            after.factor(step) * inputs.peak_rate,
        )
        for step in (from_step, *_shown_steps(from_step, steps))
    ]


def _decay_rows(inputs: DelayInputs, after: Schedule, from_step: int, steps: int) -> Sequence[Row]:
    if not inputs.initial_decay:
        return []
    return [
        Row(
            f"router and gate decay at update {step}",
            inputs.schedule.decay(step, inputs.initial_decay),
            after.decay(step, inputs.initial_decay),
        )
        for step in _shown_steps(from_step, steps)
    ]


def _mixture_rows(inputs: DelayInputs, from_step: int, planned: int, steps: int) -> Sequence[Row]:
    """Phase boundaries on the lattice of whole blocks, and epochs of each cell."""
    if not inputs.phases:
        return []
    before = _phase_starts(inputs, planned, planned, planned)
    after = _phase_starts(inputs, planned, steps, from_step)
    rows = [
        Row(f"start of mixture phase {phase.name}", old, new)
        for phase, old, new in zip(inputs.phases, before, after, strict=True)
    ]
    old_epochs = _epochs(inputs, before, planned)
    new_epochs = _epochs(inputs, after, steps)
    return [
        *rows,
        *(Row(f"epochs of {cell}", old_epochs[cell], new_epochs[cell]) for cell in inputs.cells),
    ]


def _phase_starts(inputs: DelayInputs, planned: int, steps: int, from_step: int) -> list[int]:
    """First update of each phase over `steps`; one that began before the cut keeps its start."""
    starts = []
    for phase in inputs.phases:
        batch, block = inputs.batch_sequences, inputs.mixture_block
        original = phase_boundary(phase.start, planned, batch, block)
        moved = phase_boundary(phase.start, steps, batch, block)
        starts.append(original if original <= from_step else max(moved, from_step))
    return starts


def _epochs(inputs: DelayInputs, starts: Sequence[int], steps: int) -> dict[str, float]:
    """Times each cell is read: sum over phases of weight * sequences of the phase / its size."""
    ends = [*starts[1:], steps]
    totals = dict.fromkeys(inputs.cells, 0.0)
    for phase, start, end in zip(inputs.phases, starts, ends, strict=True):
        for cell, size in inputs.cells.items():
            read = phase.weights.get(cell, 0.0) * max(0, end - start) * inputs.batch_sequences
            totals[cell] += read / size
    return totals


def _mark_rows(inputs: DelayInputs, from_step: int, planned: int, steps: int) -> Sequence[Row]:
    def left(marks: Sequence[int]) -> list[int]:
        return [mark for mark in marks if mark > from_step]

    rows = [
        Row(
            "evaluations still to come, completed updates",
            left(evaluation_marks(planned)),
            left(evaluation_marks(steps)),
        )
    ]
    if every := inputs.permanent_checkpoint_steps:
        rows.append(
            Row(
                "permanent checkpoints still to come, completed updates",
                left([*range(every, planned, every), planned]),
                left([*range(every, steps, every), steps]),
            )
        )
    return rows


def _date_rows(inputs: DelayInputs, from_step: int, planned: int, steps: int) -> Sequence[Row]:
    if inputs.seconds_per_step is None or inputs.now is None:
        return []

    def end(updates: int) -> str:
        left = timedelta(seconds=(updates - from_step) * (inputs.seconds_per_step or 0.0))
        return f"{(inputs.now or datetime.min) + left:%Y-%m-%d %H:%M} UTC"

    return [Row("end, at the present pace", end(planned), end(steps))]
