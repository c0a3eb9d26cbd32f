"""Grouped-query attention with sliding-window and global layers, head gates and XSA.

Shapes: B rows, S query and U key positions, D width, N query heads, M key/value heads, G = N/M
query heads per key/value head, H head size, W taps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from portolan.model.conv import Neighbours, convolve, short_conv
from portolan.model.kernels import choose_attention
from portolan.model.norms import HEAD_NORM_EPSILON, rms_normalise
from portolan.model.products import project
from portolan.model.tree import Attention
from portolan.shapes import ROPE_THETA, ModelConfig

XSA_EPSILON = 1e-6
SAVED_PROJECTIONS = "attention_projections"


class Context(NamedTuple):
    """What a layer knows about other positions, here those of its rows, the same for every layer.

    `model.generate` has another one, which remembers earlier positions instead.
    """

    segments_BS: jax.Array
    neighbours: Neighbours
    cos_SH: jax.Array
    sin_SH: jax.Array

    @property
    def num_positions(self) -> int:
        """Positions of a row."""
        return self.segments_BS.shape[1]

    def convolve(self, x_TC: jax.Array, taps_WC: jax.Array, site: str) -> jax.Array:
        """Short convolution at a site (`k`, `v`, `attn`, `mlp`) of a layer."""
        del site
        return short_conv(x_TC, taps_WC.astype(x_TC.dtype), self.neighbours)

    def mix(
        self,
        q_BSMGH: jax.Array,
        k_BSMH: jax.Array,
        v_BSMH: jax.Array,
        window: jax.Array,
        scale: float,
    ) -> jax.Array:
        """Values averaged by softmax attention over the visible keys, [B, S, M, G, H]."""
        q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q_BSMGH, k_BSMH, v_BSMH))
        dot_product = choose_attention(q.dtype, q.shape[-1], q.shape[2])
        return jnp.moveaxis(dot_product(q, k, v, self.segments_BS, window, scale), 1, 2)


def rotary_tables(
    length: int, config: ModelConfig, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [S, H] for the positions 0..length-1."""
    return rotary_at(jnp.arange(length), config, dtype)


def rotary_at(
    position_S: jax.Array, config: ModelConfig, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [S, H] of position * theta^(-j / P) for the P pairs j of the rotated part.

    The rest of a head, half of it in the reference model, is not rotated: cos 1, sin 0.
    """
    pairs = config.num_rotated // 2
    frequency = ROPE_THETA ** (-jnp.arange(pairs, dtype=dtype) / pairs)
    angle = position_S.astype(dtype)[:, None] * jnp.repeat(frequency, 2)
    angle = jnp.pad(angle, ((0, 0), (0, config.head_dim - 2 * pairs)))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSNH: jax.Array, cos_SH: jax.Array, sin_SH: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (2j, 2j+1): (x0 cos - x1 sin, x1 cos + x0 sin)."""
    size = x_BSNH.shape[-1]
    turn = np.zeros((size, size))
    turn[range(1, size, 2), range(0, size, 2)] = -1
    turn[range(0, size, 2), range(1, size, 2)] = 1
    turn = jnp.asarray(turn, x_BSNH.dtype)
    turned = jnp.matmul(x_BSNH, turn, precision="highest")
    out = x_BSNH * cos_SH[:, None] + turned * sin_SH[:, None]
    return out.astype(x_BSNH.dtype)


def repeat_first_heads(x_BSMH: jax.Array, num_used: int) -> jax.Array:
    """Keep heads 0..num_used-1, each repeated consecutively to the stored number of heads."""
    stored = x_BSMH.shape[2]
    if num_used == stored:
        return x_BSMH
    return jnp.repeat(x_BSMH[:, :, :num_used], stored // num_used, axis=2)


def exclude_self(y: jax.Array, v: jax.Array) -> jax.Array:
    """XSA (arXiv 2603.09078): remove from y its component along the token's own value."""
    overlap = jnp.sum(y * v, axis=-1, keepdims=True)
    size = jnp.sum(v * v, axis=-1, keepdims=True)
    return y - overlap / (size + XSA_EPSILON) * v


def gate_heads(y_TNH: jax.Array, gate_TN: jax.Array) -> jax.Array:
    """Each head times twice the logistic of its gate: the identity where the gate is 0."""
    return (2 * jax.nn.sigmoid(gate_TN))[..., None] * y_TNH


def attend(
    x_TD: jax.Array, params: Attention, context: Context, is_global: jax.Array, config: ModelConfig
) -> jax.Array:
    """Attn(x): [T, D]. `is_global` is a traced flag: no window, no rotation, fewer KV heads."""
    batch, length = context.segments_BS.shape
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    dtype = x_TD.dtype
    # One product for everything that reads x.
    gates = [] if params.head_gate is None else [params.head_gate]
    joined = jnp.concatenate([params.wq, params.wk, params.wv, *gates], axis=1)
    projected = checkpoint_name(project(x_TD, joined.astype(dtype)), SAVED_PROJECTIONS)
    ends = [heads * size, (heads + kv) * size, (heads + 2 * kv) * size]
    q, k, v, gate = jnp.split(projected, ends, axis=-1)
    k = convolve(k, params.k_conv, context, "k")
    v = convolve(v, params.v_conv, context, "v")
    k = _choose_heads(k.reshape(batch, length, kv, size), is_global, config)
    v = _choose_heads(v.reshape(batch, length, kv, size), is_global, config)
    cos, sin = _rotation(context, is_global, config)
    q = rms_normalise(q.reshape(batch, length, heads, size), HEAD_NORM_EPSILON)
    q = rotate(q, cos, sin).reshape(batch, length, kv, heads // kv, size)
    k = rotate(rms_normalise(k, HEAD_NORM_EPSILON), cos, sin)
    window = jnp.where(is_global, context.num_positions, config.window)
    scale = config.qk_multiplier / size**0.5
    y = context.mix(q, k, v, window, scale)
    if config.exclusive_attention:
        y = exclude_self(y, v[:, :, :, None, :])
    y = y.reshape(-1, heads, size)
    if params.head_gate is not None:
        y = gate_heads(y, gate)
    return project(y.reshape(-1, heads * size), params.wo.astype(dtype))


def _rotation(
    context: Context, is_global: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of this layer: none in global layers, unless the shape rotates those too."""
    if not config.nope_global:
        return context.cos_SH, context.sin_SH
    return jnp.where(is_global, 1, context.cos_SH), jnp.where(is_global, 0, context.sin_SH)


def _choose_heads(x_BSMH: jax.Array, is_global: jax.Array, config: ModelConfig) -> jax.Array:
    if config.num_kv_heads_local == config.num_kv_heads_global:
        return x_BSMH
    return jnp.where(
        is_global,
        repeat_first_heads(x_BSMH, config.num_kv_heads_global),
        repeat_first_heads(x_BSMH, config.num_kv_heads_local),
    )
