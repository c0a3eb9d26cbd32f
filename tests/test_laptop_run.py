"""What docs/laptop-run.md publishes is what the journal beside it holds."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from portolan.record.journal import Journal
from portolan.record.verify import verify_journal

DOCS = Path(__file__).parent.parent / "docs"
FINAL = "1.00"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The published record, unpacked as the page says."""
    folder = tmp_path_factory.mktemp("laptop") / "record"
    (folder / "heads").mkdir(parents=True)
    packed = (DOCS / "laptop" / "journal.jsonl.gz").read_bytes()
    (folder / "journal.jsonl").write_bytes(gzip.decompress(packed))
    shutil.copy(DOCS / "laptop" / "213.dsse.json", folder / "heads")
    return folder


@pytest.fixture(scope="module")
def records(folder):
    return list(Journal.open(folder).records())


@pytest.fixture(scope="module")
def score():
    return json.loads((DOCS / "laptop" / "score.json").read_text())


def test_chain_and_signature_hold_and_a_changed_digit_does_not(folder, tmp_path):
    assert str(verify_journal(folder)).startswith("ok(214, 812a52b6")
    copy = shutil.copytree(folder, tmp_path / "record")
    text = (copy / "journal.jsonl").read_text()
    assert '"0.5":"1.714559"' in text
    (copy / "journal.jsonl").write_text(text.replace('"0.5":"1.714559"', '"0.5":"2.164826"'))
    assert not str(verify_journal(copy)).startswith("ok")


def test_forecast_was_registered_before_the_target_began(records):
    order = {
        kind: next(r.seq for r in records if r.type == kind)
        for kind in ("forecast", "registration")
    }
    attempts = [r.seq for r in records if r.type == "attempt" and "target" in r.body["run"]]
    assert order["forecast"] < order["registration"] < min(attempts)


def test_score_follows_from_the_registered_quantiles(records, score):
    (forecast,) = [r for r in records if r.type == "forecast"]
    assert score["forecast"] == forecast.id
    assert not score["retrospective"]
    for mark in score["marks"]:
        quantiles = forecast.body["quantiles"][score["metric"]][mark["mark"]]
        low, high = float(quantiles["0.025"]), float(quantiles["0.975"])
        assert mark["inside_95"] == (low <= float(mark["outcome"]) <= high)
    final = forecast.body["quantiles"][score["metric"]][FINAL]
    error = float(final["0.5"]) - float(score["final"]["outcome"])
    assert error == pytest.approx(float(score["final"]["error"]), abs=1e-9)


def test_page_states_these_numbers(records, score):
    page = (DOCS / "laptop-run.md").read_text()
    (forecast,) = [r for r in records if r.type == "forecast"]
    rows = {
        match[1]: [float(x) for x in re.findall(r"\d+\.\d+", match[2])]
        for match in re.finditer(r"^\| (\d+) % \|(.*)$", page, re.MULTILINE)
    }
    assert len(rows) == 10
    for mark in score["marks"]:
        percent = f"{round(100 * float(mark['mark']))}"
        if percent not in rows:
            continue
        quantiles = forecast.body["quantiles"][score["metric"]][mark["mark"]]
        expected = [
            float(mark["median"]),
            float(quantiles["0.025"]),
            float(quantiles["0.975"]),
            float(mark["outcome"]),
            100 * float(mark["pit"]),
            float(score["baselines"]["B0"]["values"][mark["mark"]]),
        ]
        percentile = rows[percent].pop(4)
        assert percentile == pytest.approx(expected.pop(4), abs=0.051)
        assert rows[percent] == pytest.approx(expected, abs=5.1e-5)
    held = {
        level: sum(mark[f"inside_{level}"] for mark in score["marks"]) for level in (50, 80, 95)
    }
    assert held == {50: 5, 80: 14, 95: 20}
    assert "at all 20 marks, the 80 % bands at 14, the 50 % bands at 5" in page
