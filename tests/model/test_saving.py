"""What the backward pass keeps: every policy gives the same bits, and carries reach the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.runs import CONFIG, batch

from portolan.errors import UsageError
from portolan.model import transformer
from portolan.train.step import refuse_overlap

LIMIT = "--xla_gpu_experimental_parallel_collective_overlap_limit"
POLICIES = [
    {"remat": "none"},
    {"remat": "experts"},
    {"remat": "layer"},
    {"remat": "layer", "offload_carries": True},
]


def derive(**policy):
    """Loss and gradient, traced for one policy."""
    rows = transformer.Batch(*map(jnp.asarray, batch(0)))
    beta = jnp.zeros((CONFIG.num_layers, CONFIG.num_experts))

    def loss(params):
        return transformer.loss(params, beta, rows, CONFIG, **policy)[0]

    return jax.value_and_grad(loss)


def test_policies_agree_to_the_bit():
    params = transformer.init(CONFIG, 0)
    found = [jax.tree.leaves(jax.jit(derive(**policy))(params)) for policy in POLICIES]
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_carries_travel_to_the_host_and_back():
    params = transformer.init(CONFIG, 0)
    kept, moved = (str(jax.make_jaxpr(derive(**policy))(params)) for policy in POLICIES[2:])
    assert "<host>" not in kept
    assert "MemorySpace.Host" in moved
    assert "MemorySpace.Device" in moved


def test_overlapping_collectives_are_refused():
    refuse_overlap(f"{LIMIT}=1")
    with pytest.raises(UsageError, match=f"{LIMIT}=2"):
        refuse_overlap(f"--xla_foo=3 {LIMIT}=2")
