"""Intervals and compute of an ablation, against scipy, hand arithmetic and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from portolan.errors import UsageError
from portolan.scaling.ablation import (
    Interval,
    block_noise,
    effective_speedup,
    fit_width_law,
    joint_interval,
    measure_effects,
    paired_interval,
)
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.score import compute_equivalent

PUBLIC_LAW = PowerLaw(coefficient=88.32, exponent=0.0941, asymptote=1.6, rms=0.0)


@pytest.mark.parametrize("num_seeds", [2, 3, 7])
def test_paired_interval_is_that_of_the_paired_t_test(num_seeds):
    rng = np.random.default_rng(num_seeds)
    baseline, arm = rng.normal(3, 0.1, (2, num_seeds))
    expected = stats.ttest_rel(arm, baseline).confidence_interval(0.95)
    found = paired_interval(arm - baseline)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_one_pair_has_no_interval():
    assert paired_interval([0.3]) is None
    assert block_noise([[3.0], [3.1]]) is None


def test_noise_is_what_arm_and_seed_leave():
    # Arms 4, 5, 9 and seeds -1, 0, 1 leave these residuals: sum of squares 0.12, freedom 4.
    residuals = np.array([[0.1, -0.1, 0.0], [-0.1, 0.1, 0.0], [0.0, 0.0, 0.0]])
    losses = residuals + np.array([[4.0], [5.0], [9.0]]) + np.array([-1.0, 0.0, 1.0])
    noise = block_noise(losses)
    assert noise.freedom == 4
    assert noise.sd == pytest.approx(math.sqrt(0.04 / 4))


def test_joint_interval_of_a_single_arm_is_its_paired_one():
    losses = {"base": {0: 3.0, 1: 3.2, 2: 3.1}, "arm": {0: 3.1, 1: 3.25, 2: 3.23}}
    effects, noise = measure_effects(losses, {"arm": "base"})
    effect = effects["arm"]
    assert effect.difference == pytest.approx(0.28 / 3)
    assert (effect.joint.low, effect.joint.high) == pytest.approx((effect.own.low, effect.own.high))
    assert noise.freedom == 2


def test_joint_interval_shares_the_level_among_the_arms():
    noise = block_noise(np.random.default_rng(0).normal(size=(11, 3)))
    found = joint_interval(0.5, noise, 3, 10)
    half = stats.t.isf(0.025 / 10, 20) * noise.sd * math.sqrt(2 / 3)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))


def test_arms_without_an_effect_are_seldom_resolved():
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(300):
        seeds = rng.normal(0, 1, 3)
        losses = 4 + seeds + rng.normal(0, 0.02, (21, 3))
        arms = {str(i): dict(enumerate(row)) for i, row in enumerate(losses)}
        effects, _ = measure_effects(arms, dict.fromkeys(list(arms)[1:], "0"))
        alarms += any(not effect.joint.holds_zero for effect in effects.values())
    assert alarms / 300 < 0.08


def test_a_resolved_effect_leaves_0_out_of_both_intervals():
    calm = {f"a{i}": {0: 3.0 + i * 1e-4, 1: 3.1, 2: 3.2 - i * 1e-4} for i in range(6)}
    wild = {0: 3.0, 1: 3.2, 2: 3.5}
    clear = {0: 3.5, 1: 3.6001, 2: 3.7}
    arms = calm | {"wild": wild, "clear": clear}
    losses = {"base": {0: 3.0, 1: 3.1, 2: 3.2}} | arms
    effects, _ = measure_effects(losses, dict.fromkeys(arms, "base"))
    assert effects["clear"].resolved
    assert effects["wild"].own.holds_zero and not effects["wild"].resolved
    assert not effects["a0"].resolved and effects["a0"].difference == 0


def test_arm_that_lost_a_seed_is_compared_on_the_others():
    arms = {
        "whole": {0: 3.2, 1: 3.31, 2: 3.5},
        "lost": {0: 4.0, 2: 4.2},
        "one": {1: 3.0},
        "none": {},
    }
    losses = {"base": {0: 3.0, 1: 3.1, 2: 3.3}} | arms
    effects, noise = measure_effects(losses, dict.fromkeys(arms, "base"))
    assert noise.freedom == 2
    assert effects["lost"].num_seeds == 2
    assert effects["lost"].difference == pytest.approx(0.95)
    assert effects["one"].own is None and not effects["one"].resolved
    assert "none" not in effects


def test_arm_can_be_compared_with_another_arm():
    losses = {"base": {0: 3.0, 1: 3.1}, "tuned": {0: 2.8, 1: 2.9}, "arm": {0: 2.85, 1: 2.97}}
    effects, _ = measure_effects(losses, {"tuned": "base", "arm": "tuned"})
    assert effects["tuned"].difference == pytest.approx(-0.2)
    assert effects["arm"].difference == pytest.approx(0.06)


def test_a_run_under_two_names_counts_once_in_the_noise():
    losses = {"base": {0: 3.0, 1: 3.1}, "arm": {0: 3.2, 1: 3.5}}
    twice = losses | {"same": losses["base"]}
    noises = [measure_effects(found, {"arm": "base"})[1] for found in (losses, twice)]
    assert noises[0] == noises[1] and noises[0].freedom == 1


def test_interval_ends_count_as_inside():
    assert Interval(0.0, 1.0).holds_zero and not Interval(1e-9, 1.0).holds_zero


@pytest.mark.parametrize(
    ("before", "after", "multiple"), [(3.1605, 3.1357, 1.186), (3.8104, 3.7542, 1.315)]
)
def test_public_losses_give_the_public_multiples_of_compute(before, after, multiple):
    found = compute_equivalent(before, after, PUBLIC_LAW.asymptote, PUBLIC_LAW.exponent)
    assert found == pytest.approx(multiple, abs=5e-4)


def test_effective_speedup_of_the_public_gate():
    found = effective_speedup(
        PUBLIC_LAW, baseline=(3.4339, 2.81e18, 1.0), variant=(3.3988, 2.81e18, 1.0)
    )
    assert found == pytest.approx(1.2280, abs=5e-5)
    half_as_fast = effective_speedup(
        PUBLIC_LAW, baseline=(3.4339, 2.81e18, 1.0), variant=(3.3988, 2.81e18, 0.5)
    )
    assert half_as_fast == pytest.approx(found / 2)
    with pytest.raises(UsageError, match="asymptote"):
        effective_speedup(PUBLIC_LAW, baseline=(3.4, 1.0, 1.0), variant=(1.5, 1.0, 1.0))


def test_law_through_widths():
    # The smallest loss is 1 / 0.55 times the asymptote, as the rule for E wants it.
    flops = (1e11, 1e12, 1e13)
    excess = 4.5e13**0.25 * np.power(flops, -0.25)
    asymptote = 0.55 / 0.45 * excess[-1]
    law = fit_width_law(dict(zip(flops, asymptote + excess, strict=True)))
    assert (law.asymptote, law.exponent) == pytest.approx((asymptote, 0.25))
    assert fit_width_law({1e11: 4.0}) is None
    assert fit_width_law({1e11: 4.0, 1e12: 4.1}) is None
