"""An update from several micro-batches: fewer devices, the same batch (parallel.md 11.8)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from portolan.model.loss import SMALLEST_TOTAL
from portolan.model.router import RouterMetrics, merged_beta
from portolan.model.transformer import Batch, LossAux

LEAST = ("margin_min", "bias_min")
LARGEST = ("margin_max", "bias_max")
SUMMED = ("sender_dropped", "receiver_dropped", "padding_skipped")


def accumulate(
    derive: Callable, params: Any, beta: jax.Array, batch: Batch, num_selected: int
) -> tuple[jax.Array, LossAux, Any]:
    """Loss, its parts and the gradient of a batch [A, B, S], one micro-batch after the other.

    `derive` gives ((loss, aux), gradient) of one. Each counts by its share of the weights, so that
    the result is that of the whole batch; the router's margins are merged as histograms.
    """
    total = jnp.maximum(jnp.sum(batch.weights), SMALLEST_TOTAL)

    def add(grads: Any, micro: Batch) -> tuple[Any, tuple[jax.Array, jax.Array, LossAux]]:
        (value, aux), new = derive(params, beta, micro)
        share = jnp.sum(micro.weights) / total
        return jax.tree.map(lambda g, n: g + share * n, grads, new), (share, value, aux)

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, (share_A, value_A, aux) = jax.lax.scan(add, zeros, batch)
    ce, mean_square_lse = (jnp.sum(share_A * part) for part in (aux.ce, aux.mean_square_lse))
    new_beta = beta
    if beta.size:
        merge_layer = jax.vmap(lambda parts: merged_beta(parts, num_selected), in_axes=1)
        new_beta = merge_layer(aux.new_beta)
    router = None if aux.router is None else _merge_metrics(aux.router)
    return jnp.sum(share_A * value_A), LossAux(ce, mean_square_lse, new_beta, router), grads


def _merge_metrics(parts: RouterMetrics) -> RouterMetrics:
    """Metrics [L] of [A, L]: extremes, sums of counts, and means over the micro-batches."""

    def merge(name: str, value: jax.Array | None) -> jax.Array | None:
        if value is None:
            return None
        if name in LEAST:
            return jnp.min(value, axis=0)
        if name in LARGEST:
            return jnp.max(value, axis=0)
        return jnp.sum(value, axis=0) if name in SUMMED else jnp.mean(value, axis=0)

    merged: dict[str, Any] = {name: merge(name, v) for name, v in parts._asdict().items()}
    return RouterMetrics(**merged)
