"""A toy training run that is killed for real: one JSON case per input line, one result each.

The libraries are loaded once; every case is a forked child, so that a SIGKILL ends only that.
"""

import json
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path

import numpy as np

from portolan.errors import StorageError
from portolan.train import staging
from portolan.train.checkpoint import CheckpointStore, content_digest

FIRST = {
    "blocks/w": np.linspace(-1, 1, 600, dtype=np.float32).reshape(2, 300),
    "opt/muonh/blocks/w/buf": np.zeros((2, 300), np.float32),
    "opt/count": np.int32(0),
    "router_state/beta": np.zeros((4,), np.float32),
}


def update(state: dict, step: int) -> dict:
    noise = np.random.default_rng(step).standard_normal((2, 300)).astype(np.float32)
    momentum = 0.9 * state["opt/muonh/blocks/w/buf"] + noise
    return {
        "blocks/w": state["blocks/w"] - 0.01 * momentum,
        "opt/muonh/blocks/w/buf": momentum,
        "opt/count": state["opt/count"] + np.int32(1),
        "router_state/beta": state["router_state/beta"] + momentum[0, :4],
    }


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(phase: str) -> None:
    """Die now, or a moment later where the phase name ends in "during"."""
    if phase == "P2:during":
        threading.Timer(0.004, kill).start()
    elif phase == "P4:during":
        link, calls = staging.link_or_copy, []

        def link_some(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) == 4:
                kill()
            link(source, target)

        staging.link_or_copy = link_some
    else:
        kill()


def train(case: dict, writer: int) -> None:
    """Train to the end; report where it started, how often a save failed, and the final state."""
    saving = [0]
    phase = case.get("phase", "")

    def on_phase(name: str) -> None:
        if saving[0] == case.get("at_save") and name == phase.replace(":during", ""):
            arm(phase)

    store = CheckpointStore(case["folder"], on_phase=on_phase)
    found = store.restore()
    state, start = (FIRST, 0) if found is None else (found[0], found[1]["completed"])
    os.write(writer, json.dumps({"start": start}).encode() + b"\n")
    failures = 0
    for step in range(start, case["num_steps"]):
        if step == case.get("kill_at"):
            kill()
        state = update(state, step)
        if (step + 1) % case["every"] == 0:
            saving[0] = step + 1
            limit = 1000 if step + 1 == case.get("full_at") else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                metadata = {"completed": step + 1}
                store.save(state, step + 1, kind=case["kind"], attempt=1, metadata=metadata)
            except StorageError:
                failures += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    result = {"failures": failures, "digest": content_digest(state)}
    os.write(writer, json.dumps(result).encode() + b"\n")


def run_forked(case: dict) -> dict:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            train(case, writer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = [json.loads(line) for line in pipe]
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed} | {key: line[key] for line in lines for key in line}


def main() -> None:
    import orbax.checkpoint

    assert orbax.checkpoint
    for line in sys.stdin:
        print(json.dumps(run_forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
