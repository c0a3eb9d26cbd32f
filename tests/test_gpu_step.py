"""The GPU benchmark where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_step.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ).stdout


def test_without_a_gpu_it_says_so_and_what_to_do():
    (line,) = run("--quick").splitlines()
    assert line.startswith("no GPU is visible")
    assert "jax[cuda12]" in line
    assert "--platform cpu" in line


@pytest.mark.slow
def test_parity_holds_on_a_cpu(tmp_path):
    file = tmp_path / "result.json"
    run("--platform", "cpu", "--json", str(file))
    result = json.loads(file.read_text())
    assert len(result["claims"]) == 6
    assert all(claim["holds"] for claim in result["claims"]), result["claims"]
    assert not result["rows"]
