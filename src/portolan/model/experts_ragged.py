"""The routed experts without drops: ragged products over rows sorted by expert.

Shapes: T tokens, R latent width, F expert width, E experts, K experts per token, P = T*K rows.

For devices on which `jax.lax.ragged_dot` is one instruction; elsewhere XLA multiplies every row
with every expert (see `portolan.model.kernels`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.experts import SAVED_PRODUCTS
from portolan.model.tree import GatedMlp


class Dispatch(NamedTuple):
    """Rows sorted by expert, stably.

    `assignment_P` is the assignment (token * K + choice) of each row, `row_P` the row of each
    assignment, `size_E` the rows of each expert. Padding tokens are among the last expert's rows,
    so that the sizes add up to P; `valid_T` tells them apart.
    """

    assignment_P: jax.Array
    row_P: jax.Array
    size_E: jax.Array
    valid_T: jax.Array


def plan_dispatch(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> Dispatch:
    """Sort the assignments by expert."""
    expert_P = jnp.where(valid_T[:, None], experts_TK, num_experts - 1).ravel()
    assignment_P = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    row_P = jnp.zeros_like(assignment_P)
    row_P = row_P.at[assignment_P].set(jnp.arange(row_P.size, dtype=jnp.int32), unique_indices=True)
    sorted_P = expert_P[assignment_P]
    index_E = jnp.arange(num_experts, dtype=sorted_P.dtype)
    end_E = jnp.searchsorted(sorted_P, index_E, side="right").astype(jnp.int32)
    return Dispatch(assignment_P, row_P, jnp.diff(end_E, prepend=0), valid_T)


@jax.custom_vjp
def _permute(x_PC: jax.Array, order_P: jax.Array, inverse_P: jax.Array) -> jax.Array:
    """x[order]. The gradient is a gather too: scattered sums would depend on their order."""
    del inverse_P
    return x_PC[order_P]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, grad: (grad[inverse], None, None),
)


def apply_experts(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: Dispatch
) -> jax.Array:
    """Sum over the selected experts of weight * down(silu(gate x) * up x): [T, R]."""
    num_selected = weights_TK.shape[1]
    repeated = jnp.repeat(x_TR, num_selected, axis=0)
    x_PR = _permute(repeated, dispatch.assignment_P, dispatch.row_P)
    sizes = dispatch.size_E
    products = tuple(jax.lax.ragged_dot(x_PR, leaf, sizes) for leaf in (experts.gate, experts.up))
    gate_PF, up_PF = checkpoint_name(products, SAVED_PRODUCTS)
    y_PR = jax.lax.ragged_dot(jax.nn.silu(gate_PF) * up_PF, experts.down, sizes)
    y_TKR = _permute(y_PR, dispatch.row_P, dispatch.assignment_P).reshape(*weights_TK.shape, -1)
    share_TK = jnp.where(dispatch.valid_T[:, None], weights_TK, 0)
    return jnp.sum(share_TK[..., None] * y_TKR, axis=1)
