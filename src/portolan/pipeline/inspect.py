"""Looking at what exists: evaluate, sample, the documents of a step, verify."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.console import errors, say
from portolan.errors import PortolanError, UsageError
from portolan.pipeline.change_records import run_course
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import (
    PlannedRun,
    build_evaluators,
    planned_runs,
    run_settings,
)
from portolan.pipeline.stages import require_corpus
from portolan.project import Project


def find_run(project: Project, corpus: Corpus, run_id: str) -> PlannedRun:
    """A planned run by its id or the start of it; the target when `run_id` is empty."""
    runs = planned_runs(project, corpus)
    if not run_id:
        return runs[-1]
    found = [run for run in runs if run.run_id.startswith(run_id)]
    if len(found) != 1:
        names = ", ".join(run.run_id for run in runs)
        raise UsageError(f"{run_id!r} names {len(found)} runs", remedy=f"use one of {names}")
    return found[0]


@dataclass(frozen=True)
class Restored:
    """A run's newest valid checkpoint; `settings` are those of its last update."""

    params: Any
    beta: Any
    completed: int
    settings: Any


def restored_state(project: Project, run: PlannedRun) -> Restored:
    """The newest checkpoint of a run that validates."""
    from portolan.train.checkpoint import CheckpointStore
    from portolan.train.programs import keep_programs
    from portolan.train.state import group_table, initial_state, restore_state

    keep_programs()
    folder = project.runs / run.run_id
    if not folder.is_dir():
        raise UsageError(f"{run.run_id} has not started", remedy="run `portolan run` first")
    settings = run_settings(project.recipe, run, run_course(project, ProjectRecord(project), run))
    found = CheckpointStore(folder).restore()
    if found is None:
        raise PortolanError(f"{run.run_id} has no checkpoint yet", remedy="wait for its first save")
    arrays, metadata = found
    state = restore_state(initial_state(settings, group_table(settings)), arrays)
    completed = int(metadata["completed"])
    return Restored(state.params, state.beta, completed, settings.at(completed - 1))


def evaluate(project: Project, run_id: str) -> None:
    """Print every held-out metric of a run's newest checkpoint, in the packing of its start."""
    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    found = restored_state(project, run)
    pinned, _ = build_evaluators(project, corpus, found.settings)
    say(f"{run.run_id} after {found.completed} updates")
    for name, value in sorted(pinned(found.params, found.beta).items()):
        say(f"{name} {value:.6f}")


def sample(
    project: Project,
    run_id: str,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> None:
    """Print every prompt with its continuation, apart by a line of dashes."""
    from portolan.model.generate import sample as generate
    from portolan.train.state import resolve_compute_dtype

    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    found = restored_state(project, run)
    tokenizer = corpus.tokenizer()
    policy = tokenizer.policy
    bos_id = tokenizer.bos_id if policy.bos == "document" else None
    start = [] if bos_id is None else [bos_id]
    written = generate(
        found.params,
        found.beta,
        found.settings.config,
        [[*start, *tokenizer.encode(prompt)] for prompt in prompts],
        num_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        bos_id=bos_id,
        eos_id=tokenizer.eos_id if policy.eos == "document" else None,
        compute_dtype=resolve_compute_dtype(project.recipe.train.compute_dtype),
    )
    note = (
        f"{run.run_id} after {found.completed} updates, seed {seed}: "
        f"{written.tokens_per_second:,.0f} tokens/s, {len(prompts)} at a time, "
        f"{written.memory_bytes / 1e6:.2f} MB of memory"
    )
    errors.print(note, markup=False)
    for number, (prompt, text) in enumerate(zip(prompts, written.texts, strict=True)):
        if number:
            say("---")
        say(prompt + tokenizer.decode(text.tolist()))


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", remedy="name a UTF-8 text file") from error
    return [line for line in lines if line.strip()]
