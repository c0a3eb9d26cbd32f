"""RMS norms, with statistics in float32 or wider.

Shapes: T tokens, D width (any trailing size), G gate rank.
"""

import jax
import jax.numpy as jnp

from portolan.model.tree import Gate, Norm

NORM_EPSILON = 1e-5
HEAD_NORM_EPSILON = 1e-6


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which statistics of `dtype` are taken: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_normalise(x: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, cast back to the dtype of x."""
    x_wide = x.astype(wide(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1, keepdims=True) + epsilon)
    return (x_wide * scale).astype(x.dtype)


def rms_norm(x: jax.Array, gain_D: jax.Array) -> jax.Array:
    """gain * rms_normalise(x)."""
    return gain_D.astype(x.dtype) * rms_normalise(x, NORM_EPSILON)


def gated_norm(x: jax.Array, gain_D: jax.Array, down_DG: jax.Array, up_GD: jax.Array) -> jax.Array:
    """n * sigmoid(silu(n down) up) with n = rms_norm(x) (arXiv 2601.22966), no factor 2."""
    n = rms_norm(x, gain_D)
    gate = jax.nn.silu(n @ down_DG.astype(x.dtype)) @ up_GD.astype(x.dtype)
    return n * jax.nn.sigmoid(gate)


def apply_norm(x: jax.Array, norm: Norm, gate: Gate | None) -> jax.Array:
    """The norm in front of a branch: gated, or plain where there is no gate."""
    if gate is None:
        return rms_norm(x, norm.gain)
    return gated_norm(x, norm.gain, gate.down, gate.up)
