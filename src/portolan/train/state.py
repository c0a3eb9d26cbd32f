"""What a run carries from step to step, and what it was told to do."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portolan.errors import ResumeRefused
from portolan.model import transformer
from portolan.optim.groups import GroupTable, resolve_groups
from portolan.optim.hyperball import init_state
from portolan.optim.schedule import PeakRates, Schedule
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import ModelConfig
from portolan.tree import flatten_paths, unflatten_paths

NUM_EVALUATION_MARKS = 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state and router state; `opt.count` is the number of updates done.

    `beta` [L, E] float32 is the quantile of the margins that the next step's bias comes from.
    """

    params: Any
    opt: Any
    beta: jax.Array


@dataclass(frozen=True)
class RunSettings:
    """One run as the loop needs it. `peak` holds the peak rates; the schedule lowers them."""

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
    remat: bool
    norm_interval_steps: int
    temporary_checkpoint_seconds: float
    permanent_checkpoint_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update."""
        return self.batch_sequences * self.config.sequence_length

    @property
    def schedule(self) -> Schedule:
        """Warm-up and decay of both rates."""
        return Schedule(self.steps, self.warmup_steps, self.min_ratio)

    def evaluation_steps(self) -> dict[int, float]:
        """Completed updates at which the run is evaluated -> nominal fraction of the run."""
        marks = {}
        for k in range(1, NUM_EVALUATION_MARKS + 1):
            completed = max(1, round(k * self.steps / NUM_EVALUATION_MARKS))
            marks.setdefault(completed, k / NUM_EVALUATION_MARKS)
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
    return resolve_groups(shapes, scope=run.optimizer.hyperball_scope, settings=run.optimizer)


def initial_state(run: RunSettings, table: GroupTable) -> TrainState:
    """Fresh parameters, empty moments, beta = 0."""
    params = transformer.init(run.config, run.seed)
    beta = jnp.zeros((run.config.num_layers, run.config.num_experts), jnp.float32)
    opt = init_state(params, table=table, settings=run.optimizer)
    return TrainState(params=params, opt=opt, beta=beta)


def flatten_state(state: TrainState) -> dict[str, Any]:
    """{path: array} of the whole state: parameter paths, `opt/...`, `router_state/beta`."""
    flat = dict(flatten_paths(state.params))
    flat |= {f"opt/{path}": leaf for path, leaf in flatten_paths(state.opt).items()}
    flat["router_state/beta"] = state.beta
    return flat


def restore_state(template: TrainState, arrays: dict[str, np.ndarray]) -> TrainState:
    """State with the saved arrays in the places of `template`.

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
    params = unflatten_paths(template.params, arrays)
    opt = unflatten_paths(
        template.opt,
        {p.removeprefix("opt/"): a for p, a in arrays.items() if p.startswith("opt/")},
    )
    return dataclasses.replace(
        template, params=params, opt=opt, beta=jnp.asarray(arrays["router_state/beta"])
    )
