"""Rows of another length, another horizon: exact on both sides, and refused where they must be."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.train.test_loop import CONFIG, IDENTITY, PEAK, RUN, Notes, heldout_rows

from portolan.data.loader import TokenBatch, label_weights
from portolan.errors import PortolanError, ResumeRefused, UsageError
from portolan.evals.perplexity import HeldOutEvaluator
from portolan.model import transformer
from portolan.optim.schedule import HorizonEvent
from portolan.track.tracker import metrics_digest, read_metrics
from portolan.train.checkpoint import CheckpointStore
from portolan.train.interface import Outcome
from portolan.train.loop import TrainingLoop
from portolan.train.state import RunSettings, Stage

SWITCH = 12
LONG = dataclasses.replace(CONFIG, sequence_length=32, qk_multiplier=1.39)
EXTENDED = dataclasses.replace(RUN, stages=(Stage(SWITCH, LONG, 2),))
RETIMED = dataclasses.replace(RUN, horizon_events=(HorizonEvent(SWITCH, 18),))
MACRO = "eval_dropless/heldout/macro_loss"


class Batches:
    """Random batches of the shape of their step; `before` is called with each step first."""

    def __init__(self, run: RunSettings, before: Callable[[int], None]) -> None:
        self.run, self.before = run, before

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, TokenBatch]]:
        for step in range(start, stop):
            self.before(step)
            rng = np.random.default_rng(step)
            stage = self.run.at(step)
            shape = (stage.batch_sequences, stage.config.sequence_length)
            tokens = rng.integers(0, CONFIG.vocab_size, shape).astype(np.int32)
            segments = np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32)
            yield step, TokenBatch(tokens, segments, label_weights(segments))


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "CPU_COMPILER_OPTIONS", {"xla_backend_optimization_level": 0})
        yield


@pytest.fixture(scope="module")
def evaluator(quick_programs) -> HeldOutEvaluator:
    return HeldOutEvaluator(heldout_rows(), CONFIG, batch_sequences=4, compute_dtype="float32")


class LongRows:
    """An evaluation of another packing, known by its key."""

    def __init__(self, evaluator: HeldOutEvaluator) -> None:
        self.lower = evaluator.lower

    def __call__(self, params, beta):
        return {"eval_dropless/heldout_at_32/macro_loss": 1.0}


@pytest.fixture(scope="module")
def train(evaluator):
    def call(
        folder: Path, run: RunSettings, before: Callable[[int], None] = lambda step: None
    ) -> Outcome:
        long = {32: LongRows(evaluator)}
        data = Batches(run, before)
        return TrainingLoop(
            run, folder, data, evaluator, Notes(), lambda progress: None, IDENTITY, long
        )()

    return call


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> dict[str, tuple[Outcome, Path]]:
    """Runs that nothing disturbs."""
    done = {}
    for name, run in (("extended", EXTENDED), ("retimed", RETIMED), ("plain", RUN)):
        folder = tmp_path_factory.mktemp(name)
        done[name] = train(folder, run), folder
    return done


def values(folder: Path, key: str) -> dict[int, float]:
    table = read_metrics(folder, keys=[key])
    return dict(zip(table["completed"], table["value"], strict=True))


def stop_after(completed: int) -> Callable[[int], None]:
    """Asks the loop to save and stop once this many updates are done."""

    def send(step: int) -> None:
        if step == completed - 1:
            os.kill(os.getpid(), signal.SIGINT)

    return send


@pytest.mark.slow
@pytest.mark.parametrize("completed", [SWITCH - 1, SWITCH, SWITCH + 1])
@pytest.mark.parametrize(("name", "run"), [("extended", EXTENDED), ("retimed", RETIMED)])
def test_stopped_on_either_side_of_a_change_the_bytes_are_the_same(
    name, run, completed, train, whole, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, run, stop_after(completed))
    outcome = train(tmp_path, run)
    expected, folder = whole[name]
    assert outcome.content_digest == expected.content_digest
    assert metrics_digest(tmp_path) == metrics_digest(folder)


def test_broken_after_a_change_a_run_goes_through_it_again(train, whole, tmp_path):
    def fail(step: int) -> None:
        if step == SWITCH + 3:
            raise PortolanError("the machine went away")

    with pytest.raises(PortolanError, match="went away"):
        train(tmp_path, EXTENDED, fail)
    assert CheckpointStore(tmp_path).latest().step < SWITCH
    assert train(tmp_path, EXTENDED).content_digest == whole["extended"][0].content_digest


def test_switch_of_the_length_keeps_state_and_schedule_to_the_bit(train, whole, tmp_path):
    digests = set()
    for name, run in (("extended", EXTENDED), ("plain", RUN)):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / name, run, stop_after(SWITCH))
        digests.add(CheckpointStore(tmp_path / name).latest().content_digest)
    assert len(digests) == 1
    for key in ("rate/hyperball", "rate/adam", "rate/decay"):
        assert values(whole["extended"][1], key) == values(whole["plain"][1], key)
    assert whole["extended"][0].content_digest != whole["plain"][0].content_digest


def test_evaluation_keeps_its_packing_and_may_add_another(whole):
    extended, plain = whole["extended"][1], whole["plain"][1]
    before, after = values(extended, MACRO), values(plain, MACRO)
    assert set(before) == set(after)
    assert all(before[n] == after[n] for n in before if n <= SWITCH)
    long = values(extended, "eval_dropless/heldout_at_32/macro_loss")
    assert set(long) == {n for n in before if n > SWITCH}


def test_horizon_moves_rates_marks_and_end_but_nothing_behind_it(whole):
    folder, plain = whole["retimed"][1], whole["plain"][1]
    assert whole["retimed"][0].completed == 18
    rates, before = values(folder, "rate/hyperball"), values(plain, "rate/hyperball")
    assert all(rates[n] == before[n] for n in range(1, SWITCH + 2))
    start = 1 - 0.95 * (SWITCH - 3) / (24 - 3)
    for step in range(SWITCH, 18):
        factor = start + (0.05 - start) * (step - SWITCH) / (18 - SWITCH)
        assert rates[step + 1] == pytest.approx(PEAK.hyperball * factor, rel=1e-6)
    marks, old = set(values(folder, MACRO)), set(values(plain, MACRO))
    assert {n for n in marks if n <= SWITCH} == {n for n in old if n <= SWITCH}
    assert {n for n in marks if n > SWITCH} == {13, 14, 15, 16, 17, 18}, "multiples of 5 % of 18"


def test_checkpoint_goes_only_with_the_changes_it_was_trained_under(train, tmp_path):
    for completed, match in ((SWITCH + 1, "context"), (SWITCH, None)):
        folder = tmp_path / str(completed)
        with pytest.raises(KeyboardInterrupt):
            train(folder, EXTENDED, stop_after(completed))
        if match:
            with pytest.raises(ResumeRefused, match=rf"{match} from update {SWITCH} on"):
                train(folder, RUN)
        else:
            assert train(folder, RUN).completed == RUN.steps
    weights = dataclasses.replace(RUN, data_changes=((5, "a" * 64),))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "mixture", weights, stop_after(6))
    with pytest.raises(ResumeRefused, match="mixture from update 5 on"):
        train(tmp_path / "mixture", RUN)


def test_other_tokens_an_update_and_disorder_are_refused():
    with pytest.raises(UsageError, match=r"4 rows of 32 = 128 tokens, before 64"):
        dataclasses.replace(RUN, stages=(Stage(SWITCH, LONG, 4),))
    with pytest.raises(UsageError, match="out of order"):
        dataclasses.replace(RUN, stages=(Stage(9, LONG, 2), Stage(5, LONG, 2)))
