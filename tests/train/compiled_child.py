"""Compiles the update of a small run for small meshes and prints what XLA made of it, as JSON.

`compiled_child.py` with eight host devices (XLA_FLAGS) prints; with --write it replaces the
snapshot that test_compiled.py compares with: do that when a change of the figures is intended.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.train.runs import PEAK, RUN, batch

from portolan.parallel.planner.hlo import parse_collectives, summarise
from portolan.parallel.planner.mesh import MeshSizes
from portolan.parallel_settings import MeshSettings, ParallelSettings
from portolan.train.devices import find_devices
from portolan.train.state import abstract_state, group_table
from portolan.train.step import make_train_step

SNAPSHOT = Path(__file__).with_name("compiled.json")
MESHES = [
    {"data": 2, "context": 2, "expert": 2},
    {"replica": 2, "data": 1, "expert": 2, "model": 2},
]


def describe(compiled: Any, mesh: MeshSizes) -> dict[str, Any]:
    """Temporary bytes, and instructions, executions and bytes of each kind of collective."""
    found = summarise(parse_collectives(compiled.as_text()), mesh)
    lines = {
        " ".join([one.kind, "x".join(one.axes), one.element_type, "loop" * one.in_loop]).strip(): [
            one.instructions,
            one.executions,
            one.moved_bytes,
        ]
        for one in found
    }
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"temporary_bytes": temporary, "collectives": dict(sorted(lines.items()))}


def compile_mesh(axes: dict[str, int]) -> dict[str, Any]:
    """Both programs of an update on one mesh."""
    devices = find_devices(ParallelSettings(mesh=MeshSettings(**axes)))
    assert devices is not None
    table = group_table(RUN)
    step = make_train_step(RUN, table, "float32", devices)
    rows = devices.put_batch([np.asarray(part) for part in batch(0)], RUN.batch_sequences)
    rates = RUN.schedule.rates(0, PEAK, initial_decay=0.02, start=0)
    lowered = step.lower(abstract_state(RUN, table), rows, rates)
    mesh = MeshSizes(**devices.sizes)
    programs = zip(("gradient", "update"), lowered, strict=True)
    return {name: describe(program.compile(), mesh) for name, program in programs}


def main() -> None:
    found = {
        " ".join(f"{axis}={size}" for axis, size in axes.items()): compile_mesh(axes)
        for axes in MESHES
    }
    text = json.dumps(found, indent=1)
    if "--write" in sys.argv:
        SNAPSHOT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
