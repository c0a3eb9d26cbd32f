"""The final reconciliation: every item due when a project ends, with what is known of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from portolan.canonical import stringify_floats
from portolan.data.mixture import load_mixture
from portolan.files import sha256_file
from portolan.pipeline.course import Stage
from portolan.pipeline.runs import MIXTURE_FILE
from portolan.project import Project
from portolan.record.chain import Record
from portolan.record.lineage import LineageError
from portolan.record.lineage_view import read_lineages
from portolan.record.seal import FinalItem
from portolan.record.seal_body import SealedRun
from portolan.record.times import parse_time

NOT_STATED = "not_stated"


def final_items(
    project: Project,
    records: Sequence[Record],
    runs: Sequence[SealedRun],
    stages: Mapping[str, Sequence[Stage]],
) -> list[FinalItem]:
    """One entry per item; what the project cannot say is `not_stated`, never left out.

    `stages` holds the row lengths of each run that the recipe plans.
    """
    target = next((run for run in reversed(runs) if run.role == "production"), None)
    name = target.name if target else ""
    return [
        _forecast(project, name),
        FinalItem("mixture versions and token exposure", _mixtures(project, name)),
        *_trained(project, records, name),
        FinalItem("checkpoints", _checkpoints(records), "artifact records in force"),
        FinalItem("evaluations", _evaluation(project, name), f"runs/{name}/finished.json"),
        FinalItem("context stages", _context(target, stages.get(name, ()))),
        FinalItem("learning-rate end point", _last_rates(project, name), f"runs/{name}/metrics"),
        FinalItem("post-training recipe, data and licences", NOT_STATED),
        FinalItem("release digest and training checkpoint digest", _release(records, name)),
        FinalItem("causes still unknown", _unknown_causes(records), "event records in force"),
        FinalItem("effective time", _effective_time(project, records, name)),
        FinalItem("energy", NOT_STATED),
        FinalItem("reviews", _reviews(records), "review records in force"),
    ]


def _forecast(project: Project, name: str) -> FinalItem:
    score = project.read("runs", name, "score.json") if name else None
    source = f"runs/{name}/score.json"
    if score is None:
        return FinalItem("forecast against the curve", NOT_STATED, source)
    kept = {
        key: score[key] for key in ("verdict", "final", "num_scored", "num_void") if key in score
    }
    return FinalItem("forecast against the curve", kept, source)


def _mixtures(project: Project, name: str) -> Any:
    """Digest of every mixture, and how often the target reads each cell under its own."""
    found = {path.parent.name: path for path in sorted(project.runs.glob(f"*/{MIXTURE_FILE}"))}
    if not found:
        return NOT_STATED
    epochs = load_mixture(found[name]).epochs() if name in found else NOT_STATED
    digests = {run: sha256_file(path) for run, path in found.items()}
    return stringify_floats({"digests": digests, "epochs of each cell in the target": epochs})


def _trained(project: Project, records: Sequence[Record], name: str) -> Iterator[FinalItem]:
    """Steps and tokens of the canonical curve: each update counted once."""
    steps: Any = NOT_STATED
    try:
        views = [view for view in read_lineages(records) if any(r.name == name for r in view.runs)]
        steps = views[-1].num_rows if views else NOT_STATED
        source = "valid intervals of the attempts"
    except LineageError as error:
        source = error.message
    if steps == NOT_STATED and (outcome := _read(project, name, "finished.json")):
        steps, source = int(outcome["completed"]), f"runs/{name}/finished.json"
    plan = (_read(project, name, "run.json") or {}).get("plan", {})
    each = plan.get("tokens_per_step")
    tokens = steps * each if isinstance(steps, int) and each else NOT_STATED
    yield FinalItem("steps trained", steps, source)
    yield FinalItem("tokens trained", tokens, f"{source}, tokens a step of runs/{name}/run.json")


def _checkpoints(records: Sequence[Record]) -> Any:
    """Name and completeness of each; one without files was pruned after it had been restored."""
    found = {
        record.body.get("name", record.id): (
            record.body["completeness"] if record.body.get("files") else "pruned, never durable"
        )
        for record in records
        if record.type == "artifact" and record.body["kind"] == "checkpoint"
    }
    return found or NOT_STATED


def _evaluation(project: Project, name: str) -> Any:
    outcome = _read(project, name, "finished.json")
    return outcome["evaluation"] if outcome else NOT_STATED


def _context(target: SealedRun | None, stages: Sequence[Stage]) -> Any:
    """Every planned row length, and whether the run came to it."""
    if target is None or not stages or not isinstance(target.completed, int):
        return NOT_STATED
    return [
        {
            "from_step": stage.start_step,
            "sequence_length": stage.sequence_length,
            "done": stage.start_step < target.completed,
        }
        for stage in stages
    ]


def _last_rates(project: Project, name: str) -> Any:
    from portolan.track.tracker import read_metrics

    folder = project.runs / name
    if not name or not (folder / "metrics").is_dir():
        return NOT_STATED
    keys = ("rate/hyperball", "rate/adam")
    rows = read_metrics(folder, keys=keys).iter_rows(named=True)
    last = {row["key"]: {"completed": row["completed"], "value": row["value"]} for row in rows}
    return last or NOT_STATED


def _release(records: Sequence[Record], name: str) -> Any:
    finals = {
        record.body["digests"]["final_state"]
        for record in records
        if record.type == "artifact" and "final_state" in record.body["digests"]
        if record.body.get("name", "").startswith(f"{name} ")
    }
    contents = {
        record.body["digests"].get("content"): record.body.get("name")
        for record in records
        if record.type == "artifact" and record.body["kind"] == "checkpoint"
    }
    found = {digest: contents.get(digest, "no checkpoint record") for digest in sorted(finals)}
    return {"final state": found, "releases": _releases(records)} if found else NOT_STATED


def _releases(records: Sequence[Record]) -> Any:
    found = {
        record.body.get("name", record.id): record.body["digests"]
        for record in records
        if record.type == "artifact" and record.body["kind"] == "release"
    }
    return found or NOT_STATED


def _unknown_causes(records: Sequence[Record]) -> list[str]:
    return [
        record.body["text"]
        for record in records
        if record.type == "event" and record.body.get("cause", {}).get("status") == "unknown"
    ]


def _effective_time(project: Project, records: Sequence[Record], name: str) -> Any:
    """Seconds of training over seconds from the first attempt's start to the last one's end."""
    outcome = _read(project, name, "finished.json")
    own = [r.body for r in records if r.type == "attempt" and r.body["run"] == name]
    ends = [parse_time(body["end"]) for body in own if "end" in body]
    if outcome is None or not ends or outcome.get("resumed"):
        return NOT_STATED
    wall = (max(ends) - min(parse_time(body["start"]) for body in own)).total_seconds()
    seconds = float(outcome["train_seconds"])
    share = seconds / wall if wall > 0 else NOT_STATED
    return {"train_seconds": seconds, "wall_seconds": wall, "share": share}


def _reviews(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {"who": record.body["who"], "independence": record.body["independence"]}
        for record in records
        if record.type == "review"
    ]


def _read(project: Project, name: str, file: str) -> Any:
    return project.read("runs", name, file) if name else None
