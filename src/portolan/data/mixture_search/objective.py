"""What a mixture is judged by: bits per byte in units of the noise between proportional runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.data.mixture_design import MixtureError

MINIMUM_BASELINES = 2


@dataclass(frozen=True)
class Objective:
    """F = sum of z over targets + sum of max(z, -epsilon) over guards; lower is better.

    z = (value - mean) / deviation, both from proportional runs. A guard gives no credit for gains
    beyond `epsilon` (data.md 12).
    """

    targets: tuple[str, ...]
    guards: tuple[str, ...]
    means: Mapping[str, float]
    deviations: Mapping[str, float]
    epsilon: float = 0.0

    def scores(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """z of every metric."""
        names = dict.fromkeys((*self.targets, *self.guards))
        return {n: (metrics[n] - self.means[n]) / self.deviations[n] for n in names}

    def __call__(self, metrics: Mapping[str, float]) -> float:
        """The value of a run."""
        scores = self.scores(metrics)
        total = sum(scores[name] for name in self.targets)
        return float(total + sum(max(scores[name], -self.epsilon) for name in self.guards))


def fit_objective(
    baselines: Sequence[Mapping[str, float]],
    *,
    targets: Sequence[str] = (),
    guards: Sequence[str] = (),
    epsilon: float = 0.0,
) -> Objective:
    """The objective from the metrics of at least two proportional runs; no targets: all metrics.

    Raises:
        MixtureError: too few runs, an unknown metric, or one without noise.
    """
    if len(baselines) < MINIMUM_BASELINES:
        raise MixtureError(
            f"{len(baselines)} proportional runs do not show the noise",
            remedy=f"train at least {MINIMUM_BASELINES} of them with other seeds",
        )
    known = sorted(set.intersection(*(set(metrics) for metrics in baselines)))
    targets = tuple(targets or known)
    names = dict.fromkeys((*targets, *guards))
    if unknown := [name for name in names if name not in known]:
        raise MixtureError(f"no metric {unknown[0]!r}", remedy=f"use some of {', '.join(known)}")
    values = {name: np.array([metrics[name] for metrics in baselines]) for name in names}
    deviations = {name: float(column.std(ddof=1)) for name, column in values.items()}
    if still := [name for name, deviation in deviations.items() if not deviation]:
        raise MixtureError(
            f"proportional runs agree on {still[0]} to the last digit",
            remedy="give them different seeds",
        )
    means = {name: float(column.mean()) for name, column in values.items()}
    return Objective(targets, tuple(guards), means, deviations, epsilon)
