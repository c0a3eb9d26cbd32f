"""One update: forward, loss, backward, optimizer, new router state."""

import functools
from collections.abc import Callable
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


def make_train_step(
    run: RunSettings, table: GroupTable, compute_dtype: Any
) -> Callable[[TrainState, transformer.Batch, Rates], tuple[TrainState, dict]]:
    """The jitted update `(state, batch, rates) -> (state, metrics)`; `state` is donated.

    When the loss or the gradient norm is not finite the returned state is the old one and
    `metrics["finite"]` is false, so that the caller can save it and stop. Metrics are scalars,
    but for `router/*`, which hold one value a layer.
    """

    update = build_step(table, run.optimizer)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, batch: transformer.Batch, rates: Rates
    ) -> tuple[TrainState, dict]:
        def objective(params: Any) -> tuple[jax.Array, transformer.LossAux]:
            return transformer.loss(
                params,
                state.beta,
                batch,
                run.config,
                compute_dtype=compute_dtype,
                z_weight=run.z_weight,
                remat=run.remat,
            )

        (loss, aux), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        params, opt = update(grads, state.opt, state.params, rates)
        norms = diagnostics(grads, state.params, params, table)
        finite = jnp.isfinite(loss) & jnp.isfinite(norms["norm/gradient/global"])
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

    return train_step
