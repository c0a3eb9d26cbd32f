"""Detectors over attempts: their ends, progress, telemetry, retries, resumes, changes and logs."""

from itertools import pairwise
from typing import Any

from portolan.health.detector import Detector, Finding, number, table
from portolan.health.rules import CADENCE_SECONDS
from portolan.health.signals import Signal
from portolan.scaling.gates import steps_needed

INITIALISING, TRAINING_PHASE, FINISHED = 0, 1, 2
"""Values of the signal `phase`."""
EXTERNAL = ("scheduler/", "monitor/", "clock", "coordinator/", "link/", "alarms/", "logs/")
"""Prefixes of signals that somebody else than the run sends."""
DIGESTS = ("config", "code", "container", "data")


class EndedWithoutSuccess(Detector):
    """H01."""

    rule_id = "H01"

    def setup(self) -> None:
        """Finding of the last end."""
        self._finding: Finding | None = None

    def see(self, signal: Signal) -> None:
        """An attempt's end with its derived status; a new attempt clears it."""
        if signal.name == "attempt/start":
            self._finding = None
            return
        end = table(signal)
        status, left = end.get("status", "unknown"), int(end.get("retries_left", 0))
        name = f"attempt {end.get('ordinal', '?')}"
        if end.get("disputed"):
            self._finding = Finding(f"{name} is disputed: {end.get('reason', status)}")
        elif status != "succeeded" and (left < 1 or end.get("seal_requested")):
            self._finding = Finding(f"{name} is {status}, nothing left to retry it")

    def holds(self, now: float) -> dict[str, Finding]:
        """The end stands until a new attempt."""
        return {"": self._finding} if self._finding else {}


class Progress(Detector):
    """What H02 and H03 share: whether an attempt is open, and since when."""

    def setup(self) -> None:
        """Nothing is open."""
        self._open = False
        self._since = 0.0
        self._phase = INITIALISING
        self._first_step: float | None = None
        self._last_step: float | None = None

    def see(self, signal: Signal) -> None:
        """Attempts, phases and rows."""
        if signal.name == "attempt/start":
            self._open, self._since = True, signal.time
            self._first_step = self._last_step = None
            self._phase = INITIALISING
        elif signal.name == "attempt/end":
            self._open = False
        elif signal.name == "phase":
            self._phase = int(number(signal.value) or 0)
            self._open = self._phase != FINISHED and self._open
        elif signal.row is not None:
            self._last_step = signal.time
            self._first_step = self._first_step or signal.time
            self._phase = max(self._phase, TRAINING_PHASE)


class NoStep(Progress):
    """H02."""

    rule_id = "H02"

    def holds(self, now: float) -> dict[str, Finding]:
        """Too long since the last step, or since the start without one."""
        if not self._open:
            return {}
        if self._last_step is not None:
            idle = now - self._last_step
            if idle <= self.seconds("step_minutes"):
                return {}
            return {"step": Finding(f"no completed step for {idle / 60:.0f} min")}
        idle, found = now - self._since, {}
        text = f"no first step {idle / 60:.0f} min after the start"
        if idle > self.seconds("warn_minutes"):
            found["start-up warning"] = Finding(text, "notify")
        if idle > self.seconds("kill_minutes"):
            found["start-up"] = Finding(text)
        return found


class Silent(Progress):
    """H03."""

    rule_id = "H03"

    def setup(self) -> None:
        """Time of the last signal of the run, and what the scheduler says."""
        super().setup()
        self._heard: float | None = None
        self._scheduler = "unknown"

    def see(self, signal: Signal) -> None:
        """Any signal."""
        if signal.name == "scheduler/state":
            self._scheduler = str(signal.value)
        if not signal.name.startswith(EXTERNAL):
            self._heard = signal.time
            super().see(signal)

    def holds(self, now: float) -> dict[str, Finding]:
        """Open and mute."""
        if not self._open or self._heard is None:
            return {}
        idle = now - self._heard
        if idle <= self.seconds("minutes"):
            return {}
        return {"": Finding(f"no signal for {idle / 60:.0f} min; scheduler: {self._scheduler}")}


class WatcherBlind(Detector):
    """H04: either enrolment path, or the monitor itself."""

    rule_id = "H04"

    def setup(self) -> None:
        """Times at which each path was heard."""
        self._heard: dict[str, float] = {}
        self._ended = False

    def see(self, signal: Signal) -> None:
        """A row of the scheduler, a phase, a heartbeat; the end of the run ends both paths."""
        self._heard[signal.name] = signal.time
        if signal.name == "phase":
            self._ended = number(signal.value) == FINISHED

    def holds(self, now: float) -> dict[str, Finding]:
        """Each stale path that was heard before."""
        grace = self.seconds("stale_minutes")
        bounds = {
            "scheduler/state": self.seconds("scheduler_seconds") + grace,
            "phase": self.seconds("phase_hours") + grace,
            "monitor/heartbeat": self.limit("cadences")
            * CADENCE_SECONDS
            * self.settings.time_scale,
        }
        return {
            name: Finding(f"{name} was last heard {(now - heard) / 60:.0f} min ago")
            for name, heard in self._heard.items()
            if not self._ended and name in bounds and now - heard > bounds[name]
        }


class Restart(Detector):
    """H15."""

    rule_id = "H15"

    def setup(self) -> None:
        """Last retry."""
        self._last: tuple[float, int] | None = None

    def see(self, signal: Signal) -> None:
        """An attempt after the first."""
        ordinal = int(table(signal).get("ordinal", 1))
        if ordinal > 1:
            self._last = (signal.time, ordinal)

    def holds(self, now: float) -> dict[str, Finding]:
        """Recent; each attempt is an alarm of its own."""
        if self._last is None or now - self._last[0] > self.seconds("minutes"):
            return {}
        return {f"attempt {self._last[1]}": Finding(f"attempt {self._last[1]} started")}


class SameFailure(Detector):
    """H16."""

    rule_id = "H16"

    def setup(self) -> None:
        """First unfinished rows and tasks of failures since the last checkpoint."""
        self._failures: list[tuple[int, str]] = []

    def see(self, signal: Signal) -> None:
        """A failure, or a new checkpoint, after which counting starts anew."""
        if signal.name == "checkpoint/marked":
            self._failures.clear()
            return
        end = table(signal)
        if end.get("status") == "failed":
            self._failures.append((int(end.get("completed", 0)), str(end.get("task", ""))))

    def holds(self, now: float) -> dict[str, Finding]:
        """The same window twice, or too many failures."""
        rows = sorted(row for row, _ in self._failures)
        window = self.limit("window_rows")
        for first, second in pairwise(rows):
            if second - first <= window:
                return {"": Finding(f"failed at rows {first} and {second}: stop")}
        tasks = [task for _, task in self._failures]
        most = max((tasks.count(task) for task in tasks), default=0)
        if most < self.limit("per_task") and len(tasks) < self.limit("total"):
            return {}
        return {"": Finding(f"{len(tasks)} failures without a new checkpoint: stop")}


class ResumeMismatch(Detector):
    """H20: latched until the next attempt."""

    rule_id = "H20"

    def setup(self) -> None:
        """Finding of this attempt."""
        self._text = ""

    def see(self, signal: Signal) -> None:
        """`{phase: catch_up | later, difference, loss, batch_equal}`, or an attempt's start."""
        if signal.name == "attempt/start":
            self._text = ""
            return
        check = table(signal)
        difference = abs(float(check.get("difference", 0.0)))
        if check.get("batch_equal") is False:
            self._text = f"the batch of row {signal.row} is another one than before the resume"
        elif check.get("phase") == "catch_up" and difference > self.limit("catch_up"):
            self._text = f"loss differs by {difference:.4f} nats at repeated row {signal.row}"
        elif check.get("phase") == "later":
            share = difference / abs(float(check["loss"]))
            if share > self.limit("later"):
                self._text = f"loss differs by {share:.1%} after the resume, row {signal.row}"

    def holds(self, now: float) -> dict[str, Finding]:
        """The first mismatch of the attempt."""
        return {"": Finding(self._text)} if self._text else {}


class UndeclaredChange(Detector):
    """H21: latched for the attempt."""

    rule_id = "H21"

    def setup(self) -> None:
        """Digests of the attempt before."""
        self._before: dict[str, Any] = {}
        self._differs: list[str] = []

    def see(self, signal: Signal) -> None:
        """An attempt's start with its digests, and `change` when one is declared."""
        start = table(signal)
        digests = {name: start[name] for name in DIGESTS if start.get(name)}
        self._differs = [
            name
            for name, value in digests.items()
            if name in self._before and self._before[name] != value and not start.get("change")
        ]
        self._before |= digests

    def holds(self, now: float) -> dict[str, Finding]:
        """Digests that differ."""
        if not self._differs:
            return {}
        return {"": Finding(f"{', '.join(self._differs)} differs without a change record")}


class Text(Detector):
    """A fault that another part has found and describes; an empty text clears it."""

    def setup(self) -> None:
        """Newest text."""
        self._text = ""

    def see(self, signal: Signal) -> None:
        """A description."""
        self._text = str(signal.value)

    def holds(self, now: float) -> dict[str, Finding]:
        """While it stands."""
        return {"": Finding(self._text)} if self._text else {}


class CurveBroken(Text):
    """H22."""

    rule_id = "H22"


class LogsMissing(Detector):
    """H25."""

    rule_id = "H25"

    def setup(self) -> None:
        """Attempts ended, the share of their logs that can be read, and ordinals without record."""
        self._ended: dict[int, float] = {}
        self._share: dict[int, float] = {}
        self._holes: list[int] = []
        self._last = 0
        self._measured = False

    def see(self, signal: Signal) -> None:
        """Ends, starts and the state of logs."""
        value = table(signal)
        ordinal = int(value.get("ordinal", 0))
        if signal.name == "attempt/start":
            self._holes += range(self._last + 1, ordinal)
            self._last = max(self._last, ordinal)
        elif signal.name == "attempt/end":
            self._ended[ordinal] = signal.time
        else:
            self._measured = True
            self._share[ordinal] = float(value.get("share", 0.0))

    def holds(self, now: float) -> dict[str, Finding]:
        """Attempts without a record, and ended ones whose logs are incomplete after the grace."""
        found = {f"attempt {n}": Finding(f"attempt {n} left no record") for n in self._holes}
        for ordinal, ended in self._ended.items():
            share = self._share.get(ordinal, 0.0)
            if self._measured and share < 1 and now - ended > self.seconds("minutes"):
                found[f"attempt {ordinal}"] = Finding(f"{share:.0%} of its logs can be read")
        return found


class TwoAtOnce(Detector):
    """H26."""

    rule_id = "H26"

    def setup(self) -> None:
        """Newest count."""
        self._count = 0

    def see(self, signal: Signal) -> None:
        """Live coordinators or gangs of the lineage."""
        self._count = int(number(signal.value) or 0)

    def holds(self, now: float) -> dict[str, Finding]:
        """More than one."""
        if self._count < self.limit("count"):
            return {}
        return {"": Finding(f"{self._count} are live at once")}


class QualityUnpublished(Detector):
    """H28: counted from the first signal of the monitor until something is published."""

    rule_id = "H28"

    def setup(self) -> None:
        """Time of the last publication."""
        self._since: float | None = None

    def see(self, signal: Signal) -> None:
        """A publication, or the first heartbeat."""
        if signal.name == "alarms/quality" or self._since is None:
            self._since = signal.time

    def holds(self, now: float) -> dict[str, Finding]:
        """Too long ago."""
        if self._since is None or now - self._since <= self.seconds("days"):
            return {}
        return {"": Finding(f"last published {(now - self._since) / 86400:.0f} days ago")}


class StabilityUnproved(Detector):
    """H29."""

    rule_id = "H29"

    def setup(self) -> None:
        """Clean steps and steps needed by change."""
        self._changes: dict[str, tuple[int, int]] = {}

    def see(self, signal: Signal) -> None:
        """`{change, verdict, clean_steps, mttf_steps}`."""
        value = table(signal)
        name = str(value.get("change", ""))
        needed = steps_needed(float(value.get("mttf_steps", self.limit("mttf_steps"))))
        self._changes.pop(name, None)
        if str(value.get("verdict", "")).startswith("accepted"):
            self._changes[name] = (int(value.get("clean_steps", 0)), needed)

    def holds(self, now: float) -> dict[str, Finding]:
        """Accepted changes with too few clean steps."""
        return {
            name: Finding(f"{clean} of {needed} clean steps: accepted_stability_unproved")
            for name, (clean, needed) in self._changes.items()
            if clean < needed
        }


ATTEMPTS = (
    EndedWithoutSuccess,
    NoStep,
    Silent,
    WatcherBlind,
    Restart,
    SameFailure,
    ResumeMismatch,
    UndeclaredChange,
    CurveBroken,
    LogsMissing,
    TwoAtOnce,
    QualityUnpublished,
    StabilityUnproved,
)
