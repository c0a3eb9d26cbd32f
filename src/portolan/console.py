"""What a person or a batch log sees while something runs."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
    """Progress of a training run: a live bar on a terminal, one parseable line in a pipe.

    A line holds `key=value` pairs: run, step, loss in nats per token, tokens_per_second,
    eta_seconds, and eval_macro_loss after an evaluation.
    """

    def __init__(self, run_id: str, steps: int) -> None:
        self.run_id = run_id
        self.steps = steps
        self._live: Progress | None = None
        self._last_line = 0.0
        self._evaluation: float | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable]:
        """Yield the callback that the training loop reports to."""
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
            self._task = self._live.add_task(
                self.run_id, total=self.steps, loss="-", evaluation="-", speed="-"
            )
            yield self._bar

    def _bar(self, progress) -> None:
        assert self._live is not None
        if progress.evaluation is not None:
            self._evaluation = progress.evaluation
        self._live.update(
            self._task,
            completed=progress.completed,
            loss=f"{progress.loss:.3f}",
            evaluation="-" if self._evaluation is None else f"{self._evaluation:.4f}",
            speed=f"{progress.tokens_per_second:,.0f}",
        )

    def _line(self, progress) -> None:
        now = time.monotonic()
        finished = progress.completed == progress.steps
        if now - self._last_line < LOG_INTERVAL_SECONDS and not finished:
            return
        self._last_line = now
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
