"""Simple forecasters that every backtest is compared with.

Power laws E + A x^-a fitted in log loss, with intervals by a parametric bootstrap, and the surface
E + A N^-a + B D^-b of Hoffmann et al. (2203.15556) over a pool of runs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from portolan.scaling.baseline import PUBLIC_ASYMPTOTE, RELATIVE_ASYMPTOTE
from portolan.scaling.drifting_law import Ladder

Array = NDArray[np.float64]

NUM_DRAWS = 400
BOOTSTRAP_SEED = 0
MIN_NOISE = 0.0015
"""Smallest relative noise of a rung: few rungs often fit by chance."""
ASYMPTOTE_PRIOR = (0.3, 0.8)
FREE_GRID = np.linspace(0.0, 0.98, 197)
PUBLIC_APPLIES_ABOVE = 1.9
"""Loss of the largest rung, nats, above which the public asymptote is used."""
EXPONENT_GRID = np.linspace(0.05, 1.0, 20)
MIN_POOL = 6


def baseline_samples(ladder: Ladder) -> dict[str, Array]:
    """Samples [1 + NUM_DRAWS] of the target's loss per baseline; the first is the point forecast.

    F0 is there only where the public asymptote applies; ladders of fewer than 3 rungs have none.
    """
    if len(ladder.losses) < 3 or np.ptp(ladder.x) == 0:
        return {}
    rng = np.random.Generator(np.random.Philox(BOOTSTRAP_SEED))
    best = float(ladder.losses.min())
    relative = np.full(NUM_DRAWS + 1, RELATIVE_ASYMPTOTE * best)
    drawn = rng.uniform(*ASYMPTOTE_PRIOR, NUM_DRAWS + 1) * best
    drawn[0] = relative[0]
    samples = {
        "free asymptote": _bootstrap(ladder, rng, None),
        "0.55 x last rung": _bootstrap(ladder, rng, relative),
        "0.55 x last rung, prior on E": _bootstrap(ladder, rng, drawn),
    }
    if best > PUBLIC_APPLIES_ABOVE:
        samples["F0"] = _bootstrap(ladder, rng, np.full(NUM_DRAWS + 1, PUBLIC_ASYMPTOTE))
    return samples


def _bootstrap(ladder: Ladder, rng: np.random.Generator, asymptotes: Array | None) -> Array:
    """Forecasts of refits to the fitted losses with noise of the size of the residuals.

    `asymptotes` has one value for the point and one per draw; None fits them.
    """
    observed, log_x = ladder.losses[None], np.log(ladder.x)
    first = _best_asymptotes(log_x, observed) if asymptotes is None else asymptotes[:1]
    fitted, point = _line(ladder, observed, first)
    free = len(log_x) - (3 if asymptotes is None else 2)
    squares = float((np.log(ladder.losses / fitted[0]) ** 2).sum())
    noise = max(MIN_NOISE, float(np.sqrt(squares / max(free, 1))))
    drawn = fitted * np.exp(noise * rng.standard_normal((NUM_DRAWS, len(log_x))))
    later = _best_asymptotes(log_x, drawn) if asymptotes is None else asymptotes[1:]
    # A draw may fall below its asymptote, where the law has no logarithm.
    drawn = np.maximum(drawn, 1.001 * later[:, None])
    forecasts = _line(ladder, drawn, later)[1]
    return np.concatenate([point, forecasts * np.exp(noise * rng.standard_normal(NUM_DRAWS))])


def _line(ladder: Ladder, losses: Array, asymptotes: Array) -> tuple[Array, Array]:
    """Fitted losses [draw, rung] and forecasts [draw] of ln(loss - E) against ln(x)."""
    log_x = np.log(ladder.x)
    centred = log_x - log_x.mean()
    response = np.log(losses - asymptotes[:, None])
    slope = response @ centred / (centred @ centred)
    middle = response.mean(axis=1)
    fitted = asymptotes[:, None] + np.exp(middle[:, None] + slope[:, None] * centred)
    forecast = asymptotes + np.exp(middle + slope * (np.log(ladder.target_x) - log_x.mean()))
    return fitted, forecast


def _best_asymptotes(log_x: Array, losses: Array) -> Array:
    """Asymptote per draw with the smallest residual in ln(loss), on a grid."""
    centred = log_x - log_x.mean()
    best = np.full(len(losses), np.inf)
    chosen = np.zeros(len(losses))
    for ratio in FREE_GRID:
        asymptotes = ratio * losses.min(axis=1)
        response = np.log(losses - asymptotes[:, None])
        slope = response @ centred / (centred @ centred)
        line = response.mean(axis=1, keepdims=True) + slope[:, None] * centred
        misfit = (np.log(losses / (asymptotes[:, None] + np.exp(line))) ** 2).sum(axis=1)
        better = misfit < best
        best[better], chosen[better] = misfit[better], asymptotes[better]
    return chosen


@dataclass(frozen=True)
class Pool:
    """Runs of one suite and metric with parameters N, tokens D and final losses."""

    params: Array
    tokens: Array
    losses: Array


def chinchilla_samples(pool: Pool, params: float, tokens: float) -> Array | None:
    """Samples of the loss at (N, D) from E + A N^-a + B D^-b; None for a pool below 6 runs.

    Exponents on a grid, coefficients by non-negative least squares of the relative error; the
    draws hold the exponents fixed, so that the interval is too narrow.
    """
    if len(pool.losses) < MIN_POOL:
        return None
    log_n, log_d = np.log(pool.params), np.log(pool.tokens)
    shift_n, shift_d = log_n.mean(), log_d.mean()

    def design(a: float, b: float, n: Array, d: Array) -> Array:
        terms = [np.ones_like(n), np.exp(-a * (n - shift_n)), np.exp(-b * (d - shift_d))]
        return np.stack(terms, axis=1)

    def fit(a: float, b: float, losses: Array) -> tuple[Array, float]:
        return nnls(design(a, b, log_n, log_d) / losses[:, None], np.ones(len(losses)))

    pairs = [(a, b) for a in EXPONENT_GRID for b in EXPONENT_GRID]
    a, b = min(pairs, key=lambda pair: fit(*pair, pool.losses)[1])
    coefficients, norm = fit(a, b, pool.losses)
    noise = max(MIN_NOISE, norm / np.sqrt(max(len(pool.losses) - 5, 1)))
    at = design(a, b, np.array([np.log(params)]), np.array([np.log(tokens)]))[0]
    fitted = design(a, b, log_n, log_d) @ coefficients
    rng = np.random.Generator(np.random.Philox(BOOTSTRAP_SEED))
    draws = [
        at @ fit(a, b, fitted * np.exp(noise * rng.standard_normal(len(fitted))))[0]
        * np.exp(noise * rng.standard_normal())
        for _ in range(NUM_DRAWS // 4)
    ]  # fmt: skip
    return np.array([at @ coefficients, *draws])
