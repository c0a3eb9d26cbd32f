"""Rungs side by side: the same bits with any number of processes; nothing is lost when one ends."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import Running, run_command

from portolan.pipeline import side_by_side
from portolan.pipeline.corpus import find_corpus
from portolan.pipeline.runs import planned_runs
from portolan.pipeline.side_by_side import PROCESS_BYTES, Job, workers_that_fit
from portolan.processes import THREADS_VARIABLE
from portolan.project import open_project
from portolan.record.journal import Journal
from portolan.track.tracker import metrics_digest
from portolan.train.checkpoint import CheckpointStore

SMALLEST_WIDTH = ("--set", "ladder.widths=[48]")


@pytest.fixture
def untrained(project):
    """A project with its corpus, but without a run."""
    for part in ("runs", "record"):
        shutil.rmtree(project / part)
    return project


def ladder_by_two(project: Path) -> tuple[object, ...]:
    """The command that trains two rungs at once."""
    return ("-C", project, "ladder", "--workers", 2)


def start_two_runs(project: Path, finished: Finished, log: Path) -> Running:
    """The command under way, when both of the longest rungs have made an update."""
    run = Running(log, *ladder_by_two(project), environment=finished.environment)
    started = ("run=rung-d80-s0-", "run=rung-d64-s0-")
    run.wait_until(lambda: all(text in run.output for text in started), "two runs")
    return run


def trainers(run: Running) -> list[psutil.Process]:
    """Processes that a command has started to train; one more only watches over resources."""
    return [
        process
        for process in psutil.Process(run.process.pid).children(recursive=True)
        if "resource_tracker" not in " ".join(process.cmdline())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_number_of_processes_changes_no_bit(untrained, finished, workers):
    command = ("-C", untrained, "ladder", "--workers", workers, *SMALLEST_WIDTH)
    done = run_command(*command, environment=finished.environment)
    assert (done.code, done.err) == (0, "")
    folders = sorted((untrained / "runs").iterdir())
    assert [folder.name[:12] for folder in folders] == ["rung-d48-s0-", "rung-d48-s1-"]
    for folder in folders:
        whole = finished.root / "runs" / folder.name
        found, expected = (json.loads((f / "finished.json").read_text()) for f in (folder, whole))
        assert found["content_digest"] == expected["content_digest"]
        assert metrics_digest(folder) == metrics_digest(whole)
        assert f"{folder.name}: macro loss " in done.out
    attempts = [r for r in Journal.open(untrained / "record").records() if r.type == "attempt"]
    assert {r.body["env"][THREADS_VARIABLE] for r in attempts} == {"1"}
    assert run_command("-C", untrained, "verify").code == 0


@pytest.mark.slow
def test_stopped_by_the_user_all_runs_are_saved(untrained, finished, tmp_path):
    run = start_two_runs(untrained, finished, tmp_path / "log")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait() == 130
    assert "portolan: interrupted" in run.output
    assert "Traceback" not in run.output
    folders = list((untrained / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        saved = CheckpointStore(folder).latest()
        assert saved is not None
        assert saved.step >= 1


@pytest.mark.slow
def test_killed_process_is_named_and_the_other_run_saved(untrained, finished, tmp_path):
    run = start_two_runs(untrained, finished, tmp_path / "log")
    victim, other = trainers(run)
    victim.kill()
    assert run.process.wait() == 1
    assert not other.is_running()
    folders = {folder.name: folder for folder in (untrained / "runs").iterdir()}
    (name,) = [name for name in folders if f"trained {name} was killed by SIGKILL" in run.output]
    assert "use a smaller --workers" in run.output
    (survivor,) = set(folders) - {name}
    assert CheckpointStore(folders[survivor]).latest() is not None
    again = run_command(
        *ladder_by_two(untrained), *SMALLEST_WIDTH, environment=finished.environment
    )
    assert again.code == 0, again.err


def test_workers_that_fit_in_cores_and_memory(finished, monkeypatch):
    project = open_project(finished.root, ())
    corpus = find_corpus(project)
    assert corpus is not None
    jobs = [Job(project, corpus, run) for run in planned_runs(project, corpus)[:-1]]

    def fitting(cores: int, free: float) -> int:
        monkeypatch.setattr(side_by_side, "usable_cores", lambda: cores)
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        return workers_that_fit(jobs)

    assert fitting(8, 1e12) == len(jobs) == 4
    assert fitting(3, 1e12) == 3
    assert fitting(8, 2.5 * PROCESS_BYTES) == 2
    assert fitting(8, 0) == 1


def test_refused_where_a_run_takes_the_machine(untrained, finished):
    command = ("-C", untrained, "ladder", "--mesh", "data=2", "--workers", 2)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = run_command(*command, environment=finished.environment | flags)
    assert done.code == 2
    assert "--workers 2: on an accelerator, a mesh or several hosts" in done.err
    assert "remedy: leave --workers out" in done.err
