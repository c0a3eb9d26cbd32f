"""One of several processes that train one run over loopback. Run by test_processes.py.

Usage: process_child.py FOLDER MESH PORT SIZE INDEX [STOP_AT]: at update STOP_AT the process kills
itself in the middle of the update. SIZE 1 trains alone.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
from tests.train.runs import IDENTITY, RUN, Batches
from tests.train.test_loop import Notes

from portolan.errors import PortolanError
from portolan.parallel_settings import ParallelSettings
from portolan.pipeline.machine import Machine, parse_mesh
from portolan.train.devices import find_devices
from portolan.train.loop import HEADLINE, TrainingLoop
from portolan.train.programs import keep_programs


class Constant:
    """An evaluation that costs nothing."""

    def with_model(self, config):
        return self

    def lower(self, params, beta):
        return SimpleNamespace(compile=lambda: SimpleNamespace(memory_analysis=lambda: None))

    def __call__(self, params, beta):
        return {HEADLINE: 1.0}


def main() -> int:
    folder, mesh, port, size, index = sys.argv[1:6]
    stop_at = int(sys.argv[6]) if len(sys.argv) > 6 else -1
    shared = (f"127.0.0.1:{port}", int(size), int(index)) if int(size) > 1 else ("", None, None)
    Machine(mesh, *shared).join()
    jax.config.update("jax_default_matmul_precision", "highest")
    keep_programs()
    devices = find_devices(ParallelSettings(mesh=parse_mesh(mesh)))

    class Killing(Batches):
        def batches(self, start, stop, **rows):
            for step, batch in super().batches(start, stop, **rows):
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield step, batch

    notes = Notes()
    evaluate: Any = Constant()
    loop = TrainingLoop(
        RUN, Path(folder), Killing(), evaluate, notes, print, IDENTITY, devices=devices
    )
    try:
        outcome = loop()
    except PortolanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    told = {"digest": outcome.content_digest, "notes": notes.told}
    Path(folder, f"told-{index}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
