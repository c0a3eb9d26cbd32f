"""A guard on performance without a clock: what the compiled update exchanges and holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

CHILD = Path(__file__).with_name("compiled_child.py")
WRITTEN_WITH = "0.10.2"
"""The version of JAX that made the snapshot."""
ROOM = 1.1
"""How much more temporary memory than in the snapshot is tolerated."""


@pytest.mark.slow
def test_the_compiled_update_is_that_of_the_snapshot():
    """Another version of JAX fuses otherwise: there only growth beyond twice is refused."""
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = json.loads(CHILD.with_name("compiled.json").read_text())
    assert found.keys() == expected.keys()
    same = jax.__version__ == WRITTEN_WITH
    for mesh, programs in expected.items():
        for name, program in programs.items():
            mine, room = found[mesh][name], ROOM if same else 2
            limit = room * program["temporary_bytes"]
            assert mine["temporary_bytes"] <= limit, f"{mesh} {name}: run {CHILD.name} --write"
            if same:
                assert mine["collectives"] == program["collectives"], (mesh, name)
