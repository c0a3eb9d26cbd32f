"""Schedule law and token law: sums by brute force, recovery of known curves."""

import numpy as np
import pytest

from portolan.scaling import within_run
from portolan.scaling.within_run import ScheduledRun

LEVELS = (0.05, 0.5, 0.95)
STEPS = np.arange(1000.0, 20_001.0, 250.0)


def rates_of(kind):
    done = (STEPS - STEPS[0]) / (STEPS[-1] - STEPS[0])
    if kind == "constant":
        return np.full_like(STEPS, 3e-4)
    if kind == "cosine":
        return 3e-4 * (0.55 + 0.45 * np.cos(np.pi * done))
    if kind == "late drop":
        return np.where(done < 0.6, 3e-4, 1e-4)
    return np.where(done < 0.8, 3e-4, 3e-4 * (1 - 4.5 * (done - 0.8)))


def run_of(kind, noise=0.0, seed=0):
    rates = rates_of(kind)
    first, second = within_run.schedule_sums(STEPS, rates, 0.998)
    losses = 2.5 + 0.9 * (first / 0.3) ** -0.5 - 6.0 * second
    losses *= np.exp(noise * np.random.default_rng(seed).standard_normal(len(losses)))
    return ScheduledRun(STEPS, rates, losses)


def test_sums_agree_with_a_sum_over_single_steps():
    rates = rates_of("cosine")
    every = np.arange(STEPS[0], STEPS[-1] + 1)
    fine = np.interp(every, STEPS, rates)
    memory, momentum, total, sums = 0.998, 0.0, 0.0, []
    for drop in -np.diff(fine, prepend=fine[0]):
        momentum = memory * momentum + drop
        total += momentum
        sums.append(total)
    first, second = within_run.schedule_sums(STEPS, rates, memory)
    at = np.isin(every, STEPS)
    np.testing.assert_allclose(second[4:], np.array(sums)[at][4:], rtol=0.02)
    assert first[-1] - first[0] == pytest.approx(fine[1:].sum(), rel=1e-3)


def test_an_unseen_schedule_is_forecast():
    train = [run_of(kind, 0.0005, seed) for seed, kind in enumerate(("constant", "cosine",
                                                                      "late drop"))]  # fmt: skip
    truth = run_of("decay at the end")
    curve, (low, median, high) = within_run.forecast_schedule(train, STEPS, truth.rates, LEVELS)
    assert median == pytest.approx(truth.losses[-1], rel=2e-3)
    assert low < truth.losses[-1] < high
    assert np.abs(curve / truth.losses - 1).max() < 5e-3


def test_more_tokens():
    tokens = np.linspace(1e10, 1e11, 10)
    losses = 2.7 + 0.5 * (tokens / 1e10) ** -0.45
    truth = 2.7 + 0.5 * 35**-0.45
    low, median, high = within_run.forecast_tokens(tokens, losses, 3.5e11, LEVELS)
    assert median == pytest.approx(truth, rel=1e-3)
    assert low < truth < high
    further = within_run.forecast_tokens(tokens, losses, 3.5e12, LEVELS)
    assert np.ptp(further) > np.ptp((low, high))
    assert tuple(within_run.forecast_tokens(tokens, losses, 3.5e11, LEVELS)) == (low, median, high)
