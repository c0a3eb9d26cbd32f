"""An ordered map over tasks, in this process or in a pool: the results never depend on which."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerPool:
    """Up to `num_workers` processes, started when first needed; 1 means this process alone.

    New processes are spawned: forking a process with running threads can hang.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)
            self.executor = None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Results in the order of the items; at most 2 tasks a worker are in flight.

        When the consumer stops early, tasks in flight are awaited and forgotten.
        """
        if self.num_workers <= 1 or len(items) <= 1:
            yield from map(function, items)
            return
        if self.executor is None:
            context = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(
                self.num_workers, mp_context=context, initializer=_end_with_parent
            )
        window = 2 * self.num_workers
        pending: deque[Future[Any]] = deque()
        try:
            pending.extend(self.executor.submit(function, item) for item in items[:window])
            for item in items[window:]:
                yield pending.popleft().result()
                pending.append(self.executor.submit(function, item))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            wait(pending)


def _end_with_parent() -> None:
    """End this worker when the process that started it dies: a killed one cannot say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
