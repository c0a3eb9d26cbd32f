"""F1: a predictive distribution over the loss, by exact integration over the asymptote.

For each asymptote E on a grid, ln(loss - E) is linear in ln(compute) with known noise and a flat
prior on both coefficients, so the posterior is a weighted mixture of shifted log-normals.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from portolan.errors import UsageError

LEVELS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995)
LEVEL_LABELS = tuple(repr(level) for level in LEVELS)
NOISE = 0.004
"""Standard deviation of one evaluation of the macro loss, nats (marin #8435)."""
TAIL_NOISE = 0.002
TAIL_CONSTANT = 0.0035
"""Bias of the straight line that completes a truncated rung, nats, and its uncertainty."""
RELATIVE_MEAN = 0.60
"""Centre of the asymptote over the smallest final loss, where no public asymptote exists."""
NEGLIGIBLE_WEIGHT = 1e-10
QUANTILE_TOLERANCE = 1e-8
MAX_ROOT_STEPS = 200

Array = NDArray[np.float64]


@dataclass(frozen=True)
class AsymptoteRule:
    """Prior N(mean, sd^2) of the asymptote on the grid 0..upper, and the model error.

    `kappa` is in nats per decade of compute between the largest rung and the target.
    """

    name: str
    mean: float
    sd: float
    upper: float
    num_steps: int
    kappa: float

    @property
    def grid(self) -> Array:
        """The asymptotes that are integrated over."""
        return np.linspace(0.0, self.upper, self.num_steps + 1)


PUBLIC_RULE = AsymptoteRule("public", mean=1.5, sd=0.15, upper=2.3, num_steps=4600, kappa=0.008)
"""For the macro loss of the public family alone."""


def relative_rule(best_final_loss: float, best_loss: float | None = None) -> AsymptoteRule:
    """Rule for every other unit: asymptote near 0.60 of the smallest final rung loss.

    `best_loss` is the smallest loss at the mark being forecast, which the grid must not reach.
    """
    limit = best_final_loss if best_loss is None else min(best_final_loss, best_loss)
    return AsymptoteRule(
        "relative",
        mean=RELATIVE_MEAN * best_final_loss,
        sd=0.13 * best_final_loss,
        upper=0.97 * limit,
        num_steps=4600,
        kappa=0.01 * best_final_loss,
    )


@dataclass(frozen=True)
class Predictive:
    """Mixture over asymptotes E: ln(loss - E) ~ N(location, scale^2) with weight p."""

    asymptotes: Array
    weights: Array
    locations: Array
    scales: Array

    @property
    def asymptote_mean(self) -> float:
        """Posterior mean of the asymptote."""
        return float(self.weights @ self.asymptotes)

    @property
    def asymptote_sd(self) -> float:
        """Posterior standard deviation of the asymptote."""
        deviation = self.asymptotes - self.asymptote_mean
        return float(np.sqrt(self.weights @ deviation**2))

    def _standard(self, loss: Array) -> tuple[Array, Array]:
        """Standardised ln(loss - E) of shape [loss, E], -inf where loss <= E; and loss - E."""
        excess = loss[:, None] - self.asymptotes
        safe = np.where(excess > 0, excess, 1.0)
        standard = (np.log(safe) - self.locations) / self.scales
        return np.where(excess > 0, standard, -np.inf), safe

    def cdf(self, loss: float | Array) -> Array:
        """Probability that the evaluation is at most `loss`."""
        standard, _ = self._standard(np.atleast_1d(np.asarray(loss, dtype=float)))
        return ndtr(standard) @ self.weights

    def density(self, loss: float | Array) -> Array:
        """Probability density per nat."""
        standard, excess = self._standard(np.atleast_1d(np.asarray(loss, dtype=float)))
        bell = np.exp(-0.5 * standard**2) / np.sqrt(2 * np.pi)
        return (bell / (self.scales * excess)) @ self.weights

    def _normal_start(self, wanted: Array) -> Array:
        """Quantiles of the normal distribution with the mixture's mean and variance."""
        excess = np.exp(self.locations)
        mean = self.weights @ (self.asymptotes + excess)
        variance = self.weights @ (
            (self.asymptotes + excess - mean) ** 2 + (excess * self.scales) ** 2
        )
        return mean + np.sqrt(variance) * ndtri(wanted)

    def _solve(self, wanted: Array, loss: Array) -> Array:
        """Newton steps on normal scores inside a shrinking bracket, else bisection.

        The normal score of the distribution function is nearly linear in the loss, so that a few
        steps suffice even in the tails.
        """
        scores = ndtri(wanted)
        low = np.full(len(wanted), self.asymptotes.min())
        high = np.full(
            len(wanted), np.max(self.asymptotes + np.exp(self.locations + 9 * self.scales))
        )
        loss = np.clip(loss, low, high)
        for _ in range(MAX_ROOT_STEPS):
            standard, excess = self._standard(loss)
            reached = ndtri(np.clip(ndtr(standard) @ self.weights, 1e-15, 1 - 1e-15))
            density = (np.exp(-0.5 * standard**2) / (self.scales * excess)) @ self.weights
            low = np.where(reached < scores, loss, low)
            high = np.where(reached >= scores, loss, high)
            slope = np.maximum(density, 1e-300) * np.exp(0.5 * reached**2)
            step = loss - (reached - scores) / slope
            new = np.where((step >= low) & (step <= high), step, 0.5 * (low + high))
            if np.max(np.abs(new - loss)) < QUANTILE_TOLERANCE:
                return new
            loss = new
        return loss

    def quantiles(self, levels: tuple[float, ...] = LEVELS) -> Array:
        """Quantiles of the evaluation at `levels`, to about 1e-8 nats."""
        wanted = np.array(levels)
        return self._solve(wanted, self._normal_start(wanted))


def predict(
    flops: Array,
    losses: Array,
    noise: Array,
    target_flops: float,
    rule: AsymptoteRule,
    *,
    outcome_noise: float = NOISE,
) -> Predictive:
    """Predictive distribution of one evaluation at `target_flops`.

    Args:
        flops, losses, noise: per rung; noise is the standard deviation of the loss in nats.
        outcome_noise: standard deviation of the evaluation to be predicted.

    Raises:
        UsageError: the asymptote grid reaches the smallest loss, or there is one rung only.
    """
    grid = rule.grid
    if len(losses) < 2 or grid[-1] >= losses.min():
        raise UsageError(
            f"the asymptote grid reaches {grid[-1]:.4f}, the smallest of {len(losses)} losses is "
            f"{losses.min():.4f}",
            remedy="use the relative asymptote rule, and at least two rungs",
        )
    excess = losses - grid[:, None]
    response = np.log(excess)
    weight = (excess / noise) ** 2
    predictor = np.log(target_flops) - np.log(flops)
    sum_0, sum_1 = weight.sum(axis=1), weight @ predictor
    sum_2, sum_y = weight @ predictor**2, (weight * response).sum(axis=1)
    sum_xy = (weight * response) @ predictor
    determinant = sum_0 * sum_2 - sum_1**2
    location = (sum_2 * sum_y - sum_1 * sum_xy) / determinant
    slope = (sum_0 * sum_xy - sum_1 * sum_y) / determinant
    residual = response - location[:, None] - slope[:, None] * predictor
    misfit = (weight * residual**2).sum(axis=1)
    log_weight = (
        -0.5 * ((grid - rule.mean) / rule.sd) ** 2 - 0.5 * np.log(determinant) - 0.5 * misfit
    )
    weights = np.exp(log_weight - log_weight.max())
    decades = max(0.0, float(np.log10(target_flops / flops.max())))
    nats = (rule.kappa * decades) ** 2 + outcome_noise**2
    variance = sum_2 / determinant + nats * np.exp(-2 * location)
    kept = weights > NEGLIGIBLE_WEIGHT
    weights = weights[kept] / weights[kept].sum()
    return Predictive(grid[kept], weights, location[kept], np.sqrt(variance[kept]))
