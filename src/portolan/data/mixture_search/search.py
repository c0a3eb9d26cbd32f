"""Candidate mixtures, the choice between them, and the rule that accepts one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.stats

from portolan.data.mixture_design import MixtureError
from portolan.data.mixture_search.space import Counts, Floats, SearchSpace

POOL = 65_536
NUM_POOLS = 3
NUM_DRAWS = 1_024
PIECE = 4_096
"""Candidates drawn and judged at a time: the memory of a search does not depend on its pools."""
CONCENTRATION = (0.5, 32.0)
"""Concentration of the Dirichlet candidates per cell, log-uniform between these."""
PERTURBATION = (0.02, 1.0)
"""Standard deviation of the logarithm of a perturbed weight, log-uniform between these."""
LATER_VARIATION = 0.05
LATER_APART = 0.01
LATER_BATCH = 10
MINIMUM_SEEDS = 3
CONFIDENCE = 0.95

Score = Callable[[Floats], Floats]
"""A number for each mixture [n, S, C]; lower is better."""


def draw_candidates(
    space: SearchSpace, observed: Counts, num: int, seed: int, *, piece: int = PIECE
) -> Iterator[Counts]:
    """Pieces of about `num` feasible mixtures [n, S, C] in all, always the same for a seed.

    Half are Dirichlet around tempered proportional mixtures, half perturb the proportional mixture
    or one of those `observed` [m, S, C].
    """
    bases = space.weights(np.concatenate([space.proportional[None], observed]))
    for start in range(0, num, piece):
        rng = np.random.default_rng((seed, start))
        size = min(piece, num - start)
        free = _dirichlet(space, rng, size // 2)
        near = _perturb(bases[rng.integers(len(bases), size=size - size // 2)], rng)
        yield space.fit(np.concatenate([free, near]))


def _log_uniform(rng: np.random.Generator, bounds: tuple[float, float], size: int) -> Floats:
    return np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]), size))


def _dirichlet(space: SearchSpace, rng: np.random.Generator, size: int) -> Floats:
    phases, cells = len(space.cells.budgets_tokens), len(space.cells.names)
    shares = np.where(space.readable, space.cells.shares, 0.0)
    tempered = np.where(shares > 0, np.maximum(shares, 1e-300), 1.0) ** rng.uniform(
        0, 1, (size, phases, 1)
    )
    tempered = np.where(shares > 0, tempered, 0.0)
    tempered /= tempered.sum(axis=-1, keepdims=True)
    strength = cells * _log_uniform(rng, CONCENTRATION, size)[:, None, None]
    drawn = rng.standard_gamma(np.maximum(tempered * strength, 1e-3))
    drawn = np.where(shares > 0, drawn, 0.0)
    return drawn / np.maximum(drawn.sum(axis=-1, keepdims=True), 1e-300)


def _perturb(weights: Floats, rng: np.random.Generator) -> Floats:
    size = _log_uniform(rng, PERTURBATION, len(weights))[:, None, None]
    changed = weights * np.exp(size * rng.standard_normal(weights.shape))
    return changed / changed.sum(axis=-1, keepdims=True)


def total_variation(first: Floats, second: Floats) -> Floats:
    """Half the sum of absolute differences of weights, the largest over the phases, [n]."""
    return 0.5 * np.abs(first - second).sum(axis=-1).max(axis=-1)


def spread_designs(space: SearchSpace, num: int, seed: int) -> Counts:
    """Mixtures far from each other and from proportional, [num, S, C]; a longer list begins alike.

    Farthest first by total variation in one pool of candidates.
    """
    none = space.proportional[None][:0]
    pool = np.concatenate(list(draw_candidates(space, none, PIECE, seed)))
    weights = space.weights(pool)
    nearest = total_variation(weights, space.weights(space.proportional))
    chosen = []
    for _ in range(min(num, len(pool))):
        index = int(nearest.argmax())
        chosen.append(index)
        nearest = np.minimum(nearest, total_variation(weights, weights[index]))
    return pool[chosen]


def search(
    space: SearchSpace,
    score: Score,
    observed: Counts,
    *,
    seed: int,
    num: int = POOL * NUM_POOLS,
) -> Counts:
    """The candidate with the least score, [S, C]; of equal ones the first drawn.

    Raises:
        MixtureError: no candidate keeps the cap.
    """
    best, least = None, np.inf
    for piece in draw_candidates(space, observed, num, seed):
        if not len(piece):
            continue
        scores = score(space.weights(piece))
        index = int(scores.argmin())
        if scores[index] < least:
            best, least = piece[index], float(scores[index])
    if best is None:
        raise MixtureError(
            "no candidate keeps every cell under its cap",
            remedy="raise the cap on epochs or lower the budget",
        )
    return best


def search_later(
    space: SearchSpace,
    score: Score,
    current: Counts,
    *,
    phase: int,
    seed: int,
    num: int = POOL,
    batch: int = LATER_BATCH,
) -> Counts:
    """Up to `batch` mixtures [n, S, C] that differ from the current one from `phase` on only.

    They are within total variation .05 of it and at least .01 apart, best first; phases before
    `phase` stay, and what they use counts in the cap.
    """
    base = space.weights(current)
    kept, values = current[None][:0], np.empty(0)
    for start in range(0, num, PIECE):
        rng = np.random.default_rng((seed, start))
        size = min(PIECE, num - start)
        changed = _perturb(np.broadcast_to(base, (size, *base.shape)), rng)
        changed[:, :phase] = base[:phase]
        apart = total_variation(changed, base)[:, None, None]
        step = np.minimum(1.0, LATER_VARIATION * rng.uniform(0, 1, size)[:, None, None] / apart)
        pool = space.fit(base + step * (changed - base))
        weights = space.weights(pool)
        usable = (pool[:, :phase] == current[:phase]).all(axis=(1, 2))
        usable &= total_variation(weights, base) <= LATER_VARIATION
        kept = np.concatenate([kept, pool[usable]])
        values = np.concatenate([values, score(weights[usable]) if usable.any() else []])
        chosen = _best_apart(space.weights(kept), values, batch)
        kept, values = kept[chosen], values[chosen]
    if not len(kept):
        raise MixtureError(
            "no later phase near the current one keeps the cap",
            remedy="lower its budget or raise the cap on epochs",
        )
    return kept


def _best_apart(weights: Floats, values: Floats, batch: int) -> list[int]:
    """Indices of up to `batch` best mixtures, each at least .01 from those before it."""
    chosen: list[int] = []
    left = np.array(values)
    while len(chosen) < batch and np.isfinite(left).any():
        best = int(left.argmin())
        chosen.append(best)
        left[total_variation(weights, weights[best]) < LATER_APART] = np.inf
    return chosen


def rank_correlation(predicted: Floats, measured: Floats) -> float:
    """Spearman's correlation; 0 where one side is constant."""
    if len(set(predicted.tolist())) < 2 or len(set(measured.tolist())) < 2:
        return 0.0
    return float(scipy.stats.spearmanr(predicted, measured)[0])  # pyright: ignore


@dataclass(frozen=True)
class Verdict:
    """Whether a mixture replaces another: seeds compared, mean difference of the objective and the
    upper end of its one-sided 95 % interval; negative is better."""

    num_seeds: int
    difference: float
    upper: float

    @property
    def accepted(self) -> bool:
        """At least three seeds, and better with confidence: one lucky seed is only a candidate."""
        return self.num_seeds >= MINIMUM_SEEDS and self.upper < 0


def compare(old: dict[int, float], new: dict[int, float]) -> Verdict:
    """Compare the objective of two mixtures over the seeds that both have."""
    seeds = sorted(set(old) & set(new))
    differences = np.array([new[seed] - old[seed] for seed in seeds])
    if len(seeds) < 2:
        mean = float(differences.mean()) if seeds else np.nan
        return Verdict(len(seeds), mean, np.inf)
    error = differences.std(ddof=1) / np.sqrt(len(seeds))
    quantile = scipy.stats.t.ppf(CONFIDENCE, len(seeds) - 1)
    return Verdict(
        len(seeds), float(differences.mean()), float(differences.mean() + quantile * error)
    )
