"""Laws of initialisation, and of documents in a model with many layers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import plain
from tests.model.tools import quick_jit

from portolan.model import conv, transformer
from portolan.model.tree import flatten_paths, unflatten_paths
from portolan.shapes import derive_shape

INIT_CONFIG = derive_shape("small", 64, sequence_length=24, window=8)
SEED = 3
# Of a normal distribution cut at three standard deviations.
STANDARD_DEVIATION, KURTOSIS = 0.986578, 2.8


def initialise(config, seed=SEED):
    params = quick_jit(lambda: transformer.init(config, seed))()
    return {path: np.asarray(leaf) for path, leaf in flatten_paths(params).items()}


@pytest.fixture(scope="module")
def initial():
    return initialise(INIT_CONFIG)


def is_matrix(path):
    return not path.endswith(("gain", "taps", "head_gate"))


def test_initial_matrices(initial):
    """Norms within one percent where the leaf is large enough to tell; no entry beyond 3 s0."""
    init_std = 0.5 / math.sqrt(64)
    means = []
    for path, leaf in initial.items():
        if not is_matrix(path):
            continue
        assert leaf.dtype == np.float32
        assert 2.5 * init_std < np.abs(leaf).max() <= 3 * init_std * (1 + 1e-6), path
        expected = STANDARD_DEVIATION * init_std * math.sqrt(leaf.size)
        noise = math.sqrt((KURTOSIS - 1) / (4 * leaf.size))
        size = np.linalg.norm(leaf.astype(float))
        assert size == pytest.approx(expected, rel=4.5 * noise), path
        if leaf.size > 40_000:
            assert size == pytest.approx(expected, rel=0.01), path
        means.append(leaf.mean() / (init_std / math.sqrt(leaf.size)))
    assert max(map(abs, means)) < 4


def test_no_two_leaves_or_layers_share_numbers(initial):
    """A key used twice would show as equal leading entries."""
    heads = []
    for path, leaf in initial.items():
        if is_matrix(path):
            layers = leaf if path.startswith("blocks/") else leaf[None]
            heads += [tuple(layer.ravel()[:4].tolist()) for layer in layers]
    assert len(set(heads)) == len(heads) > 30


def test_initial_gains_gates_and_taps_are_identities(initial):
    for path, leaf in initial.items():
        if path.endswith("gain"):
            np.testing.assert_array_equal(leaf, 1, err_msg=path)
        if path.endswith("head_gate"):
            np.testing.assert_array_equal(leaf, 0, err_msg=path)
            assert jnp.all(2 * jax.nn.sigmoid(leaf) == 1)
        if path.endswith("taps"):
            x = np.random.default_rng(0).standard_normal((24, leaf.shape[-1])).astype(np.float32)
            segments = jnp.array([[0] * 9 + [1] * 10 + [-1] * 5])
            neighbours = conv.find_neighbours(segments, leaf.shape[1], jnp.float32)
            out = conv.short_conv(jnp.asarray(x), jnp.asarray(leaf[0]), neighbours)
            np.testing.assert_array_equal(out, x)


def test_numbers_of_a_layer_do_not_depend_on_the_depth(initial):
    deeper = initialise(dataclasses.replace(INIT_CONFIG, num_layers=3))
    for path, leaf in initial.items():
        expected = deeper[path][:2] if path.startswith("blocks/") else deeper[path]
        np.testing.assert_array_equal(leaf, expected, err_msg=path)


def test_initial_loss_is_that_of_guessing(initial):
    config = INIT_CONFIG
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (8, 24))
    beta = np.zeros((config.num_layers, config.num_experts))
    leaves = {path: leaf.astype(float) for path, leaf in initial.items()}
    result = plain.forward(leaves, beta, tokens, np.zeros_like(tokens), config)
    weights = np.ones(tokens.shape)
    weights[:, -1] = 0
    _, cross_entropy, _ = plain.loss(result.logits, tokens, weights)
    # The logits have a variance of D (s0 std / 2)^2 ~ 0.06, which costs half of that.
    assert abs(cross_entropy - math.log(config.vocab_size)) < 0.1
    lse = plain.log_sum_exp(result.logits).mean()
    assert lse - math.log(config.vocab_size) == pytest.approx(0.03, abs=0.01)


def test_convolutions_at_their_start_equal_none(initial):
    """With W taps at the identity and with one tap of 1 the model is the same function."""
    tokens = np.random.default_rng(1).integers(0, 100, (1, 24)).astype(np.int32)
    segments = np.array([[0] * 9 + [1] * 15], np.int32)
    logits = []
    for num_taps in (4, 1):
        config = dataclasses.replace(INIT_CONFIG, conv_taps=num_taps)
        leaves = {
            path: leaf[:, :num_taps] if path.endswith("taps") else leaf
            for path, leaf in initial.items()
        }
        params = unflatten_paths(transformer.abstract(config), leaves)
        beta = jnp.zeros((config.num_layers, config.num_experts))

        @quick_jit
        def run(params, beta, config=config):
            return transformer.logits(params, beta, tokens, segments, config)

        logits.append(np.asarray(run(params, beta)))
    np.testing.assert_array_equal(*logits)


def documents(case):
    """(row, slice) of every document of the case."""
    for row, segments in enumerate(case.segments):
        for segment in sorted(set(segments.tolist()) - {-1}):
            inside = np.flatnonzero(segments == segment)
            yield row, slice(inside[0], inside[-1] + 1)


def test_other_tokens_of_the_batch_leave_a_document_bitwise_alone(case, single_logits):
    """Five layers, five taps: whatever the other documents and the padding hold."""
    before = single_logits(case.tokens, case.segments)
    for row, inside in documents(case):
        tokens = (case.tokens + 1) % case.config.vocab_size
        tokens[row, inside] = case.tokens[row, inside]
        after = single_logits(tokens, case.segments)
        np.testing.assert_array_equal(after[row, inside], before[row, inside])
        assert not np.array_equal(after, before)


def test_later_tokens_leave_earlier_logits_bitwise_alone(case, single_logits):
    before = single_logits(case.tokens, case.segments)
    for position in range(1, case.tokens.shape[1]):
        tokens = case.tokens.copy()
        tokens[:, position:] = (tokens[:, position:] + 5) % case.config.vocab_size
        after = single_logits(tokens, case.segments)
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        assert np.all(np.any(after[:, position] != before[:, position], axis=-1))


def test_a_document_means_the_same_at_every_offset(case, single_logits):
    """Alone in a row, at each place where it fits; rotation is relative."""
    packed = single_logits(case.tokens, case.segments)
    length = case.tokens.shape[1]
    row, inside = 2, slice(3, 11)
    size = inside.stop - inside.start
    tolerance = 1e-5 * np.abs(packed[row, inside]).max()
    for offset in range(0, length - size + 1, 2):
        tokens, segments = np.zeros_like(case.tokens), np.full_like(case.segments, -1)
        place = slice(offset, offset + size)
        tokens[row, place], segments[row, place] = case.tokens[row, inside], 9
        moved = single_logits(tokens, segments)[row, place]
        np.testing.assert_allclose(moved, packed[row, inside], rtol=0, atol=tolerance)
