"""How many routed rows a rule would drop, from a random model of the router (parallel.md 6.7).

Sender s sends its A assignments to expert g with probability proportional to
exp(skew z_g + sender_skew z_sg), z standard normal: some experts are popular everywhere, and
documents that lie on one device prefer some. The rules are those of training (`routing.plan`); of
the pooled transport the counts alone are simulated, rows inside a pool being exchangeable.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from portolan.errors import UsageError
from portolan.parallel.capacity import (
    Capacities,
    ExchangeShape,
    PooledCapacities,
    RoutingRule,
)
from portolan.parallel.routing import plan

Counts = NDArray[np.int32]
FACTORS = tuple(Fraction(text) for text in ("1", "1.05", "1.1", "1.15", "1.25", "1.5", "2"))
MAX_CELLS = 2**22
"""Entries of the counts of one draw: 64 senders x 65,536 experts; 50 MB at most."""


@dataclass(frozen=True)
class Skew:
    """Spread of log popularity: of experts, and of experts as one sender sees them."""

    expert: float
    sender: float


def draw_counts(shape: ExchangeShape, skew: Skew, rng: np.random.Generator) -> Counts:
    """N int32[S,E] of one random layer.

    Raises:
        UsageError: the shape is beyond the memory that a simulation may use.
    """
    if shape.num_shards * shape.num_experts > MAX_CELLS:
        raise UsageError(
            f"{shape.num_shards} senders x {shape.num_experts} experts are too many to simulate",
            remedy=f"simulate up to {MAX_CELLS:,} pairs",
        )
    log_share = skew.expert * rng.standard_normal(shape.num_experts)
    log_share = log_share + skew.sender * rng.standard_normal((shape.num_shards, shape.num_experts))
    share = np.exp(log_share - log_share.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    return rng.multinomial(shape.num_assignments, share).astype(np.int32)


def gate_drops(counts: Counts, capacities: Capacities) -> float:
    """Share of the assignments that a gate drops."""
    total = int(counts.sum(dtype=np.int64))
    return 1 - int(plan(counts, capacities).kept.sum(dtype=np.int64)) / max(1, total)


def pooled_drops(
    counts: Counts, capacities: PooledCapacities, rng: np.random.Generator
) -> tuple[float, float]:
    """Shares of the assignments that senders and receivers drop."""
    shape, waves = capacities.shape, capacities.num_waves
    total = max(1, int(counts.sum(dtype=np.int64)))
    pools = counts.reshape(shape.num_shards, shape.num_shards, shape.local_experts)
    rows = pools.sum(axis=2)
    limit = capacities.send.logical(counts.sum(axis=1), np)[:, None]
    sent = sum(np.minimum(-(-(rows - wave) // waves), limit) for wave in range(waves))
    sent = np.asarray(sent)
    arriving = (pools * (sent / np.maximum(rows, 1))[:, :, None]).sum(axis=0).reshape(-1)
    per_wave = rng.multinomial(np.round(arriving).astype(np.int64), [1 / waves] * waves)
    allowed = int(capacities.receive.logical(int(counts.sum(dtype=np.int64)), np))
    at_receiver = np.maximum(per_wave - allowed, 0).sum()
    return 1 - int(sent.sum()) / total, float(at_receiver / total)


@dataclass(frozen=True)
class DropRow:
    """Drop rates at one capacity factor by rule: the mean over random layers, and the standard
    deviation from layer to layer."""

    capacity_factor: Fraction
    mean: dict[str, float]
    spread: dict[str, float]


def _rules(rule: RoutingRule, shape: ExchangeShape) -> Iterator[tuple[str, RoutingRule]]:
    """The gates of a table: at 1 chunk and at the recipe's, ungrouped and in whole chunks."""
    yield "cell", replace(rule, gate="cell", num_chunks=1, group_size=1)
    chunks = sorted({1, rule.num_chunks if rule.num_chunks > 1 else 2})
    for count in chunks:
        if shape.local_experts % count == 0:
            receiver = replace(rule, gate="receiver", num_chunks=count, group_size=1)
            yield f"receiver Q{count}", receiver
    yield "per expert", replace(rule, gate="waterfill", num_chunks=1, group_size=1)
    group = shape.local_experts // chunks[-1] if shape.local_experts % chunks[-1] == 0 else 1
    group = rule.group_size if rule.group_size > 1 else group
    if group > 1 and shape.local_experts % group == 0:
        yield f"waterfill G{group}", replace(rule, gate="waterfill", num_chunks=1, group_size=group)


def simulate_drops(
    shape: ExchangeShape,
    rule: RoutingRule,
    skews: Iterable[Skew],
    *,
    num_waves: int,
    factors: tuple[Fraction, ...] = FACTORS,
    num_draws: int = 20,
    seed: int = 0,
) -> list[DropRow]:
    """Drop rates by capacity factor, over `num_draws` random layers of every skew."""
    found: dict[tuple[Fraction, str], list[float]] = {}
    rules = list(_rules(rule, shape))
    waves = num_waves if shape.local_experts % num_waves == 0 else 1
    for index, skew in enumerate(skews):
        rng = np.random.default_rng([seed, index])
        for _ in range(num_draws):
            counts = draw_counts(shape, skew, rng)
            for factor in factors:
                pooled = PooledCapacities(shape, factor, factor, waves)
                sender, receiver = pooled_drops(counts, pooled, rng)
                rates = {"pooled, sender": sender, "pooled, receiver": receiver}
                for name, one in rules:
                    capacities = Capacities(shape, replace(one, capacity_factor=factor))
                    rates[name] = gate_drops(counts, capacities)
                for name, rate in rates.items():
                    found.setdefault((factor, name), []).append(rate)
    return [_summarise(factor, found) for factor in factors]


def _summarise(factor: Fraction, found: dict[tuple[Fraction, str], list[float]]) -> DropRow:
    values = {name: np.array(rates) for (key, name), rates in found.items() if key == factor}
    return DropRow(
        factor,
        {name: float(rates.mean()) for name, rates in values.items()},
        {name: float(rates.std()) for name, rates in values.items()},
    )


def fit_expert_skew(load_entropy: float, num_experts: int, rows_per_expert: float) -> float:
    """The skew whose loads have the entropy that training records (nats over E experts).

    Loads over their mean, exp(skew z - skew^2 / 2), have the mean logarithm skew^2 / 2 under
    themselves, which is what the entropy lacks to log E. The noise of counting, 1 / rows, and the
    mean of a finite number of experts are taken out.
    """
    variance = 2 * (math.log(num_experts) - load_entropy) * num_experts / (num_experts - 1)
    return math.sqrt(max(0.0, variance - 1 / rows_per_expert))
