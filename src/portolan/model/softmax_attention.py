"""Causal softmax attention inside documents, with a derivative written by hand.

Shapes: B rows, S query and U key positions, M key/value heads, G query heads per key/value head,
H head size.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.norms import wide

MAX_QUERY_BLOCKS = 8
"""Each block of queries skips the keys after it: with eight, 0.44 of the work is saved."""
MIN_BLOCK_QUERIES = 32
MAX_UNSHIFTED_SCORE = 60.0
"""Below it exp and its row sums fit float32 at any length; no running maximum is needed."""
SAVED_ATTENDED = "attended"


def _query_blocks(length: int) -> list[slice]:
    """Blocks of queries; each sees only keys up to its own end."""
    block = max(MIN_BLOCK_QUERIES, -(-length // MAX_QUERY_BLOCKS))
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
