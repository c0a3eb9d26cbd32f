"""Changes of a run from the command line: refused, shown, recorded, followed, repeated."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from tests.pipeline.tools import Running, run_command

from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import planned_runs, train
from portolan.project import open_project
from portolan.record.journal import Journal
from portolan.track.tracker import metrics_digest, read_metrics
from portolan.train.checkpoint import CheckpointStore

FLAGS = (
    "--set", "ladder.widths=[48]", "--set", "ladder.seeds={48=1}",
    "--set", "budget.tokens_per_active_param=8", "--set", "mixture.max_epochs=20",
)  # fmt: skip
REASON = ("--reason", "a test")


def change_records(project: Path) -> list[dict]:
    """Bodies of the newest records of all changes."""
    records = [r for r in Journal.open(project / "record").records() if r.type == "change"]
    old = {identity for record in records for identity in record.supersedes}
    return [record.body for record in records if record.id not in old]


def content_of(body: dict) -> dict:
    return json.loads(body["what"].get("config") or body["what"]["data"])


@pytest.fixture
def begun(project, finished, tmp_path) -> tuple[Path, str, int]:
    """A project with a rung that was stopped early: its folder, name and completed updates."""
    run = Running(
        tmp_path / "log", "-C", project, "ladder", *FLAGS, environment=finished.environment
    )

    def has_rows() -> bool:
        tails = (project / "runs").glob("rung-d48-s0-*/metrics.jsonl")
        return any('"completed":5,' in tail.read_text() for tail in tails)

    run.wait_until(has_rows, "first updates")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait() == 130, run.output
    (folder,) = (f for f in (project / "runs").iterdir() if not (f / "finished.json").exists())
    return project, folder.name, CheckpointStore(folder).latest().step


def test_changes_are_refused_shown_recorded_and_followed(begun, finished, cli, tmp_path):
    project, name, completed = begun
    steps = json.loads((project / "runs" / name / "run.json").read_text())["plan"]["steps"]
    change = ("-C", project, "change")
    late = cli(
        *change, "horizon", "--fraction", 0.5, "--from-step", 1, "--run", name, *REASON, *FLAGS
    )
    assert (late.code, f"has completed {completed} updates" in late.err) == (2, True)

    journal = (project / "record" / "journal.jsonl").read_bytes()
    cut = (*change, "horizon", "--fraction", 0.5, "--run", name, *REASON, *FLAGS)
    shown = cli(*cut, "--dry-run")
    assert (shown.code, shown.err) == (0, "")
    half = round(0.5 * steps)
    for text in (f"{steps:,}", f"{half:,}", "rate, decay at update", "epochs of prose", "x 1.2711"):
        assert text in shown.out
    assert (project / "record" / "journal.jsonl").read_bytes() == journal

    assert cli(*cut).code == 0
    weights = ("--weight", "prose=1", "--weight", "tables=3")
    assert cli(*change, "mixture", *weights, "--run", name, *REASON, *FLAGS).code == 0
    wrong = cli(*change, "context", "--sequence-length", 100, "--run", name, *REASON, *FLAGS)
    assert (wrong.code, "batch times length must stay the same" in wrong.err) == (2, True)

    again = shutil.copytree(project, tmp_path / "again")
    for part in ("checkpoints", "metrics", "metrics.jsonl"):
        path = again / "runs" / name / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    outcomes = []
    for root in (project, again):
        done = run_command("-C", root, "ladder", *FLAGS, environment=finished.environment)
        assert (done.code, done.err) == (0, ""), done.out
        outcomes.append(json.loads((root / "runs" / name / "finished.json").read_text()))
    assert outcomes[0]["content_digest"] == outcomes[1]["content_digest"]
    assert [outcome["completed"] for outcome in outcomes] == [half, half]
    assert metrics_digest(project / "runs" / name) == metrics_digest(again / "runs" / name)

    first, second = change_records(project)
    assert (first["planned"], content_of(first)["horizon"]) == (False, half)
    assert content_of(first)["from_step"] == completed
    assert content_of(second)["weights"] == {"prose": "1.0", "tables": "3.0"}
    assert content_of(second)["from_step"] % 4 == 0, "a mixture block is four updates"
    assert all(body["verdict"].startswith("accepted") for body in (first, second))
    mixture = json.loads((project / "runs" / name / "mixture.json").read_text())
    assert [phase["start_step"] for phase in mixture["phases"]] == [
        0,
        content_of(second)["from_step"],
    ]
    assert len(json.loads((project / "runs" / name / "changes.json").read_text())["changes"]) == 2
    assert cli("-C", project, "verify").code == 0
    ended = cli(*cut)
    assert (ended.code, "is finished" in ended.err) == (2, True)


def test_a_change_before_the_start_belongs_into_the_recipe(project, cli):
    flags = ("--set", "budget.tokens_per_active_param=9")
    early = cli("-C", project, "change", "horizon", "--fraction", 0.5, *REASON, *flags)
    assert (early.code, "plan the change in the recipe" in early.err) == (2, True)
    bad = cli("-C", project, "change", "mixture", "--weight", "prose", *REASON)
    assert (bad.code, "'prose' is not a domain and its weight" in bad.err) == (2, True)
    twice = ("--weight", "prose=1", "--file", project / "mixtures" / "a.json")
    for options, message in ((twice, "leave one out"), (("--phase", "end"), "give --file too")):
        wrong = cli("-C", project, "change", "mixture", *options, *REASON)
        assert (wrong.code, message in wrong.err) == (2, True)


@pytest.mark.slow
def test_planned_stages_and_phases_run_from_the_recipe(project, cli):
    """Rows 64 -> 256 and another mixture at 80 %, without a ladder or a forecast."""
    settings = (
        "model.width=48",
        "ladder.widths=[]",
        "ladder.seeds={}",
        "budget.tokens_per_active_param=1",
        "context.stages=[{sequence_length=256, from_fraction=0.5}]",
        "context.evaluate=true",
        'mixture.phases=[{name="end", from_fraction=0.8, weights={prose=1.0}}]',
    )
    opened = open_project(project, settings)
    corpus = find_corpus(opened)
    assert corpus is not None
    run = planned_runs(opened, corpus)[-1]
    assert train(opened, corpus, ProjectRecord(opened), run)
    folder = project / "runs" / run.run_id
    starts = [36, 52]
    assert run.rung.steps > starts[-1] + 10
    table = read_metrics(folder, keys=["eval_dropless/heldout_at_256/macro_loss"])
    assert table["completed"].min() > starts[0]
    bodies = [body for body in change_records(project) if run.run_id in body["text"]]
    assert [content_of(body)["from_step"] for body in bodies] == starts
    assert all(body["planned"] and body["result"] for body in bodies)
    phases = json.loads((folder / "mixture.json").read_text())["phases"]
    assert [phase["start_step"] for phase in phases] == [0, starts[1]]
    flags = [part for setting in settings for part in ("--set", setting)]
    assert cli("-C", project, "verify").code == 0
    shown = cli("-C", project, "show-batch", 60, *flags)
    assert "source=tables" not in shown.out
    assert (
        max(
            int(line.split("tokens=")[1].split()[0].split("-")[1])
            for line in shown.out.splitlines()
        )
        == 256
    )
    sampled = cli("-C", project, "sample", "the ", "a ", "--tokens", 20, *flags)
    assert (sampled.code, sampled.out.count("---"), "2 at a time" in sampled.err) == (0, 1, True)
