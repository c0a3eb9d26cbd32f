"""Every source gives the numbers that its own tool wrote; replays become attempts."""

import json
import math
import sqlite3
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.track.imports.wandb_server import ServedRun, serve

from portolan.errors import PortolanError, UsageError
from portolan.track.imports.source import HistorySource
from portolan.track.imports.store import STEP_KEY, Clock, Imported, import_history
from portolan.track.imports.tables import CsvFile, JsonFile
from portolan.track.imports.tensorboard import TensorBoardFolder
from portolan.track.imports.trackio import TrackioRun
from portolan.track.imports.wandb import WandbRun
from portolan.track.tracker import read_metrics, read_raw

ROW = Clock("step", "row")


def bring_in(
    source: HistorySource, folder: Path, clock: Clock = ROW, **options: bool
) -> tuple[Imported, bytes]:
    raw = bytearray()
    result = import_history(
        source, folder, clock, keep_raw=raw.extend, run_facts={"role": "imported"}, **options
    )
    return result, bytes(raw)


def curve(folder: Path, key: str) -> dict[int, float]:
    frame = read_metrics(folder, keys=[key])
    return dict(frame.select("row", "value").rows())


def wide(path: Path, header: str, *lines: str) -> CsvFile:
    path.write_text("\n".join([header, *lines]) + "\n")
    return CsvFile(path)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client keeps its files in the test's folder and asks nobody else."""
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


# ---------------------------------------------------------------- Weights & Biases


def history(count: int, gap: int = 1) -> list[dict]:
    return [{"_step": i * gap, "_timestamp": 1e9 + i, "loss": 5 / (i + 1)} for i in range(count)]


def test_full_history_of_wandb(client: None, tmp_path: Path) -> None:
    lines = history(25)
    lines[3] |= {"loss": "NaN", "note": "text", "histogram": {"_type": "histogram"}}
    run = ServedRun(lines, state="crashed")
    with serve(run) as url:
        source = WandbRun("https://wandb.example/lab/project/runs/abc", base_url=url)
        result, raw = bring_in(source, tmp_path / "runs" / "abc", Clock("_step", "tracker"))
    assert (result.completeness, result.num_lines, result.source.state) == ("full", 25, "crashed")
    assert result.source.config == {"lr": 0.5}
    assert dict(result.skipped) == {"note": 1, "histogram": 1}
    losses = curve(tmp_path / "runs" / "abc", "loss")
    assert math.isnan(losses.pop(3))
    assert losses == {i: 5 / (i + 1) for i in range(25) if i != 3}
    assert curve(tmp_path / "runs" / "abc", STEP_KEY) == {i: i for i in range(25)}
    assert [json.loads(line) for line in raw.splitlines()] == lines
    assert "RunFullHistory" not in {operation for operation, _ in run.seen}


def test_sampled_history_is_said_to_be_sampled(client: None, tmp_path: Path) -> None:
    with serve(ServedRun(history(100))) as url:
        source = WandbRun("lab/project/abc", samples=10, base_url=url)
        assert source.default_id == "abc-sampled"
        result, _ = bring_in(source, tmp_path / "runs" / "s", Clock("_step", "tracker"))
    assert result.completeness == "sampled 10 of 100"


def test_history_shorter_than_reported_is_truncated(client: None, tmp_path: Path) -> None:
    with serve(ServedRun(history(8), line_count=20)) as url:
        source = WandbRun("lab/project/abc", base_url=url)
        result, _ = bring_in(source, tmp_path / "runs" / "t", Clock("_step", "tracker"))
    assert result.completeness == "truncated"


def test_own_row_key_of_a_resumed_run(client: None, tmp_path: Path) -> None:
    """The tracker's counter only rises; the run's own counter goes back when it resumes."""
    rows = [0, 1, 2, 3, 2, 3, 4]
    lines = [{"_step": i, "row": row, "loss": 10.0 * i} for i, row in enumerate(rows)]
    with serve(ServedRun(lines)) as url:
        source = WandbRun("lab/project/abc", base_url=url)
        result, _ = bring_in(source, tmp_path / "runs" / "r", Clock("row", "row"))
    assert [(span.start, span.completed) for span in result.attempts] == [(0, 4), (2, 5)]
    assert curve(tmp_path / "runs" / "r", "loss") == {0: 0, 1: 10, 2: 40, 3: 50, 4: 60}
    assert curve(tmp_path / "runs" / "r", STEP_KEY) == {0: 0, 1: 1, 2: 4, 3: 5, 4: 6}


def test_unknown_run_and_bad_path_are_named(client: None) -> None:
    with pytest.raises(UsageError, match="'nonsense' names no"):
        WandbRun("nonsense")
    with serve(ServedRun([])) as url, pytest.raises(PortolanError, match="lab/project/other"):
        WandbRun("lab/project/other", base_url=url)


# ---------------------------------------------------------------- TensorBoard, trackio


def write_events(folder: Path, values: list[tuple[int, float]], time: float) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = folder / f"events.out.tfevents.{int(time)}.host"
    folder.mkdir(exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=time, file_version="brain.Event:2").SerializeToString())
        for step, value in values:
            item = Summary.Value(tag="loss", simple_value=value)
            event = Event(wall_time=time + step, step=step, summary=Summary(value=[item]))
            writer.write(event.SerializeToString())
        writer.flush()
    return path


def test_event_files_are_attempts(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_events(logs, [(i, 8.0 - i) for i in range(5)], 1000.0)
    torn = write_events(logs, [(i, 80.0 - i) for i in range(3, 8)], 2000.0)
    torn.write_bytes(torn.read_bytes()[:-7])
    result, _ = bring_in(TensorBoardFolder(logs), tmp_path / "runs" / "tb")
    assert [(span.start, span.completed) for span in result.attempts] == [(0, 5), (3, 7)]
    assert curve(tmp_path / "runs" / "tb", "loss") == {0: 8, 1: 7, 2: 6, 3: 77, 4: 76, 5: 75, 6: 74}
    assert len(read_raw(tmp_path / "runs" / "tb")) == 9
    with pytest.raises(UsageError, match="no event file"):
        TensorBoardFolder(tmp_path)


def test_trackio_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written with trackio's own storage, read without it."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    for step in range(4):
        SQLiteStorage.log("lab", "first", {"loss": 4.0 - step, "word": "x"}, step=step)
        SQLiteStorage.log("lab", "second", {"loss": 0.0}, step=step)
    file = next(tmp_path.glob("*.db"))
    with pytest.raises(UsageError, match="first, second"):
        TrackioRun(file)
    result, _ = bring_in(
        TrackioRun(file, "first"), tmp_path / "runs" / "x", Clock("step", "tracker")
    )
    assert result.completeness == "full"
    assert dict(result.skipped) == {"word": 4}
    assert curve(tmp_path / "runs" / "x", "loss") == {0: 4, 1: 3, 2: 2, 3: 1}


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(PortolanError, match=r"x\.db is no trackio file"):
        TrackioRun(path)
    sqlite3.connect(tmp_path / "empty.db").close()
    with pytest.raises(PortolanError, match="no such table"):
        TrackioRun(tmp_path / "empty.db")


# ---------------------------------------------------------------- plain files


def test_wide_and_long_csv_agree(tmp_path: Path) -> None:
    lines = [f"{i},{i + 0.5},{'' if i % 2 else i * 2}" for i in range(6)]
    bring_in(wide(tmp_path / "w.csv", "step,loss,eval", *lines), tmp_path / "runs" / "w")
    long = [f"{i},loss,{i + 0.5}" for i in range(6)] + [f"{i},eval,{i * 2}" for i in (0, 2, 4)]
    bring_in(wide(tmp_path / "l.csv", "step,key,value", *long), tmp_path / "runs" / "l")
    for key in ("loss", "eval"):
        assert curve(tmp_path / "runs" / "w", key) == curve(tmp_path / "runs" / "l", key)


def test_json_lines_and_array_agree(tmp_path: Path) -> None:
    items = [
        {"step": i, "train": {"loss": i / 3}, "time": "2026-01-01T00:00:00Z"} for i in range(4)
    ]
    (tmp_path / "a.json").write_text(json.dumps(items))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    for name in ("a.json", "b.jsonl"):
        folder = tmp_path / "runs" / name[0]
        bring_in(JsonFile(tmp_path / name), folder)
        frame = read_metrics(folder, keys=["train/loss"])
        assert frame["value"].to_list() == [i / 3 for i in range(4)]
        assert frame["time"].dt.epoch("ms").unique().to_list() == [1767225600000]


def test_completed_counts_updates_and_given_attempts_are_kept(tmp_path: Path) -> None:
    lines = ["1,1,9", "1,2,8", "1,3,7", "2,3,6", "2,4,5"]
    source = wide(tmp_path / "c.csv", "attempt,step,loss", *lines)
    result, _ = bring_in(source, tmp_path / "runs" / "c", Clock("step", "completed"))
    assert [(span.start, span.completed) for span in result.attempts] == [(0, 3), (2, 4)]
    assert curve(tmp_path / "runs" / "c", "loss") == {0: 9, 1: 8, 2: 6, 3: 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column 'step'"),
        ("step,loss\nx,y\n", "no number with a step"),
        ("step,loss\n1,2,3,4\n", "is no CSV table"),
        ("", "is no CSV table"),
    ],
)
def test_bad_tables_are_named_and_leave_nothing(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(PortolanError, match=message):
        bring_in(CsvFile(path), tmp_path / "runs" / "bad")
    assert not list((tmp_path / "runs").glob("*bad*"))


def test_a_run_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    source = wide(tmp_path / "x.csv", "step,loss", "0,1")
    bring_in(source, tmp_path / "runs" / "x")
    with pytest.raises(UsageError, match="exists already"):
        bring_in(source, tmp_path / "runs" / "x")
    bring_in(wide(tmp_path / "x.csv", "step,loss", "0,2"), tmp_path / "runs" / "x", replace=True)
    assert curve(tmp_path / "runs" / "x", "loss") == {0: 2}
    with pytest.raises(UsageError, match="no run id"):
        bring_in(source, tmp_path / "runs" / "..")


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6)
)
@hypothesis.settings(max_examples=40)
def test_replays_against_a_plain_rule(spans: list[tuple[int, int]]) -> None:
    """Attempts of given length and step back: the last value written for a row counts."""
    import tempfile

    rows, start = [], 0
    for length, back in spans:
        rows.extend(range(start, start + length))
        start = max(0, start + length - back)
    expected: dict[int, float] = {}
    for order, row in enumerate(rows):
        expected = {r: v for r, v in expected.items() if r < row} | {row: float(order)}
    with tempfile.TemporaryDirectory() as name:
        lines = [f"{row},{order}" for order, row in enumerate(rows)]
        source = wide(Path(name) / "h.csv", "step,loss", *lines)
        bring_in(source, Path(name) / "runs" / "h")
        assert curve(Path(name) / "runs" / "h", "loss") == expected
