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
from jax.ad_checkpoint import checkpoint_name

from portolan.model.norms import rms_norm, wide
from portolan.model.router import (
    SAVED_ROUTING,
    RouterMetrics,
    balance_bias,
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


def _inner(x_TR, experts, dispatch):
    """Inputs [C, Q, R], gate and up products [C, Q, F] and their joined weights per block."""
    blocks_CQR = x_TR[dispatch.token_P].reshape(dispatch.expert_C.size, BLOCK_SLOTS, -1)
    joined = jnp.concatenate([experts.gate, experts.up], axis=2)[dispatch.expert_C]
    gate_CQF, up_CQF = jnp.split(jnp.einsum("cqr,crf->cqf", blocks_CQR, joined), 2, axis=2)
    return blocks_CQR, gate_CQF, up_CQF, joined


def _forward(x_TR, weights_TK, experts, dispatch):
    _, gate_CQF, up_CQF, _ = _inner(x_TR, experts, dispatch)
    inner_CQF = jax.nn.silu(gate_CQF) * up_CQF
    y_CQR = jnp.einsum("cqf,cfr->cqr", inner_CQF, experts.down[dispatch.expert_C])
    y_TKR = y_CQR.reshape(-1, x_TR.shape[1])[dispatch.slot_TK]
    weights_TK = jnp.where(dispatch.valid_TK, weights_TK, 0)
    out = jnp.sum(weights_TK[..., None] * y_TKR, axis=1)
    return out, (x_TR, weights_TK, experts, dispatch)


def _backward(saved, grad_TR):
    x_TR, weights_TK, experts, dispatch = saved
    num_experts, _, inner_width = experts.gate.shape
    blocks_CQR, gate_CQF, up_CQF, joined_CRF = _inner(x_TR, experts, dispatch)
    sigma = jax.nn.sigmoid(gate_CQF)
    silu = gate_CQF * sigma
    weight_P = jnp.where(dispatch.valid_P, weights_TK[dispatch.token_P, dispatch.choice_P], 0)
    weight_CQ1 = weight_P.reshape(*gate_CQF.shape[:2], 1)
    dy_CQR = grad_TR[dispatch.token_P].reshape(blocks_CQR.shape)
    # Before weighting: its product with the inner activations is the gradient of the weight.
    dinner = jnp.einsum("cqr,cfr->cqf", dy_CQR, experts.down[dispatch.expert_C])
    dweight_P = jnp.sum(dinner * silu * up_CQF, axis=2).reshape(-1)
    dinner = dinner * weight_CQ1
    djoined = jnp.concatenate(
        [dinner * up_CQF * (sigma + silu * (1 - sigma)), dinner * silu], axis=2
    )
    dx_CQR = jnp.einsum("cqf,crf->cqr", djoined, joined_CRF)
    dx_TKR = dx_CQR.reshape(-1, x_TR.shape[1])[dispatch.slot_TK]
    dx_TR = jnp.sum(jnp.where(dispatch.valid_TK[..., None], dx_TKR, 0), axis=1)
    dweights_TK = jnp.where(dispatch.valid_TK, dweight_P[dispatch.slot_TK], 0)
    owner = (dispatch.expert_C == jnp.arange(num_experts)[:, None]).astype(x_TR.dtype)

    def by_expert(a, b):
        per_block = jnp.einsum("cqa,cqb->cab", a, b)
        flat = owner @ per_block.reshape(per_block.shape[0], -1)
        return flat.reshape(num_experts, *per_block.shape[1:])

    dgate, dup = jnp.split(by_expert(blocks_CQR, djoined), [inner_width], axis=2)
    ddown = by_expert(silu * up_CQF * weight_CQ1, dy_CQR)
    return dx_TR, dweights_TK, GatedMlp(dgate, dup, ddown), None


apply_experts.defvjp(_forward, _backward)


def feed_forward(
    x_TD: jax.Array,
    params: Moe,
    shared: list[GatedMlp],
    beta_E: jax.Array,
    valid_T: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array, RouterMetrics]:
    """Routed(x) + sum of the shared experts [T, D], the new beta [E], the router's metrics."""
    dtype = x_TD.dtype
    # One product for everything that reads x.
    gates, ups, downs = ([getattr(m, n) for m in shared] for n in ("gate", "up", "down"))
    joined = jnp.concatenate([params.router, params.latent_down, *gates, *ups], axis=1)
    ends = [config.num_experts, config.num_experts + config.latent_width]
    logits_TE, latent, inner = jnp.split(x_TD @ joined.astype(dtype), ends, axis=1)
    gate, up = jnp.split(inner, 2, axis=1)
    logits_TE = logits_TE.astype(wide(dtype))
    bias_E = balance_bias(beta_E)
    routing = route(logits_TE, bias_E, config.experts_per_token)
    latent = rms_norm(latent, params.latent_norm.gain)
    dispatch = plan_dispatch(routing.experts_TK, valid_T, config.num_experts)
    dispatch = checkpoint_name(dispatch, SAVED_ROUTING)
    experts = jax.tree.map(lambda leaf: leaf.astype(dtype), params.experts)
    out = apply_experts(latent, routing.weights_TK.astype(dtype), experts, dispatch)
    both = jnp.concatenate([out, jax.nn.silu(gate) * up], axis=1)
    out = both @ jnp.concatenate([params.latent_up, *downs], axis=0).astype(dtype)
    logits_TE = jax.lax.stop_gradient(logits_TE)
    margins = bin_margins(logits_TE, routing.threshold_T, valid_T, config.qb_bins)
    new_beta = update_beta(margins, config.experts_per_token, config.qb_bins)
    metrics = measure(logits_TE, routing.experts_TK, valid_T, bias_E, margins, config)
    return out, new_beta, metrics
