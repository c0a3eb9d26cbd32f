"""Predicted drops: the table of parallel.md 6.7, the exact pooled gate, recorded statistics."""

from fractions import Fraction

import numpy as np
import pytest

from portolan.errors import UsageError
from portolan.parallel.capacity import ExchangeShape, PooledCapacities, RoutingRule
from portolan.parallel.planner.drops import (
    Skew,
    draw_counts,
    fit_expert_skew,
    pooled_drops,
    simulate_drops,
)
from portolan.parallel.pooled import plan_pooled

FACTOR = Fraction("1.15")
PUBLIC = ExchangeShape(64, 384, 524_288)
RULE = RoutingRule("receiver", FACTOR, num_chunks=2)
NAMES = ("cell", "pooled, sender", "pooled, receiver", "receiver Q2", "per expert")
TABLE = {
    (0.1, 0.2): (3.87, 0.23, 0.36, 0.004, 0.39),
    (0.1, 0.4): (11.0, 2.13, 0.34, 0.01, 0.66),
    (0.2, 0.2): (6.03, 0.73, 2.87, 0.86, 3.19),
}
"""Per cent by expert skew and sender skew, at capacity 1.15, 3 waves, 2 chunks."""


@pytest.mark.parametrize("skews", TABLE)
def test_the_published_table_lies_within_the_noise_of_one_layer(skews):
    (row,) = simulate_drops(
        PUBLIC, RULE, [Skew(*skews)], num_waves=3, factors=(FACTOR,), num_draws=40
    )
    for name, published in zip(NAMES, TABLE[skews], strict=True):
        allowed = 2.5 * 100 * row.spread[name] + 0.005
        assert 100 * row.mean[name] == pytest.approx(published, abs=allowed), name
    if skews == (0.2, 0.2):
        spread = 100 * row.spread["receiver Q1"]
        assert 100 * row.mean["receiver Q1"] == pytest.approx(0.21, abs=2.5 * spread)
    assert row.mean["waterfill G3"] == pytest.approx(row.mean["receiver Q2"], rel=0.02, abs=1e-5)


def test_the_same_seed_gives_the_same_rates_and_more_room_drops_less():
    shape = ExchangeShape(8, 32, 4096)
    first, second = (
        simulate_drops(shape, RULE, [Skew(0.3, 0.3)], num_waves=2, num_draws=5) for _ in range(2)
    )
    assert first == second
    for name in first[0].mean:
        rates = [row.mean[name] for row in first]
        assert rates == sorted(rates, reverse=True), name
    other = simulate_drops(shape, RULE, [Skew(0.3, 0.3)], num_waves=2, num_draws=5, seed=1)
    assert other != first


def test_pooled_counts_give_the_rates_of_the_exact_gate():
    shape = ExchangeShape(4, 16, 2000)
    capacities = PooledCapacities(shape, Fraction("1.1"), Fraction("1.1"), 2)
    rng = np.random.default_rng(0)
    exact, simulated = [], []
    for _ in range(60):
        counts = draw_counts(shape, Skew(0.2, 0.3), rng)
        ids = np.stack([rng.permutation(np.repeat(np.arange(16), row)) for row in counts])
        plan = plan_pooled(ids, capacities)
        exact.append(np.array(plan.dropped(ids < 16)) / ids.size)
        simulated.append(pooled_drops(counts, capacities, rng))
    for side in range(2):
        expected = np.mean([one[side] for one in exact])
        found = np.mean([one[side] for one in simulated])
        assert found == pytest.approx(expected, rel=0.05)
        assert expected > 0.002


@pytest.mark.parametrize("skew", [0.05, 0.2, 0.6])
def test_skew_is_recovered_from_the_entropy_of_the_loads(skew):
    rng = np.random.default_rng(3)
    shape = ExchangeShape(4, 256, 50_000)
    found = []
    for _ in range(20):
        load = draw_counts(shape, Skew(skew, 0.0), rng).sum(axis=0)
        share = load / load.sum()
        entropy = -(share * np.log(share)).sum()
        found.append(fit_expert_skew(entropy, 256, load.sum() / 256))
    assert np.mean(found) == pytest.approx(skew, rel=0.05)
    assert fit_expert_skew(np.log(256), 256, 100) == 0


def test_too_large_a_shape_is_refused():
    with pytest.raises(UsageError, match="too many to simulate"):
        draw_counts(ExchangeShape(1024, 8192, 1024), Skew(0.1, 0.1), np.random.default_rng(0))
