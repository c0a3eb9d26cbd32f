"""Rows sorted by expert travel as ragged segments to the owners and back (parallel.md 6.5, 6.6)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.drops import Drops
from portolan.model.expert_rows import SAVED_ARRIVED, SAVED_RETURNED
from portolan.model.router import SAVED_ROUTING
from portolan.parallel.capacity import Capacities
from portolan.parallel.routing import (
    Plan,
    count_assignments,
    dispatch_updates,
    plan,
    return_updates,
)
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.move import move
from portolan.parallel.transports.routed import Experts, Routed, local_drops
from portolan.parallel.transports.rows import combine, invert, spread, zeros_after


def sort_by_expert(ids: jax.Array, num_valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The assignment of each sorted place and the place of each assignment; -1 for padding."""
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    place = jnp.arange(ids.size, dtype=jnp.int32)
    source = jnp.where(place < num_valid, order, -1)
    return source, invert(source, ids.size)


def plan_drops(counts_SE: jax.Array, found: Plan, shard: jax.Array) -> Drops:
    """Assignments of this shard that the plan refuses, by the side whose limit they exceed."""
    lost = (counts_SE[shard] - found.accepted[shard]).sum(dtype=jnp.int32)
    at_sender = found.capacities.rule.gate == "cell"
    return local_drops(sender=lost) if at_sender else local_drops(receiver=lost)


def exchange_ragged(
    routed: Routed, experts: Experts, capacities: Capacities
) -> tuple[jax.Array, Drops]:
    """y float32 [T, R] and the drops of this shard, chunk by chunk of the local experts.

    Every shard makes the same plan from the gathered counts. The accepted rows of an expert are the
    first of its sorted rows, so they are read in place, and arrive sorted by expert from row 0 on.
    """
    me, width = jax.lax.axis_index(EXPERT_AXIS), capacities.chunk_experts
    num_chunks = capacities.rule.num_chunks
    counts = count_assignments(routed.ids, capacities.shape.num_experts)
    counts_SE = jax.lax.all_gather(counts, EXPERT_AXIS)
    found = plan(counts_SE, capacities)
    source, slots = sort_by_expert(routed.ids, counts.sum(dtype=jnp.int32))
    source, slots = checkpoint_name((source, slots), SAVED_ROUTING)
    rows = spread(routed.x_TR, source, slots)
    returned = jnp.zeros_like(rows)
    for chunk in range(num_chunks):
        accepted = found.chunk(chunk)
        there = dispatch_updates(counts_SE, accepted, me)
        back = return_updates(counts_SE, accepted, me)
        buffer = zeros_after(returned, (capacities.chunk_buffer, rows.shape[1]))
        arrived = checkpoint_name(move(rows, buffer, there, back), SAVED_ARRIVED)
        first = me * capacities.shape.local_experts + chunk * width
        sizes = jax.lax.dynamic_slice_in_dim(accepted.sum(axis=0, dtype=jnp.int32), first, width)
        mine = experts.slice(chunk * width, width)
        done = experts.function.grouped(arrived, sizes, mine, slots.size // num_chunks)
        returned = move(done, returned, back, there)
        if chunk + 1 < num_chunks:
            # Without it all dispatches may start at once, and chunks save no memory.
            rows, returned = jax.lax.optimization_barrier((rows, returned))
    returned = checkpoint_name(returned, SAVED_RETURNED)
    y_TR = combine(routed.weights_TK, returned, slots, source)
    return y_TR, plan_drops(counts_SE, found, me)
