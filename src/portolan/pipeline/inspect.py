"""Looking at what exists: evaluate, sample, the documents of a step, verify."""

from pathlib import Path
from typing import Any

from portolan.console import errors, say
from portolan.errors import PortolanError, UsageError
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.runs import PlannedRun, planned_runs, reference_tokens, run_settings
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


def restored_state(project: Project, run: PlannedRun) -> tuple[Any, Any, int]:
    """Parameters, router state and completed updates of a run's newest valid checkpoint."""
    from portolan.train.checkpoint import CheckpointStore
    from portolan.train.state import group_table, initial_state, restore_state

    folder = project.runs / run.run_id
    if not folder.is_dir():
        raise UsageError(f"{run.run_id} has not started", remedy="run `portolan run` first")
    settings = run_settings(project, run)
    found = CheckpointStore(folder).restore()
    if found is None:
        raise PortolanError(f"{run.run_id} has no checkpoint yet", remedy="wait for its first save")
    arrays, metadata = found
    state = restore_state(initial_state(settings, group_table(settings)), arrays)
    return state.params, state.beta, int(metadata["completed"])


def evaluate(project: Project, run_id: str) -> None:
    """Print every held-out metric of a run's newest checkpoint."""
    from portolan.evals.perplexity import HeldOutEvaluator
    from portolan.train.state import resolve_compute_dtype

    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    params, beta, completed = restored_state(project, run)
    evaluator = HeldOutEvaluator(
        corpus.evaluation_set,
        run.rung.config,
        batch_sequences=project.recipe.evaluation.batch_sequences,
        compute_dtype=resolve_compute_dtype(project.recipe.train.compute_dtype),
    )
    say(f"{run.run_id} after {completed} updates")
    for name, value in sorted(evaluator(params, beta).items()):
        say(f"{name} {value:.6f}")


def sample(
    project: Project,
    run_id: str,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> None:
    """Print the prompt and its continuation."""
    from portolan.model.generate import sample as generate

    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    params, beta, completed = restored_state(project, run)
    tokenizer = corpus.tokenizer()
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    written = generate(
        params,
        beta,
        run.rung.config,
        [*start, *tokenizer.encode(prompt)],
        num_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    errors.print(f"{run.run_id} after {completed} updates, seed {seed}", markup=False)
    say(prompt + tokenizer.decode([int(token) for token in written]))


def show_batch(project: Project, run_id: str, step: int) -> None:
    """Print source, id and epoch of the documents in each row of a step."""
    corpus = require_corpus(project)
    run = find_run(project, corpus, run_id)
    if step >= run.rung.steps:
        raise UsageError(
            f"step {step} is outside {run.run_id}", remedy=f"use 0 to {run.rung.steps - 1}"
        )
    loader = corpus.loader(run.rung, run.seed, reference_tokens(project))
    for row in loader.show_batch(step):
        for document in row.documents:
            say(
                f"row={row.row} tokens={document.start}-{document.stop} "
                f"source={document.source} id={document.document_id} epoch={document.epoch}"
            )


def verify(root: Path, head: Path | None, *, limits: bool) -> int:
    """Print the verdict on journal and files; returns the exit code."""
    from portolan.record.signing import load_head
    from portolan.record.verify import LIMITS, verify_project

    if limits:
        say(LIMITS)
        return 0
    if not (root / "record" / "journal.jsonl").is_file():
        raise UsageError(
            f"{root} has no record", remedy="name a project folder with -C DIR, and run it first"
        )
    known = None
    if head is not None:
        known = load_head(head) if head.is_file() else None
        if known is None:
            raise UsageError(f"head {head} does not exist", remedy="name a .dsse.json file")
    result = verify_project(root, known)
    say(str(result))
    return result.exit_code
