"""Write src/portolan/scaling/learnt.json from public ladders with known outcomes.

Run `python benchmarks/learn_priors.py TASKS.json`, a file of tasks as `portolan forecast backtest`
reads it. Ladders of fewer than three rungs and of mixed ratios teach nothing and are left out.
"""

import argparse
from pathlib import Path
from typing import Any

from portolan.files import write_json_atomic
from portolan.scaling.learnt import FLOPS_AXIS, START, TABLE, learn_suite
from portolan.scaling.tasks import Task, read_tasks

MIN_RUNGS = 3
NOTE = (
    "Learnt from ladders of published training runs; one entry per suite. Written by "
    "benchmarks/learn_priors.py."
)


def learn(tasks: list[Task]) -> dict[str, Any]:
    """The table: one entry per suite, in order of the file."""
    usable: dict[str, list[Task]] = {}
    for task in tasks:
        known = task.truth is not None and task.scored
        if known and len(task.ladder.x) >= MIN_RUNGS and task.kind != "nd_grid":
            usable.setdefault(task.suite, []).append(task)
    suites = {}
    for suite, members in usable.items():
        ladders = [(task.ladder, float(task.truth or 0)) for task in members]
        axis = FLOPS_AXIS if all(FLOPS_AXIS in task.axis for task in members) else members[0].axis
        families = sorted({task.family for task in members})
        suites[suite] = {
            "families": families,
            "axis": axis,
            **learn_suite(ladders, START.asymptote_ratio),
        }
    return {"note": NOTE, "suites": suites}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path)
    target = Path(__file__).parent.parent / "src" / "portolan" / "scaling" / TABLE
    write_json_atomic(target, learn(read_tasks(parser.parse_args().tasks)))
    print(f"wrote {target}")
