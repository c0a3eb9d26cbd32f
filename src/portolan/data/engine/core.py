"""The engine: an executor, a memory budget for each task, and a progress report."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from portolan.data.engine.executors import Executor, LocalExecutor, map_in_order

TASK_BYTES = 512 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StageProgress:
    """How far a step of a stage is; documents and bytes are those that its tasks read."""

    stage: str
    step: str
    tasks: int
    num_tasks: int
    documents: int
    bytes: int
    seconds: float
    documents_per_second: float
    seconds_left: float


Report = Callable[[StageProgress], None]


class Engine:
    """Runs the tasks of stages on an executor.

    Args:
        executor: where tasks run; this process by default.
        task_bytes: memory that a task may hold in tables, beside its own code.
        report: called after every finished task.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        task_bytes: int = TASK_BYTES,
        report: Report | None = None,
    ) -> None:
        self.executor: Executor = executor or LocalExecutor()
        self.task_bytes = task_bytes
        self.report = report

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the executor started."""
        self.executor.close()

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Results of a module-level function in the order of the items; nothing is kept on disk."""
        return map_in_order(self.executor, function, items)
