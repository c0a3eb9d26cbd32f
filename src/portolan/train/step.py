"""One update: forward, loss, backward, then optimizer and new router state.

Two programs, not one: together they took the CPU compiler 65 s at width 64, apart 16 s and 7 s.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from portolan.model import transformer
from portolan.optim.groups import GroupTable
from portolan.optim.hyperball import build_step
from portolan.optim.norms import diagnostics
from portolan.optim.schedule import Rates
from portolan.train.state import RunSettings, TrainState
from portolan.tree import flatten_paths


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


def make_train_step(run: RunSettings, table: GroupTable, compute_dtype: Any) -> TrainStep:
    """The update of a run, jitted."""
    options = transformer.CPU_COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    return TrainStep(
        jax.jit(_gradient_function(run, compute_dtype), compiler_options=options),
        jax.jit(_update_function(run, table), donate_argnums=0),
    )


def compile_programs(lowered: Sequence[Any]) -> None:
    """Compile traced programs side by side; JAX keeps them for the calls that follow."""
    with ThreadPoolExecutor(len(lowered)) as pool:
        list(pool.map(lambda program: program.compile(), lowered))


def _gradient_function(run: RunSettings, compute_dtype: Any) -> Callable:
    def gradients(params: Any, beta: jax.Array, batch: transformer.Batch) -> tuple:
        def objective(params: Any) -> tuple[jax.Array, transformer.LossAux]:
            return transformer.loss(
                params,
                beta,
                batch,
                run.config,
                compute_dtype=compute_dtype,
                z_weight=run.z_weight,
                remat=run.remat,
            )

        (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return loss, aux, grads

    return gradients


def _update_function(run: RunSettings, table: GroupTable) -> Callable:
    optimize = build_step(table, run.optimizer)

    def update(
        state: TrainState, grads: Any, loss: jax.Array, aux: transformer.LossAux, rates: Rates
    ) -> tuple[TrainState, dict]:
        params, opt = optimize(grads, state.opt, state.params, rates)
        norms = diagnostics(grads, state.params, params, table)
        finite = (
            jnp.isfinite(loss)
            & jnp.isfinite(norms["norm/gradient/global"])
            & jnp.all(jnp.isfinite(aux.new_beta))
        )
        new = TrainState(params=params, opt=opt, beta=aux.new_beta)
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
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
