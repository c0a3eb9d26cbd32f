"""The verbs around an amended forecast: simulate a shorter run, amend, show the ledger."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from portolan.console import console, say
from portolan.errors import UsageError
from portolan.optim.schedule import HorizonEvent, Schedule
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.forecasting import HEADLINE, make_forecast
from portolan.pipeline.ledger import (
    RecordedChange,
    amend_target,
    find_change,
    ledger_json,
    print_ledger,
    read_records,
    recorded_changes,
    registered_forecasts,
    target_ledger,
)
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import (
    MAX_PERMANENT_CHECKPOINTS,
    MIXTURE_FILE,
    PlannedRun,
    evaluations,
    planned_runs,
)
from portolan.pipeline.stages import require_corpus
from portolan.project import Project
from portolan.scaling.baseline import PowerLaw
from portolan.scaling.delay import DelayInputs, MixturePhase, simulate

STEP_SECONDS = "throughput/step_seconds"
PACE_ROWS = 200
"""Newest updates whose median time is the present pace."""


def amend(
    project: Project,
    *,
    change_id: str,
    shifts: Sequence[str],
    multipliers: Sequence[str],
    reason: str,
) -> None:
    """Register an amended forecast of the target for a recorded change.

    Raises:
        UsageError: nothing is registered or changed, or nothing is left to forecast.
    """
    corpus = require_corpus(project)
    record = ProjectRecord(project)
    target = planned_runs(project, corpus)[-1]
    records = list(record.journal.records())
    change = find_change(recorded_changes(records, target.run_id), change_id)
    delay = None
    if change.kind == "horizon":
        inputs = delay_inputs(project, corpus, target, before=change)
        share = int(change.content["horizon"]) / inputs.schedule.final_horizon
        delay = simulate(inputs, share, change.from_step).record()
    identity = amend_target(
        project,
        corpus,
        record,
        target,
        change=change,
        shifts=shifts,
        multipliers=multipliers,
        reason=reason,
        delay=delay,
    )
    head = record.journal.head
    say(f"registered {identity}; journal head {head.seq} {head.head}")
    show_ledger(project, as_json=False)


def show_ledger(project: Project, *, as_json: bool) -> None:
    """Print every forecast of the target with its status and its score so far."""
    corpus = require_corpus(project)
    target = planned_runs(project, corpus)[-1]
    entries = target_ledger(project, corpus, read_records(project), target)
    if not entries:
        raise UsageError(
            f"no forecast is registered for {target.run_id}", remedy="run `portolan register`"
        )
    values: dict[int, float] = {}
    if (project.runs / target.run_id).is_dir():
        values = evaluations(project, target.run_id).get(HEADLINE, {})
    if as_json:
        say(json.dumps(ledger_json(entries, values), indent=2, sort_keys=True))
    else:
        print_ledger(entries, values)


def show_delay(project: Project, horizon: float, from_step: int, *, as_json: bool) -> None:
    """Print what cutting the target to a share of its updates would change and cost."""
    corpus = require_corpus(project)
    target = planned_runs(project, corpus)[-1]
    plan = simulate(delay_inputs(project, corpus, target), horizon, from_step)
    if as_json:
        say(json.dumps(plan.record(), indent=2, sort_keys=True))
        return
    table = Table(title=f"{target.run_id}: {horizon:g} of the updates, cut at {from_step}",
                  title_justify="left")  # fmt: skip
    for name in ("what", "now", "after the cut"):
        table.add_column(name, overflow="fold")
    for row in plan.rows:
        if row.changed:
            table.add_row(row.field, _shown(row.before), _shown(row.after))
    console.print(table)
    say(
        f"expected final loss: {plan.loss_before:.4f} to {plan.loss_after:.4f} nats per token by "
        f"the baseline law, {plan.cost:+.4f} +- {plan.cost_sd:.4f}"
    )
    say("nothing was changed; a shorter horizon voids the registration and needs an amended one")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value))}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def delay_inputs(
    project: Project, corpus: Corpus, target: PlannedRun, *, before: RecordedChange | None = None
) -> DelayInputs:
    """What the simulator needs of the target; `before` leaves that change and later ones out."""
    recipe, rung = project.recipe, target.rung
    records = read_records(project)
    events = []
    for change in recorded_changes(records, target.run_id):
        if before is not None and change.id == before.id:
            break
        if change.kind == "horizon":
            events.append(HorizonEvent(change.from_step, int(change.content["horizon"])))
    schedule = Schedule(
        rung.steps,
        recipe.optimizer.warmup_steps or rung.warmup_steps,
        recipe.optimizer.min_ratio,
        tuple(events),
    )
    phases, cells = _mixture(project, target)
    return DelayInputs(
        schedule=schedule,
        peak_rate=rung.hyperball,
        initial_decay=recipe.optimizer.gate_router_decay,
        tokens_per_step=rung.tokens_per_step,
        batch_sequences=rung.batch_sequences,
        flops_per_step=rung.flops_per_step_no_head,
        law=_law(project, corpus, target),
        rate_law=rung.law,
        mixture_block=rung.mixture_block,
        phases=phases,
        cells=cells,
        permanent_checkpoint_steps=recipe.train.permanent_checkpoint_steps
        or -(-rung.steps // MAX_PERMANENT_CHECKPOINTS),
        seconds_per_step=_pace(project, target),
        now=datetime.now(UTC),
    )


def _law(project: Project, corpus: Corpus, target: PlannedRun) -> PowerLaw:
    """The registered baseline law, else that of the finished rungs."""
    known = registered_forecasts(read_records(project), target.run_id)
    baseline = (known[0][1].get("baseline") or {}) if known else {}
    if {"A", "alpha", "E"} <= set(baseline):
        a, alpha, asymptote = (float(baseline[name]) for name in ("A", "alpha", "E"))
        return PowerLaw(a, alpha, asymptote, 0.0)
    forecast = make_forecast(project, corpus)
    return forecast.metrics[forecast.headline].law


def _mixture(
    project: Project, target: PlannedRun
) -> tuple[tuple[MixturePhase, ...], dict[str, int]]:
    """Phases with their planned fractions, and sequences by cell; empty before the run starts."""
    content = project.read("runs", target.run_id, MIXTURE_FILE)
    if content is None:
        return (), {}
    planned = {phase.name: phase.from_fraction for phase in project.recipe.mixture.phases}
    phases = tuple(
        MixturePhase(
            phase["name"],
            planned.get(phase["name"], 0.0),
            {cell: count / content["lattice"] for cell, count in phase["counts"].items()},
        )
        for phase in content["phases"]
    )
    length = content["sequence_length"]
    cells = {
        cell: tokens // length for cell, tokens in content["cells"].items() if tokens >= length
    }
    return phases, cells


def _pace(project: Project, target: PlannedRun) -> float | None:
    """Median seconds of the newest updates, None before the first."""
    folder = project.runs / target.run_id
    if not folder.is_dir():
        return None
    from portolan.track.tracker import read_metrics

    values = read_metrics(folder, keys=[STEP_SECONDS]).sort("row")["value"].tail(PACE_ROWS)
    median = values.median()
    return float(median) if isinstance(median, int | float) else None
