"""`portolan watch`, `delay`, `forecast amend` and `forecast ledger` on one trained project."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from tests.pipeline.tools import Cli

from portolan.canonical import canonical
from portolan.health.status import EXIT_CODES
from portolan.pipeline import forecasting
from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.forecasting import HEADLINE
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import evaluations, planned_runs
from portolan.project import open_project
from portolan.record.journal import Journal
from portolan.record.schema import StepPoint
from portolan.record.types import Change, Changed, Expected
from portolan.track.tracker import Tracker, read_metrics

CODES = {word.replace(" ", "_"): code for word, code in EXIT_CODES.items()}


def target_of(project: Path) -> Path:
    return next((project / "runs").glob("target-*"))


def watch(cli: Cli, project: Path) -> dict:
    done = cli("-C", project, "watch", "--json")
    content = json.loads(done.out)
    assert done.code == content["exit_code"], done.err
    return content


def stop_at(project: Path, completed: int) -> int:
    """Make the target a run that was killed after `completed` updates; returns its plan."""
    folder = target_of(project)
    steps = json.loads((folder / "run.json").read_text())["plan"]["steps"]
    frame = read_metrics(folder).sort("row")
    for path in (folder / "metrics").glob("segment-*"):
        path.unlink()
    for name in ("finished.json", "score.json", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    with Tracker(folder, 1, 0) as tracker:
        for row, part in frame.filter(frame["completed"] <= completed).group_by(
            "row", maintain_order=True
        ):
            tracker.log(int(row[0]), dict(zip(part["key"], part["value"], strict=True)))  # type: ignore[call-overload]
    note = {"ordinal": 1, "start": 0, "end": None, "restored_from": "fresh"}
    (folder / "attempt-1.json").write_text(json.dumps(note))
    forget_after_start(project, folder.name)
    return steps


def forget_after_start(project: Path, run: str) -> None:
    """Cut the journal after the start of the target's attempt, as a kill would leave it."""
    path = project / "record" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        item = json.loads(line)
        if item["type"] == "attempt" and item["body"]["run"] == run:
            path.write_bytes(b"".join(lines[: place + 1]))
            for head in (project / "record" / "heads").glob("*"):
                if int(head.name.split("-")[0].split(".")[0]) > item["seq"]:
                    head.unlink()
            return
    raise AssertionError("the target has no attempt")


def change(project: Path, kind: str, step: int, **content: object) -> str:
    """Record an unplanned change of the target."""
    journal = Journal.open(project / "record")
    run = next(
        r.id
        for r in journal.records()
        if r.type == "run" and r.body["name"] == target_of(project).name
    )
    body = Change(
        text="a change",
        refs=(run,),
        planned=False,
        what=Changed(config=canonical({"kind": kind, "from_step": step} | content).decode()),
        from_step=StepPoint(clock="completed", n=step),
        expected=Expected(metric="loss", direction="none", size="0", tolerance="0.1"),
        not_exercised=("retry",),
        gate="none",
        control_window="none",
    )
    return journal.append("change", body)


def test_a_finished_run(cli: Cli, project: Path):
    content = watch(cli, project)
    assert content["state"] == "finished" and content["verdict"] in EXIT_CODES
    assert len(content["checklist"]) == 12 and len(content["evaluations"]) == 20
    words = {item["item"]: item["verdict"] for item in content["checklist"]}
    assert {words[n] for n in (2, 4, 10, 11)} == {"pass"}
    assert "H24" in content["rules_not_measured"]
    assert not [a for a in content["alarms"] if a["active"] and a["severity"] == "page"]
    assert json.loads((target_of(project) / "status.json").read_text()) == content
    shown = cli("-C", project, "watch")
    assert shown.code == content["exit_code"] and content["verdict"] in shown.out
    followed = cli("-C", project, "watch", "--follow")
    fields = dict(part.split("=", 1) for part in followed.out.split() if "=" in part)
    assert followed.code == CODES[fields["verdict"]] == content["exit_code"]
    assert followed.out.count("\n") == 1 and fields["state"] == "finished"


def test_a_killed_and_a_running_one(cli: Cli, project: Path):
    steps = stop_at(project, 60)
    killed = watch(cli, project)
    assert killed["state"] == "stopped" and killed["verdict"] == "off course"
    assert any("H01" in reason["text"] for reason in killed["reasons"])
    assert killed["completed"] == 60 < steps
    descriptor = os.open(target_of(project) / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    running = watch(cli, project)
    os.close(descriptor)
    assert running["state"] == "training"
    assert not any("H01" in reason["text"] for reason in running["reasons"])


def test_before_anything_is_trained(cli: Cli, project: Path, tmp_path: Path):
    content = cli("-C", project, "watch", "--json", "--set", "seed=5")
    assert content.code == EXIT_CODES["no verdict"]
    assert json.loads(content.out)["state"] == "not started"
    empty = cli("init", tmp_path / "empty")
    assert empty.code == 0
    refused = cli("-C", tmp_path / "empty", "watch")
    assert refused.code == 2 and "nothing to watch" in refused.err


def test_a_change_voids_and_an_amendment_goes_on(cli: Cli, project: Path):
    stop_at(project, 60)
    step = 50
    identity = change(project, "mixture", step, name="late", weights={"prose": "1"})
    content = watch(cli, project)
    gates = {e["completed"]: e for e in content["evaluations"]}
    assert all(("residual" in e) == (n <= step) for n, e in gates.items())
    late = [e for n, e in gates.items() if n > step]
    assert late and all(e["status"] == "void" for e in late)
    assert "void from step 50" in content["forecast"] and identity in content["forecast"]
    shown = cli("-C", project, "watch")
    assert "void" in shown.out
    amended = cli("-C", project, "forecast", "amend", "--shift", "0.02,0.05")
    assert amended.code == 0, amended.err
    ledger = json.loads(cli("-C", project, "forecast", "ledger", "--json").out)
    first, second = ledger["forecasts"]
    assert first["status"].startswith("void from step 50") and second["status"] == "in force"
    assert first["score"]["num_scored"] == len([n for n in gates if n <= step])
    assert second["changes"] == [identity] and set(ledger["baselines"]) == {"B0", "B1", "B2"}
    verified = cli("-C", project, "verify")
    assert "broken" not in verified.out
    after = watch(cli, project)
    assert "1 earlier" in after["forecast"]


@pytest.mark.parametrize("as_json", [False, True])
def test_delay(cli: Cli, project: Path, as_json: bool):
    before = (project / "record" / "journal.jsonl").read_bytes()
    done = cli("-C", project, "delay", "--horizon", "0.8", "--from-step", 40, *["--json"] * as_json)
    assert done.code == 0, done.err
    if as_json:
        content = json.loads(done.out)
        assert content["horizon"] == "0.8" and float(content["loss_cost"]) > 0
    else:
        assert "nothing was changed" in done.out and "epochs of" in done.out
    assert (project / "record" / "journal.jsonl").read_bytes() == before
    refused = cli("-C", project, "delay", "--horizon", "1.2", "--from-step", 40)
    assert refused.code == 2 and "remedy" in refused.err


def test_a_shorter_horizon_is_attached(cli: Cli, project: Path):
    steps = stop_at(project, 45)
    change(project, "horizon", 40, horizon=round(0.8 * steps))
    assert cli("-C", project, "forecast", "amend").code == 0
    ledger = json.loads(cli("-C", project, "forecast", "ledger", "--json").out)
    name = ledger["forecasts"][1]["forecast"].partition(":")[2][:16]
    body = json.loads((project / "forecasts" / f"{name}.json").read_text())
    assert body["method"]["delay"]["steps"] == round(0.8 * steps) == body["target"]["steps"]
    assert "(steps)" in ledger["forecasts"][0]["status"]


def test_after_a_change_of_the_horizon_marks_and_conditions_are_its_own(project: Path):
    steps = stop_at(project, 45)
    horizon = round(0.8 * steps)
    change(project, "horizon", 40, horizon=horizon)
    opened = open_project(project)
    corpus = find_corpus(opened)
    assert corpus is not None
    target = planned_runs(opened, corpus)[-1]
    completed = evaluations(opened, target.run_id)[HEADLINE]
    near = {
        mark
        for mark in range(1, 21)
        for n in completed
        if abs(n / horizon - mark / 20) <= 0.01 or n == max(1, round(mark * horizon / 20))
    }
    record = ProjectRecord(opened)
    forecasting.score_target(opened, corpus, record)
    checks = [r for r in record.journal.records() if r.type == "check"]
    assert f"scored against {len(near)} evaluations" in checks[-1].body["text"]
    body = forecasting._forecast_body(opened, corpus, target, horizon, [])
    conditions = {item["field"]: item["value"] for item in body["conditions"]}
    assert body["target"]["steps"] == conditions["steps"] == horizon
    assert body["target"]["tokens"] == horizon * target.rung.tokens_per_step


def test_a_recorded_incident_is_replayed(cli: Cli, tmp_path: Path):
    assert cli("init", tmp_path / "project").code == 0
    signals = [{"time": t, "name": "coordinator/live", "value": 1 + (t > 60)} for t in (0, 60, 120)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(signal) + "\n" for signal in signals))
    done = cli("-C", tmp_path / "project", "watch", "--trace", path)
    assert done.code == EXIT_CODES["off course"] and "page H26" in done.out
    as_json = cli("-C", tmp_path / "project", "watch", "--trace", path, "--json")
    assert [alarm["rule"] for alarm in json.loads(as_json.out)["alarms"]] == ["H26"]
    missing = cli("-C", tmp_path / "project", "watch", "--trace", tmp_path / "none")
    assert missing.code == 2 and "no trace" in missing.err
