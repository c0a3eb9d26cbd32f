"""The loss over blocks of tokens against the dense one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.model import loss

NUM_TOKENS, WIDTH, VOCABULARY = 20, 8, 101
Z_WEIGHT = 1e-2


def test_worked_example():
    nll, lse = loss.token_losses(jnp.eye(1), jnp.array([[1.0, 2.0, 3.0]]), jnp.array([2]))
    np.testing.assert_allclose(lse, 3.407606, atol=1e-5)
    np.testing.assert_allclose(nll, 0.407606, atol=1e-5)
    value, _ = loss.weighted_loss(
        jnp.eye(1), jnp.array([[1.0, 2.0, 3.0]]), jnp.array([2]), jnp.ones(1), 1e-4
    )
    np.testing.assert_allclose(value, 0.408767, atol=1e-5)


def draw():
    """Activations, head, labels and weights, some of them 0."""
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((NUM_TOKENS, WIDTH)), jnp.float32)
    head = jnp.asarray(generator.standard_normal((WIDTH, VOCABULARY)), jnp.float32)
    labels = jnp.asarray(generator.integers(0, VOCABULARY, NUM_TOKENS), jnp.int32)
    positive = np.arange(NUM_TOKENS) % 3 > 0
    return x, head, labels, jnp.asarray(generator.random(NUM_TOKENS) * positive, jnp.float32)


@pytest.mark.parametrize("block", [7, 10, 1000])
def test_blocks_equal_the_dense_loss(block):
    x, head, labels, weights = draw()

    def blocked(x, head):
        value, parts = loss.weighted_loss(x, head, labels, weights, Z_WEIGHT, block)
        return 3 * value, parts

    def dense(x, head):
        logits = x @ head
        lse = jax.nn.logsumexp(logits, axis=1)
        nll = lse - logits[jnp.arange(NUM_TOKENS), labels]
        ce, square = (jnp.sum(weights * leaf) / jnp.sum(weights) for leaf in (nll, lse**2))
        return 3 * (ce + Z_WEIGHT * square), (nll, lse, ce, square)

    (value, parts), gradient = jax.value_and_grad(blocked, (0, 1), has_aux=True)(x, head)
    (expected, (nll, lse, ce, square)), expected_gradient = jax.value_and_grad(
        dense, (0, 1), has_aux=True
    )(x, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(blocked(x, head)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(parts, (ce, square), rtol=1e-6)
    for mine, theirs in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(gradient[0])[np.asarray(weights) == 0], 0)
    for mine, theirs in zip(loss.token_losses(x, head, labels, block), (nll, lse), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_the_parts_of_the_loss_have_no_gradient():
    x, head, labels, weights = draw()
    gradient = jax.grad(lambda x: loss.weighted_loss(x, head, labels, weights, Z_WEIGHT)[1].ce)(x)
    np.testing.assert_array_equal(gradient, 0)


def test_no_weight_gives_no_loss():
    x, head, labels, weights = draw()
    value, parts = loss.weighted_loss(x, head, labels, 0 * weights, Z_WEIGHT)
    assert (value, *parts) == (0, 0, 0)
