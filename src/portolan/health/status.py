"""One verdict on a run: clear, watch or off course, with the reasons and what to try."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from portolan.health import bands
from portolan.health.checklist import Evidence, Result, first_three_percent, run_checklist
from portolan.health.curves import SHAPES
from portolan.health.monitor import Alarm
from portolan.health.rules import Severity

Word = Literal["clear", "watch", "off course", "no verdict"]

EXIT_CODES: dict[Word, int] = {"clear": 0, "watch": 10, "off course": 11, "no verdict": 12}
"""Exit code of `portolan watch`."""
_RANK: Mapping[Severity, Word] = {"page": "off course", "notify": "watch", "record": "clear"}
_ORDER: tuple[Word, ...] = ("clear", "watch", "off course")
SHOWN_BANDS = {"green": "inside 50 %", "normal": "inside 90 %", "amber": "outside 90 %",
               "red": "outside 99 %, twice"}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """An evaluation beside the forecast at its mark.

    `gate` is match, mismatch or unverified; without a match there is no residual and no band.
    """

    completed: int
    fraction: float
    value: float
    gate: str
    band: str = ""
    median: float | None = None
    low_90: float | None = None
    high_90: float | None = None
    outside_95: bool = False

    @property
    def residual(self) -> float | None:
        """Measured minus median, only while the forecast applies."""
        if self.gate != "match" or self.median is None:
            return None
        return self.value - self.median

    @property
    def words(self) -> str:
        """Where it lies; a forecast that does not apply is called void or unverified."""
        if self.gate == "mismatch":
            return "void"
        if self.gate == "unverified":
            return "unverified"
        return f"{self.band}: {SHOWN_BANDS[self.band]}" if self.band else "no band registered"


@dataclass(frozen=True)
class Reason:
    """Why the verdict is not clear, and what to try."""

    severity: Severity
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Status:
    """What `portolan watch` says of one run."""

    run_id: str
    state: str
    completed: int
    steps: int
    verdict: Word
    reasons: tuple[Reason, ...]
    evaluations: tuple[Evaluation, ...]
    checklist: tuple[Result, ...]
    shapes: tuple[bands.Comparison, ...]
    alarms: tuple[Alarm, ...]
    early: tuple[bool, str]
    forecast: str
    unmeasured_rules: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    peak: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of the verdict."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "run": self.run_id,
            "state": self.state,
            "completed": self.completed,
            "steps": self.steps,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "forecast": self.forecast,
            "reasons": [vars(reason) for reason in self.reasons],
            "evaluations": [_evaluation_json(item) for item in self.evaluations],
            "checklist": [
                {
                    "item": result.item.number,
                    "title": result.item.title,
                    "verdict": result.verdict,
                    "reason": result.reason,
                    "windows": {w: word for w, (word, _) in result.outcomes.items()},
                }
                for result in self.checklist
            ],
            "first_three_percent": {"clear": self.early[0], "reason": self.early[1]},
            "shapes": [
                {
                    "signal": item.signal,
                    "kind": item.kind,
                    "fraction": item.band.fraction,
                    "value": _finite(item.value),
                    "low": item.band.low,
                    "high": item.band.high,
                    "inside": item.inside,
                    "nearest_rung": item.band.nearest(item.value)[0],
                }
                for item in self.shapes
            ],
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "gradient_peak": self.peak,
            "rules_not_measured": list(self.unmeasured_rules),
            "notices": list(self.notices),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _evaluation_json(item: Evaluation) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "completed": item.completed,
        "fraction": item.fraction,
        "value": _finite(item.value),
        "status": item.words,
    }
    if item.residual is not None:
        fields |= {"median": item.median, "residual": item.residual, "low_90": item.low_90,
                   "high_90": item.high_90, "band": item.band}  # fmt: skip
    return fields


@dataclass(frozen=True)
class Observed:
    """What the caller found out about a run besides its curves."""

    state: str
    evaluations: Sequence[Evaluation] = ()
    alarms: Sequence[Alarm] = ()
    forecast: str = "no forecast is registered"
    unmeasured_rules: Sequence[str] = ()
    notices: Sequence[str] = field(default_factory=tuple)


def assess(evidence: Evidence, observed: Observed) -> Status:
    """Join bands, checklist, shapes and rules into one verdict.

    clear: green or normal and no failed item. watch: amber, a failed item, or a rule of severity
    notify. off course: red, or a rule or item of severity page. no verdict: nothing else is wrong
    and no evaluation can be held against a registered forecast.
    """
    checklist = run_checklist(evidence)
    shapes = _shapes(evidence)
    reasons = [
        *_band_reasons(observed.evaluations),
        *(_rule_reason(alarm) for alarm in observed.alarms if alarm.active),
        *(_item_reason(result) for result in checklist if _counts(result)),
    ]
    reasons.sort(key=lambda reason: -_ORDER.index(_RANK[reason.severity]))
    verdict = worst([reason.severity for reason in reasons])
    judged = bool(_newest_band(observed.evaluations))
    if verdict == "clear" and not judged:
        verdict = "no verdict"
    return Status(
        run_id=evidence.target.run_id,
        state=observed.state,
        completed=evidence.target.completed,
        steps=evidence.target.steps,
        verdict=verdict,
        reasons=tuple(reasons),
        evaluations=tuple(observed.evaluations),
        checklist=tuple(checklist),
        shapes=shapes,
        alarms=tuple(observed.alarms),
        early=first_three_percent(evidence),
        forecast=observed.forecast,
        unmeasured_rules=tuple(observed.unmeasured_rules),
        notices=tuple(observed.notices),
        peak=_peak_words(evidence),
    )


def worst(severities: Sequence[Severity]) -> Word:
    """Verdict of the gravest severity; clear without any."""
    words: list[Word] = [_RANK[severity] for severity in severities]
    words.sort(key=_ORDER.index)
    return words[-1] if words else "clear"


def _counts(result: Result) -> bool:
    """A failed item; the projection is judged by its bands."""
    return result.verdict == "fail" and result.item.number != 12


def _newest_band(evaluations: Sequence[Evaluation]) -> str:
    """Band of the newest evaluation, empty when no forecast applies to it.

    What an earlier forecast said before a change is a score, not the present.
    """
    newest = evaluations[-1] if evaluations else None
    return newest.band if newest is not None and newest.gate == "match" else ""


def _band_reasons(evaluations: Sequence[Evaluation]) -> list[Reason]:
    """The newest evaluation, if it is amber or red; both sides are told apart."""
    if _newest_band(evaluations) not in ("amber", "red"):
        return []
    item = evaluations[-1]
    residual = item.residual or 0.0
    side = "above" if residual > 0 else "below"
    text = (
        f"evaluation {item.value:.4f} at {item.fraction:.0%} is {abs(residual):.4f} nats {side} "
        f"the median, {SHOWN_BANDS[item.band]}"
    )
    advice = (
        "look at the shapes below, then rate, batch and data; no change of the recipe on one "
        "evaluation"
        if residual > 0
        else "too good is a finding as well: check metric identity, contamination and packing"
    )
    if item.band == "red":
        advice = (
            "incident: freeze other changes, evaluate the last checkpoint on the reference path, "
            f"decide in writing to continue, roll back or amend; {advice}"
        )
    return [Reason("page" if item.band == "red" else "notify", text, advice)]


def _rule_reason(alarm: Alarm) -> Reason:
    return Reason(alarm.severity, f"{alarm.rule.id} {alarm.rule.title}: {alarm.text}",
                  alarm.rule.advice)  # fmt: skip


def _item_reason(result: Result) -> Reason:
    item = result.item
    return Reason(item.severity, f"item {item.number} ({item.title}): {result.reason}", item.advice)


def _shapes(evidence: Evidence) -> tuple[bands.Comparison, ...]:
    """The newest comparison of every signal with the rungs, level and growth."""
    found = []
    for signal in SHAPES:
        for kind in ("level", "slope"):
            if compared := bands.compare(evidence.target, evidence.rungs, signal, kind):
                found.append(compared[-1])
    return tuple(found)


def _peak_words(evidence: Evidence) -> str:
    """Where the gradient norm was largest so far, and where on the rungs; empty without data."""
    signal = "gradient norm"
    own = evidence.target.shape(signal)
    if own is None or not (top := bands.peak(own, evidence.target.steps)):
        return ""
    others = [
        f"{rung.label} {at:.0%}"
        for rung in evidence.rungs
        if (series := rung.shape(signal)) is not None and (at := bands.peak(series, rung.steps))
    ]
    rising = " (still rising)" if top >= evidence.target.progress - 0.05 else ""
    return f"{signal} largest at {top:.0%}{rising}; on the rungs at {', '.join(others) or '-'}"
