"""Grouped-query attention with sliding-window and global layers, head gates and XSA.

Shapes: B rows, S query and U key positions, D width, N query heads, M key/value heads, G = N/M
query heads per key/value head, H head size, W taps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from portolan.model.conv import Neighbours, short_conv
from portolan.model.norms import HEAD_NORM_EPSILON, rms_normalise, wide
from portolan.model.tree import Attention
from portolan.shapes import ROPE_THETA, ModelConfig

XSA_EPSILON = 1e-6
NUM_QUERY_BLOCKS = 2
"""Each block of queries skips the keys after it: a quarter of the work saved with two."""
MAX_UNSHIFTED_SCORE = 60.0
"""Below it exp and its row sums fit float32 at any length; no running maximum is needed."""
SAVED_PROJECTIONS = "attention_projections"
SAVED_ATTENDED = "attended"


class Context(NamedTuple):
    """What attention and convolutions know about positions, the same for every layer."""

    segments_BS: jax.Array
    neighbours: Neighbours
    cos_SH: jax.Array
    sin_SH: jax.Array


def rotary_tables(length: int, head_dim: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin [S, H] of position * theta^(-j / (H/4)) for the pairs of the first half.

    The other half is not rotated: cos 1, sin 0.
    """
    pairs = head_dim // 4
    frequency = ROPE_THETA ** (-jnp.arange(pairs, dtype=dtype) / pairs)
    angle = jnp.arange(length, dtype=dtype)[:, None] * jnp.repeat(frequency, 2)
    angle = jnp.pad(angle, ((0, 0), (0, head_dim - 2 * pairs)))
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


def attend(
    x_TD: jax.Array, params: Attention, context: Context, is_global: jax.Array, config: ModelConfig
) -> jax.Array:
    """Attn(x): [T, D]. `is_global` is a traced flag: no window, no rotation, fewer KV heads."""
    batch, length = context.segments_BS.shape
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    dtype = x_TD.dtype
    # One product for everything that reads x.
    joined = jnp.concatenate([params.wq, params.wk, params.wv, params.head_gate], axis=1)
    projected = checkpoint_name(x_TD @ joined.astype(dtype), SAVED_PROJECTIONS)
    ends = [heads * size, (heads + kv) * size, (heads + 2 * kv) * size]
    q, k, v, gate = jnp.split(projected, ends, axis=-1)
    k = short_conv(k, params.k_conv.taps.astype(dtype), context.neighbours)
    k = _choose_heads(k.reshape(batch, length, kv, size), is_global, config)
    v = _choose_heads(v.reshape(batch, length, kv, size), is_global, config)
    cos = jnp.where(is_global, 1, context.cos_SH)
    sin = jnp.where(is_global, 0, context.sin_SH)
    q = rms_normalise(q.reshape(batch, length, heads, size), HEAD_NORM_EPSILON)
    q = rotate(q, cos, sin).reshape(batch, length, kv, heads // kv, size)
    k = rotate(rms_normalise(k, HEAD_NORM_EPSILON), cos, sin)
    window = jnp.where(is_global, length, config.window)
    scale = config.qk_multiplier / size**0.5
    y = dot_product(_by_head(q), _by_head(k), _by_head(v), context.segments_BS, window, scale)
    y = jnp.moveaxis(y, 1, 2)
    y = exclude_self(y, v[:, :, :, None, :]).reshape(-1, heads, size)
    gated = (2 * jax.nn.sigmoid(gate))[..., None] * y
    return gated.reshape(-1, heads * size) @ params.wo.astype(dtype)


def _by_head(x: jax.Array) -> jax.Array:
    """[B, S, M, ...] to [B, M, S, ...]."""
    return jnp.moveaxis(x, 2, 1)


def _choose_heads(x_BSMH: jax.Array, is_global: jax.Array, config: ModelConfig) -> jax.Array:
    if config.num_kv_heads_local == config.num_kv_heads_global:
        return x_BSMH
    return jnp.where(
        is_global,
        repeat_first_heads(x_BSMH, config.num_kv_heads_global),
        repeat_first_heads(x_BSMH, config.num_kv_heads_local),
    )


def _query_blocks(length: int) -> list[slice]:
    """Blocks of queries; each sees only keys up to its own end."""
    block = -(-length // NUM_QUERY_BLOCKS)
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _merge(x_BMSGH: jax.Array) -> jax.Array:
    """Queries of a key/value head as one axis: the products are plain matrices [S*G, H]."""
    batch, kv, length, group, size = x_BMSGH.shape
    return x_BMSGH.reshape(batch, kv, length * group, size)


def _contract_queries(a: jax.Array, b: jax.Array) -> jax.Array:
    """sum over queries of a[.., q, h] b[.., q, u], as [.., u, h]; transposes only the small one."""
    return jnp.swapaxes(jnp.matmul(jnp.swapaxes(a, -1, -2), b), -1, -2)


def _weights(q, k, segments_BS, window, scale, rows: slice):
    """Unnormalised softmax weights [B, M, rows*G, U] of a block of queries, in float32."""
    batch, kv, _, group, _ = q.shape
    keys = jnp.swapaxes(k[:, :, : rows.stop], -1, -2)
    scores = jnp.matmul(_merge(q[:, :, rows]), keys, preferred_element_type=wide(q.dtype))
    back = jnp.arange(rows.start, rows.stop)[:, None] - jnp.arange(rows.stop)
    visible = (back >= 0) & (back < window)
    same = segments_BS[:, rows, None] == segments_BS[:, None, : rows.stop]
    visible = (visible & same)[:, None, :, None, :]
    scores = scores.reshape(batch, kv, back.shape[0], group, rows.stop) * scale
    # A normalised query and key have a product of at most H.
    if scale * q.shape[-1] > MAX_UNSHIFTED_SCORE:
        scores = scores - jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf, where=visible)
    weights = jnp.where(visible, jnp.exp(scores), 0)
    return weights.reshape(batch, kv, -1, rows.stop)


def _with_ones(v):
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def _dot_product(q_BMSGH, k_BMUH, v_BMUH, segments_BS, window, scale: float) -> jax.Array:
    """Causal softmax attention inside documents, [B, M, S, G, H]; softmax in float32 or wider.

    Queries and keys are normalised, so exp rarely needs the maximum of a row. The row sums are one
    more column of the product with the values. The derivative recomputes the weights.
    """
    return _dot_product_forward(q_BMSGH, k_BMUH, v_BMUH, segments_BS, window, scale)[0]


dot_product = jax.custom_vjp(_dot_product, nondiff_argnums=(5,))


def _dot_product_forward(q, k, v, segments_BS, window, scale):
    batch, kv, _, group, _ = q.shape
    blocks = []
    for rows in _query_blocks(q.shape[2]):
        weights = _weights(q, k, segments_BS, window, scale, rows).astype(q.dtype)
        values = _with_ones(v[:, :, : rows.stop])
        summed = jnp.matmul(weights, values, preferred_element_type=wide(q.dtype))
        blocks.append(summed.reshape(batch, kv, -1, group, summed.shape[-1]))
    joined = checkpoint_name(jnp.concatenate(blocks, axis=2), SAVED_ATTENDED)
    y = (joined[..., :-1] / joined[..., -1:]).astype(q.dtype)
    return y, (q, k, v, segments_BS, window, joined)


def _dot_product_backward(scale, saved, dy):
    q, k, v, segments_BS, window, joined = saved
    total = joined[..., -1:]
    dy = dy / total
    overlap = jnp.sum(dy * joined[..., :-1], axis=-1, keepdims=True) / total
    extended = jnp.concatenate([dy, -overlap], axis=-1).astype(q.dtype)
    dy = dy.astype(q.dtype)
    dq, dk, dv = [], 0, 0
    for rows in _query_blocks(q.shape[2]):
        seen = slice(0, rows.stop)
        weights = _weights(q, k, segments_BS, window, scale, rows)
        values = jnp.swapaxes(_with_ones(v[:, :, seen]), -1, -2)
        dweights = jnp.matmul(
            _merge(extended[:, :, rows]), values, preferred_element_type=weights.dtype
        )
        dscores = (weights * dweights * scale).astype(q.dtype)
        dq.append(jnp.matmul(dscores, k[:, :, seen]).reshape(q[:, :, rows].shape))
        unseen = ((0, 0), (0, 0), (0, q.shape[2] - rows.stop), (0, 0))
        dk += jnp.pad(_contract_queries(_merge(q[:, :, rows]), dscores), unseen)
        weights = weights.astype(q.dtype)
        dv += jnp.pad(_contract_queries(_merge(dy[:, :, rows]), weights), unseen)
    return jnp.concatenate(dq, axis=2), dk, dv, None, None


dot_product.defvjp(_dot_product_forward, _dot_product_backward)
