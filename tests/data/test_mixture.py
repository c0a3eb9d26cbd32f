import csv
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.mixture import (
    Mixture,
    MixtureError,
    Phase,
    block_counts,
    check_continuation,
    check_mixture,
    fit_block,
    load_mixture,
    micro_block,
    plan_mixture,
    prefix_deviations,
    simulated_prefixes,
    snap_recorded_start,
    snap_start,
    step_unit,
)
from portolan.data.mixture_design import (
    count_limits,
    proportional_counts,
    round_to_lattice,
    temperature_weights,
    unimax_weights,
)

G, T = 10**9, 10**12
PHASES = (Phase("main", 0, 15 * T, {"a": 40_000, "b": 9_152}),
          Phase("cooldown", 312_192, 3_750 * G, {"a": 30_000, "b": 19_152}))  # fmt: skip
MIXTURE = Mixture("m", "tok", "sto", {"a": 10 * T, "b": 10 * T}, PHASES, 4096)
RUN = {"tokenizer_digest": "tok", "store_digest": "sto", "store_tokens": MIXTURE.cells}


def with_cells(tokens, *counts_and_budgets):
    """A mixture of the cell c and a large one that takes the rest of the lattice."""
    phases = tuple(
        Phase(f"p{i}", 48 * i, budget, {"c": count, "rest": 49_152 - count})
        for i, (count, budget) in enumerate(counts_and_budgets)
    )
    return Mixture("m", "tok", "sto", {"c": tokens, "rest": 30 * T}, phases, 4096)


def test_round_trip_through_the_file(tmp_path):
    MIXTURE.save(tmp_path / "mixture.json")
    loaded = load_mixture(tmp_path / "mixture.json")
    assert loaded == MIXTURE
    assert loaded.digest == MIXTURE.digest
    phases = [("main", 0, 15 * T), ("cooldown", 312_192, 3_750 * G)]
    check_mixture(loaded, **RUN, sequence_length=4096, phases=phases, cap_epochs=8)


def test_floats_are_put_on_the_lattice(tmp_path):
    content = MIXTURE.to_json()
    for phase in content["phases"]:
        del phase["counts"]
        phase["weights"] = {"a": 0.29, "b": 0.71}
    (tmp_path / "mixture.json").write_text(json.dumps(content))
    assert load_mixture(tmp_path / "mixture.json").phases[0].counts == {"a": 14254, "b": 34898}
    content["phases"][0]["weights"]["a"] += 1e-8
    (tmp_path / "mixture.json").write_text(json.dumps(content))
    with pytest.raises(MixtureError, match=r"sum to 1\.0000000"):
        load_mixture(tmp_path / "mixture.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_digest": "x"}, "tokenizer digest is x"),
        ({"store_digest": "x"}, "store digest is x"),
        ({"cells": {"a": 10 * T}}, "differ in"),
        ({"cells": {"a": 10 * T, "b": 1 + 10 * T}}, "cell b was fitted"),
        ({"cells": {"a": 10 * T, "b": 10 * T, "c": 1}}, r"differ in cells \['c'\]"),
        ({"lattice": 49_151}, "sum to 49152"),
        ({"phases": ()}, "need 0 first"),
        ({"phases": PHASES[::-1]}, "need 0 first"),
        ({"dropped_cells": ("z",)}, "unknown cells"),
        ({"sequence_length": 0}, "must be positive"),
        ({"cap_epochs": 1.0}, "cell a is read"),
        ({"block_sequences": 4}, "have a weight but no sequence"),
    ],
)
def test_each_broken_file_is_refused(change, message):
    broken = dataclasses.replace(MIXTURE, **change)
    if change.get("block_sequences"):
        counts = {"a": 49_151, "b": 1}
        phases = tuple(dataclasses.replace(phase, counts=counts) for phase in PHASES)
        broken = dataclasses.replace(broken, phases=phases)
        allowed = dataclasses.replace(broken, dropped_cells=("b",))
        check_mixture(allowed, **RUN)
        assert allowed.unread_cells() == ["b"]
    with pytest.raises(MixtureError, match=message):
        check_mixture(broken, **RUN)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"a": 49_152}, r"differ in \['b'\]"),
        ({"a": -1, "b": 49_153}, "not integers"),
        ({"a": 0.5, "b": 49_151.5}, "not integers"),
        ({"a": 1, "b": 1}, "sum to 2"),
    ],
)
def test_broken_counts_are_refused(counts, message):
    broken = dataclasses.replace(MIXTURE, phases=(Phase("main", 0, T, counts),))
    with pytest.raises(MixtureError, match=message):
        check_mixture(broken, **RUN)


def test_budgets_and_row_length_of_the_run_are_checked():
    with pytest.raises(MixtureError, match="the run expects"):
        check_mixture(MIXTURE, **RUN, phases=[("main", 0, 15 * T)])
    with pytest.raises(MixtureError, match="its cap is 8 epochs, this run's is 4"):
        check_mixture(MIXTURE, **RUN, cap_epochs=4)
    with pytest.raises(MixtureError, match="sequence length is 4096"):
        check_mixture(MIXTURE, **RUN, sequence_length=8192)


def test_a_file_with_an_unknown_key_is_refused(tmp_path):
    for name, text in (
        ("a", '{"name": 1}'),
        ("b", "["),
        ("c", json.dumps(MIXTURE.to_json() | {"x": 1})),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(MixtureError):
            load_mixture(tmp_path / name)


def test_golden_epochs():
    rejected = with_cells(136_000_000, (4, 15 * T), (2, 3_750 * G))
    assert rejected.epochs()["c"] == pytest.approx(10.098, abs=5e-4)
    with pytest.raises(MixtureError, match=r"cell c is read 10\.09"):
        check_mixture(
            rejected, tokenizer_digest="tok", store_digest="sto", store_tokens=rejected.cells
        )
    tokens_per_step = 46_137_344
    late = with_cells(
        136_000_000,
        (0, 108_000 * tokens_per_step),
        (4, (312_192 - 108_000) * tokens_per_step),
        (2, (390_251 - 312_192) * tokens_per_step),
    )
    assert late.epochs()["c"] == pytest.approx(6.7148, abs=5e-5)
    check_mixture(late, tokenizer_digest="tok", store_digest="sto", store_tokens=late.cells)


def test_limits_of_tiny_cells():
    one_step = (1, 15 * T), (1, 3_750 * G)
    assert with_cells(47_683_716, *one_step).epochs()["c"] <= 8
    assert with_cells(47_683_715, *one_step).epochs()["c"] > 8
    assert with_cells(38_146_973, (1, 15 * T), (0, 3_750 * G)).epochs()["c"] <= 8 + 1e-8
    assert with_cells(38_146_972, (1, 15 * T), (0, 3_750 * G)).epochs()["c"] > 8 + 1e-8


def test_an_empty_cell_with_a_weight_is_over_every_cap():
    with pytest.raises(MixtureError, match="read inf times"):
        empty = with_cells(0, (1, T))
        check_mixture(empty, tokenizer_digest="tok", store_digest="sto", store_tokens=empty.cells)


@pytest.mark.parametrize(
    ("steps", "batch", "block", "fitted", "unit", "raw", "start"),
    [
        (390_251, 11_264, 49_152, 49_152, 48, 312_200, 312_192),
        (11_420, 1_024, 49_152, 49_152, 48, 9_136, 9_120),
        (11_420, 256, 49_152, 49_152, 192, 9_136, 9_024),
        (1_000, 64, 49_152, 6_144, 96, 800, 768),
    ],
)
def test_golden_snapping(steps, batch, block, fitted, unit, raw, start):
    assert fit_block(steps, batch, block) == fitted
    assert step_unit(batch, fitted) == unit
    assert 4 * steps // 5 == raw
    assert snap_start(steps, batch, fitted, (4, 5)) == start


def test_golden_snapping_of_recorded_starts():
    assert step_unit(64, 49_152) == 768
    assert 108_000 % step_unit(11_264, 49_152) == 0
    assert snap_recorded_start(108_000, 2_816, 49_152) == 108_096
    assert snap_recorded_start(312_192, 2_816, 49_152) == 312_192


@pytest.mark.parametrize(
    ("steps", "batch", "start"),
    [
        (11_420, 1_024, 9_120),
        (15_276, 2_048, 12_216),
        (15_128, 6_144, 12_096),
        (20_072, 11_264, 16_032),
        (390_251, 11_264, 312_192),
    ],
)
def test_phase_starts_of_the_public_ladder(steps, batch, start):
    assert snap_start(steps, batch, 49_152, (4, 5)) == start


def test_a_block_that_cannot_be_halved_is_refused():
    with pytest.raises(MixtureError, match="spans 49153 of 100 steps"):
        fit_block(100, 64, 49_153)


@given(st.integers(1, 10**5), st.integers(0, 12).map(lambda power: 2**power))
def test_micro_block_leaves_ten_places_for_a_phase(steps, batch):
    block = micro_block(steps, batch)
    assert block == 64 or 40 * block <= steps * batch < 80 * block
    fitted = fit_block(steps, batch, block)
    assert 10 * step_unit(batch, fitted) <= steps or step_unit(batch, fitted) == 1
    if steps * batch >= 40 * 64:
        assert fitted == block


def test_golden_block_counts():
    assert block_counts([5, 3, 2], 8, 10).tolist() == [5, 2, 1]
    assert block_counts([3, 3, 3], 8, 9).tolist() == [4, 2, 2]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=9).filter(sum), st.integers(1, 400))
def test_block_counts_sum_to_the_block(counts, block):
    assert block_counts(counts, block, sum(counts)).sum() == block


def test_plan_snaps_phases_and_adds_their_budgets():
    mixture = plan_mixture(
        "small",
        tokens={"a": 10**8, "b": 10**8},
        tokenizer_digest="tok",
        store_digest="sto",
        steps=1_000,
        batch_sequences=64,
        sequence_length=256,
        phases=[("main", (0, 1), {"a": 1, "b": 3}), ("cooldown", (4, 5), {"a": 2, "b": 2})],
        lattice=4,
    )
    assert mixture.block_sequences == 6_144
    assert [phase.start_step for phase in mixture.phases] == [0, 768]
    assert sum(phase.budget_tokens for phase in mixture.phases) == 1_000 * 64 * 256
    assert mixture.weights(0) == {"a": 0.25, "b": 0.75}
    assert mixture.block_counts(1).tolist() == [3072, 3072]


def test_a_running_job_may_append_but_not_change():
    begun = {"completed_steps": 100_000, "batch_sequences": 11_264}
    appended = Phase("new", 108_000, T, {"a": 20_000, "b": 29_152})
    main, cooldown = PHASES
    check_continuation(
        MIXTURE, dataclasses.replace(MIXTURE, phases=(main, appended, cooldown)), **begun
    )
    for phases, message in (
        ((appended, cooldown), "has been used"),
        ((dataclasses.replace(main, counts=cooldown.counts), cooldown), "has been used"),
        ((main, dataclasses.replace(appended, start_step=99_984)), "earliest start is 100032"),
        ((main, dataclasses.replace(appended, start_step=108_001)), "in steps of 48"),
    ):
        with pytest.raises(MixtureError, match=message):
            check_continuation(MIXTURE, dataclasses.replace(MIXTURE, phases=phases), **begun)
    other = dataclasses.replace(MIXTURE, store_digest="x")
    with pytest.raises(MixtureError, match="store_digest changed"):
        check_continuation(MIXTURE, other, **begun)


def test_golden_simulated_epoching():
    sizes = {"small": 107_000_000 // 4096, "large": 676_090_000_000 // 4096}
    assert sizes == {"small": 26_123, "large": 165_061_035}
    run = {"experiment_tokens": 2_500_000_000, "target_tokens": 18_750 * G}
    prefixes = simulated_prefixes(sizes, **run)
    assert prefixes == {"small": 3, "large": 22_008}
    deviations = prefix_deviations(prefixes, sizes, **run)
    assert deviations["small"] == pytest.approx(3 / 3.483 - 1, abs=1e-3)


@pytest.mark.parametrize(
    ("steps", "batch", "share", "prefix"),
    [
        (11_420, 1_024, 0.00255461, 2_554),
        (15_276, 2_048, 0.00683437, 6_834),
        (15_128, 6_144, 0.0203045, 20_304),
        (20_072, 11_264, 0.0493903, 49_390),
    ],
)
def test_golden_shares_of_the_public_rungs(steps, batch, share, prefix):
    tokens = steps * batch * 4096
    assert tokens / (18_750 * G) == pytest.approx(share, rel=3e-6)
    found = simulated_prefixes({"c": 1_000_000}, experiment_tokens=tokens, target_tokens=18_750 * G)
    assert found["c"] == prefix


def test_cells_that_would_be_empty_are_named():
    sizes = {"a": 391, "b": 392, "c": 0}
    run = {"experiment_tokens": 11_420 * 1_024 * 4096, "target_tokens": 18_750 * G}
    with pytest.raises(MixtureError, match=r"\['a', 'c'\]"):
        simulated_prefixes(sizes, **run)
    assert simulated_prefixes(sizes, **run, weighted=["b"]) == {"a": 0, "b": 1, "c": 0}
    assert simulated_prefixes(sizes, **run, weighted=["a", "b"], min_one=True) == {
        "a": 1,
        "b": 1,
        "c": 0,
    }
    with pytest.raises(MixtureError, match=r"\['c'\]"):
        simulated_prefixes(sizes, **run, min_one=True)
    with pytest.raises(MixtureError, match="cannot imitate"):
        simulated_prefixes(sizes, experiment_tokens=2, target_tokens=1)


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 10**13), min_size=1).filter(
    lambda weights: sum(weights.values()) > 0), st.integers(1, 49_152))  # fmt: skip
def test_rounding_keeps_the_sum_and_stays_within_one(weights, lattice):
    counts = round_to_lattice(weights, lattice)
    assert sum(counts.values()) == lattice
    total = sum(weights.values())
    assert all(abs(counts[n] * total - w * lattice) < total for n, w in weights.items())


def test_capped_cells_are_rounded_down_and_ties_go_by_name():
    assert round_to_lattice({"b": 1, "a": 1, "c": 1}, 4) == {"a": 2, "b": 1, "c": 1}
    assert round_to_lattice({"a": 0.39, "b": 0.61}, 10, limits={"a": 3}) == {"a": 3, "b": 7}
    assert round_to_lattice({"a": 8, "b": 1, "c": 1}, 10, limits={"a": 3}) == {
        "a": 3, "b": 4, "c": 3
    }  # fmt: skip
    with pytest.raises(MixtureError, match="all 0"):
        round_to_lattice({"a": 0}, 4)
    with pytest.raises(MixtureError, match="every cell is at its cap"):
        round_to_lattice({"a": 1, "b": 1}, 3, limits={"a": 1, "b": 1})


def test_small_cells_can_be_lifted():
    tokens = {"a": 1000, "b": 1, "c": 0}
    assert proportional_counts(tokens, 16) == {"a": 16, "b": 0, "c": 0}
    assert proportional_counts(tokens, 16, at_least_one=True) == {"a": 15, "b": 1, "c": 0}
    limits = {"a": 16, "b": 0, "c": 0}
    assert proportional_counts(tokens, 16, limits=limits, at_least_one=True)["b"] == 0


@pytest.fixture(scope="module")
def public_cells(shared_data):
    with (shared_data / "marin" / "cells_40x5.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {f"c{r['domain']}q{q}": round(float(r[f"q{q}"]) * G) for r in rows for q in range(5)}


def test_golden_proportional_weights_of_the_public_store(public_cells):
    total = sum(public_cells.values())
    assert total == 23_014_383_400_000
    assert 18_750 * G / total == pytest.approx(0.814708, abs=5e-7)
    below = {n: v * 49_152 / total for n, v in public_cells.items() if v * 49_152 < total}
    assert {n: round(v, 3) for n, v in below.items()} == {
        "c08q0": 0.662, "c13q0": 0.299, "c22q0": 0.007, "c27q0": 0.235
    }  # fmt: skip


@pytest.mark.parametrize(("cap", "num_capped", "others"), [(8, 32, 102.9313), (1, 171, 229.813)])
def test_golden_unimax_of_the_public_store(public_cells, cap, num_capped, others):
    result = unimax_weights(public_cells, budget_tokens=18_750 * G, cap_epochs=cap)
    assert len(result.capped) == num_capped
    free = {round(w * 18_750, 4) for n, w in result.weights.items() if n not in result.capped}
    assert len(free) == 1
    assert free.pop() == pytest.approx(others, abs=5e-4)
    assert sum(result.weights.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("power", "num_capped", "largest"), [(0.5, 7, 0.0141458), (0.3, 15, 0.00987239)]
)
def test_golden_temperature_of_the_public_store(public_cells, power, num_capped, largest):
    result = temperature_weights(public_cells, power, budget_tokens=18_750 * G, cap_epochs=8)
    assert len(result.capped) == num_capped
    assert max(result.weights.values()) == pytest.approx(largest, rel=1e-5)
    limits = count_limits(public_cells, 49_152, budget_tokens=18_750 * G, cap_epochs=8)
    assert limits["c22q0"] == 0
    counts = round_to_lattice(result.weights, 49_152, limits=limits)
    assert all(counts[n] == limits[n] for n in result.capped)
    assert all(counts[n] * 18_750 * G <= 8 * 49_152 * v for n, v in public_cells.items())


def test_a_budget_over_the_cap_is_infeasible():
    with pytest.raises(MixtureError, match="8 epochs of all cells"):
        unimax_weights({"a": 1}, budget_tokens=9, cap_epochs=8)
    with pytest.raises(MixtureError, match="8 epochs of all cells"):
        temperature_weights({"a": 1}, 1.0, budget_tokens=9, cap_epochs=8)
