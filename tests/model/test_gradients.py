"""Derivatives of the package against finite differences of the plain model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.model import router
from portolan.model.tree import parameter_shapes
from tests.model.conftest import CONFIG

STEP = 1e-5
# Unused by global layers: columns of the K/V heads beyond the first num_kv_heads_global.
USED_COLUMNS = CONFIG.num_kv_heads_global * CONFIG.head_dim
KEY_VALUE_LEAVES = ("blocks/attn/wk", "blocks/attn/wv", "blocks/attn/k_conv/taps")


@pytest.mark.parametrize("path", parameter_shapes(CONFIG))
def test_every_leaf_against_finite_differences(path, case, double_run):
    """Four single entries, the largest among them, and one direction through the whole leaf."""
    gradient = double_run[2][path]
    assert gradient.shape == case.leaves[path].shape
    generator = np.random.default_rng(len(path))
    directions = [generator.standard_normal(gradient.shape)]
    flat = [int(np.abs(gradient).argmax()), *generator.integers(0, gradient.size, 3)]
    for index in flat:
        direction = np.zeros(gradient.size)
        direction[index] = 1
        directions.append(direction.reshape(gradient.shape))
    for direction in directions:
        ends = [
            case.plain_loss(case.leaves | {path: case.leaves[path] + sign * STEP * direction})
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(slope, np.sum(gradient * direction), rtol=1e-5, atol=2e-9)


def test_no_leaf_is_without_gradient(double_run):
    for path, leaf in double_run[2].items():
        assert np.isfinite(leaf).all(), path
        assert np.linalg.norm(leaf) > 1e-4, path
        if path.startswith("blocks/") and "experts" not in path:
            for layer in leaf:
                assert np.linalg.norm(layer) > 1e-5, path


@pytest.mark.parametrize("path", KEY_VALUE_LEAVES)
def test_unused_heads_of_global_layers_have_no_gradient(path, double_run):
    for is_global, layer in zip(CONFIG.global_layers, double_run[2][path], strict=True):
        unused = layer[:, USED_COLUMNS:]
        assert np.any(unused) != is_global
        assert np.any(layer[:, :USED_COLUMNS])


def test_no_gradient_reaches_the_balance_state(double_run):
    """Through the bias the state decides the choice; the loss must not see it otherwise."""
    np.testing.assert_array_equal(double_run[3], 0)


def test_router_weights_only_carry_gradient_of_the_selected():
    """Not through the bias, the threshold, or the experts that were not selected."""
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.standard_normal((40, 9)), jnp.float32)
    bias = jnp.asarray(generator.standard_normal(9), jnp.float32)
    mix = jnp.asarray(generator.standard_normal((40, 3)), jnp.float32)

    def mixed(logits, bias):
        routing = router.route(logits, bias, 3)
        return jnp.sum(mix * routing.weights_TK), routing

    step = jax.jit(jax.value_and_grad(mixed, argnums=(0, 1), has_aux=True))
    (_, routing), (to_logits, to_bias) = step(logits, bias)
    np.testing.assert_array_equal(to_bias, 0)
    chosen = np.zeros((40, 9), bool)
    np.put_along_axis(chosen, np.asarray(routing.experts_TK), True, axis=1)
    assert not np.asarray(to_logits)[~chosen].any()
    assert np.asarray(to_logits)[chosen].all()
    np.testing.assert_allclose(routing.weights_TK.sum(axis=1), 2.5, atol=1e-6)

    def threshold(logits, bias):
        return jnp.sum(router.route(logits, bias, 3).threshold_T)

    for gradient in jax.grad(threshold, argnums=(0, 1))(logits, bias):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("num_selected", [1, 2, 5])
@pytest.mark.parametrize("level", [-4.0, 0.0, 3.0])
def test_combine_weights_of_equal_logits(num_selected, level):
    """Ties go to the lower index; equal weights that sum to 2.5."""
    routing = router.route(jnp.full((3, 6), level), jnp.zeros(6), num_selected)
    np.testing.assert_array_equal(routing.experts_TK, np.arange(num_selected) + np.zeros((3, 1)))
    np.testing.assert_allclose(routing.weights_TK.sum(axis=1), 2.5, atol=1e-6)
    np.testing.assert_allclose(routing.weights_TK, 2.5 / num_selected, atol=1e-6)
    np.testing.assert_array_equal(routing.threshold_T, level)
