"""Cross-checks of a whole run by formula (R4): each holds, fails, or says why it cannot decide."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from portolan.record.audit.expressions import ARITHMETIC, show
from portolan.record.audit.figures import Figure, strongest
from portolan.record.audit.formulas import Index, derive, show_value
from portolan.record.quantities import agree_within
from portolan.record.times import parse_time

Outcome = Literal["holds", "fails", "refused", "no data"]

DEVICE_FIT = Decimal("0.01")
"""A device peak within 1 % of what the utilisation implies counts as fitting it."""


@dataclass(frozen=True)
class CrossCheck:
    """A formula applied to the figures of a run, its outcome and the calculation."""

    name: str
    outcome: Outcome
    reason: str
    arithmetic: tuple[str, ...] = ()


def cross_check(
    index: Index, times: Sequence[Figure] = (), reached: int | None = None
) -> list[CrossCheck]:
    """All cross-checks.

    `times` are the figures of unit `time` with basis `time.wall`; `reached` counts the updates
    completed by the furthest observation.
    """
    formulas = (
        ("tokens = steps x batch x sequence length", "tokens.planned", "tokens"),
        ("devices in the mesh = tasks x devices of a task", "devices.mesh", "devices"),
        ("checkpoint bytes of a parameter", "ckpt.bytes_per_param", "bytes/parameter"),
        ("final step from the plan", "steps.planned", "steps"),
    )
    checks = [_by_formula(name, basis, unit, index) for name, basis, unit in formulas]
    return [
        *checks,
        _final_step(index, reached),
        _flops_per_token(index),
        identity_of_utilisation(index),
        _wall(index, times),
        _run_utilisation(index),
    ]


def _one(index: Index, basis: str) -> Figure | None:
    """The weightiest figure of a basis of the run itself."""
    name, _, unit = basis.partition("|")
    found = [
        figure
        for figure in index.figures
        if figure.basis_name == name
        and figure.is_numeric
        and not figure.subject
        and not figure.scope.startswith("segment:")
        and (not unit or figure.unit == unit)
    ]
    return strongest(found)


def _by_formula(name: str, basis: str, unit: str, index: Index) -> CrossCheck:
    stated, derived = _one(index, f"{basis}|{unit}"), derive(basis, unit, index)
    if derived is None or derived.number is None:
        return CrossCheck(name, "no data", f"the inputs of {basis} are not all stated")
    if stated is None or stated.number is None:
        return CrossCheck(name, "no data", f"no figure states {basis}", (derived.arithmetic,))
    holds = agree_within(stated.number, derived.number, max(stated.place, derived.place))
    reason = f"{stated.id} says {show_value(stated)}"
    return CrossCheck(name, "holds" if holds else "fails", reason, (derived.arithmetic,))


def _final_step(index: Index, reached: int | None) -> CrossCheck:
    """The run ends at the planned step; before that nothing can be said, beyond it it is wrong."""
    name = "updates completed at the end = updates planned"
    planned = _one(index, "steps.planned")
    if planned is None or planned.number is None or reached is None:
        return CrossCheck(name, "no data", "needs the planned steps and an observation")
    line = f"{reached:,} of {show_value(planned)}"
    if reached < planned.number:
        return CrossCheck(name, "no data", "the run has not ended", (line,))
    holds = reached == planned.number
    return CrossCheck(name, "holds" if holds else "fails", f"planned by {planned.id}", (line,))


def _flops_per_token(index: Index) -> CrossCheck:
    """Model FLOPs of a token against the rule of thumb 6 A, which they must not fall below."""
    name = "model FLOPs of a token against 6 x active parameters"
    flops, active = _one(index, "flops.model.fwd_bwd"), _one(index, "params.active")
    tokens = derive("tokens.planned", "tokens", index)
    if None in (numbers := [f.number if f else None for f in (flops, active, tokens)]):
        return CrossCheck(name, "no data", "needs model FLOPs, active parameters and tokens")
    total, count, num_tokens = (Decimal(number or 0) for number in numbers)
    per_token = ARITHMETIC.divide(total, num_tokens)
    ratio = ARITHMETIC.divide(per_token, 6 * count)
    assert flops is not None
    lines = (
        f"{show_value(flops)} / {show(num_tokens)} = {show(per_token, 5)} FLOP per token",
        f"{show(per_token, 5)} / (6 × {show(count)}) = {show(ratio, 4)}, "
        f"{show(100 * (ratio - 1), 2)} % above 6 A",
    )
    holds = Decimal(1) <= ratio < Decimal(2)
    return CrossCheck(name, "holds" if holds else "fails", "attention and head add to 6 A", lines)


def identity_of_utilisation(index: Index) -> CrossCheck:
    """MFU x peak x devices x seconds = FLOPs of a step; never decides without a recorded peak.

    A utilisation and a step time fit several pairs of device count and device peak, so a peak
    without a source settles nothing (X3).
    """
    name = "MFU x peak x devices x step time = FLOPs of a step"
    flops, steps = _one(index, "flops.model.fwd_bwd"), _one(index, "steps.planned")
    used, seconds = _one(index, "mfu.segment@|%"), _one(index, "time.step@")
    counts = [f for f in index.figures if f.basis in ("devices.mesh", "devices.installed")]
    counts = [figure for figure in counts if figure.unit == "devices"]
    peaks = [f for f in index.figures if f.basis_name == "peak.flops@" and f.is_numeric]
    numbers = [f.number if f else None for f in (flops, steps, used, seconds)]
    if None in numbers or not counts:
        return CrossCheck(name, "no data", "needs FLOPs, steps, MFU, step time and devices")
    total, num_steps, percent, duration = (Decimal(number or 0) for number in numbers)
    needed = [
        (figure, ARITHMETIC.divide(total, num_steps * duration * (figure.number or 1)))
        for figure in counts
    ]
    share = percent / 100
    lines = tuple(
        f"{show(total, 5)} / {show(num_steps)} / {show(duration)} s / {show_value(figure)} = "
        f"{show(rate, 4)} FLOP/s a device, / {share} = {show(ARITHMETIC.divide(rate, share), 4)}"
        for figure, rate in needed
    )
    recorded = _recorded_peaks(index)
    if not recorded:
        fits = _fits(needed, peaks, share)
        reason = "the peak P is not recorded with the MFU, so this identity decides nothing"
        return CrossCheck(name, "refused", reason + fits, lines)
    mesh = next((pair for pair in needed if pair[0].basis == "devices.mesh"), needed[0])
    implied = ARITHMETIC.divide(mesh[1], share)
    holds = any(abs(implied - (p.number or 0)) <= DEVICE_FIT * (p.number or 0) for p in recorded)
    reason = f"recorded peak {', '.join(show_value(peak) for peak in recorded)} FLOP/s"
    return CrossCheck(name, "holds" if holds else "fails", reason, lines)


def _recorded_peaks(index: Index) -> list[Figure]:
    """Device peaks that say where they come from."""
    peaks = (f for f in index.figures if f.basis_name == "peak.flops@" and f.is_numeric)
    return [peak for peak in peaks if peak.has_locator]


def _fits(needed: Iterable[tuple[Figure, Decimal]], peaks: Sequence[Figure], share: Decimal) -> str:
    fits = [
        f"{show_value(figure)} devices fit {show_value(peak)} FLOP/s"
        for figure, rate in needed
        for peak in peaks
        if abs(ARITHMETIC.divide(rate, share) - (peak.number or 0))
        <= DEVICE_FIT * (peak.number or 0)
    ]
    return f"; within 1 % {' and '.join(fits)}" if fits else ""


def _stages(index: Index) -> list[Figure]:
    return [f for f in index.figures if f.basis_name == "time.step@" and not f.subject]


def _wall(index: Index, times: Sequence[Figure]) -> CrossCheck:
    """Elapsed time is at least the time inside steps; their ratio is the effective time."""
    name = "elapsed time is at least the time inside steps"
    stages = _stages(index)
    reached = _one(index, "step.row")
    if len(times) < 2 or reached is None or reached.number is None:
        return CrossCheck(name, "no data", "needs two moments and the step reached")
    windows = stage_windows(stages, int(reached.number))
    if windows is None:
        return CrossCheck(name, "no data", "the windows of the step times do not cover the run")
    moments = sorted(parse_time(figure.value) for figure in times)
    wall = Decimal(int((moments[-1] - moments[0]).total_seconds()))
    inside = sum((steps * seconds for steps, seconds in windows), Decimal(0))
    share = ARITHMETIC.divide(inside, wall)
    stages_text = " + ".join(f"{steps:,} × {show(seconds)}" for steps, seconds in windows)
    lines = (
        f"{stages_text} = {show(inside)} s inside steps",
        f"{show(inside)} / {show(wall)} = {show(100 * share, 3)} % effective time",
        f"{show(wall)} / {show(reached.number)} = {show(wall / reached.number, 4)} s of it a step",
    )
    return CrossCheck(name, "holds" if share <= 1 else "fails", "step times are rounded", lines)


def _run_utilisation(index: Index) -> CrossCheck:
    """`mfu.run` of the stages so far; a plain mean over stages or steps would be another number."""
    name = "utilisation of the run, weighted by time"
    needed = ("flops.model.fwd_bwd", "steps.planned", "devices.mesh|devices", "step.row")
    found = [_one(index, basis) for basis in needed]
    numbers = [figure.number for figure in found if figure and figure.number is not None]
    peaks = _recorded_peaks(index)
    windows = stage_windows(_stages(index), int(numbers[-1])) if len(numbers) == 4 else None
    if not windows or not peaks:
        reason = "needs FLOPs, steps, devices, step times of all stages, and a recorded peak"
        return CrossCheck(name, "no data", reason)
    step_flops = ARITHMETIC.divide(numbers[0], numbers[1])
    peak = peaks[0].number or Decimal(1)
    share = time_weighted_utilisation(windows, step_flops, int(numbers[2]), peak)
    line = (
        f"sum of FLOPs / ({show(peak)} × {show(numbers[2])} × seconds) = {show(100 * share, 4)} %"
    )
    return CrossCheck(name, "holds" if share <= 1 else "fails", "of the time inside steps", (line,))


def stage_windows(stages: Sequence[Figure], last_row: int) -> list[tuple[int, Decimal]] | None:
    """(steps, seconds a step) of stages named `a-b` or `from-a`; None unless they tile 0..last."""
    spans: list[tuple[int, int, Decimal]] = []
    for stage in stages:
        first, _, last = stage.qualifier.removeprefix("from-").partition("-")
        end = last or (str(last_row) if stage.qualifier.startswith("from-") else "")
        if not (first.isdecimal() and end.isdecimal()):
            return None
        spans.append((int(first), int(end), stage.number or Decimal(0)))
    spans.sort()
    starts, ends = [0, *(end for _, end, _ in spans[:-1])], [start for start, _, _ in spans]
    if not spans or starts != ends or spans[-1][1] != last_row:
        return None
    return [(end - start, seconds) for start, end, seconds in spans]


def time_weighted_utilisation(
    stages: Sequence[tuple[int, Decimal]], step_flops: Decimal, devices: int, peak: Decimal
) -> Decimal:
    """`mfu.run` = sum F / (P D sum t) over (steps, seconds a step): never the mean of stages."""
    steps = sum(count for count, _ in stages)
    seconds = sum((count * duration for count, duration in stages), Decimal(0))
    return ARITHMETIC.divide(steps * step_flops, peak * devices * seconds)
