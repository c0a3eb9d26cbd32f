"""Choice of experts, combine weights, quantile balancing."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model import reference

from portolan.model import histograms, router
from portolan.model.totals import ALL_TOKENS


def balance(logits, bias, num_selected, num_bins, valid=None):
    """(new beta, bin, count at or above, count inside, experts) of one layer."""
    logits = jnp.asarray(logits, jnp.float32)
    valid = jnp.ones(len(logits), bool) if valid is None else jnp.asarray(valid)
    routing = router.route(logits, jnp.asarray(bias, jnp.float32), num_selected)
    margins = router.bin_margins(logits, routing.threshold_T, valid, num_bins)
    beta = router.update_beta(margins, num_selected, num_bins)
    return beta, *router.quantile_bins(margins, num_selected, num_bins), routing.experts_TK


BALANCE = jax.jit(balance, static_argnums=(2, 3))

EXAMPLE = np.array(
    [
        (0.9, 0.1, -0.5),
        (0.7, 0.4, 0),
        (0.2, 0.6, -0.2),
        (1.1, -0.3, 0.3),
        (0.5, 0.45, -1),
        (0.8, -0.1, 0.2),
    ]
)


def loads(experts, num_experts):
    return np.bincount(np.asarray(experts).ravel(), minlength=num_experts)


def test_worked_example():
    beta, best, above, _, experts = BALANCE(EXAMPLE, np.zeros(3), 1, 8)
    np.testing.assert_allclose(beta, [0.6125, 0.14375, -0.04375], atol=1e-5)
    np.testing.assert_array_equal(best, [7, 5, 5])
    np.testing.assert_array_equal(above, [3, 4, 2])
    np.testing.assert_array_equal(loads(experts, 3), [5, 1, 0])
    bias = router.balance_bias(beta)
    np.testing.assert_allclose(bias, [-0.375, 0.09375, 0.28125], atol=1e-5)
    np.testing.assert_array_equal(loads(BALANCE(EXAMPLE, bias, 1, 8)[-1], 3), [2, 3, 1])


def test_combine_weights():
    routing = router.route(jnp.array([[1.0, 0.2, -3.0]]), jnp.zeros(3), 2)
    np.testing.assert_allclose(routing.weights_TK, [[1.42685, 1.07315]], atol=1e-5)
    equal = router.route(jnp.full((1, 9), 0.7), jnp.zeros(9), 4)
    np.testing.assert_array_equal(equal.experts_TK, [[0, 1, 2, 3]])
    np.testing.assert_allclose(equal.weights_TK.sum(), 2.5, atol=1e-6)


@settings(max_examples=40)
@given(st.data())
def test_selection_is_a_stable_sort(data):
    values = data.draw(
        st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=4, max_size=4)
    )
    values = np.array(values, np.float32)
    experts, threshold = router.select(jnp.asarray(values), 3)
    order = np.argsort(-values, axis=1, kind="stable")
    np.testing.assert_array_equal(experts, order[:, :3])
    np.testing.assert_array_equal(threshold, np.take_along_axis(values, order[:, 3:4], 1)[:, 0])


def histogram_oracle(logits, threshold, num_selected, num_bins):
    """float32 bins and integer counts by a full histogram."""
    margins = logits - threshold[:, None]
    low = margins.min()
    high = max(margins.max(), low + np.float32(1e-6))
    width = (high - low) / np.float32(num_bins)
    bins = np.clip(np.floor((margins - low) / width), 0, num_bins - 1).astype(int)
    best, above, inside = [], [], []
    for column in bins.T:
        histogram = np.bincount(column, minlength=num_bins)
        tail = np.cumsum(histogram[::-1])[::-1]
        best.append(np.flatnonzero(tail * logits.shape[1] >= len(logits) * num_selected)[-1])
        above.append(tail[best[-1]])
        inside.append(histogram[best[-1]])
    return best, above, inside


@pytest.mark.parametrize(
    ("tokens", "experts", "selected", "bins"),
    [(512, 8, 2, 1000), (100, 5, 3, 7), (333, 32, 2, 10_000), (64, 3, 1, 1), (64, 3, 1, 2)],
)
def test_bisection_equals_the_histogram(tokens, experts, selected, bins):
    generator = np.random.default_rng(tokens)
    logits = generator.standard_normal((tokens, experts)).astype(np.float32)
    bias = (0.1 * generator.standard_normal(experts)).astype(np.float32)
    beta, *integers, _ = BALANCE(logits, bias, selected, bins)
    threshold = router.route(jnp.asarray(logits), jnp.asarray(bias), selected).threshold_T
    expected = histogram_oracle(logits, np.asarray(threshold), selected, bins)
    for measured, oracle in zip(integers, expected, strict=True):
        np.testing.assert_array_equal(measured, oracle)
    margins = (logits - np.asarray(threshold)[:, None]).astype(float)
    ordered = np.sort(margins, axis=0)[::-1]
    width = (margins.max() - margins.min()) / bins
    rank = int(np.ceil(tokens * selected / experts)) - 1
    assert np.all(np.abs(np.asarray(beta) - ordered[rank]) <= width * (1 + 1e-4) + 1e-6)
    exact = reference.new_beta(margins, tokens, selected, bins)
    assert np.all(np.abs(np.asarray(beta) - exact) <= width * (1 + 1e-4) + 1e-6)


def test_order_and_padding_do_not_matter():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((200, 8)).astype(np.float32)
    beta = BALANCE(logits, np.zeros(8), 2, 1000)[0]
    shuffled = BALANCE(logits[generator.permutation(200)], np.zeros(8), 2, 1000)[0]
    np.testing.assert_array_equal(beta, shuffled)
    padded = np.concatenate([logits, 50 * np.ones((56, 8), np.float32)])
    valid = np.arange(256) < 200
    np.testing.assert_array_equal(beta, BALANCE(padded, np.zeros(8), 2, 1000, valid)[0])


def test_degenerate_margins():
    logits = np.ones((16, 4), np.float32)
    nothing = BALANCE(logits, np.zeros(4), 2, 100, np.zeros(16, bool))[0]
    np.testing.assert_array_equal(nothing, np.zeros(4))
    assert np.all(np.isfinite(BALANCE(logits, np.zeros(4), 2, 100)[0]))
    for value in (np.nan, np.inf):
        logits[3, 1] = value
        assert np.all(np.isnan(BALANCE(logits, np.zeros(4), 2, 100)[0]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_convergence(seed):
    """Loads of strongly unequal experts even out within five updates."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((8192, 16)) + 1.5 * generator.standard_normal(16)
    logits = logits.astype(np.float32)
    beta, peaks = jnp.zeros(16), []
    for _ in range(6):
        beta, *_, experts = BALANCE(logits, router.balance_bias(beta), 2, 10_000)
        peaks.append(loads(experts, 16).max() / (8192 * 2 / 16))
    assert peaks[0] > 2.5
    assert peaks[2] <= 1.2
    assert peaks[5] <= 1.12


def test_convergence_with_many_experts():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((4096, 128)) + 2 * generator.standard_normal(128)
    logits = logits.astype(np.float32)
    beta, peaks = jnp.zeros(128), []
    for _ in range(3):
        beta, *_, experts = BALANCE(logits, router.balance_bias(beta), 8, 10_000)
        peaks.append(loads(experts, 128).max() / (4096 * 8 / 128))
    assert peaks[0] > 5
    assert peaks[2] < 1.25


def test_gradient_reaches_only_the_weights():
    generator = np.random.default_rng(3)
    logits = generator.standard_normal((5, 6))
    mix = generator.standard_normal((5, 2))
    bias = 0.1 * generator.standard_normal(6)
    with jax.enable_x64(True):

        def objective(logits, bias):
            routing = router.route(logits, bias, 2)
            return jnp.sum(routing.weights_TK * mix) + 0 * jnp.sum(routing.threshold_T)

        dlogits, dbias = jax.grad(objective, argnums=(0, 1))(jnp.asarray(logits), jnp.asarray(bias))
        np.testing.assert_array_equal(dbias, np.zeros(6))
        threshold = jax.grad(lambda s: jnp.sum(router.route(s, bias, 2).threshold_T))
        np.testing.assert_array_equal(threshold(jnp.asarray(logits)), np.zeros((5, 6)))
    for t in range(5):
        for e in range(6):
            ends = []
            for sign in (1, -1):
                moved = logits[t].copy()
                moved[e] += sign * 1e-6
                ends.append(reference.route(moved, bias, 2)[1] @ mix[t])
            np.testing.assert_allclose(dlogits[t, e], (ends[0] - ends[1]) / 2e-6, atol=1e-8)


ON_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.model.test_router import balance
logits = np.random.default_rng(7).standard_normal((1024, 16)).astype(np.float32)
step = jax.jit(balance, static_argnums=(2, 3))
for count in (1, 2, 4, 8):
    mesh = Mesh(jax.devices()[:count], ("data",))
    sharded = jax.device_put(logits, NamedSharding(mesh, P("data")))
    beta, *integers, _ = step(sharded, jnp.zeros(16), 2, 1000)
    print(np.asarray(beta).tobytes().hex(), [np.asarray(x).tolist() for x in integers])
"""


def test_same_integers_on_any_number_of_devices():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    out = subprocess.run(
        [sys.executable, "-c", ON_DEVICES],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = out.stdout.split("\n")[:4]
    assert len(lines[0]) > 100
    assert len(set(lines)) == 1


def histogram_of(logits, threshold, num_bins):
    valid = jnp.ones(len(logits), bool)
    margins = router.bin_margins(logits, threshold, valid, num_bins)
    counts = histograms.count_bins(margins.bins_TE, num_bins, ALL_TOKENS)
    return histograms.Histogram(counts, *margins[1:]), margins


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_merged_histograms_give_beta_within_two_bins(num_parts):
    """model.md 4: at most one old bin and one new bin beside the histogram of all margins."""
    num_bins, selected = 64, 2
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(240, 6)) * 2, jnp.float32)
    routing = router.route(logits, jnp.zeros(6), selected)
    whole, margins = histogram_of(logits, routing.threshold_T, num_bins)
    parts = [
        histogram_of(part, threshold, num_bins)[0]
        for part, threshold in zip(
            np.split(logits, num_parts), np.split(routing.threshold_T, num_parts), strict=True
        )
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    merged = histograms.merge(stacked)
    np.testing.assert_array_equal(merged.counts_EJ.sum(axis=1), whole.counts_EJ.sum(axis=1))
    expected = router.update_beta(margins, selected, num_bins)
    found = router.merged_beta(stacked, selected)
    width = float(whole.high - whole.low) / num_bins
    assert float(jnp.abs(found - expected).max()) <= (1e-5 if num_parts == 1 else 2 * width)


def test_an_empty_part_adds_nothing():
    logits = jnp.asarray(np.random.default_rng(6).normal(size=(40, 4)), jnp.float32)
    routing = router.route(logits, jnp.zeros(4), 1)
    full, margins = histogram_of(logits, routing.threshold_T, 32)
    none = router.bin_margins(logits, routing.threshold_T, jnp.zeros(40, bool), 32)
    empty = histograms.Histogram(histograms.count_bins(none.bins_TE, 32, ALL_TOKENS), *none[1:])
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), full, empty)
    expected = router.update_beta(margins, 1, 32)
    np.testing.assert_allclose(router.merged_beta(both, 1), expected, atol=1e-5)
