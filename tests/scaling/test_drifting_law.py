"""The law across rungs against a dense Gaussian reference, its invariances, its widths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.errors import UsageError
from portolan.scaling import drifting_law
from portolan.scaling.drifting_law import DriftPrior, Ladder, condition, extrapolate

PRIOR = DriftPrior(0.6, 0.004, 0.004, (0.045, 0.01))
X = np.array([1e18, 5e18, 2e19, 1e20])
LOSSES = 1.7 + 60 * X**-0.095
LEVELS = (0.05, 0.1, 0.5, 0.9, 0.95)


def quantiles(x, losses, target, prior=PRIOR, **options):
    return extrapolate(Ladder(np.array(x), np.array(losses), target, **options), prior).quantiles(
        LEVELS
    )


def test_covariance_is_that_of_a_random_slope():
    """Against a simulated walk: the slope is a sum of small steps, the value its sum."""
    rng = np.random.default_rng(0)
    grid = 400
    slopes = np.cumsum(rng.standard_normal((20_000, grid)) / np.sqrt(100), axis=1)
    paths = np.cumsum(slopes, axis=1) / 100
    distances = np.array([1.0, 2.5, 4.0])
    empirical = np.cov(paths[:, (distances * 100).astype(int) - 1], rowvar=False)
    exact = drifting_law.drift_covariance(distances)
    np.testing.assert_allclose(empirical, exact, rtol=0.05)
    both = drifting_law.drift_covariance(np.array([-1.0, 1.0]))
    assert both[0, 1] == 0


def test_conditioning_agrees_with_a_joint_normal():
    """One asymptote, by conditioning the joint normal of rungs and target, m almost flat."""
    ladder = Ladder(X, LOSSES, 1e21)
    part = condition(ladder, 0.003, 0.005)
    index = 30
    asymptote = part.asymptotes[index]
    z = drifting_law.distances(ladder)
    jacobian = LOSSES / (LOSSES - asymptote)
    noise = (
        np.diag(jacobian)
        @ (0.003**2 * np.eye(4) + 0.005**2 * drifting_law.drift_covariance(z))
        @ np.diag(jacobian)
    )
    flat, (mean, sd) = 1e8, drifting_law.SLOPE_PRIOR
    rungs = flat + sd**2 * np.outer(z, z) + noise
    gain = np.linalg.solve(rungs, np.full(4, flat))
    location = gain @ (np.log(LOSSES - asymptote) - mean * z)
    assert part.locations[index] == pytest.approx(location, abs=2e-5)
    variance = flat - gain @ np.full(4, flat)
    excess = np.exp(part.locations[index])
    outcome = drifting_law.OUTCOME_NOISE * (asymptote + excess) / excess
    assert part.scales[index] ** 2 == pytest.approx(variance + outcome**2, rel=1e-2)


@settings(max_examples=20)
@given(unit=st.floats(0.2, 5.0), power=st.floats(0.5, 2.0), factor=st.floats(1e-12, 1e12))
def test_units_do_not_matter(unit, power, factor):
    """Bits or nats, parameters or FLOPs: the same forecast."""
    reference = quantiles(X, LOSSES, 1e21)
    changed = quantiles(factor * X**power, unit * LOSSES, factor * 1e21**power)
    np.testing.assert_allclose(changed / unit, reference, rtol=2e-6)


def test_an_exact_law_is_continued():
    """With E at the prior's centre and no noise, the median is the law's value."""
    last, exponent = 3.0, 0.09
    x = np.array([1e18, 1e19, 1e20])
    losses = 0.6 * last + 0.4 * last * (x / x[-1]) ** -exponent
    truth = 0.6 * last + 0.4 * last * 10.0**-exponent
    assert quantiles(x, losses, 1e21)[2] == pytest.approx(truth, rel=2e-3)


def test_the_interval_grows_with_the_extrapolation_and_with_noise():
    widths = [np.ptp(quantiles(X, LOSSES, target)) for target in (3e20, 3e21, 3e22)]
    assert widths == sorted(widths)
    loud = quantiles(X, LOSSES, 1e21, rung_sd=np.full(4, 0.02))
    quiet = quantiles(X, LOSSES, 1e21, rung_sd=np.full(4, 0.001))
    assert np.ptp(loud) > 1.5 * np.ptp(quiet)


def test_near_rungs_count_more():
    """Moving the smallest rung moves the forecast less than moving the largest."""
    base = quantiles(X, LOSSES, 1e21)[2]
    shifts = []
    for position in (0, 3):
        losses = LOSSES.copy()
        losses[position] *= 1.002
        shifts.append(abs(quantiles(X, losses, 1e21)[2] - base))
    assert shifts[0] < 0.5 * shifts[1]


def test_one_rung_uses_the_decline_of_other_suites():
    low, _, median, _, high = quantiles([1e20], [2.5], 1e21)
    assert 2.5 * np.exp(-0.07 * np.log(10)) < median < 2.5 * np.exp(-0.02 * np.log(10))
    assert np.ptp((low, high)) > np.ptp(quantiles(X, LOSSES, 1e21)[[0, -1]])
    repeated = quantiles([1e20] * 3, [2.51, 2.5, 2.49], 1e21)
    assert repeated[2] == pytest.approx(median, rel=0.01)


def test_odd_ladders_still_have_a_forecast():
    rising = quantiles([1e18, 1e19, 1e20], [2.9, 3.0, 3.05], 1e21)
    inside = quantiles(X, LOSSES, 2e19)
    assert np.all(np.diff(rising) > 0)
    assert inside[0] < LOSSES[2] < inside[-1]


@pytest.mark.parametrize(
    ("x", "losses", "target"),
    [([], [], 1.0), ([1.0], [1.0, 2.0], 2.0), ([1.0, 2.0], [1.0, -2.0], 2.0),
     ([1.0, np.nan], [1.0, 2.0], 2.0), ([1.0, 2.0], [2.0, 1.0], 0.0)],
)  # fmt: skip
def test_bad_ladders_are_refused(x, losses, target):
    with pytest.raises(UsageError):
        quantiles(x, losses, target)
