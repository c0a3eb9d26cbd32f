"""One run on many meshes: the same losses, parameters and kept rows, wherever the rows lie."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from portolan.optim.norms import NORM_DRIFT_LIMIT

TOLERANCE = 1e-5
"""Relative, of the loss of an update (parallel.md 11.9)."""
MERGED_TOLERANCE = 1e-4
"""The same where the router's quantiles come from histograms of micro-batches."""
DATA_EXPERT_CONTEXT = {"data": 2, "expert": 2, "context": 2}
REPLICA_EXPERT_MODEL = {"replica": 2, "expert": 2, "model": 2}
MESHES = [{"data": 2}, {"expert": 4}, {"data": 2, "expert": 4}, {"context": 2}, {"replica": 4}]
WATERFILL = {"gate": "waterfill", "capacity_factor": "0.8"}


def run_cases(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mesh_child.py")), folder / "cases.json"],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(one: dict[str, Any], many: dict[str, Any], difference: float = 1e-5) -> None:
    assert many["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert many["gradient"] == pytest.approx(one["gradient"], rel=1e-4)
    assert many["difference"] < difference
    assert many["drift"] < NORM_DRIFT_LIMIT
    assert many["placed"]
    assert many["differing"] == []


@pytest.mark.slow
def test_all_axes_at_once(tmp_path):
    meshes = [{}, DATA_EXPERT_CONTEXT, REPLICA_EXPERT_MODEL]
    one, *others = run_cases(tmp_path, [{"mesh": mesh, "steps": 3} for mesh in meshes])
    assert one["loss"][-1] != one["loss"][0]
    for many in others:
        compare(one, many)


@pytest.mark.slow
def test_every_mesh(tmp_path):
    one, *others = run_cases(tmp_path, [{"mesh": mesh, "steps": 5} for mesh in [{}, *MESHES]])
    for many, mesh in zip(others, MESHES, strict=True):
        compare(one, many)
        assert many["flipped"] == ["blocks/moe/router"], mesh


@pytest.mark.slow
def test_fewer_devices_work_a_batch_off_in_parts(tmp_path):
    """The same first update; then beta, read from merged histograms, differs by up to two bins."""
    parts = [{"mesh": {"expert": 4}, "micro_batches": 2}, {"mesh": {}, "micro_batches": 4}]
    one, *others = run_cases(
        tmp_path, [{"mesh": {}, "steps": 4}, *({**p, "steps": 4} for p in parts)]
    )
    for many in others:
        assert many["loss"][0] == pytest.approx(one["loss"][0], rel=1e-6)
        assert many["gradient"][0] == pytest.approx(one["gradient"][0], rel=1e-5)
        assert many["loss"] == pytest.approx(one["loss"], rel=MERGED_TOLERANCE)
        assert many["placed"]


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(tmp_path):
    cases = [
        {"mesh": {}, "steps": 6},
        {"mesh": {"data": 2, "expert": 4}, "steps": 2},
        {"mesh": {"expert": 8}, "first": 2, "steps": 2},
        {"mesh": {"expert": 4}, "micro_batches": 2, "first": 4, "steps": 2},
    ]
    one, *parts = run_cases(tmp_path, cases)
    assert all(part["restored_exactly"] for part in parts)
    losses = [loss for part in parts for loss in part["loss"]]
    assert losses[:-1] == pytest.approx(one["loss"][:-1], rel=TOLERANCE)
    assert losses[-1] == pytest.approx(one["loss"][-1], rel=MERGED_TOLERANCE)


@pytest.mark.slow
def test_waterfill_drops_the_same_rows_on_every_expert_axis(tmp_path):
    """Each mesh holds the same tokens in an expert group, the condition of parallel.md 5.3."""
    cases = [{"mesh": {"expert": size}, "settings": WATERFILL, "steps": 3} for size in (1, 2, 4, 8)]
    one, *others = run_cases(tmp_path, cases)
    assert min(one["dropped"]) > 0
    for many in others:
        assert many["dropped"] == one["dropped"]
        compare(one, many)
