"""Sampling against the plain model: the likeliest token, the smallest set of tokens, seeds."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import plain

from portolan.errors import UsageError
from portolan.model.generate import sample

PROMPT = [3, 40, 7, 7, 19, 0, 22, 31, 5, 16, 2, 11, 38]


@pytest.fixture(scope="module")
def draw(case):
    """Sampler of the float32 model of `case`; all settings share one compiled step."""
    params, beta = case.params(np.float32), jnp.asarray(case.beta, jnp.float32)

    def draw(num_tokens=1, prompt=PROMPT, **settings):
        return sample(params, beta, case.config, prompt, num_tokens, **settings).tolist()

    return draw


def next_logits(case, text):
    """Logits after `text`, cut to its last tokens where it outgrows the sequence length."""
    tokens = np.array([text[-case.config.sequence_length :]])
    segments = np.zeros_like(tokens)
    return plain.forward(case.leaves, case.beta, tokens, segments, case.config).logits[0, -1]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["outgrows", "one token"])
def test_temperature_zero_takes_the_likeliest_token(case, draw, prompt):
    text = list(prompt)
    for _ in range(9):
        logits = next_logits(case, text)
        text.append(int(logits.argmax()))
        assert np.diff(np.sort(logits)[-2:]) > 1e-3, "no test of a tie"
    assert draw(9, prompt, temperature=0.0, seed=4) == text[len(prompt) :]
    assert draw(9, prompt, temperature=1.0, top_p=1e-6) == text[len(prompt) :]


def test_text_depends_on_the_seed_alone(draw):
    first = draw(8, seed=1)
    assert draw(8, seed=1) == first
    assert draw(4, seed=1) == first[:4]
    assert draw(8, seed=2) != first


def test_draws_stay_in_the_smallest_set_and_fill_it(case, draw):
    probability = np.exp(next_logits(case, PROMPT))
    probability /= probability.sum()
    order = np.argsort(-probability)
    num_kept = int(np.searchsorted(np.cumsum(probability[order]), 0.6)) + 1
    assert num_kept > 1
    tokens = [draw(top_p=0.6, seed=seed)[0] for seed in range(100)]
    assert set(tokens) <= set(order[:num_kept].tolist())
    share = probability[order[0]] / probability[order[:num_kept]].sum()
    assert abs(tokens.count(order[0]) / 100 - share) < 4 * np.sqrt(share * (1 - share) / 100)


def test_impossible_requests_are_refused(draw):
    with pytest.raises(UsageError, match="prompt"):
        draw(prompt=[])
    for settings in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(UsageError, match="out of range"):
            draw(**settings)
