"""What a run carries from step to step, and what it was told to do."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portolan.errors import ResumeRefused, UsageError
from portolan.model import transformer
from portolan.optim.groups import GroupTable, components_of, resolve_groups
from portolan.optim.hyperball import init_state
from portolan.optim.schedule import HorizonEvent, PeakRates, Schedule
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import ModelConfig, Remat
from portolan.tree import flatten_paths, unflatten_paths

NUM_EVALUATION_MARKS = 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state and router state; `opt.count` is the number of updates done.

    `beta` [L, E] float32 is the quantile of the margins that the next step's bias comes from;
    [L, 0] where the shape has no quantile balancing.
    """

    params: Any
    opt: Any
    beta: jax.Array


class Stage(NamedTuple):
    """From update `start_step` on: rows of another length, and a shape that says so."""

    start_step: int
    config: ModelConfig
    batch_sequences: int


@dataclass(frozen=True)
class RunSettings:
    """One run as the loop needs it. `peak` holds the peak rates; the schedule lowers them.

    `config` and `batch_sequences` are those of the first update, `steps` the updates of the
    original plan, which set the rates; `stages` and `horizon_events` say what changes later, and
    `data_changes` (first update, digest) when the data do.
    """

    run_id: str
    role: str
    config: ModelConfig
    batch_sequences: int
    steps: int
    peak: PeakRates
    warmup_steps: int
    min_ratio: float
    optimizer: OptimizerSettings
    seed: int
    compute_dtype: str
    z_weight: float
    remat: Remat
    norm_interval_steps: int
    temporary_checkpoint_seconds: float
    permanent_checkpoint_steps: int
    num_evaluations: int = NUM_EVALUATION_MARKS
    stages: tuple[Stage, ...] = ()
    horizon_events: tuple[HorizonEvent, ...] = ()
    data_changes: tuple[tuple[int, str], ...] = ()
    offload_carries: bool = False

    def __post_init__(self) -> None:
        """Refuse stages out of order, or with another number of tokens an update."""
        starts = [0, *(stage.start_step for stage in self.stages)]
        if starts != sorted(set(starts)):
            raise UsageError(f"context stages start at updates {starts[1:]}, out of order")
        for start, config, batch in self.stages:
            tokens = batch * config.sequence_length
            if tokens != self.tokens_per_step:
                raise UsageError(
                    f"from update {start} on an update would have {batch} rows of "
                    f"{config.sequence_length} = {tokens} tokens, before {self.tokens_per_step}",
                    remedy="keep batch times length: rates and moments are those of that batch",
                )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update."""
        return self.batch_sequences * self.config.sequence_length

    @property
    def schedule(self) -> Schedule:
        """Warm-up and decay of both rates."""
        return Schedule(self.steps, self.warmup_steps, self.min_ratio, self.horizon_events)

    @property
    def num_updates(self) -> int:
        """Updates of the run after all changes of its horizon."""
        return self.schedule.final_horizon

    def at(self, step: int) -> "RunSettings":
        """These settings with the shape and batch of update `step`."""
        for stage in reversed(self.stages):
            if stage.start_step <= step:
                return dataclasses.replace(
                    self, config=stage.config, batch_sequences=stage.batch_sequences, stages=()
                )
        return self

    def stage_end(self, step: int) -> int:
        """The first update after `step` that has another shape, or the end of the run."""
        later = (stage.start_step for stage in self.stages if stage.start_step > step)
        return min([*later, self.num_updates])

    def history(self, completed: int) -> list[list[Any]]:
        """What has changed the state after `completed` updates: [update, what, value] by time."""
        found: list[list[Any]] = [
            [start, "context", f"{batch} x {config.sequence_length}, qk {config.qk_multiplier!r}"]
            for start, config, batch in self.stages
        ]
        found += [[event.step, "horizon", str(event.horizon)] for event in self.horizon_events]
        found += [[start, "mixture", weights] for start, weights in self.data_changes]
        return sorted(change for change in found if change[0] < completed)

    def evaluation_steps(self) -> dict[int, float]:
        """Completed updates at which the run is evaluated -> nominal fraction of the run.

        Marks that a change of the horizon found behind it stay where they were.
        """
        marks = _marks(self.steps, self.num_evaluations)
        for event in self.horizon_events:
            past = {done: mark for done, mark in marks.items() if done <= event.step}
            later = _marks(event.horizon, self.num_evaluations).items()
            marks = past | {done: mark for done, mark in later if done > event.step}
        return marks


def _marks(steps: int, number: int) -> dict[int, float]:
    """Completed updates nearest to k / number of a run -> that fraction."""
    marks: dict[int, float] = {}
    for k in range(1, number + 1):
        marks.setdefault(max(1, round(k * steps / number)), k / number)
    return marks


def resolve_compute_dtype(name: str) -> jnp.dtype:
    """`auto` is float32 on CPU, bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def group_table(run: RunSettings) -> GroupTable:
    """Which optimizer group every parameter belongs to."""
    shapes = {
        path: leaf.shape for path, leaf in flatten_paths(transformer.abstract(run.config)).items()
    }
    return resolve_groups(
        shapes,
        scope=run.optimizer.hyperball_scope,
        settings=run.optimizer,
        components=components_of(run.config),
    )


def initial_state(run: RunSettings, table: GroupTable) -> TrainState:
    """Fresh parameters, empty moments, beta = 0."""
    return state_of(transformer.init(run.config, run.seed), run, table)


def state_of(params: Any, run: RunSettings, table: GroupTable) -> TrainState:
    """The state of a run that starts with `params`."""
    beta = jnp.zeros((run.config.num_layers, run.config.num_balance_biases), jnp.float32)
    opt = init_state(params, table=table, settings=run.optimizer)
    return TrainState(params=params, opt=opt, beta=beta)


def abstract_state(run: RunSettings, table: GroupTable) -> TrainState:
    """Shapes and types of the state of a run; nothing is allocated."""
    shapes = transformer.abstract(run.config)
    return jax.eval_shape(lambda params: state_of(params, run, table), shapes)


def flatten_state(state: TrainState) -> dict[str, Any]:
    """{path: array} of the whole state: parameter paths, `opt/...`, `router_state/beta`."""
    flat = dict(flatten_paths(state.params))
    flat |= {f"opt/{path}": leaf for path, leaf in flatten_paths(state.opt).items()}
    flat["router_state/beta"] = state.beta
    return flat


def check_saved(template: TrainState, arrays: Mapping[str, Any]) -> None:
    """Refuse saved arrays that are not those of `template`.

    Raises:
        ResumeRefused: the saved paths, shapes or types are not those of this run.
    """
    expected = flatten_state(template)
    if missing := sorted(set(expected) ^ set(arrays)):
        raise ResumeRefused(
            f"the checkpoint and this recipe differ in {missing[0]!r} and "
            f"{len(missing) - 1} other arrays",
            remedy="resume with the recipe that wrote the checkpoint",
        )
    for path, leaf in expected.items():
        found = arrays[path]
        if tuple(found.shape) != tuple(leaf.shape) or found.dtype != leaf.dtype:
            raise ResumeRefused(
                f"{path} is {found.dtype}{list(found.shape)} in the checkpoint, this recipe "
                f"needs {leaf.dtype}{list(leaf.shape)}",
                remedy="resume with the recipe that wrote the checkpoint",
            )


def restore_state(template: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """State with the saved arrays, NumPy's or JAX's, in the places of `template`.

    Raises:
        ResumeRefused: the saved paths, shapes or types are not those of this run.
    """
    check_saved(template, arrays)
    params = unflatten_paths(template.params, arrays)
    opt = unflatten_paths(
        template.opt,
        {p.removeprefix("opt/"): a for p, a in arrays.items() if p.startswith("opt/")},
    )
    return dataclasses.replace(
        template, params=params, opt=opt, beta=jnp.asarray(arrays["router_state/beta"])
    )
