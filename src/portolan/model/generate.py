"""Continue prompts, one token at a time, from what every layer remembers of the tokens before.

The layers are those of training: `transformer.block` asks its context about other positions, and
the context here answers from memory. Memory is bounded: local layers keep the keys of their window,
global ones those of one sequence length, convolutions their last inputs.

Shapes: B texts, U remembered positions, M stored and m used key/value heads, G query heads per
stored head, H head size, W taps, C channels, V vocabulary.
"""

import functools
import operator
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from portolan.errors import UsageError
from portolan.model import transformer
from portolan.model.attention import rotary_at
from portolan.model.norms import wide
from portolan.model.tree import Block, Params
from portolan.shapes import ModelConfig

LayerPast = dict[str, jax.Array]
"""What a layer remembers: `keys` and `values` [B, U, m, H], and by convolution [B, W-1, C]."""


class Limits(NamedTuple):
    """What a compiled step is made for; `capacity` bounds the keys that a layer remembers."""

    config: ModelConfig
    capacity: int
    compute_dtype: Any


class Recall:
    """What one layer knows about other positions: `attention.Context` for one token a text.

    `kept` is what it will know at the next position; a past without an entry is empty.
    """

    def __init__(
        self, past: LayerPast, position: jax.Array, begin_B: jax.Array, is_global: bool, to: Limits
    ) -> None:
        config = to.config
        self.past, self.kept = past, dict[str, jax.Array]()
        self.position, self.begin_B = position, begin_B
        self.num_used = config.num_kv_heads_global if is_global else config.num_kv_heads_local
        self.num_slots = to.capacity if is_global else min(config.window, to.capacity)
        self.segments_BS = jnp.zeros((begin_B.size, 1), jnp.int32)
        self.cos_SH, self.sin_SH = rotary_at(position[None], config, wide(to.compute_dtype))
        self.num_positions = to.capacity

    def convolve(self, x_BC: jax.Array, taps_WC: jax.Array, site: str) -> jax.Array:
        """Short convolution with the inputs that the site remembers, newest first."""
        num_texts, channels = x_BC.shape
        nothing = jnp.zeros((num_texts, taps_WC.shape[0] - 1, channels), x_BC.dtype)
        past = jnp.where(
            (self.begin_B == self.position)[:, None, None], 0, self.past.get(site, nothing)
        )
        recent = jnp.concatenate([x_BC[:, None], past], axis=1)
        self.kept[site] = recent[:, :-1]
        return jnp.sum(taps_WC.astype(x_BC.dtype) * recent, axis=1)

    def mix(
        self,
        q_BSMGH: jax.Array,
        k_BSMH: jax.Array,
        v_BSMH: jax.Array,
        window: jax.Array,
        scale: float,
    ) -> jax.Array:
        """Softmax attention over the remembered keys of the document; S is 1.

        Position p lies in slot p modulo the number of slots, so the newest key takes the place
        of the one that leaves the window.
        """
        del window  # There are as many slots.
        stored, size = k_BSMH.shape[2:]
        keys = self._remember("keys", k_BSMH[:, 0, :: stored // self.num_used])
        values = self._remember("values", v_BSMH[:, 0, :: stored // self.num_used])
        back_U = (self.position - jnp.arange(self.num_slots)) % self.num_slots
        visible_BU = self.position - back_U >= self.begin_B[:, None]
        q = q_BSMGH.reshape(q_BSMGH.shape[0], self.num_used, -1, size)
        scores = jnp.einsum("bmgh,bumh->bmgu", q, keys, preferred_element_type=wide(q.dtype))
        scores = jnp.where(visible_BU[:, None, None], scale * scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bmgu,bumh->bmgh", weights, values).reshape(q_BSMGH.shape)

    def _remember(self, name: str, new_BMH: jax.Array) -> jax.Array:
        num_texts, *rest = new_BMH.shape
        nothing = jnp.zeros((num_texts, self.num_slots, *rest), new_BMH.dtype)
        slot = self.position % self.num_slots
        past = self.past.get(name, nothing)
        self.kept[name] = jax.lax.dynamic_update_index_in_dim(past, new_BMH, slot, axis=1)
        return self.kept[name]


class Weights(NamedTuple):
    """Parameters, the layers one by one, and beta [L, E]."""

    params: Params
    blocks: list[Block]
    beta_LE: jax.Array


def _forward(
    weights: Weights,
    past: list[LayerPast],
    tokens_B: jax.Array,
    position: jax.Array,
    begin_B: jax.Array,
    *,
    to: Limits,
) -> tuple[jax.Array, list[LayerPast]]:
    """Logits [B, V] of the token after `tokens_B`, which stand at `position`, and the new past."""
    config, kept = to.config, []
    x = transformer.enter(weights.params, tokens_B, to.compute_dtype)
    for layer, block in enumerate(weights.blocks):
        is_global = config.global_layers[layer]
        context: Any = Recall(past[layer], position, begin_B, is_global, to)
        x, _ = transformer.block(
            x, block, weights.beta_LE[layer], jnp.asarray(is_global), context, config
        )
        kept.append(context.kept)
    x = transformer.leave(weights.params, x)
    logits = x @ weights.params.head.proj.astype(to.compute_dtype)
    return logits.astype(wide(to.compute_dtype)), kept


_step = jax.jit(_forward, static_argnames="to", donate_argnames="past")


class Decoder:
    """Several texts that grow by one token a call; one compiled program serves all positions.

    Args:
        num_texts: texts in the batch.
        num_tokens: length that no text will outgrow. Past the sequence length, global layers
            forget their oldest keys.
    """

    def __init__(
        self,
        params: Params,
        beta: jax.Array,
        config: ModelConfig,
        num_texts: int,
        num_tokens: int,
        *,
        compute_dtype: Any = jnp.float32,
    ) -> None:
        capacity = min(config.sequence_length, 1 << max(0, num_tokens - 1).bit_length())
        limits = Limits(config, capacity, jnp.dtype(compute_dtype))
        self.position = 0
        self._begin = np.zeros(num_texts, np.int32)
        layers = range(config.num_layers)
        stack = transformer.stacked_layers(params, config)
        blocks = [jax.tree.map(operator.itemgetter(layer), stack) for layer in layers]
        self._weights = Weights(params, blocks, beta)
        place = self._begin, np.int32(0), self._begin
        empty: list[LayerPast] = [{} for _ in layers]
        step = functools.partial(_forward, to=limits)
        _, past = jax.eval_shape(step, self._weights, empty, *place)
        self._past = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), past)
        self._program = _step.lower(self._weights, self._past, *place, to=limits).compile()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all keys, values and convolution inputs; the same at every position."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._past))

    def __call__(self, tokens_B: np.ndarray, starts_B: np.ndarray) -> jax.Array:
        """Logits [B, V] after one more token a text; `starts_B` says where a document begins."""
        begins = starts_B | (self.position == 0)
        self._begin = np.where(begins, np.int32(self.position), self._begin)
        place = np.asarray(tokens_B, np.int32), np.int32(self.position), self._begin
        logits_BV, self._past = self._program(self._weights, self._past, *place)
        self.position += 1
        return logits_BV


class Samples(NamedTuple):
    """New tokens of each prompt, int32, and the speed: what was written, prompts included, over
    the time from the second position on; the first one compiles."""

    texts: list[np.ndarray]
    tokens_per_second: float
    memory_bytes: int


def sample(
    params: Params,
    beta: jax.Array,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    compute_dtype: Any = jnp.float32,
) -> Samples:
    """Up to `num_tokens` new tokens a prompt, each before the first `eos_id`.

    Tokens are drawn from the smallest set of probability `top_p`; temperature 0 takes the most
    likely one. A text depends on its prompt, its number and the seed, not on the other prompts. A
    token `bos_id` begins a document, which sees nothing before it; without one, the token after
    `eos_id` does.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UsageError("a prompt holds no token", remedy="give at least one token")
    if temperature < 0 or not 0 < top_p <= 1:
        raise UsageError(
            f"temperature = {temperature}, top_p = {top_p} are out of range",
            remedy="use temperature >= 0 and 0 < top_p <= 1",
        )
    lengths = np.array([len(prompt) for prompt in prompts])
    ends = lengths + num_tokens
    tokens = np.zeros((len(prompts), ends.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    decoder = Decoder(
        params, beta, config, len(prompts), int(ends.max()) - 1, compute_dtype=compute_dtype
    )
    fold = functools.partial(jax.random.fold_in, jax.random.key(seed))
    keys = jax.vmap(fold)(np.arange(len(prompts)))
    begin, place = time.monotonic(), 0
    while place + 1 < ends.max():
        logits = decoder(tokens[:, place], _document_starts(tokens, place, bos_id, eos_id))
        place += 1
        drawn = np.asarray(_draw(logits, keys, place - lengths, temperature, top_p))
        growing = (place >= lengths) & (place < ends)
        tokens[growing, place] = drawn[growing]
        ends = np.where(growing & (drawn == eos_id), place, ends)
        begin = time.monotonic() if place == 1 else begin
    seconds = max(time.monotonic() - begin, 1e-9)
    texts = [tokens[row, lengths[row] : ends[row]] for row in range(len(prompts))]
    written = int(np.maximum(ends - 2, 0).sum())
    return Samples(texts, written / seconds, decoder.memory_bytes)


def _document_starts(
    tokens: np.ndarray, place: int, bos_id: int | None, eos_id: int | None
) -> np.ndarray:
    if bos_id is not None:
        return tokens[:, place] == bos_id
    return tokens[:, place - 1] == eos_id


@jax.jit
def _draw(
    logits_BV: jax.Array, keys: jax.Array, index_B: jax.Array, temperature: float, top_p: float
) -> jax.Array:
    """One token a text [B]: token number `index_B` of its key."""

    def draw(logits_V: jax.Array, key: jax.Array, index: jax.Array) -> jax.Array:
        scaled = logits_V / jnp.maximum(temperature, 1e-6)
        order = jnp.argsort(-scaled, stable=True)
        probability = jax.nn.softmax(scaled)[order]
        before = jnp.cumsum(probability) - probability
        kept = jnp.where(before < top_p, scaled[order], -jnp.inf)
        choice = order[jax.random.categorical(jax.random.fold_in(key, index), kept)]
        return jnp.where(temperature > 0, choice, jnp.argmax(logits_V)).astype(jnp.int32)

    return jax.vmap(draw)(logits_BV, keys, index_B)
