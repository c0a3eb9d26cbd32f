"""Verdicts: bands, items and rules joined; a void forecast shows no difference."""

import dataclasses
import json

import pytest
from tests.health.runs import damaged, evidence

from portolan.console import console
from portolan.health.monitor import Monitor
from portolan.health.rules import Settings
from portolan.health.signals import Signal
from portolan.health.status import EXIT_CODES, Evaluation, Observed, assess
from portolan.pipeline.watch_view import print_line, render


@pytest.fixture(scope="module")
def clean():
    return evidence()


def evaluation(band, *, gate="match", value=2.45, completed=6000):
    known = {"band": band, "median": 2.40, "low_90": 2.37, "high_90": 2.43} if band else {}
    return Evaluation(completed, completed / 6000, value, gate, **known)


def alarms(rule):
    signals = {
        "page": [Signal(0.0, "coordinator/live", 2)],
        "notify": [Signal(float(i), "forecast/outside_95", 1, i) for i in range(3)],
        "record": [Signal(float(n), "attempt/start", {"ordinal": n}) for n in (1, 2)],
    }[rule]  # fmt: skip
    return Monitor(Settings()).run(signals)


@pytest.mark.parametrize(
    ("bands", "rule", "expected"),
    [
        (["green"], None, "clear"),
        (["normal"], None, "clear"),
        (["normal"], "record", "clear"),
        (["amber"], None, "watch"),
        (["amber", "green"], None, "clear"),
        (["green"], "notify", "watch"),
        (["red"], None, "off course"),
        (["green"], "page", "off course"),
        (["amber"], "page", "off course"),
        ([""], None, "no verdict"),
        ([], None, "no verdict"),
        ([], "notify", "watch"),
    ],
)
def test_verdict(clean, bands, rule, expected):
    seen = [evaluation(band, completed=300 * (i + 1)) for i, band in enumerate(bands)]
    status = assess(clean, Observed("training", seen, alarms(rule) if rule else ()))
    assert status.verdict == expected
    assert status.exit_code == EXIT_CODES[expected]
    assert bool(status.reasons) == (expected in ("watch", "off course") or rule == "record")


def test_what_was_red_before_a_change_is_not_the_present(clean):
    seen = [evaluation("red", completed=300), evaluation("", gate="mismatch", completed=600)]
    assert assess(clean, Observed("training", seen)).verdict == "no verdict"


def test_a_failed_item_sets_the_verdict(clean):
    mild = damaged(clean, "throughput/tokens_per_second", lambda f, v: v * (1 - 0.4 * (f > 0.9)))
    grave = damaged(clean, "rate/hyperball", lambda f, v: v * (1 + 0.01 * (f > 0.9)))
    seen = [evaluation("green")]
    assert assess(mild, Observed("training", seen)).verdict == "watch"
    status = assess(grave, Observed("training", seen))
    assert status.verdict == "off course"
    assert "item 10" in status.reasons[0].text and status.reasons[0].advice


def test_both_sides_are_told_apart(clean):
    high = assess(clean, Observed("training", [evaluation("red", value=2.5)]))
    low = assess(clean, Observed("training", [evaluation("red", value=2.3)]))
    assert "above the median" in high.reasons[0].text
    assert "below the median" in low.reasons[0].text
    assert "contamination" in low.reasons[0].advice
    assert "contamination" not in high.reasons[0].advice


def shown(status):
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


@pytest.mark.parametrize(("gate", "word"), [("mismatch", "void"), ("unverified", "unverified")])
def test_no_difference_without_the_word(clean, gate, word, capsys):
    """A forecast that does not apply: its median is known and still nothing is compared."""
    item = dataclasses.replace(evaluation("green", value=2.451), gate=gate)
    assert item.residual is None
    status = assess(clean, Observed("training", [item], forecast=f"abc {word}"))
    assert status.verdict == "no verdict"
    print_line(status)
    line = capsys.readouterr().out
    for text in (shown(status), line, json.dumps(status.to_json())):
        assert word in text
        assert "0.051" not in text and "2.40" not in text
    assert "residual" not in line


def test_json_and_text_hold_the_whole_status(clean):
    status = assess(clean, Observed("finished", [evaluation("green")], alarms("record")))
    content = json.loads(json.dumps(status.to_json(), allow_nan=False))
    assert content["exit_code"] == 0 and len(content["checklist"]) == 12
    assert {row["signal"] for row in content["shapes"]} >= {"gradient norm", "embedding norm"}
    assert content["alarms"][0]["rule"] == "H15"
    assert "largest at 25%" in content["gradient_peak"]
    text = shown(status)
    for part in ("clear", "+0.0500", "gradient norm", "d1536", "first 3 %"):
        assert part in text
