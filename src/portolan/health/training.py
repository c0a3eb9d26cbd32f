"""Detectors over what the model shows: loss, gradients, routing, evaluations, throughput."""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from portolan.health.detector import Detector, Finding, RunningMedian, number, table
from portolan.health.rules import entropy_limit, evaluation_limit
from portolan.health.signals import Signal

MIN_TREND_ROWS = 16
"""Rows before a trend or a spread means anything."""
MIN_WINDOW_ROWS = 3
BASELINE_SAMPLES = 200
SKIPPED_SAMPLES = 5
"""First samples of an attempt, which contain compilation and empty caches."""


class LossSpike(Detector):
    """H05."""

    rule_id = "H05"
    tick_only = True

    def setup(self) -> None:
        """Rows of the window and of the time before it, same attempt."""
        self._window: deque[tuple[float, float]] = deque()
        self._before: deque[tuple[float, float]] = deque()

    def see(self, signal: Signal) -> None:
        """A loss row, or the start of an attempt, after which the floor begins anew."""
        if signal.name == "attempt/start":
            self._window.clear()
            self._before.clear()
            return
        value = number(signal.value)
        if value is not None and math.isfinite(value):
            self._window.append((signal.time, value))

    def holds(self, now: float) -> dict[str, Finding]:
        """Every row of the window above floor + rise and above mean + sigmas sd."""
        start = now - self.seconds("window_minutes")
        while self._window and self._window[0][0] <= start:
            self._before.append(self._window.popleft())
        rows = int(self.limit("rows"))
        oldest = start - self.seconds("floor_minutes")
        while len(self._before) > rows and self._before[0][0] < oldest:
            self._before.popleft()
        if len(self._before) < MIN_TREND_ROWS or len(self._window) < MIN_WINDOW_ROWS:
            return {}
        recent = [value for _, value in self._before][-rows:]
        floors = [value for time, value in self._before if time >= oldest] or recent
        bound = max(
            min(floors) + self.limit("rise"),
            statistics.fmean(recent) + self.limit("sigmas") * statistics.stdev(recent),
        )
        lowest = min(value for _, value in self._window)
        if lowest <= bound:
            return {}
        return {"": Finding(f"loss {lowest:.3f} and above for the whole window, bound {bound:.3f}")}


class LossTrend(Detector):
    """H06."""

    rule_id = "H06"

    def setup(self) -> None:
        """Median of the rows on trend, and the rows above it in a row."""
        self._median = RunningMedian(int(self.limit("rows")))
        self._above = 0
        self._last = math.nan

    def see(self, signal: Signal) -> None:
        """A loss row; those above the trend stay out of it until they make a whole history."""
        value = number(signal.value)
        if value is None or not math.isfinite(value):
            return
        self._last = value
        on_trend = len(self._median) < MIN_TREND_ROWS or not (
            value > self.limit("ratio") * self._median.value
        )
        if on_trend:
            self._above = 0
            self._median.add(value)
            return
        self._above += 1
        if self._above >= self.limit("rows"):
            self._median.clear()
            self._above = 0

    def holds(self, now: float) -> dict[str, Finding]:
        """Enough rows in a row above the trend."""
        if self._above < self.limit("consecutive"):
            return {}
        text = f"loss {self._last:.3f}, {self._above} rows above {self.limit('ratio'):g} x trend"
        return {"": Finding(f"{text} {self._median.value:.3f}")}


class Above(Detector):
    """A momentary value above a limit that the run has registered."""

    limit_name: str
    noun: str

    def setup(self) -> None:
        """Newest magnitude."""
        self._value: float | None = None

    def see(self, signal: Signal) -> None:
        """A value; an attempt's start or end makes it a thing of the past."""
        value = number(signal.value)
        self._value = None if value is None else abs(value)

    def holds(self, now: float) -> dict[str, Finding]:
        """Above the registered limit; off without one."""
        bound = self.settings.limit(self.rule, self.limit_name)
        if bound is None or self._value is None or not self._value > bound:
            return {}
        return {"": Finding(f"{self.noun} {self._value:.4g}, registered limit {bound:g}")}


class GradientNorm(Above):
    """H07."""

    rule_id, limit_name, noun = "H07", "gradient_norm_max", "gradient norm"


class RouterBias(Detector):
    """H12."""

    rule_id = "H12"

    def setup(self) -> None:
        """Newest extreme of each layer."""
        self._values: dict[str, float] = {}

    def see(self, signal: Signal) -> None:
        """Largest or smallest bias of a layer; those of an attempt end with it."""
        if signal.name.startswith("attempt/"):
            self._values.clear()
        elif (value := number(signal.value)) is not None:
            self._values[f"{signal.name}/{signal.source}"] = abs(value)

    def holds(self, now: float) -> dict[str, Finding]:
        """Any layer above the registered limit; off without one."""
        bound = self.settings.limit(self.rule, "router_bias_max")
        largest = max(self._values.values(), default=0.0)
        if bound is None or not largest > bound:
            return {}
        return {"": Finding(f"router bias {largest:.4g}, registered limit {bound:g}")}


class NotFinite(Detector):
    """H08: latched until the next attempt."""

    rule_id = "H08"

    def setup(self) -> None:
        """Names of values that were not finite in this attempt."""
        self._found: dict[str, str] = {}

    def see(self, signal: Signal) -> None:
        """Any number."""
        if signal.name == "attempt/start":
            self._found.clear()
        elif (value := number(signal.value)) is not None and not math.isfinite(value):
            self._found[signal.name] = (
                f"{signal.source or signal.name} is {value} at row {signal.row}"
            )

    def holds(self, now: float) -> dict[str, Finding]:
        """One finding for all of them."""
        return {"": Finding("; ".join(self._found.values()))} if self._found else {}


class SkippedSteps(Detector):
    """H09."""

    rule_id = "H09"

    def setup(self) -> None:
        """Times of skipped steps."""
        self._times: deque[float] = deque(maxlen=int(self.limit("count")))

    def see(self, signal: Signal) -> None:
        """One or more steps skipped."""
        self._times.extend([signal.time] * int(number(signal.value) or 0))

    def holds(self, now: float) -> dict[str, Finding]:
        """Enough of them within the window."""
        full = len(self._times) == self._times.maxlen
        if not full or now - self._times[0] > self.seconds("minutes"):
            return {}
        return {"": Finding(f"{len(self._times)} steps skipped, first at {self._times[0]:.0f} s")}


class LayerMean(Detector):
    """A quantity of the router, averaged over layers of the newest row."""

    def setup(self) -> None:
        """Newest value of each layer."""
        self._values: dict[str, float] = {}
        self._row = 0

    def see(self, signal: Signal) -> None:
        """Value of one layer, or of all in one; those of an attempt end with it."""
        if signal.name.startswith("attempt/"):
            self._values.clear()
        elif (value := number(signal.value)) is not None:
            self._values[signal.source] = value
            self._row = signal.row or 0

    @property
    def mean(self) -> float | None:
        """Mean over layers."""
        return statistics.fmean(self._values.values()) if self._values else None


class Drops(LayerMean):
    """H10."""

    rule_id = "H10"

    def holds(self, now: float) -> dict[str, Finding]:
        """Above the limit after the first rows, in which drops are expected."""
        mean, bound = self.mean, self.limit("fraction")
        if mean is None or self._row < self.limit("from_row") or not mean > bound:
            return {}
        return {"": Finding(f"{mean:.1%} of assignments dropped, limit {bound:.0%}")}


class RoutingEntropy(LayerMean):
    """H11; where the rungs themselves lie lower, their lowest value is the limit."""

    rule_id = "H11"

    def holds(self, now: float) -> dict[str, Finding]:
        """Below the limit."""
        mean, experts = self.mean, self.settings.num_experts
        if mean is None or experts is None:
            return {}
        bound = entropy_limit(experts)
        if self.settings.entropy_floor:
            floor = self.settings.entropy_floor(self._row)
            bound = bound if floor is None else min(bound, floor)
        if not mean < bound:
            return {}
        return {"": Finding(f"mean routing entropy {mean:.4f} nats, limit {bound:.4f}")}


class Throughput(Detector):
    """H13: against the level at the start of the segment, and registered floors."""

    rule_id = "H13"
    tick_only = True
    floors: Mapping[str, str] = {
        "throughput/tokens_per_second": "tokens_per_second_min",
        "throughput/mfu": "mfu_min",
    }

    def setup(self) -> None:
        """Recent samples, and the first ones of the segment, by name."""
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._first: dict[str, list[float]] = {}
        self._seen: dict[str, int] = {}

    def see(self, signal: Signal) -> None:
        """A sample, or the start of an attempt, which starts a segment."""
        if signal.name == "attempt/start":
            self.setup()
            return
        value = number(signal.value)
        if value is None:
            return
        self._seen[signal.name] = self._seen.get(signal.name, 0) + 1
        if self._seen[signal.name] <= SKIPPED_SAMPLES:
            return
        recent = self._recent.setdefault(signal.name, deque())
        recent.append((signal.time, value))
        while recent[0][0] < signal.time - self.seconds("minutes"):
            recent.popleft()
        first = self._first.setdefault(signal.name, [])
        if len(first) < BASELINE_SAMPLES:
            first.append(value)

    def holds(self, now: float) -> dict[str, Finding]:
        """Most samples of the window below the larger of the two bounds."""
        found = {}
        for name, recent in self._recent.items():
            start = now - self.seconds("minutes")
            values = [value for time, value in recent if time >= start]
            first = self._first[name]
            if len(values) < self.limit("samples") or self._seen[name] < 2 * self.limit("samples"):
                continue
            bound = self.limit("share") * statistics.median(first)
            if floor := self.settings.limit(self.rule, self.floors[name]):
                bound = max(bound, floor)
            low = sum(value < bound for value in values)
            if 2 * low > len(values):
                text = f"{low} of {len(values)} samples of {name} below {bound:.4g}"
                found[name] = Finding(f"{text}; their median is {statistics.median(values):.4g}")
        return found


class WorseEvaluation(Detector):
    """H14: by metric, within one mixture segment; a repeated mark replaces its value."""

    rule_id = "H14"
    headline = "macro_loss"

    def setup(self) -> None:
        """Last evaluations of each metric, (row, value)."""
        self._last: dict[str, list[tuple[int, float]]] = {}

    def see(self, signal: Signal) -> None:
        """An evaluation, or a new mixture segment."""
        if signal.name == "mixture/segment":
            self._last.clear()
            return
        value = number(signal.value)
        if value is None or not signal.source.endswith(self.headline):
            return
        kept = [item for item in self._last.get(signal.source, []) if item[0] < (signal.row or 0)]
        self._last[signal.source] = [*kept[-1:], (signal.row or 0, value)]

    def holds(self, now: float) -> dict[str, Finding]:
        """The newest above the one before by more than noise."""
        bound, found = evaluation_limit(self.settings.evaluation_noise), {}
        for metric, values in self._last.items():
            if len(values) == 2 and values[1][1] - values[0][1] > bound:
                rise = values[1][1] - values[0][1]
                found[metric] = Finding(
                    f"{metric} rose by {rise:.4f} nats, noise gives {bound:.4f}"
                )
        return found


class ForecastLeft(Detector):
    """H27: evaluations outside the registered 95 % interval while the conditions hold."""

    rule_id = "H27"

    def setup(self) -> None:
        """Evaluations outside in a row."""
        self._outside = 0

    def see(self, signal: Signal) -> None:
        """1 outside, 0 inside; a void forecast sends `{"void": true}` and starts anew."""
        if table(signal).get("void"):
            self._outside = 0
        else:
            self._outside = self._outside + 1 if number(signal.value) else 0

    def holds(self, now: float) -> dict[str, Finding]:
        """Enough in a row."""
        if self._outside < self.limit("evaluations"):
            return {}
        return {"": Finding(f"{self._outside} evaluations in a row outside the 95 % interval")}


TRAINING = (
    LossSpike,
    LossTrend,
    GradientNorm,
    NotFinite,
    SkippedSteps,
    Drops,
    RoutingEntropy,
    RouterBias,
    Throughput,
    WorseEvaluation,
    ForecastLeft,
)
