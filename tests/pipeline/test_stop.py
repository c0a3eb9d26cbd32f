"""Stopped by the user, by a number that is not finite, by damage, or by another process."""

import json
import shutil
import signal
from pathlib import Path

from tests.pipeline.tools import Running, read_tree, run_command

from portolan.record.journal import Journal
from portolan.track.tracker import metrics_digest
from portolan.train.checkpoint import CheckpointStore
from portolan.train.process import exclusive

SMALLEST_RUNG = ("--set", "ladder.widths=[48]", "--set", "ladder.seeds={48=1}")


def forget_run(project: Path, pattern: str) -> Path:
    """Delete a run, and the record with it, which would miss the run's files."""
    (folder,) = (project / "runs").glob(pattern)
    shutil.rmtree(folder)
    shutil.rmtree(project / "record")
    return folder


def test_interrupted_training_saves_and_goes_on_where_it_stopped(project, finished, tmp_path):
    folder = forget_run(project, "rung-d80-*")
    command = ("-C", project, "ladder")
    run = Running(tmp_path / "log", *command, environment=finished.environment)
    run.wait_until(lambda: f"run={folder.name} step=" in run.output, "first update")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait() == 130
    assert run.output.rstrip().endswith(
        "portolan: interrupted\n  remedy: run the same command again to go on"
    )
    assert "Traceback" not in run.output
    saved = CheckpointStore(folder).latest()
    assert saved is not None
    assert 1 <= saved.step < 52
    records = list(Journal.open(project / "record").records())
    ends = [r.body for r in records if r.type == "attempt" and r.body["run"] == folder.name]
    assert ends[-1]["exit_evidence"] == ["interrupted"]
    again = run_command(*command, environment=finished.environment)
    assert (again.code, again.err) == (0, "")
    whole = finished.root / "runs" / folder.name
    outcome = json.loads((folder / "finished.json").read_text())
    assert outcome["resumed"] is True
    expected = json.loads((whole / "finished.json").read_text())
    assert outcome["content_digest"] == expected["content_digest"]
    assert outcome["evaluation"] == expected["evaluation"]
    assert metrics_digest(folder) == metrics_digest(whole)
    assert run_command("-C", project, "verify").code == 0


def test_interrupted_curation_leaves_nothing_that_is_trusted(project, finished, tmp_path):
    shutil.rmtree(project / "corpus")
    run = Running(tmp_path / "log", "-C", project, "curate")
    run.wait_until(lambda: (project / "corpus" / "documents").exists(), "first stage")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait() == 130
    assert "portolan: interrupted" in run.output
    assert not (project / "corpus" / "summary.json").exists()
    assert run_command("-C", project, "curate").code == 0
    left, right = (read_tree(root / "corpus" / "tokens") for root in (project, finished.root))
    assert left == right


def test_diverged_training_saves_its_last_finite_state(project, finished):
    overrides = (*SMALLEST_RUNG, "--set", "optimizer.rate_multiplier=1e6")
    before = set((project / "runs").iterdir())
    done = run_command("-C", project, "ladder", *overrides, environment=finished.environment)
    assert done.code == 7
    (folder,) = set((project / "runs").iterdir()) - before
    assert f"of {folder.name} is not finite" in done.err
    assert "remedy: lower optimizer.rate_multiplier" in done.err
    assert "Traceback" not in done.err
    saved = CheckpointStore(folder).latest()
    assert saved is not None
    assert f"is saved as step {saved.step}" in done.err
    assert not (folder / "finished.json").exists()
    records = list(Journal.open(project / "record").records())
    texts = [r.body["text"] for r in records if r.type == "event" and r.body["kind"] == "incident"]
    assert any("is not finite" in text for text in texts)
    assert run_command("-C", project, "verify").code == 0


def test_run_whose_every_checkpoint_is_damaged_is_not_started_afresh(project, cli):
    (folder,) = (project / "runs").glob("rung-d48-s0-*")
    (folder / "finished.json").unlink()
    arrays = list(folder.glob("checkpoints/*/step-*/attempt-*/arrays/blocks.attn.wk/0*"))
    assert len(arrays) == len(list(folder.glob("checkpoints/*/step-*")))
    for path in arrays:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    done = cli("-C", project, "ladder", *SMALLEST_RUNG)
    assert done.code == 3
    assert "checkpoints in" in done.err
    assert "validates" in done.err
    assert not (folder / "finished.json").exists()


def test_two_processes_do_not_train_the_same_run(project, cli):
    (folder,) = (project / "runs").glob("rung-d48-s0-*")
    (folder / "finished.json").unlink()
    with exclusive(folder):
        done = cli("-C", project, "ladder", *SMALLEST_RUNG)
    assert done.code == 1
    assert f"another process is training {folder.name}" in done.err


def test_success_mark_lost_by_a_kill_is_made_again_from_the_last_checkpoint(project, cli, finished):
    (folder,) = (project / "runs").glob("rung-d48-s0-*")
    before = json.loads((folder / "finished.json").read_text())
    (folder / "finished.json").unlink()
    shutil.rmtree(project / "record")
    done = run_command("-C", project, "ladder", environment=finished.environment)
    assert (done.code, done.err) == (0, "")
    after = json.loads((folder / "finished.json").read_text())
    # An attempt without an update compiles no program.
    assert after == before | {"resumed": True, "program_bytes": 0}
    assert cli("-C", project, "verify").code == 0
