"""Softmax attention against a dense softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model.tools import quick_jit

from portolan.model.softmax_attention import dot_product


@pytest.mark.parametrize(("length", "window"), [(24, 7), (40, 40), (300, 70)])
@pytest.mark.parametrize("scale", [0.5, 40.0])
def test_products_against_a_dense_softmax(scale, length, window):
    """Values and gradients; at the larger scale exp needs the maximum of each row.

    One block of queries, a second of 8 rows, and eight whose last is shorter.
    """
    generator = np.random.default_rng(0)
    third = length // 3
    segments = np.zeros((2, length), np.int32)
    segments[0, third:] = 1
    segments[1, third : 2 * third] = 1
    segments[1, 2 * third :] = -1
    shapes = ((2, 2, length, 3, 8), (2, 2, length, 8), (2, 2, length, 8))
    q, k, v = (generator.standard_normal(shape) for shape in shapes)
    q, k = (x * np.sqrt(8) / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    mix = generator.standard_normal(shapes[0])
    back = np.arange(length)[:, None] - np.arange(length)
    visible = (back >= 0) & (back < window) & (segments[:, :, None] == segments[:, None])

    def dense(q, k, v):
        scores = scale * jnp.einsum("bmsgh,bmuh->bmgsu", q, k)
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
        return jnp.sum(mix * jnp.einsum("bmgsu,bmuh->bmsgh", weights, v))

    def blocked(q, k, v):
        return jnp.sum(mix * dot_product(q, k, v, jnp.asarray(segments), window, scale))

    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in (q, k, v)]
        expected = quick_jit(jax.value_and_grad(dense, (0, 1, 2)))(*arguments)
        measured = quick_jit(jax.value_and_grad(blocked, (0, 1, 2)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), measured, expected)
