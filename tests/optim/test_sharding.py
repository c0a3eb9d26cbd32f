"""One update on a mesh of eight host devices equals one device, and a wrong norm is caught."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portolan.optim.norms import NORM_DRIFT_LIMIT


@pytest.fixture(scope="module")
def report() -> dict:
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sharded_update.py"))],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("scope", ["joint", "per_expert"])
def test_eight_devices_equal_one(report: dict, scope: str) -> None:
    assert report[scope]["difference"] < 1e-6
    assert report[scope]["drift"] < 1e-5
    assert report[scope]["layout_kept"]


def test_counting_a_replica_twice_trips_the_check(report: dict) -> None:
    """Rows (1,2) .. (7,8) on two shards and two replicas: 204 counted twice is 408."""
    found = report["over_counted"]
    assert found["right"] == pytest.approx(14.28286, abs=1e-5)
    assert found["wrong"] == pytest.approx(20.19901, abs=1e-5)
    assert found["shrunk_to"] == pytest.approx(0.5**0.5, rel=1e-5)
    assert found["drift"] > NORM_DRIFT_LIMIT
