"""Checks that a scorer judges documents and not their sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_DEVIATION, HOMOGENEOUS_SHARE, GOOD_LEVEL = 1e-3, 0.99, 4
Values = NDArray[np.float64]


def ranks(values: Values) -> Values:
    """Ranks from 1, the mean rank for equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def spearman(first: Values, second: Values) -> float | None:
    """Correlation of ranks; None if one side is constant."""
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else None


def auc(scores: Values, good: NDArray[np.bool_]) -> float | None:
    """Chance that a good document scores higher, ties count half; None without both kinds."""
    num_good, num_bad = int(good.sum()), int((~good).sum())
    if not num_good or not num_bad:
        return None
    return float(ranks(scores)[good].sum() - num_good * (num_good + 1) / 2) / num_good / num_bad


def scores_of_sources(
    sources: Sequence[str], good: NDArray[np.bool_], folds: NDArray[np.int64]
) -> Values:
    """What the name of the source alone predicts: its share of good documents in other folds."""
    names, inverse = np.unique(np.array(sources), return_inverse=True)
    predicted = np.zeros(len(good))
    for fold in np.unique(folds):
        inside = folds != fold
        overall = good[inside].mean() if inside.any() else 0.0
        totals = np.bincount(inverse[inside], minlength=len(names))
        hits = np.bincount(inverse[inside], good[inside].astype(np.float64), len(names))
        shares = np.where(totals > 0, hits / np.maximum(totals, 1), overall)
        predicted[~inside] = shares[inverse[~inside]]
    return predicted


@dataclass(frozen=True)
class Gates:
    """What held-out labels say about a scorer.

    within_type: rank correlation of score and level inside each type, where both vary;
    auc_scorer, auc_source: how well the score, and the name of the source alone, tell documents of
    level 4 and 5 from the others.
    """

    deviation: float
    within_type: Mapping[str, float]
    auc_scorer: float | None
    auc_source: float | None

    @property
    def failures(self) -> list[str]:
        """What is wrong with the scorer."""
        found = []
        if self.deviation < MIN_DEVIATION:
            found.append(f"its scores hardly vary (standard deviation {self.deviation:.1e})")
        # Both are None together: when every label is good, or none is.
        if (self.auc_source or 0.0) > (self.auc_scorer or 0.0):
            found.append(
                f"the name of the source alone tells good documents better (AUC "
                f"{self.auc_source:.3f}) than the scorer ({self.auc_scorer:.3f})"
            )
        return found


def check_scorer(
    scores: Values,
    levels: NDArray[np.int64],
    types: Sequence[str],
    sources: Sequence[str],
    folds: NDArray[np.int64],
) -> Gates:
    """Gates of scores float64[n] that were made without the labels that they are compared with."""
    good = levels >= GOOD_LEVEL
    kinds = np.array(types)
    values = levels.astype(np.float64)
    within = {
        kind: correlation
        for kind in sorted(set(types))
        if (correlation := spearman(scores[kinds == kind], values[kinds == kind])) is not None
    }
    return Gates(
        float(scores.std()),
        within,
        auc(scores, good),
        auc(scores_of_sources(sources, good, folds), good),
    )


@dataclass(frozen=True)
class SourceScores:
    """Scores of the documents of a source: how many, standard deviation, documents a bucket."""

    documents: int
    deviation: float
    buckets: tuple[int, ...]

    @property
    def state(self) -> str:
        """`uninformative` (scores do not vary), `homogeneous` (they do, in one bucket), `mixed`."""
        if self.deviation < MIN_DEVIATION:
            return "uninformative"
        one_bucket = max(self.buckets) >= HOMOGENEOUS_SHARE * self.documents
        return "homogeneous" if one_bucket else "mixed"
