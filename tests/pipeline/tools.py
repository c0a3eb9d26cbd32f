"""Calling the command line, in this process or in one that may be killed."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from portolan.cli import main

COMMAND = (sys.executable, "-m", "portolan.cli")
POLL_SECONDS = 0.01
WAIT_SECONDS = 600


@dataclass(frozen=True)
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def call_main(monkeypatch, capsys, *arguments: object) -> Result:
    """Run the entry point in this process."""
    monkeypatch.setattr(sys, "argv", ["portolan", *map(str, arguments)])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return Result(code, out, err)


def run_command(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    """Run the entry point in a process of its own, to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | (environment or {}),
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


class Running:
    """A command under way, whose output can be looked at."""

    def __init__(
        self, log: Path, *arguments: object, environment: dict[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
            )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text()

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fails when the command ends before it holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_ready():
            assert self.process.poll() is None, f"ended before {what!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what!r} never came:\n{self.output}"
            time.sleep(POLL_SECONDS)


def read_tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
