"""The checklist: clean runs pass, planted faults trip their item, nothing unmeasured passes."""

import csv
import dataclasses

import numpy as np
import pytest
from tests.health.runs import (
    EVALUATIONS,
    RUNGS,
    STEPS,
    damaged,
    evidence,
    make_run,
    rates,
    small_batch,
)  # fmt: skip

from portolan.health import items
from portolan.health.bands import Band, build_band, compare, outside_in_a_row, slope_at, value_at
from portolan.health.checklist import ITEMS, W1, first_three_percent, run_checklist
from portolan.health.curves import Series


@pytest.fixture(scope="module")
def clean():
    return evidence()


def failed(base):
    return {result.item.number for result in run_checklist(base) if result.verdict == "fail"}


@pytest.mark.parametrize("until", [0.02, 0.05, 0.3, 0.6, 1.0])
def test_a_clean_run_fails_nothing(until):
    base = evidence(until)
    assert failed(base) == set()
    if until > 0.1:
        assert {r.verdict for r in run_checklist(base)} == {"pass"}


def late(change, since=0.85):
    return lambda f, values: np.where(f > since, change(f, values), values)


FAULTS = {
    "drift of one layer by 1e-2": (
        2, "norm/parameters/blocks/attn/wq", late(lambda f, v: v * (1 + 1e-2 / 4))),
    "drift in one update": (
        2, "norm/drift/blocks/moe/experts/gate", late(lambda f, v: v + 1e-2, 0.99)),
    "head gate grows": (
        8, "norm/parameters/blocks/attn/head_gate",
        late(lambda f, v: v * np.exp(4 * (f - 0.5)), 0.5)),
    "learning rate off by 1 %": (10, "rate/hyperball", late(lambda f, v: v * 1.01)),
    "other rate off by 1 %": (10, "rate/adam", late(lambda f, v: v * 0.99)),
    "train loss jumps": (
        4, "train/cross_entropy", lambda f, v: v + 1.2 * (np.abs(f - 0.9) < 1e-4)),
    "train loss stays above trend": (
        4, "train/cross_entropy", lambda f, v: v * np.where(np.abs(f - 0.9) < 0.001, 1.6, 1)),
    "throughput falls by 30 %": (9, "throughput/tokens_per_second", late(lambda f, v: 0.7 * v)),
    "gradient oscillates more and more": (
        1, "norm/gradient/global", late(lambda f, v: v * (1 + 0.5 * np.sin(3000 * f)), 0.92)),
    "gradient level": (1, "norm/gradient/global", late(lambda f, v: v + 2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_trips_its_own_item(clean, name):
    item, key, change = FAULTS[name]
    assert failed(damaged(clean, key, change)) == {item}


def all_layers(base, kind, change):
    for layer in range(4):
        base = damaged(base, f"router/{kind}/{layer}", change)
    return base


def test_faults_in_all_layers(clean):
    lost = all_layers(clean, "entropy", late(lambda f, v: v - 0.06))
    assert failed(lost) == {7}
    tripled = all_layers(clean, "drop_fraction", late(lambda f, v: 3 * v))
    assert failed(tripled) == {3}
    growing = all_layers(clean, "bias_max", late(lambda f, v: v * np.exp(6 * (f - 0.5)), 0.5))
    assert failed(growing) == {6}


def test_configuration_evaluations_and_projection(clean):
    assert failed(dataclasses.replace(clean, config=("c0", "c1"))) == {11}
    marks = sorted(EVALUATIONS)
    worse = EVALUATIONS | {marks[-1]: EVALUATIONS[marks[-2]] + 0.0175}
    assert failed(dataclasses.replace(clean, evaluations=worse)) == {5}
    noise = EVALUATIONS | {marks[-1]: EVALUATIONS[marks[-2]] + 0.0165}
    assert failed(dataclasses.replace(clean, evaluations=noise)) == set()
    other = dataclasses.replace(clean, evaluations=worse, mixture_changes=[marks[-1]])
    assert failed(other) == set()
    for band, wrong in (("normal", set()), ("amber", {12}), ("red", {12})):
        assert failed(dataclasses.replace(clean, bands=[(0.9, band)])) == wrong


def test_the_gradient_peak_is_compared_by_its_growth(clean):
    """Size may differ from the rungs; a norm that goes on rising through W2 may not."""
    key = "norm/gradient/global"
    larger = damaged(clean, key, lambda f, v: 1.8 * v)
    assert failed(larger) == set()
    rising = damaged(clean, key, late(lambda f, v: 0.6 * np.exp(3 * (f - 0.25)), 0.25))
    results = {r.item.number: r for r in run_checklist(rising)}
    assert results[1].outcomes["W2"][0] == "fail"
    assert "closest is" in results[1].reason


def test_nothing_unmeasured_passes():
    """Each item loses what it needs: never pass, and the warm-up is not clear."""
    needs = {
        1: "norm/gradient", 2: "norm/", 3: "router/drop_fraction", 4: "train/", 6: "router/bias",
        7: "router/entropy", 8: "norm/parameters", 9: "throughput/", 10: "rate/",
    }  # fmt: skip
    base = evidence()
    for number, prefix in needs.items():
        kept = {k: s for k, s in base.target.series.items() if not k.startswith(prefix)}
        target = dataclasses.replace(base.target, series=kept, shapes={})
        results = run_checklist(dataclasses.replace(base, target=target))
        assert results[number - 1].verdict == "not measured", number
        assert not first_three_percent(dataclasses.replace(base, target=target))[0]
    bare = dataclasses.replace(base, rungs=[], evaluations={}, rates=None, config=None, bands=[])
    words = {r.item.number: r.verdict for r in run_checklist(bare)}
    assert [n for n, word in words.items() if word == "not measured"] == [5, 6, 8, 10, 11, 12]
    assert words[3] == "pass"


def test_first_three_percent():
    early = EVALUATIONS | {60: 4.0, 120: 3.5}
    base = evidence(0.04, evaluations=early)
    clear, why = first_three_percent(base)
    assert not clear and why.startswith("not measured"), why
    long = evidence_of_a_long_run()
    assert first_three_percent(long) == (True, "items 1-11 pass on all of W1")
    assert not first_three_percent(dataclasses.replace(long, config=("a", "b")))[0]
    assert not first_three_percent(evidence(0.02))[0]


def evidence_of_a_long_run():
    """A run whose warm-up holds enough steps for every item."""
    steps = 60_000
    base = evidence(0.04)
    target = make_run(2048, steps=steps, until=0.04)
    return dataclasses.replace(
        base,
        target=target,
        rungs=[make_run(width, steps=steps, until=0.04) for width in (768, 1024, 1536)],
        rates=lambda row: rates(row, steps),
        evaluations={600: 4.0, 1200: 3.5, 1800: 3.2},
    )


SMALL_LADDER = ((768, 600, 0), (768, 600, 1), (1024, 1200, 0), (1536, 2400, 0))


@pytest.mark.parametrize("seed", range(3))
def test_a_ladder_of_small_batches_sets_its_own_limits(seed):
    """Jumps and entropies that its rungs show as well are no fault; larger ones are."""
    rungs = [small_batch(width, steps, 10 * seed + s) for width, steps, s in SMALL_LADDER]
    target = small_batch(2048, STEPS, 10 * seed)
    base = dataclasses.replace(evidence(), target=target, rungs=rungs)
    assert float(np.max(np.diff(target.series["train/cross_entropy"].values))) > items.MAX_JUMP
    assert failed(base) == set()
    jumps = damaged(base, "train/cross_entropy", lambda f, v: v + 4.0 * (np.abs(f - 0.9) < 1e-4))
    assert failed(jumps) == {4}
    assert failed(all_layers(base, "entropy", late(lambda f, v: v - 0.08))) == {7}


def test_a_rung_watched_by_the_others_is_silent():
    rungs = [small_batch(width, steps, s) for width, steps, s in SMALL_LADDER]
    for left_out in rungs:
        others = [rung for rung in rungs if rung is not left_out]
        base = dataclasses.replace(
            evidence(), target=left_out, rungs=others, evaluations={}, rates=None
        )
        assert failed(base) == set(), left_out.label


def test_windows_of_changes(clean):
    changed = dataclasses.replace(clean, changes=[3000], context_changes=[3000])
    results = {r.item.number: r for r in run_checklist(changed)}
    assert "Wc" in results[10].outcomes and "W3" in results[3].outcomes
    assert "Wc" not in run_checklist(clean)[9].outcomes
    before = dataclasses.replace(changed, target=make_run(2048, until=0.4))
    assert "Wc" not in run_checklist(before)[9].outcomes


def test_the_public_warm_up_meets_the_absolute_limits(shared_data):
    """Items 1 and 3 in W1 on the published metrics of the public run."""
    with (shared_data / "marin" / "hero_early_metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    end = W1.end * 390_251

    def column(name):
        kept = [(int(r["step"]), float(r[name])) for r in table if r[name] and int(r["step"]) < end]
        return Series(np.array([s for s, _ in kept]), np.array([x for _, x in kept]))

    gradients, drops = column("grad_norm"), column("drop_fraction")
    assert max(gradients.values) > 1.5 and max(drops.values) > 0.1
    assert items.gradient_level(gradients, 390_251, 2.0)[0] == "pass"
    assert items.drop_level(drops)[0] == "pass"


# ---------------------------------------------------------------- bands


def test_band_by_hand():
    """Median and range; with three sizes that agree in sign, the line at the run's own size."""
    band = build_band(0.5, [("a", 1.0, 2.0), ("b", 2.0, 1.0), ("c", 3.0, 4.0)], 9.0)
    assert band is not None and band.centre == 2.0
    assert band.half_width == pytest.approx(3 * np.sqrt(5 / 2))
    line = build_band(0.5, [("a", 1.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 3.0)], 3.0)
    assert line is not None and line.centre == pytest.approx(3.0)
    assert line.half_width == pytest.approx(2.0)
    beyond = build_band(0.5, [("a", 1.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 3.0)], 5.0)
    assert beyond is not None and beyond.centre == pytest.approx(5.0)
    assert beyond.half_width == pytest.approx(2.0 + 0.5 * 2.0)
    assert beyond.nearest(2.4) == ("b", 2.0)
    assert build_band(0.5, [("a", 1.0, 2.0), ("b", 1.0, 2.1)], 9.0) is None
    two = build_band(0.5, [("a", 1.0, 2.0), ("b", 2.0, 3.0)], 4.0)
    assert two is not None and two.centre == 2.5
    assert two.half_width == pytest.approx(3 * np.sqrt(0.5) + 2 * 1.0)
    flat = build_band(0.5, [("a", 1.0, 2.0), ("b", 2.0, 2.0)], 3.0, tolerance=0.1, relative=True)
    assert flat is not None and flat.half_width == pytest.approx(0.2)


def test_levels_and_slopes():
    rows = np.arange(0, 1000, 10)
    series = Series(rows, np.exp(3 * (rows + 1) / 1000))
    assert value_at(series, 1000, 0.5) == pytest.approx(np.exp(1.5), rel=0.01)
    assert value_at(series, 1000, 0.001) == pytest.approx(np.exp(0.003))
    slope = slope_at(series, 1000, 0.5)
    assert slope is not None and slope == pytest.approx((3.0, 0.0), abs=1e-9)
    assert slope_at(series, 1000, 0.03) is None
    assert slope_at(Series(rows, -series.values), 1000, 0.5) is None
    assert value_at(series.between(0, 400), 1000, 0.6) is None


def test_one_point_outside_is_noise(clean):
    found = compare(clean.target, RUNGS, "embedding norm")
    assert found and all(item.inside for item in found)
    far = Band(0.5, 0.0, 1.0, (("a", 0.0),))
    out = dataclasses.replace(found[3], band=far)
    assert outside_in_a_row([*found[:3], out, *found[4:]]) == []
    assert len(outside_in_a_row([*found[:3], out, out, *found[5:]])) == 2


def test_items_are_numbered_and_worded():
    assert [item.number for item in ITEMS] == list(range(1, 13))
    assert all(item.limit and item.advice and item.windows[0] == "all" for item in ITEMS)
    assert max(EVALUATIONS) == STEPS
