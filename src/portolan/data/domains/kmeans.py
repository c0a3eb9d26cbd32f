"""Spherical k-means in exact arithmetic: its result depends on no thread, shard or BLAS.

Rows are int8, centroids are rounded to int16. Products are taken in float32; a row whose best
centroid is not clear of the rest by more than the error bound of that product is decided again in
float64, where such products are exact integers (127 * 32767 * 1024 < 2^53). Sums are int64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from scipy import sparse

from portolan.data.embedding.quantization import step_size
from portolan.errors import PortolanError, UsageError

CENTROID_SCALE = 32767
BLOCK_PRODUCTS, MAX_BLOCK_ROWS = 1 << 24, 1 << 13
SUM_BLOCK_ROWS = 1 << 14
ROUNDING_ALLOWANCE = 1e-5
MAX_INT64 = 1 << 63
Codes = NDArray[np.int8]
Centroids = NDArray[np.int16]


@dataclass(frozen=True)
class FineClusters:
    """The best of some restarts.

    centroids int16[k, d] of length 32767; losses: J after every assignment; restart: its number.
    """

    centroids: Centroids
    losses: tuple[float, ...]
    restart: int


def assign(codes: Codes, centroids: Centroids) -> NDArray[np.int32]:
    """Index int32[n] of the centroid with the largest product, the lowest one of equals.

    Memory: 64 MiB of products at a time.
    """
    wide, exact = centroids.astype(np.float32), centroids.astype(np.float64)
    longest = math.sqrt(np.einsum("kd,kd->k", exact, exact).max())
    unit = codes.shape[1] * 2.0**-24
    bound = 2 * unit / (1 - unit) * longest
    labels, unclear = np.empty(len(codes), np.int32), [np.zeros(0, np.int64)]
    # The product of few rows is slow: it arranges the centroids anew each time.
    rows = min(MAX_BLOCK_ROWS, max(64, BLOCK_PRODUCTS // len(centroids)))
    for begin in range(0, len(codes), rows):
        block = codes[begin : begin + rows].astype(np.float32)
        products = block @ wide.T
        best = products.argmax(axis=1)
        lengths = np.sqrt(np.einsum("nd,nd->n", block, block))
        every = np.arange(len(block))
        highest = products[every, best]
        products[every, best] = -np.inf
        margin = highest - products.max(axis=1, initial=-np.inf)
        is_unclear = margin <= np.float32(1.001 * bound) * lengths
        unclear.append(begin + np.flatnonzero(is_unclear))
        labels[begin : begin + rows] = best
    again = np.concatenate(unclear)
    for part in (again[begin : begin + rows] for begin in range(0, len(again), rows)):
        labels[part] = (codes[part].astype(np.float64) @ exact.T).argmax(axis=1)
    return labels


def products_with(codes: Codes, centroids: Centroids, labels: NDArray[np.int32]) -> NDArray:
    """Exact product int64[n] of every row with its centroid."""
    result = np.empty(len(codes), np.int64)
    for begin in range(0, len(codes), SUM_BLOCK_ROWS):
        part = slice(begin, begin + SUM_BLOCK_ROWS)
        result[part] = np.einsum(
            "nd,nd->n", codes[part], centroids[labels[part]], dtype=np.int64, casting="unsafe"
        )
    return result


def cluster_sums(codes: Codes, labels: NDArray[np.int32], k: int) -> NDArray[np.int64]:
    """Sum int64[k, d] of the rows of each cluster."""
    sums = np.zeros((k, codes.shape[1]), np.int64)
    for begin in range(0, len(codes), SUM_BLOCK_ROWS):
        block = codes[begin : begin + SUM_BLOCK_ROWS].astype(np.int32)
        places = labels[begin : begin + SUM_BLOCK_ROWS]
        bounds = np.arange(len(block) + 1)
        one_hot = sparse.csr_array((np.ones(len(block), np.int32), places, bounds), (len(block), k))
        sums += one_hot.T @ block
    return sums


def lengths_of(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    """Euclidean length of every row, its squares summed without rounding."""
    if int(np.abs(sums).max(initial=0)) ** 2 * sums.shape[1] < MAX_INT64:
        return np.sqrt(np.einsum("kd,kd->k", sums, sums).astype(np.float64))
    squares = sums.astype(np.float64) ** 2
    return np.array([math.sqrt(math.fsum(row)) for row in squares])


def round_centroids(sums: NDArray[np.int64], lengths: NDArray[np.float64]) -> Centroids:
    """Directions of the sums, scaled to 32767 and rounded; a sum of zero stays zero."""
    return np.rint(CENTROID_SCALE * (sums / np.maximum(lengths, 1)[:, None])).astype(np.int16)


def reseed_empty(
    codes: Codes, centroids: Centroids, labels: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Give every empty cluster the row that is least like its own centroid, lowest row of equals.

    A row that is alone in its cluster stays there.
    """
    counts = np.bincount(labels, minlength=len(centroids))
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return labels
    labels = labels.copy()
    order = iter(np.argsort(products_with(codes, centroids, labels), kind="stable"))
    for cluster in empty:
        row = next(row for row in order if counts[labels[row]] > 1)
        counts[labels[row]] -= 1
        counts[cluster] += 1
        labels[row] = cluster
    return labels


def fit_once(codes: Codes, centroids: Centroids, iterations: int) -> FineClusters:
    """Lloyd's iterations from given centroids until nothing moves.

    Goes on after `iterations` while a centroid is without a row, at most as long again.

    Raises:
        PortolanError: the loss rose by more than rounding explains: a defect.
        UsageError: a centroid stays empty.
    """
    losses: list[float] = []
    previous = np.full(len(codes), -1, np.int32)
    scale = step_size(codes.shape[1])
    for iteration in range(2 * iterations + 1):
        found = assign(codes, centroids)
        labels = reseed_empty(codes, centroids, found)
        is_full = labels is found
        sums = cluster_sums(codes, labels, len(centroids))
        lengths = lengths_of(sums)
        losses.append(len(codes) - scale * math.fsum(lengths))
        if len(losses) > 1 and losses[-1] > losses[-2] + ROUNDING_ALLOWANCE * len(codes):
            raise PortolanError(
                f"the loss of k-means rose from {losses[-2]} to {losses[-1]}",
                remedy="this is a defect of Portolan: please report it",
            )
        if is_full and (iteration >= iterations or np.array_equal(labels, previous)):
            return FineClusters(centroids, tuple(losses), 0)
        previous, centroids = labels, round_centroids(sums, lengths)
    raise UsageError(
        f"data.domains.fine = {len(centroids)}: a cluster stays empty after {2 * iterations} "
        "iterations",
        remedy=f"set data.domains.fine = {len(centroids) // 2}",
    )


def initial_rows(ids: Sequence[str], k: int, seed: int, restart: int) -> NDArray[np.int64]:
    """The k rows with the smallest XXH3-64 of `seed:restart:id`, in the order of that hash."""
    ranks = [xxhash.xxh3_64_intdigest(f"{seed}:{restart}:{name}".encode()) for name in ids]
    return np.lexsort((np.arange(len(ids)), np.array(ranks, np.uint64)))[:k]


def fit_fine(
    codes: Codes, ids: Sequence[str], k: int, *, seed: int, iterations: int, restarts: int
) -> FineClusters:
    """Cluster rows int8[n, d] with ids; keep the restart of least loss, the first of equals.

    Rows must not be zero and must come in a fixed order, that of their ids for example.
    """
    best: FineClusters | None = None
    for restart in range(restarts):
        rows = codes[initial_rows(ids, k, seed, restart)].astype(np.int64)
        found = fit_once(codes, round_centroids(rows, lengths_of(rows)), iterations)
        if best is None or found.losses[-1] < best.losses[-1]:
            best = FineClusters(found.centroids, found.losses, restart)
    assert best is not None
    return best
