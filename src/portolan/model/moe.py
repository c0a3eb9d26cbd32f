"""The feed-forward half of a layer: routed latent experts without drops and shared experts, or one
dense SwiGLU.

Shapes: T tokens, D width, R latent width, E experts, K experts per token.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.expert_rows import SAVED_ROUTED
from portolan.model.norms import rms_norm, wide
from portolan.model.placement import ONE_DEVICE, Placement
from portolan.model.products import project
from portolan.model.router import (
    RouterMetrics,
    measure,
    rebalance,
    route,
    selection_bias,
)
from portolan.model.tree import Block, GatedMlp, Moe
from portolan.shapes import ModelConfig

SAVED_FEED_FORWARD = "feed_forward_projections"


def feed_forward(
    x_TD: jax.Array,
    params: Block,
    beta_E: jax.Array,
    valid_T: jax.Array,
    config: ModelConfig,
    placement: Placement = ONE_DEVICE,
) -> tuple[jax.Array, jax.Array, RouterMetrics | None]:
    """The branch [T, D], the new beta [E] and the router's metrics; a dense layer has no router."""
    if params.mlp is not None:
        return swiglu(x_TD, params.mlp), beta_E, None
    assert params.moe is not None
    return mixture(x_TD, params.moe, params.shared, beta_E, valid_T, config, placement)


def swiglu(x_TD: jax.Array, params: GatedMlp) -> jax.Array:
    """(silu(x gate) * (x up)) down: [T, D]."""
    joined = jnp.concatenate([params.gate, params.up], axis=1).astype(x_TD.dtype)
    gate, up = jnp.split(checkpoint_name(x_TD @ joined, SAVED_FEED_FORWARD), 2, axis=1)
    return (jax.nn.silu(gate) * up) @ params.down.astype(x_TD.dtype)


def mixture(
    x_TD: jax.Array,
    params: Moe,
    shared: list[GatedMlp],
    beta_E: jax.Array,
    valid_T: jax.Array,
    config: ModelConfig,
    placement: Placement,
) -> tuple[jax.Array, jax.Array, RouterMetrics]:
    """Routed(x) + sum of the shared experts [T, D], the new beta [E], the router's metrics."""
    dtype = x_TD.dtype
    # One product for everything that reads x.
    gates, ups, downs = ([getattr(m, n) for m in shared] for n in ("gate", "up", "down"))
    latent_down = [] if params.latent_down is None else [params.latent_down]
    joined = jnp.concatenate([params.router, *latent_down, *gates, *ups], axis=1)
    ends = [config.num_experts, config.num_experts + sum(m.shape[1] for m in latent_down)]
    projected = checkpoint_name(project(x_TD, joined.astype(dtype)), SAVED_FEED_FORWARD)
    logits_TE, latent, inner = jnp.split(projected, ends, axis=1)
    gate, up = jnp.split(inner, 2, axis=1)
    logits_TE = logits_TE.astype(wide(dtype))
    bias_E = selection_bias(beta_E, config)
    routing = route(logits_TE, bias_E, config.experts_per_token, config.combine)
    latent = x_TD if params.latent_down is None else latent
    if params.latent_norm is not None:
        latent = rms_norm(latent, params.latent_norm.gain)
    experts = jax.tree.map(lambda leaf: leaf.astype(dtype), params.experts)
    routed, drops = placement.mix_experts(latent, routing, valid_T, experts, config)
    routed = checkpoint_name(routed, SAVED_ROUTED)
    out = _leave_experts(routed, params.latent_up, jax.nn.silu(gate) * up, downs)
    if config.balance != "softmax_aux":
        logits_TE = jax.lax.stop_gradient(logits_TE)
    new_beta, margins = rebalance(
        logits_TE, routing.threshold_T, valid_T, beta_E, config, placement
    )
    metrics = measure(
        logits_TE, routing.experts_TK, valid_T, bias_E, margins, config, placement, drops
    )
    return out, new_beta, metrics


def _leave_experts(
    routed_TR: jax.Array, latent_up: jax.Array | None, inner: jax.Array, downs: list[jax.Array]
) -> jax.Array:
    """The routed experts' output at full width plus the down products of the shared ones."""
    dtype = routed_TR.dtype
    if latent_up is not None:
        both = jnp.concatenate([routed_TR, inner], axis=1)
        return project(both, jnp.concatenate([latent_up, *downs], axis=0).astype(dtype))
    if not downs:
        return routed_TR
    return routed_TR + inner @ jnp.concatenate(downs, axis=0).astype(dtype)
