"""Scores against closed forms, simulation and the definitions of the bands."""

import csv
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from portolan.data.loss_metrics import DomainLoss, macro_loss
from portolan.errors import UsageError
from portolan.scaling import score
from portolan.scaling.baseline import forecast_baseline
from portolan.scaling.curves import by_width
from portolan.scaling.interval import LEVEL_LABELS, LEVELS

METRIC = "macro_loss"
MARKS = [f"{k / 20:.2f}" for k in range(1, 21)]


def normal(mean, sd):
    return score.QuantileDistribution(norm.ppf(LEVELS, mean, sd))


def centre(mark):
    return 2.4 - 0.4 * float(mark)


@pytest.fixture(scope="module")
def body():
    """A registration of N(2.4 - 0.4 f, 0.02^2) at every mark, F0 0.01 above the median."""
    return {
        "metric": {"name": METRIC},
        "quantiles": {
            METRIC: {
                mark: {
                    label: repr(float(q))
                    for label, q in zip(
                        LEVEL_LABELS, norm.ppf(LEVELS, centre(mark), 0.02), strict=True
                    )
                }
                for mark in MARKS
            }
        },
        "baseline": {
            "metric": METRIC,
            "F0": {mark: repr(centre(mark) + 0.01) for mark in MARKS},
            "A": "84.0",
            "alpha": "0.09",
            "E": "1.5",
        },
    }


def test_interval_score():
    assert score.interval_score(2.01, 2.07, 0.05, 2.00) == pytest.approx(0.46)
    assert score.interval_score(2.01, 2.07, 0.05, 2.03) == pytest.approx(0.06)
    assert score.interval_score(2.01, 2.07, 0.05, 2.08) == pytest.approx(0.46)


def test_normal_scores():
    assert score.crps_normal(2.04, 0.02, 2.00) == pytest.approx(0.0290558, abs=1e-7)
    assert score.crps_normal(2.04, 0.02, 2.04) == pytest.approx(0.0046739, abs=1e-7)
    assert score.crps_normal(0, 1, 0.5) == pytest.approx(0.3314035, abs=1e-7)
    assert -score.log_density_normal(2.04, 0.02, 2.00) == pytest.approx(-0.993084, abs=1e-6)


def test_scores_through_the_registered_quantiles():
    distribution = normal(2.04, 0.02)
    assert distribution.wis(2.00) == pytest.approx(0.0215746, abs=1e-6)
    assert distribution.crps(2.00) == pytest.approx(0.0290558, abs=1e-6)
    assert distribution.crps(2.04) == pytest.approx(0.0046739, abs=1e-6)
    assert -distribution.log_density(2.00) == pytest.approx(-0.993084, abs=1e-6)
    assert normal(0, 1).crps(0.5) == pytest.approx(0.3314035, abs=2e-6)
    assert distribution.score_z(2.00) == pytest.approx(-2)


@given(st.floats(-3, 3), st.floats(0.01, 5), st.floats(-8, 8))
def test_a_normal_is_exact_at_any_distance(mean, sd, z):
    distribution = normal(mean, sd)
    outcome = mean + sd * z
    assert distribution.score_z(outcome) == pytest.approx(z, abs=1e-6)
    assert distribution.quantile(0.3)[0] == pytest.approx(norm.ppf(0.3, mean, sd))
    assert distribution.crps(outcome) == pytest.approx(
        score.crps_normal(mean, sd, outcome), rel=2e-3, abs=1e-6 * sd
    )


def test_a_point_forecast_scores_its_error():
    assert score.crps_samples(np.array([2.04]), 2.0) == pytest.approx(0.04)
    assert score.crps_samples(np.full(9, 2.04), 2.0) == pytest.approx(0.04)
    point = dict.fromkeys(score.WIS_ALPHAS, (2.04, 2.04))
    assert score.weighted_interval_score(2.04, point, 2.0) == pytest.approx(0.04)


def test_sample_score_agrees_with_all_pairs_and_with_the_normal():
    generator = np.random.default_rng(0)
    few = generator.normal(size=50)
    pairs = np.abs(few[:, None] - few).mean()
    assert score.crps_samples(few, 0.3) == pytest.approx(np.abs(few - 0.3).mean() - pairs / 2)
    many = norm.ppf((np.arange(4000) + 0.5) / 4000)
    assert score.crps_samples(many, 0.5) == pytest.approx(0.3314035, abs=3e-4)


def test_scores_prefer_the_truth():
    """Averaged over 2000 draws, the true normal beats shifted and rescaled ones."""
    outcomes = np.random.default_rng(1).normal(size=2000)
    grid = norm.ppf((np.arange(200) + 0.5) / 200)

    def mean_scores(mean, sd):
        distribution = normal(mean, sd)
        intervals = {a: distribution.interval(1 - a) for a in score.WIS_ALPHAS}
        weighted = [score.weighted_interval_score(mean, intervals, x) for x in outcomes]
        sampled = [score.crps_samples(mean + sd * grid, x) for x in outcomes]
        return np.mean(weighted), np.mean(sampled)

    truth = mean_scores(0, 1)
    for other in ((0.3, 1), (-0.3, 1), (0, 0.6), (0, 1.6)):
        assert np.all(np.array(mean_scores(*other)) > truth)


def test_compute_equivalent():
    assert score.compute_equivalent(2.039, 1.982, 1.5, 0.08998) == pytest.approx(3.46, abs=5e-3)
    assert score.compute_equivalent(3.1605, 3.1357, 1.6, 0.0941) == pytest.approx(1.186, abs=5e-4)
    assert score.compute_equivalent(3.8104, 3.7542, 1.6, 0.0941) == pytest.approx(1.315, abs=5e-4)
    with pytest.raises(UsageError):
        score.compute_equivalent(2.0, 1.4, 1.5, 0.09)


def test_bands_on_both_sides():
    """Inside 50 % is green, inside 90 % normal, beyond amber; red only twice running."""
    one = [normal(0, 1)]
    for sign in (-1, 1):
        for z, band in ((0.0, "green"), (0.67, "green"), (0.68, "normal"), (1.64, "normal"),
                        (1.65, "amber"), (2.57, "amber"), (9.0, "amber")):  # fmt: skip
            assert score.band_names(one, [sign * z]) == [band]
    five = one * 5
    assert score.band_names(five, [0, 9, 0, 9, 0]) == ["green", "amber", "green", "amber", "green"]
    assert score.band_names(five, [0, 9, -9, 9, 2]) == ["green", "amber", "red", "red", "amber"]
    assert score.band_names(five, [2, 3, 2, 3, 3]) == ["amber", "amber", "amber", "amber", "red"]


def test_a_run_on_the_median(body):
    result = score.score_run(body, {mark: centre(mark) for mark in MARKS})
    assert result["num_scored"] == 20
    assert result["verdict"] == "clear"
    assert {mark["band"] for mark in result["marks"]} == {"green"}
    assert result["coverage"]["0.5"] == {"share": 1.0, "low": 1.0, "high": 1.0}
    final = result["final"]
    assert final["mark"] == "1.00"
    assert (final["error"], final["z"]) == pytest.approx((0, 0), abs=1e-9)
    assert final["crps"] == pytest.approx(0.0046739, abs=1e-6)
    assert result["baselines"]["B0"]["final_error"] == pytest.approx(0.01)
    assert result["baselines"]["B0"]["mean_absolute_error"] == pytest.approx(0.01)
    assert result["baselines"]["B0"]["final_skill"] == pytest.approx(1 - final["wis"] / 0.01)
    assert result["baselines"]["B2"]["final_by_mark"]["0.50"] == pytest.approx(2.0)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_run_that_misses(body):
    outcomes = {mark: centre(mark) - 0.04 for mark in MARKS}
    result = score.score_run(body, outcomes)
    final = result["final"]
    assert final["z"] == pytest.approx(-2)
    assert final["crps"] == pytest.approx(0.0290558, abs=1e-6)
    assert final["wis"] == pytest.approx(0.0215746, abs=1e-6)
    assert final["log_score"] == pytest.approx(-0.993084, abs=1e-6)
    assert final["side"] == "below"
    assert final["error_percent_of_loss"] == pytest.approx(100 * 0.04 / 1.96)
    assert final["error_percent_of_excess"] == pytest.approx(100 * 0.04 / 0.46)
    assert final["compute_equivalent"] == pytest.approx((0.5 / 0.46) ** (1 / 0.09))
    assert (result["last_band"], result["worst_band"], result["verdict"]) == (
        "amber", "amber", "watch",
    )  # fmt: skip
    assert {level: row["share"] for level, row in result["coverage"].items()} == {
        "0.5": 0.0, "0.8": 0.0, "0.95": 0.0,
    }  # fmt: skip
    assert result["baselines"]["B2"]["made_at"] == "0.50"
    assert result["baselines"]["B2"]["final_error"] == pytest.approx(0, abs=1e-9)
    assert result["baselines"]["B2"]["final_skill"] is None or math.isfinite(
        result["baselines"]["B2"]["final_skill"]
    )


def test_red_and_recovery(body):
    outcomes = {mark: centre(mark) for mark in MARKS[:10]}
    outcomes |= {MARKS[8]: centre(MARKS[8]) + 0.1, MARKS[9]: centre(MARKS[9]) + 0.1}
    live = score.score_run(body, outcomes)
    assert (live["last_band"], live["verdict"], live["final"]) == ("red", "off course", None)
    later = score.score_run(body, outcomes | {MARKS[10]: centre(MARKS[10])})
    assert (later["last_band"], later["worst_band"], later["verdict"]) == ("green", "red", "clear")


def test_only_evaluations_under_the_conditions_count(body):
    outcomes = {mark: centre(mark) + (0.3 if float(mark) > 0.5 else 0) for mark in MARKS}
    status = {"0.20": "unverified", "0.55": "mismatch"}
    result = score.score_run(body, outcomes, status=status)
    assert result["verdict"] == "void"
    found = (result["num_scored"], result["num_void"], result["num_unverified"])
    assert found == (9, 10, 1), "what is void once stays void"
    assert result["worst_band"] == "green"
    assert result["final"] is None
    nothing = score.score_run(body, {"0.05": 2.0}, status={"0.05": "unverified"})
    assert (nothing["verdict"], nothing["coverage"], nothing["last_band"]) == (
        "unverified", {}, None,
    )  # fmt: skip
    assert score.score_run(body, {})["verdict"] == "not evaluated"


def test_evaluations_between_marks(body):
    result = score.score_run(body, {0.01: 9.0, 0.075: centre(0.075), "0.10": centre("0.10")})
    assert [mark["mark"] for mark in result["marks"]] == ["0.075", "0.10"]
    assert result["marks"][0]["z"] == pytest.approx(0, abs=1e-9)
    with pytest.raises(UsageError, match="micro"):
        score.score_run(body, {}, metric="micro_loss")


def test_coverage_range_is_repeatable_and_wider_than_the_share():
    inside = [True] * 12 + [False] * 8
    low, high = score.coverage_interval(inside)
    assert (low, high) == score.coverage_interval(inside)
    assert low < 0.6 < high
    assert score.coverage_interval([True, False])[0] >= 0


def test_persistence_on_the_public_run(shared_data, public_rungs):
    """B2 from the published evaluations of the target up to 40 % (marin #8435)."""
    ladder = by_width(public_rungs, "eval_dropless/paloma/macro_loss")
    baseline = forecast_baseline(ladder, 6690294608796057600 * 390_251)
    with (shared_data / "marin" / "hero_eval_to_40pct.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["dropless_paloma_macro"]]
    points = [(int(row["step"]) / 390_251, float(row["dropless_paloma_macro"])) for row in rows]
    expected = {10: 1.9783, 15: 1.9961, 20: 2.0183, 25: 2.0209, 30: 2.0252, 35: 2.0250, 40: 2.0422}
    for percent, final in expected.items():
        residuals = [
            loss - value
            for fraction, loss in points
            if fraction <= percent / 100 and (value := baseline.at(fraction)) is not None
        ]
        found = score.last_residual_persistence(baseline.values[-1], residuals)
        assert found == pytest.approx(final, abs=1e-4)
    with pytest.raises(UsageError):
        score.last_residual_persistence(2.0, [])


def test_the_macro_loss_is_the_plain_mean_of_the_public_domains(shared_data):
    """Sixteen domains of the public d1536 rung: old, new and forecast (marin #9126)."""
    with (shared_data / "marin" / "d1536_mixswap_forecast.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "loss"]
    domains = [row for row in rows if row["subset"] != "macro"]
    assert len(domains) == 16
    expected = {
        "old_ladder_final": 2.563774,
        "new_final_actual": 2.543170,
        "forecast_from_95pct": 2.543509,
    }
    for column, value in expected.items():
        losses = [DomainLoss(float(row[column]), 1, 0) for row in domains]
        assert macro_loss(losses) == pytest.approx(value, abs=1e-6)
