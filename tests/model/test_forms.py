"""Each switch away from its default: tree, loss, gradient and router state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import golden, plain
from tests.model.forms import FORMS

from portolan.model import transformer
from portolan.model.tree import flatten_paths, parameter_shapes, unflatten_paths
from portolan.shapes import derive_shape

DIMENSIONS = {
    "vocab_size": 50,
    "sequence_length": 12,
    "window": 4,
    "num_experts": 8,
    "experts_per_token": 2,
    "qb_bins": 10_000,
}
REFERENCE = derive_shape("small", 64, **DIMENSIONS)
"""The golden model."""
STEP = 1e-6


def shape_of(name):
    return derive_shape("small", 64, **DIMENSIONS | FORMS[name].fields)


def beta_of(config):
    return golden.beta()[:, : config.num_balance_biases]


def run(config, leaves, beta, transform=lambda loss: loss):
    """`transform` of the loss function, called with float64 parameters, operation by operation:
    to compile 26 forms would take minutes, and their operations are nearly the same."""
    with jax.enable_x64(True), jax.disable_jit():
        params = unflatten_paths(transformer.abstract(config), leaves)
        batch = transformer.Batch(*map(jnp.asarray, golden.inputs()))

        def loss(params):
            return transformer.loss(
                params, jnp.asarray(beta), batch, config, compute_dtype=jnp.float64
            )

        return jax.tree.map(np.asarray, transform(loss)(params))


def plain_run(config, leaves):
    tokens, segments, weights = golden.inputs()
    result = plain.forward(leaves, beta_of(config), tokens, segments, config)
    return plain.loss(result.logits, tokens, weights)[0] + result.balance_loss, result


@pytest.mark.parametrize("name", FORMS)
def test_loss_and_router_against_the_plain_model(name):
    config = shape_of(name)
    leaves = golden.leaves(config)
    value, aux = run(config, leaves, beta_of(config))
    expected, result = plain_run(config, leaves)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(aux.new_beta, result.new_beta, rtol=0, atol=1e-12)
    metrics = flatten_paths(aux.router)
    assert metrics.keys() == result.metrics.keys()
    for metric, found in metrics.items():
        np.testing.assert_allclose(found, result.metrics[metric], rtol=1e-10, err_msg=metric)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_gradient_against_differences_of_the_plain_model(name):
    """All leaves at once, in one random direction."""
    config = shape_of(name)
    leaves = golden.leaves(config)
    gradient, _ = run(config, leaves, beta_of(config), lambda loss: jax.grad(loss, has_aux=True))
    gradient = flatten_paths(gradient)
    generator = np.random.default_rng(0)
    direction = {path: generator.standard_normal(leaf.shape) for path, leaf in leaves.items()}
    ahead, behind = (
        plain_run(config, {path: leaf + step * direction[path] for path, leaf in leaves.items()})[0]
        for step in (STEP, -STEP)
    )
    slope = sum(np.sum(gradient[path] * direction[path]) for path in leaves)
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * STEP), rtol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_form_changes_exactly_its_leaves(name):
    form, before = FORMS[name], parameter_shapes(REFERENCE)
    after = parameter_shapes(shape_of(name))
    assert set(before) - set(after) == form.removed
    assert set(after) - set(before) == form.added
    shared = set(before) & set(after)
    assert {path for path in shared if before[path] != after[path]} == form.reshaped


def test_the_reference_is_the_golden_model():
    assert REFERENCE == golden.CONFIG


@pytest.fixture(scope="module")
def fresh():
    return flatten_paths(transformer.init(REFERENCE, 7))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_leaves_the_other_leaves_bitwise_as_they_were(fresh, name):
    for path, leaf in flatten_paths(transformer.init(shape_of(name), 7)).items():
        if path not in FORMS[name].added | FORMS[name].reshaped:
            np.testing.assert_array_equal(leaf, fresh[path], err_msg=path)


def first_loss(config):
    leaves = flatten_paths(transformer.init(config, 7))
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    return float(run(config, leaves, 0 * beta_of(config))[0])


@pytest.mark.parametrize("name", ["no-conv", "conv-on-values", "conv-global", "no-head-gate"])
def test_what_starts_as_the_identity_changes_nothing_at_first(name):
    assert first_loss(shape_of(name)) == first_loss(REFERENCE)


def test_auxiliary_loss_of_a_balanced_router_is_its_weights():
    """With equal logits every expert has probability 1/E: sum f p = K/E whatever is chosen."""
    config = shape_of("softmax-aux")
    leaves = golden.leaves(config)
    leaves["blocks/moe/router"] *= 0
    value, aux = run(config, leaves, beta_of(config))
    added = value - aux.ce - 1e-4 * aux.mean_square_lse
    np.testing.assert_allclose(added, 0.01 * 1 + 1e-3 * np.log(8) ** 2, rtol=1e-12)
