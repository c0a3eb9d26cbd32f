"""The least time that an update can take on a machine: arithmetic, memory and links.

Each of the four is a lower bound. `bound` takes their largest, as if all overlapped perfectly;
`serial` their sum, as if nothing did. A real update lies above the first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from portolan import accounting
from portolan.accounting import FLOAT32_BYTES, TRAINING_OVER_FORWARD
from portolan.parallel.layout import STACK_AXES
from portolan.parallel.planner.exchange import FIXED_SHAPE, Exchange
from portolan.parallel.planner.machines import Machine
from portolan.parallel.planner.memory import ACTIVATIONS_OVER_WIDTH, share_of_state
from portolan.parallel.planner.mesh import Leaf, Load, MeshSizes
from portolan.parallel.planner.traffic import Flow
from portolan.shapes import ModelConfig, Remat


@dataclass(frozen=True)
class DeviceFlops:
    """FLOPs of one device and update, published convention.

    `model` is what utilisation credits it with; `recomputed` what the backward pass does again,
    `padding` rows that fixed buffers compute for nothing, `repeated` what the shards of `model`
    all do, `optimizer` the Newton-Schulz products, which every replica repeats.
    """

    model: int
    recomputed: int
    padding: int
    repeated: int
    optimizer: int

    @property
    def total(self) -> int:
        """All that the device computes."""
        return self.model + self.recomputed + self.padding + self.repeated + self.optimizer


def newton_schulz_flops(leaves: Iterable[Leaf], mesh: MeshSizes) -> int:
    """FLOPs of one device: its experts, its share of the stacks, and every single matrix."""
    total = 0
    for leaf in leaves:
        if leaf.group != "muonh":
            continue
        rows, columns = sorted(leaf.shape[-2:])
        stack = leaf.size // (rows * columns)
        if leaf.part == "experts":
            stack //= mesh.size("expert")
        elif len(leaf.shape) > 2:
            stack = -(-stack // mesh.size(*STACK_AXES))
        total += stack * accounting.newton_schulz_flops(rows, columns)
    return total


def count_flops(
    config: ModelConfig,
    leaves: Iterable[Leaf],
    mesh: MeshSizes,
    load: Load,
    remat: Remat,
    exchange: Exchange | None,
) -> DeviceFlops:
    """FLOPs of one device; dropped rows are counted as computed."""
    tokens = load.tokens_of_update
    forward = int(accounting.forward_flops_per_token(config)) * tokens
    routed = accounting.routed_flops_per_token(config) * tokens
    again = {"none": 0, "experts": routed, "layer": forward}[remat]
    if remat == "layer":
        again -= 2 * config.width * config.vocab_size * tokens
    passes = TRAINING_OVER_FORWARD + (remat != "none")
    padding = 0
    if exchange is not None and exchange.transport in FIXED_SHAPE:
        assignments = load.tokens * config.experts_per_token
        extra = max(0, exchange.rows_computed - assignments)
        padding = passes * routed * extra // assignments // mesh.model
    # Only the experts are split over `model`; the rest of a layer is computed by each shard.
    shared = (mesh.model - 1) * (passes * forward - passes * routed) // mesh.model
    return DeviceFlops(
        model=TRAINING_OVER_FORWARD * forward // mesh.model,
        recomputed=again // mesh.model,
        padding=padding,
        repeated=shared,
        optimizer=newton_schulz_flops(leaves, mesh),
    )


def memory_traffic(
    config: ModelConfig,
    leaves: Iterable[Leaf],
    mesh: MeshSizes,
    load: Load,
    remat: Remat,
    exchange: Exchange | None,
    *,
    value_bytes: int,
) -> int:
    """Bytes that one device reads and writes in its own memory, each array once a pass."""
    leaves = tuple(leaves)
    shares = share_of_state(leaves, mesh)
    parameters = sum(share.parameters for share in shares)
    moments = sum(share.moments for share in shares)
    update = FLOAT32_BYTES * (3 * parameters + 2 * moments)
    repeats = load.num_micro_batches
    passes = TRAINING_OVER_FORWARD + (remat != "none")
    weights = sum(leaf.gathered_size(mesh) for leaf in leaves)
    gradients = 2 * FLOAT32_BYTES * parameters
    saved = accounting.saved_bytes_per_token(config, remat, value_bytes) * load.tokens
    layer = ACTIVATIONS_OVER_WIDTH * config.width * value_bytes * load.tokens
    layer += exchange.touched if exchange else 0
    per_layer = 2 * saved + 2 * passes * layer
    micro = gradients + passes * value_bytes * weights + config.num_layers * per_layer
    return round(update + repeats * micro)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update by what limits it."""

    compute: float
    memory: float
    fast_links: float
    slow_links: float

    @property
    def bound(self) -> float:
        """Everything overlaps: no update is faster."""
        return max(self.compute, self.memory, self.fast_links, self.slow_links)

    @property
    def serial(self) -> float:
        """Nothing overlaps."""
        return self.compute + self.memory + self.fast_links + self.slow_links

    @property
    def limit(self) -> str:
        """What the bound comes from."""
        values = {
            "compute": self.compute,
            "memory": self.memory,
            "fast links": self.fast_links,
            "slow links": self.slow_links,
        }
        return max(values, key=lambda name: values[name])


def time_step(
    machine: Machine, mesh: MeshSizes, flops: DeviceFlops, traffic: int, flows: Iterable[Flow]
) -> StepTime:
    """Seconds of one update on a machine at its peak rates."""
    slow = set(machine.slow_axes(mesh))
    fast_seconds = slow_seconds = 0.0
    for flow in flows:
        seconds = flow.num_bytes / machine.bandwidth(flow.axes, mesh)
        if slow & set(flow.axes):
            slow_seconds += seconds
        else:
            fast_seconds += seconds
    return StepTime(
        compute=flops.total / machine.peak_flops_per_second,
        memory=traffic / machine.memory_bytes_per_second,
        fast_links=fast_seconds,
        slow_links=slow_seconds,
    )
