"""The optimizer on the real model: four golden updates, the ablation arms, the tree."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.model import transformer
from portolan.model.tree import abstract
from portolan.optim import hyperball
from portolan.optim.groups import resolve_groups
from portolan.optim.schedule import Rates, Schedule
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import derive_shape
from portolan.tree import flatten_paths, unflatten_paths

G0 = derive_shape(
    "small",
    64,
    vocab_size=50,
    sequence_length=12,
    window=4,
    num_experts=8,
    experts_per_token=2,
    qb_bins=10_000,
)
SETTINGS = OptimizerSettings(hyperball_scope="joint", ns_dtype="float32", beta2=0.95, epsilon=1e-15)
LOSSES = {
    "joint": (4.353684549, 3.359933632, 2.757875484, 2.389309503, 2.009221082),
    "per_expert": (4.353684549, 3.364187216, 2.759391088, 2.388729416, 2.012967173),
}
NORMS_AFTER_JOINT = {
    "blocks/attn/wq": 15.588063,
    "head/proj": 9.676471,
    "blocks/moe/router": 5.488100,
    "embed/table": 9.875339,
    "blocks/attn/head_gate": 5.531677,
    "blocks/attn/k_conv/taps": 5.699379,
}
EXPERTS_BEFORE = (5.537697, 5.526418, 5.497426)
EXPERTS_AFTER_JOINT = (5.538655, 5.528891, 5.493442)


def golden_params(dtype) -> transformer.Params:
    """Leaves drawn by an integer hash of leaf and entry index."""
    template = abstract(G0)
    leaves = {}
    for i, (path, leaf) in enumerate(flatten_paths(template).items()):
        j = np.arange(np.prod(leaf.shape), dtype=np.int64)
        residue = (1103 * j * j + 7919 * j + 104729 * (i + 1)) % 65521
        u = (2 * (residue / 65521) - 1).reshape(leaf.shape)
        name = path.rpartition("/")[2]
        if name == "gain":
            u = 1 + 0.1 * u
        elif name == "taps":
            u = 0.1 * u
            u[..., 0, :] += 1
        else:
            u = 0.3 * u
        leaves[path] = jnp.asarray(u, dtype)
    return unflatten_paths(template, leaves)


def golden_batch(dtype) -> transformer.Batch:
    b, t = np.mgrid[0:2, 0:12]
    segments = np.array([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3])
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    weights = np.pad(same, ((0, 0), (0, 1)))
    assert weights.sum() == 18
    tokens = (7 * b + 11 * t + 3 * t * t) % 50
    return transformer.Batch(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(segments, jnp.int32),
        jnp.asarray(weights, dtype),
    )


@functools.cache
def golden_gradient(dtype) -> Callable:
    """(params, beta) -> ((loss, aux), gradient) on the golden batch, compiled once a type."""
    batch = golden_batch(dtype)
    return jax.jit(
        jax.value_and_grad(
            lambda params, beta: transformer.loss(params, beta, batch, G0, compute_dtype=dtype),
            has_aux=True,
        )
    )


def train(settings: OptimizerSettings, rates: Sequence[Rates], dtype) -> tuple[list[float], dict]:
    """Losses before each update and after the last, and the leaves after it."""
    params = golden_params(dtype)
    layer, expert = np.mgrid[0:2, 0:8]
    beta = jnp.asarray(0.05 * ((3 * expert + 5 * layer) % 7), jnp.float32)
    shapes = {p: x.shape for p, x in flatten_paths(params).items()}
    table = resolve_groups(shapes, scope=settings.hyperball_scope, settings=settings)
    step = jax.jit(hyperball.build_step(table, settings))
    state = hyperball.init_state(params, table=table, settings=settings)
    losses = []
    for mine in rates:
        (loss, aux), grads = golden_gradient(dtype)(params, beta)
        params, state = step(grads, state, params, Rates(*(np.asarray(r, dtype) for r in mine)))
        beta = aux.new_beta
        losses.append(float(loss))
    losses.append(float(golden_gradient(dtype)(params, beta)[0][0]))
    return losses, flatten_paths(params)


def run_golden(scope: str, dtype, ns_dtype: str) -> tuple[list[float], dict]:
    settings = replace(SETTINGS, hyperball_scope=scope, ns_dtype=ns_dtype)
    return train(settings, [Rates(0.01, 0.002, Schedule(100).decay(t)) for t in range(4)], dtype)


@pytest.mark.parametrize("scope", ["joint", "per_expert"])
def test_four_updates(scope: str) -> None:
    before = flatten_paths(golden_params(jnp.float32))
    losses, after = run_golden(scope, jnp.float32, "float32")
    np.testing.assert_allclose(losses, LOSSES[scope], rtol=1e-5)
    gate = (
        np.linalg.norm(x["blocks/moe/experts/gate"][0, :3], axis=(1, 2)) for x in (before, after)
    )
    first, last = gate
    np.testing.assert_allclose(first, EXPERTS_BEFORE, rtol=1e-6)
    expected = EXPERTS_AFTER_JOINT if scope == "joint" else EXPERTS_BEFORE
    np.testing.assert_allclose(last, expected, rtol=2e-6)
    if scope == "joint":
        for path, norm in NORMS_AFTER_JOINT.items():
            assert np.linalg.norm(np.ravel(after[path])) == pytest.approx(norm, rel=2e-6), path


@pytest.mark.slow
def test_four_updates_in_float64() -> None:
    with jax.enable_x64(True):
        losses, _ = run_golden("joint", jnp.float64, "float64")
    np.testing.assert_allclose(losses, LOSSES["joint"], atol=2e-8)


def test_bfloat16_newton_schulz_stays_near() -> None:
    losses, _ = run_golden("joint", jnp.float32, "bfloat16")
    np.testing.assert_allclose(losses, LOSSES["joint"], atol=0.1)


def test_the_model_has_the_tree_that_the_groups_expect(shapes_of) -> None:
    for config in (G0, derive_shape("ladder", 6144, num_layers=48), derive_shape("micro", 96)):
        paths = {p: x.shape for p, x in flatten_paths(abstract(config)).items()}
        assert paths == shapes_of(config)
        resolve_groups(paths, scope="joint")


@pytest.mark.parametrize("matrix", ["adamh", "adamw"])
def test_ablation_arms_train(matrix: str) -> None:
    schedule, peak = Schedule(50, 5), 0.02 if matrix == "adamh" else 0.005
    rates = [
        Rates(*(r * schedule.factor(t) for r in (peak, 0.005)), schedule.decay(t))
        for t in range(50)
    ]
    losses, _ = train(replace(SETTINGS, matrix=matrix), rates, jnp.float32)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.5
