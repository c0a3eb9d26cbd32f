"""A fixed number of rows for every (sender, expert), exchanged densely (parallel.md 6.3)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.drops import Drops
from portolan.model.expert_rows import SAVED_ARRIVED, SAVED_RETURNED
from portolan.model.router import SAVED_ROUTING
from portolan.parallel.capacity import Capacities
from portolan.parallel.routing import rank_in_class
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.routed import Experts, Routed, local_drops
from portolan.parallel.transports.rows import combine, invert, spread


def exchange_cells(
    routed: Routed, experts: Experts, capacities: Capacities
) -> tuple[jax.Array, Drops]:
    """y float32 [T, R] and the drops of this shard.

    Blocks of C rows lie by local expert, then by owner: [El, S, C, R]. An idle cell cannot lend its
    rows to a busy one. One exchange per local expert and direction.
    """
    shape, width = capacities.shape, routed.x_TR.shape[1]
    size, local = capacities.cell.physical, shape.local_experts
    valid = routed.ids < shape.num_experts
    limit = capacities.cell.logical(valid.sum(dtype=jnp.int32), jnp)
    rank = rank_in_class(routed.ids, shape.num_experts)
    keep = valid & (rank < limit)
    owner, index = jnp.divmod(routed.ids, local)
    slots = jnp.where(keep, (index * shape.num_shards + owner) * size + rank, -1)
    source = invert(slots, shape.num_experts * size)
    slots, source = checkpoint_name((slots, source), SAVED_ROUTING)
    rows = spread(routed.x_TR, source, slots)
    arrived = checkpoint_name(_swap(rows.reshape(local, -1, width)), SAVED_ARRIVED)
    done = experts.function.batched(arrived, experts.tree)
    returned = checkpoint_name(_swap(done), SAVED_RETURNED).reshape(-1, width)
    y_TR = combine(routed.weights_TK, returned, slots, source)
    return y_TR, local_drops(sender=(valid & ~keep).sum(dtype=jnp.int32))


def _swap(blocks: jax.Array) -> jax.Array:
    """Blocks [El, S*C, R] with those of the peers in the peers' order."""
    swapped = [jax.lax.all_to_all(block, EXPERT_AXIS, 0, 0, tiled=True) for block in blocks]
    return jnp.stack(swapped)
