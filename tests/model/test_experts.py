"""The grouped experts against every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from portolan.model import experts, experts_batched
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


@pytest.mark.parametrize("balance", ["random", "equal", "two"])
def test_against_every_expert_on_every_token(balance):
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
        dispatch = experts.plan_dispatch(
            jnp.asarray(chosen, jnp.int32), jnp.asarray(valid), NUM_EXPERTS
        )
        return jnp.sum(experts.apply_experts(x, weights, GatedMlp(*mlp), dispatch) * mix)

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
