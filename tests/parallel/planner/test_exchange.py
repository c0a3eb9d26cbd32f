"""Buffers and bytes of the exchanges: golden figures of parallel.md 8 and independent formulas."""

from dataclasses import replace
from fractions import Fraction

import pytest
from tests.parallel.planner.recipes import plan_of

from portolan.errors import UsageError
from portolan.model.expert_rows import SAVED_ARRIVED, SAVED_RETURNED
from portolan.model.transformer import SAVED
from portolan.parallel.capacity import ExchangeShape, RoutingRule
from portolan.parallel.planner.exchange import (
    DIRECTIONS,
    Routing,
    Wire,
    cell_with_float32_gradients,
    num_waves,
    plan_exchange,
)

GIB, GB = 2**30, 1e9
FACTOR = Fraction("1.15")
PUBLIC = Routing(
    Wire(ExchangeShape(64, 384, 524_288), 3072, 3072, 8, 2),
    RoutingRule("receiver", FACTOR, 2),
    FACTOR,
    3,
)
BUFFERS = {
    "cell": {"send": 3.45, "recv": 3.45, "out": 3.45, "back": 3.45, "h13": 6.90, "act": 3.45},
    "pooled": {
        "send": 1.151,
        "recv": 1.151,
        "compact": 1.150,
        "out": 1.150,
        "h13": 2.300,
        "act": 1.150,
        "ret": 1.150,
        "back": 1.150,
    },
    "ragged": {"X": 3.0, "ret": 3.0, "recv": 1.725, "out": 1.725, "h13": 3.450, "act": 1.725},
    "ring": {"gathered": 24, "y float32": 48, "recv": 3.45, "h13": 6.90, "out": 3.45},
}
TOTALS = {"cell": 24.16, "pooled": 10.35, "ragged": 14.63, "ring": 85.8}


@pytest.mark.parametrize("transport", BUFFERS)
def test_buffers_of_the_public_shape(transport):
    found = plan_exchange(PUBLIC, transport)
    sizes = {name: size / GIB for name, size in found.buffers}
    assert sizes == pytest.approx(BUFFERS[transport], abs=0.006)
    assert found.buffer_bytes / GIB == pytest.approx(TOTALS[transport], abs=0.006)


def test_buffers_of_other_rules():
    one_chunk = replace(PUBLIC, rule=replace(PUBLIC.rule, num_chunks=1))
    assert plan_exchange(one_chunk, "ragged").buffer_bytes / GIB == pytest.approx(23.25, abs=0.006)
    dropless = replace(PUBLIC, rule=replace(PUBLIC.rule, gate="none"))
    rows = dict(plan_exchange(dropless, "ragged").buffers)["recv"] / (3072 * 2)
    assert rows == 64 * 524_288
    fill = replace(PUBLIC, rule=replace(PUBLIC.rule, gate="waterfill", group_size=3))
    assert dict(plan_exchange(fill, "ragged").buffers)["recv"] == 301_467 * 3072 * 2


@pytest.mark.parametrize(("top", "total"), [(4, 20.5), (6, 30.75)])
def test_cell_of_the_earlier_shape(top, total):
    wire = Wire(ExchangeShape(64, 384, top * 65_536), 6144, 2560, top, 2)
    rule = RoutingRule("cell", Fraction(1))
    buffers = cell_with_float32_gradients(wire, replace(PUBLIC, wire=wire, rule=rule).capacities)
    assert sum(size for _, size in buffers) / GIB == pytest.approx(total, abs=0.02)


def test_bytes_on_the_wire():
    plans = {name: plan_exchange(PUBLIC, name) for name in TOTALS}
    assert plans["cell"].dispatch / GB == pytest.approx(3.649, abs=6e-4)
    assert plans["pooled"].dispatch / GB == pytest.approx(3.650, abs=6e-4)
    assert plans["pooled"].give_back / GB == pytest.approx(3.647, abs=6e-4)
    assert plans["ragged"].dispatch / GB == pytest.approx(3.171, abs=6e-4)
    assert plans["ring"].dispatch / GB == pytest.approx(25.4, abs=0.05)
    assert plans["ring"].give_back / GB == pytest.approx(50.7, abs=0.05)
    dropless = replace(PUBLIC, rule=RoutingRule("none"))
    emulated = plan_exchange(dropless, "ragged", on_cpu=True)
    assert emulated.dispatch / GB == pytest.approx(203, abs=0.5)
    assert 6 * plans["ragged"].dispatch / GB == pytest.approx(19.0, abs=0.05)


def test_grouped_needs_every_expert():
    alone = replace(PUBLIC, wire=replace(PUBLIC.wire, shape=ExchangeShape(1, 32, 4096)))
    found = plan_exchange(alone, "grouped")
    assert found.dispatch == found.give_back == 0
    # Blocks of 32 rows: the largest power of two up to 4096 / (4 x 32).
    assert found.rows_computed == 4096 + 32 * 31
    with pytest.raises(UsageError, match="needs all experts on a device"):
        plan_exchange(PUBLIC, "grouped")


def test_impossible_settings_are_refused_before_anything_is_compiled():
    for overrides, text in (
        (("parallel.mesh.expert=5",), "do not divide"),
        (("parallel.mesh.expert=4", "parallel.gate=receiver", "parallel.num_chunks=3"), "3 chunks"),
        (("parallel.mesh.expert=2", "parallel.transport=grouped"), "needs all experts"),
        (("parallel.mesh.model=5",), "48 columns of an expert do not divide over 5"),
        (
            ("parallel.mesh.expert=2", "parallel.gate=receiver", "parallel.capacity_factor='0'"),
            "positive decimal",
        ),
    ):
        with pytest.raises(UsageError, match=text):
            plan_of("pocket", *overrides)


def test_counts_beyond_32_bits_are_refused():
    with pytest.raises(UsageError, match="2,147,483,648 assignments of a layer"):
        plan_of("marin-535b", "parallel.mesh.replica=64", "budget.racks.6144=64")


def test_too_many_codes_for_bfloat16():
    many = replace(
        PUBLIC, wire=replace(PUBLIC.wire, shape=ExchangeShape(2, 514, 4096)), num_waves=1
    )
    with pytest.raises(UsageError, match="257 local experts have no exact codes in bfloat16"):
        plan_exchange(many, "pooled")


def test_directions_and_waves():
    for remat, names in SAVED.items():
        kept = {SAVED_ARRIVED, SAVED_RETURNED} <= set(names)
        assert DIRECTIONS[remat] == (4 if kept else 6)
    assert num_waves(replace(PUBLIC, num_waves=1)) == 3
    eight = replace(PUBLIC.wire, shape=ExchangeShape(4, 32, 4096))
    assert num_waves(replace(PUBLIC, wire=eight, num_waves=1)) == 2
