"""Seal a project: restore the end, gather what is due, refuse what is open, sign what remains."""

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from portolan.canonical import digest
from portolan.console import say
from portolan.errors import PortolanError, UsageError
from portolan.files import read_json, sha256_file
from portolan.pipeline.corpus import Corpus, find_corpus
from portolan.pipeline.course import Course, Stage
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import (
    PlannedRun,
    planned_runs,
    reference_tokens,
    run_course,
    run_loader,
)
from portolan.pipeline.sealing_items import final_items
from portolan.pipeline.sealing_licences import licence_table
from portolan.project import Project
from portolan.record.chain import Record
from portolan.record.reach_locators import records_in_force
from portolan.record.seal import SealDraft, SealRefused, seal_refusals, write_seal
from portolan.record.seal_body import OrderDigest, SealedRun
from portolan.record.status import Signals, derive_status
from portolan.record.types import Artifact
from portolan.record.verdicts import Finding
from portolan.record.verify import Report, verify_project

ORDER_BATCHES = 8
"""Batches at each end of a run whose identities enter the order digest."""

CHECKPOINT_LADDER = ("restored", "replay_matched")


def seal_project(project: Project) -> str:
    """Seal the project and return the record's id.

    Raises:
        SealRefused: names everything that is open, missing or unverified.
    """
    record = ProjectRecord(project)
    report = verify_project(project.root)
    problems = [str(problem) for problem in report.problems]
    if report.verdict.exit_code not in (0, 4):
        problems.append(str(report.verdict))
    if not problems:
        restore_final_checkpoints(project, record)
    draft = draft_seal(project, record, report)
    refusals = seal_refusals(record.journal.records(), draft, problems)
    if refusals:
        raise SealRefused(
            "the project cannot be sealed: " + "; ".join(refusals),
            remedy="resolve each of these, or publish a conflict by a correction in the journal",
        )
    return write_seal(record.journal, draft)


def draft_seal(project: Project, record: ProjectRecord, report: Report) -> SealDraft:
    """Gather everything that a seal states; nothing is written."""
    corpus = find_corpus(project)
    planned = {run.run_id: run for run in planned_runs(project, corpus)} if corpus else {}
    records = records_in_force(record.journal.records())
    broken = {problem.record for problem in report.problems}
    runs: list[SealedRun] = []
    stages: dict[str, Sequence[Stage]] = {}
    for entry in records:
        if entry.type == "run":
            orders: tuple[OrderDigest, ...] = ()
            plan = planned.get(entry.body["name"])
            if corpus and plan:
                course = run_course(project, record, plan)
                stages[plan.run_id] = course.stages
                orders = tuple(order_digests(project, corpus, plan, course))
            runs.append(_sealed_run(project, entry, records, broken, orders))
    return SealDraft(
        runs=tuple(runs),
        wheel_digest=_wheel_digest(),
        recipe_digest=project.recipe.digest(),
        licences=licence_table(project.root, records, corpus),
        findings=_findings(project),
        final_items=final_items(project, records, runs, stages),
        data_manifest=data_manifest(project, corpus) if corpus else None,
        evaluations=_evaluations(project, corpus) if corpus else None,
    )


def restore_final_checkpoints(project: Project, record: ProjectRecord) -> None:
    """Read the last checkpoint of each finished production run back into memory, and record that.

    The content digest of what was read must be the recorded one. A checkpoint that was restored
    before is not read again.
    """
    records = records_in_force(record.journal.records())
    for entry in records:
        if entry.type != "run" or entry.body["role"] != "production":
            continue
        outcome = project.read("runs", entry.body["name"], "finished.json")
        found = _checkpoint_of(records, entry.body["name"], outcome)
        if found is None or found.body["completeness"] in CHECKPOINT_LADDER:
            continue
        step = int(outcome["completed"])
        _restore(project.runs / entry.body["name"], step, found.body["digests"]["content"])
        body = Artifact.model_validate({**found.body, "completeness": "restored"})
        record.journal.append("artifact", body, supersedes=[found.id])
        say(f"restored the final checkpoint of {entry.body['name']} (update {step})")


def _restore(folder: Path, step: int, expected: str) -> None:
    from portolan.train.checkpoint import CheckpointStore
    from portolan.train.manifest import content_digest

    store = CheckpointStore(folder)
    try:
        found = store.restore(step=step)
    finally:
        store.close()
    if found is None or content_digest(found[0]) != expected:
        raise PortolanError(
            f"the checkpoint step-{step} of {folder.name} is not the recorded state",
            remedy="restore the run's folder from a copy, then seal again",
        )


def _checkpoint_of(records: Sequence[Record], name: str, outcome: Any) -> Record | None:
    """The artifact record of a run's state after its last update."""
    wanted = f"{name} step-{outcome['completed']}" if outcome else None
    found = [
        record
        for record in records
        if record.type == "artifact"
        and record.body["kind"] == "checkpoint"
        and record.body.get("name") == wanted
        and record.body.get("files")
    ]
    return found[-1] if found else None


def _sealed_run(
    project: Project,
    run: Record,
    records: Sequence[Record],
    broken: set[str],
    orders: tuple[OrderDigest, ...],
) -> SealedRun:
    name = run.body["name"]
    attempts = [r.body for r in records if r.type == "attempt" and r.body["run"] == name]
    last = max(attempts, key=lambda body: body["ordinal"], default={})
    outcome = project.read("runs", name, "finished.json")
    checkpoint = _checkpoint_of(records, name, outcome)
    return SealedRun(
        name=name,
        role=run.body["role"],
        status=_status(project, name, last, outcome, checkpoint, broken, _planned(orders)),
        attempts=len(attempts),
        completed=int(outcome["completed"]) if outcome else "unknown",
        config_digest=last.get("config_digest", "not_stated"),
        data_manifest_digest=last.get("data_manifest_digest", "not_stated"),
        container_digest=last.get("container_digest", "not_stated"),
        lock_digest=last.get("lock_digest", "not_stated"),
        code_commit=last.get("code_commit", "not_stated"),
        final_checkpoint=checkpoint.id if checkpoint else "none",
        orders=orders,
    )


def _status(
    project: Project,
    name: str,
    last: dict[str, Any],
    outcome: Any,
    checkpoint: Record | None,
    broken: set[str],
    planned: int | None,
) -> str:
    """Derived from the success mark, the files, the metrics and the last attempt's own words."""
    if not last:
        return "not_started"
    if "end" not in last:
        return "running"
    if planned is None:
        planned = (project.read("runs", name, "run.json") or {}).get("plan", {}).get("steps")
    said = last.get("exit_evidence", ())
    signals = Signals(
        mark=outcome is not None,
        final_step=bool(outcome) and outcome["completed"] == planned,
        final_checkpoint=checkpoint is not None and checkpoint.id not in broken,
        final_row=_last_completed(project, name) == planned,
        exit_success="finished" in said,
        error=bool(said) and "finished" not in said and "interrupted" not in said,
        cancelled="interrupted" in said,
        ended=True,
    )
    return derive_status(signals).word


def _planned(orders: tuple[OrderDigest, ...]) -> int | None:
    """Updates of the run after all changes of its horizon, if its order is known."""
    return orders[-1].last_step + 1 if orders else None


def _last_completed(project: Project, name: str) -> int | None:
    from portolan.track.tracker import read_metrics

    folder = project.runs / name
    if not (folder / "metrics").is_dir():
        return None
    table = read_metrics(folder, keys=("train/loss",))
    return int(table["completed"].max()) if len(table) else None  # type: ignore[arg-type]


def order_digests(
    project: Project, corpus: Corpus, run: PlannedRun, course: Course
) -> Iterator[OrderDigest]:
    """Identities of the first and last batches of every segment, with what derives all of them.

    A segment begins with the run, another row length or another mixture. No token is read.
    """
    loader = run_loader(project, corpus, run, course)
    end = course.num_updates
    begins = {entry.start_step for entry in (*course.stages, *course.phases)}
    starts = sorted(step for step in {0, *begins} if step < end)
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        first = range(start, min(start + ORDER_BATCHES, stop))
        last = range(max(first.stop, stop - ORDER_BATCHES), stop)
        identity = {
            "batches": [loader.batch_digest(step) for step in (*first, *last)],
            "seed": run.seed,
            "mixture": loader.order.mixture.digest,
            "store": corpus.store_digest,
            "reference_tokens": reference_tokens(project),
        }
        yield OrderDigest(
            first_step=start,
            last_step=stop - 1,
            num_batches=len(first) + len(last),
            seed=run.seed,
            digest=digest(identity),
        )


def data_manifest(project: Project, corpus: Corpus) -> dict[str, Any]:
    """Every token shard with bytes, digest, tokens and licence, and the mixtures of the runs."""
    folder = corpus.path("store")
    manifest = read_json(folder / "manifest.json")
    licences = {source["key"]: source["license_spdx"] for source in corpus.summary["sources"]}
    mixtures = sorted(project.runs.glob("*/mixture.json"))
    return {
        "name": project.recipe.name,
        "digest": corpus.store_digest,
        "tokenizer": corpus.tokenizer_digest,
        "shards": [
            {
                "path": project.relative(folder / shard["name"]),
                "cell": shard["cell"],
                "bytes": shard["bytes"],
                "tokens": shard["tokens"],
                "sha256": shard["sha256"],
                "licence": licences.get(shard["cell"], "NOASSERTION"),
            }
            for shard in manifest["shards"]
        ],
        "mixtures": {path.parent.name: sha256_file(path) for path in mixtures},
    }


def _evaluations(project: Project, corpus: Corpus) -> dict[str, Any]:
    """Configuration of the held-out evaluation, and the final values of every run."""
    held = corpus.summary["heldout"]
    results = {
        path.parent.name: read_json(path)["evaluation"]
        for path in sorted(project.runs.glob("*/finished.json"))
    }
    return {
        "settings": project.recipe.evaluation.model_dump(mode="json"),
        "rows_digest": held["digest"],
        "rows": held["rows"],
        "truncated": held["truncated"],
        "tokenizer": corpus.tokenizer_digest,
        "results": results,
    }


def _findings(project: Project) -> Sequence[Finding]:
    """What the reconciliation says; nothing for a project that claims nothing."""
    from portolan.pipeline.reconcile import reconcile_project

    try:
        return reconcile_project(project).findings
    except UsageError:
        return ()


def _wheel_digest() -> str:
    """SHA-256 of the list of installed files with their digests, as the installer wrote it."""
    try:
        text = metadata.distribution("portolan").read_text("RECORD")
    except metadata.PackageNotFoundError:
        return "unknown"
    return "not_stated" if text is None else digest(sorted(text.splitlines()))
