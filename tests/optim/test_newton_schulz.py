"""Newton-Schulz against golden values, its scalar map and a matrix-by-matrix reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.optim.newton_schulz import (
    COEFFICIENTS,
    cpu_chunk,
    newton_schulz,
    orthogonalise_leaves,
    plan_stacks,
)


def reference(u: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    """Five steps as written, one float64 matrix, any orientation."""
    x = np.asarray(u, np.float64)
    x = x / (np.linalg.norm(x) + eps)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def test_golden_two_by_three() -> None:
    gradient = jnp.asarray([[1.0, 2, 3], [4, 5, 7]])
    got = newton_schulz(gradient, dtype="float32")
    expected = [[-0.683753, 0.259944, 0.661157], [0.690382, 0.456115, 0.530065]]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    with jax.enable_x64(True):
        precise = newton_schulz(jnp.asarray(np.asarray(gradient), jnp.float64), dtype="float64")
        np.testing.assert_allclose(precise, expected, atol=5.1e-7)
        singular = np.linalg.svd(np.asarray(precise), compute_uv=False)
    np.testing.assert_allclose(singular, [0.986610, 0.982066], atol=5.1e-7)
    assert np.linalg.norm(precise) == pytest.approx(1.392068, abs=5e-7)


@pytest.mark.parametrize(
    ("s", "expected"),
    [
        (1, 0.978346),
        (0.5, 0.985869),
        (0.1, 1.019050),
        (0.02, 1.018771),
        (0.01, 1.018025),
        (0.005, 1.111505),
        (0.002, 0.852461),
        (0.001, 0.474982),
        (1e-4, 0.0492568),
    ],
)
def test_scalar_map(s: float, expected: float) -> None:
    rest = np.sqrt(1 - s * s)
    diagonal = jnp.diag(jnp.asarray([s, rest], jnp.float32))
    assert newton_schulz(diagonal, dtype="float32")[0, 0] == pytest.approx(expected, rel=2e-5)
    if s == 1:
        vector = newton_schulz(jnp.full((1, 1), 3.7), dtype="float32")
        assert vector[0, 0] == pytest.approx(expected, rel=1e-6)


def test_bounds_of_the_scalar_map() -> None:
    s = np.concatenate([np.geomspace(1e-8, 0.01, 20_000), np.linspace(0.01, 1, 20_000)])
    p = s.copy()
    for a, b, c in COEFFICIENTS:
        p = a * p + b * p**3 + c * p**5
    assert p.max() <= 1.1451
    inside = p[s >= 0.01]
    assert inside.min() >= 0.9777
    assert inside.max() <= 1.0318
    assert p[0] / s[0] == pytest.approx(492.75, abs=0.01)


def test_gaussian_singular_values() -> None:
    gaussian = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    out = orthogonalise_leaves(
        {"w": jnp.asarray(gaussian)}, lambda x: newton_schulz(x, dtype="float32")
    )["w"]
    singular = np.linalg.svd(np.asarray(out), compute_uv=False)
    assert singular.min() > 0.977
    assert singular.max() < 1.032


def test_zeros_stay_exactly_zero() -> None:
    rng = np.random.default_rng(1)
    stack = rng.normal(size=(3, 6, 9)).astype(np.float32)
    stack[0] = 0
    stack[1, 2] = 0
    stack[2, :, 5:] = 0
    for dtype in ("float32", "bfloat16"):
        got = np.asarray(newton_schulz(jnp.asarray(stack), dtype=dtype), np.float32)
        assert not got[0].any()
        assert not got[1, 2].any()
        assert not got[2, :, 5:].any()
        assert np.isfinite(got).all()


def test_leaves_share_stacks_and_keep_their_orientation() -> None:
    rng = np.random.default_rng(2)
    shapes = {
        "a": (2, 8, 4),
        "b": (3, 4, 8),
        "c": (4, 8),
        "d": (2, 3, 4, 8),
        "e": (5, 5),
        "f": (7, 1),
    }
    leaves = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    assert [(p.rows, p.columns, p.paths) for p in plan_stacks(shapes)] == [
        (4, 8, ("a", "b", "c", "d")),
        (5, 5, ("e",)),
        (1, 7, ("f",)),
    ]
    num_calls = 0

    def iterate(x: jax.Array) -> jax.Array:
        nonlocal num_calls
        num_calls += 1
        return newton_schulz(x, dtype="float32", chunk=4)

    got = orthogonalise_leaves({k: jnp.asarray(v) for k, v in leaves.items()}, iterate)
    assert num_calls == 3
    for name, leaf in leaves.items():
        rows, columns = leaf.shape[-2:]
        for mine, u in zip(
            np.asarray(got[name]).reshape(-1, rows, columns),
            leaf.reshape(-1, rows, columns),
            strict=True,
        ):
            expected = reference(u) * max(1, columns / rows) ** 0.5
            np.testing.assert_allclose(mine, expected, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 3, 4, 12, 100])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    stack = jnp.asarray(np.random.default_rng(3).normal(size=(12, 8, 8)), jnp.float32)
    whole = newton_schulz(stack, dtype="float32")
    np.testing.assert_allclose(
        newton_schulz(stack, dtype="float32", chunk=chunk), whole, atol=1e-6, rtol=1e-5
    )


def test_chunk_size_is_a_divisor_when_one_is_near() -> None:
    assert cpu_chunk(384, 32, 32) == 24
    assert cpu_chunk(384, 48, 48) == 8
    assert cpu_chunk(8, 64, 64) == 4
    assert cpu_chunk(97, 32, 32) == 24
    assert cpu_chunk(5, 8, 8) == 5
    assert cpu_chunk(3, 10_000, 10_000) == 1


def test_bfloat16_points_the_same_way() -> None:
    gaussian = jnp.asarray(np.random.default_rng(4).normal(size=(4, 24, 64)), jnp.float32)
    coarse = np.asarray(newton_schulz(gaussian, dtype="bfloat16"))
    assert coarse.dtype == jnp.bfloat16
    fine = np.asarray(newton_schulz(gaussian, dtype="float32"))
    coarse = coarse.astype(np.float32)
    cosine = (coarse * fine).sum() / np.linalg.norm(coarse) / np.linalg.norm(fine)
    assert cosine > 0.999
    assert not np.array_equal(coarse, fine)
