"""Derivatives of the package against finite differences of the plain model."""

import numpy as np
import pytest
from tests.model.conftest import CONFIG

from portolan.model.tree import parameter_shapes

STEP = 1e-5
# Unused by global layers: columns of the K/V heads beyond the first num_kv_heads_global.
USED_COLUMNS = CONFIG.num_kv_heads_global * CONFIG.head_dim
KEY_VALUE_LEAVES = ("blocks/attn/wk", "blocks/attn/wv", "blocks/attn/k_conv/taps")


@pytest.mark.parametrize("path", parameter_shapes(CONFIG))
def test_every_leaf_against_finite_differences(path, case, double_run):
    """The largest entry, a random one, and one direction through the whole leaf."""
    gradient = double_run[2][path]
    assert gradient.shape == case.leaves[path].shape
    generator = np.random.default_rng(len(path))
    directions = [generator.standard_normal(gradient.shape)]
    for index in (np.abs(gradient).argmax(), generator.integers(gradient.size)):
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
