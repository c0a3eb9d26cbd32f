"""The delay simulator on the public run, by the figures of its published plan."""

from datetime import UTC, datetime

import pytest

from portolan.canonical import canonical
from portolan.errors import UsageError
from portolan.optim.schedule import Schedule
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.delay import DelayInputs, MixturePhase, simulate

STEPS, CUT = 390_251, 150_000
PEAK = 0.0032905


@pytest.fixture(scope="module")
def inputs():
    return DelayInputs(
        schedule=Schedule(STEPS),
        peak_rate=PEAK,
        initial_decay=0.02,
        tokens_per_step=46_137_344,
        batch_sequences=11_264,
        flops_per_step=6690294608796057600,
        law=PowerLaw(84.787593, 0.08997568, 1.5, 0.0),
        mixture_block=49_152,
        phases=(
            MixturePhase("main", 0.0, {"web": 1.0}),
            MixturePhase("cooldown", 0.8, {"web": 0.5, "books": 0.5}),
        ),
        cells={"web": 4_000_000_000, "books": 500_000_000},
        permanent_checkpoint_steps=6_000,
        seconds_per_step=14.7,
        now=datetime(2026, 9, 24, tzinfo=UTC),
    )


@pytest.fixture(scope="module")
def plan(inputs):
    return simulate(inputs, 0.8, CUT)


@pytest.mark.parametrize(
    ("horizon", "steps", "cost", "factor"),
    [(0.9, 351_226, 0.0051, 1.037), (0.8, 312_201, 0.0109, 1.080), (0.75, 292_688, 0.0141, 1.105)],
)
def test_cost_and_law(inputs, horizon, steps, cost, factor):
    found = simulate(inputs, horizon, CUT)
    assert found.steps == steps
    assert found.cost == pytest.approx(cost, abs=5e-5)
    assert found.cost_sd == pytest.approx(cost / 2, abs=5e-5)
    assert found.rows[-1].after == pytest.approx(factor, abs=5e-4)


def test_rates(inputs, plan):
    before, after = inputs.schedule, plan.schedule
    assert after.factor(CUT) == pytest.approx(0.640757, abs=5e-7)
    assert after.factor(CUT) * PEAK == pytest.approx(0.00210839, abs=5e-8)
    assert before.factor(250_000) == pytest.approx(0.394866, abs=5e-7)
    assert after.factor(250_000) == pytest.approx(0.276544, abs=5e-7)
    past = range(0, CUT + 1, 50)
    assert all(after.factor(s) == before.factor(s) for s in past)
    assert all(after.decay(s) == before.decay(s) for s in past)
    assert after.factor(plan.steps) == pytest.approx(0.05)


def test_everything_that_depends_on_the_horizon_is_in_the_diff(plan):
    rows = {row.field: row for row in plan.rows}
    assert rows["updates"].after == 312_201
    assert rows["tokens"].after == 312_201 * 46_137_344
    # The anneal of the decay goes on from where it is, to 0 at the new end.
    start = 0.02 * (1 - CUT / STEPS)
    middle = CUT + round(0.5 * (312_200 - CUT))
    expected = start * (1 - (middle - CUT) / (312_201 - CUT))
    assert rows[f"router and gate decay at update {middle}"].after == pytest.approx(expected)
    boundary = rows["start of mixture phase cooldown"]
    assert (boundary.before, boundary.after) == (312_192, 249_744)
    assert boundary.after % (49_152 // 1_024) == 0
    assert rows["start of mixture phase main"].changed is False
    web = rows["epochs of web"]
    expected = (249_744 + 0.5 * (312_201 - 249_744)) * 11_264 / 4e9
    assert web.after == pytest.approx(expected) and web.before > web.after
    marks = rows["evaluations still to come, completed updates"]
    assert marks.after[-1] == 312_201 and min(marks.after) > CUT
    checkpoints = rows["permanent checkpoints still to come, completed updates"]
    assert checkpoints.after[:2] == [156_000, 162_000] and checkpoints.after[-1] == 312_201
    assert rows["end, at the present pace"].after == "2026-10-21 14:19 UTC"


def test_a_phase_that_began_stays_where_it_is(inputs):
    late = simulate(inputs, 0.9, 330_000)
    rows = {row.field: row for row in late.rows}
    assert not rows["start of mixture phase cooldown"].changed
    # The moved boundary would lie in the past: the phase starts at the cut.
    between = simulate(inputs, 0.8, 260_000)
    rows = {row.field: row for row in between.rows}
    assert rows["start of mixture phase cooldown"].after == 260_000


def test_what_is_attached_is_canonical(plan):
    record = plan.record()
    canonical(record)
    assert record["loss_cost"] == str(plan.cost)
    fields = [row["field"] for row in record["diff"]]
    assert "updates" in fields and "start of mixture phase main" not in fields


@pytest.mark.parametrize(("horizon", "step"), [(1.0, CUT), (1.2, CUT), (0.3, CUT), (0.8, 100)])
def test_impossible_cuts_are_refused(inputs, horizon, step):
    with pytest.raises(UsageError):
        simulate(inputs, horizon, step)
