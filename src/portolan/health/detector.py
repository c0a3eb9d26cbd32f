"""What every rule's detector shares: it sees signals and says where its condition holds."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from portolan.health.rules import RULES, Rule, Settings, Severity
from portolan.health.signals import Signal


@dataclass(frozen=True)
class Finding:
    """Why a condition holds; `severity` replaces the rule's when it is given."""

    text: str
    severity: Severity | None = None


class Detector(ABC):
    """Keeps the bounded history that one rule needs.

    `holds` maps a source (empty for the run as a whole) to a finding while its condition is true.
    """

    rule_id: ClassVar[str]
    tick_only: ClassVar[bool] = False
    """Whether `holds` is asked at every cadence only, not after every signal."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rule: Rule = RULES[self.rule_id]
        self.setup()

    @abstractmethod
    def setup(self) -> None:
        """Make the empty history."""

    @abstractmethod
    def see(self, signal: Signal) -> None:
        """Take a signal of one of the rule's names into account."""

    @abstractmethod
    def holds(self, now: float) -> dict[str, Finding]:
        """Where the condition is true at `now`."""

    def limit(self, name: str) -> float:
        """A limit of the rule that is always on."""
        return self.rule.limits[name]

    def seconds(self, name: str) -> float:
        """A limit of the rule that is a time, in seconds of this run."""
        return self.settings.seconds(self.rule, name)


class RunningMedian:
    """Median of the last `size` values, O(size) memory and O(log size) search a value."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        """Take a value, forgetting the oldest."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self._size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._sorted.clear()

    @property
    def value(self) -> float:
        """The median; the upper one of an even number."""
        return self._sorted[len(self._sorted) // 2]


def number(value: Any) -> float | None:
    """A signal's value as a float, None for text and tables."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def table(signal: Signal) -> dict[str, Any]:
    """A signal's value as a table, empty for a plain value."""
    return signal.value if isinstance(signal.value, dict) else {}
