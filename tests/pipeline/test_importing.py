"""Imports on the command line: files, records and a page, all verified."""

import json
from pathlib import Path

import polars as pl
import pytest
from tests.pipeline.tools import Cli, call_main

from portolan.record.chain import ChainReader
from portolan.record.lineage_view import read_lineages
from portolan.record.verify import verify_project

READERS = {".parquet": pl.read_parquet, ".csv": pl.read_csv, ".json": pl.read_ndjson}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return lambda *arguments: call_main(monkeypatch, capsys, *arguments)


def records(root: Path, kind: str) -> list:
    with (root / "record" / "journal.jsonl").open("rb") as file:
        return [record for record in ChainReader().read(file) if record.type == kind]


def table(path: Path, rows: range) -> Path:
    path.write_text("step,loss\n" + "".join(f"{row},{10 - row / 100}\n" for row in rows))
    return path


def test_a_stitched_lineage(cli: Cli, tmp_path: Path) -> None:
    """Two runs of one lineage and a trial: the trial never counts, the child replaces the end."""
    first = table(tmp_path / "first.csv", range(100))
    second = table(tmp_path / "second.csv", range(80, 150))
    root = ("-C", str(tmp_path / "audit"))
    assert cli(*root, "import", "csv", str(first), "--lineage", "theirs").code == 0
    fork = ("--lineage", "theirs", "--parent", "first", "--fork-completed", "80")
    trial = ("--run-id", "try", "--role", "trial")
    assert cli(*root, "import", "csv", str(second), *fork, *trial).code == 0
    basis = ("--basis", "loss=ce.train.nats")
    result = cli(*root, "import", "csv", str(second), *fork, *basis)
    assert result.code == 0 and "updates 80 to 150" in result.out
    (view,) = read_lineages(iter(_all(tmp_path / "audit")))
    spans = zip(view.runs, view.intervals, strict=True)
    assert [(run.name, i.start, i.end) for run, i in spans] == [
        ("first", 0, 80),
        ("second", 80, 150),
    ]
    assert [run.name for run in view.excluded] == ["try"]
    (observation,) = records(tmp_path / "audit", "observation")
    assert observation.body["num_points"] == 70
    report = verify_project(tmp_path / "audit")
    assert report.verdict.word == "ok" and not report.problems
    for suffix, read in READERS.items():
        file = tmp_path / f"curve{suffix}"
        assert cli(*root, "series", "theirs", file, "--key", "loss").code == 0
        frame = read(file)
        assert frame["row"].to_list() == list(range(150))
        assert frame["value"].to_list() == [10 - row / 100 for row in range(150)]
        assert frame["run"].to_list() == ["first"] * 80 + ["second"] * 70
    wrong = cli(*root, "series", "theirs", tmp_path / "x.xls")
    assert wrong.code == 2 and "x.xls is unknown" in wrong.err
    wrong = cli(*root, "series", "ours", tmp_path / "x.csv")
    assert wrong.code == 2 and "first, second, try, theirs" in wrong.err


def _all(root: Path) -> list:
    with (root / "record" / "journal.jsonl").open("rb") as file:
        return list(ChainReader().read(file))


def test_a_changed_snapshot_is_found(cli: Cli, tmp_path: Path) -> None:
    file = table(tmp_path / "x.csv", range(5))
    assert cli("-C", str(tmp_path / "p"), "import", "csv", str(file)).code == 0
    evidence = records(tmp_path / "p", "evidence")[-1]
    digest = evidence.body["snapshot_digest"]
    blob = tmp_path / "p" / "record" / "blobs" / "sha256" / digest[:2] / digest
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert digest in str(verify_project(tmp_path / "p").problems)


def test_a_changed_metric_is_found(cli: Cli, tmp_path: Path) -> None:
    file = table(tmp_path / "x.csv", range(5))
    assert cli("-C", str(tmp_path / "p"), "import", "csv", str(file)).code == 0
    (segment,) = (tmp_path / "p" / "runs" / "x" / "metrics").glob("*.parquet")
    segment.write_bytes(segment.read_bytes()[:-1] + b"?")
    assert segment.name in str(verify_project(tmp_path / "p").problems)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xml", "x"), "cannot import from 'xml'"),
        (("csv", "missing.csv"), "no file missing.csv"),
        (("csv", "FILE", "--clock", "seconds"), "clock 'seconds' is unknown"),
        (("csv", "FILE", "--basis", "loss"), "is not KEY=BASIS"),
        (("csv", "FILE", "--basis", "loss=nonsense"), "nonsense"),
        (("csv", "FILE", "--role", "hero"), "role 'hero' is unknown"),
        (("csv", "FILE", "--parent", "a"), "needs both --parent and --fork-completed"),
    ],
)
def test_wrong_use_is_named(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = str(table(tmp_path / "f.csv", range(3)))
    given = [file if word == "FILE" else word for word in arguments]
    result = cli("-C", str(tmp_path / "p"), "import", *given)
    assert result.code == 2 and message in result.err
    assert not (tmp_path / "p" / "runs").exists()


def test_the_note_says_what_was_read(cli: Cli, tmp_path: Path) -> None:
    file = table(tmp_path / "x.csv", range(5))
    assert cli("-C", str(tmp_path / "p"), "import", "csv", str(file)).code == 0
    note = json.loads((tmp_path / "p" / "runs" / "x" / "import.json").read_text())
    assert (note["locator"], note["completeness"], note["clock"]) == ("file:x.csv", "full", "row")
