"""A run killed at any moment of a save ends with the same bytes as one that was not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from portolan.train.checkpoint import CheckpointStore

CHILD = Path(__file__).with_name("checkpoint_child.py")
PHASES = [
    "P1",
    "P2",
    "P2:during",
    "P2:written",
    "P3",
    "P4",
    "P4:linking",
    "P4:during",
    "P5",
    "P5:marked",
    "P6",
    "P7",
    "P8",
    "P8:moved",
]
# Up to here a save has no marker and the run goes on from the one before.
UNMARKED = PHASES[: PHASES.index("P5") + 1]


@pytest.fixture(scope="module")
def run():
    """Runs a case in a process of its own, which may be killed."""
    command = [sys.executable, "-W", "ignore", str(CHILD)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run_case(folder: Path, kind: str, num_steps: int, every: int = 10, **faults) -> dict:
            case = {"folder": str(folder), "kind": kind, "num_steps": num_steps, "every": every}
            process.stdin.write(json.dumps(case | faults) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run_case
        process.stdin.close()


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory) -> dict[int, str]:
    """Digest of the final state by number of steps."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        num_steps: run(folder / str(num_steps), "permanent", num_steps, num_steps)["digest"]
        for num_steps in (30, 40, 300)
    }


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_permanent_save_killed(phase, run, tmp_path, uninterrupted):
    assert run(tmp_path, "permanent", 30, phase=phase, at_save=20)["killed"]
    resumed = run(tmp_path, "permanent", 30)
    assert resumed["start"] == (10 if phase in UNMARKED else 20)
    assert resumed["digest"] == uninterrupted[30]
    assert [path.name for path in (tmp_path / "checkpoints/staging").iterdir()] == ["lock"]
    assert [saved.step for saved in CheckpointStore(tmp_path).list_saved()] == [30, 20, 10]


@pytest.mark.parametrize("phase", ["P4:during", "P5", "P8", "P8:moved"])
def test_temporary_save_or_prune_killed(phase, run, tmp_path, uninterrupted):
    assert run(tmp_path, "temporary", 40, phase=phase, at_save=30)["killed"]
    resumed = run(tmp_path, "temporary", 40)
    assert resumed["start"] == (20 if phase in UNMARKED else 30)
    assert resumed["digest"] == uninterrupted[40]
    assert [path.name for path in (tmp_path / "checkpoints/staging").iterdir()] == ["lock"]
    assert [saved.step for saved in CheckpointStore(tmp_path).list_saved()] == [40, 30]


def test_prune_killed_again_and_again_keeps_the_kept_set(run, tmp_path):
    for at_save in (30, 40):
        killed = run(tmp_path, "temporary", 40, phase="P8:moved", at_save=at_save)
        assert killed["killed"]
        newest = [saved.step for saved in CheckpointStore(tmp_path).list_saved()]
        assert newest == [at_save, at_save - 10]


def test_first_save_killed_before_its_marker_starts_again(run, tmp_path, uninterrupted):
    assert run(tmp_path, "permanent", 30, phase="P5", at_save=10)["killed"]
    resumed = run(tmp_path, "permanent", 30)
    assert (resumed["start"], resumed["digest"]) == (0, uninterrupted[30])


def test_redone_work_is_the_distance_to_the_last_save(run, tmp_path, uninterrupted):
    redone = []
    for kill_at in (60, 145, 240):
        assert run(tmp_path, "permanent", 300, 25, kill_at=kill_at)["killed"]
        redone.append(kill_at - CheckpointStore(tmp_path).latest().step)
    resumed = run(tmp_path, "permanent", 300, 25)
    assert redone == [10, 20, 15]
    assert (resumed["start"], resumed["digest"]) == (225, uninterrupted[300])


def test_full_disk_fails_the_save_and_training_goes_on(run, tmp_path, uninterrupted):
    result = run(tmp_path, "permanent", 30, full_at=20)
    assert (result["failures"], result["digest"]) == (1, uninterrupted[30])
    assert [saved.step for saved in CheckpointStore(tmp_path).list_saved()] == [30, 10]


def test_second_process_may_not_save_to_the_same_run(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"w": [1.0]}, 1)
    code = (
        "import sys, pathlib; from portolan.train.staging import acquire_writer_lock as lock;"
        "lock(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints/staging")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "is already saving checkpoints" in refused.stderr
    store.close()
    subprocess.run(command, check=True, capture_output=True)
