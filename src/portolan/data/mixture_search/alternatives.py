"""Simpler surrogates with the interface of the process: fit the runs, then predict mixtures."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from portolan.data.mixture_design import MixtureError
from portolan.data.mixture_search.objective import Objective
from portolan.data.mixture_search.space import Cells, Floats

Predictor = Callable[[Floats], Floats]
"""Expected objective [n] of mixtures [n, S, C]; lower is better."""

HUBER_EPSILON = 1.35
RIDGE = 1e-3
PENALTY = 0.05
"""Nats of divergence from the proportional mixture cost this much of the objective."""


def fit_log_linear(
    weights: Floats, metrics: Sequence[Mapping[str, float]], objective: Objective
) -> Predictor:
    """log(bits per byte) of each metric linear in the weights: Huber loss, a small ridge."""
    from sklearn.linear_model import HuberRegressor

    design = weights.reshape(len(weights), -1)
    center, models = design.mean(axis=0), {}
    for name in dict.fromkeys((*objective.targets, *objective.guards)):
        values = np.log([row[name] for row in metrics])
        # Weights are small numbers: in units of the spread one ridge serves every corpus.
        spread = float(values.std()) or 1.0
        model = HuberRegressor(epsilon=HUBER_EPSILON, alpha=RIDGE, max_iter=2_000)
        models[name] = (model.fit(design - center, (values - values.mean()) / spread), spread)
        models[name] = (*models[name], float(values.mean()))

    def predict(mixtures: Floats) -> Floats:
        rows = mixtures.reshape(len(mixtures), -1) - center
        found = {
            name: np.exp(mean + spread * model.predict(rows))
            for name, (model, spread, mean) in models.items()
        }
        return np.array([objective({n: v[i] for n, v in found.items()}) for i in range(len(rows))])

    return predict


def fit_exposure(cells: Cells, weights: Floats, values: Floats) -> Predictor:
    """Ridge on saturating exposure, sum of a log(1 + e) phi of each phase, kept near proportional.

    The penalty is 0.05 sum_s share_s KL(w_s || p), p proportional to tokens and share_s the part
    of phase s in the budget: .8 and .2 for the phases of the public run (data.md 12).
    """
    from sklearn.linear_model import RidgeCV

    if len(values) < 3:
        raise MixtureError("an exposure model needs at least 3 runs", remedy="train a larger swarm")
    shares = cells.budgets_tokens / cells.budgets_tokens.sum()

    def features(mixtures: Floats) -> Floats:
        saturated = cells.shares * np.log1p(cells.epochs(mixtures))
        ones = saturated.sum(axis=-1, keepdims=True)
        parts = np.concatenate([saturated @ cells.contents, ones], axis=-1)
        return parts.reshape(len(mixtures), -1)

    rows = features(weights)
    center, spread = rows.mean(axis=0), rows.std(axis=0)
    spread = np.where(spread > 1e-12, spread, 1.0)
    model = RidgeCV(alphas=np.logspace(-3, 3, 13)).fit((rows - center) / spread, values)

    def predict(mixtures: Floats) -> Floats:
        fitted = model.predict((features(mixtures) - center) / spread)
        return fitted + PENALTY * divergence(cells, mixtures) @ shares

    return predict


def divergence(cells: Cells, weights: Floats) -> Floats:
    """KL divergence of each phase from the proportional mixture in nats, [n, S]."""
    positive = np.maximum(weights, 1e-300)
    reference = np.maximum(cells.shares, 1e-300)
    return (weights * np.log(positive / reference)).sum(axis=-1)
