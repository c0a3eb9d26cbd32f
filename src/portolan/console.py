"""What a person or a batch log sees while something runs."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LOG_INTERVAL_SECONDS = 10.0

PIPE_WIDTH = 160

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console = Console(highlight=False, soft_wrap=True, width=PIPE_WIDTH)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line of plain text; brackets in it are not markup."""
    console.print(text, markup=False)
    sys.stdout.flush()


class RunReporter:
    """Progress of training runs: a live bar each on a terminal, parseable lines in a pipe.

    A line holds `key=value` pairs: run, step, loss in nats per token, tokens_per_second,
    eta_seconds, and eval_macro_loss after an evaluation.
    """

    def __init__(self) -> None:
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable]:
        """Yield the callback that the training loops report to."""
        if not console.is_terminal:
            yield self._line
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}  eval {task.fields[evaluation]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as self._live:
            yield self._bar

    def _bar(self, progress) -> None:
        assert self._live is not None
        if progress.run_id not in self._tasks:
            self._drop_finished()
            self._tasks[progress.run_id] = self._live.add_task(
                progress.run_id, total=progress.steps, loss="-", evaluation="-", speed="-"
            )
        fields: dict[str, Any] = {
            "loss": f"{progress.loss:.3f}",
            "speed": f"{progress.tokens_per_second:,.0f}",
        }
        if progress.evaluation is not None:
            fields["evaluation"] = f"{progress.evaluation:.4f}"
        self._live.update(self._tasks[progress.run_id], completed=progress.completed, **fields)

    def _drop_finished(self) -> None:
        """Make room: a finished run has said its result in a line."""
        assert self._live is not None
        for task in [task for task in self._live.tasks if task.finished]:
            self._live.remove_task(task.id)
            del self._tasks[task.description]

    def _line(self, progress) -> None:
        now = time.monotonic()
        finished = progress.completed == progress.steps
        last = self._last_line.get(progress.run_id, -LOG_INTERVAL_SECONDS)
        if now - last < LOG_INTERVAL_SECONDS and not finished:
            return
        self._last_line[progress.run_id] = now
        parts = [
            f"run={progress.run_id}",
            f"step={progress.completed}/{progress.steps}",
            f"loss={progress.loss:.4f}",
            f"tokens_per_second={progress.tokens_per_second:.0f}",
            f"eta_seconds={progress.seconds_left:.0f}",
        ]
        if progress.evaluation is not None:
            parts.append(f"eval_macro_loss={progress.evaluation:.4f}")
        say(" ".join(parts))
