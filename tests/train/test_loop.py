"""The training loop on a tiny model: resume to the bit, marks, saves, stops."""

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.train import runs
from tests.train.runs import IDENTITY, PEAK

from portolan.data.loader import TokenBatch, label_weights
from portolan.errors import PortolanError, ResumeRefused, StorageError, TrainingDiverged
from portolan.evals.perplexity import HeldOutEvaluator
from portolan.shapes import derive_shape
from portolan.track.tracker import metrics_digest, read_metrics
from portolan.train import loop as loop_module
from portolan.train.checkpoint import CheckpointStore
from portolan.train.interface import Outcome
from portolan.train.loop import TrainingLoop
from portolan.train.process import exclusive
from portolan.train.state import NUM_EVALUATION_MARKS, RunSettings, group_table
from portolan.train.step import make_train_step

CONFIG = derive_shape(
    "micro", 32, vocab_size=64, sequence_length=16, window=8, num_experts=4, num_layers=2
)
RUN = dataclasses.replace(
    runs.RUN,
    run_id="rung-tiny",
    config=CONFIG,
    batch_sequences=4,
    steps=24,
    warmup_steps=3,
    norm_interval_steps=10,
    permanent_checkpoint_steps=10,
    num_evaluations=NUM_EVALUATION_MARKS,
)
MARKS = sorted({max(1, round(k * 24 / 20)) for k in range(1, 21)})


class Batches:
    """Random batches that only depend on the step; `before` is called with each step first."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self.before = before

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, TokenBatch]]:
        for step in range(start, stop):
            self.before(step)
            rng = np.random.default_rng(step)
            shape = (RUN.batch_sequences, CONFIG.sequence_length)
            tokens = rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
            segments = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
            yield step, TokenBatch(tokens, segments, label_weights(segments))


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self, last: int = 0) -> None:
        self.told: list[tuple] = []
        self.last = last

    def last_attempt(self, run_id: str) -> int:
        return self.last

    def attempt_started(self, run_id: str, ordinal: int, start: int, restored: str) -> None:
        self.told.append(("start", ordinal, start, restored))

    def attempt_ended(self, run_id: str, ordinal: int, completed: int, reason: str) -> None:
        self.told.append(("end", ordinal, completed, reason))

    def event(self, run_id: str, kind: str, completed: int, text: str) -> None:
        self.told.append((kind, completed, text))

    def checkpoint_saved(self, run_id: str, saved: Any) -> None:
        self.told.append(("checkpoint", saved.step))

    def of_kind(self, kind: str) -> list[tuple]:
        return [note[1:] for note in self.told if note[0] == kind]


def heldout_rows() -> SimpleNamespace:
    """Two domains of three rows, in the form of an evaluation set."""
    rng = np.random.default_rng(99)
    tokens = rng.integers(0, CONFIG.vocab_size, (6, CONFIG.sequence_length)).astype(np.int32)
    segments = np.zeros_like(tokens)
    weights = label_weights(segments)
    rows = SimpleNamespace(
        tokens=tokens,
        segments=segments,
        weights=weights,
        text_weights=weights,
        domain=np.repeat([0, 1], 3),
    )
    return SimpleNamespace(
        all_rows=lambda: rows,
        domains=["a", "b"],
        num_targets=dict.fromkeys("ab", int(weights[:3].sum())),
        target_bytes=dict.fromkeys("ab", 100),
        sequence_length=CONFIG.sequence_length,
    )


@pytest.fixture(scope="module")
def evaluator() -> HeldOutEvaluator:
    return HeldOutEvaluator(heldout_rows(), CONFIG, batch_sequences=4, compute_dtype="float32")


@pytest.fixture(scope="module")
def compiled_step():
    return make_train_step(RUN, group_table(RUN), "float32")


@pytest.fixture
def train(evaluator, compiled_step, monkeypatch):
    """Trains in a folder with one compiled update for all tests, which differ in rates only."""
    monkeypatch.setattr(loop_module, "make_train_step", lambda *_: compiled_step)

    def call(
        folder: Path,
        run: RunSettings = RUN,
        data: Batches | None = None,
        notes: Notes | None = None,
        evaluate: Any = None,
        identity: dict[str, str] = IDENTITY,
    ) -> Outcome:
        return TrainingLoop(
            run,
            folder,
            data or Batches(),
            evaluate or evaluator,
            notes or Notes(),
            lambda progress: None,
            identity,
        )()

    return call


@pytest.fixture(scope="module")
def whole(evaluator, compiled_step, tmp_path_factory) -> tuple[Outcome, str]:
    """Outcome and metrics of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "make_train_step", lambda *_: compiled_step)
        loop = TrainingLoop(
            RUN, folder, Batches(), evaluator, Notes(), lambda progress: None, IDENTITY
        )
        outcome = loop()
    return outcome, metrics_digest(folder)


def check_equal(folder: Path, outcome: Outcome, whole: tuple[Outcome, str]) -> None:
    expected, digest = whole
    assert outcome.content_digest == expected.content_digest
    assert outcome.evaluation == expected.evaluation
    assert metrics_digest(folder) == digest


@pytest.mark.parametrize(
    ("step", "number"), [(0, signal.SIGINT), (6, signal.SIGTERM), (22, signal.SIGINT)]
)
def test_run_stopped_by_a_signal_resumes_to_the_bit(step, number, train, whole, tmp_path):
    def send(at: int) -> None:
        if at == step:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, data=Batches(send), notes=notes)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert notes.of_kind("end") == [(1, step + 1, "interrupted")]
    outcome = train(tmp_path, notes=notes)
    assert outcome.resumed
    assert notes.of_kind("start")[1][:2] == (2, step + 1)
    check_equal(tmp_path, outcome, whole)


@pytest.mark.parametrize("step", [3, 10, 17])
def test_run_that_broke_resumes_from_its_last_save_to_the_bit(step, train, whole, tmp_path):
    def fail(at: int) -> None:
        if at == step:
            raise PortolanError("the data broke")

    notes = Notes()
    with pytest.raises(PortolanError, match="the data broke"):
        train(tmp_path, data=Batches(fail), notes=notes)
    assert notes.of_kind("end") == [(1, step, "the data broke")]
    check_equal(tmp_path, train(tmp_path, notes=notes), whole)
    restored = notes.of_kind("start")[1]
    assert restored[:2] == (2, step // 10 * 10)
    assert (restored[2] == "fresh") == (step < 10)


def test_second_signal_stops_at_once(train, tmp_path):
    def send_twice(at: int) -> None:
        if at == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, data=Batches(send_twice), notes=notes)
    assert notes.of_kind("end") == [(1, 5, "interrupted")]
    assert CheckpointStore(tmp_path).latest() is None


def test_marks_and_logged_rows(train, tmp_path):
    train(tmp_path)
    table = read_metrics(tmp_path)
    rows: dict[str, list[int]] = {}
    for row, key in table.select("row", "key").iter_rows():
        rows.setdefault(key, []).append(row)
    assert [row + 1 for row in rows["eval_dropless/heldout/macro_loss"]] == MARKS
    assert rows["train/loss"] == rows["norm/gradient/global"] == list(range(RUN.steps))
    sparse = [key for key in rows if key.startswith(("norm/parameters/", "router/"))]
    assert len(sparse) > 20
    for key in sparse:
        assert rows[key] == [0, 10, 20, RUN.steps - 1]
    rates = table.filter(table["key"].cast(str) == "rate/hyperball")["value"].to_list()
    assert max(rates) == np.float32(PEAK.hyperball)
    assert rates[0] < rates[3] > rates[-1]


def test_permanent_saves_are_recorded_and_temporary_ones_pruned(train, tmp_path):
    notes = Notes()
    run = dataclasses.replace(RUN, temporary_checkpoint_seconds=1e-9)
    outcome = train(tmp_path, run, notes=notes)
    assert notes.of_kind("checkpoint") == [(10,), (20,), (24,)]
    saved = CheckpointStore(tmp_path).list_saved()
    assert [s.step for s in saved if s.kind == "permanent"] == [24, 20, 10]
    assert [s.step for s in saved if s.kind == "temporary"] == [23, 22]
    assert saved[0].content_digest == outcome.content_digest
    assert saved[0].metadata["completed"] == 24
    assert saved[0].metadata["group_table_digest"]


def test_finished_run_is_not_trained_again(train, tmp_path):
    def refuse(step: int) -> None:
        raise AssertionError(step)

    outcome = train(tmp_path)
    notes = Notes()
    assert train(tmp_path, data=Batches(refuse), notes=notes) == outcome
    assert notes.told == []


def test_failed_save_is_reported_and_training_goes_on(train, whole, tmp_path, monkeypatch, capsys):
    save = CheckpointStore.save

    def fail_once(self, state, step, **options):
        if step == 10:
            raise StorageError("no room for step 10", remedy="free some")
        return save(self, state, step, **options)

    monkeypatch.setattr(CheckpointStore, "save", fail_once)
    check_equal(tmp_path, train(tmp_path), whole)
    assert "save after 10 updates failed, training goes on" in capsys.readouterr().err


def test_update_that_is_not_finite_saves_the_state_before_it(train, tmp_path):
    """The state that the failed update would have changed is kept, bit for bit."""
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(stopped, data=Batches(lambda at: os.kill(os.getpid(), 2) if at == 4 else None))
    before = CheckpointStore(stopped).latest()
    assert before is not None

    class Poisoned(Batches):
        def batches(self, start, stop):
            for step, batch in super().batches(start, stop):
                weights = batch.weights * (math.nan if step == 5 else 1)
                yield step, batch._replace(weights=weights)

    notes = Notes()
    with pytest.raises(TrainingDiverged, match=r"loss of update 6 .* saved as step 5") as error:
        train(tmp_path / "run", data=Poisoned(), notes=notes)
    assert error.value.exit_code == 7
    saved = CheckpointStore(tmp_path / "run").latest()
    assert saved is not None
    assert (saved.step, saved.content_digest) == (5, before.content_digest)
    assert any("is not finite" in text for _, text in notes.of_kind("incident"))
    assert notes.of_kind("end")[0][1] == 5


def test_evaluation_that_is_not_finite_stops_with_a_saved_state(train, evaluator, tmp_path):
    class Broken:
        lower = staticmethod(evaluator.lower)

        def __call__(self, params, beta):
            return evaluator(params, beta) | {"eval_dropless/heldout/macro_loss": math.nan}

    with pytest.raises(TrainingDiverged, match=r"evaluation after update 1 .* saved as step 1"):
        train(tmp_path, evaluate=Broken())
    saved = CheckpointStore(tmp_path).latest()
    assert saved is not None
    assert (saved.step, saved.metadata["last_evaluation"]) == (1, {})


def test_constrained_norm_that_moved_stops_without_saving(train, tmp_path, monkeypatch):
    drifts = {"norm/drift/head/proj": 1.0}
    monkeypatch.setattr(loop_module, "_drifts", lambda metrics: drifts)
    with pytest.raises(TrainingDiverged, match="nothing is saved"):
        train(tmp_path)
    assert CheckpointStore(tmp_path).latest() is None


def test_checkpoint_of_another_recipe_is_refused(train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, data=Batches(lambda at: os.kill(os.getpid(), 2) if at == 4 else None))
    with pytest.raises(ResumeRefused, match="config_digest"):
        train(tmp_path, identity=IDENTITY | {"config_digest": "e" * 64})
    assert train(tmp_path).completed == RUN.steps


def test_attempt_numbers_go_on_where_the_record_stopped(train, tmp_path):
    notes = Notes(last=3)
    assert train(tmp_path, notes=notes).resumed
    assert notes.of_kind("start") == [(4, 0, "fresh")]
    assert notes.of_kind("end") == [(4, 24, "finished")]


def test_run_folder_is_locked_while_it_is_trained(train, tmp_path):
    with exclusive(tmp_path), pytest.raises(PortolanError, match="another process is training"):
        train(tmp_path)
