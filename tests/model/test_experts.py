"""The kernels for a CPU against every expert on every token, and what each of them promises."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.tools import quick_jit, random_params, small_config

from portolan.model import experts_batched, experts_blas, kernels, transformer
from portolan.model.tree import GatedMlp

NUM_TOKENS, LATENT, INNER, NUM_EXPERTS, SELECTED = 150, 6, 5, 5, 2
NUM_VALID = 140


def choose(balance: str) -> np.ndarray:
    """Experts [T, K]: at random, in equal numbers, or all tokens on two of them."""
    generator = np.random.default_rng(4)
    if balance == "random":
        order = np.argsort(generator.random((NUM_TOKENS, NUM_EXPERTS)), axis=1)
        return order[:, :SELECTED]
    if balance == "equal":
        first = np.arange(NUM_TOKENS) % NUM_EXPERTS
        return np.stack([first, (first + 1) % NUM_EXPERTS], axis=1)
    return np.tile([3, 1], (NUM_TOKENS, 1))


@pytest.mark.parametrize("kernel", [kernels.GROUPED, kernels.SORTED], ids=["grouped", "sorted"])
@pytest.mark.parametrize("balance", ["random", "equal", "two"])
def test_against_every_expert_on_every_token(balance, kernel):
    """Values and gradients in float64, with padding tokens and, for "two", experts without any."""
    generator = np.random.default_rng(5)
    chosen = choose(balance)
    valid = np.arange(NUM_TOKENS) < NUM_VALID
    x, mix = generator.standard_normal((2, NUM_TOKENS, LATENT))
    weights = generator.random((NUM_TOKENS, SELECTED))
    mlp = [
        generator.standard_normal((NUM_EXPERTS, *shape))
        for shape in ((LATENT, INNER), (LATENT, INNER), (INNER, LATENT))
    ]

    def dense(x, weights, mlp):
        gate, up = (jnp.einsum("tr,erf->tef", x, leaf) for leaf in mlp[:2])
        down = jnp.einsum("tef,efr->ter", jax.nn.silu(gate) * up, mlp[2])
        one_hot = chosen[..., None] == jnp.arange(NUM_EXPERTS)
        share = jnp.sum(one_hot * weights[..., None], axis=1) * valid[:, None]
        return jnp.sum(jnp.einsum("te,ter->tr", share, down) * mix)

    def grouped(x, weights, mlp):
        dispatch = kernel.plan(jnp.asarray(chosen, jnp.int32), jnp.asarray(valid), NUM_EXPERTS)
        return jnp.sum(kernel.apply(x, weights, GatedMlp(*mlp), dispatch) * mix)

    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.asarray, (x, weights, mlp))
        expected = jax.value_and_grad(dense, (0, 1, 2))(*arguments)
        measured = jax.jit(jax.value_and_grad(grouped, (0, 1, 2)))(*arguments)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), measured, expected
        )


@pytest.mark.parametrize("balance", ["equal", "two"])
def test_what_does_not_fit_goes_to_blocks(balance):
    chosen = jnp.asarray(choose(balance), jnp.int32)
    valid = jnp.arange(NUM_TOKENS) < NUM_VALID
    dispatch = experts_batched.plan_batched(chosen, valid, NUM_EXPERTS)
    slots = experts_batched.num_slots(NUM_TOKENS, SELECTED, NUM_EXPERTS)
    per_expert = -(-(NUM_VALID - slots) // experts_batched.BLOCK_SLOTS)
    assert dispatch.num_blocks == {"equal": 0, "two": SELECTED * per_expert}[balance]


@pytest.mark.parametrize("shape", [(3, 2, 8), (64, 1, 2), (2048, 4, 32), (1024, 2, 32)])
def test_every_split_of_the_assignments_finds_room(shape):
    """The worst splits: everything on the first K experts, or one more block for each expert."""
    num_tokens, num_selected, num_experts = shape
    slots = experts_batched.num_slots(*shape)
    assert slots <= num_tokens
    bound = experts_batched.num_blocks_bound(num_tokens * num_selected, num_experts)
    concentrated = num_selected * -(-(num_tokens - slots) // experts_batched.BLOCK_SLOTS)
    assert concentrated <= bound
    rest = num_tokens * num_selected - num_experts * slots
    assert rest <= bound * experts_batched.BLOCK_SLOTS


@given(st.data())
def test_sorted_rows_are_the_valid_assignments_by_expert(data):
    """By expert, then by token; a permutation, whatever the split and the padding."""
    num_experts = data.draw(st.sampled_from([2, 3, 7, 255, 256, 300]), "experts")
    num_tokens = data.draw(st.integers(1, 40), "tokens")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    among = data.draw(st.integers(2, num_experts), "chosen experts")
    chosen = np.argsort(generator.random((num_tokens, among)), axis=1)[:, :2] + num_experts - among
    valid = generator.random(num_tokens) < data.draw(st.sampled_from([0, 0.5, 1]), "share valid")
    out = [np.empty(shape, np.int32) for shape in (chosen.shape, chosen.size, num_experts)]
    experts_blas._sort(None, out, chosen.astype(np.int32), valid)
    row, assignment, end = out
    order = [
        token * 2 + choice
        for expert in range(num_experts)
        for token, choice in zip(*np.nonzero((chosen == expert) & valid[:, None]), strict=True)
    ]
    assert assignment[: end[-1]].tolist() == order
    assert (
        end.tolist()
        == np.cumsum(np.bincount(chosen[valid].ravel(), minlength=num_experts)).tolist()
    )
    assert np.array_equal(row.ravel()[assignment], np.arange(chosen.size))


def large_problem(gate_scale=1.0):
    """x [T, R], weights [T, K], experts, chosen [T, K], which tokens are valid; float32."""
    generator = np.random.default_rng(7)
    shapes = ((NUM_TOKENS, 64), (NUM_EXPERTS, 64, 96), (NUM_EXPERTS, 64, 96), (NUM_EXPERTS, 96, 64))
    x, gate, up, down = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    weights = generator.random((NUM_TOKENS, SELECTED)).astype(np.float32)
    chosen = jnp.asarray(choose("random"), jnp.int32)
    valid = jnp.arange(NUM_TOKENS) < NUM_VALID
    mlp = GatedMlp(*map(jnp.asarray, (gate * gate_scale, up, down)))
    return jnp.asarray(x), jnp.asarray(weights), mlp, chosen, valid


def differentiate(x, weights, mlp, chosen, valid, wrap=lambda function: function):
    """Output of the sorted experts, and gradients of the sum of its squares."""

    @jax.jit
    def program(x, weights, mlp):
        def total(*arguments):
            dispatch = kernels.SORTED.plan(chosen, valid, NUM_EXPERTS)
            out = wrap(kernels.SORTED.apply)(*arguments, dispatch)
            return jnp.sum(out**2), out

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weights, mlp)

    return jax.tree.map(np.asarray, program(x, weights, mlp))


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def threads(monkeypatch):
    """Set the number of threads that share the experts."""

    def set_number(number):
        monkeypatch.setattr(experts_blas, "num_threads", lambda: number)
        experts_blas._helpers.cache_clear()

    yield set_number
    experts_blas._helpers.cache_clear()


def test_the_number_of_threads_changes_no_bit(threads):
    problem, found = large_problem(), []
    for number in (1, 2, 5, 9):
        threads(number)
        found.append(differentiate(*problem))
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("saved", [(), (experts_blas.SAVED_PRODUCTS,)], ids=["none", "products"])
def test_recomputing_sorted_experts_changes_no_bit(saved):
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    problem = large_problem()
    found = differentiate(*problem, wrap=lambda apply: jax.checkpoint(apply, policy=policy))
    assert_same_bits(found, differentiate(*problem))


def test_gates_far_from_zero_are_exact_and_silent():
    """exp overflows at -89: its sigmoid is 0, and numpy says nothing."""
    x, weights, mlp, chosen, valid = large_problem(gate_scale=1e3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (_, out), gradients = differentiate(x, weights, mlp, chosen, valid)
    dispatch = kernels.GROUPED.plan(chosen, valid, NUM_EXPERTS)
    expected = kernels.GROUPED.apply(x, weights, mlp, dispatch)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_what_is_not_a_number_stays_where_it_is():
    """A token that is NaN spoils its own row, not those of the tokens beside it."""
    x, weights, mlp, chosen, valid = large_problem()
    (_, out), _ = differentiate(x.at[3].set(jnp.nan), weights, mlp, chosen, valid)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_in_one_expert_ends_all_threads_and_is_told(number, threads):
    threads(number)
    running, lock = set(), threading.Lock()

    def start(rows):
        assert rows == 2

        def run(expert, mine):
            with lock:
                running.add(expert)
            try:
                if expert == 4:
                    raise MemoryError("no room for expert 4")
            finally:
                with lock:
                    running.remove(expert)

        return run

    with pytest.raises(MemoryError, match="expert 4"):
        experts_blas._share(np.arange(2, 34, 2), start)
    assert not running


def test_an_error_in_the_callback_reaches_the_caller(monkeypatch):
    def refuse(end_E, start):
        raise MemoryError("no room for the rows")

    monkeypatch.setattr(experts_blas, "_share", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no room for the rows"):
        differentiate(*large_problem())


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_the_model_with_sorted_experts_is_the_same(monkeypatch, remat):
    """Loss and gradients of a whole model in float64, padding included."""
    config = small_config()
    generator = np.random.default_rng(3)
    segments = np.array([[0] * 10 + [1] * 14, [0] * 4 + [1] * 15 + [-1] * 5], np.int32)
    weights = (segments >= 0).astype(np.float64)
    weights[:, -1] = 0
    tokens = generator.integers(0, config.vocab_size, segments.shape).astype(np.int32)
    found = []
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), random_params(config))
        beta = jnp.zeros((config.num_layers, config.num_balance_biases))
        batch = transformer.Batch(*map(jnp.asarray, (tokens, segments, weights)))
        for least in (0, kernels.BLAS_MIN_FLOPS):
            monkeypatch.setattr(kernels, "BLAS_MIN_FLOPS", least)

            @quick_jit
            def program(params):
                def loss(params):
                    return transformer.loss(
                        params, beta, batch, config, compute_dtype=jnp.dtype("float64"), remat=remat
                    )[0]

                return jax.value_and_grad(loss)(params)

            assert ("buffer_callback" in str(program.trace(params).jaxpr)) == (least == 0)
            found.append(program(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max()), *found
    )


def test_float32_at_the_size_of_the_benchmark_is_the_dense_sum():
    """Outputs to 1e-6 and gradients to 1e-5 of the largest entry, against float64 in numpy."""
    num_tokens, selected, num_experts, width = 512, 4, 32, 256
    generator = np.random.default_rng(8)
    x, dy = generator.standard_normal((2, num_tokens, width))
    gate, up, down = generator.standard_normal((3, num_experts, width, width)) / np.sqrt(width)
    weights = generator.random((num_tokens, selected))
    chosen = np.argsort(generator.random((num_tokens, num_experts)), axis=1)[:, :selected]
    out, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    dgate, dup, ddown = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    for e in range(num_experts):
        token, choice = np.nonzero(chosen == e)
        a, b, c = x[token] @ gate[e], x[token] @ up[e], weights[token, choice][:, None]
        sigma = 1 / (1 + np.exp(-a))
        inner, dinner = a * sigma * b, dy[token] @ down[e].T
        np.add.at(out, token, c * (inner @ down[e]))
        dweights[token, choice] = np.sum(dinner * inner, axis=1)
        da = c * dinner * b * sigma * (1 + a * (1 - sigma))
        db = c * dinner * a * sigma
        np.add.at(dx, token, da @ gate[e].T + db @ up[e].T)
        dgate[e], dup[e], ddown[e] = x[token].T @ da, x[token].T @ db, (c * inner).T @ dy[token]

    @jax.jit
    def program(x, weights, mlp):
        kernel = kernels.choose_experts(mlp, chosen.size)
        assert kernel is kernels.SORTED
        valid = jnp.ones(num_tokens, bool)
        dispatch = kernel.plan(jnp.asarray(chosen, jnp.int32), valid, num_experts)
        out, pull = jax.vjp(lambda *given: kernel.apply(*given, dispatch), x, weights, mlp)
        return out, pull(jnp.asarray(dy, jnp.float32))

    mlp = GatedMlp(*(jnp.asarray(leaf, jnp.float32) for leaf in (gate, up, down)))
    arguments = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32), mlp
    found, gradients = program(*arguments)
    np.testing.assert_allclose(found, out, rtol=0, atol=1e-6 * np.abs(out).max())
    expected = [dx, dweights, dgate, dup, ddown]
    for value, wanted in zip(jax.tree.leaves(gradients), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
