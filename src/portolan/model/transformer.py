"""The model: embedding, scanned layers, head and loss.

Shapes: B rows, S positions, T = B*S tokens, D width, V vocabulary, L layers, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.attention import SAVED_PROJECTIONS, Context, attend
from portolan.model.conv import convolve, spread_over_layers
from portolan.model.expert_rows import (
    SAVED_ARRIVED,
    SAVED_PRODUCTS,
    SAVED_RETURNED,
    SAVED_ROUTED,
)
from portolan.model.init import init
from portolan.model.loss import token_losses as vocabulary_losses
from portolan.model.loss import weighted_loss
from portolan.model.moe import SAVED_FEED_FORWARD, feed_forward
from portolan.model.norms import apply_norm, wide
from portolan.model.placement import ONE_DEVICE, Placement
from portolan.model.router import SAVED_ROUTING, RouterMetrics, router_loss
from portolan.model.softmax_attention import SAVED_ATTENDED
from portolan.model.tree import Block, Params, abstract
from portolan.shapes import ModelConfig, Remat

__all__ = [
    "CPU_COMPILER_OPTIONS",
    "Batch",
    "LossAux",
    "abstract",
    "init",
    "logits",
    "loss",
    "token_losses",
]

Z_WEIGHT = 1e-4
CPU_COMPILER_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}
"""For `jax.jit(..., compiler_options=...)` on CPU: library kernels for products only. Fused with
reductions they cost a tenth of a small step (jax 0.10.2)."""
SAVED_MIDDLE = "middle"
SAVED_BRANCHES = "branches"
"""What the convolutions at the ends of the branches read."""
CARRY = "carry"
"""What a layer reads, [T, D]."""
SAVED_OUTSIDE_EXPERTS = (
    SAVED_PROJECTIONS,
    SAVED_ATTENDED,
    SAVED_MIDDLE,
    SAVED_ROUTING,
    SAVED_ROUTED,
)
SAVED: dict[Remat, tuple[str, ...]] = {
    "none": (
        *SAVED_OUTSIDE_EXPERTS,
        SAVED_BRANCHES,
        SAVED_FEED_FORWARD,
        SAVED_PRODUCTS,
        SAVED_ARRIVED,
        SAVED_RETURNED,
    ),
    "experts": SAVED_OUTSIDE_EXPERTS,
    "layer": (),
}
"""Beside the input of each layer."""
MAX_ONE_HOT_VOCABULARY = 2048


class Batch(NamedTuple):
    """tokens and segments int32 [B, S] (segment -1 is padding), loss weights float32 [B, S]."""

    tokens: jax.Array
    segments: jax.Array
    weights: jax.Array


class LossAux(NamedTuple):
    """Cross-entropy and mean lse^2 (weighted means), new beta [L, E], router metrics [L].

    Without quantile balancing new_beta is [L, 0]; in a dense model `router` is None.
    """

    ce: jax.Array
    mean_square_lse: jax.Array
    new_beta: jax.Array
    router: RouterMetrics | None


@jax.custom_vjp
def embed(table_VD: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table."""
    return table_VD[tokens]


def _embed_backward(saved, grad):
    table_VD, tokens = saved
    flat = grad.reshape(-1, grad.shape[-1])
    if table_VD.shape[0] <= MAX_ONE_HOT_VOCABULARY:
        index = jnp.arange(table_VD.shape[0], dtype=tokens.dtype)
        one_hot = (tokens.reshape(-1) == index[:, None]).astype(grad.dtype)
        return one_hot @ flat, None
    return jnp.zeros_like(table_VD).at[tokens.reshape(-1)].add(flat), None


embed.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _embed_backward)


def enter(params: Params, tokens_T: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
    """What the first layer reads, [T, D]."""
    x_TD = embed(params.embed.table.astype(compute_dtype), tokens_T)
    return apply_norm(x_TD, params.embed_norm, params.embed_gnorm)


def leave(params: Params, x_TD: jax.Array) -> jax.Array:
    """What the head reads, [T, D]."""
    return apply_norm(x_TD, params.final_norm, params.final_gnorm)


def stacked_layers(params: Params, config: ModelConfig) -> Block:
    """All layers [L, ...], as `block` takes one of them."""
    if config.conv_layers == "all":
        return params.blocks
    return spread_over_layers(params.blocks, config.global_layers)


def block(
    x_TD: jax.Array,
    params: Block,
    beta_E: jax.Array,
    is_global: jax.Array,
    context: Context,
    config: ModelConfig,
    placement: Placement = ONE_DEVICE,
) -> tuple[jax.Array, tuple[jax.Array, RouterMetrics | None]]:
    """One layer: two residual additions."""
    normed = apply_norm(x_TD, params.attn_norm, params.attn_gnorm)
    branch = attend(normed, params.attn, context, is_global, config)
    branch = checkpoint_name(branch, SAVED_BRANCHES)
    branch = convolve(branch, params.attn_conv, context, "attn")
    x_TD = checkpoint_name(x_TD + branch, SAVED_MIDDLE)
    normed = apply_norm(x_TD, params.mlp_norm, params.mlp_gnorm)
    valid = context.segments_BS.reshape(-1) >= 0
    branch, new_beta, metrics = feed_forward(normed, params, beta_E, valid, config, placement)
    branch = checkpoint_name(branch, SAVED_BRANCHES)
    x_TD = x_TD + convolve(branch, params.mlp_conv, context, "mlp")
    return x_TD, (new_beta, metrics)


def hidden(
    params: Params,
    beta_LE: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype,
    remat: Remat = "none",
    offload_carries: bool = False,
    placement: Placement = ONE_DEVICE,
) -> tuple[jax.Array, jax.Array, RouterMetrics | None]:
    """Final normed activations [T, D], new beta [L, E], router metrics [L]."""
    x = enter(params, tokens.reshape(-1), compute_dtype)
    context = placement.context(segments, config, compute_dtype)

    def body(x, layer):
        layer_params, beta, is_global, number = layer
        x = checkpoint_name(x, CARRY)
        layer_params = placement.whole_layer(layer_params, compute_dtype)
        here = placement.in_layer(layers, number)
        return block(x, layer_params, beta, is_global, context, config, here)

    policy = jax.checkpoint_policies.save_only_these_names(*SAVED[remat])
    if offload_carries:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(SAVED[remat]),
            names_which_can_be_offloaded=[CARRY],
            offload_src="device",
            offload_dst="pinned_host",
        )
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    flags = jnp.array(config.global_layers)
    layers = stacked_layers(params, config)
    numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
    x, (new_beta, metrics) = jax.lax.scan(body, x, (layers, beta_LE, flags, numbers))
    return leave(params, x), new_beta, metrics


def loss(
    params: Params,
    beta: jax.Array,
    batch: Batch,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
    z_weight: float = Z_WEIGHT,
    remat: Remat = "none",
    offload_carries: bool = False,
    placement: Placement = ONE_DEVICE,
) -> tuple[jax.Array, LossAux]:
    """Sum of w (lse - label logit + z lse^2) over sum of w, both over the whole batch.

    A shape that balances by an auxiliary loss adds it.
    """
    params = placement.whole(params, compute_dtype)
    x, new_beta, metrics = hidden(
        params,
        beta,
        batch.tokens,
        batch.segments,
        config,
        compute_dtype=compute_dtype,
        remat=remat,
        offload_carries=offload_carries,
        placement=placement,
    )
    labels = placement.next_tokens(batch.tokens).reshape(-1)
    head = params.head.proj.astype(compute_dtype)
    value, parts = weighted_loss(
        x, head, labels, batch.weights.reshape(-1), z_weight, totals=placement
    )
    aux = LossAux(parts.ce, parts.mean_square_lse, new_beta, metrics)
    if config.balance == "softmax_aux":
        assert metrics is not None
        value += router_loss(metrics, config)
    return value, aux


def token_losses(
    params: Params,
    beta: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
    placement: Placement = ONE_DEVICE,
) -> jax.Array:
    """Negative log-likelihood [B, S] of the next token, without the z-term; beta stays."""
    params = placement.whole(params, compute_dtype)
    x, _, _ = hidden(
        params, beta, tokens, segments, config, compute_dtype=compute_dtype, placement=placement
    )
    head = params.head.proj.astype(compute_dtype)
    nll, _ = vocabulary_losses(x, head, placement.next_tokens(tokens).reshape(-1))
    return nll.reshape(tokens.shape)


def logits(
    params: Params,
    beta: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """Logits [B, S, V], float32 or wider."""
    x, _, _ = hidden(params, beta, tokens, segments, config, compute_dtype=compute_dtype)
    out = x @ params.head.proj.astype(compute_dtype)
    return out.astype(wide(compute_dtype)).reshape(*tokens.shape, -1)
