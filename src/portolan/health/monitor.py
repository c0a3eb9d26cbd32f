"""The monitor: feeds signals to the detectors and keeps the alarms.

Its clock is that of the signals, so that a trace replays at any speed. Memory is bounded by the
rules' windows, not by the length of the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from portolan.health.attempts import ATTEMPTS
from portolan.health.detector import Detector, Finding
from portolan.health.machines import MACHINES
from portolan.health.rules import CADENCE_SECONDS, RULES, Rule, Settings, Severity
from portolan.health.signals import Signal
from portolan.health.training import TRAINING

DETECTORS: dict[str, type[Detector]] = {
    detector.rule_id: detector
    for detector in sorted((*TRAINING, *ATTEMPTS, *MACHINES), key=lambda detector: detector.rule_id)
}
LIFE_CYCLE = ("attempt/start", "attempt/end")
EXTRA_SIGNALS = {
    "H14": ("mixture/segment",),
    "H16": ("checkpoint/marked",),
    "H17": ("phase", "train/cross_entropy"),
    "H28": ("monitor/heartbeat",),
}
"""Signals that a rule's detector needs beside those of its condition."""
WITH_LIFE_CYCLE = (
    *("H01", "H02", "H03", "H05", "H07", "H08", "H10", "H11", "H12", "H13"),
    *("H17", "H19", "H20", "H25"),
)


@dataclass
class Alarm:
    """A condition that held long enough; `ended` is None while it still holds."""

    rule: Rule
    source: str
    severity: Severity
    since: float
    raised: float
    text: str
    row: int | None = None
    ended: float | None = None

    @property
    def active(self) -> bool:
        """Whether the condition still holds."""
        return self.ended is None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rule": self.rule.id,
            "severity": self.severity,
            "active": self.active,
            "row": self.row,
            "text": self.text,
        }


class Monitor:
    """All rules over one run's signals, which come in order of time."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.alarms: list[Alarm] = []
        self.detectors = [kind(self.settings) for kind in DETECTORS.values()]
        self._subscribed: dict[str, list[Detector]] = {}
        self._everything = [d for d in self.detectors if d.rule_id == "H03"]
        self._since: dict[tuple[str, str], float] = {}
        self._open: dict[tuple[str, str], Alarm] = {}
        self._heard: set[str] = set()
        self._next: float | None = None
        self._row: int | None = None
        for detector in self.detectors:
            names = [*detector.rule.signals, *EXTRA_SIGNALS.get(detector.rule_id, ())]
            if detector.rule_id in WITH_LIFE_CYCLE:
                names += LIFE_CYCLE
            if detector.rule_id != "H03":
                for name in dict.fromkeys(names):
                    self._subscribed.setdefault(name, []).append(detector)

    def feed(self, signal: Signal) -> None:
        """Take one signal; first catch up with every cadence that has passed."""
        self._advance(signal.time)
        if signal.name in LIFE_CYCLE:
            # What an attempt was doing wrong is judged before its end hides it.
            self._evaluate(self.detectors, signal.time)
        self._heard.add(signal.name)
        if signal.row is not None:
            self._row = signal.row
        touched = self._subscribed.get(signal.name, [])
        for detector in (*touched, *self._everything):
            detector.see(signal)
        self._evaluate([d for d in touched if not d.tick_only], signal.time)

    def run(self, signals: Iterable[Signal]) -> list[Alarm]:
        """Feed a whole trace; returns the alarms in order."""
        for signal in signals:
            self.feed(signal)
        return self.alarms

    @property
    def active(self) -> list[Alarm]:
        """Alarms whose condition still holds."""
        return [alarm for alarm in self.alarms if alarm.active]

    def unmeasured(self) -> list[str]:
        """Ids of rules none of whose signals was heard: they are not silent, they are blind."""
        return [r.id for r in RULES.values() if not self._heard.intersection(r.signals)]

    def notices(self) -> list[str]:
        """Limits that are off because the run registered none."""
        return [
            f"{rule.id}: {name} is off, the run registers none"
            for rule in RULES.values()
            for name in rule.registered_only
            if name not in self.settings.registered
        ]

    def _advance(self, time: float) -> None:
        cadence = CADENCE_SECONDS * self.settings.time_scale
        if self._next is None:
            self._next = time + cadence
        while self._next <= time:
            self._evaluate(self.detectors, self._next)
            self._next += cadence

    def _evaluate(self, detectors: Iterable[Detector], now: float) -> None:
        for detector in detectors:
            findings = detector.holds(now)
            if findings or self._may_end(detector.rule_id):
                self._update(detector.rule, findings, now)

    def _may_end(self, rule_id: str) -> bool:
        return any(key[0] == rule_id for key in self._since)

    def _update(self, rule: Rule, findings: dict[str, Finding], now: float) -> None:
        for key in [k for k in self._since if k[0] == rule.id and k[1] not in findings]:
            del self._since[key]
            if alarm := self._open.pop(key, None):
                alarm.ended = now
        pending = self.settings.pending(rule)
        for source, finding in findings.items():
            key = (rule.id, source)
            since = self._since.setdefault(key, now)
            if key in self._open:
                self._open[key].text = finding.text
            elif now - since >= pending:
                severity = finding.severity or rule.severity
                alarm = Alarm(rule, source, severity, since, now, finding.text, self._row)
                self._open[key] = alarm
                self.alarms.append(alarm)
