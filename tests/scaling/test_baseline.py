"""F0 reproduces the public forecast (marin #8435) and names its defects."""

import csv

import numpy as np
import pytest

from portolan.errors import UsageError
from portolan.scaling import baseline, curves
from portolan.scaling.ladder import derive

METRIC = "eval_dropless/paloma/macro_loss"
TARGET_FLOPS = 6690294608796057600 * 390_251

# percent: A, alpha, forecast, leave-one-out range.
ROWS = {
    5: (67.5503, 0.081296, 2.3921, 2.3855, 2.4135),
    10: (57.6859, 0.078748, 2.3261, 2.3205, 2.3379),
    15: (59.4334, 0.079598, 2.2872, 2.2816, 2.2999),
    20: (63.2861, 0.081043, 2.2571, 2.2524, 2.2664),
    25: (64.1051, 0.081360, 2.2402, 2.2295, 2.2642),
    30: (64.2566, 0.081549, 2.2234, 2.2213, 2.2285),
    35: (64.1849, 0.081533, 2.2142, 2.2099, 2.2270),
    40: (72.7456, 0.084348, 2.1853, 2.1759, 2.1993),
    45: (64.1124, 0.081717, 2.1918, 2.1850, 2.2033),
    50: (67.2991, 0.082948, 2.1724, 2.1697, 2.1740),
    55: (73.2689, 0.084969, 2.1491, 2.1425, 2.1566),
    60: (74.8419, 0.085606, 2.1352, 2.1317, 2.1407),
    65: (76.1651, 0.086124, 2.1237, 2.1215, 2.1300),
    70: (77.0251, 0.086595, 2.1105, 2.1061, 2.1166),
    75: (78.7829, 0.087287, 2.0971, 2.0946, 2.1031),
    80: (80.3810, 0.087907, 2.0852, 2.0830, 2.0899),
    85: (78.6677, 0.087664, 2.0775, 2.0769, 2.0791),
    90: (80.5210, 0.088400, 2.0643, 2.0635, 2.0650),
    95: (83.0721, 0.089310, 2.0505, 2.0494, 2.0521),
    100: (84.7876, 0.089976, 2.0388, 2.0378, 2.0415),
}
# asymptote: A, alpha, final forecast, root mean square of the log residuals.
ASYMPTOTES = {
    0: (17.612, 0.03953, 1.9077, 0.00449),
    0.5: (22.014, 0.04858, 1.9343, 0.00443),
    1.0: (33.690, 0.06303, 1.9738, 0.00350),
    1.2: (44.514, 0.07158, 1.9956, 0.00249),
    1.3: (53.156, 0.07680, 2.0084, 0.00172),
    1.4: (65.682, 0.08286, 2.0227, 0.00084),
    1.45: (74.165, 0.08627, 2.0305, 0.00075),
    1.5: (84.788, 0.08998, 2.0388, 0.00130),
    1.55: (98.320, 0.09402, 2.0477, 0.00220),
    1.6: (115.897, 0.09846, 2.0571, 0.00334),
    1.7: (171.079, 0.10876, 2.0782, 0.00642),
    1.8: (280.957, 0.12155, 2.1025, 0.01101),
}
# width: slope of the line through 60..80 %, its value at the end, the actual final.
TAILS = {
    768: (-0.466182, 3.011773, 3.015353),
    1024: (-0.429069, 2.777960, 2.780875),
    1536: (-0.386630, 2.560617, 2.563774),
    2048: (-0.350824, 2.403708, None),
}


@pytest.fixture(scope="module")
def ladder(public_rungs):
    return curves.by_width(public_rungs, METRIC)


@pytest.fixture(scope="module")
def forecast(ladder):
    return baseline.forecast_baseline(ladder, TARGET_FLOPS)


def test_headline(forecast):
    law = forecast.laws[-1]
    assert law.coefficient == pytest.approx(84.787593, abs=1e-3)
    assert law.exponent == pytest.approx(0.08997568, abs=1e-7)
    assert forecast.values[-1] == pytest.approx(2.0387846, abs=1e-6)


def test_all_marks(forecast):
    assert [5 * mark for mark in forecast.marks] == list(ROWS)
    for row, law, value, (low, high) in zip(
        ROWS.values(), forecast.laws, forecast.values, forecast.ranges, strict=True
    ):
        assert law.coefficient == pytest.approx(row[0], abs=5.1e-5)
        assert law.exponent == pytest.approx(row[1], abs=5.1e-7)
        assert (value, low, high) == pytest.approx(row[2:], abs=5.1e-5)


def test_the_mark_that_rises_is_reported(forecast):
    assert len(forecast.warnings) == 1
    assert "0.45" in forecast.warnings[0]


@pytest.mark.parametrize("asymptote", ASYMPTOTES)
def test_asymptote_table(ladder, asymptote):
    found = baseline.forecast_baseline(ladder, TARGET_FLOPS, asymptote=asymptote)
    law = found.laws[-1]
    coefficient, exponent, value, rms = ASYMPTOTES[asymptote]
    assert law.coefficient == pytest.approx(coefficient, abs=5.1e-4)
    assert (law.exponent, law.rms) == pytest.approx((exponent, rms), abs=5.1e-6)
    assert found.values[-1] == pytest.approx(value, abs=5.1e-5)


def test_asymptote_sensitivity(ladder):
    low, high = (
        baseline.forecast_baseline(ladder, TARGET_FLOPS, asymptote=e).values[-1]
        for e in (1.499, 1.501)
    )
    assert (high - low) / 0.002 == pytest.approx(0.172, abs=5e-4)


def test_tail_constants(ladder):
    for constant, value in {0: 2.0341, 0.0032: 2.0371, 0.005: 2.0388, 0.010: 2.0434}.items():
        found = baseline.forecast_baseline(ladder, TARGET_FLOPS, tail_constant=constant)
        assert found.values[-1] == pytest.approx(value, abs=5.1e-5)


def test_tail_lines(ladder):
    for curve in ladder:
        slope, end, actual = TAILS[curve.width]
        found_slope, intercept = curves.straight_line(curve.values)
        assert (found_slope, found_slope + intercept) == pytest.approx((slope, end), abs=5.1e-7)
        if actual is None:
            assert sorted(curve.line) == [17, 18, 19, 20]
            assert curve.value(20, 0.005) == pytest.approx(2.408708, abs=1e-6)
        else:
            assert curve.line == {}
            assert curve.values[20] == pytest.approx(actual, abs=1e-6)


def test_axis_moves_the_headline(ladder):
    axes = {"flops_with_head": (139.355, 0.099556, 2.0151), "flops_6nt": (69.073, 0.086189, 2.0459)}
    plans = {width: derive(width, 791, "ladder", "per_rack") for width in TAILS}
    target = derive(6144, 791, "ladder", "per_rack", overrides={"num_layers": 48})
    for axis, (coefficient, exponent, value) in axes.items():
        found = baseline.forecast_baseline(
            ladder,
            getattr(target, axis),
            flops_of=lambda curve, axis=axis: getattr(plans[curve.width], axis),
        )
        assert found.laws[-1].coefficient == pytest.approx(coefficient, abs=5.1e-4)
        assert found.laws[-1].exponent == pytest.approx(exponent, abs=5.1e-7)
        assert found.values[-1] == pytest.approx(value, abs=5.1e-5)


def test_the_later_of_two_evaluations_is_kept(public_points):
    assert curves.snap(public_points[1536])[20] == 2.5637738704681396
    swapped = [*public_points[1536][:-2], *reversed(public_points[1536][-2:])]
    earlier = {**public_points, 1536: swapped}
    ladder = [
        curves.WidthCurve(width, 0, flops, values, {}, curves.extend(values))
        for width, flops, values in (
            (width, steps_flops, curves.snap(points))
            for (width, points), steps_flops in zip(
                earlier.items(),
                (derive(width, 791, "ladder", "per_rack").flops_no_head for width in earlier),
                strict=True,
            )
        )
    ]
    wrong = baseline.forecast_baseline(ladder, TARGET_FLOPS).values[-1]
    assert wrong == pytest.approx(2.0388142, abs=1e-7)
    assert wrong != pytest.approx(2.0387846, abs=1e-5)


def test_far_evaluations_are_not_snapped():
    assert curves.snap([(0.061, 1.0), (0.11, 2.0), (0.0, 9.0), (1.0, 3.0)]) == {2: 2.0, 20: 3.0}


def test_between_marks_the_forecast_is_linear(forecast):
    middle = 0.5 * (forecast.values[0] + forecast.values[1])
    assert forecast.at(0.075) == pytest.approx(middle)
    assert forecast.at(0.04) is None


def test_an_asymptote_above_a_loss_is_refused():
    with pytest.raises(UsageError, match="asymptote"):
        baseline.fit_power_law([1e18, 1e19, 1e20], [3.0, 2.0, 1.4], 1.5)


def test_exact_law_is_recovered():
    flops = np.array([1e18, 1e19, 1e20])
    law = baseline.fit_power_law(list(flops), list(1.2 + 30 * flops**-0.08), 1.2)
    assert (law.coefficient, law.exponent) == pytest.approx((30, 0.08))
    assert law.rms == pytest.approx(0, abs=1e-12)


def test_published_grid_and_trajectory(shared_data, public_points, forecast):
    """Bulk check of the constants above against the published files."""
    with (shared_data / "marin" / "ladder_eval_grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    for width, points in public_points.items():
        published = [
            (int(row["step"]) / int(row["total_steps"]), float(row["loss"]))
            for row in rows
            if row["rung"] == f"d{width}"
        ]
        assert list(points) == published
    with (shared_data / "marin" / "forecast_trajectory.csv").open() as file:
        trajectory = list(csv.DictReader(file))
    for row, law, value, (low, high) in zip(
        trajectory, forecast.laws, forecast.values, forecast.ranges, strict=True
    ):
        published = [float(row[key]) for key in ("A", "alpha", "rms_log_residual_2dof")]
        assert [law.coefficient, law.exponent, law.rms] == pytest.approx(published, rel=1e-8)
        published = [float(row[key]) for key in ("forecast_loss", "loo_low", "loo_high")]
        assert [value, low, high] == pytest.approx(published, rel=1e-9)


def test_sensitivity_table(ladder):
    """The printed table is the published one, and its rows are those of single fits."""
    found = baseline.sensitivity_table(ladder, TARGET_FLOPS)
    rows = {what: (law, value) for what, law, value in found}
    assert len(rows) == 16
    for asymptote, value in ((0, 1.9077), (1.0, 1.9738), (1.5, 2.0388), (1.8, 2.1025)):
        assert rows[f"E = {asymptote:g}"][1] == pytest.approx(value, abs=6e-5)
    assert rows["E = 1.45"][0].rms == pytest.approx(0.00075, abs=6e-6)
    for constant, value in ((0, 2.0341), (0.0032, 2.0371), (0.01, 2.0434)):
        assert rows[f"tail constant {constant:g}"][1] == pytest.approx(value, abs=6e-5)
