"""The space of mixtures: cells, budgets, lattice and cap, and what a mixture makes a run read.

Shapes: n mixtures, S phases, C cells, D content dimensions. Weights are float64[n, S, C] with rows
that sum to 1, counts int64[n, S, C] with rows that sum to the lattice.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portolan.data.mixture_design import MixtureError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

NUM_COMPONENTS = 16
TOP_BUCKET = 4
FILLING_ROUNDS = 64


@dataclass(frozen=True)
class Cells:
    """Cells of one store: names, tokens [C], contents [C, D], and the tokens [S] of each phase.

    `budgets_tokens` are those of the target run, which small runs imitate by simulated epoching.
    """

    names: tuple[str, ...]
    tokens: Counts
    contents: Floats
    budgets_tokens: Counts

    @property
    def shares(self) -> Floats:
        """Share of each cell in all tokens, [C]."""
        return self.tokens / self.tokens.sum()

    def epochs(self, weights: Floats) -> Floats:
        """Times each phase reads each cell, e = B_s w / V, [n, S, C]; 0 for empty cells."""
        used = weights * self.budgets_tokens[:, None]
        return np.divide(used, self.tokens, out=np.zeros_like(used), where=self.tokens > 0)

    def features(self, weights: Floats) -> Floats:
        """h_s = [sum of a e phi, sum of a e^2 phi] of each phase, [n, S, 2 D] (data.md 12)."""
        epochs = self.epochs(weights)
        exposure = self.shares * epochs
        blocks = [exposure @ self.contents, (exposure * epochs) @ self.contents]
        return np.concatenate(blocks, axis=-1)

    def repetition(self, weights: Floats) -> Floats:
        """Sum of a e^2 of each phase, [n, S], in units of the proportional mixture."""
        squares = (self.shares * self.epochs(weights) ** 2).sum(axis=-1)
        proportional = (self.budgets_tokens / self.tokens.sum()) ** 2
        return squares / proportional


@dataclass(frozen=True)
class SearchSpace:
    """Mixtures on a lattice that a run may use: no cell above the cap, only readable cells.

    `readable` bool[C]: cells of which the smallest run that tries a mixture keeps a sequence.
    """

    cells: Cells
    lattice: int
    cap_epochs: float
    readable: NDArray[np.bool_]

    @property
    def proportional(self) -> Counts:
        """Counts proportional to tokens in every phase, [S, C]."""
        phases = len(self.cells.budgets_tokens)
        weights = np.broadcast_to(self.cells.shares, (1, phases, len(self.cells.names)))
        found = self.fit(weights)
        if not len(found):
            raise MixtureError(
                f"{self.cap_epochs:g} epochs of the readable cells are less than the budget",
                remedy="lower the budget, raise the cap or add data",
            )
        return found[0]

    def weights(self, counts: Counts) -> Floats:
        """Counts as weights."""
        return counts / self.lattice

    def max_epochs(self, counts: Counts) -> Floats:
        """Largest epochs of a cell over all phases, [n]."""
        return self.cells.epochs(self.weights(counts)).sum(axis=-2).max(axis=-1)

    def fit(self, weights: Floats) -> Counts:
        """Nearest counts under the cap, in the order given; mixtures that cannot be are left out.

        A cell over the cap keeps the split of its tokens over the phases; what it gives up goes to
        the other cells in proportion to their weights (water-filling), then remainders are dealt.
        """
        budgets = self.cells.budgets_tokens[:, None]
        weights = np.where(self.readable, weights, 0.0)
        used = weights * budgets
        total = used.sum(axis=-2, keepdims=True)
        even = np.broadcast_to(budgets / budgets.sum(), used.shape)
        split = np.divide(used, total, out=even.copy(), where=total > 0)
        cap = np.where(self.readable, self.cap_epochs * self.cells.tokens, 0.0)
        limits = split * cap / budgets
        counts = _deal(_fill(weights, limits), limits, self.lattice)
        return counts[(counts.sum(axis=-1) == self.lattice).all(axis=-1)]


def _fill(weights: Floats, limits: Floats) -> Floats:
    """Rows scaled to sum 1 with no weight over its limit, as far as the limits allow."""
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    held = np.zeros(weights.shape, bool)
    for _ in range(FILLING_ROUNDS):
        over = (weights > limits) & ~held
        if not over.any():
            break
        held |= over
        weights = np.where(held, limits, weights)
        rest = 1 - np.where(held, weights, 0.0).sum(axis=-1, keepdims=True)
        free = np.where(held, 0.0, weights)
        scale = rest / np.maximum(free.sum(axis=-1, keepdims=True), 1e-300)
        weights = np.where(held, weights, free * scale)
    return np.minimum(weights, limits)


def _deal(weights: Floats, limits: Floats, lattice: int) -> Counts:
    """Counts on the lattice: floors, then one each by largest remainder where there is room."""
    exact = weights * lattice
    room = np.floor(limits * lattice * (1 + 1e-12)).astype(np.int64)
    counts = np.minimum(np.floor(exact * (1 + 1e-12)).astype(np.int64), room)
    remainders = exact - np.floor(exact)
    while True:
        missing = lattice - counts.sum(axis=-1, keepdims=True)
        is_open = (counts < room) & (weights > 0)
        order = np.argsort(np.where(is_open, -remainders, np.inf), axis=-1, kind="stable")
        rank = np.argsort(order, axis=-1, kind="stable")
        given = is_open & (rank < missing)
        if not given.any():
            return counts
        counts = counts + given


@dataclass(frozen=True)
class ContentMap:
    """Principal components of cells, so that evidence from another store can join.

    center [E], components [E, K], scale: root mean square length of the centred cells.
    """

    center: Floats
    components: Floats
    scale: float

    def __call__(self, means: Any, buckets: Any) -> Floats:
        """Content vectors [C, K + 1] of cells: components of the mean embedding, and q / 4."""
        means = np.asarray(means, np.float64)
        projected = (means - self.center) @ self.components / self.scale
        quality = np.asarray(buckets, np.float64)[:, None] / TOP_BUCKET
        return np.concatenate([projected, quality], axis=1)


def fit_content(means: Any, num_components: int = NUM_COMPONENTS) -> ContentMap:
    """First principal components over the mean embeddings [C, E] of cells.

    The sign of a component makes its largest entry positive, so that nothing depends on the solver.
    """
    means = np.asarray(means, np.float64)
    center = means.mean(axis=0)
    centred = means - center
    _, values, rows = np.linalg.svd(centred, full_matrices=False)
    kept = min(num_components, int((values > 1e-9 * max(values[0], 1e-300)).sum()))
    components = rows[:kept]
    signs = np.sign(components[np.arange(kept), np.abs(components).argmax(axis=1)])
    scale = float(np.sqrt((centred**2).sum(axis=1).mean())) or 1.0
    return ContentMap(center, (components * signs[:, None]).T, scale)
