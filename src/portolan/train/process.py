"""What a process holds while it trains: the lock of the run, and the requests to stop."""

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from portolan.errors import PortolanError
from portolan.files import storage_errors


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, so that two processes never train it at once."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PortolanError(
                f"another process is training {folder.name}",
                remedy="wait for it to end, or stop it, then run the same command again",
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Inside, SIGINT and SIGTERM only ask to stop after the current update; twice stops at once.

    The state of an update in flight is donated, so it cannot be saved from a handler.
    """
    asked: list[int] = []
    previous = {}

    def ask(received: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(received)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
