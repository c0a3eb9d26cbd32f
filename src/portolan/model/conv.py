"""Short depthwise causal convolution that stops at document boundaries.

Shapes: B rows, S positions, C channels, W taps.
"""

import jax
import jax.numpy as jnp


def same_document(segments_BS: jax.Array, num_taps: int) -> jax.Array:
    """[W-1, B, S]: whether the position 1..W-1 steps back exists and is in the same document."""
    shifted = [
        jnp.pad(segments_BS[:, :-back], ((0, 0), (back, 0)), constant_values=-2) == segments_BS
        for back in range(1, num_taps)
    ]
    return jnp.stack(shifted) if shifted else jnp.zeros((0, *segments_BS.shape), bool)


def short_conv(x_BSC: jax.Array, taps_WC: jax.Array, same_WBS: jax.Array) -> jax.Array:
    """out[t] = sum over w of taps[w] * x[t - w], terms of other documents left out."""
    taps_WC = taps_WC.astype(x_BSC.dtype)
    out = taps_WC[0] * x_BSC
    for back in range(1, taps_WC.shape[0]):
        moved = jnp.pad(x_BSC[:, :-back], ((0, 0), (back, 0), (0, 0)))
        out += taps_WC[back] * jnp.where(same_WBS[back - 1][..., None], moved, 0)
    return out
