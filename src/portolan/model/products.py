"""Products of activations with a matrix whose gradient suits the kernels of a CPU."""

import jax

from portolan.model.kernels import platform


@jax.custom_vjp
def project(x_TA: jax.Array, matrix_AB: jax.Array) -> jax.Array:
    """x matrix: [T, B].

    XLA gives a product of two matrices that both run along T to a slower library on a CPU
    (57 of 86 GFLOP/s, jax 0.10.2) unless one of them is transposed first, behind a barrier.
    """
    return x_TA @ matrix_AB


def _backward(saved, grad_TB):
    x_TA, matrix_AB = saved
    x_AT = x_TA.T
    if platform() == "cpu":
        x_AT = jax.lax.optimization_barrier(x_AT)
    return grad_TB @ matrix_AB.T, x_AT @ grad_TB


project.defvjp(lambda x, matrix: (x @ matrix, (x, matrix)), _backward)
