"""Decide on a change of a run that has begun: show what it alters, record it, leave it to training.

What has begun is never altered: a change before a completed update is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from portolan.accounting import training_flops
from portolan.console import console, say
from portolan.data.mixture import check_mixture, load_mixture
from portolan.errors import UsageError
from portolan.optim.schedule import Schedule, token_exponent
from portolan.pipeline import forecasting
from portolan.pipeline.change_records import (
    append_change,
    completed_updates,
    describe,
    move_planned,
    run_course,
    write_changes,
)
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.course import (
    Change,
    ContextChange,
    Course,
    HorizonChange,
    MixtureChange,
    batch_of,
    extended_multiplier,
)
from portolan.pipeline.inspect import find_run
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import PlannedRun, is_finished, run_loader, run_settings
from portolan.pipeline.stages import require_corpus
from portolan.project import Project

SHOWN_RATES = (0.25, 0.5, 0.75)
"""Shares of the remaining updates at which rates are shown."""
NUM_SHOWN_MARKS = 6


def change_context(
    project: Project,
    run_id: str,
    *,
    sequence_length: int,
    qk_multiplier: float | None,
    from_step: int | None,
    reason: str,
    dry_run: bool,
) -> None:
    """Rows of another length at the same tokens an update, from a mixture block on."""

    def make(run: PlannedRun, course: Course, step: int) -> Change:
        batch_of(sequence_length, course.tokens_per_step)
        multiplier = qk_multiplier or extended_multiplier(run.rung, sequence_length)
        return ContextChange(course.block_start(step, up=True), sequence_length, multiplier)

    _decide(project, run_id, make, from_step, reason, dry_run=dry_run)


def change_mixture(
    project: Project,
    run_id: str,
    *,
    weights: Mapping[str, float],
    file: Path | None,
    phase: str,
    name: str,
    from_step: int | None,
    reason: str,
    dry_run: bool,
) -> None:
    """Other weights of the cells from a mixture block on; earlier weights stay recorded.

    They are `weights`, or those of a phase (the last if it is not named) of a mixture file.
    """
    if file is not None:
        if weights:
            raise UsageError("both --file and --weight say the weights", remedy="leave one out")
        weights, origin = read_phase(require_corpus(project), file, phase)
        reason = f"{reason} ({origin})"
    elif phase:
        raise UsageError("--phase names a phase of a mixture file", remedy="give --file too")

    def make(run: PlannedRun, course: Course, step: int) -> Change:
        label = name or f"phase-{len(course.phases)}"
        return MixtureChange(course.block_start(step, up=True), label, weights)

    _decide(project, run_id, make, from_step, reason, dry_run=dry_run)


def change_horizon(
    project: Project,
    run_id: str,
    *,
    fraction: float,
    from_step: int | None,
    reason: str,
    dry_run: bool,
) -> None:
    """End after `fraction` of the planned updates; rates fall from where they are to their end."""

    def make(run: PlannedRun, course: Course, step: int) -> Change:
        warmup = run_settings(project.recipe, run).warmup_steps
        first = step if from_step is not None else max(step, warmup)
        return HorizonChange(first, round(fraction * course.steps))

    _decide(project, run_id, make, from_step, reason, dry_run=dry_run)


def parse_weights(texts: list[str]) -> dict[str, float]:
    """`domain=weight` texts as a mapping.

    Raises:
        UsageError: one is not of that form.
    """
    weights = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name or not weights[name] >= 0:
            raise UsageError(
                f"--weight {text!r} is not a domain and its weight",
                remedy="write it as --weight stdlib-sources=0.4, with a number of at least 0",
            )
    return weights


def read_phase(corpus: Corpus, path: Path, phase: str) -> tuple[dict[str, float], str]:
    """Weights of a phase of a mixture file for this tokenizer and store, and where they are from.

    A run on the lattice of the file reads exactly its counts; on another one they are rounded.

    Raises:
        MixtureError: the file is of another tokenizer or store.
        UsageError: it has no such phase.
    """
    mixture = load_mixture(path)
    check_mixture(
        mixture,
        tokenizer_digest=corpus.tokenizer_digest,
        store_digest=corpus.store_digest,
        store_tokens=corpus.store.tokens_by_cell,
    )
    found = [one for one in mixture.phases if phase in ("", one.name)]
    if not found:
        raise UsageError(
            f"{path} has no phase {phase!r}",
            remedy=f"use {', '.join(one.name for one in mixture.phases)}",
        )
    origin = f"phase {found[-1].name} of {path.name}, digest {mixture.digest[:16]}"
    return {cell: float(count) for cell, count in found[-1].counts.items()}, origin


def _decide(
    project: Project,
    run_id: str,
    make: Callable[[PlannedRun, Course, int], Change],
    from_step: int | None,
    reason: str,
    *,
    dry_run: bool,
) -> None:
    """Show what a change alters and, unless it is a dry run, record it."""
    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    record = ProjectRecord(project)
    folder = project.runs / run.run_id
    if not record.find("run", name=run.run_id):
        raise UsageError(f"{run.run_id} has not started", remedy="plan the change in the recipe")
    if is_finished(project, run):
        raise UsageError(f"{run.run_id} is finished", remedy="change a run before its end")
    from portolan.train.process import exclusive

    with exclusive(folder):
        completed = completed_updates(folder)
        if from_step is not None and from_step < completed:
            raise UsageError(
                f"{run.run_id} has completed {completed} updates: update {from_step} cannot change",
                remedy=f"use --from-step {completed} or later, or leave it out",
            )
        before = run_course(project, record, run)
        change = make(run, before, max(1, completed if from_step is None else from_step))
        after = before.apply(change)
        views = [_view(project, corpus, run, course, change) for course in (before, after)]
        _print_difference(run, change, completed, *views)
        if dry_run:
            say("nothing is recorded: this was a dry run")
            return
        text = f"{describe(change)}: {reason}"
        identity = append_change(record, run.run_id, change, text, planned=False)
        move_planned(record, run.run_id, after)
        write_changes(project, record, run.run_id)
        record.sign()
    say(f"recorded as {identity}")
    if run.is_target and forecasting.registered(record, run):
        say(
            f"the registered forecast was made for the course before: from update "
            f"{change.from_step} on it is void; register an amended one"
        )
    say("training goes on under the change: portolan train, or portolan run")


def _view(
    project: Project, corpus: Corpus, run: PlannedRun, course: Course, change: Change
) -> dict[str, str]:
    """Everything that depends on the course of a run, by name; also checks that it can be run."""
    settings = run_settings(project.recipe, run, course)
    mixture = run_loader(project, corpus, run, course).order.mixture
    schedule: Schedule = settings.schedule
    updates = course.num_updates
    tokens = updates * course.tokens_per_step
    view = {
        "updates": f"{updates:,}",
        "tokens": f"{tokens:,}",
        "training FLOPs, no head": f"{_flops(run, course):.6g}",
        "rows of an update": course.describe_stages(),
        "mixture phases": course.describe_phases(),
    }
    for index, phase in enumerate(course.phases):
        weights = mixture.weights(index).items()
        view[f"weights of {phase.name}"] = ", ".join(f"{n} {w:.4f}" for n, w in weights)
    for name, epochs in mixture.epochs().items():
        view[f"epochs of {name}"] = f"{epochs:.4f}"
    remaining = run.rung.steps - change.from_step
    shown = [change.from_step + round(share * remaining) for share in (0.0, *SHOWN_RATES)]
    for step in shown:
        rate = schedule.factor(step) * settings.peak.hyperball
        decay = schedule.decay(step, settings.optimizer.gate_router_decay)
        ended = step >= updates
        view[f"rate, decay at update {step}"] = "ended" if ended else f"{rate:.6g}, {decay:.6g}"
    marks = [mark for mark in settings.evaluation_steps() if mark > change.from_step]
    view["next evaluations after"] = ", ".join(map(str, marks[:NUM_SHOWN_MARKS]))
    every = settings.permanent_checkpoint_steps
    saves = [*range(every, updates, every), updates]
    saves = [step for step in saves if step > change.from_step]
    view["next permanent checkpoints after"] = ", ".join(map(str, saves[:NUM_SHOWN_MARKS]))
    factor = (tokens / run.rung.tokens) ** token_exponent(run.rung.law)
    view["peak rate of the law for these tokens, not applied"] = f"x {factor:.4f}"
    return view


def _flops(run: PlannedRun, course: Course) -> float:
    """Training FLOPs without the head, every stage priced at its own length."""
    total = 0.0
    ends = [*(stage.start_step for stage in course.stages[1:]), course.num_updates]
    for stage, end in zip(course.stages, ends, strict=True):
        config = dataclasses.replace(run.rung.config, sequence_length=stage.sequence_length)
        tokens = (end - stage.start_step) * course.tokens_per_step
        total += float(training_flops(config, tokens, "no_head"))
    return total


def _print_difference(
    run: PlannedRun, change: Change, completed: int, before: dict[str, str], after: dict[str, str]
) -> None:
    say(f"{run.run_id} after {completed} updates: {describe(change)}")
    table = Table(title="What changes", title_justify="left")
    for heading in ("quantity", "before", "after"):
        table.add_column(heading, overflow="fold")
    same = 0
    for name in dict.fromkeys([*before, *after]):
        values: Any = before.get(name, "-"), after.get(name, "-")
        if values[0] == values[1]:
            same += 1
        else:
            table.add_row(name, *values)
    console.print(table)
    say(f"{same} other quantities stay as they are")
