"""The moves of rows and their hand-written adjoints; the exchange on an axis of a vmap."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.vmapped import over_axes, quick_jit

from portolan.parallel.capacity import (
    Capacities,
    ExchangeShape,
    PooledCapacities,
    RoutingRule,
)
from portolan.parallel.routing import (
    Updates,
    count_assignments,
    dispatch_updates,
    plan,
    return_updates,
)
from portolan.parallel.transports.move import emulate_exchange, move, written_rows
from portolan.parallel.transports.pooled_wave import _dispatch
from portolan.parallel.transports.rows import combine, invert, permute, spread

TOKENS, SELECTED, ROWS, WIDTH = 5, 3, 11, 4
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def random_slots():
    """Slots of 15 assignments among 11 rows: some assignments and some rows have none."""
    slots = np.full(TOKENS * SELECTED, -1, np.int32)
    chosen = RNG.permutation(slots.size)[: ROWS - 3]
    slots[chosen] = RNG.permutation(ROWS)[: len(chosen)]
    return jnp.asarray(slots)


def check_adjoint(linear, x):
    """<J v, u> = <v, J^T u> for a linear function."""
    shape = jax.eval_shape(linear, x).shape
    u, v = normal(*shape), normal(*x.shape)

    @quick_jit
    def both(x, u, v):
        _, pull = jax.vjp(linear, x)
        return jnp.vdot(pull(u)[0], v), jnp.vdot(u, linear(v))

    np.testing.assert_allclose(*both(x, u, v), rtol=1e-5)


def test_invert_does_not_wrap():
    assert invert(jnp.array([2, -1, 0, -1]), 4).tolist() == [2, -1, 0, -1]


def test_spread_permute_and_combine_move_the_rows_that_the_maps_say():
    slots = random_slots()
    source = invert(slots, ROWS)
    x, back, weights = normal(TOKENS, WIDTH), normal(ROWS, WIDTH), normal(TOKENS, SELECTED)

    @quick_jit
    def run(x, back, weights):
        rows = spread(x, source, slots)
        return rows, combine(weights, back, slots, source), permute(rows, slots, source)

    spread_rows, combined, again = run(x, back, weights)
    rows, y = np.zeros((ROWS, WIDTH), np.float32), np.zeros((TOKENS, WIDTH), np.float32)
    x, back, weights, slots = map(np.asarray, (x, back, weights, slots))
    for j, slot in enumerate(slots):
        if slot >= 0:
            rows[slot] = x[j // SELECTED]
            y[j // SELECTED] += weights[j // SELECTED, j % SELECTED] * back[slot]
    np.testing.assert_array_equal(spread_rows, rows)
    np.testing.assert_allclose(combined, y, atol=1e-6)
    np.testing.assert_array_equal(again, np.where(slots[:, None] < 0, 0, rows[slots]))


def test_adjoints_of_the_moves_inside_a_shard():
    slots = random_slots()
    source = invert(slots, ROWS)
    back, weights = normal(ROWS, WIDTH), normal(TOKENS, SELECTED)
    check_adjoint(lambda x: spread(x, source, slots), normal(TOKENS, WIDTH))
    check_adjoint(lambda rows: permute(rows, slots, source), back)
    check_adjoint(lambda back: combine(weights, back, slots, source), back)
    check_adjoint(lambda weights: combine(weights, back, slots, source), weights)
    dweights = quick_jit(jax.grad(lambda w: combine(w, back, slots, source).sum()))(weights)
    assert (np.asarray(dweights).reshape(-1)[np.asarray(slots) < 0] == 0).all()


def exchange_problem(seed):
    """Counts of 4 shards and 8 experts with most (sender, expert) pairs empty, and a plan."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(9, (4, 12), p=[0.4, 0, 0.25, 0, 0, 0.2, 0, 0.05, 0.1]).astype(np.int32)
    counts = np.stack([count_assignments(row, 8) for row in ids])
    capacities = Capacities(ExchangeShape(4, 8, 12), RoutingRule("receiver", Fraction(1)))
    accepted = plan(counts, capacities).accepted
    assert (accepted == 0).mean() > 0.4 and (counts != accepted).any()
    return jnp.asarray(counts), jnp.asarray(accepted), capacities.chunk_buffer


@pytest.mark.parametrize("backwards", [False, True])
def test_emulated_exchange_and_its_plan_swap(backwards):
    counts, accepted, buffer = exchange_problem(1)
    sizes = (buffer, 12) if backwards else (12, buffer)
    operand, out, u = (
        normal(4, sizes[0], WIDTH),
        normal(4, sizes[1], WIDTH),
        normal(4, sizes[1], WIDTH),
    )
    functions = (return_updates, dispatch_updates)[:: 1 if backwards else -1]
    host = [[f(np.asarray(counts), np.asarray(accepted), s) for s in range(4)] for f in functions]
    updates, dual = (jax.tree.map(lambda *leaf: jnp.stack(leaf), *plans) for plans in host)

    expected = np.array(out)
    for s, plans in enumerate(host[0]):
        for segment, (start, send, first) in enumerate(zip(*plans[:3], strict=True)):
            target = expected[segment // 2]
            target[first : first + send] = operand[s, start : start + send]

    def emulate(operand, out, updates, dual):
        return emulate_exchange(operand, out, updates)

    def differentiate(function):
        """Rows moved and the gradients of operand and output, on every shard."""

        def shard(operand, out, updates, dual, u):
            moved, pull = jax.vjp(lambda a, b: function(a, b, updates, dual), operand, out)
            return moved, *pull(u)

        return quick_jit(over_axes(shard))(operand, out, updates, dual, u)

    by_plan, by_jax = differentiate(move), differentiate(emulate)
    np.testing.assert_array_equal(by_plan[0], expected)
    for mine, theirs in zip(by_plan, by_jax, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    written = (expected != np.asarray(out)).any(axis=-1)
    assert ((by_plan[2] == 0).all(axis=-1) == written).all() and written.any()
    # <J v, u> = <v, J^T u>: what operand and output give is linear in both.
    both = jnp.vdot(by_plan[1], operand) + jnp.vdot(by_plan[2], out)
    np.testing.assert_allclose(both, jnp.vdot(u, by_plan[0]), rtol=1e-5)


def test_header_of_a_pooled_payload_takes_no_gradient():
    """The dispatch is linear in the rows alone, and its adjoint exact."""
    shape, factor = ExchangeShape(4, 8, 12), Fraction(1)
    capacities = PooledCapacities(shape, factor, factor, 1)
    size = 4 * capacities.send.physical
    rows, u = normal(4, size, WIDTH), normal(4, size, WIDTH)
    codes = jnp.asarray(RNG.integers(0, 3, (4, size)), jnp.int32)

    def shard(rows, codes, u):
        (found, arrived), pull = jax.vjp(lambda rows: _dispatch(rows, codes, capacities), rows)
        zero = np.zeros(found.shape, jax.dtypes.float0)
        return found, arrived, *pull((zero, u))

    found, arrived, grad = quick_jit(over_axes(shard))(rows, codes, u)
    assert capacities.header_rows(WIDTH) == 1
    swapped = codes.reshape(4, 4, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(found, swapped)
    np.testing.assert_array_equal(
        arrived, rows.reshape(4, 4, -1, WIDTH).swapaxes(0, 1).reshape(rows.shape)
    )
    np.testing.assert_allclose(jnp.vdot(grad, rows), jnp.vdot(u, arrived), rtol=1e-5)


def test_mask_of_written_rows_is_exact_where_the_stock_rule_is_not():
    starts, sizes = jnp.array([0, 2, 2]), jnp.array([2, 0, 1])
    none = jnp.zeros(3, jnp.int32)
    written = written_rows(Updates(none, none, none, sizes), Updates(starts, none, none, none), 4)
    assert written.tolist() == [True, True, True, False]
    stock = jnp.zeros(5, jnp.int32).at[starts].set(1).at[starts + sizes].set(-1)
    assert (jnp.cumsum(stock)[:4] > 0).tolist() != written.tolist()


def test_mask_of_written_rows_on_random_segments():
    rng = np.random.default_rng(2)
    rows = 60
    mask = quick_jit(lambda received, dual: written_rows(received, dual, rows))
    for _ in range(100):
        sizes = np.where(rng.random(12) < 0.5, 0, rng.integers(1, 4, 12)).astype(np.int32)
        starts = (np.cumsum(rng.integers(0, 3, 12) + sizes) - sizes).astype(np.int32)
        expected = np.zeros(rows, bool)
        for start, size in zip(starts, sizes, strict=True):
            expected[start : start + size] = True
        order, zeros = rng.permutation(12), np.zeros(12, np.int32)
        received = Updates(zeros, zeros, zeros, sizes[order])
        assert (mask(received, Updates(starts[order], zeros, zeros, zeros)) == expected).all()
