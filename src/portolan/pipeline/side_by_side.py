"""Training runs that do not need one another, side by side on the cores of this machine.

A small model gains little from a second core; a second model gains all of it. On a CPU each run
therefore has a process of its own with one thread, also when only one run is left: how many are
trained at once, and on how many cores, changes no bit of a rung. On an accelerator, on a mesh and
with several processes a run needs the whole machine, and runs follow one another.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import psutil

from portolan.console import RunReporter, say
from portolan.errors import PortolanError, UsageError
from portolan.pipeline.corpus import Corpus
from portolan.pipeline.machine import ONE_PROCESS, Machine
from portolan.pipeline.plan import estimate_memory
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.runs import PlannedRun
from portolan.processes import THREADS_VARIABLE, end_with_parent, usable_cores
from portolan.project import Project
from portolan.shapes import ModelConfig

PROCESS_BYTES = 800 * 1024**2
"""Memory of a process that trains next to nothing: the interpreter, JAX, compiled programs."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run, its corpus, and the project with the recipe that it was planned from."""

    project: Project
    corpus: Corpus
    run: PlannedRun

    @property
    def shape(self) -> tuple[ModelConfig, int]:
        """What jobs have in common that need the same compiled gradient."""
        return self.run.rung.config, self.run.rung.batch_sequences

    def __getstate__(self) -> dict[str, Any]:
        """Without the files that the corpus has opened."""
        return vars(self) | {"corpus": dataclasses.replace(self.corpus)}


TrainOne = Callable[[Job, ProjectRecord, Any], Any]
"""Trains a job to its end and reports to the last argument; a function of a module."""


def train_all(
    jobs: Sequence[Job],
    function: TrainOne,
    record: ProjectRecord,
    machine: Machine = ONE_PROCESS,
    num_workers: int | None = None,
) -> None:
    """Train all jobs: side by side on a CPU, else one after the other.

    Raises:
        UsageError: several workers where a run takes the whole machine.
    """
    if not jobs:
        return
    if not takes_the_machine(jobs[0].project, machine):
        train_side_by_side(jobs, function, num_workers)
        return
    if (num_workers or 1) > 1:
        raise UsageError(
            f"--workers {num_workers}: on an accelerator, a mesh or several hosts a run takes the "
            "whole machine",
            remedy="leave --workers out",
        )
    for job in jobs:
        function(job, record, None)


def takes_the_machine(project: Project, machine: Machine) -> bool:
    """Whether a run is trained with all devices: on an accelerator, a mesh, or by several hosts."""
    import jax

    if machine.is_shared or jax.default_backend() != "cpu":
        return True
    return machine.devices(project.recipe.parallel) is not None


def train_side_by_side(jobs: Sequence[Job], function: TrainOne, num_workers: int | None) -> None:
    """Train all jobs in processes of their own, the longest first.

    Args:
        jobs: runs that do not need one another.
        function: what trains one of them.
        num_workers: processes; None for as many as cores and memory allow.

    Raises:
        PortolanError: the first job that failed; the others have been stopped and saved.
        KeyboardInterrupt: asked to stop by SIGINT or SIGTERM; all have been stopped and saved.
    """
    longest_first = sorted(jobs, key=lambda job: -job.run.rung.flops_with_head)
    number = min(len(jobs), num_workers or workers_that_fit(longest_first))
    crowd = _Crowd(function, longest_first)
    with RunReporter().open() as report:
        crowd.work(number, report)


def workers_that_fit(jobs: Sequence[Job]) -> int:
    """One a core, fewer where the estimated memory of the largest runs exceeds what is free."""
    free = psutil.virtual_memory().available
    fitting = 0
    for job in jobs[: usable_cores()]:
        free -= PROCESS_BYTES
        free -= estimate_memory(job.project.recipe, job.run.rung, on_accelerator=False).peak
        fitting += free >= 0
    return max(1, fitting)


class _Crowd:
    """The processes, what each of them does, and what is still to do."""

    def __init__(self, function: TrainOne, waiting: list[Job]) -> None:
        self.function = function
        self.waiting = waiting
        self.processes: dict[Connection, Any] = {}
        self.busy: dict[Connection, Job] = {}
        self.shapes: dict[Connection, Any] = {}
        self.failure: PortolanError | None = None
        self.is_stopping = False

    def work(self, num_workers: int, report: Callable) -> None:
        """Start the processes and serve them until they have ended."""
        with self._forward_stops():
            try:
                for _ in range(num_workers):
                    self._start()
                while self.processes:
                    self._serve(report)
            finally:
                self._end()
        if self.failure is not None:
            raise self.failure
        if self.is_stopping:
            raise KeyboardInterrupt

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_live, args=(there, self.function), daemon=True)
        process.start()
        there.close()
        self.processes[here] = process
        self._assign(here)

    def _assign(self, worker: Connection) -> None:
        """Its next job, or none, upon which it ends."""
        self.busy.pop(worker, None)
        job = None
        if self.waiting and not self.is_stopping:
            job = self.busy[worker] = self._choose(worker)
            self.shapes[worker] = job.shape
        with contextlib.suppress(BrokenPipeError):
            worker.send(job)
        if job is not None and self.is_stopping:  # asked between the two looks at it
            self.processes[worker].terminate()

    def _choose(self, worker: Connection) -> Job:
        """A job whose programs this process has, else one that no other process compiles now."""
        others = {self.shapes[other] for other in self.busy if other is not worker}
        mine = self.shapes.get(worker)
        job = min(self.waiting, key=lambda job: (job.shape != mine, job.shape in others))
        self.waiting.remove(job)
        return job

    def _serve(self, report: Callable) -> None:
        for worker in wait_for(list(self.processes), timeout=POLL_SECONDS):
            assert isinstance(worker, Connection)
            try:
                kind, content = worker.recv()
            except (EOFError, ConnectionResetError):
                self._bury(worker)
                continue
            if kind == "progress":
                report(content)
            elif kind == "line":
                say(content)
            elif kind == "done":
                self._assign(worker)
            elif kind == "failed":
                error, message, remedy = content
                self._fail(error(message, remedy=remedy))
                self._assign(worker)

    def _bury(self, worker: Connection) -> None:
        """A process has ended: as it should, or in the middle of a job."""
        job = self.busy.pop(worker, None)  # first: a signal may stop what is busy at any moment
        process = self.processes.pop(worker)
        process.join()
        if job is None or self.is_stopping:
            return
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._fail(
            PortolanError(
                f"the process that trained {job.run.run_id} was {how}",
                remedy="it may have run out of memory: use a smaller --workers, then run the same "
                "command again; it goes on from the newest checkpoint",
            )
        )

    def _fail(self, failure: PortolanError) -> None:
        self.failure = self.failure or failure
        if not self.is_stopping:
            self.stop()

    def stop(self) -> None:
        """Ask every process that trains to save and end; asked twice it ends at once."""
        self.is_stopping = True
        for worker in list(self.busy):
            self.processes[worker].terminate()

    @contextlib.contextmanager
    def _forward_stops(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {n: signal.signal(n, lambda *_: self.stop()) for n in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _end(self) -> None:
        """Leave nothing behind, whatever happened here."""
        for process in self.processes.values():
            process.kill()
            process.join()


class _Lines:
    """Standard output of a process: every whole line goes to the one that prints."""

    encoding = "utf-8"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.rest = ""

    def write(self, text: str) -> int:
        """Send what ends with a newline, keep the rest."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.connection.send(("line", line))
        return len(text)

    def flush(self) -> None:
        """Lines are sent when they end."""

    def isatty(self) -> bool:
        """No terminal."""
        return False


class _Relay:
    """Stands for the reporter of a run in the process that prints."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable]:
        """Yield the callback that the training loop reports to."""
        yield lambda progress: self.connection.send(("progress", progress))


def _live(connection: Connection, function: TrainOne) -> None:
    """Life of a process: job after job until there is none."""
    # A key press reaches the process that prints; it tells the others, once.
    os.setsid()
    os.environ[THREADS_VARIABLE] = "1"
    end_with_parent()
    sys.stdout = _Lines(connection)  # type: ignore[assignment]
    try:
        while (job := connection.recv()) is not None:
            connection.send(_outcome(job, function, connection))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        os._exit(128 + signal.SIGINT)


def _outcome(job: Job, function: TrainOne, connection: Connection) -> tuple[str, Any]:
    try:
        function(job, ProjectRecord(job.project), _Relay(connection))
    except PortolanError as error:
        return "failed", (type(error), error.message, error.remedy)
    except Exception as error:
        traceback.print_exc()
        message = f"training {job.run.run_id} failed: {type(error).__name__}: {error}"
        return "failed", (PortolanError, message, "see the traceback above")
    return "done", None
