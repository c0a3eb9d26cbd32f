"""Routed experts one after the other, sorted by load, for large loads.

Shapes: T tokens, R latent width, F expert width, E experts, K experts per token, P = T*K + T slots
(rows of expert input).

The rows of the experts lie one after the other without padding, the largest load first. Products
need static sizes: each expert takes the smallest of a few that holds its load, and one loop walks
through all experts of a size. The rows that an expert computes in excess are those of the next one,
which writes them afterwards. Its inputs and products stay in the cache of a core meanwhile.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.expert_rows import (
    SAVED_PRODUCTS,
    assign_slots,
    collect,
    count_tokens,
    inner_gradients,
)
from portolan.model.tree import GatedMlp

SIZES_OVER_MEAN = (0.5, 0.75, 1, 1.125, 1.25, 1.5)
"""Sizes near the mean load, where balanced loads lie; then powers of two up to all tokens."""
SIZE_STEP = 16


class SortedDispatch(NamedTuple):
    """Where each assignment goes; `slot_TK` is P for padding tokens.

    `expert_E`, `start_E` and `load_E` are the expert, first slot and load at each rank of load.
    """

    slot_TK: jax.Array
    token_P: jax.Array
    choice_P: jax.Array
    expert_E: jax.Array
    start_E: jax.Array
    load_E: jax.Array


def product_sizes(num_tokens: int, num_selected: int, num_experts: int) -> list[int]:
    """Rows of the products, ascending; the last holds every load."""
    mean = num_tokens * num_selected / num_experts
    factors = list(SIZES_OVER_MEAN)
    while factors[-1] * mean < num_tokens:
        factors.append(2 ** (math.floor(math.log2(factors[-1])) + 1))
    rounded = {math.ceil(mean * factor / SIZE_STEP) * SIZE_STEP for factor in factors}
    return sorted({min(size, num_tokens) for size in rounded})


def plan_sorted(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> SortedDispatch:
    """Give every assignment of a valid token its own slot."""
    num_tokens, num_selected = experts_TK.shape
    num_slots = experts_TK.size + num_tokens
    rank_TK, load_E = count_tokens(experts_TK, valid_T, num_experts)
    expert_E = jnp.argsort(load_E, descending=True, stable=True).astype(jnp.int32)
    sorted_load_E = load_E[expert_E]
    start_E = jnp.cumsum(sorted_load_E) - sorted_load_E
    first_E = jnp.zeros_like(start_E).at[expert_E].set(start_E, unique_indices=True)
    slot_TK = jnp.where(valid_T[:, None], first_E[experts_TK] + rank_TK, num_slots)
    assignment_P = jnp.maximum(assign_slots(slot_TK, num_slots), 0)
    token_P, choice_P = jnp.divmod(assignment_P, num_selected)
    return SortedDispatch(slot_TK, token_P, choice_P, expert_E, start_E, sorted_load_E)


def _each_expert(
    dispatch: SortedDispatch, num_selected: int, visit: Callable[[Any, int, Any], Any], carry: Any
) -> Any:
    """`visit(rank, size, carry)` of every expert, the largest load first."""
    num_tokens = dispatch.slot_TK.shape[0]
    sizes = product_sizes(num_tokens, num_selected, dispatch.load_E.size)
    begin = jnp.zeros((), jnp.int32)
    for size, smaller in zip(sizes[::-1], [*sizes[-2::-1], -1], strict=True):
        end = jnp.sum(dispatch.load_E > smaller, dtype=jnp.int32)

        def visit_one(rank: Any, carry: Any, size: int = size) -> Any:
            return visit(rank, size, carry)

        carry = jax.lax.fori_loop(begin, end, visit_one, carry)
        begin = end
    return carry


def _read(rows: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, start, size)


def _write(rows: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(rows, new, start, axis=0)


def forward_sorted(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: SortedDispatch
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The output [T, R], and the gate and up products [P, F] that the gradient needs."""
    _, latent, inner_width = experts.gate.shape

    def visit(rank, size, carry):
        gate_PF, up_PF, y_PR = carry
        expert, start = dispatch.expert_E[rank], dispatch.start_E[rank]
        x = x_TR[_read(dispatch.token_P, start, size)]
        gate, up = x @ experts.gate[expert], x @ experts.up[expert]
        y = (jax.nn.silu(gate) * up) @ experts.down[expert]
        return _write(gate_PF, gate, start), _write(up_PF, up, start), _write(y_PR, y, start)

    num_slots = dispatch.token_P.size
    empty = (jnp.zeros((num_slots, width), x_TR.dtype) for width in (inner_width,) * 2 + (latent,))
    *products, y_PR = _each_expert(dispatch, weights_TK.shape[1], visit, tuple(empty))
    gate_PF, up_PF = checkpoint_name(tuple(products), SAVED_PRODUCTS)
    out_TR = jnp.sum(weights_TK[..., None] * collect(y_PR, dispatch.slot_TK), axis=1)
    return out_TR, (gate_PF, up_PF)


def backward_sorted(
    x_TR: jax.Array,
    weights_TK: jax.Array,
    experts: GatedMlp,
    dispatch: SortedDispatch,
    products: tuple[jax.Array, jax.Array],
    grad_TR: jax.Array,
) -> tuple[jax.Array, jax.Array, GatedMlp]:
    """Gradients of x, of the combine weights and of the experts."""
    gate_PF, up_PF = products
    weight_P = weights_TK[dispatch.token_P, dispatch.choice_P]

    def visit(rank, size, carry):
        dx_PR, dweight_P, dexperts = carry
        expert, start = dispatch.expert_E[rank], dispatch.start_E[rank]
        mine = jax.tree.map(lambda leaf: leaf[expert], experts)
        token = _read(dispatch.token_P, start, size)
        x, dy = x_TR[token], grad_TR[token]
        gate, up = _read(gate_PF, start, size), _read(up_PF, start, size)
        # Rows in excess belong to other experts: a weight of 0 keeps them out of the gradients.
        inside = jnp.arange(size) < dispatch.load_E[rank]
        weight = jnp.where(inside, _read(weight_P, start, size), 0)[:, None]
        dweight, dgate, dup, inner = inner_gradients(gate, up, dy @ mine.down.T, weight)
        dx = dgate @ mine.gate.T + dup @ mine.up.T
        dmine = GatedMlp(x.T @ dgate, x.T @ dup, inner.T @ dy)
        dexperts = jax.tree.map(lambda leaf, new: leaf.at[expert].set(new), dexperts, dmine)
        return _write(dx_PR, dx, start), _write(dweight_P, dweight, start), dexperts

    num_slots = dispatch.token_P.size
    empty = (
        jnp.zeros((num_slots, x_TR.shape[1]), x_TR.dtype),
        jnp.zeros(num_slots, weights_TK.dtype),
        jax.tree.map(jnp.zeros_like, experts),
    )
    dx_PR, dweight_P, dexperts = _each_expert(dispatch, weights_TK.shape[1], visit, empty)
    dx_TR = jnp.sum(collect(dx_PR, dispatch.slot_TK), axis=1)
    return dx_TR, collect(dweight_P, dispatch.slot_TK), dexperts
