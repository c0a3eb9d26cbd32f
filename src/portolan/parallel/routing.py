"""Which assignments are kept and where their rows go: one pure function, in numpy and in jnp.

Every shard computes the same plan from the same counts (parallel.md 5.2-5.4). The functions use the
array namespace of their arguments.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from portolan.parallel.capacity import Capacities


def namespace(array: Any) -> Any:
    """numpy or jax.numpy, whichever made the array."""
    return array.__array_namespace__()


def rank_in_class(keys: Any, num_classes: int) -> Any:
    """Position of each element among those of equal key, in flat order; int32[n].

    `keys` int[n] lie in [0, num_classes].
    """
    xp = namespace(keys)
    order = xp.argsort(keys, stable=True)
    starts = xp.searchsorted(keys[order], xp.arange(num_classes + 1, dtype=keys.dtype))
    position = xp.arange(len(keys), dtype=xp.int32)
    ranked = position - starts[keys[order]].astype(xp.int32)
    if hasattr(ranked, "at"):
        return xp.zeros_like(position).at[order].set(ranked)
    ranks = xp.zeros_like(position)
    ranks[order] = ranked
    return ranks


def count_assignments(ids: Any, num_experts: int) -> Any:
    """Assignments per expert of one shard, int32[E]; ids >= E are padding and not counted."""
    xp = namespace(ids)
    return (ids[:, None] == xp.arange(num_experts)[None, :]).sum(axis=0).astype(xp.int32)


@dataclass(frozen=True)
class Plan:
    """Kept rows: `kept` int32[E] per expert, `accepted` int32[S,E] per sender and expert."""

    kept: Any
    accepted: Any
    capacities: Capacities

    def chunk(self, index: int) -> Any:
        """Accepted rows int32[S,E] of one chunk, 0 elsewhere."""
        xp = namespace(self.accepted)
        shape, width = self.capacities.shape, self.capacities.chunk_experts
        local = xp.arange(shape.num_experts) % shape.local_experts
        return xp.where(local // width == index, self.accepted, 0)


def plan(counts: Any, capacities: Capacities) -> Plan:
    """The kept set of a gate, from N int32[S,E].

    The accepted rows of (sender, expert) are the first ones of that sender. `cell` limits each
    (sender, expert); `receiver` fills the experts of a chunk in order; `waterfill` lends unused
    rows inside groups of experts.
    """
    xp, rule = namespace(counts), capacities.rule
    if rule.gate == "none":
        return Plan(counts.sum(axis=0, dtype=xp.int32), counts, capacities)
    if rule.gate == "cell":
        limit = capacities.cell.logical(counts.sum(axis=1, dtype=xp.int32), xp)
        accepted = xp.minimum(counts, limit[:, None]).astype(xp.int32)
        return Plan(accepted.sum(axis=0, dtype=xp.int32), accepted, capacities)
    kept = _kept_per_expert(counts, capacities)
    split = _split_source_major if rule.order == "source_major" else _split_round_robin
    return Plan(kept, split(counts, kept), capacities)


def _kept_per_expert(counts: Any, capacities: Capacities) -> Any:
    xp, rule, shape = namespace(counts), capacities.rule, capacities.shape
    totals = counts.sum(axis=0, dtype=xp.int32)
    valid = totals.sum(dtype=xp.int32)
    if rule.gate == "receiver":
        limit = capacities.receiver.logical(valid, xp)
        share = xp.minimum(
            capacities.receiver_chunk, (limit + rule.num_chunks - 1) // rule.num_chunks
        )
        pools = totals.reshape(-1, capacities.chunk_experts)
        before = xp.cumsum(pools, axis=1, dtype=xp.int32) - pools
        kept = xp.minimum(xp.maximum(share - before, 0), pools)
    else:
        limit = capacities.waterfill.logical(valid, xp)
        pools = totals.reshape(-1, rule.group_size)
        floor = xp.minimum(pools, limit)
        slack = (limit - floor).sum(axis=1, keepdims=True, dtype=xp.int32)
        lent = xp.minimum(xp.cumsum(pools - floor, axis=1, dtype=xp.int32), slack)
        before = xp.concat([xp.zeros_like(lent[:, :1]), lent[:, :-1]], axis=1)
        kept = floor + lent - before
    return kept.reshape(shape.num_experts).astype(xp.int32)


def _split_source_major(counts: Any, kept: Any) -> Any:
    """Earlier senders first."""
    xp = namespace(counts)
    before = xp.cumsum(counts, axis=0, dtype=xp.int32) - counts
    return xp.minimum(xp.maximum(kept[None, :] - before, 0), counts).astype(xp.int32)


def _split_round_robin(counts: Any, kept: Any) -> Any:
    """As many from every sender as the kept total allows; the first senders take the remainder.

    The level is found by bisection in 31 steps, whatever the counts.
    """
    xp = namespace(counts)
    low, high = xp.zeros_like(kept), counts.max(axis=0)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        fits = xp.minimum(counts, middle[None, :]).sum(axis=0, dtype=xp.int32) <= kept
        low, high = xp.where(fits, middle, low), xp.where(fits, high, middle - 1)
    level = xp.minimum(counts, low[None, :])
    above = counts > low[None, :]
    turn = xp.cumsum(above, axis=0, dtype=xp.int32)
    extra = kept - level.sum(axis=0, dtype=xp.int32)
    return (level + (above & (turn <= extra[None, :]))).astype(xp.int32)


def keep_mask(ids: Any, accepted: Any) -> Any:
    """Kept assignments of one shard, bool[A]: rank inside the expert < accepted int[E]."""
    xp = namespace(ids)
    num_experts = len(accepted)
    padded = xp.concat([accepted, xp.zeros_like(accepted[:1])])
    clipped = xp.minimum(ids, num_experts)
    return rank_in_class(clipped, num_experts) < padded[clipped]


class Updates(NamedTuple):
    """Row segments of one shard in an exchange, int32[S x El] each.

    Segment u goes to peer u div El: rows [start, start + send) of the operand land at `out` in that
    peer's coordinates; `receive` rows arrive from peer u div El.
    """

    start: Any
    send: Any
    out: Any
    receive: Any


def dispatch_updates(counts: Any, accepted: Any, shard: Any) -> Updates:
    """Segments that bring the accepted rows of a chunk to their owners (D of parallel.md 5.4)."""
    first, before, base = _starts(counts, accepted)
    return Updates(
        start=first[shard],
        send=accepted[shard],
        out=base + before[shard],
        receive=_of_owner(accepted, shard),
    )


def return_updates(counts: Any, accepted: Any, shard: Any) -> Updates:
    """Segments that bring the results back to the places they came from (R of parallel.md 5.4)."""
    first, before, base = _starts(counts, accepted)
    return Updates(
        start=_of_owner(base[None, :] + before, shard),
        send=_of_owner(accepted, shard),
        out=_of_owner(first, shard),
        receive=accepted[shard],
    )


def _starts(counts: Any, accepted: Any) -> tuple[Any, Any, Any]:
    """Start of (s, g) in its sender's sorted rows, inside expert g, and of g at its owner."""
    xp = namespace(counts)
    first = xp.cumsum(counts, axis=1, dtype=xp.int32) - counts
    before = xp.cumsum(accepted, axis=0, dtype=xp.int32) - accepted
    totals = accepted.sum(axis=0, dtype=xp.int32).reshape(counts.shape[0], -1)
    base = xp.cumsum(totals, axis=1, dtype=xp.int32) - totals
    return first, before, base.reshape(-1)


def _of_owner(values: Any, shard: Any) -> Any:
    """values int[S,E] of the experts of one shard, sender by sender: int[S x El]."""
    num_shards, num_experts = values.shape
    return values.reshape(num_shards, num_shards, num_experts // num_shards)[:, shard].reshape(-1)
