"""From raw scores to five buckets: cuts by type, where the levels of the rubric meet."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portolan.data.quality.rubric import LEVELS
from portolan.errors import UsageError

DEFAULT = "default"
EDGES = (0.2, 0.4, 0.6, 0.8)
MARGIN = 1e-6
Scores = NDArray[np.float32]


@dataclass(frozen=True)
class Curve:
    """Cuts of one type, float32 and not falling, and the extreme raw scores of its labels."""

    cuts: tuple[float, float, float, float]
    lowest: float
    highest: float
    labels: int

    def bucket(self, raw: Scores) -> NDArray[np.int8]:
        """Number int8[n] of cuts that are not above a raw score, compared as float32."""
        cuts = np.array(self.cuts, np.float32)
        places = np.searchsorted(cuts, np.asarray(raw, np.float32), side="right")
        return places.astype(np.int8)

    def score(self, raw: Scores) -> Scores:
        """Calibrated score float32[n]: linear between the extremes and the cuts, clipped to 0..1.

        At equal cuts the curve steps to the upper value.
        """
        values = np.asarray(raw, np.float32).astype(np.float64)
        cuts = np.array(self.cuts, np.float32).astype(np.float64)
        points = np.array([min(self.lowest, cuts[0]) - MARGIN, *cuts, 0.0])
        points[5] = max(self.highest, cuts[3]) + MARGIN
        heights = np.array([0.0, *EDGES, 1.0])
        left = np.clip(np.searchsorted(points, values, side="right") - 1, 0, 4)
        width = points[left + 1] - points[left]
        share = np.where(width > 0, (values - points[left]) / np.where(width > 0, width, 1), 0.0)
        steps = heights[left] + np.clip(share, 0, 1) * (heights[left + 1] - heights[left])
        scores = steps.astype(np.float32)
        # Rounding must not carry a score over an edge that its raw score has not reached.
        bucket = self.bucket(raw)
        edges = np.array([0.0, *EDGES, 1.0], np.float32)
        below = np.nextafter(edges[bucket + 1], np.float32(0))
        return np.clip(scores, edges[bucket], np.where(bucket == 4, np.float32(1), below))


def fit_curve(raw: Scores, levels: NDArray[np.integer]) -> Curve:
    """The curve of labels with raw scores float32[n]: a cut lies midway between two medians.

    Raises:
        UsageError: a level has no label.
    """
    values = np.asarray(raw, np.float32)
    if missing := [level for level in LEVELS if not (levels == level).any()]:
        raise UsageError(
            f"no label has level {missing[0]}: {len(levels)} labels cannot be calibrated",
            remedy="label more documents (data.quality.sample_documents), until each of the 5 "
            "levels occurs",
        )
    medians = [float(np.median(values[levels == level].astype(np.float64))) for level in LEVELS]
    middles = [(one + other) / 2 for one, other in itertools.pairwise(medians)]
    cuts = np.maximum.accumulate(middles).astype(np.float32)
    a, b, c, d = (float(cut) for cut in cuts)
    return Curve((a, b, c, d), float(values.min()), float(values.max()), len(values))


def fit_curves(raw: Scores, levels: NDArray[np.integer], types: Sequence[str]) -> dict[str, Curve]:
    """A curve over all labels, `default`, and one for each type that has all five levels.

    Raises:
        UsageError: a level has no label at all.
    """
    curves = {DEFAULT: fit_curve(raw, levels)}
    kinds = np.array(types)
    for kind in sorted(set(types)):
        inside = kinds == kind
        if set(LEVELS) <= set(levels[inside].tolist()):
            curves[kind] = fit_curve(raw[inside], levels[inside])
    return curves


def calibrate_scores(
    curves: Mapping[str, Curve], raw: Scores, types: Sequence[str | None]
) -> tuple[Scores, NDArray[np.int8]]:
    """Calibrated scores float32[n] and buckets int8[n]; a type without a curve uses `default`."""
    kinds = np.array([kind if kind in curves else DEFAULT for kind in types])
    scores, buckets = np.zeros(len(raw), np.float32), np.zeros(len(raw), np.int8)
    for kind in np.unique(kinds):
        inside, curve = kinds == kind, curves[str(kind)]
        scores[inside] = curve.score(raw[inside])
        buckets[inside] = curve.bucket(raw[inside])
    return scores, buckets
