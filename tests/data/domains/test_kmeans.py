"""Exact spherical k-means against plain integer arithmetic."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.data.domains import kmeans
from portolan.data.domains.kmeans import (
    assign,
    cluster_sums,
    fit_fine,
    fit_once,
    initial_rows,
    lengths_of,
    products_with,
    reseed_empty,
    round_centroids,
)
from portolan.data.embedding.quantization import quantize, step_size
from portolan.errors import UsageError


def make_rows(count, dimension=32, clusters=12, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dimension))
    return quantize(centres[rng.integers(clusters, size=count)] + rng.normal(size=(count, 1)) * 0.1
                    + rng.normal(size=(count, dimension)) * 0.7)  # fmt: skip


def slow_fit(codes, centroids, iterations):
    """Lloyd's iterations in Python integers; None if a cluster is empty."""
    rows = [[int(x) for x in row] for row in codes]
    for _ in range(iterations):
        labels = []
        for row in rows:
            products = [sum(a * int(b) for a, b in zip(row, u, strict=True)) for u in centroids]
            labels.append(products.index(max(products)))
        sums = [
            [sum(row[c] for row, label in zip(rows, labels, strict=True) if label == j)
             for c in range(codes.shape[1])]
            for j in range(len(centroids))
        ]  # fmt: skip
        lengths = [sum(x * x for x in s) ** 0.5 for s in sums]
        if 0 in lengths:
            return None
        loss = len(rows) - step_size(codes.shape[1]) * sum(lengths)
        previous = centroids
        centroids = [[round(32767 * x / n) for x in s] for s, n in zip(sums, lengths, strict=True)]
    return previous, labels, loss


def test_equals_plain_integers():
    codes, ids = make_rows(150, dimension=16), [f"{i:03d}" for i in range(150)]
    start = codes[initial_rows(ids, 8, 5, 0)].astype(np.int64)
    centroids = round_centroids(start, lengths_of(start))
    found = fit_once(codes, centroids, 4)
    slow = slow_fit(codes, centroids.tolist(), len(found.losses))
    assert slow is not None
    assert found.centroids.tolist() == slow[0]
    assert assign(codes, found.centroids).tolist() == slow[1]
    assert found.losses[-1] == pytest.approx(slow[2], abs=1e-9)


def test_lengths_are_exact_in_either_arithmetic(monkeypatch):
    sums = np.random.default_rng(2).integers(-(1 << 26), 1 << 26, (20, 256))
    found, huge = lengths_of(sums), lengths_of(sums << 10)
    exact = [math.sqrt(sum(int(x) ** 2 for x in row)) for row in sums]
    assert found.tolist() == exact and huge.tolist() == [1024 * x for x in exact]
    monkeypatch.setattr(kmeans, "MAX_INT64", 0)
    assert lengths_of(sums).tolist() == exact


def test_close_and_equal_products_take_the_lowest_centroid():
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, (300, 1024)).astype(np.int8)
    base = rng.integers(-32767, 32768, 1024)
    near = base + (rng.random((40, 1024)) < 0.001)
    centroids = np.clip(np.concatenate([near, near]), -32767, 32767).astype(np.int16)
    exact = codes.astype(np.int64) @ centroids.astype(np.int64).T
    assert (assign(codes, centroids) == exact.argmax(axis=1)).all()
    labels = rng.integers(80, size=300).astype(np.int32)
    assert (products_with(codes, centroids, labels) == exact[np.arange(300), labels]).all()
    assert not assign(np.zeros((3, 1024), np.int8), centroids).any()


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=30)
def test_assign_is_the_integer_argmax(seed, count, k):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-3, 4, (count, 8)).astype(np.int8)
    centroids = rng.integers(-2, 3, (k, 8)).astype(np.int16)
    exact = codes.astype(np.int64) @ centroids.astype(np.int64).T
    assert (assign(codes, centroids) == exact.argmax(axis=1)).all()


def test_loss_never_rises_and_no_cluster_is_empty():
    # Equal rows: most first centroids are the same, and their clusters empty.
    codes = np.repeat(make_rows(12), 40, axis=0)
    codes = np.concatenate([codes, make_rows(200, seed=3)])
    found = fit_fine(
        codes, [str(i) for i in range(len(codes))], 60, seed=1, iterations=20, restarts=3
    )
    falls = np.diff(found.losses)
    assert (falls <= 1e-5 * len(codes)).all() and falls[0] < 0
    labels = assign(codes, found.centroids)
    assert np.bincount(labels, minlength=60).min() > 0
    sums = cluster_sums(codes, labels, 60)
    assert (sums[7] == codes[labels == 7].astype(np.int64).sum(axis=0)).all()


def test_reseeding_takes_the_least_similar_row_that_is_not_alone():
    codes = np.array([[100, 0], [90, 60], [0, -100]], np.int8)
    centroids = np.array([[32767, 0], [0, -32767], [0, 32767]], np.int16)
    labels = np.array([0, 0, 1], np.int32)
    assert reseed_empty(codes, centroids, labels).tolist() == [0, 2, 1]


def test_a_cluster_that_stays_empty_is_refused(monkeypatch):
    monkeypatch.setattr(kmeans, "reseed_empty", lambda codes, centroids, labels: labels.copy())
    codes = make_rows(40)
    start = codes[:4].astype(np.int64)
    with pytest.raises(UsageError, match="stays empty"):
        fit_once(codes, round_centroids(start, lengths_of(start)), 2)


PROGRAM = """
import hashlib, sys
from tests.data.domains.test_kmeans import make_rows
from portolan.data.domains.kmeans import fit_fine
codes = make_rows(6000, 64, 30)
found = fit_fine(codes, [str(i) for i in range(6000)], 100, seed=1, iterations=6, restarts=1)
print(hashlib.sha256(found.centroids.tobytes() + repr(found.losses).encode()).hexdigest())
"""


def test_equal_bytes_for_any_number_of_blas_threads():
    digests = set()
    for threads in ("1", "2", "4"):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(Path.cwd())}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1 and len(digests.pop()) == len(hashlib.sha256().hexdigest())
