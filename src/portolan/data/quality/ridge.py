"""Ridge regression with many penalties at once, the same on any number of threads."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
NUM_FOLDS = 5
MAX_ITERATIONS, TOLERANCE = 200, 1e-5
Matrix = NDArray[np.float64]


def solve_ridge(features: sparse.csr_array, targets: Matrix, penalties: Matrix) -> Matrix:
    """Weights float64[p, c]: column c minimises |X w - y_c|^2 + penalty_c |w|^2.

    targets float64[n, c], penalties float64[c]. Conjugate gradients on the normal equations
    (Hestenes and Stiefel 1952): products with a sparse matrix and sums run in a fixed order, where
    a factorisation would depend on the threads of BLAS.
    """
    transposed = sparse.csr_array(features.T)
    residual = transposed @ targets
    weights = np.zeros_like(residual)
    direction, squares = residual.copy(), (residual**2).sum(axis=0)
    goal = TOLERANCE**2 * squares
    for _ in range(MAX_ITERATIONS):
        active = squares > goal
        if not active.any():
            break
        image = transposed @ (features @ direction) + penalties * direction
        curvature = np.where(active, (direction * image).sum(axis=0), 1.0)
        step = np.where(active, squares / curvature, 0.0)
        weights += step * direction
        residual -= step * image
        before, squares = squares, (residual**2).sum(axis=0)
        direction = residual + np.where(active, squares / np.maximum(before, 1e-300), 0) * direction
    return weights


class CrossValidation(NamedTuple):
    """The penalty of least error, the mean squared error of each, and predictions float64[n].

    The prediction of a row comes from a fit that did not see it.
    """

    penalty: float
    errors: dict[float, float]
    predictions: Matrix


def cross_validate(
    features: sparse.csr_array, targets: Matrix, folds: NDArray[np.int64]
) -> CrossValidation:
    """Choose a penalty for targets float64[n] by 5 folds int64[n]; the larger one of equals."""
    penalties = np.array(PENALTIES)
    predictions = np.zeros((len(targets), len(penalties)))
    for fold in range(NUM_FOLDS):
        inside = np.flatnonzero(folds != fold)
        outside = np.flatnonzero(folds == fold)
        if not len(outside) or not len(inside):
            continue
        mean = targets[inside].mean()
        columns = np.repeat((targets[inside] - mean)[:, None], len(penalties), axis=1)
        weights = solve_ridge(features[inside], columns, penalties)
        predictions[outside] = mean + features[outside] @ weights
    errors = ((predictions - targets[:, None]) ** 2).mean(axis=0)
    best = int(len(errors) - 1 - errors[::-1].argmin())
    by_penalty = dict(zip(PENALTIES, map(float, errors), strict=True))
    return CrossValidation(PENALTIES[best], by_penalty, predictions[:, best])
