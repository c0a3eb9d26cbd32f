"""The golden model and a random one against the NumPy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model import golden, reference
from tests.model.tools import quick_jit

from portolan.model import attention, conv, norms, router, transformer
from portolan.model.tree import flatten_paths, unflatten_paths
from portolan.shapes import ModelConfig

DTYPES = [np.float32, np.float64]
DOUBLE = np.float64


def run(config, leaves, beta, inputs, dtype):
    """(loss, aux), gradient by path, and logits, all as NumPy float64."""
    with jax.enable_x64(dtype is DOUBLE):
        tree = transformer.abstract(config)
        params = unflatten_paths(tree, {k: v.astype(dtype) for k, v in leaves.items()})
        batch = transformer.Batch(*map(jnp.asarray, inputs))
        beta = jnp.asarray(beta, dtype)

        def loss(params):
            return transformer.loss(params, beta, batch, config, compute_dtype=jnp.dtype(dtype))

        def logits(params):
            return transformer.logits(
                params, beta, batch.tokens, batch.segments, config, compute_dtype=jnp.dtype(dtype)
            )

        out, gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))(params)
        logits = quick_jit(logits)(params)
        gradient = {k: np.asarray(v, DOUBLE) for k, v in flatten_paths(gradient).items()}
        return jax.tree.map(np.asarray, out), gradient, np.asarray(logits, DOUBLE)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "float64"])
def golden_run(request):
    out = run(golden.CONFIG, golden.leaves(), golden.beta(), golden.inputs(), request.param)
    return request.param, *out


def test_loss_beta_and_logits(golden_run):
    dtype, (loss, aux), _, logits = golden_run
    tolerance = {"rtol": 1e-5} if dtype is np.float32 else {"rtol": 0, "atol": 6e-11}
    figures = [loss, aux.ce, aux.mean_square_lse]
    expected = [golden.LOSS, golden.CROSS_ENTROPY, golden.MEAN_SQUARE_LSE]
    np.testing.assert_allclose(figures, expected, **tolerance)
    digits = 1e-5 if dtype is np.float32 else 6e-7
    np.testing.assert_allclose(aux.new_beta, golden.NEW_BETA, rtol=0, atol=digits)
    np.testing.assert_allclose(logits[0, 3, :4], golden.LOGITS, rtol=1e-5, atol=digits)


def test_gradient(golden_run):
    dtype, _, gradient, _ = golden_run
    size = {path: np.linalg.norm(leaf) for path, leaf in gradient.items()}
    total = np.sqrt(sum(value**2 for value in size.values()))
    tolerance = 1e-5 if dtype is np.float32 else 2e-9
    np.testing.assert_allclose(total, golden.GLOBAL_GRADIENT_NORM, rtol=tolerance)
    for path, expected in golden.GRADIENT_NORMS.items():
        np.testing.assert_allclose(size[path], expected, rtol=1e-5, atol=6e-7, err_msg=path)
    entry = gradient["blocks/moe/router"][0, 0, 0]
    np.testing.assert_allclose(entry, golden.ROUTER_GRADIENT_000, rtol=1e-5)


def layer(x, params, beta, is_global, context):
    """Hidden states after one layer, and its routing read off the public parts."""
    a = norms.gated_norm(x, params.attn_norm.gain, params.attn_gnorm.down, params.attn_gnorm.up)
    branch = attention.attend(a, params.attn, context, is_global, golden.CONFIG)
    middle = x + conv.short_conv(branch, params.attn_conv.taps, context.neighbours)
    m = norms.gated_norm(middle, params.mlp_norm.gain, params.mlp_gnorm.down, params.mlp_gnorm.up)
    routing = router.route(m @ params.moe.router, router.balance_bias(beta), 2)
    x, _ = transformer.block(x, params, beta, is_global, context, golden.CONFIG)
    return x, routing


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_and_selection(dtype):
    config = golden.CONFIG
    with jax.enable_x64(dtype is DOUBLE):
        params = golden.params(dtype)
        tokens, segments, _ = map(jnp.asarray, golden.inputs())
        tables = attention.rotary_tables(12, config, jnp.dtype(dtype))
        neighbours = conv.find_neighbours(segments, config.conv_taps, dtype)
        context = attention.Context(segments, neighbours, *tables)
        x = params.embed.table[tokens.reshape(-1)]
        gate = params.embed_gnorm
        x = norms.gated_norm(x, params.embed_norm.gain, gate.down, gate.up)
        step = quick_jit(layer)
        for index, is_global in enumerate(config.global_layers):
            block = jax.tree.map(lambda leaf, index=index: leaf[index], params.blocks)
            beta = jnp.asarray(golden.beta()[index], dtype)
            x, routing = step(x, block, beta, jnp.asarray(is_global), context)
            rows = np.asarray(x, DOUBLE).reshape(2, 12, -1)
            norm = np.linalg.norm(rows[0]), np.linalg.norm(rows[1, :9])
            np.testing.assert_allclose(norm, golden.HIDDEN_NORMS[index], rtol=1e-5)
            chosen = " ".join(f"{a}{b}" for a, b in np.asarray(routing.experts_TK[:7]))
            assert chosen == golden.SELECTED[index]
            weights = np.asarray(routing.weights_TK[0])
            np.testing.assert_allclose(weights, golden.WEIGHTS[index], rtol=0, atol=2e-6)


def test_reference_gives_the_golden_figures():
    p, (tokens, segments, weights) = golden.leaves(), golden.inputs()
    logits, states, beta, routings = reference.forward(
        p, golden.beta(), tokens, segments, golden.CONFIG
    )
    figures = reference.loss(logits, tokens, weights)
    expected = (golden.LOSS, golden.CROSS_ENTROPY, golden.MEAN_SQUARE_LSE)
    np.testing.assert_allclose(figures, expected, rtol=0, atol=6e-11)
    np.testing.assert_allclose(beta, golden.NEW_BETA, rtol=0, atol=6e-7)
    for layer, state in enumerate(states):
        norm = np.linalg.norm(state[0]), np.linalg.norm(state[1, :9])
        np.testing.assert_allclose(norm, golden.HIDDEN_NORMS[layer], rtol=0, atol=6e-7)
        chosen = " ".join("".join(map(str, routings[layer][0, t][0])) for t in range(7))
        assert chosen == golden.SELECTED[layer]


RANDOM = ModelConfig(
    vocab_size=37,
    sequence_length=17,
    width=48,
    num_layers=3,
    num_heads=12,
    head_dim=4,
    num_kv_heads_local=2,
    num_kv_heads_global=4,
    num_experts=7,
    experts_per_token=3,
    latent_width=20,
    expert_width=12,
    num_shared_experts=1,
    shared_width=28,
    gated_norm_rank=5,
    conv_taps=3,
    window=5,
    global_every=2,
    qk_multiplier=1.7,
    qb_bins=100,
)


def random_case():
    generator = np.random.default_rng(5)
    shapes = {
        path: leaf.shape for path, leaf in flatten_paths(transformer.abstract(RANDOM)).items()
    }
    leaves = {path: 0.3 * generator.standard_normal(shape) for path, shape in shapes.items()}
    tokens = generator.integers(0, RANDOM.vocab_size, (3, 17)).astype(np.int32)
    segments = np.array(
        [[0] * 17, [0] * 5 + [1] * 9 + [-1] * 3, [3] + [4] * 7 + [5] * 2 + [-1] * 7], np.int32
    )
    weights = generator.random((3, 17)).astype(np.float32) * (segments >= 0)
    weights[:, -1] = 0
    beta = 0.1 * generator.standard_normal((3, 7))
    return leaves, beta, (tokens, segments, weights)


@pytest.fixture(scope="module")
def random_run():
    leaves, beta, inputs = random_case()
    return run(RANDOM, leaves, beta, inputs, DOUBLE)


def test_random_model_and_its_gradient_against_the_reference(random_run):
    leaves, beta, (tokens, segments, weights) = random_case()
    (loss, aux), gradient, logits = random_run
    expected, _, new_beta, _ = reference.forward(leaves, beta, tokens, segments, RANDOM)
    valid = segments >= 0
    np.testing.assert_allclose(logits[valid], expected[valid], rtol=0, atol=1e-10)
    figures = reference.loss(expected, tokens, weights)
    np.testing.assert_allclose([loss, aux.ce, aux.mean_square_lse], figures, rtol=1e-11)
    np.testing.assert_allclose(aux.new_beta, new_beta, rtol=0, atol=1e-11)

    generator = np.random.default_rng(1)
    epsilon = 1e-6
    for path in (None, None, "blocks/moe/router", "blocks/attn/wv", "blocks/attn/k_conv/taps"):
        step = {
            name: generator.standard_normal(leaf.shape) * (path in (None, name))
            for name, leaf in leaves.items()
        }
        ends = []
        for sign in (1, -1):
            moved = {name: leaf + sign * epsilon * step[name] for name, leaf in leaves.items()}
            out = reference.forward(moved, beta, tokens, segments, RANDOM)[0]
            ends.append(reference.loss(out, tokens, weights)[0])
        slope = (ends[0] - ends[1]) / (2 * epsilon)
        expected_slope = sum(np.sum(gradient[name] * step[name]) for name in leaves)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-6, atol=1e-8)


def variant(dtype, remat):
    """The random model in another precision or with recomputed blocks, twice."""
    leaves, beta, inputs = random_case()
    tree = transformer.abstract(RANDOM)
    params = unflatten_paths(tree, {k: v.astype(np.float32) for k, v in leaves.items()})
    batch = transformer.Batch(*map(jnp.asarray, inputs))

    def loss(params, beta):
        return transformer.loss(params, beta, batch, RANDOM, compute_dtype=dtype, remat=remat)

    step = quick_jit(jax.value_and_grad(loss, has_aux=True))
    first, second = (step(params, jnp.asarray(beta, jnp.float32)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    return first


def test_recomputed_blocks_agree_and_repetition_is_exact(random_run):
    (expected, expected_aux), expected_gradient, _ = random_run
    (loss, aux), gradient = variant(jnp.float32, remat="layer")
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(aux.new_beta, expected_aux.new_beta, atol=1e-5)
    for path, leaf in flatten_paths(gradient).items():
        scale = np.abs(expected_gradient[path]).max()
        np.testing.assert_allclose(leaf, expected_gradient[path], rtol=0, atol=1e-4 * scale)


def test_bfloat16_stays_close(random_run):
    (expected, _), _, _ = random_run
    (loss, aux), gradient = variant(jnp.bfloat16, remat="none")
    assert abs(loss - expected) < 0.05 * expected
    assert aux.new_beta.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))
