"""Gates of a change: paired steps, steps without a hang, seeds of a data study.

A gate says accept or roll back, why, and what it did not exercise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from portolan.errors import UsageError

PAIRED_STEPS = 200
"""Updates that the old and the new program both make on the same batches."""
MEAN_TOLERANCE = 1e-3
MAX_TOLERANCE = 2e-3
BLOCK_STEPS = 10
"""Neighbouring updates whose mean is one observation of the standard error."""
MAX_DROP_FRACTION = 1e-3
NOT_EXERCISED = ("evaluation", "resume from its own checkpoint", "retry")
RULE_OF_THREE = 3
CONFIDENCE = 0.95
MIN_STUDY_SEEDS = 3


@dataclass(frozen=True)
class PairedGate:
    """Outcome of paired steps; differences are new minus control, nats per token."""

    accepted: bool
    mean: float
    standard_error: float
    sd: float
    largest: float
    num_pairs: int
    reasons: tuple[str, ...]
    not_exercised: tuple[str, ...]


def paired_gate(
    differences: Sequence[float],
    *,
    predicted: float = 0.0,
    drop_fraction: float | None = None,
    utilisation: tuple[float, float] | None = None,
    faults: Sequence[str] = (),
    exercised: Sequence[str] = (),
) -> PairedGate:
    """Accept a change whose loss differences stay at the predicted effect, else roll back.

    Args:
        differences: new minus control at each update, same batches.
        predicted: mean difference stated before the window.
        drop_fraction: largest of the window, for a transport that should drop nothing.
        utilisation: MFU of (new, control).
        faults: hangs, retries and watchdog kills inside the window; any rejects.
        exercised: of NOT_EXERCISED, what the window did contain.
    """
    values = np.asarray(differences, dtype=float)
    if len(values) < 2 * BLOCK_STEPS:
        raise UsageError(
            f"{len(values)} paired steps cannot show a standard error",
            remedy=f"run old and new over the same {PAIRED_STEPS} batches",
        )
    mean, error = float(values.mean()), _block_error(values)
    largest = float(np.max(np.abs(values - predicted)))
    tolerance = max(MEAN_TOLERANCE, 2 * error)
    reasons = []
    if not abs(mean - predicted) <= tolerance:
        reasons.append(f"mean {mean:+.2e}, predicted {predicted:+.2e} within {tolerance:.1e}")
    if not largest <= MAX_TOLERANCE:
        reasons.append(f"one step is {largest:.2e} from the prediction, at most {MAX_TOLERANCE:g}")
    if drop_fraction is not None and not drop_fraction < MAX_DROP_FRACTION:
        reasons.append(f"drop fraction {drop_fraction:.1e}, must be below {MAX_DROP_FRACTION:g}")
    if utilisation is not None and not utilisation[0] >= utilisation[1]:
        reasons.append(f"MFU {utilisation[0]:.4g} is below the control's {utilisation[1]:.4g}")
    reasons += [f"fault in the window: {fault}" for fault in faults]
    if len(values) < PAIRED_STEPS:
        reasons.append(f"{len(values)} paired steps, {PAIRED_STEPS} are needed")
    return PairedGate(
        accepted=not reasons,
        mean=mean,
        standard_error=error,
        sd=float(values.std(ddof=1)),
        largest=largest,
        num_pairs=len(values),
        reasons=tuple(reasons),
        not_exercised=tuple(name for name in NOT_EXERCISED if name not in exercised),
    )


def _block_error(values: np.ndarray) -> float:
    """Standard error of the mean from means of 10 neighbouring steps, which may be correlated."""
    num_blocks = len(values) // BLOCK_STEPS
    blocks = values[: num_blocks * BLOCK_STEPS].reshape(num_blocks, BLOCK_STEPS).mean(axis=1)
    return float(blocks.std(ddof=1) / math.sqrt(num_blocks))


def rate_bound(clean_steps: int) -> float:
    """Upper bound of the failure rate per step, 95 %, after steps without one: 3 / n."""
    return RULE_OF_THREE / clean_steps


def exact_rate_bound(clean_steps: int) -> float:
    """The bound without the rule's approximation: 1 - 0.05^(1/n)."""
    return 1 - (1 - CONFIDENCE) ** (1 / clean_steps)


def steps_needed(mean_steps_to_failure: float) -> int:
    """Clean steps n with 3 / n at most the stated rate 1 / MTTF."""
    return math.ceil(RULE_OF_THREE * mean_steps_to_failure)


def survival_by_luck(clean_steps: int, mean_steps_to_failure: float) -> float:
    """Share of unchanged programs that would also show so many clean steps: exp(-n / MTTF)."""
    return math.exp(-clean_steps / mean_steps_to_failure)


HangVerdict = Literal["accepted", "accepted_stability_unproved"]


def hang_safety(clean_steps: int, mean_steps_to_failure: float) -> HangVerdict:
    """Verdict of a change record: accepted only after enough steps without a hang."""
    if clean_steps >= steps_needed(mean_steps_to_failure):
        return "accepted"
    return "accepted_stability_unproved"


StudyVerdict = Literal["harm", "no_harm", "gain"]


def data_study(treated: Mapping[int, float], control: Mapping[int, float]) -> StudyVerdict:
    """Compare losses of two data choices over the seeds that both have.

    `harm`: the mean difference is positive and above twice its standard error; `gain`: below
    minus twice; `no_harm`: within twice.
    """
    seeds = sorted(set(treated) & set(control))
    if len(seeds) < MIN_STUDY_SEEDS:
        raise UsageError(
            f"{len(seeds)} shared seeds, a data study needs at least {MIN_STUDY_SEEDS}",
            remedy="train both choices with the same 3 or 4 seeds",
        )
    differences = np.array([treated[seed] - control[seed] for seed in seeds])
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(seeds))
    if abs(mean) <= 2 * error:
        return "no_harm"
    return "harm" if mean > 0 else "gain"
