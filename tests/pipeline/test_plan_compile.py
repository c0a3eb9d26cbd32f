"""What the planner adds up beside what XLA compiles: the real step on pretended devices."""

import json

import pytest

from portolan.errors import PortolanError
from portolan.parallel.planner.estimate import ParallelPlan
from portolan.pipeline.plan import plan_width
from portolan.pipeline.plan_compile import (
    PROGRAMS,
    compile_step,
    compiled_bytes,
    plan_compiled,
    planned_bytes,
)
from portolan.recipe import find_recipe, load_recipe


def plan_on(*overrides, num_micro_batches=1):
    recipe = load_recipe(find_recipe("pocket"), overrides)
    rung = plan_width(recipe, recipe.model.width)
    shape = rung.config, rung.batch_sequences, rung.steps
    return ParallelPlan.of(recipe, *shape, num_micro_batches=num_micro_batches)


def by_axes(collectives):
    """Bytes that leave a device, by axes."""
    totals: dict[tuple[str, ...], int] = {}
    for one in collectives:
        axes = tuple(one["axes"])
        totals[axes] = totals.get(axes, 0) + one["moved_bytes"]
    return totals


@pytest.mark.slow
def test_the_compiled_step_moves_the_planned_bytes(capsys):
    """Gathers, scatters, reductions, halos and exchanges agree to the byte, but for scalars."""
    overrides = ("replica=1", "data=2", "context=2", "expert=2", "model=1")
    sets = tuple(f"parallel.mesh.{size}" for size in overrides)
    plan = plan_on(*sets, num_micro_batches=2)
    plan_compiled(plan.recipe, None, 2, as_json=True)
    found = json.loads(capsys.readouterr().out)
    compiled, planned = compiled_bytes(found), planned_bytes(plan)
    for name in PROGRAMS:
        for axes in {*compiled[name], *planned[name]}:
            expected = pytest.approx(planned[name].get(axes, 0), rel=0.02, abs=5000)
            assert compiled[name].get(axes, 0) == expected, (name, axes)
    memory = plan.memory("resident", plan.kernels("cpu"))
    gradients, update = found["gradients"], found["update"]
    assert gradients["argument_bytes"] == pytest.approx(memory.parameters, rel=0.02)
    assert gradients["result_bytes"] == pytest.approx(memory.gradients, rel=0.02)
    state = memory.parameters + memory.optimizer
    assert update["argument_bytes"] == pytest.approx(state + memory.gradients, rel=0.02)
    assert update["reused_bytes"] == pytest.approx(state, rel=0.02)
    assert 1 / 3 < gradients["temporary_bytes"] / memory.work.total < 3


def test_a_step_that_does_not_compile_names_the_reason(monkeypatch):
    monkeypatch.setattr("portolan.pipeline.plan_compile.CHILD", "portolan.no_such_module")
    with pytest.raises(PortolanError, match=r"did not compile: .*no_such_module"):
        compile_step(plan_on())
