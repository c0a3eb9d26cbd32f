"""Routed latent experts without drops, and shared experts.

Shapes: T tokens, D width, R latent width, F expert width, E experts, K experts per token,
P slots (rows of expert input, padded), C blocks of slots, Q slots per block.

Assignments are laid out expert by expert, each expert padded to whole blocks, so the experts are
one batched product over blocks. Both directions of dispatch and combine are gathers: the slot of
an assignment and the token of a slot are known from cumulative counts, without a sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.norms import rms_norm, wide
from portolan.model.router import (
    Margins,
    RouterMetrics,
    bin_margins,
    measure,
    route,
    update_beta,
)
from portolan.model.tree import GatedMlp, Moe
from portolan.shapes import ModelConfig

BLOCK_SLOTS = 32


class Dispatch(NamedTuple):
    """Where each assignment goes. Slots beyond an expert's load hold token 0 and count nothing."""

    slot_TK: jax.Array
    valid_TK: jax.Array
    token_P: jax.Array
    choice_P: jax.Array
    valid_P: jax.Array
    expert_C: jax.Array


def cumulative_counts(chosen_TE: jax.Array) -> jax.Array:
    """Inclusive running sum over tokens of 0/1 entries, as int32."""
    return jnp.cumsum(chosen_TE.astype(jnp.int32), axis=0)


def plan_dispatch(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> Dispatch:
    """Lay out the assignments of valid tokens in blocks of equal size, expert by expert."""
    num_tokens, num_selected = experts_TK.shape
    index_E = jnp.arange(num_experts, dtype=jnp.int32)
    chosen_TE = jnp.any(experts_TK[:, :, None] == index_E, axis=1) & valid_T[:, None]
    counts_TE = cumulative_counts(chosen_TE)
    load_E = counts_TE[-1]
    end_E = jnp.cumsum((load_E + BLOCK_SLOTS - 1) // BLOCK_SLOTS)
    start_E = end_E - (load_E + BLOCK_SLOTS - 1) // BLOCK_SLOTS
    num_blocks = num_blocks_bound(num_tokens * num_selected, num_experts)
    rank_TK = jnp.take_along_axis(counts_TE, experts_TK, axis=1) - 1
    slot_TK = start_E[experts_TK] * BLOCK_SLOTS + rank_TK
    valid_TK = jnp.broadcast_to(valid_T[:, None], slot_TK.shape)
    slot_TK = jnp.where(valid_TK, slot_TK, num_blocks * BLOCK_SLOTS)
    assignment_P = jnp.full(num_blocks * BLOCK_SLOTS, -1, jnp.int32)
    assignment_P = assignment_P.at[slot_TK.ravel()].set(
        jnp.arange(slot_TK.size, dtype=jnp.int32), mode="drop", unique_indices=True
    )
    token_P, choice_P = jnp.divmod(jnp.maximum(assignment_P, 0), num_selected)
    block_C = jnp.arange(num_blocks, dtype=jnp.int32)
    expert_C = jnp.sum(end_E <= block_C[:, None], axis=1, dtype=jnp.int32)
    return Dispatch(
        jnp.where(valid_TK, slot_TK, 0),
        valid_TK,
        token_P,
        choice_P,
        assignment_P >= 0,
        jnp.minimum(expert_C, num_experts - 1),
    )


def num_blocks_bound(num_assignments: int, num_experts: int) -> int:
    """Blocks that suffice for any split of the assignments over the experts."""
    used = min(num_experts, num_assignments)
    return (num_assignments + used * (BLOCK_SLOTS - 1)) // BLOCK_SLOTS


@jax.custom_vjp
def apply_experts(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: Dispatch
) -> jax.Array:
    """Sum over the selected experts of weight * down(silu(gate x) * up x): [T, R]."""
    return _forward(x_TR, weights_TK, experts, dispatch)[0]


def _forward(x_TR, weights_TK, experts, dispatch):
    blocks_CQR = x_TR[dispatch.token_P].reshape(dispatch.expert_C.size, BLOCK_SLOTS, -1)
    gate_CQF = jnp.einsum("cqr,crf->cqf", blocks_CQR, experts.gate[dispatch.expert_C])
    up_CQF = jnp.einsum("cqr,crf->cqf", blocks_CQR, experts.up[dispatch.expert_C])
    inner_CQF = jax.nn.silu(gate_CQF) * up_CQF
    y_CQR = jnp.einsum("cqf,cfr->cqr", inner_CQF, experts.down[dispatch.expert_C])
    y_PR = y_CQR.reshape(-1, x_TR.shape[1])
    weights_TK = jnp.where(dispatch.valid_TK, weights_TK, 0)
    out = jnp.einsum("tk,tkr->tr", weights_TK, y_PR[dispatch.slot_TK])
    return out, (blocks_CQR, gate_CQF, up_CQF, y_PR, weights_TK, experts, dispatch)


def _backward(saved, grad_TR):
    blocks_CQR, gate_CQF, up_CQF, y_PR, weights_TK, experts, dispatch = saved
    num_experts = experts.gate.shape[0]
    dweights_TK = jnp.einsum("tr,tkr->tk", grad_TR, y_PR[dispatch.slot_TK])
    dweights_TK = jnp.where(dispatch.valid_TK, dweights_TK, 0)
    weight_P = jnp.where(
        dispatch.valid_P, weights_TK[dispatch.token_P, dispatch.choice_P], 0
    )
    dy_CQR = (grad_TR[dispatch.token_P] * weight_P[:, None]).reshape(blocks_CQR.shape)
    gate_CRF, up_CRF, down_CFR = (
        leaf[dispatch.expert_C] for leaf in (experts.gate, experts.up, experts.down)
    )
    sigma = jax.nn.sigmoid(gate_CQF)
    silu = gate_CQF * sigma
    dinner = jnp.einsum("cqr,cfr->cqf", dy_CQR, down_CFR)
    dup = dinner * silu
    dgate = dinner * up_CQF * (sigma + silu * (1 - sigma))
    dx_CQR = jnp.einsum("cqf,crf->cqr", dgate, gate_CRF) + jnp.einsum(
        "cqf,crf->cqr", dup, up_CRF
    )
    dx_TKR = dx_CQR.reshape(y_PR.shape)[dispatch.slot_TK]
    dx_TR = jnp.sum(jnp.where(dispatch.valid_TK[..., None], dx_TKR, 0), axis=1)

    def by_expert(a, b):
        per_block = jnp.einsum("cqa,cqb->cab", a, b)
        owner = (dispatch.expert_C == jnp.arange(num_experts)[:, None]).astype(per_block.dtype)
        flat = owner @ per_block.reshape(per_block.shape[0], -1)
        return flat.reshape(num_experts, *per_block.shape[1:])

    dexperts = GatedMlp(
        by_expert(blocks_CQR, dgate), by_expert(blocks_CQR, dup), by_expert(silu * up_CQF, dy_CQR)
    )
    return dx_TR, dweights_TK, dexperts, None


apply_experts.defvjp(_forward, _backward)


def gated_mlp(x: jax.Array, params: GatedMlp) -> jax.Array:
    """(silu(x gate) * (x up)) down, in the dtype of x."""
    gate, up, down = (leaf.astype(x.dtype) for leaf in (params.gate, params.up, params.down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def routed(
    x_TD: jax.Array, params: Moe, beta_E: jax.Array, valid_T: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array, RouterMetrics]:
    """Routed(x) [T, D], the new beta [E] and the router's metrics."""
    dtype = x_TD.dtype
    logits_TE = (x_TD @ params.router.astype(dtype)).astype(wide(dtype))
    bias_E = jnp.mean(beta_E) - beta_E
    routing = route(logits_TE, bias_E, config.experts_per_token)
    latent = rms_norm(x_TD @ params.latent_down.astype(dtype), params.latent_norm.gain)
    dispatch = plan_dispatch(routing.experts_TK, valid_T, config.num_experts)
    experts = jax.tree.map(lambda leaf: leaf.astype(dtype), params.experts)
    out = apply_experts(latent, routing.weights_TK.astype(dtype), experts, dispatch)
    logits_TE = jax.lax.stop_gradient(logits_TE)
    margins: Margins = bin_margins(logits_TE, routing.threshold_T, valid_T, config.qb_bins)
    new_beta = update_beta(margins, config.experts_per_token, config.qb_bins)
    metrics = measure(logits_TE, routing.experts_TK, valid_T, bias_E, margins, config)
    return out @ params.latent_up.astype(dtype), new_beta, metrics
