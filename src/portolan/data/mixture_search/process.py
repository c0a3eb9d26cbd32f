"""A Gaussian process over mixtures: similar exposure to similar content, similar result.

Model of data.md 12 for a utility u (higher is better; minus the objective, standardised a swarm):
mean c - sum_s b_s sum_i a_i e_si^2 with b >= 0, covariance sum_st C_st k(h_s, h'_t) +
[same swarm] r k(h, h') + noise, C = l l^T + diag(v), k Matern-5/2. For two phases these are ten
parameters: c, b (2), l (2), v (2), length, r, noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel, WhiteKernel
from threadpoolctl import threadpool_limits

from portolan.data.mixture_design import MixtureError
from portolan.data.mixture_search.space import Cells, Floats

MEDIANS = {"link": 0.7, "own": 0.1, "length": 1.0, "residual": 0.1, "noise": 0.05}
"""Medians of the log-normal priors, in units of the standardised utility and of typical distances
between mixtures."""
PRIOR_LOG_WIDTH = 1.0
MEAN_PRIOR = 1.0
"""Standard deviations of the priors of c and b."""
NUM_STARTS = 3
BOUNDS = (1e-4, 1e3)
JITTER = 1e-8
MINIMUM_RUNS = 4
NUM_REFERENCE = 256


@dataclass(frozen=True)
class Swarm:
    """Runs of one store: weights float64[n, S, C] over its cells, and objectives float64[n]."""

    name: str
    cells: Cells
    weights: Floats
    values: Floats


def _matern(distances: Floats) -> Floats:
    root = np.sqrt(5.0) * distances
    return (1 + root + root**2 / 3) * np.exp(-root)


def _matern_slope(distances: Floats) -> Floats:
    """Derivative by the logarithm of the length."""
    root = np.sqrt(5.0) * distances
    return root**2 / 3 * (1 + root) * np.exp(-root)


def _distances(first: Floats, second: Floats) -> Floats:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2 * first @ second.T
    return np.sqrt(np.maximum(squares, 0.0))


class MixtureKernel(Kernel):
    """Covariance of two mixtures; a row is the number of its swarm and h_1 .. h_S, flattened."""

    def __init__(self, link: Any, own: Any, length: float, residual: float) -> None:
        self.link, self.own, self.length, self.residual = link, own, length, residual

    def _hyperparameter(self, name: str) -> Hyperparameter:
        size = len(np.atleast_1d(getattr(self, name)))
        return Hyperparameter(name, "numeric", BOUNDS, size)

    hyperparameter_length = property(lambda self: self._hyperparameter("length"))
    hyperparameter_link = property(lambda self: self._hyperparameter("link"))
    hyperparameter_own = property(lambda self: self._hyperparameter("own"))
    hyperparameter_residual = property(lambda self: self._hyperparameter("residual"))

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """Covariance [n, m] and, if asked for, its gradient by theta = log(length, l, v, r)."""
        Y = X if Y is None else Y
        link, own = np.atleast_1d(self.link), np.atleast_1d(self.own)
        phases = len(link)
        firsts = np.split(X[:, 1:], phases, axis=1)
        seconds = np.split(Y[:, 1:], phases, axis=1)
        slopes = np.zeros((len(X), len(Y), 2 * phases + 2)) if eval_gradient else np.empty(0)
        covariance = np.zeros((len(X), len(Y)))
        for s in range(phases):
            for t in range(phases):
                distances = _distances(firsts[s], seconds[t]) / self.length
                shape = _matern(distances)
                coupling = link[s] * link[t] + own[s] * (s == t)
                covariance += coupling * shape
                if eval_gradient:
                    slopes[..., 0] += coupling * _matern_slope(distances)
                    slopes[..., 1 + s] += link[s] * link[t] * shape
                    slopes[..., 1 + t] += link[s] * link[t] * shape
                    slopes[..., 1 + phases + s] += own[s] * (s == t) * shape
        distances = _distances(X[:, 1:], Y[:, 1:]) / self.length
        same = X[:, :1] == Y[:, 0]
        residual = self.residual * same * _matern(distances)
        if not eval_gradient:
            return covariance + residual
        slopes[..., 0] += self.residual * same * _matern_slope(distances)
        slopes[..., -1] = residual
        return covariance + residual, slopes

    def diag(self, X: Any) -> Floats:
        """Variance of each mixture, [n]; phases of one mixture share their covariance."""
        link, own = np.atleast_1d(self.link), np.atleast_1d(self.own)
        parts = np.split(X[:, 1:], len(link), axis=1)
        variance = np.full(len(X), float(own.sum()) + self.residual)
        for s, first in enumerate(parts):
            for t, second in enumerate(parts):
                apart = np.sqrt(((first - second) ** 2).sum(axis=1)) / self.length
                variance += link[s] * link[t] * _matern(apart)
        return variance

    def is_stationary(self) -> bool:
        """Phases are compared across, so distances alone do not tell."""
        return False


@dataclass(frozen=True)
class Process:
    """A fitted process over the mixtures of `cells`; `swarm` is the number of their swarm."""

    cells: Cells
    swarm: int
    scale: Floats
    regressor: Any
    coefficients: Floats
    center: float
    spread: float
    inputs: Floats
    basis: Floats
    utilities: Floats

    def _rows(self, weights: Floats) -> tuple[Floats, Floats]:
        return _inputs(self.cells, weights, self.swarm, self.scale), _basis(self.cells, weights)

    @property
    def kernel(self) -> MixtureKernel:
        """Covariance without the noise."""
        return self.regressor.kernel_.k1

    @property
    def noise(self) -> float:
        """Variance of the noise of one run, in units of the standardised utility."""
        return float(self.regressor.kernel_.k2.noise_level)

    def __call__(self, weights: Floats) -> Floats:
        """Expected objective of mixtures [n, S, C]; lower is better."""
        return self.center - self.spread * self.utility(weights)

    def utility(self, weights: Floats) -> Floats:
        """Posterior mean of the standardised utility, [n]."""
        inputs, basis = self._rows(weights)
        return basis @ self.coefficients + np.asarray(self.regressor.predict(inputs))

    def leave_one_out(self) -> Floats:
        """Utility of each run predicted from all others, hyperparameters kept (Rasmussen 5.12)."""
        inverse = scipy.linalg.cho_solve((self.regressor.L_, True), np.eye(len(self.utilities)))
        return self.utilities - self.regressor.alpha_ / np.diag(inverse)

    def noiseless_draws(self, num_draws: int, seed: int) -> "NoiselessDraws":
        """Draws of the utilities that the runs of this swarm would have without noise."""
        covariance = self.kernel(self.inputs)
        gain = scipy.linalg.cho_solve((self.regressor.L_, True), covariance).T
        residual = self.utilities - self.basis @ self.coefficients
        mean = gain @ residual
        left = covariance - gain @ covariance
        values, vectors = np.linalg.eigh((left + left.T) / 2)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = np.random.default_rng(seed).standard_normal((num_draws, len(mean)))
        draws = mean + normal @ root.T
        inner = scipy.linalg.cho_factor(covariance + JITTER * np.eye(len(mean)), lower=True)
        best = (draws + self.basis @ self.coefficients)[:, self.inputs[:, 0] == self.swarm].max(1)
        return NoiselessDraws(self, inner, scipy.linalg.cho_solve(inner, draws.T), best)


@dataclass(frozen=True)
class NoiselessDraws:
    """K draws of what the runs show without noise; `best` [K] is the best utility of each."""

    process: Process
    factor: Any
    solved: Floats
    best: Floats

    def expected_improvement(self, weights: Floats) -> Floats:
        """Mean over the draws of the expected improvement on their best, [n] (noisy EI)."""
        from scipy.stats import norm

        process = self.process
        inputs, basis = process._rows(weights)
        cross = process.kernel(inputs, process.inputs)
        means = (basis @ process.coefficients)[:, None] + cross @ self.solved
        explained = (cross * scipy.linalg.cho_solve(self.factor, cross.T).T).sum(axis=1)
        deviation = np.sqrt(np.maximum(process.kernel.diag(inputs) - explained, 1e-12))[:, None]
        ratio = (means - self.best) / deviation
        return (deviation * (ratio * norm.cdf(ratio) + norm.pdf(ratio))).mean(axis=1)


def fit_process(swarms: Sequence[Swarm], *, seed: int = 0) -> Process:
    """Maximum a posteriori fit from three starts; the first swarm is that of the search.

    Raises:
        MixtureError: fewer than four runs, or a swarm without differences.
    """
    if sum(len(swarm.values) for swarm in swarms) < MINIMUM_RUNS:
        raise MixtureError(
            f"a surrogate needs at least {MINIMUM_RUNS} runs", remedy="train a larger swarm"
        )
    phases = len(swarms[0].cells.budgets_tokens)
    scale = _typical_lengths(swarms[0].cells)
    inputs = np.concatenate(
        [_inputs(s.cells, s.weights, number, scale) for number, s in enumerate(swarms)]
    )
    basis = np.concatenate([_basis(swarm.cells, swarm.weights) for swarm in swarms])
    utilities = np.concatenate([_standardise(swarm) for swarm in swarms])
    # One thread: matrices are small, and the result must not depend on the number of cores.
    with threadpool_limits(1):
        regressor, coefficients = _maximise(inputs, basis, utilities, phases, seed)
    return Process(
        cells=swarms[0].cells,
        swarm=0,
        scale=scale,
        regressor=regressor,
        coefficients=coefficients,
        center=float(swarms[0].values.mean()),
        spread=float(swarms[0].values.std()),
        inputs=inputs,
        basis=basis,
        utilities=utilities,
    )


def _standardise(swarm: Swarm) -> Floats:
    spread = swarm.values.std()
    if not spread > 0:
        raise MixtureError(
            f"all runs of swarm {swarm.name} have one value", remedy="train other mixtures"
        )
    return -(swarm.values - swarm.values.mean()) / spread


def _typical_lengths(cells: Cells) -> Floats:
    """Root mean square spread of the two blocks of the features over random mixtures, [S, 2]."""
    rng = np.random.default_rng(0)
    shape = (NUM_REFERENCE, len(cells.budgets_tokens))
    weights = rng.dirichlet(np.maximum(cells.shares * len(cells.names), 1e-3), shape)
    features = cells.features(weights)
    blocks = np.stack(np.split(features, 2, axis=-1), axis=2)
    spread = np.sqrt(blocks.var(axis=0).sum(axis=-1))
    return np.where(spread > 0, spread, 1.0)


def _inputs(cells: Cells, weights: Floats, swarm: int, scale: Floats) -> Floats:
    features = cells.features(weights)
    width = features.shape[-1] // 2
    scaled = features / np.repeat(scale, width, axis=-1)
    flat = scaled.reshape(len(weights), -1)
    return np.concatenate([np.full((len(flat), 1), float(swarm)), flat], axis=1)


def _basis(cells: Cells, weights: Floats) -> Floats:
    """Columns of the mean: 1, and minus the repetition of each phase."""
    ones = np.ones((len(weights), 1))
    return np.concatenate([ones, -cells.repetition(weights)], axis=1)


def _mean_coefficients(basis: Floats, utilities: Floats, factor: Floats) -> Floats:
    """Most probable c and b >= 0 under a covariance given by its Cholesky factor."""
    rows = scipy.linalg.solve_triangular(factor, np.column_stack([basis, utilities]), lower=True)
    width = basis.shape[1]
    prior = np.eye(width, width + 1) / MEAN_PRIOR
    stacked = np.concatenate([rows, prior])
    lower = np.array([-np.inf, *[0.0] * (width - 1)])
    found = scipy.optimize.lsq_linear(stacked[:, :-1], stacked[:, -1], (lower, np.inf))
    return found.x


def _regressor(kernel: Any) -> Any:
    return GaussianProcessRegressor(kernel, alpha=JITTER, optimizer=None)  # pyright: ignore


def _maximise(
    inputs: Floats, basis: Floats, utilities: Floats, phases: int, seed: int
) -> tuple[Any, Floats]:
    """Regressor of the residuals at the best of three starts, and the coefficients of the mean.

    For every trial of the kernel the mean is its most probable one, so the gradient by the kernel
    alone is the gradient of the profile.
    """
    kernel: Any = MixtureKernel(
        np.full(phases, MEDIANS["link"]),
        np.full(phases, MEDIANS["own"]),
        MEDIANS["length"],
        MEDIANS["residual"],
    ) + WhiteKernel(MEDIANS["noise"], BOUNDS)
    prior = kernel.theta.copy()
    regressor = _regressor(kernel)
    regressor.fit(inputs, utilities)
    noise_free = JITTER * np.eye(len(inputs))

    def mean_of(theta: Floats) -> Floats:
        covariance = kernel.clone_with_theta(theta)(inputs) + noise_free
        return _mean_coefficients(basis, utilities, scipy.linalg.cholesky(covariance, lower=True))

    def loss(theta: Floats) -> tuple[Any, Floats]:
        coefficients = mean_of(theta)
        regressor.y_train_ = utilities - basis @ coefficients
        likelihood, slope = regressor.log_marginal_likelihood(theta, eval_gradient=True)
        apart = (theta - prior) / PRIOR_LOG_WIDTH
        penalty = 0.5 * (apart @ apart + coefficients @ coefficients / MEAN_PRIOR**2)
        return penalty - likelihood, apart / PRIOR_LOG_WIDTH - slope

    rng = np.random.default_rng(seed)
    shifts = [np.zeros(len(prior)), *rng.normal(0, PRIOR_LOG_WIDTH, (NUM_STARTS - 1, len(prior)))]
    bounds = [tuple(np.log(BOUNDS))] * len(prior)
    found = [
        scipy.optimize.minimize(loss, prior + shift, jac=True, method="L-BFGS-B", bounds=bounds)
        for shift in shifts
    ]
    best = min(found, key=lambda result: float(result.fun)).x
    coefficients = mean_of(best)
    regressor = _regressor(kernel.clone_with_theta(best))
    regressor.fit(inputs, utilities - basis @ coefficients)
    return regressor, coefficients
