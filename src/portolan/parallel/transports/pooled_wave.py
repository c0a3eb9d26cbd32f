"""Pools of rows per (sender, owner, wave), with the experts' ids in the payload (parallel.md 6.4).

Shapes: W waves, P rows of a (sender, owner, wave), C rows of a (local expert, wave), M header rows.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.drops import Drops
from portolan.model.expert_rows import SAVED_ARRIVED, SAVED_RETURNED
from portolan.model.router import SAVED_ROUTING
from portolan.parallel.capacity import PooledCapacities
from portolan.parallel.routing import rank_in_class
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.routed import Experts, Routed, local_drops
from portolan.parallel.transports.rows import combine, invert, permute, spread


def exchange_pooled(
    routed: Routed, experts: Experts, capacities: PooledCapacities
) -> tuple[jax.Array, Drops]:
    """y float32 [T, R] and the drops of this shard.

    A sender numbers its rows to one owner in flat order, deals them to the waves in turn and drops
    what exceeds P; an owner fills the C rows of an expert position by position over the senders.
    """
    shape, waves = capacities.shape, capacities.num_waves
    valid = routed.ids < shape.num_experts
    num_valid = valid.sum(dtype=jnp.int32)
    receive_limit = capacities.receive.logical(jax.lax.psum(num_valid, EXPERT_AXIS), jnp)
    owner = jnp.where(valid, routed.ids // shape.local_experts, shape.num_shards)
    position, wave = jnp.divmod(rank_in_class(owner, shape.num_shards), waves)
    sent = valid & (position < capacities.send.logical(num_valid, jnp))
    y_TR = jnp.zeros(routed.x_TR.shape, jnp.float32)
    at_receiver = jnp.zeros((), jnp.int32)
    for index in range(waves):
        slots = jnp.where(sent & (wave == index), owner * capacities.send.physical + position, -1)
        part, dropped = _run_wave(routed, experts, capacities, slots, receive_limit)
        y_TR, at_receiver = y_TR + part, at_receiver + dropped
    at_sender = (valid & ~sent).sum(dtype=jnp.int32)
    return y_TR, local_drops(at_sender, at_receiver)


def _run_wave(
    routed: Routed,
    experts: Experts,
    capacities: PooledCapacities,
    slots: jax.Array,
    receive_limit: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What one wave adds to y, and the rows that owners refuse here.

    The products are made again in the backward pass, the dispatched rows are kept.
    """
    shape, size = capacities.shape, capacities.send.physical
    width = routed.x_TR.shape[1]
    source = invert(slots, shape.num_shards * size)
    slots, source = checkpoint_name((slots, source), SAVED_ROUTING)
    rows = spread(routed.x_TR, source, slots)
    local = routed.ids[jnp.maximum(source, 0)] % shape.local_experts
    codes, arrived = _dispatch(rows, jnp.where(source < 0, 0, local + 1), capacities)
    places, refused = _place(codes, capacities, receive_limit)
    sources = invert(places, shape.local_experts * capacities.receive.physical)
    places, sources = checkpoint_name((places, sources), SAVED_ROUTING)
    compact = permute(checkpoint_name(arrived, SAVED_ARRIVED), sources, places)
    compact = compact.reshape(shape.local_experts, -1, width)
    done = jax.checkpoint(experts.function.batched)(compact, experts.tree)
    expanded = permute(done.reshape(-1, width), places, sources)
    returned = jax.lax.all_to_all(expanded, EXPERT_AXIS, 0, 0, tiled=True)
    returned = checkpoint_name(returned, SAVED_RETURNED)
    return combine(routed.weights_TK, returned, slots, source), refused


def _dispatch(
    rows: jax.Array, codes: jax.Array, capacities: PooledCapacities
) -> tuple[jax.Array, jax.Array]:
    """Codes int32[S, P] and rows [S*P, R] that arrive, in one exchange.

    The header of each payload holds a code per row, l + 1 for local expert l and 0 for none, as
    values of the rows' type: exact up to `EXACT_INTEGERS`, and without a gradient.
    """
    num_shards, size = capacities.shape.num_shards, capacities.send.physical
    width = rows.shape[1]
    header_rows = capacities.header_rows(width)
    header = jnp.zeros((num_shards, header_rows * width), rows.dtype)
    header = header.at[:, :size].set(codes.reshape(num_shards, size).astype(rows.dtype))
    header = jax.lax.stop_gradient(header.reshape(num_shards, header_rows, width))
    payload = jnp.concatenate([header, rows.reshape(num_shards, size, width)], axis=1)
    payload = jax.lax.all_to_all(payload, EXPERT_AXIS, 0, 0, tiled=True)
    arrived = jax.lax.stop_gradient(payload[:, :header_rows]).reshape(num_shards, -1)[:, :size]
    return jnp.round(arrived).astype(jnp.int32), payload[:, header_rows:].reshape(-1, width)


def _place(
    codes_SP: jax.Array, capacities: PooledCapacities, limit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The place [S*P] of each arrived row among the experts' rows, and the number refused.

    Ranks count position by position, senders inside, so that no sender is always last.
    """
    local = capacities.shape.local_experts
    expert_PS = jnp.where(codes_SP > 0, codes_SP - 1, local).T
    rank = rank_in_class(expert_PS.reshape(-1), local).reshape(expert_PS.shape).T
    expert = expert_PS.T
    keep = (codes_SP > 0) & (rank < limit)
    places = jnp.where(keep, expert * capacities.receive.physical + rank, -1)
    refused = ((codes_SP > 0) & ~keep).sum(dtype=jnp.int32)
    return places.reshape(-1), refused
