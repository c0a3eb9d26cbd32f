"""From k fine centroids to K domains: divisive 2-means with a floor, then a hill climb.

Centroids are unit vectors u_i with weights w_i. A set A has the sum vector of w_i u_i, of length
r(A), and the loss L(A) = sum of w_i - r(A). Sums go through einsum without BLAS: their order, and
with it every decision, does not depend on threads.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portolan.data.mixing import fold
from portolan.errors import UsageError

SEEDS = (42, 43, 44)
SPLIT_RESTARTS, SPLIT_ROUNDS = 10, 20
MAX_SWEEPS = 1000
GAIN_EPSILON = 2.2e-16
Vectors = NDArray[np.float64]
Members = NDArray[np.int64]


@dataclass(frozen=True)
class Coarse:
    """Domain int64[k] of every fine centroid, and how it was found.

    Domains are numbered by their smallest fine centroid. losses: total loss after every split, then
    after every sweep of the hill climb, which `moves` counts the moves of.
    """

    domains: Members
    losses: tuple[float, ...]
    moves: tuple[int, ...]
    seed: int


class _NoSplit(Exception):
    """A set cannot be split into two children that both weigh enough."""


def _dot(vectors: Vectors, other: Vectors) -> Vectors:
    return np.einsum("nd,d->n", vectors, other)


def _sum(vectors: Vectors, weights: Vectors) -> Vectors:
    return np.einsum("n,nd->d", weights, vectors)


def _length(vector: Vectors) -> float:
    return math.sqrt(math.fsum(vector**2))


def loss_of(vectors: Vectors, weights: Vectors, members: Members) -> float:
    """L(A) of the set of `members`."""
    kept = weights[members]
    return math.fsum(kept) - _length(_sum(vectors[members], kept))


def total_loss(vectors: Vectors, weights: Vectors, domains: Members) -> float:
    """Sum of L over all domains."""
    return math.fsum(
        loss_of(vectors, weights, np.flatnonzero(domains == domain))
        for domain in range(int(domains.max()) + 1)
    )


def _draw(seed: int, split: int, restart: int, draw: int, chances: Vectors) -> int:
    """Index whose cumulative chance is the first above a uniform share of the total."""
    word = fold(fold(fold(fold(seed, split), restart), 0), draw)
    cumulative = np.cumsum(chances)
    target = (word >> 11) * 2.0**-53 * cumulative[-1]
    return min(int(np.searchsorted(cumulative, target, side="right")), len(chances) - 1)


def _repair(second: NDArray[np.bool_], nearer: Vectors, weights: Vectors, floor: float) -> None:
    """Move points to a child that is too light, those that lose least similarity first, in place.

    nearer: similarity to the mean of the second child minus that to the mean of the first.
    """
    for child in (False, True):
        inside = second == child
        weight, other = math.fsum(weights[inside]), math.fsum(weights[~inside])
        loss = nearer if not child else -nearer
        candidates = np.flatnonzero(~inside)
        for point in candidates[np.argsort(loss[candidates], kind="stable")]:
            if weight >= floor and weight > 0:
                break
            weight, other = weight + weights[point], other - weights[point]
            if other < floor or other <= 0:
                raise _NoSplit
            second[point] = child
        if weight < floor or weight <= 0:
            raise _NoSplit


def _try_split(
    vectors: Vectors, weights: Vectors, floor: float, seed: int, split: int, restart: int
) -> tuple[float, NDArray[np.bool_]]:
    """One restart of 2-means: L1 + L2, and which points are in the second child."""
    first = _draw(seed, split, restart, 0, weights)
    distance = np.maximum(1 - _dot(vectors, vectors[first]), 0)
    chances = weights * distance
    if not chances.any():
        raise _NoSplit
    means = [vectors[first], vectors[_draw(seed, split, restart, 1, chances)]]
    second = np.zeros(len(vectors), bool)
    for round_number in range(SPLIT_ROUNDS):
        nearer = _dot(vectors, means[1]) - _dot(vectors, means[0])
        moved = nearer > 0
        _repair(moved, nearer, weights, floor)
        if round_number and np.array_equal(moved, second):
            break
        second = moved
        for child in (0, 1):
            inside = second == bool(child)
            total = _sum(vectors[inside], weights[inside])
            if (length := _length(total)) > 0:
                means[child] = total / length
    children = (np.flatnonzero(~second), np.flatnonzero(second))
    return math.fsum(loss_of(vectors, weights, child) for child in children), second


def split_set(
    vectors: Vectors, weights: Vectors, members: Members, floor: float, seed: int, split: int
) -> tuple[Members, Members]:
    """Split a set in two, each of weight `floor` at least, with the least L1 + L2 of 10 restarts.

    Raises:
        _NoSplit: no restart found two such children.
    """
    best: tuple[float, NDArray[np.bool_]] | None = None
    for restart in range(SPLIT_RESTARTS if len(members) > 1 else 0):
        try:
            found = _try_split(vectors[members], weights[members], floor, seed, split, restart)
        except _NoSplit:
            continue
        if best is None or found[0] < best[0]:
            best = found
    if best is None:
        raise _NoSplit
    return members[~best[1]], members[best[1]]


def divide(
    vectors: Vectors, weights: Vectors, num_domains: int, floor: float, seed: int
) -> tuple[list[Members], list[float]]:
    """Split the set of largest loss until there are `num_domains`; the total loss at every step.

    Raises:
        UsageError: no set can be split any further.
    """
    everything = np.arange(len(vectors))
    sets = [everything]
    losses = [loss_of(vectors, weights, everything)]
    history = list(losses)
    while len(sets) < num_domains:
        order = sorted(range(len(sets)), key=lambda i: (-losses[i], int(sets[i][0])))
        for index in order:
            if math.fsum(weights[sets[index]]) < 2 * floor:
                continue
            try:
                children = split_set(vectors, weights, sets[index], floor, seed, len(sets) - 1)
            except _NoSplit:
                continue
            break
        else:
            raise UsageError(
                f"data.domains.count = {num_domains}: the documents fall into {len(sets)} domains "
                f"that hold {floor / math.fsum(weights):.2%} of the sample each, and no more",
                remedy=f"set data.domains.count = {len(sets)}, lower data.domains.minimum_share, "
                "or raise data.domains.fine",
            )
        sets[index : index + 1] = list(children)
        losses[index : index + 1] = [loss_of(vectors, weights, child) for child in children]
        history.append(math.fsum(losses))
    return sets, history


def climb(
    vectors: Vectors, weights: Vectors, domains: Members, floor: float
) -> tuple[Members, list[float], list[int]]:
    """Move single centroids to the domain that gains most until none does.

    A domain keeps weight `floor` at least. Sums are carried along inside a sweep and made anew
    before the next. Returns domains, and loss and number of moves of every sweep.
    """
    domains, num_domains = domains.copy(), int(domains.max()) + 1
    total = math.fsum(weights)
    losses, moves = [], []
    for _ in range(MAX_SWEEPS):
        inside = [np.flatnonzero(domains == domain) for domain in range(num_domains)]
        sums = np.stack([_sum(vectors[members], weights[members]) for members in inside])
        masses = np.array([math.fsum(weights[members]) for members in inside])
        lengths = np.sqrt(np.einsum("kd,kd->k", sums, sums))
        moved = 0
        for i, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
            source = domains[i]
            if masses[source] - weight < max(floor, GAIN_EPSILON * total):
                continue
            along = _dot(sums, vector)
            left = lengths[source] ** 2 + weight**2 - 2 * weight * along[source]
            joined = np.sqrt(lengths**2 + weight**2 + 2 * weight * along)
            gains = math.sqrt(max(left, 0.0)) + joined - lengths[source] - lengths
            gains[source] = -np.inf
            target = int(gains.argmax())
            if gains[target] <= GAIN_EPSILON * total:
                continue
            for domain, change in ((source, -weight), (target, weight)):
                sums[domain] += change * vector
                masses[domain] += change
                lengths[domain] = _length(sums[domain])
            domains[i] = target
            moved += 1
        losses.append(total - math.fsum(lengths))
        moves.append(moved)
        if not moved:
            break
    return domains, losses, moves


def number_domains(domains: Members) -> Members:
    """Renumber domains by their smallest fine centroid."""
    _, first, inverse = np.unique(domains, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def coarsen(vectors: Vectors, weights: Vectors, num_domains: int, minimum_share: float) -> Coarse:
    """Join unit vectors float64[k, d] with weights float64[k] into `num_domains` domains.

    Every domain holds `minimum_share` of the weight. Of three seeds the least total loss is kept.

    Raises:
        UsageError: that many domains of that weight do not exist.
    """
    floor = minimum_share * math.fsum(weights)
    found = [(divide(vectors, weights, num_domains, floor, seed), seed) for seed in SEEDS]
    (sets, history), seed = min(found, key=lambda item: (item[0][1][-1], item[1]))
    domains = np.empty(len(vectors), np.int64)
    for number, members in enumerate(sorted(sets, key=lambda members: int(members[0]))):
        domains[members] = number
    domains, losses, moves = climb(vectors, weights, domains, floor)
    return Coarse(number_domains(domains), (*history, *losses), tuple(moves), seed)
