"""The grouped product in blocks against one numpy product per expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.vmapped import quick_jit

from portolan.model.kernels import assume_platform
from portolan.model.tree import GatedMlp
from portolan.parallel.transports.expert_function import GATED_MLP
from portolan.parallel.transports.grouped_matmul import (
    choose_block_rows,
    grouped_matmul,
    plan_blocks,
)


def test_block_plan_golden():
    plan = quick_jit(lambda sizes: plan_blocks(sizes, 9, 4))(jnp.array([5, 0, 3, 1]))
    assert plan.expert.tolist() == [0, 0, 2, 3, 3]
    assert plan.place.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 12]
    assert plan.num_used == 4
    places = np.flatnonzero(np.asarray(plan.row) >= 0)
    assert places.tolist() == plan.place.tolist()
    assert plan.row[places].tolist() == list(range(9))


@pytest.mark.parametrize(
    ("rows", "experts", "block"), [(9, 4, 8), (4096, 64, 16), (4096, 8, 128), (10**6, 2, 128)]
)
def test_block_rows(rows, experts, block):
    assert choose_block_rows(rows, experts) == block


@functools.cache
def differentiate(platform):
    """The product and both gradients, compiled once for all sizes."""

    def run(x, matrix, sizes, grad):
        y, pull = jax.vjp(lambda x, matrix: grouped_matmul(x, matrix, sizes), x, matrix)
        return y, *pull(grad)

    del platform
    return quick_jit(run)


SIZES = [
    (0, 1, 7, 8, 9),  # blocks of 8 rows
    (40, 0, 0, 0, 0),
    (0, 0, 0, 0, 40),
    (0, 0, 0, 0, 0),
    (3, 17, 0, 16, 4),
]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_one_product_per_expert(sizes, platform):
    num_rows, width, columns = 40, 6, 5
    assert choose_block_rows(num_rows, len(sizes)) == 8
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x[sum(sizes) :] = 0
    matrix = rng.standard_normal((len(sizes), width, columns)).astype(np.float32)
    grad = rng.standard_normal((num_rows, columns)).astype(np.float32)
    with assume_platform(platform):
        y, dx, dmatrix = differentiate(platform)(x, matrix, np.array(sizes, np.int32), grad)
    ends = np.cumsum(sizes)
    for e, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        np.testing.assert_allclose(y[mine], x[mine] @ matrix[e], atol=1e-5)
        np.testing.assert_allclose(dx[mine], grad[mine] @ matrix[e].T, atol=1e-5)
        np.testing.assert_allclose(dmatrix[e], x[mine].T @ grad[mine], atol=1e-5)
    assert (y[ends[-1] :] == 0).all()


def test_experts_in_rows_and_in_batches_agree_in_bfloat16():
    rng = np.random.default_rng(1)
    shapes = ((4, 16, 24), (4, 16, 24), (4, 24, 16))
    experts = GatedMlp(*(jnp.asarray(rng.standard_normal(s) / 4, jnp.bfloat16) for s in shapes))
    rows = jnp.asarray(rng.standard_normal((4, 10, 16)), jnp.bfloat16)

    def total(rows, experts, grouped):
        if grouped:
            out = GATED_MLP.grouped(rows.reshape(40, 16), jnp.full(4, 10, jnp.int32), experts, 40)
        else:
            out = GATED_MLP.batched(rows, experts).reshape(40, 16)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    grad = quick_jit(jax.grad(total, (0, 1), has_aux=True), static_argnums=2)
    sorted_rows, batches = (jax.tree.leaves(grad(rows, experts, form)) for form in (True, False))
    for a, b in zip(sorted_rows, batches, strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-6, atol=1e-6)
