import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.record.grade import Witness, read_witnesses, registration_grade, write_witness
from portolan.record.lineage import (
    LineageError,
    check_spans,
    completed_of,
    redone_steps,
    row_of,
    tracker_step_of,
    valid_intervals,
)
from portolan.record.lineage_view import RunSpan, read_lineages, view_lineage
from portolan.record.schema import SchemaError
from portolan.record.status import Signals, derive_status


def test_replayed_attempts():
    spans = [(0, 105), (100, 250), (200, 260), (150, 400)]
    intervals = valid_intervals(spans)
    assert [(i.start, i.end) for i in intervals if i.num_rows] == [(0, 100), (100, 150), (150, 400)]
    assert intervals[2].num_rows == 0
    assert sum(end - start for start, end in spans) == 565
    assert sum(interval.num_rows for interval in intervals) == 400
    assert redone_steps(spans) == [0, 5, 50, 110]
    check_spans(spans)


def test_public_lineage():
    """Production forks of the public 535B run (marin #8435), each run past its hand-over."""
    forks = [0, 58_014, 81_716, 108_000, 108_778, 121_638, 146_139]
    ends = [fork + 200 for fork in forks[1:]] + [214_914]
    lengths = [i.num_rows for i in valid_intervals(list(zip(forks, ends, strict=True)))]
    assert lengths == [58_014, 23_702, 26_284, 778, 12_860, 24_501, 68_775]
    assert sum(lengths) == 214_914


def test_trials_and_rolled_back_runs_never_enter_the_lineage():
    """The public lineage again, with its two trials: one rolled back, one kept beside."""
    forks = [0, 58_014, 81_716, 108_000, 108_778, 121_638, 146_139]
    ends = [*(fork + 200 for fork in forks[1:]), 214_914]
    runs = [
        RunSpan(f"step{fork}", "production", fork, end)
        for fork, end in zip(forks, ends, strict=True)
    ]
    trials = [
        RunSpan("first", "rolled_back", 54_000, 54_072),
        RunSpan("second", "trial", 81_716, 81_800),
    ]
    view = view_lineage("hero", [*trials, *runs[::-1]])
    assert [i.num_rows for i in view.intervals] == [
        58_014, 23_702, 26_284, 778, 12_860, 24_501, 68_775,
    ]  # fmt: skip
    assert view.num_rows == 214_914 and view.excluded == tuple(trials)
    with pytest.raises(LineageError, match="log_gap"):
        view_lineage("hero", [*runs, RunSpan("late", "production", 300_000, 300_001)])


def test_lineage_of_a_journal_with_replays_and_a_kill(journal, bodies):
    """Golden A as attempts; the third was killed, so its successor shows how far it came."""
    journal.append("run", bodies["run"])
    spans = [(0, 105), (100, 250), (200, None), (150, 400)]
    for ordinal, (start, end) in enumerate(spans, 1):
        steps = {"from_completed": start} | ({} if end is None else {"to_completed": end})
        restored = "fresh" if start == 0 else f"step-{start}"
        body = {**bodies["attempt"], "ordinal": ordinal, "restored_from": restored, **steps}
        journal.append("attempt", body)
    (view,) = read_lineages(journal.records())
    (run,) = view.runs
    assert run.attempts == ((0, 105), (100, 250), (200, 200), (150, 400))
    assert (view.num_rows, run.completed, view.num_redone) == (400, 400, 105)
    backwards = {**bodies["attempt"], "ordinal": 5, "from_completed": 9, "to_completed": 8}
    with pytest.raises(SchemaError, match="lies before"):
        journal.append("attempt", backwards)


@given(st.data())
def test_intervals_tile_whatever_is_restored(data):
    spans = [(0, data.draw(st.integers(1, 50)))]
    for _ in range(data.draw(st.integers(0, 6))):
        tops = [i for i in valid_intervals(spans) if i.num_rows]
        chosen = data.draw(st.sampled_from(tops))
        start = data.draw(st.integers(chosen.start + 1, chosen.end))
        spans.append((start, start + data.draw(st.integers(0, 50))))
        check_spans(spans)
    rows = [row for i in valid_intervals(spans) for row in range(i.start, i.end)]
    assert rows == list(range(len(rows)))


def test_impossible_starts():
    with pytest.raises(LineageError, match="log_gap"):
        check_spans([(0, 100), (120, 200)])
    check_spans([(0, 100), (120, 200)], gaps=[(100, 120)])
    check_spans([(0, 100), (0, 50)])
    with pytest.raises(LineageError):
        check_spans([(0, 105), (100, 250), (103, 150), (200, 250)])
    with pytest.raises(LineageError):
        check_spans([(10, 5)])


def test_clocks():
    assert row_of(121_638) == 121_637 and completed_of(155_999) == 156_000
    assert tracker_step_of(121_637, {121_637: 121_637}) == 121_637
    with pytest.raises(LineageError, match="cannot be computed"):
        tracker_step_of(5, {4: 4})


@pytest.mark.parametrize(
    ("mark", "step", "checkpoint", "row", "exit_success", "error", "word", "disputed"),
    [
        (1, 1, 1, 1, True, 0, "succeeded", False),
        (0, 0, 0, 0, True, 1, "failed", True),
        (0, 1, 1, 1, True, 0, "failed", True),
        (1, 1, 0, 1, True, 0, "failed", True),
        (0, 0, 0, 0, False, 1, "failed", False),
        (None, None, None, None, None, None, "unknown", False),
        (None, None, 1, None, True, None, "unknown", False),
        (1, 1, 1, 1, False, 0, "succeeded", True),
    ],
)
def test_status_table(mark, step, checkpoint, row, exit_success, error, word, disputed):
    values = [None if v is None else bool(v) for v in (mark, step, checkpoint, row)]
    signals = Signals(*values, exit_success, None if error is None else bool(error))
    status = derive_status(signals)
    assert (status.word, status.disputed) == (word, disputed)
    assert ("missing_artifact" in status.reasons) == (checkpoint == 0)


def test_status_of_live_and_cancelled_attempts():
    assert derive_status(Signals(False, False, False, None, None, None, fresh=True)).word == (
        "running"
    )
    ended = Signals(False, False, False, False, False, False, cancelled=True)
    assert derive_status(ended).word == "cancelled"
    unreadable = Signals(None, None, None, None, False, None)
    assert derive_status(unreadable).word == "unknown"


@pytest.fixture
def ordered(journal, bodies):
    """Records of a journal in the given order of types."""

    def build(*types):
        ids = {name: journal.append(name, bodies[name]) for name in types}
        return list(journal.records()), ids["registration"]

    return build


def test_registration_grades(ordered):
    records, identity = ordered("registration", "run", "attempt")
    assert registration_grade(records, identity) == "chained"
    own = next(record for record in records if record.id == identity)
    early = Witness(own.seq, "tag", "2026-01-01T00:00:00.000Z", own.line_hash)
    late = {"target": "2026-01-02T00:00:00.000Z"}
    assert registration_grade(records, identity, witnesses=[early]) == "witnessed"
    graded = registration_grade(records, identity, witnesses=[early], external_traces=late)
    assert graded == "witnessed"
    before = {"target": "2025-12-31T00:00:00.000Z"}
    graded = registration_grade(records, identity, witnesses=[early], external_traces=before)
    assert graded == "chained"
    foreign = Witness(own.seq, "tag", early.time, "0" * 64)
    assert registration_grade(records, identity, witnesses=[foreign]) == "chained"


def test_registration_after_the_attempt_is_retrospective(ordered):
    records, identity = ordered("run", "attempt", "registration")
    own = records[-1]
    witness = Witness(own.seq, "tag", "2026-01-01T00:00:00.000Z", own.line_hash)
    traces = {"target": "2026-01-02T00:00:00.000Z"}
    graded = registration_grade(records, identity, witnesses=[witness], external_traces=traces)
    assert graded == "retrospective"


def test_witness_receipts(tmp_path):
    witness = Witness(3, "tag", "2026-01-01T00:00:00.000Z", "0" * 64)
    write_witness(tmp_path, witness)
    assert read_witnesses(tmp_path) == [witness]
    with pytest.raises(ValueError):
        write_witness(tmp_path, Witness(3, "tag", "2026-01-01", "0" * 64))
