"""What a person or a batch log sees of a stage that takes long."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from portolan.console import LOG_INTERVAL_SECONDS, console, say
from portolan.data.engine.core import StageProgress


class StageReporter:
    """Progress of curation: a live bar on a terminal, one parseable line in a pipe.

    A line holds `key=value` pairs: stage, step, tasks, documents, documents_per_second, bytes and
    eta_seconds. A step shorter than 10 seconds prints none.
    """

    def __init__(self) -> None:
        self._last_line = time.monotonic()
        self._live: Progress | None = None
        self._step: tuple[str, str] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[StageProgress], None]]:
        """Yield the callback that an `Engine` reports to."""
        if not console.is_terminal:
            yield self._line
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[documents]:,} documents"),
            TextColumn("{task.fields[speed]:,.0f}/s"),
            TextColumn("{task.fields[megabytes]:,.0f} MB"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as self._live:
            self._task = self._live.add_task("", documents=0, speed=0.0, megabytes=0.0)
            yield self._bar

    def _bar(self, progress: StageProgress) -> None:
        assert self._live is not None
        step = (progress.stage, progress.step)
        if step != self._step:
            self._step = step
            self._live.reset(self._task, description=f"{progress.stage} {progress.step}")
        self._live.update(
            self._task,
            total=progress.num_tasks,
            completed=progress.tasks,
            documents=progress.documents,
            speed=progress.documents_per_second,
            megabytes=progress.bytes / 1e6,
        )

    def _line(self, progress: StageProgress) -> None:
        now = time.monotonic()
        if now - self._last_line < LOG_INTERVAL_SECONDS:
            return
        self._last_line = now
        say(
            f"stage={progress.stage} step={progress.step} "
            f"tasks={progress.tasks}/{progress.num_tasks} documents={progress.documents} "
            f"documents_per_second={progress.documents_per_second:.0f} bytes={progress.bytes} "
            f"eta_seconds={progress.seconds_left:.0f}"
        )
