"""Forecasts of whole ladders: public goldens, seeds, refusals, determinism, time."""

import dataclasses

import numpy as np
import pytest

from portolan.errors import UsageError
from portolan.scaling import curves
from portolan.scaling.forecast import forecast_ladder
from portolan.scaling.interval import LEVELS
from portolan.scaling.ladder import derive
from portolan.scaling.rung_backtests import backtest

PUBLIC_METRIC = "eval_dropless/paloma/macro_loss"
MACRO = "eval_dropless/heldout/macro_loss"


@pytest.fixture(scope="module")
def public_forecast(public_rungs, public_target):
    return forecast_ladder(public_rungs, public_target, asymptote="public", method="F1")


@pytest.fixture(scope="module")
def micro_forecast(micro_ladder, micro_target):
    return forecast_ladder(micro_ladder, micro_target, method="F1")


def test_public_forecast(public_forecast):
    metric = public_forecast.metrics[PUBLIC_METRIC]
    shown = (1.9799, 1.9982, 2.0148, 2.0336, 2.0528, 2.0704, 2.0904)
    levels = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
    assert [metric.quantile(level) for level in levels] == pytest.approx(shown, abs=2e-4)
    assert metric.baseline[-1] == pytest.approx(2.0387846, abs=1e-6)
    assert metric.law.coefficient == pytest.approx(84.787593, abs=1e-3)
    assert metric.asymptote_mean == pytest.approx(1.466, abs=6e-4)
    assert any("rises at mark 0.45" in warning for warning in public_forecast.warnings)
    assert any("2048 is extrapolated" in warning for warning in public_forecast.warnings)
    assert any("337 times" in warning for warning in public_forecast.warnings)


def test_record_form(public_forecast):
    quantiles = public_forecast.quantiles_record()[PUBLIC_METRIC]
    assert list(quantiles) == [f"{k / 20:.2f}" for k in range(1, 21)]
    for row in quantiles.values():
        assert [float(label) for label in row] == list(LEVELS)
        assert list(row.values()) == sorted(row.values())
    baseline = public_forecast.baseline_record()
    assert baseline["F0"]["1.00"] == 2.038785
    assert baseline["alpha"] == pytest.approx(0.08997568, abs=1e-7)
    truncated = public_forecast.inputs[-1]
    assert truncated["extrapolated"] == ["0.85", "0.90", "0.95", "1.00"]
    assert "extrapolated" not in public_forecast.inputs[0]


def test_every_loss_is_forecast(micro_forecast):
    assert sorted(micro_forecast.metrics) == [
        "eval_dropless/heldout/code/loss",
        MACRO,
        "eval_dropless/heldout/micro_loss",
    ]
    assert micro_forecast.headline == MACRO
    for metric in micro_forecast.metrics.values():
        assert metric.quantiles.shape == (20, 13)
        assert np.all(np.diff(metric.quantiles, axis=1) > 0)
        assert np.all(np.diff(metric.quantiles[:, 6]) < 0)
        best_final = metric.rule.mean / 0.60
        assert metric.rule.kappa == pytest.approx(0.01 * best_final)
        assert metric.law.asymptote == pytest.approx(0.55 * best_final)


def test_the_truth_of_a_synthetic_ladder_is_covered(micro_forecast, micro_target):
    truth = 2.0 + 60 * micro_target.flops**-0.11
    metric = micro_forecast.metrics[MACRO]
    assert metric.quantile(0.05) < truth < metric.quantile(0.95)
    assert metric.median == pytest.approx(truth, abs=0.05)


def test_repeated_seeds_are_averaged_and_measured(micro_ladder, micro_target, micro_forecast):
    ladder = curves.by_width(micro_ladder, MACRO)
    assert [curve.width for curve in ladder] == [32, 48, 64]
    assert ladder[0].num_seeds[20] == 3
    assert ladder[0].values[20] == pytest.approx(curves.snap(micro_ladder[1].points[MACRO])[20])
    assert curves.pooled_seed_sd(micro_ladder, MACRO, 20) == pytest.approx(0.01)
    assert micro_forecast.metrics[MACRO].noise == pytest.approx([0.01] * 20)
    single = [rung for rung in micro_ladder if rung.seed == 1 or rung.width > 32]
    assert curves.pooled_seed_sd(single, MACRO, 20) is None
    forecast = forecast_ladder(single, micro_target, metrics=[MACRO], method="F1")
    assert forecast.metrics[MACRO].noise == pytest.approx([0.004] * 20)
    assert any("no repeated seed" in warning for warning in forecast.warnings)
    assert not any("no repeated seed" in warning for warning in micro_forecast.warnings)


def test_more_seeds_narrow_the_interval(micro_ladder, micro_target):
    rungs = [
        dataclasses.replace(rung, run_id=f"{rung.run_id}-{copy}")
        for rung in micro_ladder
        for copy in range(4)
    ]

    def width(ladder):
        forecast = forecast_ladder(ladder, micro_target, metrics=[MACRO], method="F1")
        metric = forecast.metrics[MACRO]
        return metric.quantile(0.975) - metric.quantile(0.025)

    assert width(rungs) < width(micro_ladder)


def test_order_of_the_rungs_does_not_matter(micro_ladder, micro_target, micro_forecast):
    again = forecast_ladder(micro_ladder[::-1], micro_target, metrics=[MACRO], method="F1")
    metric = micro_forecast.metrics[MACRO]
    assert again.metrics[MACRO].quantiles == pytest.approx(metric.quantiles, abs=1e-9)
    repeated = forecast_ladder(micro_ladder, micro_target, metrics=[MACRO], method="F1")
    assert repeated.quantiles_record()[MACRO] == micro_forecast.quantiles_record()[MACRO]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr_capped": True}, "lr_capped"),
        ({"beta2_guard": True}, "beta2_guard"),
        ({"family": "small"}, "family"),
        ({"tokens_per_active_param": 8}, "tokens_per_active_param"),
        ({"metric_identity": "other"}, "held-out"),
        ({"steps": 19}, "19 steps"),
    ],
)
def test_mixed_ladders_are_refused(micro_ladder, micro_target, change, words):
    rungs = [*micro_ladder[:-1], dataclasses.replace(micro_ladder[-1], **change)]
    with pytest.raises(UsageError, match=words):
        forecast_ladder(rungs, micro_target, method="F1")


def test_a_foreign_target_is_refused(micro_ladder, micro_target):
    for change in ({"family": "ladder"}, {"tokens_per_active_param": 8}, {"steps": 10}):
        with pytest.raises(UsageError, match="d96"):
            forecast_ladder(micro_ladder, dataclasses.replace(micro_target, **change))


def test_three_widths_are_needed(micro_ladder, micro_target):
    two = [rung for rung in micro_ladder if rung.width < 64]
    with pytest.raises(UsageError, match="3 widths"):
        forecast_ladder(two, micro_target)
    forecast = forecast_ladder(two, micro_target, min_rungs=2, metrics=[MACRO], method="F1")
    assert any("two rungs" in warning for warning in forecast.warnings)
    one = [rung for rung in micro_ladder if rung.width == 32]
    with pytest.raises(UsageError, match="2 widths"):
        forecast_ladder(one, micro_target, min_rungs=1)


def test_missing_evaluations(micro_ladder, micro_target):
    last = micro_ladder[-1]

    def without(marks):
        points = tuple(p for p in last.points[MACRO] if round(20 * p[0]) not in marks)
        return [*micro_ladder[:-1], dataclasses.replace(last, points={MACRO: points})]

    gap = forecast_ladder(without({3}), micro_target, method="F1")
    assert 3 not in gap.metrics[MACRO].marks
    assert any("no forecast at marks 0.15" in warning for warning in gap.warnings)
    assert any("micro_loss: not evaluated" in warning for warning in gap.warnings)
    stopped = forecast_ladder(without({17, 18, 19, 20}), micro_target, method="F1")
    assert stopped.metrics[MACRO].marks[-1] == 20
    with pytest.raises(UsageError, match="final"):
        forecast_ladder(without(set(range(12, 21))), micro_target, method="F1")
    with pytest.raises(UsageError, match="missing"):
        forecast_ladder(micro_ladder, micro_target, metrics=["accuracy"])


def test_different_budgets_of_one_width_are_not_averaged(micro_ladder, micro_target):
    other = dataclasses.replace(micro_ladder[1], flops=2 * micro_ladder[1].flops)
    with pytest.raises(UsageError, match="budgets"):
        forecast_ladder([micro_ladder[0], other, *micro_ladder[2:]], micro_target)


def test_evaluations_of_short_runs_keep_their_marks():
    """At 30 steps the second mark is after 3 updates and the third after 4 (of 4.5)."""
    points = curves.points_from_completed({2: 5.0, 3: 4.0, 4: 3.0, 5: 2.5, 30: 1.0}, 30)
    assert curves.snap(points) == {1: 5.0, 2: 4.0, 3: 3.0, 20: 1.0}


def test_backtest(micro_ladder, public_rungs):
    (row,) = backtest(micro_ladder, metric=MACRO, method="F1")
    assert (row["width"], row["from_widths"], row["mark"]) == (64, [32, 48], "1.00")
    assert row["inside_95"]
    rows = backtest(public_rungs, asymptote="public", method="F1")
    assert [row["width"] for row in rows] == [1536, 2048, 2048]
    assert [len(row["from_widths"]) for row in rows] == [2, 2, 3]
    assert rows[-1]["mark"] == "0.80"
    assert abs(rows[0]["error"]) < 0.03
    assert abs(rows[-1]["error"]) < 0.03


def test_plans_carry_the_flags():
    capped = derive(32, 4, "micro", "token_power")
    curve = curves.RungCurve.from_rung(capped, run_id="x", evaluations={MACRO: {1: 5.0}})
    assert curve.lr_capped
    assert curves.TargetPlan.from_rung(capped, run_id="x").lr_capped
