"""Bytes that leave one device in one update, by mesh axis (parallel.md 8).

A ring moves (n - 1) / n of a gathered array, twice that for an all-reduce. Scalars and the counts
of metrics are left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from portolan.accounting import FLOAT32_BYTES
from portolan.parallel.layout import COUNT_AXES, MESH_AXES, STACK_AXES
from portolan.parallel.planner.exchange import DIRECTIONS, Exchange
from portolan.parallel.planner.mesh import Leaf, Load, MeshSizes
from portolan.shapes import ModelConfig, Remat

COUNTING = ("pooled", "ragged")
"""Transports whose shards first tell each other how many rows each expert gets."""


@dataclass(frozen=True)
class Flow:
    """Bytes of one device and update over `axes` (those longer than 1), in one direction.

    `in_update` ones belong to the program of the optimizer, the others to that of the gradient.
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: int
    in_update: bool = False


def gathered(num_bytes: int, num_devices: int) -> int:
    """Bytes that a device receives of a gathered array, or sends of a scattered one."""
    return num_bytes * (num_devices - 1) // num_devices


def _weight_flows(
    leaves: Iterable[Leaf], mesh: MeshSizes, value_bytes: int, num_micro_batches: int
) -> Iterator[Flow]:
    """Weights gathered in the compute type, those of a layer once more in the backward pass, those
    outside once an update; gradients scattered in float32."""
    for leaf in leaves:
        size = leaf.local_size(mesh)
        uses = 2 * num_micro_batches if leaf.in_layers else 1
        for axes in filter(None, leaf.gathered_axes):
            num_devices = mesh.size(*axes)
            size *= num_devices
            gradient = num_micro_batches * gathered(FLOAT32_BYTES * size, num_devices)
            yield Flow("weights", axes, uses * gathered(value_bytes * size, num_devices))
            yield Flow("gradients, scattered", axes, gradient)


def _gradient_flows(leaves: Iterable[Leaf], mesh: MeshSizes) -> Iterator[Flow]:
    """All-reduce of each gradient over the axes that do not split its leaf."""
    for leaf in leaves:
        axes = mesh.used(*(axis for axis in MESH_AXES if axis not in leaf.axes))
        name = "gradients" if leaf.part != "replicated" else "gradients of replicated leaves"
        size = FLOAT32_BYTES * leaf.local_size(mesh)
        yield Flow(name, axes, 2 * gathered(size, mesh.size(*axes)))


def _exchange_flows(
    config: ModelConfig, mesh: MeshSizes, load: Load, remat: Remat, exchange: Exchange
) -> Iterator[Flow]:
    """Rows to the experts and back, and what the backward pass always repeats: counts, and float32
    sums over the parts of an expert."""
    pairs, layers = DIRECTIONS[remat] // 2, config.num_layers
    rows = pairs * layers * (exchange.dispatch + exchange.give_back)
    yield Flow("expert rows", ("expert",), rows)
    if exchange.transport in COUNTING:
        counts = (mesh.expert - 1) * config.num_experts * FLOAT32_BYTES
        yield Flow("expert counts", ("expert",), 2 * layers * counts)
    summed = 2 * gathered(FLOAT32_BYTES * load.tokens * config.latent_width, mesh.model)
    yield Flow("parts of an expert", ("model",), 3 * layers * summed)


def _context_flows(
    config: ModelConfig, mesh: MeshSizes, load: Load, value_bytes: int
) -> Iterator[Flow]:
    """Keys and values of whole rows, and the left neighbours of the convolutions: forward,
    repeated by the backward pass, and transposed."""
    passes = 3
    channels = 2 * config.num_kv_heads * config.head_dim * value_bytes
    keys = (mesh.context - 1) * load.tokens * channels
    yield Flow("keys and values", ("context",), passes * config.num_layers * keys)
    kv_width = config.num_kv_heads * config.head_dim
    widths = {"k": kv_width, "v": kv_width, "attn": config.width, "mlp": config.width}
    halo = load.rows * (config.conv_taps - 1) * sum(widths[site] for site in config.conv_sites)
    yield Flow(
        "convolution halos", ("context",), passes * config.num_conv_layers * halo * value_bytes
    )


def _balance_flows(config: ModelConfig, mesh: MeshSizes) -> Iterator[Flow]:
    """The histograms of quantile balancing, added over all tokens."""
    if config.balance == "qb_hist":
        histogram = FLOAT32_BYTES * config.num_experts * config.qb_bins
        axes = mesh.used(*COUNT_AXES)
        moved = 2 * gathered(histogram, mesh.size(*axes))
        yield Flow("balance histograms", axes, config.num_layers * moved)


def _optimizer_flows(leaves: Iterable[Leaf], mesh: MeshSizes) -> Iterator[Flow]:
    """Parts of split matrices exchanged for whole ones of a few layers, for Newton-Schulz."""
    for leaf in leaves:
        if leaf.group == "muonh" and len(leaf.shape) > 2:
            whole = _whole_experts if leaf.part == "experts" else _whole_stack
            for axes, num_bytes in whole(leaf, mesh):
                yield Flow("whole matrices for Newton-Schulz", axes, num_bytes, in_update=True)


def _whole_experts(leaf: Leaf, mesh: MeshSizes) -> Iterator[tuple[tuple[str, ...], int]]:
    """Experts stay where they are; what else splits them is gathered."""
    axes = tuple(axis for axis in leaf.axes if axis != "expert")
    num_devices = mesh.size(*axes)
    yield axes, gathered(FLOAT32_BYTES * leaf.local_size(mesh) * num_devices, num_devices)


def _whole_stack(leaf: Leaf, mesh: MeshSizes) -> Iterator[tuple[tuple[str, ...], int]]:
    """A stack [L, a, b], padded to a multiple of the devices: of its split dimensions the one on
    more devices travels in an all-to-all and back, the other is gathered; axes that split neither
    share the layers and gather the result."""
    row_axes, column_axes = leaf.split[-2:]
    swapped = mesh.size(*column_axes) > mesh.size(*row_axes)
    moved, beside = (column_axes, row_axes) if swapped else (row_axes, column_axes)
    rest = tuple(axis for axis in STACK_AXES if axis not in moved)
    parts, num_layers = mesh.size(*STACK_AXES), leaf.shape[0]
    padded = -(-num_layers // parts) * parts
    size = FLOAT32_BYTES * leaf.local_size(mesh) // num_layers * padded * mesh.size(*beside)
    yield beside, gathered(size, mesh.size(*beside))
    yield moved, 2 * gathered(size, mesh.size(*moved))
    yield rest, gathered(size, mesh.size(*rest))


def list_flows(
    config: ModelConfig,
    leaves: Iterable[Leaf],
    mesh: MeshSizes,
    load: Load,
    remat: Remat,
    exchange: Exchange | None,
    *,
    value_bytes: int,
) -> tuple[Flow, ...]:
    """Everything that leaves a device in one update, by name and axes; nothing that is 0."""
    leaves = tuple(leaves)
    flows = [
        *_gradient_flows(leaves, mesh),
        *_context_flows(config, mesh, load, value_bytes),
        *_balance_flows(config, mesh),
    ]
    if exchange is not None:
        flows += _exchange_flows(config, mesh, load, remat, exchange)
    times = load.num_micro_batches
    flows = [replace(flow, num_bytes=times * flow.num_bytes) for flow in flows]
    flows += _weight_flows(leaves, mesh, value_bytes, times)
    flows += _optimizer_flows(leaves, mesh)
    totals: dict[tuple[str, tuple[str, ...], bool], int] = {}
    for flow in flows:
        axes = mesh.used(*flow.axes)
        ordered = tuple(axis for axis in MESH_AXES if axis in axes)
        if ordered and flow.num_bytes:
            key = (flow.name, ordered, flow.in_update)
            totals[key] = totals.get(key, 0) + flow.num_bytes
    return tuple(
        Flow(name, axes, total, in_update) for (name, axes, in_update), total in totals.items()
    )
