"""Forecasts after a change: effects, conditioning, and scores that a change cannot undo."""

import copy
import math

import numpy as np
import pytest
from scipy.stats import norm

from portolan.canonical import canonical, digest
from portolan.errors import UsageError
from portolan.record import types
from portolan.scaling.curves import mark_label
from portolan.scaling.forecast import forecast_ladder
from portolan.scaling.interval import LEVEL_LABELS, LEVELS
from portolan.scaling.ladder import evaluation_marks
from portolan.scaling.ledger import (
    UNDUAL_PACKING,
    Amendment,
    Effect,
    Regime,
    amend_body,
    baselines,
    build_ledger,
    condition_rows,
    find_void,
    shift_rows,
    total_effect,
)
from portolan.scaling.registration import build_body, minimum_conditions, validate_amendment

MACRO = "eval_dropless/heldout/macro_loss"
HASH = "ab" * 32
CHANGE = "change:" + HASH
STEPS = 735
LIVE = {
    "lineage": "d96",
    "sequence_length": 128,
    "steps": STEPS,
    "tokens_per_step": 8192,
    "mixture": HASH,
    "mixture_schedule": HASH,
    "optimizer": HASH,
    "transport": "grouped",
    "metric_identity": HASH,
}
NEW_MIX = LIVE | {"mixture_schedule": "cd" * 32}
DELAY = {"horizon": "0.8", "loss_cost": "0.01", "loss_cost_sd": "0.005"}


def normal_row(mean, sd):
    return dict(zip(LEVEL_LABELS, norm.ppf(LEVELS, mean, sd).tolist(), strict=True))


@pytest.fixture(scope="module")
def body(micro_ladder, micro_target):
    """The registered forecast of the micro target."""
    return build_body(
        forecast_ladder(micro_ladder, micro_target),
        title="Micro target",
        author="test",
        made_at="2026-01-01T00:00:00.000Z",
        metric={
            "evaluation_digest": HASH, "packing": 128, "dropless": True, "weights_view": "raw",
            "tokenizer": HASH, "unit": "nats per token", "aggregation": "mean",
            "domains": ["code"],
        },
        recipe={
            "model": HASH, "optimizer": HASH, "mixture": HASH, "mixture_schedule": HASH,
            "tokenizer": HASH, "transport": "grouped", "precision": "float32",
            "reference_tokens": 6_021_120, "evaluation_cadence": "every 5 %",
        },
        method={"code_commit": "0" * 40, "script_sha256": HASH},
        conditions=minimum_conditions(LIVE),
        on_failure="add a rung",
        previous_law={"name": "May", "value": 2.5},
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluations(body):
    """Outcomes at the registered medians, 0.02 above them after half of the run."""
    rows = body["quantiles"][MACRO]
    marks = evaluation_marks(STEPS)
    values = {n: float(rows[mark_label(k + 1)]["0.5"]) for k, n in enumerate(marks)}
    return {n: x + (0.02 if n > STEPS / 2 else 0.0) for n, x in values.items()}


def amendment(body, evaluations, **changes):
    seen = {n: x for n, x in evaluations.items() if n <= 400}
    fields = {
        "from_step": 370,
        "changes": (CHANGE,),
        "reason": "the mixture changed",
        "effects": (Effect("mix", 0.02, 0.01),),
        "conditions": minimum_conditions(NEW_MIX),
        "evaluations": seen,
        "made_at": "2026-01-02T00:00:00.000Z",
    }
    return amend_body(body, Amendment(**(fields | changes)))


# ---------------------------------------------------------------- effects


def test_compute_multiplier():
    law = {"loss": 2.03878, "asymptote": 1.5, "exponent": 0.089976}
    assert Effect.multiplier("x", 1.20, 0.0, **law).mean == pytest.approx(-0.00877, abs=5e-6)
    assert Effect.multiplier("x", 1.22, 0.0, **law).mean == pytest.approx(-0.00955, abs=5e-6)
    effect = Effect.multiplier("x", 1.2, 0.05, **law)
    ends = [Effect.multiplier("x", q, 0.0, **law).mean for q in (1.199, 1.201)]
    assert effect.sd == pytest.approx(0.05 * (ends[0] - ends[1]) / 0.002, rel=1e-5)
    with pytest.raises(UsageError):
        Effect.multiplier("x", 0.0, 0.1, **law)


def test_independent_shifts_add():
    total = total_effect([Effect("transport", -0.0065, 0.001), Effect("mix", -0.009, 0.010)])
    row = shift_rows({"1.00": normal_row(2.039, 0.02)}, total)["1.00"]
    assert row["0.5"] == pytest.approx(2.0235)
    for label, expected in zip(LEVEL_LABELS, norm.ppf(LEVELS, 2.0235, 0.02238), strict=True):
        assert row[label] == pytest.approx(expected, abs=2e-5)
    assert total_effect([]).sd == 0


def test_conditioning_is_that_of_a_normal_process():
    """Against the joint normal distribution of one evaluation and two later marks."""
    rows = {"0.50": normal_row(2.2, 0.03), "0.75": normal_row(2.1, 0.03),
            "1.00": normal_row(2.0, 0.04)}  # fmt: skip
    found = condition_rows(rows, [(0.5, 2.23)], noise=0.004)
    assert list(found) == ["0.75", "1.00"]
    for mark, mean, sd in (("0.75", 2.1, 0.03), ("1.00", 2.0, 0.04)):
        gap = float(mark) - 0.5
        shared = math.exp(-gap / 0.5) * 0.03 * sd
        gain = shared / (0.03**2 + 0.004**2)
        assert found[mark]["0.5"] == pytest.approx(mean + gain * 0.03)
        spread = math.sqrt(sd**2 - gain * shared)
        width = found[mark]["0.975"] - found[mark]["0.025"]
        assert width == pytest.approx(
            2 * 1.96 * max(spread, math.hypot(0.004, 0.02 * gap)), rel=1e-4
        )


def test_conditioning_never_gets_surer_than_the_floor():
    rows = {mark_label(k): normal_row(2.0, 0.03) for k in range(1, 21)}
    seen = [(k / 20, 2.01) for k in range(1, 11)]
    found = condition_rows(rows, seen)
    sd = (found["1.00"]["0.975"] - found["1.00"]["0.025"]) / 3.92
    assert sd >= math.hypot(0.004, 0.02 * 0.5) - 1e-9
    assert found["1.00"]["0.5"] == pytest.approx(2.005, abs=0.005)
    assert condition_rows(rows, [])["1.00"]["0.5"] == pytest.approx(2.0)


# ---------------------------------------------------------------- amending


def test_amended_body(body, evaluations):
    before = copy.deepcopy(body)
    amended = amendment(body, evaluations)
    assert body == before
    canonical(amended)
    assert types.Forecast.model_validate(amended).to_json() == amended
    assert digest(amended) != digest(body)
    assert set(amended["quantiles"]) == {m for m in body["quantiles"] if m.endswith("loss")}
    marks = sorted(amended["quantiles"][MACRO], key=float)
    assert marks[0] == "0.55" and marks[-1] == "1.00"
    assert amended["target"]["marks"] == marks
    seen = [n for n in evaluations if n <= 400]
    assert amended["known_before"] == {
        "count": len(seen), "completed": max(seen), "retrospective": False,
    }  # fmt: skip
    old, new = (float(b["quantiles"][MACRO]["1.00"]["0.5"]) for b in (body, amended))
    assert 0 < new - old < 0.03
    assert amended["method"]["evaluations_conditioned_on"] == len([n for n in seen if n > 370])
    assert amended["changes"] == [CHANGE]


def test_amendments_that_hide_something_are_refused(body, evaluations):
    good = amendment(body, evaluations)
    with pytest.raises(UsageError, match="reason"):
        validate_amendment(good | {"reason": ""}, body)
    with pytest.raises(UsageError, match="changes"):
        validate_amendment(good | {"changes": []}, body)
    with pytest.raises(UsageError, match="metric"):
        validate_amendment(good | {"metric": good["metric"] | {"packing": 256}}, body)
    with pytest.raises(UsageError, match="known_before"):
        known = {"count": 3, "completed": 700, "retrospective": False}
        validate_amendment(good | {"known_before": known}, body)
    with pytest.raises(UsageError, match="fewer"):
        none = {"count": 0, "completed": 0, "retrospective": False}
        validate_amendment(good | {"known_before": none}, good)
    with pytest.raises(UsageError, match="left"):
        amendment(body, evaluations, from_step=STEPS)


def test_a_new_horizon_needs_the_simulation(body, evaluations):
    shorter = minimum_conditions(LIVE | {"steps": 588})
    with pytest.raises(UsageError, match="simulation"):
        amendment(body, evaluations, steps=588, conditions=shorter)
    amended = amendment(body, evaluations, steps=588, conditions=shorter, delay=DELAY)
    assert amended["target"]["steps"] == 588
    assert amended["target"]["tokens"] == 588 * 8192
    assert amended["method"]["delay"] == DELAY
    assert amended["expiry"] == "after 588 completed updates"


# ---------------------------------------------------------------- scoring


def ledger(body, evaluations, until=STEPS):
    amended = amendment(body, evaluations)
    regimes = [Regime(0, LIVE), Regime(370, NEW_MIX, CHANGE)]
    seen = {n: x for n, x in evaluations.items() if n <= until}
    return build_ledger([("forecast:a", body), ("forecast:b", amended)], regimes, seen)


def test_both_forecasts_are_scored_each_for_its_time(body, evaluations):
    first, second = ledger(body, evaluations)
    assert first.void is not None
    assert (first.void.from_step, first.void.change) == (370, CHANGE)
    assert "void from step 370 (mixture_schedule)" in first.word
    before = [n for n in evaluations if n <= 370]
    assert first.score["num_scored"] == len(before)
    assert first.score["num_void"] == len(evaluations) - len(before)
    assert first.score["verdict"] == "void" and first.score["final"] is None
    assert second.void is None and second.word == "in force"
    assert second.score["num_scored"] == len([n for n in evaluations if n > 400])
    assert second.score["final"] is not None


def test_the_frozen_score_does_not_change(body, evaluations):
    at_change = ledger(body, evaluations, until=400)[0].score
    at_end = ledger(body, evaluations)[0].score
    for part in ("marks", "mean", "coverage", "num_scored", "baselines"):
        assert at_change[part] == at_end[part]


def test_packing_without_both_evaluations_voids(body, evaluations):
    longer = LIVE | {"sequence_length": 512}
    amended = amendment(body, evaluations, conditions=minimum_conditions(longer))
    for dual, expected in ((True, None), (False, UNDUAL_PACKING)):
        regimes = [Regime(0, LIVE), Regime(370, longer, CHANGE, dual)]
        void = find_void(amended, regimes, start=400)
        assert (void and void.fields) == ((expected,) if expected else None)
        original = find_void(body, regimes)
        assert original is not None and original.fields == ("sequence_length",)


def test_unknown_conditions_are_unverified_and_expiry_ends_a_forecast(body, evaluations):
    unknown = [Regime(0, LIVE | {"transport": None})]
    entry = build_ledger([("forecast:a", body)], unknown, evaluations)[0]
    assert entry.word == "unverified" and entry.score["num_unverified"] == len(evaluations)
    assert entry.score["marks"] == []
    short = body | {"expiry": "after 300 completed updates"}
    entry = build_ledger([("forecast:a", short)], [Regime(0, LIVE)], evaluations)[0]
    assert entry.score["num_scored"] == len([n for n in evaluations if n <= 300])


def test_a_change_that_touches_no_condition_voids_nothing(body, evaluations):
    regimes = [Regime(0, LIVE), Regime(200, dict(LIVE), CHANGE)]
    assert find_void(body, regimes) is None
    entry = build_ledger([("forecast:a", body)], regimes, evaluations)[0]
    assert entry.score["num_scored"] == len(evaluations)


def test_baselines_stand_beside(body, evaluations):
    found = baselines(body, evaluations)
    assert found["B1"] == 2.5
    f0 = {float(m): float(v) for m, v in body["baseline"]["F0"].items()}
    last = sorted(evaluations)[-3:]
    marks = evaluation_marks(STEPS)
    residuals = [evaluations[n] - f0[(marks.index(n) + 1) / 20] for n in last]
    assert found["B2"] == pytest.approx(f0[1.0] + np.mean(residuals))
    assert found["B0"] == f0[1.0]
    assert baselines(body, {})["B2"] is None
    assert baselines(body | {"baseline": {}}, evaluations) == {"B0": None, "B1": None, "B2": None}
    score = build_ledger([("forecast:a", body)], [Regime(0, LIVE)], evaluations)[0].score
    assert score["baselines"]["B1"]["final_error"] == pytest.approx(
        2.5 - evaluations[max(evaluations)]
    )
