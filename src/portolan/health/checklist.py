"""The checklist of twelve items: what was looked at, in which window, and what came out.

Every item is pass, fail or not measured in each window that the run has reached; not measured is
never pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from portolan.health import items
from portolan.health.curves import RunCurves
from portolan.health.rules import RULES, Settings, Severity

Verdict = Literal["pass", "fail", "not measured"]
Outcome = tuple[Verdict, str]

CHANGE_STEPS = 200
"""Updates after a change that are looked at."""
CONTEXT_SHARE = 0.01


@dataclass(frozen=True)
class Window:
    """A part of the run, as shares of its planned updates, and what it is for."""

    name: str
    start: float
    end: float
    reason: str = ""


ALL = Window("all", 0.0, 1.0, "the whole run so far")
W1 = Window("W1", 0.0, 0.03, "warm-up: look at initial weights, batch, capacity factor")
W2 = Window("W2", 0.22, 0.35, "gradient peak: if it keeps rising, a stronger logit z-loss, fewer "
            "drops, norm constraints")  # fmt: skip
W4 = Window("W4", 0.80, 1.0, "cooldown: at a plateau check the numerics before the recipe")
WINDOWS = (ALL, W1, W2, W4)
"""Windows of every run; a context change adds W3, any change Wc."""


@dataclass(frozen=True)
class Evidence:
    """Everything that the items look at.

    Args:
        target: the run.
        rungs: finished or truncated runs of its ladder.
        settings: limits of the run's own.
        evaluations: metric of record by completed updates, one metric identity.
        rates: update (zero-based) -> the two learning rates of the formula; None if unknown.
        capped: whether a cap acted on the law, which breaks the ratio of the rates.
        config: digests (registered, live) of the resolved configuration.
        bands: (share of the run, band name) of each evaluation that may be scored.
        void: why the forecast does not apply, empty while it does.
        changes, context_changes: completed updates at which something was changed.
        mixture_changes: completed updates at which a new mixture segment starts.
    """

    target: RunCurves
    rungs: Sequence[RunCurves] = ()
    settings: Settings = field(default_factory=Settings)
    evaluations: Mapping[int, float] = field(default_factory=dict)
    rates: Callable[[int], tuple[float, float]] | None = None
    capped: bool = False
    config: tuple[str, str] | None = None
    bands: Sequence[tuple[float, str]] = ()
    void: str = ""
    changes: Sequence[int] = ()
    context_changes: Sequence[int] = ()
    mixture_changes: Sequence[int] = ()

    def windows(self) -> list[Window]:
        """All windows that this run has, reached or not."""
        steps = self.target.steps
        found = list(WINDOWS)
        for step in self.context_changes:
            start = step / steps
            found.append(Window("W3", start, start + CONTEXT_SHARE, "context change: drops"))
        for step in self.changes:
            found.append(Window("Wc", step / steps, (step + CHANGE_STEPS) / steps, "a change"))
        return found


@dataclass(frozen=True)
class Item:
    """One question of the checklist: `limit` is its bound in words, `windows` where it is asked."""

    number: int
    title: str
    limit: str
    windows: tuple[str, ...]
    severity: Severity
    check: Callable[[Evidence, Window], Outcome]
    advice: str


@dataclass(frozen=True)
class Result:
    """An item's outcome in each window reached."""

    item: Item
    outcomes: Mapping[str, Outcome]

    @property
    def verdict(self) -> Verdict:
        """fail if any window failed, else the outcome over the whole run so far."""
        if any(verdict == "fail" for verdict, _ in self.outcomes.values()):
            return "fail"
        return self.outcomes.get(ALL.name, ("not measured", ""))[0]

    @property
    def reason(self) -> str:
        """What was found in the windows that decide the verdict."""
        if self.verdict == "fail":
            failed = [(w, why) for w, (word, why) in self.outcomes.items() if word == "fail"]
            return "; ".join(f"{why} ({w})" if w != ALL.name else why for w, why in failed)
        return self.outcomes.get(ALL.name, ("", "the run has not started"))[1]

    @property
    def unmeasured(self) -> list[str]:
        """Windows that were reached and could not be judged."""
        return [w for w, (word, _) in self.outcomes.items() if word == "not measured"]


ITEMS = (
    Item(
        1, "gradient norm: no growing oscillation",
        f"spread of {items.BLOCK_STEPS} detrended steps at most {items.SPREAD_RATIO:g} x that of "
        f"those before; below {RULES['H07'].limits['gradient_norm_max']:g} after "
        f"{items.LEVEL_FROM:.0%} of the run where that level is registered; growth in W2 as on "
        "the rungs",
        ("all", "W1", "W2", "W4", "Wc"), "notify", items.gradient, RULES["H07"].advice,
    ),
    Item(
        2, "constrained norms hold",
        f"relative drift at most {items.MAX_DRIFT:g} from the first update, each leaf",
        ("all", "W1", "W4", "Wc"), "page", items.constraints,
        "A drift is a defect: a norm counts some shard twice or not at all. Stop and compare with "
        "one device.",
    ),
    Item(
        3, "drops follow the ladder",
        f"inside the rungs' band, at most {RULES['H10'].limits['fraction']:.0%} after step "
        f"{RULES['H10'].limits['from_row']:g}",
        ("all", "W1", "W3", "Wc"), "notify", items.drops, RULES["H10"].advice,
    ),
    Item(
        4, "train loss falls",
        f"never above {RULES['H06'].limits['ratio']:g} x trend for "
        f"{RULES['H06'].limits['consecutive']:g} rows, no jump above {items.MAX_JUMP:g} nat "
        "or what the scatter of the rungs' rows explains",
        ("all", "W1", "W4", "Wc"), "page", items.train_loss, RULES["H06"].advice,
    ),
    Item(
        5, "evaluations fall",
        f"each at most the one before + {RULES['H14'].limits['sigmas']:g} sqrt(2) sd of one "
        "evaluation, same metric identity and mixture segment",
        ("all", "W1", "W4", "Wc"), "notify", items.evaluations, RULES["H14"].advice,
    ),
    Item(
        6, "router bias bounded",
        f"growth inside the rungs' band after {items.BIAS_FROM:.0%} of the run",
        ("all", "W1"), "notify", items.router_bias, RULES["H12"].advice,
    ),
    Item(
        7, "routing entropy near its maximum",
        f"at least ln(experts) - {RULES['H11'].limits['deficit']:g} nats, or what the rungs show "
        "where they lie lower",
        ("all", "W1", "W4"), "notify", items.entropy, RULES["H11"].advice,
    ),
    Item(
        8, "free norms grow as on the ladder",
        f"embedding, router and head gate inside the rungs' band; growth not rising over "
        f"{items.SLOPE_MARKS} marks",
        ("all", "W1", "W4"), "notify", items.free_norms,
        "Weight decay on the group that grows; test it on the two cheapest rungs first.",
    ),
    Item(
        9, "throughput constant",
        f"not below {RULES['H13'].limits['share']:.0%} of the run's own level in "
        f"{items.THROUGHPUT_CHECKS} checks in a row",
        ("all", "W1", "W4", "Wc"), "notify", items.throughput, RULES["H13"].advice,
    ),
    Item(
        10, "learning-rate schedules correct",
        f"logged rates equal the formula to {items.RATE_TOLERANCE:g}, ratio 13/3 unless capped",
        ("all", "W1", "W4", "Wc"), "page", items.learning_rates,
        "The schedule that runs is not the planned one: stop and compare the settings.",
    ),
    Item(
        11, "configuration is the registered one", "digests equal",
        ("all", "W1", "Wc"), "page", items.configuration, RULES["H21"].advice,
    ),
    Item(
        12, "projected evaluation met", "inside 90 % at the newest mark, never red",
        ("all",), "notify", items.projection,
        "Both sides count. Too good: check metric identity, contamination and packing first. Too "
        "bad: rate, batch, data, then the shapes below.",
    ),
)  # fmt: skip
"""The checklist."""
NUM_EARLY_ITEMS = 11
"""Items that must all pass in W1 before the first 3 % may be called clear."""


def run_checklist(evidence: Evidence) -> list[Result]:
    """Every item in every window of it that the run has reached."""
    reached = [w for w in evidence.windows() if evidence.target.progress > w.start]
    return [
        Result(
            item,
            {w.name: item.check(evidence, w) for w in reached if w.name in item.windows},
        )
        for item in ITEMS
    ]


def first_three_percent(evidence: Evidence) -> tuple[bool, str]:
    """Whether the warm-up may be called clear: items 1-11 measured on all of W1, none failed."""
    if evidence.target.progress < W1.end:
        return False, f"{evidence.target.progress:.1%} of the run, W1 ends at {W1.end:.0%}"
    missing, failed = [], []
    for item in ITEMS[:NUM_EARLY_ITEMS]:
        verdict = item.check(evidence, W1)[0]
        if verdict == "fail":
            failed.append(str(item.number))
        elif verdict == "not measured":
            missing.append(str(item.number))
    if failed:
        return False, f"failed: items {', '.join(failed)}"
    if missing:
        return False, f"not measured: items {', '.join(missing)}"
    return True, "items 1-11 pass on all of W1"
