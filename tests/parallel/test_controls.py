"""Mistakes that an exchange could make, each caught by the comparison with the dense reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel import dense
from tests.parallel.vmapped import SCALE, over_axes, quick_jit

from portolan.parallel import routing
from portolan.parallel.exchange import make_exchange
from portolan.parallel.layout import MESH_AXES
from portolan.parallel.transports import cell, ragged
from portolan.parallel_settings import ParallelSettings

SHARDS, TOKENS, SELECTED, EXPERTS, WIDTH = 4, 10, 2, 8, 3
SCALES = np.arange(1, EXPERTS + 1, dtype=np.float32)
RNG = np.random.default_rng(4)
X = RNG.standard_normal((SHARDS, TOKENS, WIDTH)).astype(np.float32)
WEIGHTS = RNG.random((SHARDS, TOKENS, SELECTED)).astype(np.float32) + 0.5
IDS = np.minimum(RNG.geometric(0.3, WEIGHTS.shape) - 1, EXPERTS - 1).astype(np.int32)
VALID = RNG.random((SHARDS, TOKENS)) < 0.9
VALID[:, -1] = True


def make(transport, gate, tokens=TOKENS):
    settings = ParallelSettings(transport=transport, gate=gate, capacity_factor="1")
    exchange = make_exchange(
        settings,
        dict.fromkeys(MESH_AXES, 1) | {"expert": SHARDS},
        num_experts=EXPERTS,
        num_selected=SELECTED,
        tokens_per_shard=tokens,
        dtype="float32",
    )
    return dataclasses.replace(exchange, function=SCALE)


def compile_exchange(exchange):
    return quick_jit(over_axes(lambda *args: exchange(*args)))


compile_once = functools.cache(compile_exchange)


def run(exchange, x=X, weights=WEIGHTS, ids=IDS, valid=VALID, scales=SCALES, make=compile_once):
    y, drops = make(exchange)(x, weights, ids, valid, scales.reshape(SHARDS, -1))
    return np.asarray(y), [int(part[0]) for part in drops]


def kept_weights(exchange):
    """Weights [S, T, K] of what the rule keeps, 0 elsewhere."""
    ids = np.where(VALID[..., None], IDS, EXPERTS).reshape(SHARDS, -1)
    return WEIGHTS * dense.keep(ids, exchange.capacities).mask.reshape(IDS.shape)


def reference(weights):
    return (weights * SCALES[IDS]).sum(axis=-1, keepdims=True) * X


def equal(found, expected):
    return np.abs(found - expected).max() <= 1e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize(("transport", "gate"), [("ragged", "receiver"), ("cell", "cell")])
def test_the_exchange_is_right_without_a_mistake(transport, gate):
    exchange = make(transport, gate)
    weights = kept_weights(exchange)
    y, drops = run(exchange)
    assert equal(y, reference(weights))
    assert 0 < sum(drops[:2]) == ((weights == 0) & VALID[..., None]).sum()


def _changed(function, change):
    """Updates of a planning function after a change (updates, counts, accepted, shard)."""

    def planned(counts, accepted, shard):
        return change(function(counts, accepted, shard), counts, accepted, shard)

    return planned


def _swapped(updates, *_):
    return updates._replace(send=updates.receive, receive=updates.send)


def _receiver_side(updates, counts, accepted, shard):
    return updates._replace(out=routing.return_updates(counts, accepted, shard).start)


def _clipped(updates, counts, accepted, shard):
    mine = accepted[shard]
    return updates._replace(start=jnp.cumsum(mine) - mine)


def _not_cleared(operand, out, updates, dual):
    fill = 7.0 if out.shape[0] == TOKENS * SELECTED else 0.0
    return ragged_move(operand, out + fill, updates, dual)


def _wrapping(slots, num_rows):
    index = jnp.arange(slots.size, dtype=jnp.int32)
    return jnp.full(num_rows, -1, jnp.int32).at[slots].set(index)


ragged_move = ragged.move
MISTAKES = {
    "send and receive swapped": (
        ragged,
        "dispatch_updates",
        _changed(routing.dispatch_updates, _swapped),
    ),
    "offsets of the receiver's side": (
        ragged,
        "dispatch_updates",
        _changed(routing.dispatch_updates, _receiver_side),
    ),
    "starts of clipped counts": (
        ragged,
        "dispatch_updates",
        _changed(routing.dispatch_updates, _clipped),
    ),
    "returned rows not cleared": (ragged, "move", _not_cleared),
    "-1 in a scatter": (cell, "invert", _wrapping),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_plan_is_caught(name, monkeypatch):
    module, attribute, wrong = MISTAKES[name]
    exchange = make("cell", "cell") if module is cell else make("ragged", "receiver")
    monkeypatch.setattr(module, attribute, wrong)
    y, _ = run(exchange, make=compile_exchange)
    assert not equal(y, reference(kept_weights(exchange)))


def test_shifted_experts_and_renormalised_weights_are_caught():
    exchange = make("ragged", "receiver")
    expected, kept = reference(kept_weights(exchange)), kept_weights(exchange)
    assert not equal(run(exchange, scales=np.roll(SCALES, 1))[0], expected)
    share = WEIGHTS.sum(axis=-1, keepdims=True) / np.maximum(kept.sum(axis=-1, keepdims=True), 1e-9)
    assert not equal(run(exchange, weights=WEIGHTS * share)[0], expected)


@pytest.mark.parametrize("transport", ["ragged", "pooled"])
def test_padding_takes_no_capacity_and_changes_nothing_else(transport):
    """Six of ten tokens of every shard are valid: the same tokens without padding give the same."""
    valid = np.zeros((SHARDS, TOKENS), bool)
    for row in valid:
        row[np.sort(RNG.permutation(TOKENS)[:6])] = True
    gate = "none" if transport == "pooled" else "waterfill"
    padded, drops = run(make(transport, gate), valid=valid)
    short = [value[valid].reshape(SHARDS, 6, *value.shape[2:]) for value in (X, WEIGHTS, IDS)]
    compact, few = run(make(transport, gate, 6), *short, valid=np.ones((SHARDS, 6), bool))
    np.testing.assert_allclose(padded[valid].reshape(compact.shape), compact, atol=1e-6)
    assert (padded[~valid] == 0).all()
    assert drops[:2] == few[:2] and sum(few[:2]) > 0
    assert (drops[2], few[2]) == (SHARDS * 4 * SELECTED, 0)


def test_padding_has_no_gradient_and_its_ids_do_not_matter():
    exchange = make("ragged", "waterfill")
    ids = np.where(VALID[..., None], IDS, 10**6)

    def shard(x, weights, ids, valid, scales):
        def total(x, weights):
            return jnp.sum(exchange(x, weights, ids, valid, scales)[0] ** 2)

        return jax.grad(total, (0, 1))(x, weights)

    scales = SCALES.reshape(SHARDS, -1)
    grads = quick_jit(over_axes(shard))(X, WEIGHTS, ids, VALID, scales)
    for grad in grads:
        assert np.isfinite(grad).all() and (np.asarray(grad)[~VALID] == 0).all()
        assert (np.asarray(grad)[VALID] != 0).any()
