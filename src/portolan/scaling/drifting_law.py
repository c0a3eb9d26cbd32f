"""F2's law across rungs: a power law whose local exponent may drift, integrated over settings.

With E the asymptote, m = ln(loss - E) of the target and z the distance of a rung from it,

    ln(L_i - E) = m + b z_i + J_i (d(z_i) + e_i),    J_i = L_i / (L_i - E)

where d is an integrated Wiener process pinned at the target (its value and slope are in m and b)
and e_i is noise, both in ln L. The drift makes near rungs count for more, and the interval grow
with the extrapolation. z is ln(x_target / x_i) in units in which ln L falls by `TYPICAL_DECLINE`: a
forecast does not change when x is replaced by a power of itself, nor with the unit of the loss.

Everything is conditionally normal, so that the prediction is an exact mixture over E and settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portolan.errors import UsageError
from portolan.scaling.interval import Predictive

Array = NDArray[np.float64]

TYPICAL_DECLINE = 0.05
"""Fall of ln(loss) per e-fold of training FLOPs in an average public ladder."""
DECLINE_RANGE = (0.015, 0.2)
ASYMPTOTE_OFFSETS = (-0.05, 0.0, 0.05)
ASYMPTOTE_SD = 0.03
SPREAD = (0.5, 1.0, 2.0)
"""Settings averaged around a centre: factors of noise and of drift."""
SLOPE_PRIOR = (0.12, 0.12)
OUTCOME_NOISE = 0.001
"""Relative noise of the run to be predicted: repeated public runs differ by 0.02 to 0.2 %."""
ASYMPTOTE_GRID = np.linspace(0.2, 0.95, 61)
NEGLIGIBLE_WEIGHT = 1e-6


@dataclass(frozen=True)
class Ladder:
    """Final losses of runs that differ in `x` alone, and the `x` of the run to predict.

    `rung_sd` is the measured relative noise per rung, where it is known.
    """

    x: Array
    losses: Array
    target_x: float
    rung_sd: Array | None = None


@dataclass(frozen=True)
class DriftPrior:
    """Centre of the settings that are averaged, learnt from other suites.

    Args:
        asymptote_ratio: E over the smallest rung loss.
        rung_noise: standard deviation of ln(loss) of one rung around the law.
        drift: of the integrated Wiener process, per unit of z to the power 3/2.
        decline: mean and standard deviation over suites of the fall of ln(loss) per e-fold of
            FLOPs beyond the largest rung; used by ladders of a single rung only.
    """

    asymptote_ratio: float
    rung_noise: float
    drift: float
    decline: tuple[float, float] = (TYPICAL_DECLINE, 0.02)


def drift_covariance(distance: Array) -> Array:
    """Covariance of an integrated Wiener process of unit rate, pinned at distance 0."""
    size, same_side = np.abs(distance), np.sign(distance)[:, None] == np.sign(distance)
    near, far = np.minimum.outer(size, size), np.maximum.outer(size, size)
    return np.where(same_side, near**2 * (3 * far - near) / 6, 0.0)


def distances(ladder: Ladder) -> Array:
    """z of every rung: ln(x_target / x) times the ladder's decline over the typical one."""
    distance = np.log(ladder.target_x) - np.log(ladder.x)
    if np.ptp(ladder.x) == 0:
        return distance
    slope = np.polyfit(np.log(ladder.x), np.log(ladder.losses), 1)[0]
    return distance * float(np.clip(-slope, *DECLINE_RANGE)) / TYPICAL_DECLINE


@dataclass(frozen=True)
class Conditional:
    """ln(loss - E) of the target is N(location, scale^2), for every E; arrays over E."""

    asymptotes: Array
    log_evidence: Array
    locations: Array
    scales: Array


def extrapolate(ladder: Ladder, prior: DriftPrior) -> Predictive:
    """Predictive distribution of the loss at the ladder's target.

    The evidence of a handful of rungs decides E within a setting only: settings weigh the same,
    since weighing them by it made the forecasts of other suites worse.

    Raises:
        UsageError: no rung, a loss or an x that is not a positive number.
    """
    _check(ladder)
    log_priors = [
        -0.5 * ((ASYMPTOTE_GRID - prior.asymptote_ratio - offset) / ASYMPTOTE_SD) ** 2
        for offset in ASYMPTOTE_OFFSETS
    ]
    weights, parts = [], []
    for noise in np.array(SPREAD) * prior.rung_noise:
        for drift in np.array(SPREAD) * prior.drift:
            part = condition(ladder, noise, drift, _slope_prior(ladder, prior))
            posteriors = [normalised(part.log_evidence + log_prior) for log_prior in log_priors]
            weights.append(np.mean(posteriors, axis=0))
            parts.append(part)
    weight = np.concatenate(weights) / len(weights)
    kept = weight > NEGLIGIBLE_WEIGHT
    return Predictive(
        np.concatenate([part.asymptotes for part in parts])[kept],
        weight[kept] / weight[kept].sum(),
        np.concatenate([part.locations for part in parts])[kept],
        np.concatenate([part.scales for part in parts])[kept],
    )


def normalised(log_weight: Array) -> Array:
    """Weights that add up to one."""
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum()


def _slope_prior(ladder: Ladder, prior: DriftPrior) -> tuple[float, float]:
    """Mean and sd of b; runs of one size say nothing about it, other suites then do."""
    if np.ptp(ladder.x) > 0:
        return SLOPE_PRIOR
    excess_per_loss = 1 / (1 - prior.asymptote_ratio)
    return prior.decline[0] * excess_per_loss, prior.decline[1] * excess_per_loss


def condition(
    ladder: Ladder,
    noise: float,
    drift: float,
    slope_prior: tuple[float, float] = SLOPE_PRIOR,
) -> Conditional:
    """The target given the rungs, for every E of the grid and one setting of noise and drift.

    m has a flat prior, b ~ N(slope_prior); exact for a linear model with normal errors.
    """
    _check(ladder)
    distance = distances(ladder)
    asymptotes = ASYMPTOTE_GRID * ladder.losses.min()
    measured = np.zeros_like(distance) if ladder.rung_sd is None else ladder.rung_sd
    # Repeats show less than the misfit of a law: measured noise adds to it, never replaces it.
    rung_variance = noise**2 + measured**2
    covariance = np.diag(rung_variance) + drift**2 * drift_covariance(distance)
    whiten = np.linalg.inv(np.linalg.cholesky(covariance))
    excess = ladder.losses - asymptotes[:, None]
    jacobian = ladder.losses / excess
    design = np.stack([1 / jacobian, distance / jacobian], axis=2)
    white_design = np.einsum("ij,ejk->eik", whiten, design)
    white_response = np.einsum("ij,ej->ei", whiten, np.log(excess) / jacobian)
    mean, sd = slope_prior
    precision = np.einsum("eik,eil->ekl", white_design, white_design)
    precision[:, 1, 1] += 1 / sd**2
    moment = np.einsum("eik,ei->ek", white_design, white_response)
    moment[:, 1] += mean / sd**2
    inverse = np.linalg.inv(precision)
    coefficients = np.einsum("ekl,el->ek", inverse, moment)
    residual = white_response - np.einsum("eik,ek->ei", white_design, coefficients)
    misfit = (residual**2).sum(axis=1) + ((coefficients[:, 1] - mean) / sd) ** 2
    evidence = np.log(np.diag(whiten)).sum() - 0.5 * (misfit + np.log(np.linalg.det(precision)))
    location = coefficients[:, 0]
    outcome = OUTCOME_NOISE * (1 + asymptotes * np.exp(-location))
    return Conditional(asymptotes, evidence, location, np.hypot(inverse[:, 0, 0] ** 0.5, outcome))


def _check(ladder: Ladder) -> None:
    values: Sequence[Array] = (ladder.x, ladder.losses, np.array([ladder.target_x]))
    if len(ladder.losses) == 0 or len(ladder.x) != len(ladder.losses):
        raise UsageError(
            f"{len(ladder.x)} sizes and {len(ladder.losses)} losses of rungs",
            remedy="give one loss per rung, and at least one rung",
        )
    for array in values:
        if not (np.all(np.isfinite(array)) and np.all(array > 0)):
            raise UsageError(
                f"{array.tolist()} are not all positive numbers",
                remedy="sizes and losses of rungs and target must be positive and finite",
            )
