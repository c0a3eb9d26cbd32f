"""The model: embedding, scanned layers, head and loss.

Shapes: B rows, S positions, T = B*S tokens, D width, V vocabulary, L layers, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.attention import (
    SAVED_ATTENDED,
    SAVED_PROJECTIONS,
    Context,
    attend,
    rotary_tables,
)
from portolan.model.conv import find_neighbours, short_conv
from portolan.model.init import init
from portolan.model.loss import token_losses as vocabulary_losses
from portolan.model.moe import feed_forward
from portolan.model.norms import gated_norm, wide
from portolan.model.router import SAVED_ROUTING, RouterMetrics
from portolan.model.tree import Block, Params, abstract
from portolan.shapes import ModelConfig

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
SAVED = (SAVED_PROJECTIONS, SAVED_ATTENDED, SAVED_MIDDLE, SAVED_ROUTING)
MAX_ONE_HOT_VOCABULARY = 2048


class Batch(NamedTuple):
    """tokens and segments int32 [B, S] (segment -1 is padding), loss weights float32 [B, S]."""

    tokens: jax.Array
    segments: jax.Array
    weights: jax.Array


class LossAux(NamedTuple):
    """Cross-entropy and mean lse^2 (weighted means), new beta [L, E], router metrics [L]."""

    ce: jax.Array
    mean_square_lse: jax.Array
    new_beta: jax.Array
    router: RouterMetrics


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


def block(
    x_TD: jax.Array,
    params: Block,
    beta_E: jax.Array,
    is_global: jax.Array,
    context: Context,
    config: ModelConfig,
) -> tuple[jax.Array, tuple[jax.Array, RouterMetrics]]:
    """One layer: two residual additions."""
    normed = gated_norm(x_TD, params.attn_norm.gain, params.attn_gnorm.down, params.attn_gnorm.up)
    branch = attend(normed, params.attn, context, is_global, config)
    taps = params.attn_conv.taps.astype(x_TD.dtype)
    x_TD = checkpoint_name(x_TD + short_conv(branch, taps, context.neighbours), SAVED_MIDDLE)
    normed = gated_norm(x_TD, params.mlp_norm.gain, params.mlp_gnorm.down, params.mlp_gnorm.up)
    valid = context.segments_BS.reshape(-1) >= 0
    branch, new_beta, metrics = feed_forward(
        normed, params.moe, params.shared, beta_E, valid, config
    )
    taps = params.mlp_conv.taps.astype(x_TD.dtype)
    x_TD = x_TD + short_conv(branch, taps, context.neighbours)
    return x_TD, (new_beta, metrics)


def hidden(
    params: Params,
    beta_LE: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array, RouterMetrics]:
    """Final normed activations [T, D], new beta [L, E], router metrics [L]."""
    table = params.embed.table.astype(compute_dtype)
    x = gated_norm(
        embed(table, tokens.reshape(-1)),
        params.embed_norm.gain,
        params.embed_gnorm.down,
        params.embed_gnorm.up,
    )
    cos, sin = rotary_tables(tokens.shape[1], config.head_dim, wide(compute_dtype))
    neighbours = find_neighbours(segments, config.conv_taps, compute_dtype)
    context = Context(segments, neighbours, cos, sin)

    def body(x, layer):
        layer_params, beta, is_global = layer
        return block(x, layer_params, beta, is_global, context, config)

    names = () if remat else SAVED
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    flags = jnp.array(config.global_layers)
    x, (new_beta, metrics) = jax.lax.scan(body, x, (params.blocks, beta_LE, flags))
    x = gated_norm(x, params.final_norm.gain, params.final_gnorm.down, params.final_gnorm.up)
    return x, new_beta, metrics


def loss(
    params: Params,
    beta: jax.Array,
    batch: Batch,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
    z_weight: float = Z_WEIGHT,
    remat: bool = False,
) -> tuple[jax.Array, LossAux]:
    """Sum of w (lse - label logit + z lse^2) over sum of w, both over the whole batch."""
    x, new_beta, metrics = hidden(
        params,
        beta,
        batch.tokens,
        batch.segments,
        config,
        compute_dtype=compute_dtype,
        remat=remat,
    )
    labels = _labels(batch.tokens).reshape(-1)
    head = params.head.proj.astype(compute_dtype)
    nll, lse = vocabulary_losses(x, head, labels)
    weights = batch.weights.reshape(-1).astype(nll.dtype)
    total = jnp.maximum(jnp.sum(weights), 1e-30)
    ce = jnp.sum(weights * nll) / total
    mean_square_lse = jnp.sum(weights * lse * lse) / total
    aux = LossAux(ce, mean_square_lse, new_beta, metrics)
    return ce + z_weight * mean_square_lse, aux


def _labels(tokens: jax.Array) -> jax.Array:
    """Next token; the last position has none (0, which must carry weight 0)."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))


def token_losses(
    params: Params,
    beta: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    config: ModelConfig,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """Negative log-likelihood [B, S] of the next token, without the z-term; beta stays."""
    x, _, _ = hidden(params, beta, tokens, segments, config, compute_dtype=compute_dtype)
    head = params.head.proj.astype(compute_dtype)
    nll, _ = vocabulary_losses(x, head, _labels(tokens).reshape(-1))
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
