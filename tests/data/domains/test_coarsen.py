"""Coarsening: goldens, invariants, and a check of every single move by brute force."""

import itertools

import numpy as np
import pytest

from portolan.data.domains import coarsen as module
from portolan.data.domains.coarsen import (
    climb,
    coarsen,
    divide,
    loss_of,
    number_domains,
    total_loss,
)
from portolan.errors import UsageError

ANGLES = np.deg2rad([0, 10, 90, 100])
FOUR, ONES = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1), np.ones(4)


def make_centroids(k, dimension=8, seed=0):
    rng = np.random.default_rng(seed)
    vectors = (
        rng.normal(size=(k, dimension))
        + 2 * rng.normal(size=(6, dimension))[rng.integers(6, size=k)]
    )
    weights = rng.integers(1, 60, k).astype(float)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), weights


def slow_loss(vectors, weights, domains):
    """Total loss with plain sums."""
    return sum(
        weights[domains == d].sum()
        - np.linalg.norm((weights[domains == d, None] * vectors[domains == d]).sum(axis=0))
        for d in set(domains.tolist())
    )


def test_goldens():
    assert loss_of(FOUR, ONES, np.arange(4)) == pytest.approx(1.182336, abs=5e-7)
    split = total_loss(FOUR, ONES, np.array([0, 0, 1, 1]))
    assert split == pytest.approx(0.015221, abs=5e-7)
    assert total_loss(FOUR, ONES, np.array([0, 1, 0, 1])) == pytest.approx(1.171573, abs=5e-7)
    before = total_loss(FOUR, ONES, np.array([0, 0, 0, 1]))
    assert before - split == pytest.approx(0.678936, abs=5e-7)
    assert climb(FOUR, ONES, np.array([0, 0, 0, 1]), 0.04)[0].tolist() == [0, 0, 1, 1]
    assert coarsen(FOUR, ONES, 2, 0.01).domains.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_invariants(seed):
    vectors, weights = make_centroids(90, seed=seed)
    found = coarsen(vectors, weights, 8, 0.03)
    shares = np.bincount(found.domains, weights) / weights.sum()
    assert len(shares) == 8 and shares.min() >= 0.03
    tolerance = 1e-9 * weights.sum()
    assert (np.diff(found.losses) <= tolerance).all()
    assert abs(slow_loss(vectors, weights, found.domains) - found.losses[-1]) < tolerance
    assert abs(total_loss(vectors, weights, found.domains) - found.losses[-1]) < tolerance
    first = [np.flatnonzero(found.domains == d)[0] for d in range(8)]
    assert first == sorted(first)


def test_no_single_move_gains_after_the_climb():
    vectors, weights = make_centroids(40, seed=7)
    floor = 0.05 * weights.sum()
    found = coarsen(vectors, weights, 5, 0.05)
    for i, target in itertools.product(range(40), range(5)):
        moved = found.domains.copy()
        moved[i] = target
        if (np.bincount(moved, weights, 5) >= floor).all():
            assert slow_loss(vectors, weights, moved) >= found.losses[-1] - 1e-9 * weights.sum()


def test_two_domains_are_the_best_of_all_partitions():
    vectors, weights = make_centroids(11, dimension=3, seed=2)
    floor = 0.1 * weights.sum()
    best = min(
        slow_loss(vectors, weights, domains)
        for bits in range(1, 1 << 10)
        for domains in [np.array([bits >> i & 1 for i in range(11)])]
        if (np.bincount(domains, weights, 2) >= floor).all()
    )
    assert coarsen(vectors, weights, 2, 0.1).losses[-1] == pytest.approx(best, rel=1e-6)


def test_the_floor_is_repaired_or_refused():
    # Ten points together and one far away, which is too light for a domain of its own.
    vectors = np.stack([np.cos(np.r_[0:0.1:10j, 2]), np.sin(np.r_[0:0.1:10j, 2])], axis=1)
    weights = np.ones(11)
    sets, _ = divide(vectors, weights, 2, 3.0, 42)
    assert sorted(len(members) for members in sets) == [3, 8]
    with pytest.raises(UsageError, match="fall into 3 domains"):
        divide(vectors, weights, 4, 3.0, 42)
    with pytest.raises(UsageError, match="fall into 1 domains"):
        divide(np.repeat(vectors[:1], 5, axis=0), np.ones(5), 2, 0.5, 42)


def test_numbers_follow_the_smallest_centroid():
    assert number_domains(np.array([3, 1, 3, 0, 1])).tolist() == [0, 1, 0, 2, 1]
    assert module.SEEDS == (42, 43, 44)
