"""Router metrics and evaluation losses of a micro model."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from tests.model.tools import quick_jit, random_params

from portolan.model import transformer
from portolan.shapes import derive_shape

CONFIG = derive_shape("micro", 32, num_layers=2, sequence_length=32, window=16)


@pytest.fixture(scope="module")
def measured():
    params = random_params(CONFIG, scale=0.15)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, CONFIG.vocab_size, (8, 32)).astype(np.int32)
    segments = np.zeros((8, 32), np.int32)
    segments[:, 28:] = -1
    beta = jnp.asarray(0.01 * generator.standard_normal((2, 32)), jnp.float32)
    weights = (segments >= 0).astype(np.float32)
    weights[:, 27] = 0
    batch = transformer.Batch(tokens, segments, weights)

    @quick_jit
    def both(params, beta, batch):
        nll = transformer.token_losses(params, beta, batch.tokens, batch.segments, CONFIG)
        return transformer.loss(params, beta, batch, CONFIG), nll

    (loss, aux), nll = both(params, beta, batch)
    return beta, weights, loss, aux, np.asarray(nll)


def test_evaluation_is_the_loss_without_its_z_term(measured):
    _, weights, loss, aux, nll = measured
    assert nll.shape == weights.shape
    np.testing.assert_allclose(np.sum(nll * weights) / weights.sum(), aux.ce, rtol=1e-5)
    np.testing.assert_allclose(loss, aux.ce + 1e-4 * aux.mean_square_lse, rtol=1e-6)


def test_metrics_lie_in_their_ranges(measured):
    beta, _, _, aux, _ = measured
    router = aux.router
    assert all(field.shape == (2,) for field in router if field is not None)
    assert np.all((router.entropy > 0) & (router.entropy <= math.log(32) + 1e-6))
    assert np.all(router.load_balance >= CONFIG.experts_per_token * 0.9)
    assert np.all(router.load_max_over_mean >= 1)
    np.testing.assert_array_equal(router.drop_fraction, 0)
    bias = np.asarray(beta).mean(axis=1, keepdims=True) - np.asarray(beta)
    np.testing.assert_allclose(router.bias_min, bias.min(axis=1), atol=1e-7)
    np.testing.assert_allclose(router.bias_max, bias.max(axis=1), atol=1e-7)
    assert np.all(aux.new_beta >= router.margin_min[:, None])
    assert np.all(aux.new_beta <= router.margin_max[:, None])
