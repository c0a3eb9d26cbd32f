"""Short depthwise causal convolution that stops at document boundaries.

Shapes: B rows, S positions, T = B*S tokens (rows one after the other), C channels, W taps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from portolan.model.tree import Block, Conv


class Neighbours(NamedTuple):
    """[W-1, T, 1], 1 or 0: whether the token 1..W-1 steps back (or ahead) is in the document."""

    back: jax.Array
    ahead: jax.Array


def find_neighbours(segments_BS: jax.Array, num_taps: int, dtype: jnp.dtype) -> Neighbours:
    """Neighbours of each position within its row and document."""
    back, ahead = [], []
    for steps in range(1, num_taps):
        same = segments_BS[:, steps:] == segments_BS[:, :-steps]
        back.append(jnp.pad(same, ((0, 0), (steps, 0))))
        ahead.append(jnp.pad(same, ((0, 0), (0, steps))))

    def stack(masks: list[jax.Array]) -> jax.Array:
        shape = (num_taps - 1, segments_BS.size, 1)
        return jnp.stack(masks).reshape(shape).astype(dtype) if masks else jnp.zeros(shape, dtype)

    return Neighbours(stack(back), stack(ahead))


def _shifted(x_TC: jax.Array, steps: int) -> jax.Array:
    """x[t - steps], zeros where that leaves the array. Rows are separated by the masks."""
    zeros = jnp.zeros((abs(steps), x_TC.shape[1]), x_TC.dtype)
    if steps > 0:
        return jnp.concatenate([zeros, x_TC[:-steps]])
    return jnp.concatenate([x_TC[-steps:], zeros])


@jax.custom_vjp
def short_conv(x_TC: jax.Array, taps_WC: jax.Array, neighbours: Neighbours) -> jax.Array:
    """out[t] = sum over w of taps[w] * x[t - w], terms of other documents left out."""
    out = taps_WC[0] * x_TC
    for w in range(1, taps_WC.shape[0]):
        out += taps_WC[w] * neighbours.back[w - 1] * _shifted(x_TC, w)
    return out


def _forward(x_TC, taps_WC, neighbours):
    return short_conv(x_TC, taps_WC, neighbours), (x_TC, taps_WC, neighbours)


def _backward(saved, grad_TC):
    x_TC, taps_WC, neighbours = saved
    dx = taps_WC[0] * grad_TC
    dtaps = [jnp.sum(grad_TC * x_TC, axis=0)]
    for w in range(1, taps_WC.shape[0]):
        ahead = neighbours.ahead[w - 1] * _shifted(grad_TC, -w)
        dx += taps_WC[w] * ahead
        dtaps.append(jnp.sum(ahead * x_TC, axis=0))
    return dx, jnp.stack(dtaps), None


short_conv.defvjp(_forward, _backward)


def convolve(x_TC: jax.Array, conv: Conv | None, context: Any, site: str) -> jax.Array:
    """What the context makes of `x` at a site, or `x` itself where there is no convolution."""
    return x_TC if conv is None else context.convolve(x_TC, conv.taps, site)


def spread_over_layers(blocks: Block, is_global: Sequence[bool]) -> Block:
    """Convolutions of the global layers only, as ones of all layers: elsewhere the identity."""
    layers = np.flatnonzero(is_global)

    def spread(node: Any) -> Any:
        if not isinstance(node, Conv):
            return node
        shape = (len(is_global), *node.taps.shape[1:])
        identity = jnp.zeros(shape, node.taps.dtype).at[:, 0].set(1)
        return Conv(identity.at[layers].set(node.taps))

    return jax.tree.map(spread, blocks, is_leaf=lambda node: isinstance(node, Conv))
