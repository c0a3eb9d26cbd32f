"""The loop of one run: resume, train, evaluate at the marks, save, and leave a success mark."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from portolan.accounting import utilisation, without_dropped_rows
from portolan.canonical import digest
from portolan.console import errors
from portolan.errors import PortolanError, ResumeRefused, StorageError, TrainingDiverged
from portolan.evals.perplexity import METRIC_PREFIX, HeldOutEvaluator
from portolan.files import write_json_atomic
from portolan.model.drops import Drops
from portolan.model.transformer import Batch
from portolan.optim.norms import check_norm_drift
from portolan.optim.schedule import Rates
from portolan.parallel.drops import DROP_FRACTION, total_drops
from portolan.parallel.replicas import differing_leaves
from portolan.track.tracker import Tracker
from portolan.train.checkpoint_shared import open_store
from portolan.train.crew import Crew, peer_loss, versions
from portolan.train.devices import Devices
from portolan.train.followers import SilentRecorder, SilentTracker
from portolan.train.interface import (
    FINISHED,
    BatchSource,
    MetricLog,
    Outcome,
    Progress,
    Recorder,
    finished_outcome,
)
from portolan.train.process import exclusive, stop_requests
from portolan.train.retention import SaveSchedule
from portolan.train.state import (
    RunSettings,
    TrainState,
    check_saved,
    flatten_state,
    group_table,
    initial_state,
    resolve_compute_dtype,
    restore_state,
)
from portolan.train.step import TrainStep, compile_programs, make_train_step

HEADLINE = f"{METRIC_PREFIX}/macro_loss"
GLOBAL_NORM = "norm/gradient/global"
REPORT_SECONDS = 1.0
REPLICA_CHECK_STEPS = 500
"""Updates between comparisons of all copies of the parameters (parallel.md 11.6)."""
COMPILE_SECONDS = 1800.0
"""How much longer one process may compile than another."""


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
        devices: the mesh to train on; None for one device.

    Of the processes of a run only the lead writes; the others do the same updates.
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
        devices: Devices | None = None,
    ) -> None:
        self.run = run
        self.stage = run
        self.folder = folder
        self.data = data
        self.evaluate = evaluate
        self.long_evaluators = long_evaluators or {}
        self.evaluators = [evaluate]
        self.devices = devices
        self.crew = Crew.of_jax()
        self.recorder = recorder if self.crew.leads else SilentRecorder()
        self.report = report
        self.table = group_table(run)
        self.identity = metadata | {"group_table_digest": digest(self.table.to_json())}
        self.schedule = run.schedule
        self.store = open_store(folder, self.crew, on_event=self._checkpoint_event)
        self.completed = 0
        self.train_seconds = 0.0
        self.program_bytes = 0
        self.last_evaluation: dict[str, float] = {}
        self._last_report = -math.inf

    def __call__(self) -> Outcome:
        """Train to the end, resuming from the newest checkpoint that validates."""
        if done := finished_outcome(self.folder):
            return done
        self.crew.check_agreement("run or version", digest([self.identity, versions()]))
        with exclusive(self.folder) if self.crew.leads else contextlib.nullcontext():
            return self._attempt()

    def _attempt(self) -> Outcome:
        state, restored = self._restore()
        start = self.completed
        ordinal = self.crew.decide(lambda: self._open_attempt(start, restored))
        reason = "failed"
        tracker: MetricLog = SilentTracker()
        if self.crew.leads:
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
        except RuntimeError as error:
            lost = peer_loss(error, self.crew)
            if lost is None:
                raise
            reason = lost.message
            raise lost from error
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
        if self.crew.leads:
            write_json_atomic(self.folder / FINISHED, dataclasses.asdict(outcome))
        return outcome

    def _restore(self) -> tuple[TrainState, str]:
        if self.devices is None:
            template = initial_state(self.run, self.table)
        else:
            template = self.devices.initial_state(self.run, self.table)
        found = self.store.restore(expected_metadata=self.identity)
        if found is None:
            return template, "fresh"
        arrays, metadata = found
        if self.devices is not None:
            check_saved(template, arrays)
            arrays = self.devices.put_state(template, arrays)
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
        content = self._attempt_note(ordinal, start, restored)
        write_json_atomic(self.folder / f"attempt-{ordinal}.json", content | {"end": None})
        self.recorder.attempt_started(self.run.run_id, ordinal, start, restored)
        if self.devices is not None:
            text = f"{self.devices} in {self.crew.size} processes"
            self.recorder.event(self.run.run_id, "decision", start, text)
        return ordinal

    def _attempt_note(self, ordinal: int, start: int, restored: str) -> dict[str, Any]:
        note = {"ordinal": ordinal, "start": start, "restored_from": restored}
        return note | ({"mesh": self.devices.sizes} if self.devices else {})

    def _close_attempt(self, ordinal: int, start: int, restored: str, reason: str) -> None:
        if not self.crew.leads:
            return
        content = self._attempt_note(ordinal, start, restored)
        content |= {"end": self.completed, "reason": reason}
        write_json_atomic(self.folder / f"attempt-{ordinal}.json", content)
        self.recorder.attempt_ended(self.run.run_id, ordinal, self.completed, reason)

    def _train(self, state: TrainState, tracker: MetricLog, ordinal: int) -> TrainState:
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
        self, state: TrainState, saves: SaveSchedule, tracker: MetricLog, ordinal: int
    ) -> TrainState:
        """Updates until rows have another length, or the run ends; the state goes on as it is."""
        self.stage = self.run.at(self.completed)
        self.evaluators = self._evaluators()
        step = make_train_step(
            self.stage, self.table, resolve_compute_dtype(self.run.compute_dtype), self.devices
        )
        marks = self.run.evaluation_steps()
        self._compile(step, state)
        for index, batch in self._batches():
            begin = time.monotonic()
            state, metrics = step(state, batch, self.rates(index))
            metrics = jax.device_get(metrics)
            if not metrics["finite"]:
                self._stop_diverged(state, metrics, ordinal, tracker)
            seconds = time.monotonic() - begin
            self.completed = index + 1
            self.train_seconds += seconds
            self._check_norms(metrics)
            self._check_replicas(state)
            self._log(tracker, index, metrics, seconds)
            evaluation = None
            if self.completed in marks:
                evaluation = self._evaluate(state, ordinal, tracker)
            self._report(metrics, evaluation)
            stop, kind = self.crew.tell([self._stop_requested(), saves.due(self.completed)])
            if stop:
                self._save(state, "temporary", ordinal, tracker)
                raise KeyboardInterrupt
            if kind is not None and self.completed < self.run.num_updates:
                self._save_scheduled(state, kind, saves, ordinal, tracker)
        return state

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """The batches of this stage from the next update on, where the devices want them."""
        start, end = self.completed, self.run.stage_end(self.completed)
        if self.devices is None:
            for index, batch in self.data.batches(start, end):
                yield index, Batch(*batch)
            return
        sequences = self.stage.batch_sequences
        rows = self.devices.own_rows(sequences)
        for index, batch in self.data.batches(start, end, rows=rows):
            yield index, self.devices.put_batch(batch, sequences)

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
        if self.devices is not None:
            own = self.devices.own_rows(shape[0])
            batch = self.devices.put_batch([rows[own] for rows in batch], shape[0])
        programs = step.lower(state, batch, self.rates(self.completed))
        evaluations = [e.lower(state.params, state.beta) for e in self.evaluators]
        sizes = compile_programs([*programs, *evaluations])[: len(programs)]
        self.crew.wait("compiled", COMPILE_SECONDS)
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

    def _log(self, tracker: MetricLog, row: int, metrics: dict, seconds: float) -> None:
        values = {key: float(metrics[key]) for key in metrics if key.startswith("train/")}
        for name, rate in zip(("hyperball", "adam", "decay"), self.rates(row), strict=True):
            values[f"rate/{name}"] = float(rate)
        values[GLOBAL_NORM] = float(metrics[GLOBAL_NORM])
        values["throughput/step_seconds"] = seconds
        tokens_per_second = self.run.tokens_per_step / seconds
        values["throughput/tokens_per_second"] = tokens_per_second
        values |= self._drops(metrics)
        config, device = self.stage.config, jax.devices()[0].device_kind
        used = self.devices.mesh.size if self.devices else 1
        if found := utilisation(config, tokens_per_second, used, device):
            values["throughput/mfu"] = found.value
            if lost := values.get(DROP_FRACTION):
                values["throughput/mfu_without_drops"] = without_dropped_rows(
                    found.value, config, lost
                )
        last = row == self.run.num_updates - 1
        if row % self.run.norm_interval_steps == 0 or last:
            for key, value in metrics.items():
                if key.startswith("norm/"):
                    values[key] = float(value)
                elif key.startswith("router/"):
                    values |= {f"{key}/{layer}": float(v) for layer, v in enumerate(value)}
        tracker.log(row, values)

    def _drops(self, metrics: dict) -> dict[str, float]:
        """What limits on rows cut off in this update, over all layers and devices."""
        if "router/sender_dropped" not in metrics:
            return {}
        assert self.devices is not None
        config, batch = self.stage.config, self.stage.batch_sequences
        counts = ("sender_dropped", "receiver_dropped", "padding_skipped")
        drops = Drops(*(metrics[f"router/{name}"] for name in counts))
        per_layer = batch * config.sequence_length * config.experts_per_token
        transport = self.devices.settings.transport_on(self.devices.sizes["expert"])
        valid = per_layer - int(drops.skipped[0])
        return total_drops(drops, transport, valid, per_layer).metrics()

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

    def _save_scheduled(
        self, state: TrainState, kind: str, saves: SaveSchedule, ordinal: int, tracker: MetricLog
    ) -> None:
        """A failed save is tried again later and training goes on."""
        try:
            self._save(state, kind, ordinal, tracker)
            saves.marked(self.completed, kind)
        except StorageError as error:
            saves.failed()
            errors.print(
                f"save after {self.completed} updates failed, training goes on: {error.message}",
                markup=False,
            )

    def _save(self, state: TrainState, kind: str, ordinal: int, tracker: MetricLog) -> Any:
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

    def _evaluate(self, state: TrainState, ordinal: int, tracker: MetricLog) -> float:
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
        self, state: TrainState, metrics: dict, ordinal: int, tracker: MetricLog
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

    def _check_replicas(self, state: TrainState) -> None:
        """Every so often, stop a run whose copies of a parameter are no longer equal."""
        if self.devices is None or self.completed % REPLICA_CHECK_STEPS:
            return
        if differing := differing_leaves(state.params, self.devices.mesh):
            text = f"copies of {differing[0]} differ between devices after {self.completed} updates"
            self.recorder.event(self.run.run_id, "incident", self.completed, text)
            raise TrainingDiverged(
                f"{text}, and of {len(differing) - 1} other parameters",
                remedy="a device or link computes wrongly: replace it and run again, which goes on "
                "from the newest checkpoint",
            )

    def _report_divergence(self, text: str, saved: str) -> NoReturn:
        self.recorder.event(self.run.run_id, "incident", self.completed, text)
        raise TrainingDiverged(
            f"{text}; {saved} as step {self.completed}",
            remedy="lower optimizer.rate_multiplier in the recipe and run again",
        )

    def _checkpoint_event(self, kind: str, text: str) -> None:
        self.recorder.event(self.run.run_id, kind, self.completed, text)
