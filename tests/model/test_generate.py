"""Generation against the plain model: logits position by position, draws, documents, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import plain
from tests.model.conftest import CONFIG
from tests.model.tools import quick_jit, random_params, small_config

from portolan.errors import UsageError
from portolan.model import generate, transformer
from portolan.model.generate import Decoder, sample

PROMPT = [3, 40, 7, 7, 19, 0, 22, 31, 5, 16, 2, 11, 38]
NUM_TEXTS, NUM_TOKENS = 3, 5


@pytest.fixture(scope="module", autouse=True)
def quick_step():
    options = {"static_argnames": "to", "donate_argnames": "past"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "_step", quick_jit(generate._forward, **options))
        yield


@pytest.fixture(scope="module")
def model(case):
    return case.params(np.float32), jnp.asarray(case.beta, jnp.float32), case.config


@pytest.fixture(scope="module")
def draw(model):
    """Sampler of three texts of the float32 model of `case`; all share one compiled step."""

    def draw(*prompts, **settings):
        prompts = [prompts[row % len(prompts)] for row in range(NUM_TEXTS)]
        found = sample(*model, prompts, NUM_TOKENS, **settings)
        return [text.tolist() for text in found.texts]

    return draw


def next_logits(case, text):
    tokens = np.array([text])
    segments = np.zeros_like(tokens)
    return plain.forward(case.leaves, case.beta, tokens, segments, case.config).logits[0, -1]


def likeliest(case, prompt):
    text = list(prompt)
    for _ in range(NUM_TOKENS):
        logits = next_logits(case, text)
        text.append(int(logits.argmax()))
        assert np.diff(np.sort(logits)[-2:]) > 1e-3, "no test of a tie"
    return text[len(prompt) :]


def test_logits_one_by_one_are_those_of_the_whole_rows(case, model, single_logits):
    """Local and global layers past the window, documents that begin inside a row, three rows."""
    expected = single_logits(case.tokens, case.segments)
    starts = np.diff(case.segments, axis=1, prepend=-9) != 0
    decoder = Decoder(*model, NUM_TEXTS, CONFIG.sequence_length)
    num_compared = 0
    for place in range(CONFIG.sequence_length):
        found = np.asarray(decoder(case.tokens[:, place], starts[:, place]))
        valid = case.segments[:, place] >= 0
        np.testing.assert_allclose(found[valid], expected[valid, place], rtol=0, atol=1e-5)
        num_compared += valid.sum()
    assert num_compared == (case.segments >= 0).sum() > 40


@pytest.mark.parametrize(
    "switches",
    [
        {
            "exclusive_attention": False, "head_gate": False, "gated_norm": False,
            "rope_fraction": 1.0, "nope_global": False, "conv_sites": ("k", "v"),
            "conv_layers": "global", "balance": "softmax_aux", "latent": False,
        },
        {"mlp": "dense", "conv_sites": (), "full_kv_heads": True},
    ],
    ids=["routed", "dense"],
)  # fmt: skip
def test_switched_off_components_are_off_in_generation_too(switches):
    config = small_config(sequence_length=10, **switches)
    params = random_params(config)
    beta = jnp.zeros((config.num_layers, config.num_balance_biases))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 10)).astype(np.int32)
    logits = quick_jit(transformer.logits, static_argnums=4)
    expected = logits(params, beta, tokens, np.zeros_like(tokens), config)
    decoder = Decoder(params, beta, config, 2, 10)
    for place in range(10):
        found = decoder(tokens[:, place], np.array([False, False]))
        np.testing.assert_allclose(found, expected[:, place], rtol=0, atol=1e-5)


def test_layers_remember_their_window_or_the_sequence_and_nothing_more(model):
    decoder = Decoder(*model, NUM_TEXTS, 10_000)
    num_keys = sum(
        CONFIG.sequence_length * CONFIG.num_kv_heads_global
        if is_global
        else CONFIG.window * CONFIG.num_kv_heads_local
        for is_global in CONFIG.global_layers
    )
    channels = CONFIG.num_kv_heads * CONFIG.head_dim + 2 * CONFIG.width
    inputs = CONFIG.num_layers * (CONFIG.conv_taps - 1) * channels
    assert decoder.memory_bytes == 4 * NUM_TEXTS * (2 * num_keys * CONFIG.head_dim + inputs)


def test_text_that_outgrows_the_sequence_loses_its_oldest_keys():
    """One global layer without convolution sees exactly the last tokens."""
    config = dataclasses.replace(CONFIG, num_layers=1, conv_taps=1, sequence_length=6)
    params = random_params(config)
    beta = jnp.zeros((1, config.num_experts))
    text = np.random.default_rng(0).integers(0, config.vocab_size, 11).astype(np.int32)
    decoder = Decoder(params, beta, config, 1, len(text))
    for place in range(len(text)):
        found = decoder(text[place : place + 1], np.array([False]))
    last = text[None, -6:]
    logits = quick_jit(transformer.logits, static_argnums=4)
    expected = logits(params, beta, last, np.zeros_like(last), config)
    np.testing.assert_allclose(found[0], expected[0, -1], rtol=0, atol=1e-5)


def test_temperature_zero_takes_the_likeliest_token_of_each_prompt(case, draw):
    prompts = PROMPT, PROMPT[3:10], PROMPT[:1]
    expected = [likeliest(case, prompt) for prompt in prompts]
    assert draw(*prompts, temperature=0.0, seed=4) == expected
    assert draw(*prompts, temperature=1.0, top_p=1e-6) == expected


def test_text_depends_on_its_prompt_number_and_seed_alone(draw):
    first = draw(PROMPT, seed=1)
    assert draw(PROMPT, seed=1) == first
    assert draw(PROMPT, PROMPT[2:], PROMPT[5:], seed=1)[0] == first[0]
    assert draw(PROMPT, seed=2)[0] != first[0]
    assert first[0] != first[1]


def test_text_ends_before_the_end_of_document(draw):
    (whole, *_) = draw(PROMPT, temperature=0.0)
    end = whole[2]
    cut = whole[: whole.index(end)]
    texts = draw(PROMPT, PROMPT[:4], temperature=0.0, bos_id=30, eos_id=end)
    assert texts[0] == texts[2] == cut


def test_document_sees_nothing_of_the_one_before(draw):
    begin, end = 30, 9
    document = [begin, *PROMPT[:5]]
    alone = draw(document, temperature=0.0)[0]
    assert draw([4, 8, 15, *document], temperature=0.0)[0] != alone
    assert draw([4, 8, 15, *document], temperature=0.0, bos_id=begin)[0] == alone
    assert draw([4, 8, 15, end, *document], temperature=0.0, eos_id=end)[0] == alone


def test_draws_stay_in_the_smallest_set_and_fill_it(case):
    logits = next_logits(case, PROMPT)
    probability = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probability)
    num_kept = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    assert num_kept > 1
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (400, 1))
    keys = jax.random.split(jax.random.key(0), 400)
    tokens = np.asarray(generate._draw(rows, keys, np.zeros(400, int), 1.0, 0.6))
    assert set(tokens.tolist()) <= set(order[:num_kept].tolist())
    share = probability[order[0]] / probability[order[:num_kept]].sum()
    assert abs(np.mean(tokens == order[0]) - share) < 4 * np.sqrt(share * (1 - share) / 400)


def test_impossible_requests_are_refused(draw):
    with pytest.raises(UsageError, match="prompt"):
        draw([])
    for settings in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(UsageError, match="out of range"):
            draw(PROMPT, **settings)
