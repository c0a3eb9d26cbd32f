"""Continue a prompt, one token at a time.

Shapes: S sequence length, V vocabulary.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from portolan.errors import UsageError
from portolan.model.norms import wide
from portolan.model.transformer import hidden
from portolan.model.tree import Params
from portolan.shapes import ModelConfig


def sample(
    params: Params,
    beta: jax.Array,
    config: ModelConfig,
    prompt_tokens: Sequence[int],
    num_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    compute_dtype: jnp.dtype = jnp.float32,
) -> np.ndarray:
    """`num_tokens` new tokens, int32, drawn from the smallest set of probability `top_p`.

    Temperature 0 takes the most likely token. When the text outgrows the sequence length, the
    model sees its last `sequence_length` tokens.
    """
    if not len(prompt_tokens):
        raise UsageError("the prompt holds no token", remedy="give at least one token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise UsageError(
            f"temperature = {temperature}, top_p = {top_p} are out of range",
            remedy="use temperature >= 0 and 0 < top_p <= 1",
        )
    length = config.sequence_length
    recent = np.asarray(prompt_tokens, np.int32)[-length:]
    window = np.zeros(length, np.int32)
    window[: recent.size] = recent
    step = functools.partial(_step, config=config, compute_dtype=compute_dtype)
    state = jnp.asarray(window), jnp.asarray(recent.size, jnp.int32)
    key = jax.random.key(seed)
    settings = jnp.float32(temperature), jnp.float32(top_p)
    out = []
    for index in range(num_tokens):
        *state, token = step(params, beta, *state, jax.random.fold_in(key, index), *settings)
        out.append(token)
    return np.asarray(out, np.int32)


@functools.partial(jax.jit, static_argnames=("config", "compute_dtype"))
def _step(params, beta, window_S, used, key, temperature, top_p, *, config, compute_dtype):
    """One more token at position `used`; a full window first moves one to the left."""
    length = config.sequence_length
    segments = jnp.where(jnp.arange(length) < used, 0, -1)
    x, _, _ = hidden(
        params, beta, window_S[None], segments[None], config, compute_dtype=compute_dtype
    )
    logits_V = x[used - 1] @ params.head.proj.astype(compute_dtype)
    token = _draw(logits_V.astype(wide(compute_dtype)), key, temperature, top_p)
    full = used == length
    window_S = jnp.where(full, jnp.roll(window_S, -1), window_S)
    window_S = window_S.at[jnp.where(full, length - 1, used)].set(token)
    return window_S, jnp.where(full, used, used + 1), token


def _draw(logits_V: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array):
    scaled = logits_V / jnp.maximum(temperature, 1e-6)
    order = jnp.argsort(-scaled, stable=True)
    probability = jax.nn.softmax(scaled)[order]
    before = jnp.cumsum(probability) - probability
    kept = jnp.where(before < top_p, scaled[order], -jnp.inf)
    choice = order[jax.random.categorical(key, kept)]
    return jnp.where(temperature > 0, choice, jnp.argmax(logits_V)).astype(jnp.int32)
