"""The product with a matrix of the model and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np

from portolan.model.products import project


def _mixed(product, mix):
    return lambda x, matrix: jnp.sum(mix * product(x, matrix))


def test_the_derivative_is_that_of_the_plain_product():
    """In float64, against numpy."""
    generator = np.random.default_rng(0)
    x, matrix, mix = (generator.standard_normal(shape) for shape in ((7, 5), (5, 3), (7, 3)))
    with jax.enable_x64(True):
        value, (dx, dmatrix) = jax.jit(jax.value_and_grad(_mixed(project, mix), (0, 1)))(x, matrix)
    np.testing.assert_allclose(value, np.sum(mix * (x @ matrix)), rtol=1e-12)
    np.testing.assert_allclose(dx, mix @ matrix.T, rtol=1e-12)
    np.testing.assert_allclose(dmatrix, x.T @ mix, rtol=1e-12)


def test_no_product_of_the_derivative_runs_along_the_rows_of_both():
    """XLA's faster library for a CPU does not take those."""
    x, matrix, mix = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (64, 32), (512, 32))
    )

    def contractions(product):
        gradient = jax.jit(lambda x, m, mix: jax.grad(_mixed(product, mix), (0, 1))(x, m))
        text = gradient.lower(x, matrix, mix).compile().as_text()
        return text.count("lhs_contracting_dims={0}, rhs_contracting_dims={0}")

    assert contractions(jnp.matmul) == 1
    assert contractions(project) == 0
