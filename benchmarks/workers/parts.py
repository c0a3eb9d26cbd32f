"""The parts of Portolan's forward and backward pass as programs of their own.

A part is measured in one layer and counts for all of them. What the sum lacks of the whole step is
recomputation and the movement of stacked parameters and gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from portolan.model import attention, transformer
from portolan.model.conv import convolve, find_neighbours
from portolan.model.kernels import choose_experts
from portolan.model.loss import token_losses
from portolan.model.moe import feed_forward
from portolan.model.norms import apply_norm
from portolan.model.router import route
from portolan.shapes import ModelConfig


def differentiated(function: Callable) -> Any:
    """Value and gradient of the sum of a function's first output, by all arguments."""

    def total(*arguments: Any) -> jax.Array:
        return jnp.sum(jnp.square(jax.tree.leaves(function(*arguments))[0]))

    def program(*arguments: Any) -> Any:
        return jax.value_and_grad(total, tuple(range(len(arguments))))(*arguments)

    return jax.jit(program, compiler_options=transformer.CPU_COMPILER_OPTIONS)


def measurable_parts(params: Any, batch: Any, config: ModelConfig) -> dict[str, Any]:
    """{part: (program, arguments, how often a step does it)}."""
    blocks = transformer.stacked_layers(params, config)
    layer = jax.tree.map(lambda leaf: leaf[0], blocks)
    segments = jnp.asarray(batch.segments)
    cos, sin = attention.rotary_tables(config.sequence_length, config, jnp.float32)
    neighbours = find_neighbours(segments, config.conv_taps, jnp.float32)
    context = attention.Context(segments, neighbours, cos, sin)
    x = jax.random.normal(jax.random.key(0), (batch.tokens.size, config.width))
    latent = x[:, : config.latent_width]
    valid = jnp.ones(len(x), bool)
    beta = jnp.zeros(config.num_balance_biases)
    logits = jax.random.normal(jax.random.key(1), (len(x), config.num_experts))
    routing = route(logits, beta, config.experts_per_token, config.combine)
    labels = jnp.asarray(batch.tokens).reshape(-1)

    def attend(x: jax.Array, params: Any) -> jax.Array:
        return attention.attend(x, params, context, jnp.array(True), config)

    def experts(x: jax.Array, weights: jax.Array, experts: Any) -> jax.Array:
        kernel = choose_experts(experts, routing.experts_TK.size)
        dispatch = kernel.plan(routing.experts_TK, valid, config.num_experts)
        return kernel.apply(x, weights, experts, dispatch)

    def whole_feed_forward(x: jax.Array, params: Any) -> jax.Array:
        return feed_forward(x, params, beta, valid, config)

    def norms(x: jax.Array, params: Any) -> jax.Array:
        x = convolve(
            apply_norm(x, params.attn_norm, params.attn_gnorm), params.attn_conv, context, ""
        )
        return convolve(
            apply_norm(x, params.mlp_norm, params.mlp_gnorm), params.mlp_conv, context, ""
        )

    def ends(params: Any) -> jax.Array:
        x = transformer.leave(params, transformer.enter(params, labels, jnp.dtype("float32")))
        return token_losses(x, params.head.proj, labels)[0]

    layers = config.num_layers
    return {
        "attention": (differentiated(attend), (x, layer.attn), layers),
        "experts": (
            differentiated(experts),
            (latent, routing.weights_TK, layer.moe.experts),
            layers,
        ),
        "feed-forward with experts": (differentiated(whole_feed_forward), (x, layer), layers),
        "norms and convolutions": (differentiated(norms), (x, layer), layers),
        "embedding, head and loss": (differentiated(ends), (params,), 1),
    }
