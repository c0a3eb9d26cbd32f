"""Synthetic traces: a clean run of a cluster, and the thirty incident classes of the public run.

A trace is written as a story: `run` minutes of training, `stall`, `end`, `start`. Times are
seconds; a step takes 15 s, everything else is as a healthy cluster sends it.
"""

import math
import random
from collections.abc import Callable

from portolan.health.signals import Signal

STEP_SECONDS = 15.0
EXPERTS = 384
DOMAINS = tuple(f"rack-{n}" for n in range(4))
DIGESTS = {"config": "c0", "code": "k0", "container": "i0", "data": "d0"}
METRIC = "eval_dropless/paloma/macro_loss"


class Story:
    """Signals of one run in order of time; `seed` sets the noise."""

    def __init__(self, seed: int, *, first_row: int = 60_000) -> None:
        self.random = random.Random(seed)
        self.time = 1_750_000_000.0
        self.row = first_row
        self.ordinal = 0
        self.signals: list[Signal] = []
        self.saved = self.row
        self._last_save = self._last_beat = self.time
        self._saves = 0
        self.floors = {"writer": 300.0, "other": 250.0}
        self.recoveries = dict.fromkeys(DOMAINS, 0)
        self.loss_shift = 0.0
        self.drops = 0.034
        self.rate = 2.5e6
        self.step_seconds = STEP_SECONDS

    def add(self, name, value, *, source="", row=None) -> None:
        self.signals.append(Signal(self.time, name, value, row, source))

    def start(self, *, change="", at=None, **digests) -> "Story":
        """A new attempt from the newest checkpoint, up after four minutes."""
        self.ordinal += 1
        self.row = self.saved if at is None else at
        self.add("attempt/start", {"ordinal": self.ordinal, "change": change, **DIGESTS, **digests})
        self.add("phase", 0)
        self._last_save = self.time
        return self

    def up(self, minutes=4) -> "Story":
        """Start-up until the first step."""
        self.idle(minutes)
        self.add("phase", 1)
        return self

    def beat(self) -> None:
        """What the scheduler, the monitor and every rack send once a minute."""
        self.add("scheduler/state", "running")
        self.add("monitor/heartbeat", 1)
        self.add("coordinator/live", 1)
        for domain in DOMAINS:
            self.add("collective/counter", self.row, source=domain)
        for domain in DOMAINS:
            self.add("domain/cpu_load", 0.9 + 0.02 * self.random.random(), source=domain)
            self.add("link/recoveries", self.recoveries[domain], source=domain)

    def idle(self, minutes, *, telemetry=True, beats=True) -> "Story":
        """Time without steps; heartbeats and telemetry go on unless told otherwise."""
        for _ in range(int(minutes)):
            self.time += 60
            if beats:
                self.beat()
            if telemetry:
                self.add("phase", 0 if not self.steps_made else 1)
        return self

    @property
    def steps_made(self) -> bool:
        for signal in reversed(self.signals):
            if signal.name == "attempt/start":
                return False
            if signal.row is not None:
                return True
        return False

    def steps(self, count) -> "Story":
        """Training steps with all that they log; a save every hour, an evaluation every 500."""
        for _ in range(int(count)):
            self.time += self.step_seconds
            noise = self.random.gauss(0, 0.01)
            loss = 1.2 + 0.3 * (60_000 / max(self.row, 1)) ** 0.1 - 0.3 + noise + self.loss_shift
            self.add("train/cross_entropy", loss, row=self.row)
            self.add(
                "norm/gradient/global", 0.3 * math.exp(self.random.gauss(0, 0.05)), row=self.row
            )
            self.add("throughput/tokens_per_second", self.rate * (1 + self.random.gauss(0, 0.01)),
                     row=self.row)  # fmt: skip
            if self.row % 10 == 0:
                for layer in ("0", "1"):
                    self.add("router/drop_fraction", self.drops + self.random.gauss(0, 0.002),
                             source=layer, row=self.row)  # fmt: skip
                    self.add(
                        "router/entropy", math.log(EXPERTS) - 0.002, source=layer, row=self.row
                    )
                    self.add("router/bias_max", 120.0, source=layer, row=self.row)
            if self.row % 500 == 0:
                value = 2.2 - 1e-6 * self.row + self.random.gauss(0, 0.003)
                self.add("evaluation", value, source=METRIC, row=self.row)
                self.add("forecast/outside_95", 0, row=self.row)
            self.row += 1
            if self.time - self._last_beat >= 60:
                self._last_beat = self.time
                self.beat()
                self.add("phase", 1)
            if self.time - self._last_save >= 3600:
                self.save()
        return self

    def hours(self, number) -> "Story":
        return self.steps(number * 3600 / STEP_SECONDS)

    def save(self, kind="temporary", *, growth=0.0) -> "Story":
        """A marked checkpoint and the memory floors after it."""
        self.saved = self.row
        self._last_save = self.time
        self.add("checkpoint/marked", {"step": self.row, "kind": kind})
        self.add("storage/headroom_saves", 20.0)
        self.floors["writer"] += growth
        for kind_, floor in self.floors.items():
            self.add(
                f"host/rss_floor/{kind_}", floor + self.random.gauss(0, 0.1), source=f"{kind_}-0"
            )
        return self

    def end(self, status="failed", *, left=5, logs=1.0, task="0", **more) -> "Story":
        """The end of the attempt; its logs can be read a minute later."""
        end = {"ordinal": self.ordinal, "status": status, "completed": self.row}
        end |= {"retries_left": left, "task": task, "disputed": False} | more
        self.add("attempt/end", end)
        self.time += 60
        self.beat()
        self.add("logs/retrievable", {"ordinal": self.ordinal, "share": logs})
        return self

    def finish(self) -> "Story":
        self.end("succeeded")
        self.add("phase", 2)
        return self

    def behind(self, samples=3) -> "Story":
        """One rack's counter stays behind while the others spin."""
        for _ in range(samples):
            self.time += 60
            for place, domain in enumerate(DOMAINS):
                self.add("collective/counter", self.row + (place != 0) * 7, source=domain)
            for place, domain in enumerate(DOMAINS):
                self.add("domain/cpu_load", 0.9 if place else 0.4, source=domain)
            self.add("scheduler/state", "running")
            self.add("monitor/heartbeat", 1)
            self.add("phase", 1)
        return self


def clean(seed: int) -> list[Signal]:
    """A run without an incident, one to three hours long."""
    return Story(seed).start().up().hours(1 + seed % 3).finish().signals


def restart(story: Story, **more) -> Story:
    return story.end(**more).start().up()


def _i06(story: Story) -> Story:
    for _ in range(3):
        story = restart(story.hours(3))
    return story.hours(0.5)


def _i08(story: Story) -> Story:
    story = story.hours(2).end().start().idle(274)
    story.add("phase", 1)
    return story.steps(300)


def _i09(story: Story) -> Story:
    story.hours(1)
    story._last_save = math.inf
    for growth in (0.0, 11.7, 4.4):
        story.steps(238).save(growth=growth).steps(2)
        story._last_save = math.inf
    return story


def _i18(story: Story) -> Story:
    for steps in (43, 0, 0, 0, 0):
        story.steps(steps).idle(8)
        story.end()
        story.start(at=60_000).up()
    return story


def _i15(story: Story) -> Story:
    story.hours(1.1)
    story.save("permanent").end("cancelled")
    story.start(change="transport", code="k1").up()
    story.drops, story.rate = 1e-4, 2.8e6
    story.steps(71).idle(12).behind(5).end()
    story.start(change="transport", code="k1").up().steps(1).idle(17).end("cancelled")
    story.drops, story.rate = 0.034, 2.5e6
    story.start(change="transport undone").up()
    for row in range(20):
        story.add("resume/check", {"phase": "catch_up", "difference": 0.0, "loss": 1.2}, row=row)
    return story.hours(0.5)


def _i20(story: Story) -> Story:
    story.hours(1)
    story.recoveries["rack-2"] += 505
    story.steps(960)
    return restart(story.steps(220)).steps(200)


def _i22(story: Story) -> Story:
    story.hours(1)
    story.add("storage/status", 403, source="delete")
    story.add("checkpoint/missed", "step 66,000")
    return story.hours(1)


def _i24(story: Story) -> Story:
    story.hours(1)
    story.add("storage/headroom_saves", 0.4)
    story.add("storage/status", 507, source="write")
    story._last_save = math.inf
    return story.hours(2.2)


def _i29(story: Story) -> Story:
    story.step_seconds = 3.0
    for row in (93, 114, 314, 952):
        story.steps(row - story.row)
        story.time += STEP_SECONDS
        story.add("train/cross_entropy", math.nan, row=row)
        story.end()
        story.start(at=0).up()
    return story


def _late(story: Story, hours=2.2) -> Story:
    story._last_save = math.inf
    return story.hours(hours)


def _hang(story: Story, minutes=17) -> Story:
    return story.hours(0.5).idle(minutes)


def _signal(story: Story, name, value, **more) -> Story:
    story.add(name, value, **more)
    return story


def _i04(story: Story) -> Story:
    story.hours(1).save().end()
    story.ordinal += 1
    return story.start().up().steps(60)


def _i27(story: Story) -> Story:
    """Eleven attempts fail before their first step at different places, the twelfth runs."""
    for _ in range(3):
        story.steps(240).save().end(task=str(story.ordinal)).start().idle(50)
        story.add("phase", 1)
    return story.hours(0.5)


def _i28(story: Story) -> Story:
    story = _late(story)
    story.add("storage/status", 400, source="write")
    return restart(story, task="save").steps(100)


def _verdict(story: Story, clean_steps: int) -> Story:
    value = {"change": "c1", "verdict": "accepted", "clean_steps": clean_steps, "mttf_steps": 1500}
    return _signal(story, "change/verdict", value)


def _i26(story: Story) -> Story:
    return restart(_late(story.hours(0.5))).steps(100)


INCIDENTS: dict[str, tuple[str, set[str], Callable[[Story], Story]]] = {
    "I01": ("rung dies at 81 % and is not resumed", {"H01"},
            lambda s: s.hours(1).end(left=0)),
    "I02": ("state saves but cannot be restored", set(), lambda s: s.hours(1.5)),
    "I03": ("rank error, all tasks recorded succeeded", {"H01"},
            lambda s: s.hours(1).end("failed", disputed=True, reason="no success mark, exit 0")),
    "I04": ("first attempt of a day has no trace", {"H25"}, _i04),
    "I05": ("manual resume test: host out of memory", {"H15"},
            lambda s: restart(s.hours(1)).steps(60)),
    "I06": ("device out of memory every three hours", {"H15"}, _i06),
    "I07": ("uncorrectable interconnect error", {"H15"}, lambda s: restart(s.hours(1.2)).steps(60)),
    "I08": ("4 h 34 m at a silent barrier", {"H02"}, _i08),
    "I09": ("memory floor of writers rises after saves", {"H19"}, _i09),
    "I10": ("deny-delete policy, a control", set(),
            lambda s: _signal(s.hours(1), "event/control", "deny-delete").hours(0.5)),
    "I11": ("out of memory while saving, operator cancels", {"H15"},
            lambda s: s.hours(1).end("cancelled").start().up().steps(60)),
    "I12": ("coordinator dies, no retry left", {"H01"},
            lambda s: restart(s.hours(1)).steps(60).end(left=0)),
    "I13": ("node lost", {"H15"}, lambda s: restart(s.hours(0.7)).steps(60)),
    "I14": ("port flap, the second resume stuck", {"H24", "H02"}, lambda s: _flap(s)),
    "I15": ("transport trial hangs and is rolled back", {"H02", "H23"}, _i15),
    "I16": ("planned weight-decay change", set(),
            lambda s: s.hours(1).save("permanent").end("cancelled")
            .start(change="decay", config="c1").up().hours(0.5)),
    "I17": ("15-min silent stall, then link fault", {"H02", "H23"},
            lambda s: restart(s.hours(0.5).behind(16)).steps(60)),
    "I18": ("five launches hang after 43, 0, 0, ...", {"H16"}, _i18),
    "I19": ("hang after 1,590 clean steps", {"H02", "H29"},
            lambda s: _hang(_verdict(s.steps(1590), 1590), 17)),
    "I20": ("link error on a node named days before", {"H24"}, _i20),
    "I21": ("fix runs 2,052 clean steps", {"H29"}, lambda s: _verdict(s.steps(2052), 2052)),
    "I22": ("permanent save fails, hourly saves fine", {"H17", "H18"}, _i22),
    "I23": ("quota suspends writes, 405", {"H18"},
            lambda s: _signal(s.hours(1), "storage/status", 405, source="write").steps(60)),
    "I24": ("quota exceeded, an upload blocks", {"H17", "H18"}, _i24),
    "I25": ("watchdog kill", {"H02"}, lambda s: restart(_hang(s, 16)).steps(60)),
    "I26": ("temporary save never finishes", {"H17"}, _i26),
    "I27": ("registration timeouts at start-up", {"H02"}, _i27),
    "I28": ("save meets HTTP 400, others time out", {"H17"}, _i28),
    "I29": ("NaN in four attempts before the first save", {"H08", "H16"}, _i29),
    "I30": ("no retrievable logs", {"H25"},
            lambda s: s.hours(2).end("succeeded", logs=0.0).idle(15)),
}  # fmt: skip
"""Id -> what happened, rules that must fire, story. H15 accompanies every restart."""


def _flap(story: Story) -> Story:
    story.hours(0.5)
    story.recoveries["rack-1"] += 3
    return story.steps(8).end().start().up().steps(60).end().start().idle(50)


def incident(name: str) -> list[Signal]:
    """The trace of an incident class, seeded by its number."""
    first_row = 0 if name == "I29" else 60_000
    story = Story(100 + int(name[1:]), first_row=first_row)
    if name == "I29":
        story.saved = 0
    return INCIDENTS[name][2](story.start().up()).signals
