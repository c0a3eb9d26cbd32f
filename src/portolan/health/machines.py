"""Detectors over what a run stands on: checkpoints, storage, host memory, collectives, links."""

import statistics
from collections import deque
from itertools import pairwise

from portolan.health.attempts import Progress
from portolan.health.detector import Detector, Finding, number, table
from portolan.health.signals import Signal

REFUSED = (403, 405, 507)
"""Answers of a store that will not change by trying again."""


class CheckpointLate(Progress):
    """H17."""

    rule_id = "H17"

    def setup(self) -> None:
        """Time of the last mark, and milestones missed."""
        super().setup()
        self._marked: float | None = None
        self._missed: str = ""

    def see(self, signal: Signal) -> None:
        """Marks, missed milestones and progress."""
        if signal.name == "checkpoint/marked":
            self._marked = signal.time
            if table(signal).get("kind") == "permanent":
                self._missed = ""
        elif signal.name == "checkpoint/missed":
            self._missed = str(signal.value)
        else:
            super().see(signal)
            if signal.name == "attempt/start":
                self._marked = None

    def holds(self, now: float) -> dict[str, Finding]:
        """Late watermark while training, or a milestone that is not there."""
        found = {}
        if self._missed:
            found["milestone"] = Finding(f"permanent milestone {self._missed} is missing")
        planned = self.limit("intervals") * self.settings.checkpoint_seconds
        bound = max(planned, self.seconds("floor_minutes"))
        since = max(self._marked or 0.0, self._first_step or now)
        if self._open and now - since > bound:
            found["watermark"] = Finding(f"no checkpoint for {(now - since) / 60:.0f} min")
        return found


class StorageRefuses(Detector):
    """H18: latched until the same kind of request succeeds."""

    rule_id = "H18"

    def setup(self) -> None:
        """Newest head-room, and requests refused by operation."""
        self._saves: float | None = None
        self._refused: dict[str, int] = {}

    def see(self, signal: Signal) -> None:
        """Head-room in saves, or a status with the operation in `source`."""
        if signal.name == "storage/headroom_saves":
            self._saves = number(signal.value)
            return
        status = int(number(signal.value) or 0)
        if status in REFUSED and signal.source in ("write", "delete"):
            self._refused[signal.source] = status
        elif status < 400:
            self._refused.pop(signal.source, None)

    def holds(self, now: float) -> dict[str, Finding]:
        """Too little room, or refused."""
        found = {op: Finding(f"{op} answered {status}") for op, status in self._refused.items()}
        if self._saves is not None and self._saves < self.limit("saves"):
            found["room"] = Finding(f"room for {self._saves:.1f} saves is left")
        return found


class MemoryGrows(Detector):
    """H19: floors after saves, GiB, of hosts that write and of the others."""

    rule_id = "H19"
    tick_only = True  # the floors of one save come one after the other

    def setup(self) -> None:
        """Last floors by host."""
        self._keep = int(self.limit("saves")) + 1
        self._floors: dict[tuple[str, str], deque[float]] = {}

    def see(self, signal: Signal) -> None:
        """Floor after a save; the start of an attempt empties the hosts."""
        if signal.name == "attempt/start":
            self._floors.clear()
        elif (value := number(signal.value)) is not None:
            kind = signal.name.rpartition("/")[2]
            floors = self._floors.setdefault((kind, signal.source), deque(maxlen=self._keep))
            floors.append(value)

    def holds(self, now: float) -> dict[str, Finding]:
        """Writers that grew at every save while no other host did."""
        growing = {
            key: rises for key, floors in self._floors.items() if (rises := self._rises(floors))
        }
        if any(kind != "writer" for kind, _ in growing):
            return {}
        return {
            host: Finding(
                f"memory floor of {host} up by {', '.join(f'{r:.1f}' for r in rises)} GiB"
            )
            for (_, host), rises in growing.items()
        }

    def _rises(self, floors: deque[float]) -> list[float]:
        values = list(floors)
        rises = [after - before for before, after in pairwise(values)]
        enough = len(values) == self._keep and min(rises) > self.limit("gib")
        return rises if enough else []


class CollectiveStuck(Detector):
    """H23: a sample is complete when its first domain reports again."""

    rule_id = "H23"

    def setup(self) -> None:
        """Samples under way and how often in a row each domain was the odd one."""
        self._samples: dict[str, dict[str, float]] = {}
        self._odd: dict[tuple[str, str], int] = {}

    def see(self, signal: Signal) -> None:
        """A counter or a CPU load of one domain."""
        value = number(signal.value)
        if value is None:
            return
        sample = self._samples.setdefault(signal.name, {})
        if signal.source in sample:
            self._close(signal.name, sample)
            sample.clear()
        sample[signal.source] = value

    def _close(self, name: str, sample: dict[str, float]) -> None:
        odd = self._behind(sample) if name.startswith("collective/") else self._idle(sample)
        for domain in sample:
            count = self._odd.get((name, domain), 0)
            self._odd[name, domain] = count + 1 if domain in odd else 0

    def _behind(self, sample: dict[str, float]) -> set[str]:
        """The one domain behind, when all others agree."""
        if len(sample) < 3:
            return set()
        lowest = min(sample, key=sample.__getitem__)
        others = {value for domain, value in sample.items() if domain != lowest}
        return {lowest} if len(others) == 1 and sample[lowest] < min(others) else set()

    def _idle(self, sample: dict[str, float]) -> set[str]:
        if len(sample) < 3:
            return set()
        return {
            domain
            for domain, value in sample.items()
            if value
            < self.limit("load") * statistics.median(v for d, v in sample.items() if d != domain)
        }

    def holds(self, now: float) -> dict[str, Finding]:
        """Domains that were odd often enough in a row."""
        return {
            domain: Finding(f"{domain} is behind its peers in {name}, {count} samples in a row")
            for (name, domain), count in self._odd.items()
            if count >= self.limit("samples")
        }


class LinkRecovers(Detector):
    """H24."""

    rule_id = "H24"

    def setup(self) -> None:
        """Counter and time of the last rise by link."""
        self._counters: dict[str, float] = {}
        self._risen: dict[str, float] = {}

    def see(self, signal: Signal) -> None:
        """A link's cumulative counter."""
        value = number(signal.value)
        if value is None:
            return
        if value > self._counters.get(signal.source, value):
            self._risen[signal.source] = signal.time
        self._counters[signal.source] = value

    def holds(self, now: float) -> dict[str, Finding]:
        """Links that recovered within the window."""
        return {
            link: Finding(f"{link} has recovered {self._counters[link]:.0f} times")
            for link, time in self._risen.items()
            if now - time <= self.seconds("hours")
        }


MACHINES = (
    CheckpointLate,
    StorageRefuses,
    MemoryGrows,
    CollectiveStuck,
    LinkRecovers,
)
