"""Causal softmax attention inside documents, by the fused kernels behind `jax.nn`.

Shapes: B rows, S positions, M key/value heads, G query heads per key/value head, H head size.

The kernel skips keys after a query. Documents and the window, which is traced because one scan
holds local and global layers, reach it as a mask [B, 1, S, S], the only form of `jax.nn` for them.
"""

from typing import Literal

import jax
import jax.numpy as jnp


def dot_product(
    q_BMSGH: jax.Array,
    k_BMSH: jax.Array,
    v_BMSH: jax.Array,
    segments_BS: jax.Array,
    window: jax.Array | int,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Values averaged over the visible keys, [B, M, S, G, H]; softmax in float32.

    A query sees the keys of its document that are less than `window` before it and none after it.
    """
    batch, kv, length, group, size = q_BMSGH.shape
    q = jnp.moveaxis(q_BMSGH, 1, 2).reshape(batch, length, kv * group, size)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k_BMSH, v_BMSH))
    position = jnp.arange(length)
    near = position[:, None] - position < window
    same = segments_BS[:, :, None] == segments_BS[:, None, :]
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=(near & same)[:, None],
        scale=scale,
        is_causal=True,
        implementation=implementation,
    )
    return jnp.moveaxis(y.reshape(batch, length, kv, group, size), 2, 1)
