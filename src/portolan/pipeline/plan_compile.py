"""`plan --compile`: what XLA reports of the real step for the real mesh, beside the plan."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from rich.table import Table

from portolan.accounting import CPU_LOGITS_ENTRIES, FLOAT32_BYTES
from portolan.console import console, say
from portolan.errors import PortolanError
from portolan.parallel.planner.estimate import ParallelPlan
from portolan.parallel.planner.exchange import Exchange
from portolan.parallel.planner.memory import Kernels
from portolan.pipeline.plan import plan_width
from portolan.pipeline.plan_mesh import binary_unit, decimal_unit, number_table
from portolan.recipe import Recipe

CHILD = "portolan.pipeline.compiled_step"
PROGRAMS = ("gradients", "update")
NOTES = (
    "a loop counts as often as XLA says that it turns, one without that figure once",
    "bytes are those of rings; a CPU exchanges bfloat16 as float32, accelerators half of it",
    "a padded exchange over the same buffers stands in for the ragged one, which CPUs lack",
    "attention is the hand-written kernel, which holds its weights; GPUs have a fused one",
    "temporaries follow a schedule for CPUs, with float32 copies: up to twice the plan",
    "nothing is run: neither time nor the buffers of communication libraries are seen",
)
"""What the figures do not say."""


def compile_step(plan: ParallelPlan) -> dict[str, Any]:
    """Compile the step in a child process that pretends to have the devices of the mesh.

    Raises:
        PortolanError: the child failed; its last line says why.
    """
    # The last count of a flag given twice holds.
    flags = f"--xla_force_host_platform_device_count={plan.mesh.num_devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", CHILD, str(plan.load.num_micro_batches)],
        input=with_mesh(plan).model_dump_json(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise PortolanError(
            f"the step for {plan.mesh} did not compile: {lines[-1]}",
            remedy="run `portolan plan` without --compile, or with a smaller mesh",
        )
    return json.loads(done.stdout)


def with_mesh(plan: ParallelPlan) -> Recipe:
    """The recipe with the lengths of all axes written out."""
    mesh = plan.recipe.parallel.mesh.model_copy(update=plan.mesh.as_dict())
    settings = plan.recipe.parallel.model_copy(update={"mesh": mesh})
    return plan.recipe.model_copy(update={"parallel": settings})


def cpu_kernels(plan: ParallelPlan) -> Kernels:
    """What the compiled program does: the compute type of accelerators, kernels of a CPU."""
    kernels = plan.kernels("cuda")
    return replace(kernels, logits_entries=CPU_LOGITS_ENTRIES, fused_attention=False)


def planned_bytes(plan: ParallelPlan) -> dict[str, dict[str, int]]:
    """Planned bytes of each program by axes, all of them float32."""
    kernels = replace(cpu_kernels(plan), value_bytes=FLOAT32_BYTES)
    totals: dict[str, dict[str, int]] = {name: {} for name in PROGRAMS}
    for flow in plan.flows(kernels, _compiled_exchange(plan, kernels)):
        program, axes = totals[PROGRAMS[flow.in_update]], " x ".join(flow.axes)
        program[axes] = program.get(axes, 0) + flow.num_bytes
    return totals


def compiled_bytes(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The same of the compiled programs."""
    totals: dict[str, dict[str, int]] = {name: {} for name in PROGRAMS}
    for name, program in totals.items():
        for one in found[name]["collectives"]:
            axes = " x ".join(one["axes"])
            program[axes] = program.get(axes, 0) + one["moved_bytes"]
    return totals


def _compiled_exchange(plan: ParallelPlan, kernels: Kernels) -> Exchange | None:
    """The exchange that is compiled: the ragged one moves as many rows as fit both buffers."""
    routing, exchange = plan.routing(kernels), plan.exchange(kernels)
    if routing is None or exchange is None or exchange.transport != "ragged":
        return exchange
    shape, capacities = routing.wire.shape, routing.capacities
    rows = min(shape.num_assignments, capacities.chunk_buffer) // shape.num_shards
    moved = routing.wire.rows(rows * (shape.num_shards - 1), routing.wire.width)
    moved *= capacities.rule.num_chunks
    return replace(exchange, dispatch=moved, give_back=moved)


def plan_compiled(
    recipe: Recipe, num_devices: int | None, num_micro_batches: int = 1, *, as_json: bool
) -> None:
    """Print what XLA reports of the target's step beside the plan, and what it cannot see.

    Raises:
        UsageError, PortolanError: the mesh does not fit, or the step does not compile.
    """
    rung = plan_width(recipe, recipe.model.width)
    plan = ParallelPlan.of(
        recipe,
        rung.config,
        rung.batch_sequences,
        rung.steps,
        num_devices,
        num_micro_batches,
    )
    found = compile_step(plan)
    if as_json:
        planned = {"mesh": plan.mesh.as_dict(), "planned_bytes": planned_bytes(plan)}
        say(json.dumps(found | planned, indent=2))
        return
    say(
        f"compiled for {plan.mesh}, {plan.mesh.num_devices} devices, transport {plan.transport}: "
        f"{found['seconds']:.0f} s, {found['resident_bytes'] / 1e9:.1f} GB"
    )
    console.print(memory_table(plan, found))
    console.print(collective_table(found))
    if plan.mesh.num_devices > 1:
        console.print(comparison_table(compiled_bytes(found), planned_bytes(plan)))
    for line in NOTES:
        say(f"note: {line}")


def memory_table(plan: ParallelPlan, found: dict[str, Any]) -> Table:
    """Bytes of both programs, as compiled and as planned."""
    memory = plan.memory("resident", cpu_kernels(plan))
    state = memory.parameters + memory.optimizer
    planned = {
        "gradients": (memory.parameters, memory.gradients, memory.work.total),
        "update": (state + memory.gradients, state, memory.update),
    }
    unit, size = binary_unit(memory.peak)
    table = number_table(
        f"Bytes of one device, {unit}: compiled / planned",
        "program",
        "arguments",
        "results",
        "temporaries",
    )
    for name, sizes in planned.items():
        program = found[name]
        compiled = (program[f"{kind}_bytes"] for kind in ("argument", "result", "temporary"))
        pairs = zip(compiled, sizes, strict=True)
        table.add_row(name, *(f"{a / size:,.2f} / {b / size:,.2f}" for a, b in pairs))
    return table


def collective_table(found: dict[str, Any]) -> Table:
    """Collectives of both programs, by kind, axes, element type and place."""
    rows = [(name, one) for name in PROGRAMS for one in found[name]["collectives"]]
    unit, size = decimal_unit(max((one["moved_bytes"] for _, one in rows), default=0))
    table = Table(title="Collectives of the compiled programs", title_justify="left")
    numbers = ("instr.", "runs", unit)
    for heading in ("program", "collective", "axes", "type", "loop", *numbers):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for name, one in rows:
        table.add_row(
            name,
            one["kind"],
            " x ".join(one["axes"]),
            one["element_type"],
            "yes" if one["in_loop"] else "",
            f"{one['instructions']:,}",
            f"{one['executions']:,}",
            f"{one['moved_bytes'] / size:,.3f}",
        )
    return table


def comparison_table(
    compiled: dict[str, dict[str, int]], planned: dict[str, dict[str, int]]
) -> Table:
    """Bytes of both programs by axes: compiled beside planned."""
    sizes = [size for found in (compiled, planned) for by in found.values() for size in by.values()]
    unit, divisor = decimal_unit(max(sizes, default=0))
    table = Table(title=f"Bytes by axes, {unit}, all in float32", title_justify="left")
    for heading in ("program", "axes", "compiled", "planned"):
        number = heading in ("compiled", "planned")
        table.add_column(heading, justify="right" if number else "left")
    for name in PROGRAMS:
        ours, theirs = planned[name], compiled[name]
        for axes in sorted({*ours, *theirs}, key=lambda axes: -ours.get(axes, 0)):
            pair = (theirs.get(axes, 0) / divisor, ours.get(axes, 0) / divisor)
            table.add_row(name, axes, *(f"{size:,.3f}" for size in pair))
    return table
