"""Forecasts within a run: the loss under another learning-rate schedule, or after more tokens.

The schedule law is that of Tissue et al. (2408.11029): L = L0 + A S1^-a - C S2, where S1 is the sum
of the rates and S2 that of the rate's decay with a memory of 1 / (1 - m) steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import ndtri

Array = NDArray[np.float64]

MEMORIES = (0.99, 0.995, 0.998, 0.999, 0.9995)
ROBUST_SCALE = 0.002
"""Relative residual from which a point counts less."""
EXPONENT_PRIOR = (0.5, 0.2)
"""Of the loss against tokens within one run at a constant rate."""
DRIFT_PER_EFOLD = 0.002
MIN_NOISE = 0.0005
SCHEDULE_ERROR = 0.003
"""Relative error of the law at the end of an unseen schedule, beside what the runs show."""
NUM_DRAWS = 1024
DRAW_SEED = 0


@dataclass(frozen=True)
class ScheduledRun:
    """Loss at logged steps of one run and the learning rate there."""

    steps: Array
    rates: Array
    losses: Array


def schedule_sums(steps: Array, rates: Array, memory: float) -> tuple[Array, Array]:
    """S1 and S2 at the logged steps; the rate is taken as rising linearly up to the first."""
    gaps = np.diff(steps)
    area = np.cumsum(0.5 * (rates[1:] + rates[:-1]) * gaps)
    first = 0.5 * rates[0] * steps[0]
    momentum, total, sums = 0.0, 0.0, [0.0]
    for gap, drop in zip(gaps, rates[:-1] - rates[1:], strict=True):
        # Between two logged steps the drop is spread evenly; its mean age is half the gap.
        kept = memory**gap
        total += momentum * (1 - kept) / (1 - memory) + drop * (1 - memory ** (gap / 2)) / (
            1 - memory
        )
        momentum = momentum * kept + drop * memory ** (gap / 2)
        sums.append(total)
    return first + np.concatenate([[0.0], area]), np.array(sums)


@dataclass(frozen=True)
class ScheduleLaw:
    """Fitted law; `parameters` are ln L0, ln A, ln a, ln C at S1 and S2 over their scales."""

    parameters: Array
    memory: float
    scales: tuple[float, float]
    cost: float

    def __call__(self, steps: Array, rates: Array) -> Array:
        """Loss at the logged steps of a schedule."""
        first, second = schedule_sums(steps, rates, self.memory)
        return _law(self.parameters, first / self.scales[0], second / self.scales[1])


def _law(parameters: Array, first: Array, second: Array) -> Array:
    floor, size, exponent, gain = np.exp(parameters)
    return floor + size * first**-exponent - gain * second


def fit_schedule_law(runs: Sequence[ScheduledRun]) -> ScheduleLaw:
    """Robust least squares of ln(loss) over all runs; the memory by the smallest cost on a grid."""
    losses = np.concatenate([run.losses for run in runs])
    best: ScheduleLaw | None = None
    for memory in MEMORIES:
        sums = [schedule_sums(run.steps, run.rates, memory) for run in runs]
        first = np.concatenate([pair[0] for pair in sums])
        second = np.concatenate([pair[1] for pair in sums])
        scales = float(first.max()), float(second.max()) or 1.0
        first, second = first / scales[0], second / scales[1]

        def residual(parameters: Array, first: Array = first, second: Array = second) -> Array:
            # A step of the optimiser may lead below 0, where there is no logarithm.
            return np.log(np.maximum(_law(parameters, first, second), 1e-3) / losses)

        start = np.log([0.9 * losses.min(), 0.1 * losses.min(), 0.5, 0.03 * losses.min()])
        found = least_squares(residual, start, loss="soft_l1", f_scale=ROBUST_SCALE)
        if best is None or found.cost < best.cost:
            best = ScheduleLaw(found.x, memory, scales, float(found.cost))
    assert best is not None
    return best


def forecast_schedule(
    runs: Sequence[ScheduledRun], steps: Array, rates: Array, levels: Sequence[float]
) -> tuple[Array, Array]:
    """Median curve of a run with this schedule, and quantiles of its last loss.

    The width is that of the errors with which each run's end is forecast from the others, and of
    the law's own error.
    """
    law = fit_schedule_law(runs)
    curve = law(steps, rates)
    errors = []
    for index, run in enumerate(runs):
        others = [other for position, other in enumerate(runs) if position != index]
        if others:
            end = fit_schedule_law(others)(run.steps, run.rates)[-1]
            errors.append(np.log(end / run.losses[-1]))
    fitted = np.concatenate([np.log(law(run.steps, run.rates) / run.losses) for run in runs])
    shown = float(np.sqrt(np.mean(np.square([*errors, fitted.std()]))))
    sd = np.hypot(SCHEDULE_ERROR, shown)
    return curve, curve[-1] * np.exp(sd * ndtri(np.asarray(levels)))


def forecast_tokens(
    tokens: Array, losses: Array, target_tokens: float, levels: Sequence[float]
) -> Array:
    """Quantiles of the loss of the same run after more tokens at a constant rate.

    E + B D^-b with a weak prior on b, normal draws around the fit, and a drift of
    `DRIFT_PER_EFOLD` of the loss per e-fold of tokens.
    """
    scaled = np.log(tokens / tokens[-1])
    mean, sd = EXPONENT_PRIOR

    def law(parameters: Array, log_tokens: Array) -> Array:
        return np.exp(parameters[0]) + np.exp(parameters[1] - parameters[2] * log_tokens)

    def residual(parameters: Array, noise: float) -> Array:
        misfit = np.log(law(parameters, scaled) / losses) / noise
        return np.append(misfit, (parameters[2] - mean) / sd)

    start = np.array([np.log(0.93 * losses[-1]), np.log(0.07 * losses[-1]), mean])
    noise = MIN_NOISE
    for _ in range(2):
        found = least_squares(residual, start, args=(noise,))
        squares = float((found.fun[:-1] ** 2).sum()) * noise**2
        noise = max(MIN_NOISE, np.sqrt(squares / max(len(losses) - 3, 1)))
        start = found.x
    found = least_squares(residual, start, args=(noise,))
    root = np.linalg.inv(np.linalg.qr(found.jac, mode="r"))
    rng = np.random.Generator(np.random.Philox(DRAW_SEED))
    draws = found.x + rng.standard_normal((NUM_DRAWS, 3)) @ root.T
    further = np.log(target_tokens / tokens[-1])
    losses_then = np.exp(draws[:, 0]) + np.exp(draws[:, 1] - draws[:, 2] * further)
    extra = np.hypot(noise, DRIFT_PER_EFOLD * further)
    return np.quantile(losses_then * np.exp(extra * rng.standard_normal(NUM_DRAWS)), levels)
