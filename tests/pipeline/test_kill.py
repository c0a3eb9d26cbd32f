"""Killed at five random moments and started again, a project ends with the same bytes."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.pipeline.conftest import Finished
from tests.pipeline.tools import Running, run_command

from portolan.files import sha256_file
from portolan.track.tracker import metrics_digest


def holds(project: Path, pattern: str, min_bytes: int = 0) -> bool:
    """Whether a file or folder of this name is there, with at least so many bytes."""
    return any(path.stat().st_size >= min_bytes for path in project.glob(pattern))


# What must be there before the clock of a kill starts, and the longest random delay in seconds.
MOMENTS: dict[str, tuple[Callable[[Path], bool], float]] = {
    "curation starts": (lambda p: holds(p, "corpus/documents"), 0.5),
    "documents are curated": (lambda p: holds(p, "corpus/documents/train_*/manifest.json"), 0.5),
    "first rungs": (lambda p: holds(p, "runs/rung-d80-*/metrics.jsonl", 1), 0.5),
    "last rung": (lambda p: holds(p, "runs/rung-d48-s1-*/metrics.jsonl", 1), 0.2),
    "target": (lambda p: holds(p, "runs/target-*/metrics.jsonl", 1), 0.8),
}


def kill_at(project: Path, moment: str, rng: random.Random, environment: dict) -> str:
    """Start the command, SIGKILL it at the moment, return what it had printed."""
    is_ready, max_delay = MOMENTS[moment]
    run = Running(project.parent / "log", "-C", project, "run", environment=environment)
    run.wait_until(lambda: is_ready(project), moment)
    time.sleep(rng.uniform(0, max_delay))
    workers = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    assert run.process.wait() == -9, f"ended before {moment!r}:\n{run.output}"
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, f"left running after {moment!r}: {alive}"
    return run.output


def final_bytes(project: Path) -> dict[str, str]:
    """Digests of tokens, tokenizer, metrics but for times, and final states."""
    summary = json.loads((project / "corpus" / "summary.json").read_text())
    found = {part: summary[part]["digest"] for part in ("store", "heldout", "tokenizer")}
    for folder in (project / "runs").iterdir():
        found[f"{folder.name} metrics"] = metrics_digest(folder)
        outcome = json.loads((folder / "finished.json").read_text())
        found[f"{folder.name} state"] = outcome["content_digest"]
    return found


def shards(project: Path) -> dict[str, str]:
    """Digests of token shards and of all that stands beside the tokenizer, by path."""
    paths = [*project.glob("corpus/*tokens/**/*.arrow"), *project.glob("corpus/tokenizer/*")]
    return {path.relative_to(project).as_posix(): sha256_file(path) for path in paths}


@pytest.mark.slow
def test_five_kills_change_no_byte_of_the_result(finished: Finished, tmp_path: Path):
    project = tmp_path / "project"
    assert run_command("init", project, "--recipe", finished.recipe).code == 0
    rng = random.Random(20260)
    for moment in MOMENTS:
        kill_at(project, moment, rng, finished.environment)
    last = run_command("-C", project, "run", environment=finished.environment)
    assert (last.code, last.err) == (0, ""), last.out
    assert "verify: ok(" in last.out
    assert shards(project) == shards(finished.root)
    assert final_bytes(project) == final_bytes(finished.root)
    attempts = [len(list(folder.glob("attempt-*.json"))) for folder in project.glob("runs/*")]
    assert sum(attempts) >= len(attempts) + 3
    assert run_command("-C", project, "run").out.startswith("nothing to do")
