"""Tables of what a plan costs on its mesh and on machines."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from portolan.console import console, say
from portolan.errors import UsageError
from portolan.parallel.planner.estimate import MachinePlan, ParallelPlan, summary_of_state
from portolan.parallel.planner.exchange import DIRECTIONS
from portolan.parallel.planner.machines import MACHINES, Machine, find_machine
from portolan.parallel.planner.memory import MASTERS, Kernels, Master, MemoryPlan
from portolan.parallel.planner.public import Comparison, compare, is_public_run
from portolan.recipe import Recipe
from portolan.scaling.ladder import Rung

TEXT_COLUMNS = 48
NOTE_COLUMNS = 24
"""Of the last column of a table, so that it fits 100."""


@dataclass(frozen=True)
class MeshOptions:
    """What a person says about the machine: devices, micro-batches of an update, its name, where
    the state lies, the utilisation to reckon with, and whether a misfit is shown all the same."""

    num_devices: int | None = None
    num_micro_batches: int = 1
    machine: str = ""
    master: Master = "resident"
    mfu: float | None = None
    force: bool = False


@dataclass(frozen=True)
class MeshReport:
    """A plan on its mesh, and on the machines that were asked for."""

    plan: ParallelPlan
    machines: tuple[MachinePlan, ...]
    chosen: MachinePlan | None
    options: MeshOptions

    @property
    def kernels(self) -> Kernels:
        """Those of the chosen machine, else of GPUs."""
        return self.chosen.kernels if self.chosen else self.plan.kernels("cuda")


def plan_mesh(recipe: Recipe, target: Rung, options: MeshOptions) -> MeshReport:
    """Plan the target on the recipe's mesh.

    Raises:
        UsageError: mesh, batch, experts or memory do not fit, or the machine is unknown.
    """
    if options.master not in MASTERS:
        raise UsageError(
            f"--master {options.master!r} is unknown", remedy=f"use one of {', '.join(MASTERS)}"
        )
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise UsageError(f"--mfu {options.mfu} is not a share", remedy="write 0.25 for 25 %")
    plan = ParallelPlan.of(
        recipe,
        target.config,
        target.batch_sequences,
        target.steps,
        options.num_devices,
        options.num_micro_batches,
    )
    chosen = plan.on(find_machine(options.machine), options.master) if options.machine else None
    if chosen and not options.force:
        chosen.refuse_misfit()
    named = [chosen.machine] if chosen else _worth_showing(plan)
    return MeshReport(
        plan, tuple(plan.on(machine, options.master) for machine in named), chosen, options
    )


def _worth_showing(plan: ParallelPlan) -> list[Machine]:
    """Every machine, but CPUs only for a single device."""
    single = plan.mesh.num_devices == 1
    return [machine for machine in MACHINES.values() if machine.platform != "cpu" or single]


def number_table(
    title: str, *headings: str, caption: str = "", columns: int | None = None
) -> Table:
    """A table whose first column is text and whose others are numbers, `columns` wide."""
    table = Table(
        title=title, title_justify="left", caption=caption or None, caption_justify="left"
    )
    for index, heading in enumerate(headings):
        justify, width = ("right", columns) if index else ("left", None)
        table.add_column(heading, justify=justify, max_width=width)
    return table


def binary_unit(largest: float) -> tuple[str, int]:
    """The unit in which a table shows sizes up to `largest` bytes, and its bytes."""
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def decimal_unit(largest: float) -> tuple[str, float]:
    """The unit in which a table shows traffic up to `largest` bytes, and its bytes."""
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)


def print_mesh(report: MeshReport) -> None:
    """All tables of a plan on its mesh."""
    plan = report.plan
    devices = "" if plan.mesh.num_devices == 1 else f" = {plan.mesh.num_devices} devices"
    micro = plan.load.num_micro_batches
    of = "an update" if micro == 1 else f"each of {micro} micro-batches"
    say(f"mesh: {plan.mesh}{devices}, {plan.load.tokens:,} tokens each in {of}")
    if plan.config.mlp != "dense":
        say(f"experts: {plan.transport}, gate {plan.recipe.parallel.gate}")
    console.print(memory_table(report))
    if plan.mesh.num_devices > 1:
        if plan.mesh.expert > 1 and plan.config.mlp != "dense":
            console.print(transport_table(report))
        console.print(flow_table(report))
    console.print(machine_table(report))
    if report.chosen:
        console.print(time_table(report.chosen, report.options.mfu))
    if is_public_run(plan):
        console.print(public_table(compare(plan)))
    for warning in plan.warnings:
        say(f"warning: {warning}")


def _memory_rows(plans: list[MemoryPlan]) -> Iterator[tuple[str, list[int]]]:
    for name, field in (
        ("parameters", "parameters"),
        ("gradients", "gradients"),
        ("optimizer state", "optimizer"),
    ):
        yield name, [getattr(plan, field) for plan in plans]
    for name, field in (
        ("saved for the backward pass", "saved_activations"),
        ("parameters outside the layers", "outside_layers"),
        ("one layer: its weights, their gradients", "layer_weights"),
        ("one layer: activations", "layer_activations"),
        ("one layer: attention weights", "attention_weights"),
        ("one layer: expert exchange", "exchange_forward"),
        ("one layer: expert exchange, gradients", "exchange_backward"),
        ("block of logits", "logits_block"),
        ("sums over micro-batches", "accumulated"),
    ):
        yield name, [getattr(plan.work, field) for plan in plans]
    yield "temporaries of the gradient", [plan.work.total for plan in plans]
    yield "temporaries of the update", [plan.update for plan in plans]
    yield "peak", [plan.peak for plan in plans]
    yield "on the host", [plan.host for plan in plans]


def memory_table(report: MeshReport) -> Table:
    """Bytes of one device: where `--master` puts the state, or in all places on a mesh."""
    plan = report.plan
    masters: list[Master] = list(MASTERS) if plan.mesh.num_devices > 1 else [report.options.master]
    plans = [plan.memory(master, report.kernels) for master in masters]
    unit, size = binary_unit(plans[0].peak)
    parts = ", ".join(
        f"{part} {sizes['parameters'] / size:,.2f}"
        for part, sizes in summary_of_state(plan).items()
    )
    table = number_table(
        f"Memory of one device, {unit}, remat {plan.recipe.train.remat!r}",
        "what",
        *masters,
        caption=f"Parameters in float32: {parts} {unit}.\nThe peak is the state and the larger of "
        "the two temporaries.",
    )
    for name, values in _memory_rows(plans):
        if any(values):
            cells = (f"{value / size:,.2f}" if value else "-" for value in values)
            table.add_row(name, *cells, style="bold" if name == "peak" else "")
    return table


def transport_table(report: MeshReport) -> Table:
    """What every transport would need at the recipe's capacity factor."""
    plan = report.plan
    settings = plan.recipe.parallel
    pairs = DIRECTIONS[plan.recipe.train.remat] // 2 * plan.config.num_layers
    pairs *= plan.load.num_micro_batches
    found = list(plan.alternatives(report.kernels))
    exchanges = [one for _, one in found if not isinstance(one, UsageError)]
    unit, size = binary_unit(max((one.buffer_bytes for one in exchanges), default=0))
    moved, traffic = decimal_unit(max((one.dispatch for one in exchanges), default=0))
    table = number_table(
        f"Expert exchange at capacity {settings.capacity_factor}, {settings.num_chunks} chunks",
        "transport",
        f"buffers {unit}",
        f"gradients {unit}",
        f"{moved} out",
        f"{moved} back",
        f"{moved} an update",
        "rows / routed",
        caption=f"Buffers of one chunk or wave; {moved} of a layer in one direction; {2 * pairs} "
        "exchanges an update.",
        columns=9,
    )
    routed = plan.load.tokens * plan.config.experts_per_token
    for name, exchange in found:
        if isinstance(exchange, UsageError):
            table.add_row(name, "-")
            continue
        table.add_row(
            name,
            f"{exchange.buffer_bytes / size:,.2f}",
            f"{exchange.backward / size:,.2f}",
            f"{exchange.dispatch / traffic:,.3f}",
            f"{exchange.give_back / traffic:,.3f}",
            f"{pairs * (exchange.dispatch + exchange.give_back) / traffic:,.1f}",
            f"{exchange.rows_computed / routed:.3f}",
        )
    return table


def flow_table(report: MeshReport) -> Table:
    """Bytes that leave one device in an update, by what they are and over which axes."""
    flows = report.plan.flows(report.kernels)
    unit, size = decimal_unit(max(flow.num_bytes for flow in flows))
    table = number_table("Bytes that leave one device in one update", "what", "axes", unit)
    totals: dict[str, int] = {}
    for flow in sorted(flows, key=lambda flow: -flow.num_bytes):
        axes = " x ".join(flow.axes)
        table.add_row(flow.name, axes, f"{flow.num_bytes / size:,.3f}")
        totals[axes] = totals.get(axes, 0) + flow.num_bytes
    for axes, total in totals.items():
        table.add_row("sum", axes, f"{total / size:,.3f}", style="bold")
    return table


def machine_table(report: MeshReport) -> Table:
    """The least time of an update on every machine."""
    table = number_table(
        f"One update, seconds at peak rates; memory with state {report.options.master!r}",
        "machine",
        "memory",
        "compute",
        "HBM",
        "fast links",
        "slow links",
        "at least",
        "MFU at most",
        "whole run",
        caption="At least: all overlaps. The whole run at that bound, failures included.",
        columns=9,
    )
    for one in report.machines:
        step = one.step
        mfu = one.mfu(step.bound)
        table.add_row(
            one.machine.name,
            f"{100 * one.memory_share:.0f} %" + ("" if one.fits else " !"),
            *(f"{x:.3g}" for x in (step.compute, step.memory, step.fast_links, step.slow_links)),
            f"{step.bound:.3g}",
            "-" if mfu is None else f"{100 * mfu:.1f} %",
            _duration(one.run_seconds(step.bound)),
        )
    return table


def time_table(one: MachinePlan, mfu: float | None) -> Table:
    """Time, failures and goodput on the chosen machine."""
    table = Table(title=f"Time on {one.machine.name}", title_justify="left")
    for heading in ("quantity", "value", "how"):
        width = TEXT_COLUMNS if heading == "how" else None
        table.add_column(
            heading, justify="right" if heading == "value" else "left", max_width=width
        )
    for row in _time_rows(one, mfu):
        table.add_row(*row)
    return table


def _time_rows(one: MachinePlan, mfu: float | None) -> Iterator[tuple[str, str, str]]:
    machine, step, failures = one.machine, one.step, one.failures
    yield "peak", f"{machine.peak_flops_per_second:.4g} FLOP/s", machine.peak_source
    if machine.source:
        yield "links and memory", "", machine.source
    for name in ("model", "recomputed", "padding", "repeated", "optimizer"):
        if flops := getattr(one.flops, name):
            yield f"FLOPs a device, {name}", f"{flops:.4g}", _FLOPS[name]
    yield "update, all overlaps", f"{step.bound:.4g} s", f"limited by {step.limit}"
    yield "update, nothing overlaps", f"{step.serial:.4g} s", "sum of the four"
    expected = mfu if mfu is not None else machine.attained_mfu
    if expected and machine.platform != "cpu":
        seconds = one.seconds_at(expected)
        source = "--mfu" if mfu is not None else "of the public run, not of this code"
        yield f"update at {100 * expected:.4g} % MFU", f"{seconds:.4g} s", source
        yield "whole run at that", _duration(one.run_seconds(seconds)), "failures included"
    interval = one.plan.recipe.train.temporary_checkpoint_seconds
    how = f"{machine.mean_hours_between_failures:,.0f} device hours / devices"
    yield "between failures of the job", _duration(failures.mean_seconds), how
    yield "a checkpoint", f"{failures.checkpoint_seconds:.3g} s", "state / devices / rate"
    yield "a restart", f"{failures.restart_seconds:,.0f} s", "to notice, start, compile, restore"
    yield (
        "goodput",
        f"{100 * one.goodput:.2f} %",
        f"checkpoints every {interval:,.0f} s (Daly 2006, equation 20)",
    )
    best = failures.best_interval_seconds
    how = f"would give {100 * failures.goodput(best):.2f} % (equation 37)"
    yield "best interval", f"{best:,.0f} s", how


def _duration(seconds: float) -> str:
    """Seconds in the largest unit that is not below 1."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


_FLOPS = {
    "model": "3 forwards, published convention: what MFU credits",
    "recomputed": "again in the backward pass",
    "padding": "empty rows of fixed buffers",
    "repeated": "by every shard of `model`",
    "optimizer": "Newton-Schulz; every replica repeats it",
}


def public_table(comparisons: Iterable[Comparison]) -> Table:
    """This plan beside the public run."""
    table = Table(title="Beside the public run", title_justify="left")
    for heading in ("quantity", "plan", "public", "", "public is", "difference"):
        number = heading in ("plan", "public")
        width = NOTE_COLUMNS if heading == "difference" else None
        table.add_column(heading, justify="right" if number else "left", max_width=width)
    for one in comparisons:
        table.add_row(
            one.quantity,
            f"{one.plan:,.4g}",
            f"{one.public:,.6g}",
            one.unit,
            one.kind,
            one.explanation,
        )
    return table


def mesh_json(report: MeshReport) -> dict[str, Any]:
    """Everything that the tables show, in bytes, FLOPs and seconds."""
    plan, kernels = report.plan, report.kernels
    return {
        "mesh": plan.mesh.as_dict(),
        "num_devices": plan.mesh.num_devices,
        "tokens_per_device": plan.load.tokens,
        "num_micro_batches": plan.load.num_micro_batches,
        "transport": plan.transport,
        "settings": plan.recipe.parallel.model_dump(mode="json"),
        "state_bytes": summary_of_state(plan),
        "memory": {master: plan.memory(master, kernels).as_dict() for master in MASTERS},
        "exchanges": {
            name: {"error": exchange.message}
            if isinstance(exchange, UsageError)
            else dataclasses.asdict(exchange) | {"buffer_bytes": exchange.buffer_bytes}
            for name, exchange in plan.alternatives(kernels)
        },
        "flows": [dataclasses.asdict(flow) for flow in plan.flows(kernels)],
        "machines": {one.machine.name: _machine_json(one) for one in report.machines},
        "public": [dataclasses.asdict(c) for c in compare(plan)] if is_public_run(plan) else [],
        "warnings": list(plan.warnings),
    }


def _machine_json(one: MachinePlan) -> dict[str, Any]:
    step, failures = one.step, one.failures
    return {
        "machine": one.machine.model_dump(mode="json"),
        "peak_bytes": one.memory.peak,
        "memory_share": one.memory_share,
        "fits": one.fits,
        "flops": dataclasses.asdict(one.flops) | {"total": one.flops.total},
        "step_seconds": dataclasses.asdict(step)
        | {"bound": step.bound, "serial": step.serial, "limit": step.limit},
        "mfu_at_bound": one.mfu(step.bound),
        "run_seconds_at_bound": one.run_seconds(step.bound),
        "failures": dataclasses.asdict(failures)
        | {"best_interval_seconds": failures.best_interval_seconds},
        "goodput": one.goodput,
    }
