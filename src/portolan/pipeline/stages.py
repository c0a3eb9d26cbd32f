"""The stages in order. Each does only what is missing, and says when nothing is."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from portolan.console import say
from portolan.errors import PortolanError
from portolan.pipeline import forecasting
from portolan.pipeline.claims import claim_headline
from portolan.pipeline.corpus import Corpus, find_corpus
from portolan.pipeline.curation import Place, build_corpus
from portolan.pipeline.machine import ONE_PROCESS, Machine
from portolan.pipeline.plan import ladder_share
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import is_finished, planned_runs, record_finished, train
from portolan.pipeline.side_by_side import Job, train_all
from portolan.project import Project

REQUIRES_CORPUS = "run `portolan curate` first"


def run_all(project: Project, *, dry_run: bool) -> None:
    """Every stage in order, then the summary."""
    missing = missing_stages(project)
    if dry_run:
        say(f"would do: {', '.join(missing) or 'nothing'}")
        return
    complete_record(project)
    if not missing:
        say(f"nothing to do: every stage of {project.root} is done")
        summarize(project)
        return
    say(f"to do: {', '.join(missing)}")
    start = time.monotonic()
    for name, stage in STAGES.items():
        if name in missing:
            begin = time.monotonic()
            say(f"stage {name}")
            stage(project)
            say(f"stage {name} done in {time.monotonic() - begin:.1f} s")
    verify(project)
    summarize(project)
    say(f"all stages done in {time.monotonic() - start:.0f} s")


def missing_stages(project: Project) -> list[str]:
    """Names of the stages that have something to do, in order."""
    corpus = find_corpus(project)
    if corpus is None:
        return list(STAGES)
    runs = planned_runs(project, corpus)
    record = ProjectRecord(project)
    registered = forecasting.registered(record, runs[-1]) is not None
    missing = []
    if not all(is_finished(project, run) for run in runs[:-1]):
        missing.append("ladder")
    if not registered:
        missing.append("register")
    if not is_finished(project, runs[-1]):
        missing.append("train")
    scored = project.runs / runs[-1].run_id / "score.json"
    if missing or not scored.is_file():
        missing.append("score")
    if missing or not (project.site / "index.html").is_file():
        missing.append("report")
    return missing


def complete_record(project: Project) -> None:
    """Record what a stage finished just before its process was killed."""
    corpus = find_corpus(project)
    if corpus is None:
        return
    record = ProjectRecord(project)
    for kind, name, paths, text in corpus.artifacts():
        if not record.find("artifact", kind=kind, name=name):
            record.artifact(kind, name, paths, text)
    for run in planned_runs(project, corpus):
        if is_finished(project, run):
            record_finished(project, record, run)
            if run.is_target:
                claim_headline(project, record, run.run_id)
    record.sign()


def curate(project: Project, place: Place | None = None, *, refit: bool = False) -> None:
    """Documents, tokenizer, held-out set and token store."""
    if find_corpus(project) is not None and not refit:
        say("nothing to do: the corpus is curated")
        return
    corpus = build_corpus(project, place, refit=refit)
    complete_record(project)
    for line in corpus.describe():
        say(line)


def train_rungs(
    project: Project, machine: Machine = ONE_PROCESS, num_workers: int | None = None
) -> None:
    """Train every rung that is not finished: one by one, cheapest first, or side by side."""
    machine.join()
    corpus = require_corpus(project)
    record = open_record(project, machine)
    rungs = planned_runs(project, corpus)[:-1]
    for run in rungs:
        if is_finished(project, run):
            record_finished(project, record, run)
    jobs = [Job(project, corpus, run) for run in rungs if not is_finished(project, run)]
    if not jobs:
        say("nothing to do: every rung is finished")
    train_all(jobs, partial(train_rung, machine=machine), record, machine, num_workers)


def train_rung(
    job: Job, record: ProjectRecord, reporter: Any, machine: Machine = ONE_PROCESS
) -> None:
    """Train one rung to its end."""
    train(job.project, job.corpus, record, job.run, machine, reporter)


def forecast(project: Project) -> None:
    """Print the forecast from the finished rungs."""
    forecasting.print_forecast(forecasting.make_forecast(project, require_corpus(project)))


def register(project: Project, *, retrospective: bool = False) -> None:
    """Seal the forecast."""
    corpus = require_corpus(project)
    forecasting.print_forecast(forecasting.make_forecast(project, corpus))
    record = ProjectRecord(project)
    if not forecasting.register_target(project, corpus, record, retrospective=retrospective):
        say("nothing to do: a forecast of this target is registered")
        return
    head = record.journal.head
    say(f"registered; journal head {head.seq} {head.head}")


def train_target(project: Project, machine: Machine = ONE_PROCESS) -> None:
    """Train the target; a forecast must be registered first."""
    machine.join()
    corpus = require_corpus(project)
    record = open_record(project, machine)
    target = planned_runs(project, corpus)[-1]
    if forecasting.registered(record, target) is None and not is_finished(project, target):
        raise PortolanError(
            f"no forecast is registered for {target.run_id}",
            remedy="run `portolan ladder` and `portolan register` first",
        )
    if not train(project, corpus, record, target, machine):
        say("nothing to do: the target is finished")


def open_record(project: Project, machine: Machine) -> ProjectRecord:
    """The record; the first process may have to start or mend the journal before others read."""
    if not machine.is_shared:
        return ProjectRecord(project)
    from portolan.train.crew import Crew

    crew = Crew.of_jax()
    found: list[ProjectRecord] = []

    def open_here() -> None:
        found.append(ProjectRecord(project))

    crew.decide(open_here)
    return found[0] if found else ProjectRecord(project)


def score(project: Project) -> None:
    """Score the registered forecast."""
    corpus = require_corpus(project)
    record = ProjectRecord(project)
    result = forecasting.score_target(project, corpus, record)
    if claim_headline(project, record, planned_runs(project, corpus)[-1].run_id):
        record.sign()
    if result is None:
        say("nothing to do: the score is up to date")
        return
    say(f"verdict: {result['verdict']}")


def report(project: Project) -> None:
    """Build the page and, of a curated corpus, the data map."""
    from portolan.pipeline.mapping import try_pages
    from portolan.pipeline.reconcile import write_reconciliation
    from portolan.pipeline.watching import leave_status
    from portolan.record.verify import verify_project
    from portolan.report.site import build_site

    if ProjectRecord(project).find("run", role="production"):
        write_reconciliation(project)
        leave_status(project)
    try_pages(project)
    say(f"page: {build_site(project.root, verify_project(project.root))}")


def verify(project: Project) -> None:
    """Check the record and every file that it names.

    Raises:
        PortolanError: something differs.
    """
    from portolan.record.verify import verify_project

    result = verify_project(project.root)
    say(f"verify: {result}")
    if result.exit_code:
        raise PortolanError("the record does not verify", remedy="see the lines above")


def require_corpus(project: Project) -> Corpus:
    """The curated corpus of this recipe.

    Raises:
        PortolanError: there is none yet.
    """
    corpus = find_corpus(project)
    if corpus is None:
        raise PortolanError("the corpus is not curated", remedy=REQUIRES_CORPUS)
    return corpus


STAGES: dict[str, Callable[[Project], Any]] = {
    "curate": curate,
    "ladder": train_rungs,
    "register": register,
    "train": train_target,
    "score": score,
    "report": report,
}


def summarize(project: Project) -> None:
    """Forecast, measured value, verdict, cost and the path of the page."""
    corpus = require_corpus(project)
    runs = planned_runs(project, corpus)
    target = runs[-1]
    entry = forecasting.registered(ProjectRecord(project), target)
    assert entry is not None
    final = entry.body["quantiles"][forecasting.HEADLINE]["1.00"]
    say(f"forecast: {_number(final['0.5'])} nats per token ({forecasting.HEADLINE})")
    for level, low, high in ((50, "0.25", "0.75"), (80, "0.1", "0.9"), (95, "0.025", "0.975")):
        say(f"  {level} % interval: {_number(final[low])} to {_number(final[high])}")
    outcome = project.read("runs", target.run_id, "finished.json")
    result = project.read("runs", target.run_id, "score.json")
    measured = outcome["evaluation"][forecasting.HEADLINE]
    say(f"measured: {measured:.4f} nats per token; verdict: {result['verdict']}")
    micro = outcome["evaluation"]["eval_dropless/heldout/micro_loss"]
    unigram = corpus.summary["unigram_cross_entropy"]
    say(
        f"unigram entropy of the held-out text: macro {float(unigram['macro']):.4f}, micro "
        f"{float(unigram['micro']):.4f} nats per token; the model's micro loss: {micro:.4f}"
    )
    share = ladder_share(project.recipe)
    say(
        f"ladder cost: {100 * share['no_head']:.1f} % of the target's FLOPs without head "
        f"({100 * share['with_head']:.1f} % with head)"
    )
    for run in runs:
        done = project.read("runs", run.run_id, "finished.json")
        seconds, tokens = done["train_seconds"], done["completed"] * run.rung.tokens_per_step
        say(f"{run.run_id}: {tokens / seconds:,.0f} tokens/s over {seconds:.0f} s")
    say(f"page: {(project.site / 'index.html').resolve()}")


def _number(text: str) -> str:
    return f"{float(text):.4f}"
