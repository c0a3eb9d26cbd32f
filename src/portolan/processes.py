"""What this process may use of the machine, and how a process ends with the one that made it."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

THREADS_VARIABLE = "NPROC"
"""What XLA's CPU client takes for the number of cores, where it is set."""


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads() -> int:
    """Threads among which XLA divides a program for the CPU."""
    given = os.environ.get(THREADS_VARIABLE, "")
    return int(given) if given.isdigit() else usable_cores()


def end_with_parent() -> None:
    """In a process of `multiprocessing`: end at once when its parent is gone.

    A killed parent cannot say so.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
