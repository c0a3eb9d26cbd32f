"""What both layouts of the routed experts share.

Shapes: T tokens, E experts, K experts per token, P slots (rows of expert input).
"""

import jax
import jax.numpy as jnp

SAVED_PRODUCTS = "expert_products"
"""Name of the gate and up products for checkpoint policies."""
SAVED_ROUTED = "routed"
"""Name of the sum over the experts of a token: what follows reads it again in the backward pass."""
SAVED_ARRIVED = "arrived_rows"
"""Name of the rows that an exchange brought to their experts."""
SAVED_RETURNED = "returned_rows"
"""Name of the rows that came back; with both and the products no exchange is repeated."""


def count_tokens(
    experts_TK: jax.Array, valid_T: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array]:
    """Rank [T, K] of each assignment among those of its expert, in order of tokens; loads [E]."""
    index_E = jnp.arange(num_experts, dtype=jnp.int32)
    chosen_TE = jnp.any(experts_TK[:, :, None] == index_E, axis=1) & valid_T[:, None]
    counts_TE = jnp.cumsum(chosen_TE.astype(jnp.int32), axis=0)
    return jnp.take_along_axis(counts_TE, experts_TK, axis=1) - 1, counts_TE[-1]


def assign_slots(slot_TK: jax.Array, num_slots: int) -> jax.Array:
    """The assignment t * K + k of each slot [P], -1 for none; slots from P on do not exist."""
    index = jnp.arange(slot_TK.size, dtype=jnp.int32)
    empty_P = jnp.full(num_slots, -1, jnp.int32)
    return empty_P.at[slot_TK.ravel()].set(index, mode="drop", unique_indices=True)


def collect(rows: jax.Array, slot_TK: jax.Array) -> jax.Array:
    """The row of each assignment; zero for a slot that does not exist."""
    return jnp.take(rows, slot_TK, axis=0, mode="fill", fill_value=0)


def inner_gradients(
    gate: jax.Array, up: jax.Array, dinner: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of the combine weight, the gate and up products, and the weighted activations.

    `dinner` is the gradient of the activations without the combine weight: its product with them
    is the gradient of that weight.
    """
    sigma = jax.nn.sigmoid(gate)
    silu = gate * sigma
    dweight = jnp.sum(dinner * silu * up, axis=-1)
    dinner = dinner * weight
    return dweight, dinner * up * (sigma + silu * (1 - sigma)), dinner * silu, silu * up * weight
