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
# Up to here the save of step 30 has no marker and the run restarts from step 20.
UNMARKED = PHASES[: PHASES.index("P5") + 1]


def run_cases(cases: list[dict]) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHILD)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    case = {"folder": str(folder), "kind": "permanent", "num_steps": 40, "every": 20}
    return run_cases([case])[0]["digest"]


@pytest.mark.parametrize("kind", ["temporary", "permanent"])
def test_killed_in_any_phase_resumes_from_newest_marked_step(kind, tmp_path, uninterrupted):
    phases = PHASES if kind == "temporary" else [p for p in PHASES if p != "P8:moved"]
    cases = []
    for phase in phases:
        folder = str(tmp_path / phase.replace(":", "-"))
        case = {"folder": folder, "kind": kind, "num_steps": 40, "every": 10}
        cases += [case | {"phase": phase, "at_save": 30}, case]
    results = run_cases(cases)
    for phase, killed, resumed in zip(phases, results[::2], results[1::2], strict=True):
        assert killed["killed"], (phase, killed)
        assert resumed["start"] == (20 if phase in UNMARKED else 30), phase
        assert resumed["digest"] == uninterrupted, phase
        folder = tmp_path / phase.replace(":", "-")
        assert [p.name for p in (folder / "checkpoints/staging").iterdir()] == ["lock"], phase
        kept = [saved.step for saved in CheckpointStore(folder).list_saved()]
        assert kept == ([40, 30] if kind == "temporary" else [40, 30, 20, 10]), phase


def test_first_save_killed_before_its_marker_starts_again(tmp_path, uninterrupted):
    case = {"folder": str(tmp_path), "kind": "permanent", "num_steps": 40, "every": 10}
    killed, resumed = run_cases([case | {"phase": "P5", "at_save": 10}, case])
    assert killed["killed"]
    assert resumed["start"] == 0
    assert resumed["digest"] == uninterrupted


def test_prune_killed_and_repeated_keeps_the_kept_set(tmp_path):
    case = {"folder": str(tmp_path), "kind": "temporary", "num_steps": 40, "every": 10}
    results = run_cases(
        [
            case | {"phase": "P8:moved", "at_save": 30},
            case | {"phase": "P8:moved", "at_save": 40},
            case,
        ]
    )
    assert [result["killed"] for result in results] == [True, True, False]
    assert [saved.step for saved in CheckpointStore(tmp_path).list_saved()] == [40, 30]


def test_redone_work_is_the_distance_to_the_last_save(tmp_path):
    case = {"folder": str(tmp_path), "kind": "permanent", "num_steps": 300, "every": 25}
    kills = [60, 145, 240]
    results = run_cases([*(case | {"kill_at": step} for step in kills), case])
    starts = [result.get("start") for result in results]
    redone = []
    for kill_at, following in zip(kills, range(1, 4), strict=True):
        store = CheckpointStore(tmp_path)
        newest = max(s.step for s in store.list_saved() if s.step <= kill_at)
        redone.append(kill_at - newest)
        assert results[following - 1]["killed"]
    assert redone == [10, 20, 15]
    assert starts[-1] == 225
    whole = run_cases([case | {"folder": str(tmp_path / "whole"), "every": 150}])
    assert results[-1]["digest"] == whole[0]["digest"]


def test_full_disk_fails_the_save_and_training_goes_on(tmp_path, uninterrupted):
    case = {"folder": str(tmp_path), "kind": "permanent", "num_steps": 40, "every": 10}
    (result,) = run_cases([case | {"full_at": 20}])
    assert (result["failures"], result["digest"]) == (1, uninterrupted)
    assert [saved.step for saved in CheckpointStore(tmp_path).list_saved()] == [40, 30, 10]


def test_second_process_may_not_save_to_the_same_run(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"w": [1.0]}, 1)
    code = (
        "import sys; from portolan.train.checkpoint import CheckpointStore as S;"
        "S(sys.argv[1]).save({'w': [2.0]}, 2)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "is already saving checkpoints" in refused.stderr
    store.close()
    subprocess.run(command, check=True, capture_output=True)
    assert CheckpointStore(tmp_path).latest().step == 2
