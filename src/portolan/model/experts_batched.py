"""Routed experts as one batched product over all experts.

Shapes: T tokens, R latent width, F expert width, E experts, K experts per token, C slots per
expert, Q slots per block, B blocks, P = E*C + B*Q slots (rows of expert input).

Every expert has C slots, a little more than the mean load, so that all experts are one batched
product without a copy of their weights. Assignments beyond C, few once the router is balanced, go
to blocks of Q slots that a loop walks through: as many as there are, up to all assignments.
"""

import math
from typing import NamedTuple

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

BLOCK_SLOTS = 32
SLACK = 1.5
"""Slots beyond the mean load, in its square roots: the spread of balanced loads."""
SLOT_STEP = 8


class BatchedDispatch(NamedTuple):
    """Where each assignment goes. A slot that holds none has token 0 and is not valid.

    `slot_TK` is P for padding tokens. `expert_B` is the expert of each block; the first
    `num_blocks` of them are in use.
    """

    slot_TK: jax.Array
    token_P: jax.Array
    choice_P: jax.Array
    valid_P: jax.Array
    expert_B: jax.Array
    num_blocks: jax.Array


def num_slots(num_tokens: int, num_selected: int, num_experts: int) -> int:
    """C: slots of each expert in the batched product."""
    mean = num_tokens * num_selected / num_experts
    return min(num_tokens, math.ceil((mean + SLACK * math.sqrt(mean)) / SLOT_STEP) * SLOT_STEP)


def num_blocks_bound(num_assignments: int, num_experts: int) -> int:
    """Blocks that suffice for any split of the assignments over the experts."""
    return num_assignments // BLOCK_SLOTS + min(num_experts, num_assignments)


def plan_batched(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> BatchedDispatch:
    """Give every assignment of a valid token its own slot."""
    num_tokens, num_selected = experts_TK.shape
    slots = num_slots(num_tokens, num_selected, num_experts)
    bound = num_blocks_bound(experts_TK.size, num_experts)
    num_all = num_experts * slots + bound * BLOCK_SLOTS
    rank_TK, load_E = count_tokens(experts_TK, valid_T, num_experts)
    blocks_E = (jnp.maximum(load_E - slots, 0) + BLOCK_SLOTS - 1) // BLOCK_SLOTS
    end_E = jnp.cumsum(blocks_E)
    first_E = num_experts * slots + (end_E - blocks_E) * BLOCK_SLOTS
    slot_TK = jnp.where(
        rank_TK < slots, experts_TK * slots + rank_TK, first_E[experts_TK] + rank_TK - slots
    )
    slot_TK = jnp.where(valid_T[:, None], slot_TK, num_all)
    assignment_P = assign_slots(slot_TK, num_all)
    token_P, choice_P = jnp.divmod(jnp.maximum(assignment_P, 0), num_selected)
    block_B = jnp.arange(bound, dtype=jnp.int32)
    expert_B = jnp.sum(end_E <= block_B[:, None], axis=1, dtype=jnp.int32)
    expert_B = jnp.minimum(expert_B, num_experts - 1)
    return BatchedDispatch(slot_TK, token_P, choice_P, assignment_P >= 0, expert_B, end_E[-1])


class _Rows(NamedTuple):
    """Token, choice and combine weight [rows, 1] of some slots, 0 where a slot holds nothing.

    `target` is the token, or T where a slot holds nothing.
    """

    token: jax.Array
    target: jax.Array
    choice: jax.Array
    weight: jax.Array


def _rows(
    weights_TK: jax.Array, dispatch: BatchedDispatch, start: int | jax.Array, size: int
) -> _Rows:
    token, choice, valid = (
        jax.lax.dynamic_slice_in_dim(leaf, start, size)
        for leaf in (dispatch.token_P, dispatch.choice_P, dispatch.valid_P)
    )
    weight = jnp.where(valid, weights_TK[token, choice], 0)
    return _Rows(token, jnp.where(valid, token, weights_TK.shape[0]), choice, weight[:, None])


def _block(
    weights_TK: jax.Array, dispatch: BatchedDispatch, experts: GatedMlp, index: jax.Array
) -> tuple[jax.Array, jax.Array, GatedMlp, _Rows]:
    """First slot of a block, its expert, the expert's matrices and the rows."""
    expert = dispatch.expert_B[index]
    start = dispatch.token_P.size - dispatch.expert_B.size * BLOCK_SLOTS + index * BLOCK_SLOTS
    mine = jax.tree.map(lambda leaf: leaf[expert], experts)
    return start, expert, mine, _rows(weights_TK, dispatch, start, BLOCK_SLOTS)


def forward_batched(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: BatchedDispatch
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The output [T, R], and the gate and up products [E, C, F] that the gradient needs."""
    num_experts, latent, _ = experts.gate.shape
    slots = num_slots(weights_TK.shape[0], weights_TK.shape[1], num_experts)
    x_ECR = x_TR[dispatch.token_P[: num_experts * slots]].reshape(num_experts, slots, latent)
    products = (x_ECR @ experts.gate, x_ECR @ experts.up)
    gate_ECF, up_ECF = checkpoint_name(products, SAVED_PRODUCTS)
    y_ECR = (jax.nn.silu(gate_ECF) * up_ECF) @ experts.down
    y_PR = jnp.zeros((dispatch.token_P.size, latent), x_TR.dtype)
    y_PR = jax.lax.dynamic_update_slice_in_dim(y_PR, y_ECR.reshape(-1, latent), 0, axis=0)

    def fill_block(index, y_PR):
        start, _, mine, rows = _block(weights_TK, dispatch, experts, index)
        x = x_TR[rows.token]
        y = (jax.nn.silu(x @ mine.gate) * (x @ mine.up)) @ mine.down
        return jax.lax.dynamic_update_slice_in_dim(y_PR, y, start, axis=0)

    # Every row is summed over its choices in their order, wherever they were computed: what other
    # tokens choose changes no bit, as far as a product does not depend on how many rows it has.
    y_PR = jax.lax.fori_loop(0, dispatch.num_blocks, fill_block, y_PR)
    out_TR = jnp.sum(weights_TK[..., None] * collect(y_PR, dispatch.slot_TK), axis=1)
    return out_TR, (gate_ECF, up_ECF)


def backward_batched(
    x_TR: jax.Array,
    weights_TK: jax.Array,
    experts: GatedMlp,
    dispatch: BatchedDispatch,
    products: tuple[jax.Array, jax.Array],
    grad_TR: jax.Array,
) -> tuple[jax.Array, jax.Array, GatedMlp]:
    """Gradients of x, of the combine weights and of the experts."""
    gate_ECF, up_ECF = products
    num_experts, latent, _ = experts.gate.shape
    slots = num_slots(weights_TK.shape[0], weights_TK.shape[1], num_experts)
    rows = _rows(weights_TK, dispatch, 0, num_experts * slots)
    x_ECR, dy_ECR = (leaf[rows.token].reshape(num_experts, slots, -1) for leaf in (x_TR, grad_TR))
    dinner_ECF = jnp.einsum("ecr,efr->ecf", dy_ECR, experts.down)
    weight_EC1 = rows.weight.reshape(num_experts, slots, 1)
    dweight_EC, dgate_ECF, dup_ECF, inner_ECF = inner_gradients(
        gate_ECF, up_ECF, dinner_ECF, weight_EC1
    )
    dx_ECR = jnp.einsum("ecf,erf->ecr", dgate_ECF, experts.gate)
    dx_ECR += jnp.einsum("ecf,erf->ecr", dup_ECF, experts.up)
    dx_TR = jnp.sum(collect(dx_ECR.reshape(-1, latent), dispatch.slot_TK), axis=1)
    dweights_TK = collect(dweight_EC.reshape(-1), dispatch.slot_TK)
    dexperts = GatedMlp(
        jnp.einsum("ecr,ecf->erf", x_ECR, dgate_ECF),
        jnp.einsum("ecr,ecf->erf", x_ECR, dup_ECF),
        jnp.einsum("ecf,ecr->efr", inner_ECF, dy_ECR),
    )

    def add_block(index, carry):
        dx_TR, dweights_TK, dexperts = carry
        _, expert, mine, rows = _block(weights_TK, dispatch, experts, index)
        x, dy = x_TR[rows.token], grad_TR[rows.token]
        dweight, dgate, dup, inner = inner_gradients(
            x @ mine.gate, x @ mine.up, dy @ mine.down.T, rows.weight
        )
        dmine = GatedMlp(x.T @ dgate, x.T @ dup, inner.T @ dy)
        dx = dgate @ mine.gate.T + dup @ mine.up.T
        return (
            dx_TR.at[rows.target].add(dx, mode="drop"),
            dweights_TK.at[rows.target, rows.choice].add(dweight, mode="drop"),
            jax.tree.map(lambda leaf, new: leaf.at[expert].add(new), dexperts, dmine),
        )

    carry = (dx_TR, dweights_TK, dexperts)
    return jax.lax.fori_loop(0, dispatch.num_blocks, add_block, carry)
