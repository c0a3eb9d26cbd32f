"""What a training step may hold in memory."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from portolan import accounting
from portolan.model import kernels, loss, transformer
from portolan.shapes import derive_shape
from portolan.train.step import Objective

ROWS, LENGTH = 64, 64
FACTOR = 2
MEASURED = {
    "narrow": ("small", 32, 64, 64, {}),
    "many experts": ("small", 64, 32, 128, {"num_experts": 32}),
    "large vocabulary": ("micro", 96, 8, 256, {"vocab_size": 4096}),
}
"""Family, width, rows, length, overrides."""


def arrays(jaxpr):
    """Shapes of all arrays that a program computes, in every loop and called function."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))
        ):
            if isinstance(parameter, ClosedJaxpr):
                yield from arrays(parameter.jaxpr)
            elif isinstance(parameter, Jaxpr):
                yield from arrays(parameter)


def abstract_batch(rows, length):
    """Shapes and types of a batch."""
    whole = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return transformer.Batch(whole, whole, jax.ShapeDtypeStruct(whole.shape, jnp.float32))


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_array_holds_all_logits_or_every_expert_on_every_token(platform, remat):
    """Neither [B, S, V] nor [tokens, E, F] exists, in whatever order of axes."""
    config = derive_shape(
        "small",
        64,
        vocab_size=4096,
        sequence_length=LENGTH,
        window=32,
        num_layers=2,
        num_experts=32,
    )
    tokens = ROWS * LENGTH
    inner = min(config.latent_width, config.expert_width)
    forbidden = min(tokens * config.vocab_size, tokens * config.num_experts * inner)
    params = transformer.abstract(config)
    assert max(leaf.size for leaf in jax.tree.leaves(params)) < forbidden
    beta = jax.ShapeDtypeStruct((config.num_layers, config.num_balance_biases), jnp.float32)
    objective = Objective(config, jnp.dtype("float32"), 1e-4, remat)
    with kernels.assume_platform(platform):
        program = jax.make_jaxpr(objective.gradients)(params, beta, abstract_batch(ROWS, LENGTH))
    found = sorted(arrays(program.jaxpr), key=math.prod)
    assert len(found) > 1000
    assert math.prod(found[-1]) < forbidden, found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MEASURED)
def test_the_planned_memory_of_gradients_is_the_compiler_s(shape):
    """What the plan states, within a factor of 2 of what the compiled program reserves."""
    family, width, rows, length, overrides = MEASURED[shape]
    config = derive_shape(family, width, sequence_length=length, window=length // 2, **overrides)
    planned = accounting.memory_bytes(config, rows, remat="none", on_accelerator=False)
    objective = Objective(config, jnp.dtype("float32"), 1e-4, "none")
    params = transformer.abstract(config)
    beta = jax.ShapeDtypeStruct((config.num_layers, config.num_balance_biases), jnp.float32)
    options = transformer.CPU_COMPILER_OPTIONS | {"xla_backend_optimization_level": 0}
    program = jax.jit(objective.gradients, compiler_options=options)
    measured = program.lower(params, beta, abstract_batch(rows, length)).compile()
    memory = measured.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(planned.parameters, rel=0.25)
    assert memory.output_size_in_bytes == pytest.approx(planned.gradients, rel=0.25)
    ratio = memory.temp_size_in_bytes / planned.gradient_temporaries
    assert 1 / FACTOR < ratio < FACTOR, f"measured {memory.temp_size_in_bytes}, {planned}"


def test_blocks_of_logits_are_planned_as_they_are_computed():
    assert accounting.CPU_LOGITS_ENTRIES == loss.CPU_BLOCK_ENTRIES
    assert accounting.ACCELERATOR_LOGITS_ENTRIES == loss.BLOCK_ENTRIES


def test_remat_lowers_the_plan_in_order():
    config = derive_shape("ladder", 768)
    peaks = [
        accounting.memory_bytes(config, 8, remat=remat, on_accelerator=True).saved_activations
        for remat in ("none", "experts", "layer")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
