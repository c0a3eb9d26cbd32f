"""What the page reads: plans, forecasts, scores and condensed metrics."""

import json
import math

import pytest

from portolan.accounting import active_parameters, total_parameters
from portolan.report import build_site
from portolan.report.facts import Bucket
from portolan.report.gather import read_project
from portolan.report.series import MAX_POINTS, leaf_group, read_series
from portolan.report.values import as_count, as_number, as_text
from portolan.track.tracker import Tracker


def test_run_facts_come_from_the_plan_and_the_shape(project_at, sample):
    project = read_project(project_at("finished"))
    target, expected = project.target, sample.TARGET
    assert [run.label for run in project.rungs] == ["d32", "d32 seed 1", "d48", "d64"]
    assert target.total_parameters == total_parameters(expected.config)
    assert target.active_parameters == active_parameters(expected.config)
    assert target.flops == expected.flops
    assert target.completed == expected.steps and target.finished
    assert target.final(sample.MACRO) == pytest.approx(expected.loss(1.0))
    seconds = sum(0.3 + 0.02 * math.sin(row) for row in range(expected.steps))
    assert target.train_seconds == pytest.approx(seconds)
    assert target.tokens_per_second == pytest.approx(expected.tokens / seconds)


def test_an_unfinished_run_has_no_final_value(project_at, sample):
    target = read_project(project_at("running")).target
    assert target.fraction == 0.5 and not target.finished
    assert target.final(sample.MACRO) is None
    assert target.latest(sample.MACRO).completed == sample.TARGET.steps // 2


def test_forecast_and_score_are_read_from_decimal_strings(project_at, sample):
    project = read_project(project_at("finished"))
    forecast, score = project.forecast, project.score
    assert forecast.id in {entry.id for entry in project.journal}
    assert forecast.median() == pytest.approx(sample.law(sample.TARGET.flops) - 0.006, abs=1e-6)
    low, high = forecast.interval(95)
    assert high - low == pytest.approx(2 * 1.959964 * 0.012, abs=1e-5)
    assert forecast.law.at(sample.TARGET.flops) == pytest.approx(sample.law(sample.TARGET.flops))
    assert score.error == pytest.approx(score.outcome - forecast.median(), abs=1e-6)
    assert len(score.bands) == 20 and score.num_scored == 20
    assert dict(score.coverage).keys() == {"0.5", "0.8", "0.95"}


def test_order_grade_follows_the_journal(project_at, sample, tmp_path):
    assert read_project(project_at("running")).order_grade == "chained"
    late = sample.build_sample(tmp_path / "late", "corpus")
    journal = sample.Journal.open(late / "record", schema=False)
    journal.append("run", {"name": "t", "lineage": "sample"}, time=sample.moment(40))
    journal.append("attempt", {"run": "t"}, time=sample.moment(41))
    journal.append("registration", {"lineage": "sample"}, time=sample.moment(42))
    assert read_project(late).order_grade == "retrospective"


def test_condensing_keeps_extremes_and_bounds_the_points(tmp_path):
    rows = 1000
    with Tracker(tmp_path, 1, 0) as tracker:
        for row in range(rows):
            value = 50.0 if row == 777 else 1.0
            tracker.log(row, {"norm/gradient/global": value, "train/loss": math.nan})
    points = read_series(tmp_path, rows).series["norm/gradient/global"]
    assert len(points) <= MAX_POINTS
    assert max(point.high for point in points) == 50.0
    assert points[-1] == Bucket(rows, 1.0, 1.0, 1.0)
    assert "train/loss" not in read_series(tmp_path, rows).series


def test_repeated_rows_count_once(tmp_path):
    with Tracker(tmp_path, 1, 0) as tracker:
        for row in range(10):
            tracker.log(row, {"throughput/step_seconds": 1.0})
    with Tracker(tmp_path, 2, 6) as tracker:
        for row in range(6, 12):
            tracker.log(row, {"throughput/step_seconds": 1.0})
    series = read_series(tmp_path, 12)
    assert series.completed == 12
    assert series.train_seconds == 12.0


def test_norms_of_a_group_add_as_squares(tmp_path):
    with Tracker(tmp_path, 1, 0) as tracker:
        tracker.log(0, {
            "norm/gradient/blocks/attn/wq": 3.0,
            "norm/gradient/blocks/attn/wk": 4.0,
            "norm/drift/blocks/attn/wq": 0.0,
            "norm/drift/blocks/attn/wk": 0.0,
            "norm/gradient/embed/table": 2.0,
        })  # fmt: skip
    series = read_series(tmp_path, 1).series
    assert series["norm/gradient/constrained/attention"][0].mean == pytest.approx(5.0)
    assert series["norm/gradient/free/embedding"][0].mean == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("embed/table", "embedding"),
        ("embed_norm/gain", "norm gains"),
        ("embed_gnorm/down", "gated norms"),
        ("blocks/attn/wk", "attention"),
        ("blocks/attn/head_gate", "attention gate"),
        ("blocks/attn/k_conv/taps", "short convolutions"),
        ("blocks/attn_gnorm/up", "gated norms"),
        ("blocks/moe/router", "router"),
        ("blocks/moe/latent_norm/gain", "norm gains"),
        ("blocks/moe/latent_up", "latent pair"),
        ("blocks/moe/experts/down", "experts"),
        ("blocks/shared/1/gate", "shared experts"),
        ("head/proj", "output head"),
        ("something/new", "other"),
    ],
)
def test_leaf_groups(path, group):
    assert leaf_group(path) == group


def test_values_are_read_leniently():
    assert as_number("1e-05") == 1e-5 and as_number("nan") is None and as_number(True) is None
    assert as_count("12") == 12 and as_count(12.5) is None and as_count(None) is None
    assert as_text({"value": "3", "unit": "step"}) == "3" and as_text([1]) == "[1]"


def test_a_plan_without_shape_still_counts(project_at, sample, tmp_path):
    root = sample.build_sample(tmp_path / "bare", "corpus")
    folder = root / "runs" / "other"
    folder.mkdir(parents=True)
    plan = {"steps": 10, "tokens": 100, "flops_no_head": "1.5e10", "total_params": 7}
    (folder / "run.json").write_text(json.dumps({"id": "other", "role": "target", "plan": plan}))
    target = read_project(root).target
    assert (target.flops, target.total_parameters, target.completed) == (1.5e10, 7, 0)


def test_the_status_beside_the_target_is_shown(sample, tmp_path):
    """What `portolan watch` left: verdict, failed items and the band of each evaluation."""
    root = sample.build_sample(tmp_path / "watched", "running")
    status = {
        "verdict": "watch",
        "state": "training",
        "completed": 300,
        "steps": 600,
        "reasons": [{"severity": "notify", "text": "amber at 50 %", "advice": "look"}],
        "checklist": [
            {"item": 9, "title": "throughput constant", "verdict": "fail", "reason": "slow",
             "windows": {"all": "fail", "W1": "not measured"}},
            {"item": 11, "title": "configuration", "verdict": "not measured", "reason": "none"},
        ],
        "shapes": [{"signal": "gradient norm", "kind": "slope", "fraction": 0.5, "value": -1.5,
                    "low": -1, "high": 1, "inside": False, "nearest_rung": "d64"}],
        "evaluations": [{"fraction": 0.5, "status": "amber: outside 90 %"}],
        "first_three_percent": {"clear": False, "reason": "not measured: items 1"},
        "gradient_peak": "gradient norm largest at 25%",
        "rules_not_measured": ["H24"],
    }  # fmt: skip
    path = root / "runs" / sample.TARGET.id / "status.json"
    path.write_text(json.dumps(status))
    page = build_site(root).read_text()
    for text in (
        "Watch: something is outside", "As of update 300 of 600 (training)", "1 failed and 1 could",
        "amber at 50 %", "9. throughput constant", "growth of gradient norm", "−1.5", "amber</td>",
        "1 monitoring rule had no signal",
    ):  # fmt: skip
        assert text in page, text
    path.write_text("[]")
    assert 'id="health"' not in build_site(root).read_text()
