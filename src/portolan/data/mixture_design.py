"""Weights of cells from their sizes in closed form, and their rounding to a lattice of counts."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

from portolan.errors import UsageError


class MixtureError(UsageError):
    """A mixture that is inconsistent, or not made for this store, tokenizer or run."""


def sort_names(names: Collection[str]) -> list[str]:
    """Cell names in byte order, the order that every index refers to."""
    return sorted(names, key=str.encode)


@dataclass(frozen=True)
class Weights:
    """Weights that sum to 1, and the cells that the cap on epochs holds down."""

    weights: dict[str, float]
    capped: frozenset[str] = frozenset()


def round_to_lattice(
    weights: Mapping[str, float | int], lattice: int, *, limits: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Integer counts with sum `lattice`, none above its limit: floors, then largest remainders.

    Weights need not sum to 1. Arithmetic is exact; ties go by name.
    """
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or min(weights.values()) < 0:
        raise MixtureError(
            "weights are negative or all 0", remedy="give weights >= 0 and one cell more than 0"
        )
    room = dict.fromkeys(weights, lattice) | dict(limits or {})
    exact = {name: divmod(Fraction(weights[name]) * lattice, total) for name in weights}
    counts = {name: min(int(quotient), room[name]) for name, (quotient, _) in exact.items()}
    positive = [name for name in sort_names(weights) if weights[name] > 0]
    order = sorted(positive, key=lambda name: -exact[name][1])
    missing = lattice - sum(counts.values())
    while missing:
        given = [name for name in order if counts[name] < room[name]][:missing]
        if not given:
            raise MixtureError(
                "every cell is at its cap and the lattice is not full",
                remedy="raise the cap on epochs or lower the budget",
            )
        for name in given:
            counts[name] += 1
        missing -= len(given)
    return counts


def count_limits(
    tokens: Mapping[str, int], lattice: int, *, budget_tokens: int, cap_epochs: float
) -> dict[str, int]:
    """Largest count of each cell under the cap: floor(lattice * cap * tokens / budget)."""
    most = Fraction(cap_epochs) * lattice / budget_tokens
    return {name: min(lattice, int(most * count)) for name, count in tokens.items()}


def proportional_counts(
    tokens: Mapping[str, int],
    lattice: int,
    *,
    limits: Mapping[str, int] | None = None,
    at_least_one: bool = False,
) -> dict[str, int]:
    """Counts proportional to tokens; `at_least_one` lifts cells from 0 to 1 where the limit allows.

    What is lifted is taken from the largest count.
    """
    counts = round_to_lattice(tokens, lattice, limits=limits)
    if at_least_one:
        for name in sort_names(tokens):
            if tokens[name] and not counts[name] and (limits is None or limits[name]):
                largest = max(sort_names(tokens), key=counts.__getitem__)
                counts[largest] -= 1
                counts[name] = 1
    return counts


def _check_budget(tokens: Mapping[str, int], budget_tokens: float, cap_epochs: float) -> None:
    most = cap_epochs * sum(tokens.values())
    if most < budget_tokens:
        raise MixtureError(
            f"{cap_epochs:g} epochs of all cells are {most:.6g} tokens, the budget is "
            f"{budget_tokens:.6g}",
            remedy="lower the budget, raise the cap or add data",
        )


def temperature_weights(
    tokens: Mapping[str, int], exponent: float, *, budget_tokens: float, cap_epochs: float
) -> Weights:
    """Weights proportional to tokens^exponent, with water-filling of cells over the cap."""
    _check_budget(tokens, budget_tokens, cap_epochs)
    powers = {name: float(tokens[name]) ** exponent if tokens[name] else 0.0 for name in tokens}
    limits = {name: cap_epochs * tokens[name] / budget_tokens for name in tokens}
    capped: set[str] = set()
    while True:
        rest = 1 - math.fsum(limits[name] for name in capped)
        total = math.fsum(powers[name] for name in tokens if name not in capped)
        scale = rest / total if total else 0.0
        weights = {
            name: limits[name] if name in capped else powers[name] * scale for name in tokens
        }
        over = {name for name in tokens if name not in capped and weights[name] > limits[name]}
        if not over:
            return Weights(weights, frozenset(capped))
        capped |= over


def unimax_weights(
    tokens: Mapping[str, int], *, budget_tokens: float, cap_epochs: float
) -> Weights:
    """Equal shares, smallest cells first, each at most `cap_epochs` (UniMax, arXiv 2304.09151)."""
    _check_budget(tokens, budget_tokens, cap_epochs)
    order = sorted(tokens, key=lambda name: (tokens[name], name.encode()))
    remaining, weights, capped = float(budget_tokens), {}, set()
    for index, name in enumerate(order):
        share, limit = remaining / (len(order) - index), cap_epochs * tokens[name]
        if limit < share:
            capped.add(name)
        taken = min(share, limit)
        weights[name] = taken / budget_tokens
        remaining -= taken
    return Weights(weights, frozenset(capped))
