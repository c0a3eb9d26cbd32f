"""The accelerators' kernels against the CPU's, and which kernel is chosen where.

They run wherever the tests run; on a machine with a GPU they are compiled for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import NEEDS_GPU
from tests.model.tools import quick_jit, random_params, small_config

from portolan.model import attention_flash, kernels, softmax_attention, transformer
from portolan.model.tree import GatedMlp

NUM_TOKENS, NUM_EXPERTS, SELECTED, LATENT, INNER = 40, 5, 2, 8, 6
SEGMENTS = np.array([[0] * 10 + [1] * 14, [0] * 4 + [1] * 15 + [-1] * 5], np.int32)
TOLERANCES = {"float32": (1e-6, 1e-5), "bfloat16": (0.02, 0.05), "model": (1e-5, 1e-4)}
"""Of values and gradients, as shares of the largest entry; bfloat16 keeps 8 bits. `model`: of a
whole model in float32, where the gradients of some leaves are sums that nearly cancel."""
DTYPES = ("float32", "bfloat16")
WINDOW, SCALE = 7, 0.5
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason=NEEDS_GPU)


def compare(found, expected, kind):
    """Values and gradients, each against the largest entry of what is expected."""
    for tolerance, part, reference in zip(TOLERANCES[kind], found, expected, strict=True):
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(reference), strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def differentiate(function, arguments, shape):
    """Output and gradients of its product with one random array."""
    mix = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)

    def total(*arguments):
        out = function(*arguments)
        return jnp.sum(out.astype(jnp.float32) * mix), out

    with jax.default_matmul_precision("highest"):
        program = quick_jit(jax.value_and_grad(total, range(len(arguments)), has_aux=True))
        (_, out), gradient = program(*arguments)
    return out, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("balance", ["random", "one expert empty"])
def test_ragged_experts_are_the_grouped_ones(dtype, balance):
    generator = np.random.default_rng(0)
    usable = NUM_EXPERTS - (balance != "random")
    chosen = np.argsort(generator.random((NUM_TOKENS, usable)), axis=1)[:, :SELECTED]
    valid = jnp.arange(NUM_TOKENS) < NUM_TOKENS - 3
    shapes = [(LATENT, INNER), (LATENT, INNER), (INNER, LATENT)]
    draws = [(NUM_TOKENS, LATENT), (NUM_TOKENS, SELECTED)]
    draws += [(NUM_EXPERTS, *shape) for shape in shapes]
    arguments = [jnp.asarray(generator.standard_normal(shape), dtype) for shape in draws]

    def output(kernel):
        def apply(x, weights, *mlp):
            dispatch = kernel.plan(jnp.asarray(chosen, jnp.int32), valid, NUM_EXPERTS)
            return kernel.apply(x, weights, GatedMlp(*mlp), dispatch)

        return differentiate(apply, arguments, (NUM_TOKENS, LATENT))

    expected = output(kernels.GROUPED)
    found = output(kernels.RAGGED)
    compare(found, expected, dtype)
    assert not np.any(np.asarray(found[0], np.float32)[-3:])


def attend(dot_product, dtype):
    """Output and gradients of two key/value heads with three queries each."""
    generator = np.random.default_rng(0)
    shapes = ((2, 2, 24, 3, 8), (2, 2, 24, 8), (2, 2, 24, 8))
    q, k, v = (generator.standard_normal(shape) for shape in shapes)
    q, k = (x * np.sqrt(8) / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    segments = jnp.asarray(SEGMENTS)

    def apply(q, k, v):
        return dot_product(q, k, v, segments, jnp.asarray(WINDOW), SCALE)

    return differentiate(apply, [jnp.asarray(x, dtype) for x in (q, k, v)], shapes[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_s_attention_is_ours(dtype):
    def library(*arguments):
        return attention_flash.dot_product(*arguments, implementation="xla")

    compare(attend(library, dtype), attend(softmax_attention.dot_product, dtype), dtype)


@needs_gpu
def test_fused_attention_is_ours():
    found = attend(attention_flash.dot_product, "bfloat16")
    compare(found, attend(softmax_attention.dot_product, "bfloat16"), "bfloat16")


def whole_model(platform, dtype):
    """Loss and gradients of the small model with the kernels of a platform."""
    config = small_config()
    generator = np.random.default_rng(3)
    weights = (SEGMENTS >= 0).astype(np.float32)
    weights[:, -1] = 0
    tokens = generator.integers(0, config.vocab_size, SEGMENTS.shape)
    batch = transformer.Batch(*map(jnp.asarray, (tokens.astype(np.int32), SEGMENTS, weights)))
    beta = jnp.zeros((config.num_layers, config.num_balance_biases))

    def loss(params):
        return transformer.loss(params, beta, batch, config, compute_dtype=jnp.dtype(dtype))[0]

    with kernels.assume_platform(platform), jax.default_matmul_precision("highest"):
        return quick_jit(jax.value_and_grad(loss))(random_params(config))


@pytest.fixture(scope="module")
def cpu_model():
    return whole_model("cpu", "float32")


@pytest.mark.slow
def test_the_model_with_ragged_experts_is_the_same(cpu_model):
    compare(whole_model("tpu", "float32"), cpu_model, "model")


@needs_gpu
def test_the_model_on_a_gpu_in_bfloat16_is_close(cpu_model):
    loss, gradient = whole_model("cuda", "bfloat16")
    assert abs(loss - cpu_model[0]) < 0.02 * cpu_model[0]
    for found, expected in zip(*map(jax.tree.leaves, (gradient, cpu_model[1])), strict=True):
        norm = jnp.linalg.norm(expected)
        assert jnp.linalg.norm(found - expected) < 0.1 * norm


@pytest.mark.parametrize(
    ("platform", "dtype", "head_size", "length", "fused"),
    [
        ("cuda", "bfloat16", 128, 4096, True),
        ("cuda", "float32", 128, 4096, False),
        ("cuda", "bfloat16", 12, 4096, False),
        ("cuda", "bfloat16", 256, 4096, False),
        ("cuda", "bfloat16", 128, 4095, False),
        ("rocm", "bfloat16", 128, 4096, False),
        ("tpu", "bfloat16", 128, 4096, False),
        ("cpu", "bfloat16", 128, 4096, False),
    ],
)
def test_choice_by_platform_and_shape(platform, dtype, head_size, length, fused):
    with kernels.assume_platform(platform):
        chosen = kernels.choose_attention(jnp.dtype(dtype), head_size, length)
    module = attention_flash if fused else softmax_attention
    assert chosen is module.dot_product


@pytest.mark.parametrize(
    ("platform", "dtype", "tokens", "latent", "kernel"),
    [
        ("cpu", "float32", 1024, 128, kernels.SORTED),
        ("cpu", "float64", 1024, 128, kernels.SORTED),
        ("cpu", "float32", 1023, 128, kernels.GROUPED),
        ("cpu", "float32", 1024, 64, kernels.GROUPED),
        ("cpu", "bfloat16", 1024, 128, kernels.GROUPED),
        ("cuda", "float32", 1024, 128, kernels.GROUPED),
        ("rocm", "float32", 1024, 128, kernels.GROUPED),
        ("tpu", "float32", 1024, 128, kernels.RAGGED),
    ],
)
def test_choice_of_the_experts_kernel(platform, dtype, tokens, latent, kernel):
    """128 rows of 128 into 128 are the least that numpy computes."""
    shapes = ((32, latent, 128), (32, latent, 128), (32, 128, latent))
    mlp = GatedMlp(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    with kernels.assume_platform(platform):
        assert kernels.choose_experts(mlp, 4 * tokens) is kernel


def test_a_gpu_never_calls_numpy(monkeypatch):
    """Also where the kernels of a CPU are asked for, to compare them on that device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mlp = GatedMlp(*(jax.ShapeDtypeStruct((4, 256, 256), "float32"),) * 3)
    with kernels.assume_platform("cpu"):
        assert kernels.choose_experts(mlp, 4096) is kernels.GROUPED
