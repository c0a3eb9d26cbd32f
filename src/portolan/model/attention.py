"""Grouped-query attention with sliding-window and global layers, head gates and XSA.

Shapes: B rows, S query and U key positions, D width, N query heads, M key/value heads, G = N/M
query heads per key/value head, H head size, W taps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.conv import short_conv
from portolan.model.norms import HEAD_NORM_EPSILON, rms_normalise, wide
from portolan.model.tree import Attention
from portolan.shapes import ROPE_THETA, ModelConfig

XSA_EPSILON = 1e-6
MAX_UNSHIFTED_SCORE = 60.0
"""Below it exp cannot overflow float32 for any length, so softmax needs no running maximum."""


class Context(NamedTuple):
    """What attention and convolutions know about positions, the same for every layer."""

    segments_BS: jax.Array
    same_WBS: jax.Array
    cos_SJ: jax.Array
    sin_SJ: jax.Array


def rotary_tables(length: int, head_dim: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin [S, H/4] of position * theta^(-j / (H/4)), for the first half of a head."""
    pairs = head_dim // 4
    frequency = ROPE_THETA ** (-jnp.arange(pairs, dtype=dtype) / pairs)
    angle = jnp.arange(length, dtype=dtype)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BSNH: jax.Array, cos_SJ: jax.Array, sin_SJ: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (2j, 2j+1) of the first half of each head."""
    pairs = cos_SJ.shape[-1]
    turned, kept = jnp.split(x_BSNH, [2 * pairs], axis=-1)
    turned = turned.reshape(*turned.shape[:-1], pairs, 2).astype(cos_SJ.dtype)
    cos, sin = cos_SJ[:, None, :], sin_SJ[:, None, :]
    even, odd = turned[..., 0], turned[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([turned.reshape(kept.shape).astype(x_BSNH.dtype), kept], axis=-1)


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


def attend(
    x_BSD: jax.Array, params: Attention, context: Context, is_global: jax.Array, config: ModelConfig
) -> jax.Array:
    """Attn(x): [B, S, D]. `is_global` is a traced flag: no window, no rotation, fewer KV heads."""
    batch, length, _ = x_BSD.shape
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    dtype = x_BSD.dtype
    q = (x_BSD @ params.wq.astype(dtype)).reshape(batch, length, heads, size)
    k = short_conv(x_BSD @ params.wk.astype(dtype), params.k_conv.taps, context.same_WBS)
    k = _choose_heads(k.reshape(batch, length, kv, size), is_global, config)
    v = (x_BSD @ params.wv.astype(dtype)).reshape(batch, length, kv, size)
    v = _choose_heads(v, is_global, config)
    cos = jnp.where(is_global, 1, context.cos_SJ)
    sin = jnp.where(is_global, 0, context.sin_SJ)
    q = rotate(rms_normalise(q, HEAD_NORM_EPSILON), cos, sin) * config.qk_multiplier
    k = rotate(rms_normalise(k, HEAD_NORM_EPSILON), cos, sin)
    q = q.reshape(batch, length, kv, heads // kv, size)
    y = dot_product(q, k, v, context.segments_BS, is_global, config)
    y = exclude_self(y, v[:, :, :, None, :]).reshape(batch, length, heads, size)
    gate = 2 * jax.nn.sigmoid(x_BSD @ params.head_gate.astype(dtype))
    return (gate[..., None] * y).reshape(batch, length, heads * size) @ params.wo.astype(dtype)


def _choose_heads(x_BSMH: jax.Array, is_global: jax.Array, config: ModelConfig) -> jax.Array:
    if config.num_kv_heads_local == config.num_kv_heads_global:
        return x_BSMH
    return jnp.where(
        is_global,
        repeat_first_heads(x_BSMH, config.num_kv_heads_global),
        repeat_first_heads(x_BSMH, config.num_kv_heads_local),
    )


def dot_product(
    q_BSMGH: jax.Array,
    k_BUMH: jax.Array,
    v_BUMH: jax.Array,
    segments_BS: jax.Array,
    is_global: jax.Array,
    config: ModelConfig,
) -> jax.Array:
    """Causal softmax attention inside documents, softmax in float32 or wider."""
    dtype = q_BSMGH.dtype
    scores = jnp.einsum("bsmgh,bumh->bmsgu", q_BSMGH, k_BUMH).astype(wide(dtype))
    scores = scores / config.head_dim**0.5
    position = jnp.arange(segments_BS.shape[1])
    back = position[:, None] - position
    visible = (back >= 0) & (is_global | (back < config.window))
    visible = visible & (segments_BS[:, :, None] == segments_BS[:, None, :])
    visible = visible[:, None, :, None, :]
    if config.qk_multiplier * config.head_dim**0.5 > MAX_UNSHIFTED_SCORE:
        top = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
        scores = scores - jax.lax.stop_gradient(top)
    weights = jnp.where(visible, jnp.exp(scores), 0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("bmsgu,bumh->bsmgh", weights.astype(dtype), v_BUMH)
