"""Each rule just over and just under its limits; the monitor's clock; the trace format."""

import dataclasses
import math
from pathlib import Path

import pytest

from portolan.errors import UsageError
from portolan.health import detector
from portolan.health.checklist import ITEMS
from portolan.health.monitor import DETECTORS, Monitor
from portolan.health.rules import RULES, Settings, entropy_limit, evaluation_limit
from portolan.health.signals import Signal, from_metric, read_trace, write_trace

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
REGISTERED = {
    "gradient_norm_max": 2.0,
    "router_bias_max": 400.0,
    "tokens_per_second_min": 2.0e6,
    "mfu_min": 0.15,
}
SETTINGS = Settings(num_experts=384, registered=REGISTERED)
LIMITS = {rule_id: rule.limits for rule_id, rule in RULES.items()}


def fires(rule, signals, settings=SETTINGS):
    return rule in {alarm.rule.id for alarm in Monitor(settings).run(signals)}


def rows(values, *, step=15.0, name="train/cross_entropy", start=0.0, first=0):
    return [Signal(start + step * i, name, v, first + i) for i, v in enumerate(values)]


def clock(time):
    return Signal(time, "clock", 0)


def held(name, value, *, seconds=301.0, row=200, **more):
    """A value that stands for a time, repeated every ten seconds."""
    return [Signal(t, name, value, row, **more) for t in [*range(0, int(seconds), 10), seconds]]


def began(time=0.0, **more):
    return Signal(time, "attempt/start", {"ordinal": 1} | more)


def ended(time, **more):
    return Signal(time, "attempt/end", {"ordinal": 1, "status": "failed", "retries_left": 1} | more)


def no_step(minutes, *, trained):
    signals = [began(), *(rows([1.0], start=10.0) if trained else [])]
    start = signals[-1].time
    # Heartbeats go on, so that only the steps are missing.
    beats = [Signal(start + t, "phase", int(trained)) for t in range(60, int(minutes * 60), 60)]
    return [*signals, *beats, clock(start + minutes * 60)]


def spike(height, minutes=6.0):
    noise = [2.0 + 0.01 * (-1) ** i for i in range(200)]
    count = int(minutes * 60 / 15)
    return [began(), *rows([*noise, *[2.0 + height] * count]), clock(15.0 * (200 + count))]


def stale(name, seconds):
    beats = [Signal(t, "monitor/heartbeat", 1) for t in range(0, int(seconds) + 1, 60)]
    return sorted([Signal(0.0, name, 1), *beats, clock(seconds)], key=lambda s: s.time)


def speeds(values, name="throughput/tokens_per_second"):
    signals = rows([*[3.0e6] * 300, *values], step=15.0, name=name)
    return [began(), *signals, clock(signals[-1].time + 1)]


def failures(*completed, tasks=None, checkpoint_after=None):
    signals = [began()]
    for i, row in enumerate(completed):
        if i == checkpoint_after:
            signals.append(Signal(10.0 * i - 1, "checkpoint/marked", {"step": row}))
        task = tasks[i] if tasks else "0"
        signals.append(ended(10.0 * i, completed=row, task=task))
    return signals


def checkpoint_age(hours):
    count = int(hours * HOUR / 15)
    return [began(), *rows([2.0] * count, start=1.0), clock(1.0 + hours * HOUR + 1)]


def floors(writer, other=(250.0, 250.0, 250.0)):
    pairs = zip(writer, other, strict=True)
    signals = [
        Signal(HOUR * i, f"host/rss_floor/{kind}", value, source=kind)
        for i, pair in enumerate(pairs)
        for kind, value in zip(("writer", "other"), pair, strict=True)
    ]
    return [*signals, clock(3 * HOUR)]


def resumed(**check):
    return [Signal(1.0, "resume/check", {"loss": 2.0, "batch_equal": True} | check, 50)]


def samples(values, name, count):
    return [
        Signal(60.0 * i, name, value, source=f"rack-{j}")
        for i in range(count + 1)
        for j, value in enumerate(values)
    ]


def outside(count):
    return [Signal(float(i), "forecast/outside_95", 1, i) for i in range(count)]


def worse(rise):
    return [
        Signal(0.0, "evaluation", 2.2, 499, "eval/macro_loss"),
        Signal(HOUR, "evaluation", 2.2 + rise, 999, "eval/macro_loss"),
    ]


def verdict(clean):
    value = {"change": "c", "verdict": "accepted", "clean_steps": clean, "mttf_steps": 1500}
    return [Signal(0.0, "change/verdict", value)]


def skipped(count, minutes):
    return [Signal(minutes * MINUTE * i / max(1, count - 1), "steps/skipped", 1)
            for i in range(count)]  # fmt: skip


EPS = 1e-6
ENTROPY, NOISE_RISE = entropy_limit(384), evaluation_limit(0.004)
LOGS = [Signal(0.0, "logs/retrievable", {"ordinal": 0, "share": 1.0})]
# Rule: (just over, just under); several pairs test several clauses.
CASES = [
    ("H01", [began(), ended(9.0, retries_left=0)], [began(), ended(9.0, retries_left=1)]),
    ("H01", [began(), ended(9.0, status="succeeded", disputed=True)],
     [began(), ended(9.0, status="succeeded", retries_left=0)]),
    ("H02", no_step(16.1, trained=True), no_step(15.0, trained=True)),
    ("H02", no_step(46.0, trained=False), no_step(45.0, trained=False)),
    ("H03", [began(), clock(11 * MINUTE)], [began(), clock(10 * MINUTE)]),
    ("H04", stale("scheduler/state", 90 + 6 * MINUTE), stale("scheduler/state", 90 + 5 * MINUTE)),
    ("H04", stale("phase", HOUR + 6 * MINUTE), stale("phase", HOUR + 5 * MINUTE)),
    ("H04", [Signal(0.0, "monitor/heartbeat", 1), clock(180.0)],
     [Signal(0.0, "monitor/heartbeat", 1), clock(120.0)]),
    ("H05", spike(1.02), spike(0.98)),
    ("H05", spike(1.5, minutes=6), spike(1.5, minutes=3)),
    ("H06", rows([2.0] * 50 + [3.01] * 10), rows([2.0] * 50 + [2.99] * 10)),
    ("H06", rows([2.0] * 50 + [3.01] * 10), rows([2.0] * 50 + [3.01] * 9 + [2.0])),
    ("H07", held("norm/gradient/global", 2.0 + EPS), held("norm/gradient/global", 2.0)),
    ("H07", held("norm/gradient/global", 2.1, seconds=301), held("norm/gradient/global", 2.1,
                                                                seconds=299)),
    ("H08", rows([2.0, math.nan]), rows([2.0, 1e30])),
    ("H09", skipped(3, 15), skipped(3, 15.1)),
    ("H09", skipped(3, 1), skipped(2, 1)),
    ("H10", held("router/drop_fraction", 0.07 + EPS), held("router/drop_fraction", 0.07)),
    ("H10", held("router/drop_fraction", 0.2, row=100), held("router/drop_fraction", 0.2, row=99)),
    ("H11", held("router/entropy", ENTROPY - EPS), held("router/entropy", ENTROPY + EPS)),
    ("H12", held("router/bias_min", -400.1), held("router/bias_max", 400.0)),
    ("H13", speeds([2.24e6] * 40), speeds([2.26e6] * 40)),
    ("H13", speeds([2.0e6] * 31 + [3e6] * 29), speeds([2.0e6] * 29 + [3e6] * 31)),
    ("H13", speeds([0.149] * 40, "throughput/mfu"), speeds([2.26e6] * 40, "throughput/mfu")),
    ("H14", worse(NOISE_RISE + EPS), worse(NOISE_RISE - EPS)),
    ("H15", [began(), began(9.0, ordinal=2)], [began(), began(9.0, ordinal=1)]),
    ("H16", failures(100, 110), failures(100, 111)),
    ("H16", failures(100, 300, 500), failures(100, 300)),
    ("H16", failures(1, 100, 200, 300, 400, tasks="aabbc"), failures(1, 100, 200, 300,
                                                                   tasks="aabb")),
    ("H16", failures(100, 105), failures(100, 105, checkpoint_after=1)),
    ("H17", checkpoint_age(2.02), checkpoint_age(1.99)),
    ("H17", [Signal(0.0, "checkpoint/missed", "step 6000")],
     [Signal(0.0, "checkpoint/marked", {"step": 6000, "kind": "permanent"})]),
    ("H18", [Signal(0.0, "storage/headroom_saves", 1.99)],
     [Signal(0.0, "storage/headroom_saves", 2.0)]),
    ("H18", [Signal(0.0, "storage/status", 507, source="write")],
     [Signal(0.0, "storage/status", 503, source="write")]),
    ("H19", floors((300.0, 302.1, 304.2)), floors((300.0, 302.1, 304.0))),
    ("H19", floors((300.0, 303.0, 306.0)), floors((300.0, 303.0, 306.0), (250.0, 253.0, 256.0))),
    ("H20", resumed(phase="catch_up", difference=0.0021),
     resumed(phase="catch_up", difference=0.0019)),
    ("H20", resumed(phase="later", difference=0.0201), resumed(phase="later", difference=0.0199)),
    ("H20", resumed(phase="catch_up", difference=0.0, batch_equal=False),
     resumed(phase="catch_up", difference=0.0)),
    ("H21", [began(config="a"), began(9.0, ordinal=2, config="b")],
     [began(config="a"), began(9.0, ordinal=2, config="b", change="change:1")]),
    ("H22", held("view/fault", "a hole", row=None), held("view/fault", "", row=None)),
    ("H23", samples((3, 9, 9, 9), "collective/counter", 2),
     samples((3, 9, 9, 8), "collective/counter", 2)),
    ("H23", samples((0.53, 0.9, 0.9, 0.9), "domain/cpu_load", 2),
     samples((0.55, 0.9, 0.9, 0.9), "domain/cpu_load", 2)),
    ("H23", samples((3, 9, 9, 9), "collective/counter", 2),
     samples((3, 9, 9, 9), "collective/counter", 1)),
    ("H24", [Signal(0.0, "link/recoveries", 5, source="l"), Signal(9.0, "link/recoveries", 6,
                                                                  source="l")],
     [Signal(0.0, "link/recoveries", 5, source="l"), Signal(9.0, "link/recoveries", 5,
                                                            source="l")]),
    ("H25", [*LOGS, began(), ended(1.0), clock(11.1 * MINUTE)],
     [*LOGS, began(), ended(1.0), clock(10 * MINUTE)]),
    ("H25", [began(), began(9.0, ordinal=3)], [began(), began(9.0, ordinal=2)]),
    ("H26", [Signal(0.0, "coordinator/live", 2)], [Signal(0.0, "coordinator/live", 1)]),
    ("H27", outside(3), outside(2)),
    ("H28", [Signal(0.0, "alarms/quality", 1), clock(31.1 * DAY)],
     [Signal(0.0, "alarms/quality", 1), clock(31 * DAY)]),
    ("H29", verdict(4499), verdict(4500)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "over", "under"), CASES)
def test_just_over_and_just_under(rule, over, under):
    assert fires(rule, over)
    assert not fires(rule, under)


def test_every_rule_is_tested_and_has_a_detector():
    assert list(DETECTORS) == list(RULES) == sorted({rule for rule, _, _ in CASES})
    assert list(RULES) == [f"H{number:02d}" for number in range(1, 30)]


@pytest.mark.parametrize(
    ("rule", "limit", "value", "signals"),
    [
        ("H06", "ratio", 1.6, rows([2.0] * 50 + [3.01] * 10)),
        ("H10", "fraction", 0.3, held("router/drop_fraction", 0.2)),
        ("H16", "window_rows", 9, failures(100, 110)),
        ("H27", "evaluations", 4, outside(3)),
    ],
)
def test_the_monitor_reads_the_table(monkeypatch, rule, limit, value, signals):
    """The limits that the documentation prints are the ones that the detectors use."""
    assert fires(rule, signals)
    changed = dataclasses.replace(RULES[rule], limits=RULES[rule].limits | {limit: value})
    assert changed.words != RULES[rule].words
    monkeypatch.setitem(detector.RULES, rule, changed)
    assert not fires(rule, signals)


def test_documents_and_checklist_print_the_same_limits():
    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    for rule in RULES.values():
        assert f"| {rule.id} | {rule.words} | {rule.severity} |" in text
    for item in ITEMS:
        assert f"| {item.number} | {item.title} | {item.limit} |" in text
    for number, rule, limit in ((1, "H07", "gradient_norm_max"), (7, "H11", "deficit")):
        assert f"{RULES[rule].limits[limit]:g}" in ITEMS[number - 1].limit


def test_start_up_warns_before_it_pages():
    monitor = Monitor(SETTINGS)
    monitor.run(no_step(90.0, trained=False))
    found = [(alarm.severity, round(alarm.raised / MINUTE)) for alarm in monitor.alarms]
    assert found == [("notify", 46), ("page", 81)]
    assert len(monitor.active) == 2


def test_unregistered_limits_are_off_and_said_once():
    plain = Settings(num_experts=384)
    assert not fires("H07", held("norm/gradient/global", 9.0), plain)
    assert not fires("H12", held("router/bias_max", 9e3), plain)
    assert not fires("H13", speeds([2.3e6] * 40, "throughput/mfu"), plain)
    assert len(Monitor(plain).notices()) == 4
    assert Monitor(SETTINGS).notices() == []


def test_times_scale_and_alarms_end():
    fast = dataclasses.replace(SETTINGS, time_scale=0.1)
    monitor = Monitor(fast)
    monitor.run(no_step(2.0, trained=True))
    assert {alarm.rule.id for alarm in monitor.active} == {"H02"}
    for signal in (Signal(133.0, "train/cross_entropy", 1.0, 7), clock(140.0)):
        monitor.feed(signal)
    assert not monitor.active


def test_rules_without_signals_are_not_measured():
    monitor = Monitor(SETTINGS)
    monitor.run(rows([2.0] * 3))
    missing = monitor.unmeasured()
    assert "H24" in missing and "H19" in missing
    assert not {"H05", "H06", "H08"} & set(missing)


def test_a_void_forecast_is_not_left():
    signals = [*outside(2), Signal(3.0, "forecast/outside_95", {"void": True}), *outside(2)]
    for place, signal in enumerate(signals):
        signals[place] = dataclasses.replace(signal, time=float(place))
    assert not fires("H27", signals)


def test_where_the_rungs_lie_lower_their_entropy_is_the_limit():
    low = dataclasses.replace(SETTINGS, entropy_floor=lambda row: 5.5)
    assert not fires("H11", held("router/entropy", 5.6), low)
    assert fires("H11", held("router/entropy", 5.49), low)


def test_trace_round_trip(tmp_path):
    path = tmp_path / "trace.jsonl"
    signals = [
        began(),
        from_metric(1.0, "router/entropy/3", 5.9, 10),
        from_metric(1.5, "eval_dropless/heldout/macro_loss", 2.2, 10),
        Signal(2.0, "train/loss", math.inf, 11),
    ]
    write_trace(path, signals)
    assert list(read_trace(path)) == signals
    assert signals[1].source == "3" and signals[2].name == "evaluation"
    path.write_text('{"time": 5, "name": "x", "value": 1}\n{"time": 4, "name": "x", "value": 1}\n')
    with pytest.raises(UsageError, match="line 2"):
        list(read_trace(path))
    path.write_text('{"time": 5}\n')
    with pytest.raises(UsageError, match="line 1"):
        list(read_trace(path))
