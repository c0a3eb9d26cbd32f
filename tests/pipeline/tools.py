"""Calling the command line, in this process or in one that may be killed."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from portolan.cli import main

COMMAND = (sys.executable, "-m", "portolan.cli")


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
    """A command under way, whose lines can be waited for."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "".join(self.lines)

    def finish(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def read_tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
