"""Learning rates: their peak by law, their shape over a run, and re-timing. No JAX here.

Every value is computed on the host in float64 from the zero-based count of updates, so a run
that resumes at any count sees the same rates.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal, NamedTuple

import numpy as np

from portolan.errors import UsageError

Law = Literal["aug", "may"]

RATE_CAP = 0.05
"""No peak rate exceeds this; it binds on small, short runs."""
HYPERBALL_TO_ADAM = 13 / 3
"""Ratio of the rate of norm-constrained matrices to that of Adam (marin #7856)."""
BETA1 = 0.90
MIN_RATIO = 0.05
WARMUP_FRACTION = 0.01
DECAY_INITIAL = 0.02
"""Decay of router and head gate at the first update (marin #8818)."""

_LAWS: dict[str, tuple[float, float, float]] = {
    "aug": (0.087571, -0.3461, -0.3448),  # marin #7856, fitted at widths 512..2048
    "may": (0.06602, -0.395, -0.150),  # marin #5951
}
_EPSILON_FACTOR = 9.676e-18
_BETA2_TOKENS = 131_072
_BETA2_BOUNDS = (0.95, 0.9999)
_FITTED_FROM_WIDTH, _FITTED_FROM_TOKENS, _FITTED_FROM_STEP_TOKENS = 512, 5e8, 5e5


class ScheduleError(UsageError):
    """A horizon, warm-up or re-timing event that cannot be followed."""


class Rates(NamedTuple):
    """What one update needs: float32 scalars `eta` (constrained matrices), `eta_adam`, `decay`."""

    eta: np.float32
    eta_adam: np.float32
    decay: np.float32


@dataclass(frozen=True)
class PeakRates:
    """Peak rates and Adam constants of a run, with the flags that make runs incomparable.

    `capped`: a cap of the law acted; `beta2_guarded`: the short-run guard lowered beta2;
    `extrapolated`: outside the range that the law was fitted on.
    """

    hyperball: float
    adam: float
    beta1: float
    beta2: float
    epsilon: float
    capped: bool = False
    beta2_guarded: bool = False
    extrapolated: bool = False


def peak_rates(
    tokens: int | None,
    width: int,
    tokens_per_step: int | None,
    law: Law = "aug",
    *,
    beta2_guard: bool = False,
    beta1: float = BETA1,
) -> PeakRates:
    """Rates from the tokens of the full planned run, the width and the tokens per update.

    eta_A = min(0.05, c T^a D^b sqrt(B)), eta = min(0.05, 13/3 eta_A), beta2 = 0.999^(B/131072)
    clipped to [0.95, 0.9999], epsilon = 9.676e-18 sqrt(T/B); the guard takes
    min(beta2, 1 - 10/H) with H = T/B. Source: marin #7856, #8003.

    Raises:
        ScheduleError: unknown law, or tokens or tokens per step unset or not positive.
    """
    if law not in _LAWS:
        raise ScheduleError(f"law = {law!r} is unknown", remedy=f"use one of {sorted(_LAWS)}")
    for name, value in (("tokens", tokens), ("tokens_per_step", tokens_per_step)):
        if value is None or value <= 0:
            raise ScheduleError(
                f"the rate law {law!r} needs {name} of the full planned run, got {value}",
                remedy="pass the production value even for a shortened diagnostic",
            )
    assert tokens is not None and tokens_per_step is not None
    factor, token_power, width_power = _LAWS[law]
    raw = factor * tokens**token_power * width**width_power * math.sqrt(tokens_per_step)
    adam = min(RATE_CAP, raw)
    low, high = _BETA2_BOUNDS
    beta2 = min(max(0.999 ** (tokens_per_step / _BETA2_TOKENS), low), high)
    num_updates = tokens / tokens_per_step
    guarded = beta2_guard and 1 - 10 / num_updates < beta2
    return PeakRates(
        hyperball=min(RATE_CAP, HYPERBALL_TO_ADAM * adam),
        adam=adam,
        beta1=beta1,
        beta2=max(0.0, 1 - 10 / num_updates) if guarded else beta2,
        epsilon=_EPSILON_FACTOR * math.sqrt(num_updates),
        capped=HYPERBALL_TO_ADAM * raw > RATE_CAP,
        beta2_guarded=guarded,
        extrapolated=(
            width < _FITTED_FROM_WIDTH
            or tokens < _FITTED_FROM_TOKENS
            or tokens_per_step < _FITTED_FROM_STEP_TOKENS
        ),
    )


def token_exponent(law: Law) -> float:
    """Power of the tokens of the whole run in the peak rate."""
    return _LAWS[law][1]


def scale_rates(peak: PeakRates, multiplier: float) -> PeakRates:
    """Both peak rates times `multiplier`, past the cap if need be: one arm of a rate sweep."""
    return replace(peak, hyperball=peak.hyperball * multiplier, adam=peak.adam * multiplier)


def count_warmup_steps(horizon: int, fraction: float = WARMUP_FRACTION) -> int:
    """floor(fraction * horizon), in exact decimal arithmetic (1 % of 2900 is 29, not 28)."""
    return int(Decimal(repr(float(fraction))) * horizon)


@dataclass(frozen=True)
class HorizonEvent:
    """From update `step` on, decay linearly so as to end at update `horizon`."""

    step: int
    horizon: int


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then linear decay that reaches `min_ratio` at `horizon`, constant beyond.

    Args:
        horizon: planned number of updates.
        warmup_steps: updates until the peak; None takes 1 % of the horizon, rounded down.
        min_ratio: factor at the horizon, one past the last update.
        events: re-timings in order of their step; each continues from the factor it meets.

    Raises:
        ScheduleError: horizon < 1, min_ratio outside [0, 1], warm-up not in [0, horizon), or an
            event before the end of the warm-up, out of order, or with its horizon not later
            than its step.
    """

    horizon: int
    warmup_steps: int | None = None
    min_ratio: float = MIN_RATIO
    events: tuple[HorizonEvent, ...] = ()

    def __post_init__(self) -> None:
        """Resolve the warm-up and refuse what cannot be followed."""
        if self.horizon < 1:
            raise ScheduleError(
                f"horizon = {self.horizon} updates, at least 1 is needed",
                remedy="plan more tokens, or fewer tokens per step",
            )
        if not 0 <= self.min_ratio <= 1:
            raise ScheduleError(f"min_ratio = {self.min_ratio} must lie in [0, 1]")
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", count_warmup_steps(self.horizon))
        if not 0 <= self.warmup < self.horizon:
            raise ScheduleError(
                f"warmup_steps = {self.warmup_steps} must lie in 0..{self.horizon - 1}, "
                f"below the horizon",
                remedy="lower warmup_steps or plan more updates",
            )
        object.__setattr__(self, "events", _as_events(self.events))
        previous = self.warmup
        for event in self.events:
            _check_event(event, self.warmup, previous)
            previous = event.step

    @property
    def warmup(self) -> int:
        """Number of warm-up updates."""
        assert self.warmup_steps is not None
        return self.warmup_steps

    @property
    def final_horizon(self) -> int:
        """Updates of the run after all re-timings."""
        return self.events[-1].horizon if self.events else self.horizon

    def retime(self, step: int, horizon: int) -> "Schedule":
        """The schedule with one more event; warns when that lengthens the run."""
        if horizon > self.final_horizon:
            warnings.warn(
                f"re-timing at update {step} lengthens the run from {self.final_horizon} to "
                f"{horizon} updates; peak rates keep the values of the original plan",
                stacklevel=2,
            )
        return replace(self, events=(*self.events, HorizonEvent(step, horizon)))

    def factor(self, step: int) -> float:
        """Share of the peak rate at zero-based update `step`; 0 at update 0 of a warm-up."""
        if step < self.warmup:
            return step / self.warmup
        start, value, end = self.warmup, 1.0, self.horizon
        for event in self.events:
            if step < event.step:
                break
            value = _toward(value, self.min_ratio, start, end, event.step)
            start, end = event.step, event.horizon
        return _toward(value, self.min_ratio, start, end, step)

    def decay(self, step: int, initial: float = DECAY_INITIAL, start: int = 0) -> float:
        """Decay of router and head gate: `initial` falling linearly to exactly 0 at the horizon.

        Args:
            step: zero-based update.
            initial: value at update 0, also when it is switched on later.
            start: first update that decays; before it the value is 0 (the public run switched it
                on at 58014, marin #8833).
        """
        if step < start:
            return 0.0
        since, value, end = 0, initial, self.horizon
        for event in self.events:
            if step < event.step:
                break
            value = _toward(value, 0.0, since, end, event.step)
            since, end = event.step, event.horizon
        return _toward(value, 0.0, since, end, step)

    def rates(
        self, step: int, peak: PeakRates, *, initial_decay: float = DECAY_INITIAL, start: int = 0
    ) -> Rates:
        """Float32 scalars for the update with zero-based count `step`."""
        factor = self.factor(step)
        return Rates(
            eta=np.float32(peak.hyperball * factor),
            eta_adam=np.float32(peak.adam * factor),
            decay=np.float32(self.decay(step, initial_decay, start)),
        )


def _toward(value: float, target: float, start: int, end: int, step: int) -> float:
    """The line from (start, value) to (end, target) at `step`, and `target` from `end` on."""
    if step >= end:
        return target
    return value - (value - target) * (step - start) / (end - start)


def _as_events(events: Iterable[HorizonEvent | tuple[int, int]]) -> tuple[HorizonEvent, ...]:
    return tuple(e if isinstance(e, HorizonEvent) else HorizonEvent(*e) for e in events)


def _check_event(event: HorizonEvent, warmup: int, previous: int) -> None:
    if event.step < warmup:
        raise ScheduleError(
            f"horizon event at update {event.step} lies inside the warm-up of {warmup} updates",
            remedy="re-time after the warm-up",
        )
    if event.step < previous:
        raise ScheduleError(
            f"horizon event at update {event.step} comes after one at update {previous}",
            remedy="list the events in order of their step",
        )
    if event.horizon <= event.step:
        raise ScheduleError(
            f"horizon event at update {event.step} would end at update {event.horizon}, not later",
            remedy="choose a horizon after the step of the event",
        )
