"""Posterior of F2's curve model: Laplace fits on a grid of asymptotes, settings and shapes.

Given asymptote, setting and shape the model is a least-squares problem (scipy's MINPACK); its
curvature gives normal draws of the parameters, and all nodes together a weighted sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import qmc

from portolan.scaling.curve_model import Array, CurveData, CurveModel, LawPrior, Shape

LOG2_DRAWS = 9
DRAW_SEED = 0
NEGLIGIBLE_WEIGHT = 1e-4
TOLERANCE = 1e-7
MAX_EVALUATIONS = 400


@dataclass(frozen=True)
class Node:
    """One point of the grid: a law with its log prior weight, and the setting it belongs to."""

    law: LawPrior
    log_weight: float
    setting: int


@dataclass(frozen=True)
class Fit:
    """Laplace approximation at a node: draws [draw, parameter] and the node's share."""

    model: CurveModel
    node: Node
    draws: Array
    weight: float


@dataclass(frozen=True)
class CurvePosterior:
    """Weighted draws of all nodes, and the posterior share of each shape."""

    fits: tuple[Fit, ...]
    shape_weights: dict[Shape, float]

    def trajectories(
        self, run: int, fractions: Array, shape: Shape | None = None
    ) -> tuple[Array, Array]:
        """Losses [draw, fraction] of one run and weights [draw]; of one shape if it is given."""
        chosen = [fit for fit in self.fits if shape in (None, fit.model.shape)]
        losses = [fit.model.trajectories(fit.draws, run, fractions) for fit in chosen]
        weights = [np.full(len(fit.draws), fit.weight / len(fit.draws)) for fit in chosen]
        total = np.concatenate(weights)
        return np.concatenate(losses), total / total.sum()

    def moments(self, shape: Shape) -> dict[str, tuple[float, float]]:
        """Posterior mean and sd of asymptote, slope of the law and form under one shape."""
        chosen = [fit for fit in self.fits if fit.model.shape == shape]
        weight = np.concatenate([np.full(len(f.draws), f.weight / len(f.draws)) for f in chosen])
        weight /= weight.sum()
        values = {
            "asymptote": np.concatenate(
                [np.full(len(f.draws), f.node.law.asymptote) for f in chosen]
            ),
            "slope": np.concatenate([f.model.slope(f.draws) for f in chosen]),
            "form": np.concatenate([f.model.form(f.draws) for f in chosen]),
        }
        return {name: _mean_sd(value, weight) for name, value in values.items()}


def _mean_sd(values: Array, weight: Array) -> tuple[float, float]:
    mean = float(weight @ values)
    return mean, float(np.sqrt(weight @ (values - mean) ** 2))


def fit_curves(
    data: CurveData,
    nodes: Sequence[Node],
    shapes: Sequence[Shape],
    noise: float,
    transient_steps: float,
) -> CurvePosterior:
    """Fit every node under every shape; shapes have equal prior weight.

    Asymptotes weigh by their evidence within setting and shape, settings weigh the same. Between
    shapes the evidence counts each run, not each evaluation, as one observation: what a shape
    misses along a run is one correlated error, and would else decide by itself.
    """
    fitted: list[tuple[CurveModel, Node, Array, Array, float]] = []
    for shape in shapes:
        modes: list[Array] = []
        for node, before in zip(nodes, (None, *nodes), strict=False):
            if before is not None and before.setting != node.setting:
                modes = modes[:1]
            model = CurveModel(data, node.law, shape, noise, transient_steps)
            # Asymptotes are equally spaced: the last two modes point to the next one.
            start = 2 * modes[-1] - modes[-2] if len(modes) > 1 else modes[-1] if modes else None
            z, root, evidence = _maximise(model, start)
            fitted.append((model, node, z, root, evidence + node.log_weight))
            modes.append(z)
    observed = len(np.unique(data.run))
    weights = _node_weights(fitted, observed / len(data.loss))
    total = {
        shape: sum(w for w, entry in zip(weights, fitted, strict=True) if entry[0].shape == shape)
        for shape in shapes
    }
    base = _normal_draws(fitted[0][0].num_parameters)
    fits = tuple(
        Fit(model, node, z + base @ root.T, float(weight))
        for (model, node, z, root, _), weight in zip(fitted, weights, strict=True)
        if weight > NEGLIGIBLE_WEIGHT
    )
    return CurvePosterior(fits, {shape: float(total[shape]) for shape in shapes})


def _maximise(model: CurveModel, start: Array | None) -> tuple[Array, Array, float]:
    """Posterior mode, a root of the covariance, and the log evidence up to a constant."""
    first = np.zeros(model.num_parameters) if start is None else start
    found = least_squares(
        model.residuals,
        first,
        jac=model.jacobian,  # type: ignore[arg-type]
        method="lm",
        xtol=TOLERANCE,
        ftol=TOLERANCE,
        max_nfev=MAX_EVALUATIONS,
    )
    triangle = np.linalg.qr(found.jac, mode="r")
    root = np.linalg.inv(triangle)
    return found.x, root, float(-found.cost - np.log(np.abs(np.diag(triangle))).sum())


def _node_weights(
    fitted: Sequence[tuple[CurveModel, Node, Array, Array, float]], shape_power: float
) -> Array:
    """Share of every node, the settings counted alike."""
    logs = np.array([entry[4] for entry in fitted])
    settings = np.array([entry[1].setting for entry in fitted])
    shapes = np.array([entry[0].shape for entry in fitted])
    weights = np.zeros_like(logs)
    for setting in np.unique(settings):
        evidence = {}
        for shape in np.unique(shapes):
            chosen = (settings == setting) & (shapes == shape)
            evidence[shape] = float(np.logaddexp.reduce(logs[chosen]))
            weights[chosen] = np.exp(logs[chosen] - evidence[shape])
        best = max(evidence.values())
        share = {shape: np.exp(shape_power * (log - best)) for shape, log in evidence.items()}
        for shape, value in share.items():
            weights[(settings == setting) & (shapes == shape)] *= value / sum(share.values())
    return weights / len(np.unique(settings))


def _normal_draws(num_parameters: int) -> Array:
    """Quasi-random standard normals [draw, parameter], the same in every process."""
    # scipy accepts a generator; Philox gives the same stream on every platform.
    rng = np.random.Generator(np.random.Philox(DRAW_SEED))
    sampler = qmc.MultivariateNormalQMC(np.zeros(num_parameters), rng=rng)
    return sampler.random(2**LOG2_DRAWS)


def weighted_quantiles(values: Array, weights: Array, levels: Sequence[float]) -> Array:
    """Quantiles [column, level] of weighted draws [draw, column], linear between draws."""
    wanted = np.asarray(levels)
    rows = []
    for column in values.T:
        order = np.argsort(column, kind="stable")
        share = np.cumsum(weights[order]) - 0.5 * weights[order]
        rows.append(np.interp(wanted, share, column[order]))
    return np.array(rows)
