"""The loop of one run: resume, train, evaluate at the marks, save, and leave a success mark."""

import contextlib
import dataclasses
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax
import numpy as np

from portolan.accounting import utilisation
from portolan.canonical import digest
from portolan.console import errors
from portolan.errors import PortolanError, ResumeRefused, StorageError, TrainingDiverged
from portolan.evals.perplexity import METRIC_PREFIX, HeldOutEvaluator
from portolan.files import read_json, storage_errors, write_json_atomic
from portolan.model.transformer import Batch
from portolan.optim.norms import check_norm_drift
from portolan.optim.schedule import Rates
from portolan.track.tracker import Tracker
from portolan.train.checkpoint import CheckpointStore
from portolan.train.retention import SaveSchedule
from portolan.train.state import (
    RunSettings,
    TrainState,
    flatten_state,
    group_table,
    initial_state,
    resolve_compute_dtype,
    restore_state,
)
from portolan.train.step import TrainStep, compile_programs, make_train_step

FINISHED = "finished.json"
HEADLINE = f"{METRIC_PREFIX}/macro_loss"
GLOBAL_NORM = "norm/gradient/global"
REPORT_SECONDS = 1.0


class BatchSource(Protocol):
    """Where batches come from: the step number is its whole state."""

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) for start <= step < stop."""
        ...


class Recorder(Protocol):
    """What the loop tells the record, and what it asks."""

    def last_attempt(self, run_id: str) -> int:
        """Ordinal of the newest attempt that the record knows, 0 if none."""
        ...

    def attempt_started(self, run_id: str, ordinal: int, start: int, restored: str) -> None:
        """An attempt begins at `start` completed updates."""
        ...

    def attempt_ended(self, run_id: str, ordinal: int, completed: int, reason: str) -> None:
        """An attempt ends after `completed` updates."""
        ...

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        """Something happened that a reader of the record should know."""
        ...

    def checkpoint_saved(self, run_id: str, saved: Any) -> None:
        """A permanent checkpoint is verified on disk."""
        ...


@dataclass(frozen=True)
class Progress:
    """One report of a running loop, for a terminal or a log line."""

    run_id: str
    completed: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    evaluation: float | None


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: its last evaluation and where its bytes are.

    `program_bytes` is the memory of the larger program of a step, 0 where not known.
    """

    run_id: str
    completed: int
    evaluation: dict[str, float]
    content_digest: str
    train_seconds: float
    resumed: bool
    program_bytes: int = 0


def finished_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run that has its success mark, else None."""
    path = folder / FINISHED
    return Outcome(**read_json(path)) if path.is_file() else None


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


def _drifts(metrics: dict) -> dict[str, float]:
    return {key: float(x) for key, x in metrics.items() if key.startswith("norm/drift/")}


class TrainingLoop:
    """One attempt at a run.

    Args:
        run: what to train.
        folder: `runs/<run-id>` of the project.
        data: batches by step.
        evaluate: held-out losses, called at every mark.
        recorder: told of attempts, events and permanent checkpoints.
        report: called with Progress about once a second; must be quick.
        metadata: digests that a checkpoint must share with this run to be resumed.
        long_evaluators: by row length, what else to evaluate while rows have that length.
    """

    def __init__(
        self,
        run: RunSettings,
        folder: Path,
        data: BatchSource,
        evaluate: HeldOutEvaluator,
        recorder: Recorder,
        report: Callable[[Progress], None],
        metadata: dict[str, Any],
        long_evaluators: Mapping[int, HeldOutEvaluator] | None = None,
    ) -> None:
        self.run = run
        self.stage = run
        self.folder = folder
        self.data = data
        self.evaluate = evaluate
        self.long_evaluators = long_evaluators or {}
        self.evaluators = [evaluate]
        self.recorder = recorder
        self.report = report
        self.table = group_table(run)
        self.identity = metadata | {"group_table_digest": digest(self.table.to_json())}
        self.schedule = run.schedule
        self.store = CheckpointStore(folder, on_event=self._checkpoint_event)
        self.completed = 0
        self.train_seconds = 0.0
        self.program_bytes = 0
        self.last_evaluation: dict[str, float] = {}
        self._last_report = -math.inf

    def __call__(self) -> Outcome:
        """Train to the end, resuming from the newest checkpoint that validates."""
        if done := finished_outcome(self.folder):
            return done
        with exclusive(self.folder):
            return self._attempt()

    def _attempt(self) -> Outcome:
        state, restored = self._restore()
        start = self.completed
        ordinal = self._open_attempt(start, restored)
        reason = "failed"
        tracker = Tracker(self.folder, attempt=ordinal, start_row=start)
        try:
            with stop_requests() as self._stop_requested:
                state = self._train(state, tracker, ordinal)
            saved = self._save(state, "permanent", ordinal, tracker)
            reason = "finished"
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        except PortolanError as error:
            reason = error.message
            raise
        finally:
            tracker.close()
            self._close_attempt(ordinal, start, restored, reason)
            self.store.close()
        outcome = Outcome(
            run_id=self.run.run_id,
            completed=self.completed,
            evaluation=self.last_evaluation,
            content_digest=saved.content_digest,
            train_seconds=self.train_seconds,
            resumed=ordinal > 1,
            program_bytes=self.program_bytes,
        )
        write_json_atomic(self.folder / FINISHED, dataclasses.asdict(outcome))
        return outcome

    def _restore(self) -> tuple[TrainState, str]:
        template = initial_state(self.run, self.table)
        found = self.store.restore(expected_metadata=self.identity)
        if found is None:
            return template, "fresh"
        arrays, metadata = found
        restored = self.store.restored
        assert restored is not None
        self.completed = int(metadata["completed"])
        self._check_history(metadata.get("changes", []))
        self.train_seconds = float(metadata["train_seconds"])
        self.last_evaluation = dict(metadata["last_evaluation"])
        return restore_state(template, arrays), restored.content_digest

    def _check_history(self, saved: list[list[Any]]) -> None:
        """Refuse a checkpoint that was trained under other changes than this run has by then."""
        expected = self.run.history(self.completed)
        differing = [
            change for change in saved + expected if (change in saved) != (change in expected)
        ]
        if differing:
            step, what, value = differing[0]
            raise ResumeRefused(
                f"checkpoint step {self.completed} and this run differ in the {what} from update "
                f"{step} on ({value})",
                remedy="restore the record of the project: its changes are part of the run",
            )

    def _open_attempt(self, start: int, restored: str) -> int:
        num_notes = len(list(self.folder.glob("attempt-*.json")))
        ordinal = 1 + max(num_notes, self.recorder.last_attempt(self.run.run_id))
        content = {"ordinal": ordinal, "start": start, "restored_from": restored, "end": None}
        write_json_atomic(self.folder / f"attempt-{ordinal}.json", content)
        self.recorder.attempt_started(self.run.run_id, ordinal, start, restored)
        return ordinal

    def _close_attempt(self, ordinal: int, start: int, restored: str, reason: str) -> None:
        content = {
            "ordinal": ordinal,
            "start": start,
            "restored_from": restored,
            "end": self.completed,
            "reason": reason,
        }
        write_json_atomic(self.folder / f"attempt-{ordinal}.json", content)
        self.recorder.attempt_ended(self.run.run_id, ordinal, self.completed, reason)

    def _train(self, state: TrainState, tracker: Tracker, ordinal: int) -> TrainState:
        run = self.run
        saves = SaveSchedule(
            run.num_updates,
            permanent_every=run.permanent_checkpoint_steps,
            temporary_seconds=run.temporary_checkpoint_seconds,
            start=self.completed,
        )
        while self.completed < run.num_updates:
            state = self._train_stage(state, saves, tracker, ordinal)
        return state

    def _train_stage(
        self, state: TrainState, saves: SaveSchedule, tracker: Tracker, ordinal: int
    ) -> TrainState:
        """Updates until rows have another length, or the run ends; the state goes on as it is."""
        self.stage = self.run.at(self.completed)
        self.evaluators = self._evaluators()
        step = make_train_step(
            self.stage, self.table, resolve_compute_dtype(self.run.compute_dtype)
        )
        marks = self.run.evaluation_steps()
        self._compile(step, state)
        end = self.run.stage_end(self.completed)
        for index, batch in self.data.batches(self.completed, end):
            begin = time.monotonic()
            state, metrics = step(state, Batch(*batch), self.rates(index))
            metrics = jax.device_get(metrics)
            if not metrics["finite"]:
                self._stop_diverged(state, metrics, ordinal, tracker)
            seconds = time.monotonic() - begin
            self.completed = index + 1
            self.train_seconds += seconds
            self._check_norms(metrics)
            self._log(tracker, index, metrics, seconds)
            evaluation = None
            if self.completed in marks:
                evaluation = self._evaluate(state, ordinal, tracker)
            self._report(metrics, evaluation)
            if self._stop_requested():
                self._save(state, "temporary", ordinal, tracker)
                raise KeyboardInterrupt
            self._save_if_due(state, saves, ordinal, tracker)
        return state

    def _evaluators(self) -> list[HeldOutEvaluator]:
        """The evaluation of the first packing with the model in force, and that of long rows."""
        config = self.stage.config
        same = config == self.run.config
        pinned = self.evaluate if same else self.evaluate.with_model(config)
        return [pinned, *filter(None, [self.long_evaluators.get(config.sequence_length)])]

    def _compile(self, step: TrainStep, state: TrainState) -> None:
        """Compile all programs at once, so that no step's time contains it."""
        shape = (self.stage.batch_sequences, self.stage.config.sequence_length)
        tokens = np.zeros(shape, np.int32)
        batch = Batch(tokens, tokens, np.zeros(shape, np.float32))  # type: ignore[arg-type]
        programs = step.lower(state, batch, self.rates(self.completed))
        evaluations = [e.lower(state.params, state.beta) for e in self.evaluators]
        sizes = compile_programs([*programs, *evaluations])[: len(programs)]
        self.program_bytes = max(self.program_bytes, *sizes)

    def rates(self, index: int) -> Rates:
        """Rates of update `index` (zero-based), from the schedule."""
        settings = self.run.optimizer
        return self.schedule.rates(
            index,
            self.run.peak,
            initial_decay=settings.gate_router_decay,
            start=settings.decay_start,
        )

    def _log(self, tracker: Tracker, row: int, metrics: dict, seconds: float) -> None:
        values = {key: float(metrics[key]) for key in metrics if key.startswith("train/")}
        for name, rate in zip(("hyperball", "adam", "decay"), self.rates(row), strict=True):
            values[f"rate/{name}"] = float(rate)
        values[GLOBAL_NORM] = float(metrics[GLOBAL_NORM])
        values["throughput/step_seconds"] = seconds
        tokens_per_second = self.run.tokens_per_step / seconds
        values["throughput/tokens_per_second"] = tokens_per_second
        device = jax.devices()[0].device_kind
        if found := utilisation(self.stage.config, tokens_per_second, jax.device_count(), device):
            values["throughput/mfu"] = found.value
        last = row == self.run.num_updates - 1
        if row % self.run.norm_interval_steps == 0 or last:
            for key, value in metrics.items():
                if key.startswith("norm/"):
                    values[key] = float(value)
                elif key.startswith("router/"):
                    values |= {f"{key}/{layer}": float(v) for layer, v in enumerate(value)}
        tracker.log(row, values)

    def _report(self, metrics: dict, evaluation: float | None) -> None:
        now = time.monotonic()
        if evaluation is None and now - self._last_report < REPORT_SECONDS:
            return
        self._last_report = now
        mean_seconds = self.train_seconds / self.completed
        self.report(
            Progress(
                run_id=self.run.run_id,
                completed=self.completed,
                steps=self.run.num_updates,
                loss=float(metrics["train/cross_entropy"]),
                tokens_per_second=self.run.tokens_per_step / mean_seconds,
                seconds_left=mean_seconds * (self.run.num_updates - self.completed),
                evaluation=evaluation,
            )
        )

    def _save_if_due(
        self, state: TrainState, saves: SaveSchedule, ordinal: int, tracker: Tracker
    ) -> None:
        """Save when the schedule asks; a failed save is tried again later and training goes on."""
        kind = saves.due(self.completed)
        if kind is None or self.completed == self.run.num_updates:
            return
        try:
            self._save(state, kind, ordinal, tracker)
            saves.marked(self.completed, kind)
        except StorageError as error:
            saves.failed()
            errors.print(
                f"save after {self.completed} updates failed, training goes on: {error.message}",
                markup=False,
            )

    def _save(self, state: TrainState, kind: str, ordinal: int, tracker: Tracker) -> Any:
        tracker.flush_segment()
        metadata = self.identity | {
            "completed": self.completed,
            "row": self.completed - 1,
            "seed": self.run.seed,
            "train_seconds": self.train_seconds,
            "last_evaluation": self.last_evaluation,
            "changes": self.run.history(self.completed),
        }
        saved = self.store.save(
            flatten_state(state), self.completed, kind=kind, attempt=ordinal, metadata=metadata
        )
        if kind == "permanent":
            self.recorder.checkpoint_saved(self.run.run_id, saved)
        return saved

    def _evaluate(self, state: TrainState, ordinal: int, tracker: Tracker) -> float:
        """Log every held-out metric; returns the headline."""
        found: dict[str, float] = {}
        for evaluate in self.evaluators:
            found |= evaluate(state.params, state.beta)
        tracker.log(self.completed - 1, found)
        if not all(map(math.isfinite, found.values())):
            self._save(state, "temporary", ordinal, tracker)
            text = f"the evaluation after update {self.completed} of {self.run.run_id}"
            self._report_divergence(f"{text} is not finite", "the state is saved")
        self.last_evaluation = found
        return found[HEADLINE]

    def _stop_diverged(
        self, state: TrainState, metrics: dict, ordinal: int, tracker: Tracker
    ) -> None:
        tracker.log(self.completed, {k: float(metrics[k]) for k in ("train/loss", GLOBAL_NORM)})
        name = "loss" if not math.isfinite(metrics["train/loss"]) else "gradient or router state"
        self._save(state, "temporary", ordinal, tracker)
        text = f"the {name} of update {self.completed + 1} of {self.run.run_id} is not finite"
        self._report_divergence(text, "the state before it is saved")

    def _check_norms(self, metrics: dict) -> None:
        """The state of an update that moved a constrained norm is wrong: it is not saved."""
        try:
            check_norm_drift(_drifts(metrics), self.completed)
        except TrainingDiverged as error:
            self.completed -= 1
            saved = self.store.latest()
            text = f"the newest saved state is step {saved.step}" if saved else "nothing is saved"
            self.recorder.event(self.run.run_id, "incident", self.completed, error.message)
            raise TrainingDiverged(
                f"{error.message}; {text}",
                remedy=f"lower optimizer.rate_multiplier if it was raised; else {error.remedy}",
            ) from None

    def _report_divergence(self, text: str, saved: str) -> NoReturn:
        self.recorder.event(self.run.run_id, "incident", self.completed, text)
        raise TrainingDiverged(
            f"{text}; {saved} as step {self.completed}",
            remedy="lower optimizer.rate_multiplier in the recipe and run again",
        )

    def _checkpoint_event(self, kind: str, text: str) -> None:
        self.recorder.event(self.run.run_id, kind, self.completed, text)
