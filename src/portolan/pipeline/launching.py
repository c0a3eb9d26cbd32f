"""Several processes of one run on this machine: started together, ended together, started again.

A process that trains cannot see all that can happen to it, so what watches the others lives here,
outside of them. On clusters the scheduler does the same (docs/scale-out.md).
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from portolan.console import say
from portolan.errors import PeerLost, PortolanError
from portolan.pipeline.machine import HEARTBEAT_SECONDS

GRACE_SECONDS = HEARTBEAT_SECONDS + 30
"""How long the others may take to notice that one is gone."""
STOP_SECONDS = 10
POLL_SECONDS = 0.2
ABORTED = -signal.SIGABRT
"""Status of a process that the runtime ended because a peer was gone."""


@dataclass(frozen=True)
class End:
    """How a gang ended: exit status by process, and the process that ended badly first, if any."""

    statuses: tuple[int, ...]
    first: int | None

    @property
    def status(self) -> int:
        """Of the process that ended badly first, else 0."""
        return 0 if self.first is None else self.statuses[self.first]

    @property
    def may_restart(self) -> bool:
        """Whether starting again could help: a process was killed or lost another one."""
        return self.status < 0 or self.status == PeerLost.exit_code

    def describe(self) -> str:
        """What became of every process, in words."""
        return "; ".join(
            f"process {index}: {self._word(index, status)}"
            for index, status in enumerate(self.statuses)
        )

    def _word(self, index: int, status: int) -> str:
        if index != self.first and status in (PeerLost.exit_code, ABORTED):
            return "peer lost"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"ended with status {status}" if status else "done"


def free_port() -> int:
    """A port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def watch_gang(processes: Sequence[subprocess.Popen], grace_seconds: float = GRACE_SECONDS) -> End:
    """Wait until all processes have ended; end the others when one has ended badly."""
    first, deadline = None, float("inf")
    while any(process.poll() is None for process in processes):
        if first is None:
            bad = (i for i, process in enumerate(processes) if process.poll())
            first = next(bad, None)
            if first is not None:
                deadline = time.monotonic() + grace_seconds
        if time.monotonic() > deadline:
            _end(processes)
        time.sleep(POLL_SECONDS)
    statuses = tuple(process.wait() for process in processes)
    if first is None:
        first = next((i for i, status in enumerate(statuses) if status), None)
    return End(statuses, first)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        end = time.monotonic() + STOP_SECONDS
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            time.sleep(POLL_SECONDS)


def launch(
    root: Path, command: Sequence[str], *, num_processes: int, devices: int | None, retries: int
) -> None:
    """Run a verb of the project in `num_processes` processes, again after a loss.

    Args:
        root: folder of the project.
        command: the verb and its options, `train --mesh expert=4`.
        num_processes: processes on this machine.
        devices: CPU devices of each; None for what it sees.
        retries: how often a gang that lost a process is started again.

    Raises:
        PortolanError: it ended badly; with the exit status of the first process that did.
    """
    for attempt in range(retries + 1):
        processes = _start(root, command, num_processes, devices)
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            end = watch_gang(processes)
        finally:
            signal.signal(signal.SIGINT, previous)
            _end(processes)
        if end.first is None:
            return
        say(f"attempt {attempt + 1}: {end.describe()}")
        if not end.may_restart:
            break
    error = PortolanError(
        f"{command[0]} in {num_processes} processes ended badly: {end.describe()}",
        remedy="see the messages above; the same command goes on from the newest checkpoint",
    )
    error.exit_code = end.status if end.status > 0 else PeerLost.exit_code
    raise error


def _start(
    root: Path, command: Sequence[str], num_processes: int, devices: int | None
) -> list[subprocess.Popen]:
    env = dict(os.environ)
    if devices is not None:
        flag = f"--xla_force_host_platform_device_count={devices}"
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
    base = [sys.executable, "-m", "portolan.cli", "-C", os.fspath(root), *command]
    base += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(num_processes)]
    return [
        subprocess.Popen([*base, "--process-id", str(index)], env=env)
        for index in range(num_processes)
    ]
