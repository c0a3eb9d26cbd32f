"""Rungs against the public ladder (marin #8435, #7856) and the micro family."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.errors import UsageError
from portolan.scaling import ladder
from portolan.scaling.ladder import derive

# width: batch, active, exact total, steps, tokens, FLOPs per step without head; then FLOPs without
# and with head, hyperball and Adam rate, beta2, epsilon.
GOLDEN = {
    768: ((1024, 60_555_264, 1_591_848_448, 11_420, 47_898_951_680, 2320210052775936),
          (2.6497e19, 5.4805e19, 0.015819, 0.0036505, 0.968491, 1.0340e-15)),
    1024: ((2048, 162_004_992, 3_980_116_480, 15_276, 128_144_375_808, 11299543559700480),
           (1.7261e20, 2.7359e20, 0.014411, 0.0033257, 0.95, 1.1959e-15)),
    1536: ((6144, 481_296_384, 11_534_398_464, 15_128, 380_708_585_472, 91309218006564864),
           (1.3813e21, 1.8313e21, 0.014889, 0.0034360, 0.95, 1.1901e-15)),
    2048: ((11_264, 1_170_735_104, 27_742_902_528, 20_072, 926_068_768_768, 385702219393007616),
           (7.7418e21, 9.2013e21, 0.013422, 0.0030973, 0.95, 1.3709e-15)),
    6144: ((11_264, 22_762_487_808, 535_477_106_688, 390_251, 18_005_144_633_344,
            6690294608796057600),
           (2.6109e24, 2.6960e24, 0.0032905, 0.00075934, 0.95, 6.0446e-15)),
}  # fmt: skip

MICRO = {
    32: (38_912, 16, 380, 778_240, 2.818e11, 0.0475, 0.9737),
    48: (81_408, 32, 398, 1_630_208, 1.111e12, 0.0452, 0.9749),
    64: (139_264, 32, 680, 2_785_280, 3.044e12, 0.0340, 0.9853),
    96: (301_056, 64, 735, 6_021_120, 1.320e13, 0.0321, 0.9864),
    192: (1_204_224, 128, 1_470, 24_084_480, 1.908e14, 0.0221, 0.9932),
}


def public(width, **options):
    overrides = {"num_layers": 48} if width == 6144 else None
    return derive(width, 791, "ladder", "per_rack", overrides=overrides, **options)


def agrees(value, shown):
    """Whether a value rounds to the digits of a shown one, five significant by default."""
    return value == pytest.approx(shown, rel=6e-5)


@pytest.mark.parametrize("width", GOLDEN)
def test_public_rungs(width):
    rung = public(width)
    integers, floats = GOLDEN[width]
    found = (
        rung.batch_sequences,
        rung.active_params,
        rung.total_params,
        rung.steps,
        rung.tokens,
        rung.flops_per_step_no_head,
    )
    assert found == integers
    assert rung.flops_no_head == rung.flops_per_step_no_head * rung.steps
    found = (
        rung.flops_no_head,
        rung.flops_with_head,
        rung.hyperball,
        rung.adam,
        rung.beta2,
        rung.epsilon,
    )
    assert all(agrees(value, shown) for value, shown in zip(found, floats, strict=True))
    assert not rung.lr_capped
    assert not rung.beta2_guard
    assert rung.hyperball / rung.adam == pytest.approx(13 / 3)
    per_rack = 1024 * 4096 * rung.config.experts_per_token / rung.config.num_experts
    assert per_rack == pytest.approx(87_381.3, abs=0.05)


def test_axes_of_the_target_and_compute_ratios():
    rungs = [public(width) for width in GOLDEN]
    assert rungs[-1].flops_6nt == pytest.approx(2.4591e24, rel=2e-5)
    ratios = [b.flops_no_head / a.flops_no_head for a, b in itertools.pairwise(rungs)]
    assert ratios == pytest.approx([6.51, 8.00, 5.60, 337], rel=2e-3)
    share = sum(rung.flops_no_head for rung in rungs[:-1]) / rungs[-1].flops_no_head
    assert 100 * share == pytest.approx(0.357, abs=5e-4)
    share = sum(rung.flops_with_head for rung in rungs[:-1]) / rungs[-1].flops_with_head
    assert 100 * share == pytest.approx(0.421, abs=5e-4)


def test_other_ratios():
    wide = derive(1280, 791, "ladder", "fixed", batch=2048)
    assert (wide.active_params, wide.steps, wide.tokens) == (291_307_520, 27_469, 230_426_673_152)
    assert agrees(wide.hyperball, 0.010892)
    rows = [
        (1024, 60, 256, 9_270, 0.012439),
        (1024, 20, 256, 3_090, 0.018194),
        (1024, 300, 1024, 11_588, 0.014253),
        (512, 60, 128, 2_385, 0.022715),
    ]
    for width, ratio, batch, steps, rate in rows:
        rung = derive(width, ratio, "ladder", "fixed", batch=batch)
        assert rung.steps == steps
        assert agrees(rung.hyperball, rate)
    beta2 = [derive(w, 60, "ladder", "fixed", batch=b).beta2 for w, b in ((1024, 256), (512, 128))]
    assert beta2 == pytest.approx([0.992028, 0.996006], abs=5e-7)


def test_batch_policies():
    portable = [derive(width, 791, "ladder", "token_power") for width in (384, 512, 768)]
    assert [(rung.batch_sequences, rung.steps) for rung in portable] == [
        (128, 12_162), (256, 15_721), (512, 22_840),
    ]  # fmt: skip
    fixed = {512: (1024, 3_930), 768: (1024, 11_420), 1536: (1024, 90_767), 2048: (1536, 147_192)}
    for width, (batch, steps) in fixed.items():
        assert derive(width, 791, "ladder", "fixed", batch=batch).steps == steps
    assert derive(512, 791, "ladder", "per_rack", racks=3).batch_sequences == 3072
    for options in (
        {"batch_policy": "per_rack"},
        {"batch_policy": "fixed"},
        {"batch_policy": "fixed", "batch": 0},
        {"batch_policy": "huge"},
    ):
        with pytest.raises(UsageError):
            derive(512, 791, "ladder", **options)


@pytest.mark.parametrize("width", MICRO)
def test_micro_rungs(width):
    active, batch, steps, tokens, flops, rate, guarded = MICRO[width]
    rung = derive(width, 20, "micro", "token_power")
    assert (rung.active_params, rung.batch_sequences) == (active, batch)
    assert (rung.steps, rung.tokens) == (steps, tokens)
    assert rung.flops_no_head == pytest.approx(flops, rel=5e-4)
    assert rung.hyperball == pytest.approx(rate, abs=5.1e-5)
    assert rung.beta2 == pytest.approx(0.999875 if width == 192 else 0.9999, abs=5e-7)
    assert not rung.lr_capped
    with_guard = derive(width, 20, "micro", "token_power", beta2_guard=True)
    assert with_guard.beta2_guard
    assert with_guard.beta2 == pytest.approx(guarded, abs=5.1e-5)
    expected = max(64, 2 ** math.floor(math.log2(steps * batch / 40)))
    assert rung.mixture_block == expected


def test_caps_at_small_widths_and_short_runs():
    assert derive(32, 4, "micro", "token_power").lr_capped
    assert derive(16, 20, "micro", "token_power").lr_capped
    assert not derive(32, 8, "micro", "token_power").lr_capped
    warnings = derive(32, 4, "micro", "token_power").warnings
    assert any(warning.startswith("lr_capped") for warning in warnings)


def test_what_was_set_by_hand_is_recorded():
    target = public(6144)
    assert target.overrides == (("num_layers", 48),)
    assert any("num_layers = 48" in warning and "58" in warning for warning in target.warnings)
    uneven = derive(2560, 100, "ladder", "fixed", batch=1024)
    assert uneven.config.num_kv_heads_global == 1
    assert any("num_kv_heads_global = 1" in warning for warning in uneven.warnings)
    within = derive(1024, 100, "ladder", "fixed", batch=1024)
    assert within.warnings == ()
    with pytest.raises(UsageError, match="700"):
        derive(700, 100, "ladder", "token_power")
    for ratio in (0, -1, math.nan, math.inf):
        with pytest.raises(UsageError, match="tokens_per_active_param"):
            derive(768, ratio, "ladder", "token_power")


def test_only_derived_fields_differ_with_the_width():
    found = ladder.differences(
        derive(512, 100, "ladder", "token_power"), derive(1024, 100, "ladder", "token_power")
    )
    assert found.chosen == {}
    assert {"steps", "config.num_layers", "hyperball", "tokens"} <= set(found.derived)
    assert "config.num_experts" not in found.derived
    assert "config.sequence_length" not in found.derived
    micro = ladder.differences(
        derive(32, 20, "micro", "token_power"), derive(96, 20, "micro", "token_power")
    )
    assert micro.chosen == {}
    by_hand = ladder.differences(public(2048), public(6144))
    assert set(by_hand.chosen) == {"overrides"}
    assert ladder.differences(public(768), public(768)) == ladder.Differences({}, {})


def test_a_short_diagnostic_keeps_the_rates_of_the_full_plan():
    full, short = public(1536), public(1536, steps=200)
    found = ladder.differences(full, short)
    assert set(found.chosen) == {"stop_after"}
    assert found.derived == {}
    assert (short.executed_steps, short.steps) == (200, 15_128)
    assert any("stops after 200" in warning for warning in short.warnings)
    for steps in (0, 15_129):
        with pytest.raises(UsageError, match="steps"):
            public(1536, steps=steps)


def test_law_and_multiplier_are_inputs():
    scaled = public(768, rate_multiplier=0.5)
    assert scaled.hyperball == pytest.approx(public(768).hyperball / 2)
    assert set(ladder.differences(public(768), scaled).chosen) == {"rate_multiplier"}
    assert public(768, law="may").hyperball != public(768).hyperball


@given(st.integers(1, 500_000))
def test_evaluation_marks(steps):
    marks = ladder.evaluation_marks(steps)
    assert marks[0] >= 1
    assert marks[-1] == steps
    assert len(marks) == 20 or steps < 20
    assert len(marks) <= 20
    if steps >= 20:
        assert all(abs(n - (k + 1) * steps / 20) <= 0.5 for k, n in enumerate(marks))


def test_evaluation_marks_of_short_runs():
    assert ladder.evaluation_marks(3) == (1, 2, 3)
    assert ladder.evaluation_marks(390_251)[7] == 156_100
    short = derive(32, 20, "micro", "fixed", batch=2000)
    assert short.steps == 3
    assert any("no forecast" in warning for warning in short.warnings)


def test_phase_boundaries():
    rows = {768: 9_120, 1024: 12_216, 1536: 12_096, 2048: 16_032, 6144: 312_192}
    for width, step in rows.items():
        rung = public(width)
        assert rung.mixture_block == 49_152
        found = ladder.phase_boundary(0.8, rung.steps, rung.batch_sequences, rung.mixture_block)
        assert found == step
    assert ladder.phase_boundary("0.8", 11_420, 256, 49_152) == 9_024
    assert ladder.mixture_block("ladder", 1_000, 64) == 6_144
    assert ladder.phase_boundary(0.8, 1_000, 64, 6_144) == 768


@given(st.integers(20, 2000), st.integers(0, 10), st.integers(1, 99))
def test_boundaries_fall_on_whole_blocks(steps, power, percent):
    batch = 2**power
    block = ladder.mixture_block("micro", steps, batch)
    step = ladder.phase_boundary(f"{percent / 100:.2f}", steps, batch, block)
    assert step * batch % block == 0
    assert 0 <= percent * steps / 100 - step <= ladder.phase_granule(batch, block)


def test_plan_is_plain_json():
    plan = public(6144).plan()
    assert json.loads(json.dumps(plan)) == plan
    assert plan["overrides"] == {"num_layers": 48}
    assert "config" not in plan
    names = {field.name for field in dataclasses.fields(ladder.Rung)}
    assert set(ladder.DERIVED_FIELDS) | set(ladder.INPUT_FIELDS) == names


def test_planning_and_forecasting_need_no_accelerator_library():
    program = (
        "import sys, portolan.accounting, portolan.scaling.score; "
        "sys.exit(sorted({'jax', 'orbax', 'polars'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_smaller_heads_of_a_micro_ladder_are_the_only_choice_named():
    """A width between those of the family has no plain shape to compare with."""
    rung = ladder.derive(40, 8, "micro", "fixed", batch=8, overrides={"head_dim": 8})
    named = [warning for warning in rung.warnings if "by hand" in warning]
    assert named == ["head_dim = 8 was set by hand; family micro gives 16"]
    target = ladder.derive(144, 8, "micro", "fixed", batch=8, overrides={"head_dim": 8})
    assert set(ladder.differences(rung, target).chosen) == set()
