"""Adam: the direction that AdamH projects, plain steps with annealed decay, and the AdamW arm."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from portolan.optim.groups import GroupRow
from portolan.optim.norms import NORM_FLOOR
from portolan.optim.schedule import Rates
from portolan.optim.settings import OptimizerSettings


def adam_direction(
    grad: jax.Array,
    moments: Mapping[str, jax.Array],
    count: jax.Array,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    accepted: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Bias-corrected m / (sqrt(v) + epsilon) and the new moments; `count` is zero-based."""
    m = beta1 * moments["m"] + (1 - beta1) * grad
    v = beta2 * moments["v"] + (1 - beta2) * grad * grad
    new = settle({"m": m, "v": v}, moments, accepted)
    corrected = new["m"] / _bias_correction(beta1, count, grad.dtype)
    root = jnp.sqrt(new["v"] / _bias_correction(beta2, count, grad.dtype))
    return corrected / (root + epsilon), new


def settle(
    new: dict[str, jax.Array], old: Mapping[str, jax.Array], accepted: jax.Array | None
) -> dict[str, jax.Array]:
    """The new state of a leaf, or the old one where it is not accepted, stored before it is read.

    Without the barrier XLA computes the new state once more inside the update of the weights, which
    then needs the old one: a copy of all moments in each update, and twice its time on a CPU.
    """
    return jax.lax.optimization_barrier(
        {name: accept(leaf, old[name], accepted) for name, leaf in new.items()}
    )


def accept(new: jax.Array, old: jax.Array, accepted: jax.Array | None) -> jax.Array:
    """`new`, or `old` where the flag `accepted` is false; None accepts without asking."""
    return new if accepted is None else jnp.where(accepted, new, old)


def _bias_correction(beta: float, count: jax.Array, dtype: Any) -> jax.Array:
    """1 - beta^(count + 1); the power alone would lose four digits in float32 near beta = 1."""
    if beta == 0:
        return jnp.ones((), dtype)
    return -jnp.expm1((count + 1).astype(dtype) * math.log(beta))


def adam_step(
    weight: jax.Array,
    direction: jax.Array,
    row: GroupRow,
    rates: Rates,
    settings: OptimizerSettings,
) -> jax.Array:
    """weight - eta_A (direction + decay * weight), for an unconstrained leaf.

    The decay is constant for matrices of the AdamW arm, annealed for router and head gate, and
    absent elsewhere.
    """
    eta = jnp.asarray(rates.eta_adam, weight.dtype)
    if row.group == "adamw":
        return weight - eta * (direction + settings.weight_decay * weight)
    if row.decay:
        decay = jnp.asarray(rates.decay, weight.dtype)
        return weight - eta * (direction + decay * weight)
    return weight - eta * direction


def clip_gradients(
    grads: dict[str, jax.Array], paths: list[str], bound: float
) -> dict[str, jax.Array]:
    """Scale the gradients of `paths` so that their joint Frobenius norm is at most `bound`."""
    total = jnp.sqrt(sum(jnp.sum(jnp.square(grads[path])) for path in paths))
    scale = jnp.minimum(1, bound / jnp.maximum(total, NORM_FLOOR))
    return grads | {path: grads[path] * scale for path in paths}
