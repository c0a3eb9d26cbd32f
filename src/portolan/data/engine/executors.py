"""Where tasks run: in this process or in a pool of its own. No daemon, no port."""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from portolan.errors import PortolanError
from portolan.processes import end_with_parent

MAX_DEATHS = 3
TASKS_IN_FLIGHT_PER_WORKER = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(PortolanError):
    """A worker process ended while it ran a task, again and again."""


class Executor(Protocol):
    """Runs module-level functions on items; which executor it is never changes a result."""

    def completed(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[int, Result]]:
        """(index, result) as the items finish; a bounded number of them is in flight."""
        ...

    def close(self) -> None:
        """End what this executor started, and nothing else."""
        ...


class LocalExecutor:
    """Up to `num_workers` processes, started when first needed; 1 means this process alone.

    New processes are spawned: forking a process with running threads can hang.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """Wait for the processes to end."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None

    def completed(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[int, Result]]:
        """(index, result) as the items finish; at most 2 items a worker are in flight.

        When a worker dies, the items in flight run again one at a time, so that the one which kills
        its worker is known. When the consumer stops early, items in flight are awaited.

        Raises:
            WorkerDied: an item killed its worker 3 times.
        """
        if self.num_workers <= 1 or len(items) <= 1:
            for index, item in enumerate(items):
                yield index, function(item)
            return
        waiting = deque(range(len(items)))
        flying: dict[Future[Any], int] = {}
        try:
            while waiting or flying:
                lost: list[int] = []
                while waiting and len(flying) < TASKS_IN_FLIGHT_PER_WORKER * self.num_workers:
                    index = waiting.popleft()
                    flying[self._submit(function, items[index])] = index
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    index = flying.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        lost.append(index)
                    else:
                        yield index, future.result()
                if lost:
                    lost += flying.values()
                    flying.clear()
                    self.close()
                    for index in sorted(lost):
                        yield index, self._run_alone(function, items[index])
        finally:
            for future in flying:
                future.cancel()
            wait(flying)

    def _submit(self, function: Callable[[Item], Result], item: Item) -> Future[Result]:
        """Hand an item to the pool, a new one if a worker died while it was idle."""
        for _ in range(MAX_DEATHS):
            if self.pool is None:
                context = multiprocessing.get_context("spawn")
                self.pool = ProcessPoolExecutor(
                    self.num_workers, mp_context=context, initializer=_prepare_worker
                )
            try:
                return self.pool.submit(function, item)
            except BrokenProcessPool:
                self.close()
        raise WorkerDied(
            f"{MAX_DEATHS} pools of {self.num_workers} workers ended while idle",
            remedy="look for an out-of-memory killer in the log of this machine",
        )

    def _run_alone(self, function: Callable[[Item], Result], item: Item) -> Result:
        for _ in range(MAX_DEATHS):
            try:
                return self._submit(function, item).result()
            except BrokenProcessPool:
                self.close()
        raise WorkerDied(
            f"a worker process died {MAX_DEATHS} times while it ran {item_name(item)}",
            remedy="it may have run out of memory: use fewer workers or free some memory, then run "
            "the same command again; finished tasks are kept",
        )


def item_name(item: object) -> str:
    """What an error calls an item."""
    return getattr(item, "name", None) or type(item).__name__


def in_order(completed: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Results in the order of their indices, whatever the order they come in."""
    early: dict[int, Result] = {}
    expected = 0
    for index, result in completed:
        early[index] = result
        while expected in early:
            yield early.pop(expected)
            expected += 1


def map_in_order(
    executor: Executor, function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Result]:
    """Results in the order of the items, whatever the order they finish in."""
    with contextlib.closing(executor.completed(function, items)) as completed:
        yield from in_order(completed)


def _prepare_worker() -> None:
    """One thread a worker, which ends with its parent."""
    pa.set_cpu_count(1)
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    end_with_parent()
