"""The block that `benchmarks/train_step.py` compares with its peer, against dense experts."""

from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.model import kernels, placement, transformer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _every_expert(x_TR, weights_TK, experts, experts_TK):
    """Every expert computes every token; most of it is then multiplied by 0."""
    hot_TKE = experts_TK[..., None] == jnp.arange(len(experts.gate))
    weights_TE = jnp.sum(weights_TK[..., None] * hot_TKE, axis=1)
    gate, up = (jnp.einsum("tr,erf->tef", x_TR, one) for one in (experts.gate, experts.up))
    return jnp.einsum("tef,efr,te->tr", jax.nn.silu(gate) * up, experts.down, weights_TE)


DENSE = kernels.ExpertKernel(lambda experts_TK, *_: experts_TK, _every_expert)


@pytest.mark.slow
def test_float32_is_the_dense_model_in_float64(monkeypatch):
    """Loss to 1e-6 and gradients to 1e-5 of the largest entry of a leaf."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    block = import_module("train_step").PLAIN
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, block.vocab_size, (1, 256)).astype(np.int32)
    weights = np.ones((1, 256))
    weights[:, -1] = 0
    params = transformer.init(block, 0)

    def differentiate(dtype):
        """Traced inside, so that each call has its own kernel."""
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        beta = jnp.zeros((block.num_layers, block.num_experts), dtype)
        batch = transformer.Batch(jnp.asarray(tokens), jnp.zeros_like(tokens), jnp.asarray(weights))
        program = jax.jit(
            jax.value_and_grad(
                lambda params: transformer.loss(
                    params, beta, batch, block, compute_dtype=jnp.dtype(dtype)
                )[0]
            ),
            compiler_options=transformer.CPU_COMPILER_OPTIONS,
        )
        uses_numpy = "buffer_callback" in str(program.trace(cast).jaxpr)
        return jax.tree.map(np.asarray, program(cast)), uses_numpy

    (loss, gradients), uses_numpy = differentiate("float32")
    assert uses_numpy
    monkeypatch.setattr(placement, "choose_experts", lambda *_: DENSE)
    with jax.enable_x64(True):
        (dense_loss, dense_gradients), uses_numpy = differentiate("float64")
    assert not uses_numpy
    assert loss == pytest.approx(dense_loss, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        gradients,
        dense_gradients,
    )
