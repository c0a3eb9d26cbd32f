"""Scores against direct formulas, baselines against published figures."""

import numpy as np
import pytest

from portolan.scaling import task_baselines, task_scores
from portolan.scaling.drifting_law import Ladder

OLMO = Ladder(
    np.array([3.633445589e18, 1.281349343e19, 4.841331202e19, 1.295070835e20]),
    np.array([3.7474789619, 3.5318517685, 3.3315241337, 3.182975769]),
    7.287991253e20,
)
# Forecasts of task T000 and their widths, from the table of public backtests.
PUBLISHED = {"free asymptote": 2.950509, "0.55 x last rung": 2.975558, "F0": 2.967616}


def score(task, suite, method, samples, outcome, reach=4.0):
    return task_scores.score_samples(task, suite, method, reach, np.array(samples), outcome)


def test_scores_of_one_forecast():
    rng = np.random.default_rng(0)
    samples = 3.0 + 0.05 * rng.standard_normal(500)
    found = score("a", "s", "m", samples, 2.9)
    pairs = np.abs(samples[:, None] - samples).mean() / 2
    assert found.crps == pytest.approx((np.abs(samples - 2.9).mean() - pairs) / 2.9)
    low, median, high = np.quantile(samples, (0.05, 0.5, 0.95)) / 2.9
    assert found.error == pytest.approx(median - 1)
    assert found.interval_score_90 == pytest.approx(high - low + 20 * max(low - 1, 0))
    assert found.inside_90 == (low <= 1 <= high)


def test_suites_count_once():
    exact = [score(f"a{i}", "large", "m", [2.0, 2.0], 2.0) for i in range(9)]
    off = [score("b", "small", "m", [2.2, 2.2], 2.0)]
    found = task_scores.summary(exact + off)
    assert found["error"] == pytest.approx(5.0)
    assert found["crps"] == pytest.approx(5.0)
    assert found["coverage_90"] == pytest.approx(50.0)
    assert (found["suites"], found["tasks"]) == (2, 10)
    assert [row["suite"] for row in task_scores.by_suite(exact + off)] == ["large", "small"]


def test_bands_of_extrapolation():
    scores = [score(str(r), "s", "m", [1, 1], 1.0, r) for r in (0.5, 2.0, 3.0, 100.0)]
    rows = task_scores.by_extrapolation(scores)
    assert [(row["band"], row["tasks"]) for row in rows] == [
        ("1 to 3 x", 2), ("3 to 6 x", 1), ("above 60 x", 1),
    ]  # fmt: skip


def test_paired_ratio_uses_common_tasks():
    ours = [score(f"t{i}", f"s{i}", "m", [2.02, 2.02], 2.0) for i in range(4)]
    theirs = [score(f"t{i}", f"s{i}", "n", [2.04, 2.04], 2.0) for i in range(3)]
    assert task_scores.paired_ratio(ours, theirs) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("method", PUBLISHED)
def test_baselines_reproduce_the_published_points(method):
    samples = task_baselines.baseline_samples(OLMO)
    assert samples[method][0] == pytest.approx(PUBLISHED[method], rel=1e-5)
    assert np.isfinite(samples[method]).all()


def test_baselines_that_do_not_apply():
    few = Ladder(OLMO.x[:2], OLMO.losses[:2], 1e21)
    assert task_baselines.baseline_samples(few) == {}
    bits = Ladder(OLMO.x, OLMO.losses / 4, 1e21)
    assert "F0" not in task_baselines.baseline_samples(bits)


def test_chinchilla_surface_is_recovered():
    rng = np.random.default_rng(0)
    params, tokens = np.exp(rng.uniform(np.log((1e8, 2e9)), np.log((1e9, 2e10)), (40, 2))).T
    losses = 1.7 + 400 * params**-0.35 + 410 * tokens**-0.3
    pool = task_baselines.Pool(params, tokens, losses)
    truth = 1.7 + 400 * 5e9**-0.35 + 410 * 1e11**-0.3
    samples = task_baselines.chinchilla_samples(pool, 5e9, 1e11)
    assert samples[0] == pytest.approx(truth, rel=3e-3)
    small = task_baselines.Pool(params[:5], tokens[:5], losses[:5])
    assert task_baselines.chinchilla_samples(small, 5e9, 1e11) is None


def test_methods_and_the_tasks_they_share():
    ours = [score(f"t{i}", "s", "F2", [1.0, 1.0], 1.0) for i in range(3)]
    theirs = [score("t0", "s", "other", [1.1, 1.1], 1.0)]
    groups = task_scores.by_method(ours + theirs, "F2")
    assert [(name, len(group)) for name, group in groups.items()] == [
        ("F2", 3), ("F2, ladders", 1), ("other", 1),
    ]  # fmt: skip
    assert list(task_scores.by_method(ours, "F2")) == ["F2"]
