"""Which transport carries routed rows to their experts, checked before anything is compiled.

`make_exchange(settings, sizes, ...)` returns an `Exchange`, a frozen and hashable description that
is a function of one shard, called inside `jax.shard_map` over all mesh axes:

    y_TR, drops = exchange(x_TR, weights_TK, experts_TK, valid_T, experts)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from portolan.errors import UsageError
from portolan.model.drops import Drops
from portolan.parallel.capacity import (
    EXACT_INTEGERS,
    INT32_LIMIT,
    Capacities,
    ExchangeShape,
    PooledCapacities,
    RoutingRule,
    parse_capacity_factor,
)
from portolan.parallel.layout import COUNT_AXES
from portolan.parallel.transports import MODEL_AXIS
from portolan.parallel.transports.cell import exchange_cells
from portolan.parallel.transports.expert_function import GATED_MLP, ExpertFunction
from portolan.parallel.transports.grouped import apply_grouped
from portolan.parallel.transports.pooled_wave import exchange_pooled
from portolan.parallel.transports.ragged import exchange_ragged
from portolan.parallel.transports.ring import exchange_ring
from portolan.parallel.transports.routed import Experts, Routed, local_drops
from portolan.parallel_settings import ParallelSettings, Transport

EXCHANGES: dict[Transport, Any] = {
    "ring": exchange_ring,
    "cell": exchange_cells,
    "pooled": exchange_pooled,
    "ragged": exchange_ragged,
}


@dataclass(frozen=True)
class Exchange:
    """A transport with its static sizes; make it with `make_exchange`.

    `capacities` are those of the pooled gate for `pooled`. `function` is what the experts compute.
    """

    transport: Transport
    num_selected: int
    capacities: Capacities | PooledCapacities
    function: ExpertFunction = GATED_MLP

    def __call__(
        self,
        x_TR: jax.Array,
        weights_TK: jax.Array,
        experts_TK: jax.Array,
        valid_T: jax.Array,
        experts: Any,
    ) -> tuple[jax.Array, Drops]:
        """The routed experts' output [T, R], and the drops of the layer.

        `experts` is the tree of the local experts, [El, R, F/model] and [El, F/model, R] of the
        dtype of x. A dropped assignment adds exactly 0 and the other weights stay as they are. The
        drops are int32, summed over the axes that split the tokens.
        """
        shape = self.capacities.shape
        if experts_TK.size != shape.num_assignments:
            raise ValueError(f"{experts_TK.shape} assignments, not {shape.num_assignments}")
        if self.transport == "grouped":
            y_TR = apply_grouped(x_TR, weights_TK, experts_TK, valid_T, experts)
            drops = local_drops()
        else:
            ids = jnp.where(valid_T[:, None], experts_TK, shape.num_experts).reshape(-1)
            routed = Routed(x_TR, weights_TK, ids.astype(jnp.int32))
            local = Experts(experts, self.function)
            y_TR, drops = EXCHANGES[self.transport](routed, local, self.capacities)
        skipped = (~valid_T).sum(dtype=jnp.int32) * self.num_selected
        counts = jnp.stack([drops.sender, drops.receiver, skipped])
        counts = jax.lax.psum(jax.lax.stop_gradient(counts), COUNT_AXES)
        if jax.lax.axis_size(MODEL_AXIS) > 1:
            y_TR = jax.lax.psum(y_TR.astype(jnp.float32), MODEL_AXIS)
        return y_TR.astype(x_TR.dtype), Drops(*counts)


def make_exchange(
    settings: ParallelSettings,
    sizes: Mapping[str, int],
    *,
    num_experts: int,
    num_selected: int,
    tokens_per_shard: int,
    dtype: Any,
    dropless: bool = False,
) -> Exchange:
    """The exchange of a run: `settings` on a mesh of `sizes`, T tokens a device, their `dtype`.

    `auto` is `grouped` where every device holds all experts and no gate is set, else `ragged`.
    `dropless` takes the same mesh without gates, for held-out evaluation.

    Raises:
        UsageError: the settings do not fit the sizes; nothing has been compiled.
    """
    if dropless and settings.drops_rows:
        settings = ParallelSettings(num_chunks=settings.num_chunks)
    num_shards = sizes["expert"]
    shape = ExchangeShape(num_shards, num_experts, tokens_per_shard * num_selected)
    _check_total(shape, sizes)
    transport = settings.transport_on(num_shards)
    if transport == "grouped" and num_shards > 1:
        raise UsageError(
            f'parallel.transport = "grouped" needs all experts on every device, but '
            f"parallel.mesh.expert = {num_shards}",
            remedy='set parallel.transport = "auto" or parallel.mesh.expert = 1',
        )
    if transport == "pooled":
        return Exchange(transport, num_selected, _pooled(settings, shape, jnp.dtype(dtype).name))
    return Exchange(transport, num_selected, _gated(settings, shape))


def _check_total(shape: ExchangeShape, sizes: Mapping[str, int]) -> None:
    """Drops of a layer are summed in int32 over all devices that split the tokens."""
    total = shape.num_assignments
    for axis in COUNT_AXES:
        total *= sizes[axis]
    if total >= INT32_LIMIT:
        raise UsageError(
            f"{total} assignments of a layer do not fit the 32-bit counts of drops",
            remedy="use a smaller batch, or accumulate gradients over microbatches",
        )


def _gated(settings: ParallelSettings, shape: ExchangeShape) -> Capacities:
    """Row limits of a rule, refused where they would be below one row per expert."""
    factor = parse_capacity_factor(settings.capacity_factor)
    group = settings.group_size if settings.gate == "waterfill" else 1
    rule = RoutingRule(settings.gate, factor, settings.num_chunks, group, settings.order)
    rows, what = {
        "none": (Fraction(1), ""),
        "cell": (factor * shape.num_assignments / shape.num_experts, "a (sender, expert) pair"),
        "receiver": (factor * shape.num_assignments / shape.local_experts, "an expert"),
        "waterfill": (factor * shape.total_assignments / shape.num_experts, "an expert"),
    }[settings.gate]
    _check_rows("capacity_factor", factor, rows, what)
    return Capacities(shape, rule)


def _pooled(settings: ParallelSettings, shape: ExchangeShape, dtype: str) -> PooledCapacities:
    """Row limits of the pooled gate, and the check that its ids are exact in `dtype`."""
    send = parse_capacity_factor(settings.capacity_factor)
    receive = parse_capacity_factor(settings.receive_capacity_factor or settings.capacity_factor)
    capacities = PooledCapacities(shape, send, receive, settings.num_waves)
    if dtype not in EXACT_INTEGERS:
        raise UsageError(
            f'parallel.transport = "pooled" cannot carry ids in {dtype}',
            remedy=f"use activations of {', '.join(EXACT_INTEGERS)}",
        )
    capacities.check_codes(dtype)
    waves = settings.num_waves
    rows = send * shape.num_assignments / (shape.num_shards * waves)
    _check_rows("capacity_factor", send, rows, "a (sender, owner, wave)")
    rows = receive * shape.total_assignments / (shape.num_experts * waves)
    key = (
        "capacity_factor"
        if settings.receive_capacity_factor is None
        else ("receive_capacity_factor")
    )
    _check_rows(key, receive, rows, "an (expert, wave)")
    return capacities


def _check_rows(key: str, factor: Fraction, rows: Fraction, what: str) -> None:
    if rows < 1:
        least = math.ceil(1000 * factor / rows) / 1000
        raise UsageError(
            f'parallel.{key} = "{float(factor):g}" leaves {float(rows):.3g} rows to {what}, '
            "less than one",
            remedy=f"set parallel.{key} to at least {least:g}, or use more tokens a device",
        )
