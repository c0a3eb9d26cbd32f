"""One process with eight host devices: sizes, drops and times of every transport, as JSON.

Called by `transports.py` with a JSON request: tokens of a device, rounds, and skews by name.
"""

import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from portolan.model.tree import GatedMlp
from portolan.parallel.capacity import Capacities, PooledCapacities, RoutingRule
from portolan.parallel.exchange import Exchange, make_exchange
from portolan.parallel.layout import COUNT_AXES, MESH_AXES
from portolan.parallel.mesh import build_mesh
from portolan.parallel.planner.exchange import Routing, Wire, plan_exchange
from portolan.parallel.routing import count_assignments, plan
from portolan.parallel_settings import ParallelSettings

NUM_DEVICES, NUM_EXPERTS, NUM_SELECTED, WIDTH, INNER = 8, 64, 4, 128, 128
CAPACITY_FACTOR = "1.15"
TOKENS, EXPERTS = P(("replica", "data", "context", "expert")), P("expert")
FIXED = {"capacity_factor": CAPACITY_FACTOR}
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped": {"transport": "grouped"},
    "ring": {"transport": "ring"},
    "cell": {"transport": "cell", "gate": "cell"} | FIXED,
    "pooled, 2 waves": {"transport": "pooled", "num_waves": 2} | FIXED,
    "ragged, none": {"transport": "ragged"},
    "ragged, receiver": {"transport": "ragged", "gate": "receiver"} | FIXED,
    "ragged, receiver, 2 chunks": {"transport": "ragged", "gate": "receiver", "num_chunks": 2}
    | FIXED,
    "ragged, waterfill": {"transport": "ragged", "gate": "waterfill", "group_size": 8} | FIXED,
}


@dataclass(frozen=True)
class Contender:
    """A compiled transport: its exchange, program, and the bytes of its temporaries."""

    exchange: Exchange
    program: Any
    arguments: tuple[Any, ...]
    temporary_bytes: int


def choose_experts(skew: tuple[float, float], tokens: int, seed: int) -> np.ndarray:
    """int32[S, T, K]: the K largest of log popularity, of the device too, plus Gumbel noise."""
    rng = np.random.default_rng(seed)
    liking = skew[0] * rng.standard_normal(NUM_EXPERTS)
    liking = liking + skew[1] * rng.standard_normal((NUM_DEVICES, 1, NUM_EXPERTS))
    scores = liking + rng.gumbel(size=(NUM_DEVICES, tokens, NUM_EXPERTS))
    return np.argsort(-scores, axis=2)[..., :NUM_SELECTED].astype(np.int32)


def make_contender(settings: dict[str, Any], ids: np.ndarray) -> Contender:
    """The gradient of sum(y^2) with the drops, compiled for eight devices."""
    transport = settings["transport"]
    sizes = dict.fromkeys(MESH_AXES, 1)
    sizes["data" if transport == "grouped" else "expert"] = NUM_DEVICES
    exchange = make_exchange(
        ParallelSettings(**settings),
        sizes,
        num_experts=NUM_EXPERTS,
        num_selected=NUM_SELECTED,
        tokens_per_shard=ids.shape[1],
        dtype=jnp.float32,
    )
    mesh = build_mesh(sizes)

    def shard(x, weights, experts, ids, valid):
        y, drops = exchange(x, weights, ids, valid, experts)
        return jax.lax.psum(jnp.sum(y**2), COUNT_AXES), jnp.stack(drops)

    specs = (TOKENS, TOKENS, EXPERTS, TOKENS, TOKENS)
    loss = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
    arguments = place(make_arguments(ids), specs, mesh)
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    compiled = program.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    return Contender(exchange, compiled, arguments, memory.temp_size_in_bytes)


def make_arguments(ids: np.ndarray) -> tuple[Any, ...]:
    """x, weights, experts, ids and valid of all devices."""
    rng = np.random.default_rng(0)
    tokens = NUM_DEVICES * ids.shape[1]
    matrix = (NUM_EXPERTS, WIDTH, INNER)
    shapes = (matrix, matrix, (NUM_EXPERTS, INNER, WIDTH))
    leaves = [rng.standard_normal(s).astype(np.float32) / math.sqrt(WIDTH) for s in shapes]
    x = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    weights = np.full((tokens, NUM_SELECTED), 1 / NUM_SELECTED, np.float32)
    return x, weights, GatedMlp(*leaves), ids.reshape(tokens, -1), np.ones(tokens, bool)


def place(arguments: tuple[Any, ...], specs: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """Arguments on their devices."""
    return tuple(
        jax.tree.map(lambda leaf, spec=spec: jax.device_put(leaf, NamedSharding(mesh, spec)), value)
        for value, spec in zip(arguments, specs, strict=True)
    )


def rows_sent(exchange: Exchange, ids: np.ndarray) -> float:
    """Rows that a device sends to its peers on the way to the experts, mean over devices."""
    capacities = exchange.capacities
    shape = capacities.shape
    peers = NUM_DEVICES - 1
    if exchange.transport == "grouped":
        return 0.0
    if exchange.transport == "ring":
        return float(peers * ids.shape[1])
    if isinstance(capacities, PooledCapacities):
        rows = capacities.send.physical + capacities.header_rows(WIDTH)
        return float(peers * capacities.num_waves * rows)
    if exchange.transport == "cell":
        return float(peers * shape.local_experts * capacities.cell.physical)
    counts = np.stack([count_assignments(row.reshape(-1), NUM_EXPERTS) for row in ids])
    accepted = plan(counts, capacities).accepted
    blocks = accepted.reshape(NUM_DEVICES, NUM_DEVICES, -1).sum(axis=2)
    return float((blocks.sum() - np.trace(blocks)) / NUM_DEVICES)


def buffer_bytes(exchange: Exchange) -> int:
    """Forward buffers of a device by the planner's formulas, without the emulation's copies.

    The ring here is the plain one: every token of the group through one expert at a time.
    """
    capacities = exchange.capacities
    if exchange.transport == "ring":
        tokens = capacities.shape.total_assignments // NUM_SELECTED
        return 4 * tokens * (3 * WIDTH + 3 * INNER)
    wire = Wire(capacities.shape, WIDTH, INNER, NUM_SELECTED, 4)
    factor = Fraction(CAPACITY_FACTOR)
    rule = capacities.rule if isinstance(capacities, Capacities) else RoutingRule("none", factor)
    waves = capacities.num_waves if isinstance(capacities, PooledCapacities) else 1
    return plan_exchange(Routing(wire, rule, factor, waves), exchange.transport).buffer_bytes


def time_alternately(contenders: dict[str, Contender], rounds: int) -> dict[str, float]:
    """Median processor time of all devices in ms, in turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, one in contenders.items():
            start = time.process_time()
            jax.block_until_ready(one.program(*one.arguments))
            if index:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(request: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for every skew and transport; times are those of the first skew."""
    tokens, skews = request["tokens"], request["skews"]
    chosen = {
        name: choose_experts(tuple(skew), tokens, seed)
        for seed, (name, skew) in enumerate(skews.items())
    }
    first = next(iter(chosen.values()))
    contenders = {name: make_contender(settings, first) for name, settings in SETTINGS.items()}
    times = time_alternately(contenders, request["rounds"])
    entries = []
    for skew, ids in chosen.items():
        for name, one in contenders.items():
            arguments = list(one.arguments)
            arguments[3] = jax.device_put(ids.reshape(-1, NUM_SELECTED), arguments[3].sharding)
            (_, drops), _ = one.program(*arguments)
            sender, receiver, _ = map(int, drops)
            entries.append(
                {
                    "name": name,
                    "skew": skew,
                    "rows_sent": rows_sent(one.exchange, ids),
                    "dropped": (sender + receiver) / ids.size,
                    "buffer_bytes": buffer_bytes(one.exchange),
                    "temporary_bytes": one.temporary_bytes,
                    "milliseconds": times[name],
                }
            )
    return entries


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
