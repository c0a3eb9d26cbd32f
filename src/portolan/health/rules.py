"""The health rules as data: one place for every threshold that the monitor, the page and the
documentation use.

Rules H01-H29 follow practice published for the public run (marin #8506, #8435, the operating
guide of its monitors). Limits in minutes, hours and days scale with `Settings.time_scale`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["page", "notify", "record"]

CADENCE_SECONDS = 60.0
"""Time between two evaluations of the rules."""
PENDING_SECONDS = 300.0
"""How long a momentary condition must hold before it becomes an alarm."""
_UNITS = {"minutes": 60.0, "hours": 3600.0, "days": 86400.0, "seconds": 1.0}


@dataclass(frozen=True)
class Rule:
    """One rule.

    `condition` is a text with the limits filled in; `immediate` rules stop or page at once.
    `pending_seconds` is 0 where the condition itself spans rows, evaluations or minutes. Limits
    named in `registered_only` are off until the run registers its own value.
    """

    id: str
    title: str
    condition: str
    severity: Severity
    limits: Mapping[str, float]
    signals: tuple[str, ...]
    advice: str
    immediate: bool = False
    pending_seconds: float = 0.0
    registered_only: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The condition with its limits."""
        return self.condition.format(**self.limits)


@dataclass(frozen=True)
class Settings:
    """What a run sets about its own monitoring.

    Args:
        time_scale: multiplies every limit that is a time; below 1 for short runs.
        registered: absolute limits of this run by name, see `Rule.registered_only`.
        num_experts: experts that a token chooses among.
        evaluation_noise: standard deviation of one evaluation, nats.
        checkpoint_seconds: planned time between two saves.
        entropy_floor: lowest routing entropy that the rungs show at a zero-based row, or None.
    """

    time_scale: float = 1.0
    registered: Mapping[str, float] = field(default_factory=dict)
    num_experts: int | None = None
    evaluation_noise: float = 0.004
    checkpoint_seconds: float = 3600.0
    entropy_floor: Callable[[int], float | None] | None = None

    def seconds(self, rule: Rule, name: str) -> float:
        """A limit that is a time, in seconds of this run."""
        return rule.limits[name] * _UNITS[name.rpartition("_")[2]] * self.time_scale

    def pending(self, rule: Rule) -> float:
        """Seconds that the rule's condition must hold."""
        return 0.0 if rule.immediate else rule.pending_seconds * self.time_scale

    def limit(self, rule: Rule, name: str) -> float | None:
        """A limit; None while it needs a registered value and has none."""
        if name in rule.registered_only:
            return self.registered.get(name)
        return rule.limits[name]


def entropy_limit(num_experts: int) -> float:
    """Lowest mean routing entropy, nats, of a router over `num_experts`."""
    return math.log(num_experts) - RULES["H11"].limits["deficit"]


def evaluation_limit(noise: float) -> float:
    """Largest rise between two evaluations that noise explains, nats."""
    return RULES["H14"].limits["sigmas"] * math.sqrt(2) * noise


_ROWS = ("train/cross_entropy",)

_TABLE = (
    Rule(
        "H01", "Run ended without success",
        "the run ended with no retry left, or a seal was asked for, and its status is not "
        "`succeeded`; or an attempt's sources contradict each other",
        "page", {}, ("attempt/end",),
        "Read the attempt's reason, then start the same command again: it resumes from the newest "
        "checkpoint that validates.", immediate=True,
    ),
    Rule(
        "H02", "No completed step",
        "no completed step for {step_minutes:g} min in training; before the first step "
        "{warn_minutes:g} min (notify), {kill_minutes:g} min",
        "page", {"step_minutes": 15, "warn_minutes": 45, "kill_minutes": 80},
        ("phase", *_ROWS),
        "Name the first party that stopped arriving, take stack dumps, then let the watchdog end "
        "the attempt.",
    ),
    Rule(
        "H03", "Telemetry silent", "no signal of the run for {minutes:g} min", "page",
        {"minutes": 10}, ("phase", *_ROWS),
        "If the scheduler says running, the process is alive but mute: look at its host, not at "
        "its curves.",
    ),
    Rule(
        "H04", "Watcher blind",
        "an enrolment path is stale for {stale_minutes:g} min (scheduler row older than "
        "{scheduler_seconds:g} s, phase older than {phase_hours:g} h), or the monitor missed "
        "{cadences:g} cadences",
        "notify",
        {"stale_minutes": 5, "scheduler_seconds": 90, "phase_hours": 1, "cadences": 2},
        ("scheduler/state", "phase", "monitor/heartbeat"),
        "Repair the monitor first; this says nothing about the run.",
    ),
    Rule(
        "H05", "Loss spike",
        "loss above its floor of {floor_minutes:g} min plus {rise:g} nats and above the mean plus "
        "{sigmas:g} sd of the {rows:g} rows before, in every row of {window_minutes:g} min",
        "page",
        {"rise": 1.0, "sigmas": 6, "rows": 128, "window_minutes": 5, "floor_minutes": 30},
        _ROWS,
        "Compare the batch and the gradient norms of the rows before; if the loss does not come "
        "back, resume from the checkpoint before the spike.",
    ),
    Rule(
        "H06", "Loss above its trend",
        "loss above {ratio:g} times the median of {rows:g} rows for {consecutive:g} rows in a row",
        "page", {"ratio": 1.5, "rows": 128, "consecutive": 10}, _ROWS,
        "Look at the documents of those steps (`portolan show-batch`) and at the gradient norms.",
    ),
    Rule(
        "H07", "Gradient norm", "gradient norm above {gradient_norm_max:g}", "page",
        {"gradient_norm_max": 2.0}, ("norm/gradient/global",),
        "Look which leaf carries it (`norm/gradient/*`); options are a stronger logit z-loss, "
        "fewer drops, a lower rate of that group.",
        pending_seconds=PENDING_SECONDS, registered_only=("gradient_norm_max",),
    ),
    Rule(
        "H08", "Value not finite", "any value that is NaN or infinite", "page", {},
        (*_ROWS, "train/loss", "norm/gradient/global", "evaluation"),
        "The state before it is saved; lower `optimizer.rate_multiplier` and resume.",
        immediate=True,
    ),
    Rule(
        "H09", "Skipped steps", "{count:g} skipped steps within {minutes:g} min", "page",
        {"count": 3, "minutes": 15}, ("steps/skipped",),
        "Something makes updates unusable: find the common batch, expert or host.",
    ),
    Rule(
        "H10", "Dropped assignments",
        "more than {fraction:.0%} of assignments dropped after row {from_row:g}", "notify",
        {"fraction": 0.07, "from_row": 100}, ("router/drop_fraction",),
        "Compare with the rungs at the same fraction; raise the capacity factor or use a dropless "
        "transport.", pending_seconds=PENDING_SECONDS,
    ),
    Rule(
        "H11", "Routing entropy", "mean routing entropy below ln(experts) - {deficit:g} nats",
        "notify", {"deficit": 0.03}, ("router/entropy",),
        "Find the layer whose experts starve (`router/load_max_over_mean/*`) and its balance bias.",
        pending_seconds=PENDING_SECONDS,
    ),
    Rule(
        "H12", "Router bias", "magnitude of the router bias above {router_bias_max:g}", "notify",
        {"router_bias_max": 400}, ("router/bias_max", "router/bias_min"),
        "Look whether it still grows: compare its slope with the rungs at the same fraction.",
        pending_seconds=PENDING_SECONDS, registered_only=("router_bias_max",),
    ),
    Rule(
        "H13", "Throughput lost",
        "most of at least {samples:g} samples within {minutes:g} min below {share:.0%} of the "
        "segment's own level, or below a floor ({tokens_per_second_min:,.0f} tokens/s, MFU "
        "{mfu_min:.0%})",
        "notify",
        {"samples": 10, "minutes": 15, "share": 0.75, "tokens_per_second_min": 2.0e6,
         "mfu_min": 0.15},
        ("throughput/tokens_per_second", "throughput/mfu"),
        "Look for another load on the machine, a slow host or a throttled device.",
        registered_only=("tokens_per_second_min", "mfu_min"),
    ),
    Rule(
        "H14", "Evaluation worse than the one before",
        "an evaluation above the previous one of the same metric and mixture segment by more than "
        "{sigmas:g} sqrt(2) sd of one evaluation",
        "notify", {"sigmas": 3}, ("evaluation",),
        "Check metric identity and packing, then the domains: one domain can move the macro loss.",
    ),
    Rule(
        "H15", "Restart", "a retry or re-queue within {minutes:g} min", "record", {"minutes": 15},
        ("attempt/start",), "Note the cause of the attempt before.",
    ),
    Rule(
        "H16", "Same failure again: stop",
        "two failures within {window_rows:g} rows of each other, or {per_task:g} failures of a "
        "task or {total:g} in all without a new checkpoint",
        "page", {"window_rows": 10, "per_task": 3, "total": 5}, ("attempt/end",),
        "Stop restarting: a fault that repeats is not weather. Find what the failing steps share.",
        immediate=True,
    ),
    Rule(
        "H17", "Checkpoint late",
        "no marked checkpoint for {intervals:g} planned intervals, at least {floor_minutes:g} min, "
        "or a permanent milestone missed",
        "page", {"intervals": 2, "floor_minutes": 5}, ("checkpoint/marked", "checkpoint/missed"),
        "Find the writer that has not finished and the store's answer to it.",
    ),
    Rule(
        "H18", "Storage refuses",
        "room for fewer than {saves:g} saves, or status 403, 405 or 507 on a write or delete",
        "page", {"saves": 2}, ("storage/headroom_saves", "storage/status"),
        "Free space or restore the right to write before the next save is due.", immediate=True,
    ),
    Rule(
        "H19", "Host memory grows after saves",
        "memory floor of writers up by more than {gib:g} GiB at each of {saves:g} saves, not that "
        "of other hosts",
        "notify", {"gib": 2, "saves": 2}, ("host/rss_floor/writer", "host/rss_floor/other"),
        "Plan a restart before the writers run out of memory; look at buffers that saves leave.",
    ),
    Rule(
        "H20", "Resume mismatch",
        "loss differs from the rows before the resume by more than {catch_up:g} nats while they "
        "are repeated or {later:.0%} later, or a batch differs",
        "page", {"catch_up": 0.002, "later": 0.01}, ("resume/check",),
        "Stop: state, data order or program is not the one that was saved.", immediate=True,
    ),
    Rule(
        "H21", "Undeclared change",
        "digest of configuration, code, container or data differs from the previous attempt "
        "without a change record",
        "page", {}, ("attempt/start",),
        "Record the change or go back to the registered inputs.", immediate=True,
    ),
    Rule(
        "H22", "Curve broken", "replayed or trial rows in the canonical view, or clocks that "
        "contradict each other", "notify", {}, ("view/fault",),
        "Correct the intervals of the attempts before anybody reads the curve.",
        pending_seconds=PENDING_SECONDS,
    ),
    Rule(
        "H23", "Collective stuck",
        "one domain's counter behind all others by one equal amount, or its CPU load below "
        "{load:g} of its peers' median, in {samples:g} samples in a row",
        "page", {"load": 0.6, "samples": 2}, ("collective/counter", "domain/cpu_load"),
        "That domain is the first that failed to arrive; keep its stack dump.",
    ),
    Rule(
        "H24", "Link recovers", "link-recovery counter rises within {hours:g} h", "notify",
        {"hours": 1}, ("link/recoveries",),
        "Take the node out at the next restart; such links fail hard some days later.",
    ),
    Rule(
        "H25", "Logs missing",
        "{minutes:g} min after an attempt's end not all of its logs can be read; or an attempt "
        "left no record",
        "notify", {"minutes": 10}, ("logs/retrievable", "attempt/start"),
        "Fetch the logs before they expire; record a log_gap for what is lost.",
    ),
    Rule(
        "H26", "Two at once", "{count:g} live coordinators or gangs of one lineage", "page",
        {"count": 2}, ("coordinator/live",),
        "End the newer one before both write the same checkpoint tree.", immediate=True,
    ),
    Rule(
        "H27", "Forecast left",
        "outside the 95 % interval at {evaluations:g} evaluations in a row while the conditions "
        "hold",
        "notify", {"evaluations": 3}, ("forecast/outside_95",),
        "Run the checklist; then compare rate, batch, data and packing with the rungs.",
    ),
    Rule(
        "H28", "Alarm quality not published",
        "no published detection rate and false alarms a day for {days:g} days", "record",
        {"days": 31}, ("alarms/quality",),
        "Replay the recorded incidents and publish what the rules found and missed.",
    ),
    Rule(
        "H29", "Stability unproved",
        "a change called accepted before n clean steps with 3 / n at most the stated rate (mean "
        "time to failure {mttf_steps:g} steps unless stated)",
        "record", {"mttf_steps": 1500}, ("change/verdict",),
        "Write `accepted_stability_unproved` until the steps are done.",
    ),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in _TABLE}
"""Every rule by id, in order."""
