"""An ordered map over tasks, in this process or in a pool: the results never depend on which."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[Result]:
    """Results in the order of the items; at most 2 tasks a worker are in flight.

    A consumer that stops early stops the pool; tasks in flight finish and are forgotten. New
    processes are spawned: forking a process with running threads can hang.
    """
    if workers <= 1 or len(items) <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(items)), mp_context=context)
    try:
        pending = deque(pool.submit(function, item) for item in items[: 2 * workers])
        for item in items[2 * workers :]:
            yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
