"""One update: forward, loss, backward, then optimizer and new router state.

Two programs, not one: together they took the CPU compiler 65 s at width 64, apart 16 s and 7 s.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from portolan.errors import UsageError
from portolan.model import transformer
from portolan.optim.groups import GroupTable
from portolan.optim.hyperball import build_step
from portolan.optim.norms import gradient_norms, parameter_norms
from portolan.optim.schedule import Rates
from portolan.optim.settings import OptimizerSettings
from portolan.optim.sharding import Layout
from portolan.parallel.layout import STACK_AXES
from portolan.parallel.spread import Spread
from portolan.shapes import ModelConfig, Remat
from portolan.train.accumulation import accumulate
from portolan.train.devices import Devices
from portolan.train.programs import seal_programs
from portolan.train.state import RunSettings, TrainState, abstract_state
from portolan.tree import flatten_paths

NUM_KEPT_PROGRAMS = 8
"""Of each kind in one process: a ladder comes back to a width with every seed."""
OVERLAP_FLAG = re.compile(r"--xla_gpu_experimental_parallel_collective_overlap_limit=(\d+)")


@dataclass(frozen=True)
class TrainStep:
    """The update `(state, batch, rates) -> (state, metrics)`; `state` is donated.

    When the loss, the gradient norm or a router quantile is not finite, the returned state is the
    old one and `metrics["finite"]` is false, so that the caller can save it and stop. Metrics are
    scalars, but for `router/*`, which hold one value a layer.
    """

    gradients: Any
    update: Any

    def __call__(
        self, state: TrainState, batch: transformer.Batch, rates: Rates
    ) -> tuple[TrainState, dict]:
        """One update."""
        loss, aux, grads = self.gradients(state.params, state.beta, batch)
        return self.update(state, grads, loss, aux, rates)

    def lower(self, state: TrainState, batch: transformer.Batch, rates: Rates) -> list[Any]:
        """Both programs, traced but not compiled."""
        loss, aux, grads = jax.eval_shape(self.gradients, state.params, state.beta, batch)
        return [
            self.gradients.lower(state.params, state.beta, batch),
            self.update.lower(state, grads, loss, aux, rates),
        ]


def make_train_step(
    run: RunSettings, table: GroupTable, compute_dtype: Any, devices: Devices | None = None
) -> TrainStep:
    """The update of a run, jitted; runs that differ in seed, data or rates share its programs.

    `devices` are those of a mesh; without them all of it is on one.
    """
    spread = devices and devices.training_spread(run.config, run.batch_sequences)
    if spread and run.config.mlp != "dense":
        spread.exchange(compute_dtype)
    if run.offload_carries:
        refuse_overlap(os.environ.get("XLA_FLAGS", ""))
    objective = Objective(
        run.config, jnp.dtype(compute_dtype), run.z_weight, run.remat, run.offload_carries, spread
    )
    if devices is None:
        return TrainStep(_gradient_program(objective), _update_program(table, run.optimizer))
    placed = devices.state_shardings(abstract_state(run, table))
    return TrainStep(
        _gradient_program_on(objective, devices), _update_program_on(table, run.optimizer, placed)
    )


@functools.lru_cache(NUM_KEPT_PROGRAMS)
def _gradient_program(objective: "Objective") -> Any:
    return jax.jit(objective.gradients, compiler_options=_compiler_options())


@functools.lru_cache(NUM_KEPT_PROGRAMS)
def _update_program(table: GroupTable, settings: OptimizerSettings) -> Any:
    return jax.jit(_update_function(table, settings), donate_argnums=0)


def _gradient_program_on(objective: "Objective", devices: Devices) -> Any:
    params = devices.parameter_shardings(transformer.abstract(objective.config))
    rows: Any = transformer.Batch(*[devices.batch_rows] * 3)  # type: ignore[arg-type]
    return jax.jit(
        objective.gradients,
        compiler_options=_compiler_options(),
        in_shardings=(params, devices.everywhere, rows),
        out_shardings=(devices.everywhere, devices.everywhere, params),
    )


def _update_program_on(table: GroupTable, settings: OptimizerSettings, placed: Any) -> Any:
    everywhere = placed.beta
    specs = {path: leaf.spec for path, leaf in flatten_paths(placed.params).items()}
    layout = Layout(everywhere.mesh, specs, stack_axes=STACK_AXES)
    return jax.jit(
        _update_function(table, settings, layout),
        donate_argnums=0,
        in_shardings=(placed, placed.params, everywhere, everywhere, None),
        out_shardings=(placed, everywhere),
    )


def refuse_overlap(flags: str) -> None:
    """Refuse carries in host memory beside overlapping collectives.

    A reloaded carry then races its reader and training is silently wrong (marin #8753).

    Raises:
        UsageError: names the flag.
    """
    found = OVERLAP_FLAG.search(flags)
    if found and int(found.group(1)) > 1:
        raise UsageError(
            f"train.offload_carries with {found.group(0)} in XLA_FLAGS trains wrongly",
            remedy="set that limit to 1, or train.offload_carries = false",
        )


def _compiler_options() -> dict[str, str] | None:
    return transformer.CPU_COMPILER_OPTIONS if jax.default_backend() == "cpu" else None


def compile_programs(lowered: Sequence[Any]) -> list[int]:
    """Compile traced programs side by side; JAX keeps them for the calls that follow.

    Returns the bytes of arguments, results and temporaries of each; 0 where not known.
    """
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    seal_programs()
    return [_program_bytes(program) for program in compiled]


def _program_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes


@dataclass(frozen=True)
class Objective:
    """What a gradient program is compiled for."""

    config: ModelConfig
    compute_dtype: jnp.dtype
    z_weight: float
    remat: Remat
    offload_carries: bool = False
    spread: Spread | None = None

    def gradients(self, params: Any, beta: jax.Array, batch: transformer.Batch) -> tuple:
        """The loss, its parts and new router state, and the gradient of all parameters."""

        settings: dict[str, Any] = {
            "compute_dtype": self.compute_dtype,
            "z_weight": self.z_weight,
            "remat": self.remat,
            "offload_carries": self.offload_carries,
        }
        if self.spread is None:
            loss = functools.partial(transformer.loss, config=self.config, **settings)
        else:
            loss = self.spread.loss(**settings)
        derive = jax.value_and_grad(loss, has_aux=True)
        if self.spread is not None and self.spread.num_micro_batches > 1:
            return accumulate(derive, params, beta, batch, self.config.experts_per_token)
        (value, aux), grads = derive(params, beta, batch)
        return value, aux, grads


def _update_function(
    table: GroupTable, settings: OptimizerSettings, layout: Layout | None = None
) -> Callable:
    optimize = build_step(table, settings, layout=layout)

    def update(
        state: TrainState, grads: Any, loss: jax.Array, aux: transformer.LossAux, rates: Rates
    ) -> tuple[TrainState, dict]:
        norms = gradient_norms(grads)
        finite = (
            jnp.isfinite(loss)
            & jnp.isfinite(norms["norm/gradient/global"])
            & jnp.all(jnp.isfinite(aux.new_beta))
        )
        params, opt = optimize(grads, state.opt, state.params, rates, accepted=finite)
        kept = TrainState(params, opt, jnp.where(finite, aux.new_beta, state.beta))
        norms |= parameter_norms(state.params, params, table)
        metrics = {
            "finite": finite,
            "train/loss": loss,
            "train/cross_entropy": aux.ce,
            "train/mean_square_lse": aux.mean_square_lse,
            **{f"router/{name}": value for name, value in flatten_paths(aux.router).items()},
            **norms,
        }
        return kept, metrics

    return update
