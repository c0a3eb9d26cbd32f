"""Worked examples and laws of the parts: norms, rotation, convolution, attention, embedding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import reference
from tests.model.tools import quick_jit, random_params, small_config

from portolan.model import attention, conv, norms, transformer

CONFIG = small_config()
SEGMENTS = np.array([[0] * 10 + [1] * 14, [0] * 4 + [1] * 15 + [-1] * 5], np.int32)


def test_gated_norm_example():
    out = norms.gated_norm(
        jnp.array([3.0, 4.0]), jnp.ones(2), jnp.array([[1.0], [-1.0]]), jnp.array([[2.0, 1.0]])
    )
    np.testing.assert_allclose(out, [0.37295, 0.53135], atol=1e-5)


def test_rotation_example():
    x = jnp.arange(1.0, 9).reshape(1, 1, 1, 8)
    cos, sin = attention.rotary_tables(4, CONFIG, jnp.float32)
    out = attention.rotate(x, cos[3:], sin[3:])[0, 0, 0]
    expected = [-1.27223, -1.83886, 2.87867, 4.08819, 5, 6, 7, 8]
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_exclusion_example():
    out = attention.exclude_self(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(out, [-0.32, 0.24], atol=1e-5)


def test_heads_used_by_global_layers():
    heads = jnp.arange(4.0).reshape(1, 1, 4, 1)
    repeated = attention.repeat_first_heads(heads, 2).ravel()
    np.testing.assert_array_equal(repeated, [0, 0, 1, 1])


def test_convolution_example():
    neighbours = conv.find_neighbours(jnp.array([[0, 0, 0, 1, 1]]), 4, jnp.float32)
    taps = jnp.array([1, 1 / 2, 1 / 4, 1 / 8])[:, None]
    out = conv.short_conv(jnp.arange(1.0, 6)[:, None], taps, neighbours)
    np.testing.assert_allclose(out[:, 0], [1, 2.5, 4.25, 4, 7])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_against_loops(taps):
    generator = np.random.default_rng(taps)
    x = generator.standard_normal((2, 24, 5))
    weights = generator.standard_normal((taps, 5))
    mix = generator.standard_normal((2, 24, 5))
    with jax.enable_x64(True):
        neighbours = conv.find_neighbours(jnp.asarray(SEGMENTS), taps, jnp.float64)

        def objective(x, weights):
            out = conv.short_conv(x.reshape(48, 5), weights, neighbours)
            return jnp.sum(out * mix.reshape(48, 5)), out

        (_, out), (dx, dtaps) = jax.value_and_grad(objective, (0, 1), has_aux=True)(
            jnp.asarray(x), jnp.asarray(weights)
        )

    dx, dtaps = np.asarray(dx), np.asarray(dtaps)

    def loops(x, weights):
        return np.stack([reference.conv(x[b], weights, SEGMENTS[b]) for b in range(2)])

    np.testing.assert_allclose(out.reshape(2, 24, 5), loops(x, weights), atol=1e-12)
    moved_x, moved_taps = generator.standard_normal(x.shape), generator.standard_normal((taps, 5))
    # Bilinear: the derivative in a direction is the operation itself.
    np.testing.assert_allclose(np.sum(dx * moved_x), np.sum(mix * loops(moved_x, weights)))
    np.testing.assert_allclose(np.sum(dtaps * moved_taps), np.sum(mix * loops(x, moved_taps)))


@pytest.fixture(scope="module")
def model():
    """Parameters, beta and a jitted map from tokens and segments to logits [B, S, V]."""
    params = random_params(CONFIG)
    beta = 0.1 * jax.random.normal(jax.random.key(1), (CONFIG.num_layers, CONFIG.num_experts))

    @quick_jit
    def logits(tokens, segments):
        return transformer.logits(params, beta, tokens, segments, CONFIG)

    return logits


def random_tokens(seed=0):
    shape = SEGMENTS.shape
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def test_causality_and_packing_are_exact(model):
    tokens = random_tokens()
    before = model(tokens, SEGMENTS)
    for row, position in [(0, 5), (0, 10), (0, 23), (1, 4), (1, 20)]:
        changed = tokens.copy()
        changed[row, position] = (changed[row, position] + 1) % CONFIG.vocab_size
        difference = np.abs(model(changed, SEGMENTS) - before).max(axis=-1)
        free = SEGMENTS[row, position] != SEGMENTS
        free[row, :position] = True
        free[1 - row] = True
        assert np.all(difference[free] == 0)
        assert difference[row, position] > 0


def test_a_document_alone_equals_the_packed_one(model):
    tokens = random_tokens()
    packed = np.asarray(model(tokens, SEGMENTS))
    alone = np.where(SEGMENTS == 1, 0, -1).astype(np.int32)
    document = SEGMENTS == 1
    np.testing.assert_array_equal(model(tokens, alone)[document], packed[document])
    moved, moved_segments = np.zeros_like(tokens), np.full_like(SEGMENTS, -1)
    moved[0, 3:17], moved_segments[0, 3:17] = tokens[0, 10:], 0
    shifted = np.asarray(model(moved, moved_segments))[0, 3:17]
    np.testing.assert_allclose(shifted, packed[0, 10:], rtol=0, atol=2e-5 * np.abs(packed).max())


@pytest.fixture(scope="module")
def attend():
    """Attn of one row of one document, the k convolution the identity: (x [S, D], global?)."""
    config = small_config()
    params = jax.tree.map(lambda leaf: leaf[0], random_params(config).blocks.attn)
    params.k_conv.taps = jnp.zeros_like(params.k_conv.taps).at[0].set(1.0)
    segments = jnp.zeros((1, 24), jnp.int32)
    neighbours = conv.find_neighbours(segments, config.conv_taps, jnp.float32)
    tables = attention.rotary_tables(24, config, jnp.float32)
    context = attention.Context(segments, neighbours, *tables)
    return quick_jit(lambda x, flag: attention.attend(x, params, context, flag, config))


def test_window_and_order(attend):
    x = np.random.default_rng(0).standard_normal((24, CONFIG.width)).astype(np.float32)
    window, last = CONFIG.window, 23
    for is_global in (False, True):
        before = np.asarray(attend(x, is_global))[last]
        for back, seen in [(window, is_global), (window - 1, True)]:
            changed = x.copy()
            changed[last - back] += 1
            difference = np.abs(np.asarray(attend(changed, is_global))[last] - before).max()
            assert (difference > 0) == seen
        permuted = np.concatenate([x[:last][::-1], x[last:]])
        if not is_global:
            permuted = np.concatenate([x[: last - 3], x[last - 3 : last][::-1], x[last:]])
        difference = np.abs(np.asarray(attend(permuted, is_global))[last] - before).max()
        scale = np.abs(before).max()
        assert (difference <= 1e-5 * scale) == is_global


def test_a_lone_token_attends_to_nothing(attend):
    x = np.random.default_rng(1).standard_normal((24, CONFIG.width)).astype(np.float32)
    out = np.asarray(attend(x, False))
    assert np.abs(out[0]).max() < 1e-5 * np.abs(out[1:]).max()


def test_exclusion_is_orthogonal():
    generator = np.random.default_rng(2)
    y, v = generator.standard_normal((2, 50, 8)).astype(np.float32)
    out = attention.exclude_self(jnp.asarray(y), jnp.asarray(v))
    overlap = np.abs(np.sum(np.asarray(out) * v, axis=-1))
    assert np.all(overlap <= 1e-5 * np.linalg.norm(y, axis=-1) * np.linalg.norm(v, axis=-1))


@pytest.mark.parametrize("vocab_size", [50, transformer.MAX_ONE_HOT_VOCABULARY + 1])
def test_embedding_gradient(vocab_size):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 50, 200)
    mix = generator.standard_normal((200, 3)).astype(np.float32)
    table = jnp.zeros((vocab_size, 3))
    out = jax.grad(lambda t: jnp.sum(transformer.embed(t, jnp.asarray(tokens)) * mix))(table)
    expected = np.zeros((vocab_size, 3))
    np.add.at(expected, tokens, mix)
    np.testing.assert_allclose(out, expected, atol=1e-5)
