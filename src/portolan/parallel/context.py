"""Rows whose positions lie on several devices: halos for convolutions, gathered keys for attention.

Shapes: B rows, S positions of a shard, U positions of a whole row, D width, W taps, M key/value
heads, G query heads per key/value head, H head size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from portolan.errors import UsageError
from portolan.model.attention import rotary_at
from portolan.model.conv import Neighbours, find_neighbours, short_conv
from portolan.model.norms import wide
from portolan.shapes import ModelConfig

AXIS = "context"
OUTSIDE = -2
"""Segment of the positions before a row: no document has it."""


def from_left(x_BS: jax.Array, width: int) -> jax.Array:
    """The last `width` positions of the shard to the left, zeros at the start of a row."""
    size = jax.lax.axis_size(AXIS)
    tail = x_BS[:, x_BS.shape[1] - width :]
    return jax.lax.ppermute(tail, AXIS, [(i, i + 1) for i in range(size - 1)])


def next_tokens(tokens_BS: jax.Array) -> jax.Array:
    """Labels; the last one of a shard is the first token of the shard to the right, or 0."""
    size = jax.lax.axis_size(AXIS)
    first = jax.lax.ppermute(tokens_BS[:, :1], AXIS, [(i + 1, i) for i in range(size - 1)])
    return jnp.concatenate([tokens_BS[:, 1:], first], axis=1)


class ContextShard(NamedTuple):
    """`model.attention.Context` of a part of every row.

    `segments_BU` are those of whole rows, `neighbours` belong to the shard and the W-1 positions
    before it.
    """

    segments_BS: jax.Array
    segments_BU: jax.Array
    neighbours: Neighbours
    cos_SH: jax.Array
    sin_SH: jax.Array

    @property
    def num_positions(self) -> int:
        """Positions of a whole row."""
        return self.segments_BU.shape[1]

    def convolve(self, x_TC: jax.Array, taps_WC: jax.Array, site: str) -> jax.Array:
        """Short convolution that reads the end of the shard to the left."""
        del site
        batch, length = self.segments_BS.shape
        halo = taps_WC.shape[0] - 1
        x_BSC = x_TC.reshape(batch, length, -1)
        longer = jnp.concatenate([from_left(x_BSC, halo), x_BSC], axis=1)
        out = short_conv(
            longer.reshape(batch * (halo + length), -1), taps_WC.astype(x_TC.dtype), self.neighbours
        )
        return out.reshape(batch, halo + length, -1)[:, halo:].reshape(x_TC.shape)

    def mix(
        self,
        q_BSMGH: jax.Array,
        k_BSMH: jax.Array,
        v_BSMH: jax.Array,
        window: jax.Array,
        scale: float,
    ) -> jax.Array:
        """Softmax attention of the shard's queries over the keys of the whole row."""
        k_BUMH, v_BUMH = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k_BSMH, v_BSMH))
        length = q_BSMGH.shape[1]
        query_S = jax.lax.axis_index(AXIS) * length + jnp.arange(length)
        back = query_S[:, None] - jnp.arange(k_BUMH.shape[1])
        same = self.segments_BS[:, :, None] == self.segments_BU[:, None, :]
        visible_BSU = (back >= 0) & (back < window) & same
        return _attend(q_BSMGH, k_BUMH, v_BUMH, visible_BSU, scale)


def _attend(q_BSMGH, k_BUMH, v_BUMH, visible_BSU, scale: float) -> jax.Array:
    """Values averaged over visible keys; the weights are computed again in the gradient."""

    @jax.checkpoint
    def mixed(q, k, v):
        scores = jnp.einsum("bsmgh,bumh->bmgsu", q, k, preferred_element_type=wide(q.dtype))
        scores = jnp.where(visible_BSU[:, None, None], scale * scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bmgsu,bumh->bsmgh", weights, v)

    return mixed(q_BSMGH, k_BUMH, v_BUMH)


def shard_context(segments_BS: jax.Array, config: ModelConfig, dtype: jnp.dtype) -> ContextShard:
    """What the layers know on this shard.

    Raises:
        UsageError: a shard is shorter than the taps reach back.
    """
    length, halo = segments_BS.shape[1], config.conv_taps - 1
    if length < halo:
        raise UsageError(
            f"{length} positions of a row on a device are fewer than the {halo} that a "
            f"convolution of {config.conv_taps} taps reads from its left neighbour",
            remedy="use a smaller context axis",
        )
    segments_BU = jax.lax.all_gather(segments_BS, AXIS, axis=1, tiled=True)
    start = jax.lax.axis_index(AXIS) * length
    before = jnp.where(start > 0, from_left(segments_BS, halo), OUTSIDE)
    longer = jnp.concatenate([before, segments_BS], axis=1)
    cos, sin = rotary_at(start + jnp.arange(length), config, wide(dtype))
    return ContextShard(
        segments_BS, segments_BU, find_neighbours(longer, config.conv_taps, dtype), cos, sin
    )
