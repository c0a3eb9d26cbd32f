"""F1 against its reference quantiles, an independent quadrature and its own invariants."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from portolan.errors import UsageError
from portolan.scaling import interval
from portolan.scaling.interval import PUBLIC_RULE, predict

# Final losses of the public rungs (marin #8435); the last is extrapolated from 80 %, plus 0.0035.
FLOPS = np.array(
    [
        2320210052775936.0 * 11_420,
        11299543559700480.0 * 15_276,
        91309218006564864.0 * 15_128,
        385702219393007616.0 * 20_072,
    ]
)
LOSSES = np.array([3.015353202819824, 2.780874729156494, 2.5637738704681396, 2.4072081241607727])
NOISE = np.array([0.004, 0.004, 0.004, np.hypot(0.004, 0.002)])
TARGET = 6690294608796057600.0 * 390_251

SHOWN_LEVELS = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
# prior sd, model error: quantiles, posterior mean and sd of the asymptote.
TABLE = {
    (0.05, 0): ((2.0176, 2.0245, 2.0307, 2.0377, 2.0448, 2.0513, 2.0587), 1.495, 0.047),
    (0.15, 0): ((1.9965, 2.0088, 2.0202, 2.0332, 2.0466, 2.0590, 2.0730), 1.466, 0.106),
    (0.15, 0.008): ((1.9799, 1.9982, 2.0148, 2.0336, 2.0528, 2.0704, 2.0904), 1.466, 0.106),
    (0.30, 0.008): ((1.9672, 1.9882, 2.0073, 2.0287, 2.0503, 2.0698, 2.0919), 1.431, 0.143),
}


def public(sd=0.15, kappa=0.008, num_steps=4600):
    rule = dataclasses.replace(PUBLIC_RULE, sd=sd, kappa=kappa, num_steps=num_steps)
    return predict(FLOPS, LOSSES, NOISE, TARGET, rule)


@pytest.mark.parametrize("case", TABLE)
def test_reference_quantiles(case):
    quantiles, mean, sd = TABLE[case]
    predictive = public(*case)
    assert predictive.quantiles(SHOWN_LEVELS) == pytest.approx(quantiles, abs=1.01e-4)
    assert predictive.asymptote_mean == pytest.approx(mean, abs=6e-4)
    assert predictive.asymptote_sd == pytest.approx(sd, abs=6e-4)


def test_grid_step_does_not_matter():
    fine, coarse = public(num_steps=4600).quantiles(), public(num_steps=460).quantiles()
    assert np.max(np.abs(fine - coarse)) < 1e-4


def test_matrix_form_agrees_at_one_asymptote():
    """The closed form of the weighted regression against numpy's solver."""
    predictive = public(kappa=0.008)
    position = len(predictive.asymptotes) // 2
    asymptote = predictive.asymptotes[position]
    y = np.log(LOSSES - asymptote)
    weights = ((LOSSES - asymptote) / NOISE) ** 2
    design = np.stack([np.ones(4), -(np.log(FLOPS) - np.log(TARGET))], axis=1)
    precision = design.T @ (weights[:, None] * design)
    solution = np.linalg.solve(precision, design.T @ (weights * y))
    decades = np.log10(TARGET / FLOPS[-1])
    variance = np.linalg.inv(precision)[0, 0]
    variance += ((0.008 * decades) ** 2 + 0.004**2) * np.exp(-2 * solution[0])
    assert predictive.locations[position] == pytest.approx(solution[0], rel=1e-9)
    assert predictive.scales[position] == pytest.approx(np.sqrt(variance), rel=1e-9)


def test_quantiles_invert_the_distribution():
    predictive = public()
    quantiles = predictive.quantiles()
    assert predictive.cdf(quantiles) == pytest.approx(interval.LEVELS, abs=1e-6)
    assert np.all(np.diff(quantiles) > 0)
    grid = np.linspace(1.8, 2.3, 1_001)
    assert np.trapezoid(predictive.density(grid), grid) == pytest.approx(1, abs=1e-3)
    assert predictive.cdf(0.0) == 0


def test_sampling_gives_the_same_quantiles():
    """Draw an asymptote, then ln(loss - E): an oracle that shares no formula for quantiles."""
    predictive = public()
    generator = np.random.default_rng(0)
    chosen = generator.choice(len(predictive.weights), size=200_000, p=predictive.weights)
    draws = norm.rvs(
        predictive.locations[chosen], predictive.scales[chosen], random_state=generator
    )
    losses = predictive.asymptotes[chosen] + np.exp(draws)
    found = np.quantile(losses, [0.05, 0.5, 0.95])
    assert found == pytest.approx(predictive.quantiles((0.05, 0.5, 0.95)), abs=6e-4)


@settings(max_examples=15)
@given(st.sampled_from([0.05, 0.15, 0.3]), st.floats(0, 0.02), st.floats(0.0001, 0.02))
def test_larger_model_error_never_narrows(sd, kappa, more):
    low, high = public(sd, kappa, 460).quantiles((0.025, 0.975))
    wider_low, wider_high = public(sd, kappa + more, 460).quantiles((0.025, 0.975))
    assert wider_high - wider_low >= high - low - 1e-7


def test_grid_must_stay_below_the_losses():
    rule = dataclasses.replace(PUBLIC_RULE, upper=2.41)
    with pytest.raises(UsageError, match="reaches"):
        predict(FLOPS, LOSSES, NOISE, TARGET, rule)
    with pytest.raises(UsageError, match="1 losses"):
        predict(FLOPS[:1], LOSSES[:1], NOISE[:1], TARGET, PUBLIC_RULE)


def test_relative_rule():
    rule = interval.relative_rule(4.0)
    assert (rule.mean, rule.sd, rule.kappa) == pytest.approx((2.4, 0.52, 0.04))
    assert rule.grid[-1] == pytest.approx(3.88)
    assert len(rule.grid) == 4601
    assert interval.relative_rule(4.0, 3.9).upper == pytest.approx(0.97 * 3.9)


def test_scaling_the_unit_scales_the_forecast():
    """Under the relative rule losses in other units give proportional quantiles."""
    first = predict(FLOPS, LOSSES, NOISE, TARGET, interval.relative_rule(LOSSES.min()),
                    outcome_noise=0.004).quantiles()  # fmt: skip
    other = predict(FLOPS, 2 * LOSSES, 2 * NOISE, TARGET, interval.relative_rule(2 * LOSSES.min()),
                    outcome_noise=0.008).quantiles()  # fmt: skip
    assert other == pytest.approx(2 * first, abs=1e-6)
