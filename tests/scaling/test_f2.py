"""F2 on the public rungs and on synthetic ladders with known truth."""

import dataclasses
import time

import numpy as np
import pytest

from portolan.scaling import f2
from portolan.scaling.curve_model import SHAPES, CurveData, CurveModel, LawPrior
from portolan.scaling.curves import snap
from portolan.scaling.domains import sum_domains
from portolan.scaling.f2 import PublicLaw, forecast_curves
from portolan.scaling.forecast import forecast_ladder
from portolan.scaling.interval import LEVELS
from portolan.scaling.learnt import excluded_suites, learnt_prior
from portolan.scaling.score import last_residual_persistence

METRIC = "eval_dropless/paloma/macro_loss"
MACRO = "eval_dropless/heldout/macro_loss"
FINAL_1536 = 2.5637738704681396
MEDIAN = LEVELS.index(0.5)


def cut(rung, fraction):
    points = {n: tuple(p for p in v if p[0] <= fraction + 0.004) for n, v in rung.points.items()}
    return dataclasses.replace(rung, points=points)


def with_curve(rung, values, last=20):
    points = tuple((k / 20, float(values[k - 1])) for k in range(1, last + 1))
    return dataclasses.replace(rung, points={METRIC: points})


@pytest.fixture(scope="module")
def public(public_rungs, public_target):
    return forecast_curves(public_rungs, public_target, METRIC, PublicLaw())


def mean_shape(rungs, offset):
    """Mean over the finished rungs of ln((L_k - E_s) / (L_20 - E_s)), marks 1..20."""
    curves = [snap(rung.points[METRIC]) for rung in rungs[:3]]
    return np.mean(
        [[np.log((c[k] - offset) / (c[20] - offset)) for k in range(1, 21)] for c in curves], axis=0
    )


def synthetic(rungs, target, *, size=0.0, noise=0.0, seed=0):
    """Rungs and target with E = 1.5, alpha = 0.09, E_s = 0.3, transient b = size, u0 = 1500."""
    rng = np.random.default_rng(seed)
    shape, scale = mean_shape(rungs, 0.3), 85.0
    marks = np.arange(1, 21) / 20
    losses = []
    for run in (*rungs, target):
        end = 1.5 + scale * float(run.flops) ** -0.09
        growth = shape + size * np.exp(-marks * run.steps / 1500)
        losses.append(0.3 + (end - 0.3) * np.exp(growth) + noise * rng.standard_normal(20))
    return [with_curve(r, c) for r, c in zip(rungs, losses, strict=False)], losses[-1]


def test_public_forecast(public):
    assert public.quantiles.shape == (20, 13)
    assert np.all(np.diff(public.quantiles, axis=1) > 0)
    assert np.all(np.diff(public.quantiles[1:, MEDIAN]) <= 0)
    assert set(public.shapes) == set(SHAPES)
    assert sum(shape.weight for shape in public.shapes.values()) == pytest.approx(1)
    completed = {item.run_id: item for item in public.completions}
    assert 2.398 < completed["d2048"].quantiles[MEDIAN] < 2.412
    assert completed["d2048"].last_mark == 16
    assert public.seed_sd is None
    assert 0.002 < public.noise < 0.005


def test_repeatable_and_fast(public, public_rungs, public_target):
    begin = time.process_time()
    again = forecast_curves(public_rungs[::-1], public_target, METRIC, PublicLaw())
    assert time.process_time() - begin < 60
    np.testing.assert_array_equal(again.quantiles, public.quantiles)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_cut_rung_is_completed(public_rungs, public_target, position):
    """Cut at 60 %, it is completed within 0.006 under the offset shape, and covered."""
    rungs = list(public_rungs)
    actual = snap(rungs[position].points[METRIC])[20]
    rungs[position] = cut(rungs[position], 0.6)
    found = forecast_curves(rungs, public_target, METRIC, PublicLaw(), shapes=("offset",))
    completion = found.completions[position]
    assert completion.last_mark == 12
    assert completion.quantiles[MEDIAN] == pytest.approx(actual, abs=0.006)
    if position == 2:
        both = forecast_curves(rungs, public_target, METRIC, PublicLaw()).completions[position]
        assert both.quantiles[MEDIAN] == pytest.approx(FINAL_1536, abs=0.010)
        assert both.quantiles[LEVELS.index(0.025)] < FINAL_1536
        assert both.quantiles[LEVELS.index(0.975)] > FINAL_1536


def test_shape_offset_table(public_rungs):
    """Published completions with a fixed offset, and that 1.5 loses to 0, 0.3 and 0.5."""
    curves = [snap(rung.points[METRIC]) for rung in public_rungs]

    def complete(index, last, offset):
        others = [c for i, c in enumerate(curves[:3]) if i != index]
        shape = np.mean(
            [[np.log((c[k] - offset) / (c[20] - offset)) for k in range(1, 21)] for c in others],
            axis=0,
        )
        marks = range(last - 4, last + 1)
        level = np.mean([np.log(curves[index][k] - offset) - shape[k - 1] for k in marks])
        return offset + np.exp(level)

    table = {
        (8, 0.0): (0.0014, -0.0000, -0.0012), (8, 1.5): (-0.0392, -0.0030, 0.0308),
        (12, 0.3): (-0.0044, 0.0047, -0.0006), (16, 0.5): (-0.0018, 0.0016, 0.0000),
        (16, 1.0): (-0.0071, 0.0013, 0.0044),
    }  # fmt: skip
    for (last, offset), errors in table.items():
        found = [complete(i, last, offset) - curves[i][20] for i in range(3)]
        assert found == pytest.approx(errors, abs=1e-4)
    finals = {0.0: 2.4014, 0.3: 2.4033, 0.5: 2.4048, 1.0: 2.4100, 1.5: 2.4188}
    for offset, value in finals.items():
        assert complete(3, 16, offset) == pytest.approx(value, abs=1e-4)
    for last in (8, 12, 16):
        rms = {
            offset: np.sqrt(
                np.mean([(complete(i, last, offset) - curves[i][20]) ** 2 for i in range(3)])
            )
            for offset in (0.0, 0.3, 0.5, 1.5)
        }
        assert rms[1.5] > max(rms[offset] for offset in (0.0, 0.3, 0.5))


def test_tilt_variant_of_the_table(public_rungs):
    """With E_s = 1.5 and a shape linear in ln C, the completed d2048 is 2.4062."""
    curves = [snap(rung.points[METRIC]) for rung in public_rungs]
    x = np.log([float(rung.flops) for rung in public_rungs])
    table = np.array([[np.log((c[k] - 1.5) / (c[20] - 1.5)) for k in range(1, 21)]
                      for c in curves[:3]])  # fmt: skip
    slope, start = np.polyfit(x[:3], table, 1)
    shape = start + slope * x[3]
    level = np.mean([np.log(curves[3][k] - 1.5) - shape[k - 1] for k in range(12, 17)])
    assert 1.5 + np.exp(level) == pytest.approx(2.4062, abs=1e-4)


def test_noise_free_rungs_are_recovered(public_rungs, public_target):
    rungs, truth = synthetic(public_rungs, public_target)
    found = forecast_curves(rungs, public_target, METRIC, PublicLaw(), shapes=("offset",))
    assert found.shapes["offset"].moments["slope"][0] == pytest.approx(0.09, abs=0.002)
    assert found.quantile(0.5) == pytest.approx(truth[-1], abs=0.01)
    for item, rung in zip(found.completions, rungs, strict=True):
        end = snap(rung.points[METRIC])[20]
        assert item.quantiles[MEDIAN] == pytest.approx(end, abs=0.003)


def test_live_evaluations_condition_but_do_not_overrule(public_rungs, public_target):
    """A transient of 1,500 steps: persistence is fooled by the early lead, F2 is not."""
    rungs, truth = synthetic(public_rungs, public_target, size=0.3, noise=0.004)
    _, clean = synthetic(public_rungs, public_target, size=0.3)
    live = [(k / 20, truth[k - 1]) for k in range(1, 5)]
    found = forecast_curves(rungs, public_target, METRIC, PublicLaw(), live=live)
    assert found.quantile(0.5) == pytest.approx(clean[-1], abs=0.015)
    assert found.quantile(0.025) < clean[-1] < found.quantile(0.975)
    sd = (found.quantile(0.975) - found.quantile(0.025)) / 3.92
    assert sd >= np.hypot(0.004, 0.02 * 0.8) - 1e-4
    assert found.progress == pytest.approx(0.2)
    baseline = forecast_ladder(
        rungs, public_target, method="F1", asymptote="public"
    ).metrics[METRIC].baseline  # fmt: skip
    residuals = [truth[k] - baseline[k] for k in range(2)]
    persistence = last_residual_persistence(baseline[-1], residuals)
    assert abs(persistence - clean[-1]) > 0.03


def test_later_evaluations_narrow_the_end(public_rungs, public_target):
    rungs, truth = synthetic(public_rungs, public_target, noise=0.004)
    widths = []
    for progress in (4, 12, 19):
        live = [(k / 20, truth[k - 1]) for k in range(1, progress + 1)]
        found = forecast_curves(rungs, public_target, METRIC, PublicLaw(), live=live)
        widths.append(found.quantile(0.975) - found.quantile(0.025))
        assert widths[-1] / 3.92 >= np.hypot(0.003, 0.02 * (1 - progress / 20)) - 1e-3
    assert widths == sorted(widths, reverse=True)


def test_relative_law_on_a_small_ladder(micro_ladder, micro_target):
    """Three widths, three seeds on one: all metrics, seeds measured, domains added up."""
    forecast = forecast_ladder(micro_ladder, micro_target)
    assert forecast.method == "F2"
    metric = forecast.metrics[MACRO]
    truth = 2.0 + 60 * micro_target.flops**-0.11
    assert metric.quantile(0.05) < truth < metric.quantile(0.95)
    assert metric.curve.seed_sd == pytest.approx(0.01)
    assert metric.marks == tuple(range(1, 21))
    assert forecast.parameters["law_prior"]["asymptote_ratio"] == pytest.approx(
        learnt_prior().asymptote_ratio, abs=1e-6
    )
    assert forecast.parameters["F1_final"]["0.5"] == pytest.approx(metric.reference[MEDIAN], 1e-5)
    assert metric.baseline[-1] == pytest.approx(truth, abs=0.1)
    assert forecast.summed_macro is None
    again = forecast_ladder(micro_ladder, micro_target)
    assert again.quantiles_record() == forecast.quantiles_record()


def test_domains_that_average_to_the_macro(micro_ladder, micro_target):
    rungs = []
    for rung in micro_ladder:
        macro = rung.points[MACRO]
        parts = {
            f"eval_dropless/heldout/{name}/loss": tuple((f, v + s) for f, v in macro)
            for name, s in (("a", -0.3), ("b", 0.3))
        }
        rungs.append(dataclasses.replace(rung, points={MACRO: macro, **parts}))
    forecast = forecast_ladder(rungs, micro_target)
    summed = forecast.summed_macro
    assert len(summed.domains) == 2
    assert summed.median == pytest.approx(forecast.metrics[MACRO].median, abs=0.05)
    assert not summed.disagrees
    shifted = {name: item.curve for name, item in forecast.metrics.items()}
    moved = {
        name: dataclasses.replace(curve, quantiles=curve.quantiles + (name != MACRO))
        for name, curve in shifted.items()
    }
    assert sum_domains(moved, MACRO, rungs).disagrees


def test_ratio_term_only_where_the_ladder_varies_it(public_rungs, public_target):
    other = dataclasses.replace(
        public_rungs[1], run_id="half", tokens_per_active_param=395.5,
        steps=public_rungs[1].steps // 2, flops=public_rungs[1].flops / 2,
    )  # fmt: skip
    assert f2._terms(public_rungs, public_target).shape == (5, 0)
    columns = f2._terms([*public_rungs, other], public_target)
    assert columns.shape == (6, 1)
    assert columns[4, 0] == pytest.approx(f2.RATIO_SD * np.log(0.5))
    wider = dataclasses.replace(public_rungs[1], steps=2 * public_rungs[1].steps)
    assert f2._terms([*public_rungs, wider], public_target).shape == (5 + 1, 1)
    forecast = forecast_ladder([*public_rungs, other], public_target, asymptote="public")
    assert forecast.metrics[METRIC].baseline[-1] == pytest.approx(2.0387846, abs=1e-6)


def test_a_rung_cut_early_still_counts(public_rungs, public_target):
    rungs = [*public_rungs[:3], cut(public_rungs[3], 0.5)]
    forecast = forecast_ladder(rungs, public_target, asymptote="public")
    assert any("2048 was cut" in warning for warning in forecast.warnings)
    assert forecast.parameters["completions"]["d2048"]["last_mark"] == "0.50"


def test_public_family_teaches_nothing_to_itself(public_rungs, public_target):
    forecast = forecast_ladder(public_rungs, public_target)
    ratio = forecast.parameters["law_prior"]["asymptote_ratio"]
    assert ratio == pytest.approx(
        learnt_prior(excluded_suites(["marin"])).asymptote_ratio, abs=1e-6
    )
    assert ratio != pytest.approx(learnt_prior().asymptote_ratio, abs=1e-6)


def draw_from_the_prior(rungs, target, seed):
    """A ladder cut like the public one, and the target's marks, drawn from F2's own priors."""
    rng = np.random.Generator(np.random.Philox(seed))
    flops = np.array([float(run.flops) for run in (*rungs, target)])
    steps = np.array([float(run.steps) for run in (*rungs, target)])
    marks = np.tile(np.arange(1, 21) / 20, 5)
    data = CurveData(np.repeat(np.arange(5), 20), marks, np.ones(100), steps, np.log(flops))
    decades = np.log10(flops[-1] / flops[:-1].max())
    law = LawPrior(
        asymptote=rng.normal(1.5, 0.15),
        distance=np.log(flops[-1] / flops),
        slope=f2.PUBLIC_SLOPE,
        level=float(np.log(0.55) + 0.1 * rng.standard_normal()),
        root=f2.PUBLIC_RUNG_SD * np.eye(5),
        level_discrepancy=f2.PUBLIC_RULE.kappa * decades,
        shape_discrepancy=f2.SHAPE_DISCREPANCY * decades,
        extra=np.zeros((5, 0)),
    )
    model = CurveModel(data, law, SHAPES[rng.integers(2)], 0.004, 0.1 * steps[:-1].min())
    z = rng.standard_normal(model.num_parameters)
    z[0] = 0
    errors = rng.standard_normal((5, 20))
    for k in range(1, 20):
        errors[:, k] = 0.3 * errors[:, k - 1] + np.sqrt(0.91) * errors[:, k]
    losses = model.predict(z)[0].reshape(5, 20) + 0.004 * errors
    drawn = [with_curve(r, losses[i], 20 if i < 3 else 16) for i, r in enumerate(rungs)]
    return drawn, losses[-1]


@pytest.mark.slow
def test_intervals_are_calibrated_under_the_prior(public_rungs, public_target):
    """200 ladders drawn from the priors: the 95 % interval holds 90 to 99 % of the values at 25, 50
    and 100 % of the run; those of 50, 80 and 90 % lie within three binomial sds of their name."""
    levels = {0.5: (0.25, 0.75), 0.8: (0.1, 0.9), 0.9: (0.05, 0.95), 0.95: (0.025, 0.975)}
    inside = []
    for seed in range(200):
        rungs, truth = draw_from_the_prior(public_rungs, public_target, seed)
        found = forecast_curves(rungs, public_target, METRIC, PublicLaw())
        inside.append(
            [
                [found.quantile(low, k) <= truth[k - 1] <= found.quantile(high, k)
                 for k in (5, 10, 20)]
                for low, high in levels.values()
            ]
        )  # fmt: skip
    shares = np.mean(inside, axis=0)
    assert np.all((shares[-1] >= 0.90) & (shares[-1] <= 0.99)), shares
    for level, share in zip(levels, shares, strict=True):
        assert np.all(np.abs(share - level) <= 3 * np.sqrt(level * (1 - level) / 200)), shares
