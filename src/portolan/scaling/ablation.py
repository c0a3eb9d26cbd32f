"""What an ablation shows: paired differences with intervals, and what they are worth in compute.

The runs of one width form a block design: every arm trains with the same seeds, a seed sets the
initial draws and the order of the data, so what a seed does to all arms cancels in a difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from portolan.errors import UsageError
from portolan.scaling.baseline import RELATIVE_ASYMPTOTE, PowerLaw, fit_power_law

LEVEL = 0.95
"""Level of every interval of an ablation."""


@dataclass(frozen=True)
class Interval:
    """A closed interval, nats per token."""

    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether no difference at all is inside."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Noise:
    """Spread of one run after its arm and its seed are taken out: sd in nats, and its freedom."""

    sd: float
    freedom: int


@dataclass(frozen=True)
class Effect:
    """Loss of an arm minus that of its reference, mean over seeds, nats per token.

    `own` is the paired t interval from this arm's differences alone. `joint` uses the noise of
    all arms of the width and holds for all of them at once (Bonferroni). None: too few seeds.
    """

    difference: float
    num_seeds: int
    own: Interval | None
    joint: Interval | None

    @property
    def resolved(self) -> bool:
        """Whether both intervals exist and leave out 0: only then is there an effect to report."""
        return all(found is not None and not found.holds_zero for found in (self.own, self.joint))


def paired_interval(differences: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Student's t interval of the mean of paired differences; None below two pairs."""
    count = len(differences)
    if count < 2:
        return None
    error = float(np.std(differences, ddof=1)) / math.sqrt(count)
    quantile = float(student.ppf((1 + level) / 2, count - 1))
    return _around(float(np.mean(differences)), quantile * error)


def block_noise(losses: Sequence[Sequence[float]]) -> Noise | None:
    """Residual spread of losses[arm][seed] in the additive model arm + seed.

    Freedom (arms - 1)(seeds - 1). It assumes equal spread in all arms. None when there is none.
    """
    table = np.asarray(losses, dtype=float)
    if table.ndim != 2 or min(table.shape) < 2:
        return None
    arms, seeds = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    residuals = table - arms - seeds + table.mean()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return Noise(float(np.sqrt((residuals**2).sum() / freedom)), freedom)


def joint_interval(
    difference: float, noise: Noise, num_seeds: int, num_arms: int, level: float = LEVEL
) -> Interval:
    """Interval of a difference of two means over seeds that holds for `num_arms` arms at once."""
    quantile = float(student.ppf(1 - (1 - level) / (2 * num_arms), noise.freedom))
    return _around(difference, quantile * noise.sd * math.sqrt(2 / num_seeds))


def _around(centre: float, half_width: float) -> Interval:
    return Interval(centre - half_width, centre + half_width)


def measure_effects(
    losses: Mapping[str, Mapping[int, float]], references: Mapping[str, str]
) -> tuple[dict[str, Effect], Noise | None]:
    """Effects of all arms of a width, and the noise behind their joint intervals.

    `losses` maps every arm, the baseline too, to its final loss by seed; `references` maps the
    arms to be judged to what each is compared with, on the seeds that both have. Only arms with
    all seeds enter the noise.
    """
    seeds = sorted(set().union(*losses.values()))
    complete = (arm for arm in losses.values() if set(seeds) <= set(arm))
    # Two arms may be one and the same run: counted twice, it would hide noise.
    noise = block_noise(list(dict.fromkeys(tuple(arm[s] for s in seeds) for arm in complete)))
    effects = {}
    for name, reference in references.items():
        ours, theirs = losses.get(name, {}), losses.get(reference, {})
        if shared := sorted(set(ours) & set(theirs)):
            differences = [ours[seed] - theirs[seed] for seed in shared]
            mean, count = float(np.mean(differences)), len(shared)
            joint = None
            if noise and count > 1:
                joint = joint_interval(mean, noise, count, len(references))
            effects[name] = Effect(mean, count, paired_interval(differences), joint)
    return effects, noise


def fit_width_law(points: Mapping[float, float]) -> PowerLaw | None:
    """Law loss = E + A C^-a through {compute: loss} of one recipe at several widths.

    E is RELATIVE_ASYMPTOTE of the smallest loss, as in F0 where no public asymptote exists. None
    with fewer than two widths, or when the loss does not fall with compute.
    """
    if len(points) < 2:
        return None
    flops = sorted(points)
    losses = [points[c] for c in flops]
    law = fit_power_law(flops, losses, RELATIVE_ASYMPTOTE * min(losses))
    return law if law.exponent > 0 else None


def effective_speedup(
    law: PowerLaw,
    *,
    baseline: tuple[float, float, float],
    variant: tuple[float, float, float],
) -> float:
    """Time the baseline needs for the variant's loss, over the variant's time.

    Both are (loss, training FLOPs, FLOPs per second); the law is recentred through the baseline.
    """
    loss, flops, rate = baseline
    new_loss, new_flops, new_rate = variant
    if min(loss, new_loss) <= law.asymptote:
        raise UsageError(
            f"losses {loss:.4f} and {new_loss:.4f} reach the asymptote {law.asymptote:.4f}"
        )
    coefficient = (loss - law.asymptote) * flops**law.exponent
    needed = (coefficient / (new_loss - law.asymptote)) ** (1 / law.exponent)
    return (needed / rate) / (new_flops / new_rate)
