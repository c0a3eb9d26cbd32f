"""Every shard sees all tokens of its group and adds what its experts give (parallel.md 6.2).

E / K times the products of an exchange, and S times the tokens in memory: the plain reference for
the others, and the cheaper one where S < K.
"""

import jax
import jax.numpy as jnp

from portolan.model.drops import Drops
from portolan.parallel.capacity import Capacities
from portolan.parallel.routing import count_assignments, keep_mask, plan
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.ragged import plan_drops
from portolan.parallel.transports.routed import Experts, Routed


def exchange_ring(
    routed: Routed, experts: Experts, capacities: Capacities
) -> tuple[jax.Array, Drops]:
    """y float32 [T, R] and the drops of this shard; derivatives are JAX's own."""
    me, shape = jax.lax.axis_index(EXPERT_AXIS), capacities.shape
    x_UR, weights_UK, ids_SA = (
        jax.lax.all_gather(routed.x_TR, EXPERT_AXIS, tiled=True),
        jax.lax.all_gather(routed.weights_TK, EXPERT_AXIS, tiled=True),
        jax.lax.all_gather(routed.ids, EXPERT_AXIS),
    )
    counts_SE = jax.vmap(lambda ids: count_assignments(ids, shape.num_experts))(ids_SA)
    found = plan(counts_SE, capacities)
    keep_SA = jax.vmap(keep_mask)(ids_SA, found.accepted) & (ids_SA < shape.num_experts)
    ids_UK, keep_UK = ids_SA.reshape(weights_UK.shape), keep_SA.reshape(weights_UK.shape)

    def add(y_UR, local):
        expert, mine = local
        chosen_UK = keep_UK & (ids_UK == me * shape.local_experts + expert)
        weight_U = jnp.where(chosen_UK, weights_UK.astype(jnp.float32), 0).sum(axis=1)
        one = jax.tree.map(lambda leaf: leaf[None], mine)
        out_UR = experts.function.batched(x_UR[None], one)[0]
        return y_UR + weight_U[:, None] * out_UR.astype(jnp.float32), None

    local = jnp.arange(shape.local_experts, dtype=jnp.int32)
    zeros = jnp.zeros(x_UR.shape, jnp.float32)
    y_UR, _ = jax.lax.scan(add, zeros, (local, experts.tree))
    y_TR = jax.lax.psum_scatter(y_UR, EXPERT_AXIS, scatter_dimension=0, tiled=True)
    return y_TR, plan_drops(counts_SE, found, me)
