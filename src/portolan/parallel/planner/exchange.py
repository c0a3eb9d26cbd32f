"""Buffers and bytes on the wire of every expert exchange (parallel.md 8)."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from portolan.accounting import FLOAT32_BYTES
from portolan.errors import UsageError
from portolan.parallel.capacity import (
    Capacities,
    ExchangeShape,
    PooledCapacities,
    RoutingRule,
    ceil_div,
    choose_block_rows,
    parse_capacity_factor,
)
from portolan.parallel.planner.mesh import Load, MeshSizes
from portolan.parallel_settings import ParallelSettings
from portolan.shapes import ModelConfig, Remat

FIXED_SHAPE = ("cell", "pooled")
"""Transports whose experts compute every row of their buffers, empty ones too."""


@dataclass(frozen=True)
class Wire:
    """Sizes of one layer's exchange on one device: H, I (the part of one `model` shard), K and the
    bytes of an activation."""

    shape: ExchangeShape
    width: int
    inner: int
    experts_per_token: int
    value_bytes: int

    @property
    def to_peers(self) -> Fraction:
        """f = (S - 1) / S, the share of evenly spread rows that leaves a device."""
        return Fraction(self.shape.num_shards - 1, self.shape.num_shards)

    def touched(self, computed: int) -> int:
        """Bytes of the rows sent and returned and of what the experts read and write for them."""
        moved = self.rows(2 * self.shape.num_assignments, self.width)
        return moved + self.rows(computed, 2 * self.width + 3 * self.inner)

    def rows(self, count: int, width: int) -> int:
        """Bytes of `count` rows of `width` activations."""
        return count * width * self.value_bytes


@dataclass(frozen=True)
class Exchange:
    """One layer's exchange: buffers in bytes by name (of one chunk or wave), bytes that leave a
    device in one direction, and what the backward pass holds beside them.

    `dispatch` and `give_back` count all chunks or waves. `rows_computed` is how many rows the
    experts of one device compute; `touched` the bytes of all that the exchange fills, once;
    `kept` those of the rows that arrived and came back, which saving them holds to the end.
    """

    transport: str
    buffers: tuple[tuple[str, int], ...]
    dispatch: int
    give_back: int
    backward: int
    rows_computed: int
    touched: int
    kept: int = 0

    @property
    def buffer_bytes(self) -> int:
        """All forward buffers together."""
        return sum(size for _, size in self.buffers)


def grouped(wire: Wire) -> Exchange:
    """All experts on one device: rows are sorted into blocks of one expert, nothing travels."""
    assignments, local = wire.shape.num_assignments, wire.shape.local_experts
    padded = assignments + local * (choose_block_rows(assignments, local) - 1)
    return Exchange(
        "grouped",
        (
            ("X", wire.rows(padded, wire.width)),
            ("out", wire.rows(padded, wire.width)),
            ("h13", wire.rows(assignments, 2 * wire.inner)),
            ("act", wire.rows(assignments, wire.inner)),
        ),
        dispatch=0,
        give_back=0,
        backward=wire.rows(assignments, wire.width + 2 * wire.inner),
        rows_computed=padded,
        touched=wire.touched(padded),
    )


def ring(wire: Wire, capacity_factor: Fraction) -> Exchange:
    """Every token gathered by every shard; the sums return in float32."""
    shards, assignments = wire.shape.num_shards, wire.shape.num_assignments
    tokens = shards * assignments // wire.experts_per_token
    exact = capacity_factor * assignments
    rows = ceil_div(exact.numerator, exact.denominator)
    away = tokens - tokens // shards
    return Exchange(
        "ring",
        (
            ("gathered", wire.rows(tokens, wire.width)),
            ("y float32", FLOAT32_BYTES * tokens * wire.width),
            ("recv", wire.rows(rows, wire.width)),
            ("h13", wire.rows(rows, 2 * wire.inner)),
            ("out", wire.rows(rows, wire.width)),
        ),
        dispatch=wire.rows(away, wire.width),
        give_back=FLOAT32_BYTES * away * wire.width,
        backward=wire.rows(rows, wire.width + 2 * wire.inner),
        rows_computed=rows,
        touched=wire.touched(rows),
    )


def cell(wire: Wire, capacities: Capacities) -> Exchange:
    """A fixed number of rows for every (sender, expert)."""
    rows = wire.shape.num_experts * capacities.cell.physical
    moved = wire.rows(rows, wire.width)
    return Exchange(
        "cell",
        (
            *((name, moved) for name in ("send", "recv", "out", "back")),
            ("h13", wire.rows(rows, 2 * wire.inner)),
            ("act", wire.rows(rows, wire.inner)),
        ),
        dispatch=int(moved * wire.to_peers),
        give_back=int(moved * wire.to_peers),
        backward=wire.rows(rows, wire.width + 2 * wire.inner),
        rows_computed=rows,
        touched=wire.touched(rows),
        kept=2 * moved,
    )


def cell_with_float32_gradients(wire: Wire, capacities: Capacities) -> tuple[tuple[str, int], ...]:
    """Buffers of the public fixed-cell code: rows gathered for the combination, whose gradients
    are float32 (the 20.5 GiB of parallel.md 8)."""
    rows = wire.shape.num_experts * capacities.cell.physical
    assignments = wire.shape.num_assignments
    moved = wire.rows(rows, wire.width)
    return (
        *((name, moved) for name in ("send", "recv", "out")),
        ("h13", wire.rows(rows, 2 * wire.inner)),
        ("gathered", wire.rows(assignments, wire.width)),
        ("gradient rows float32", FLOAT32_BYTES * assignments * wire.width),
    )


def pooled(wire: Wire, capacities: PooledCapacities) -> Exchange:
    """One wave at a time: the rows of a (sender, owner) behind their ids, compacted on arrival."""
    shards, waves = wire.shape.num_shards, capacities.num_waves
    sent = shards * capacities.send.physical
    payload = sent + shards * capacities.header_rows(wire.width)
    compact = wire.shape.local_experts * capacities.receive.physical
    sizes = {"send": payload, "recv": payload, "compact": compact, "out": compact}
    return Exchange(
        "pooled",
        (
            *((name, wire.rows(rows, wire.width)) for name, rows in sizes.items()),
            ("h13", wire.rows(compact, 2 * wire.inner)),
            ("act", wire.rows(compact, wire.inner)),
            *((name, wire.rows(sent, wire.width)) for name in ("ret", "back")),
        ),
        dispatch=int(waves * wire.rows(payload, wire.width) * wire.to_peers),
        give_back=int(waves * wire.rows(sent, wire.width) * wire.to_peers),
        backward=wire.rows(compact, wire.width + 2 * wire.inner),
        rows_computed=waves * compact,
        touched=wire.touched(waves * compact),
        kept=waves * wire.rows(payload + sent, wire.width),
    )


def ragged(wire: Wire, capacities: Capacities, *, emulated: bool = False) -> Exchange:
    """Exactly the accepted rows, into one buffer a chunk; without drops every row leaves.

    Emulated on a CPU, blocks that hold whatever a peer may get travel instead.
    """
    shards, assignments = wire.shape.num_shards, wire.shape.num_assignments
    buffer = capacities.chunk_buffer
    computed = min(capacities.rule.num_chunks * buffer, assignments)
    dispatch = give_back = int(wire.rows(assignments, wire.width) * wire.to_peers)
    copies: tuple[tuple[str, int], ...] = ()
    if emulated:
        block = min(assignments, buffer)
        per_chunk = wire.rows((shards - 1) * block, wire.width)
        dispatch = give_back = capacities.rule.num_chunks * per_chunk
        copies = (("blocks", wire.rows(2 * shards * block, wire.width)),)
    return Exchange(
        "ragged",
        (
            *((name, wire.rows(assignments, wire.width)) for name in ("X", "ret")),
            *((name, wire.rows(buffer, wire.width)) for name in ("recv", "out")),
            ("h13", wire.rows(buffer, 2 * wire.inner)),
            ("act", wire.rows(buffer, wire.inner)),
            *copies,
        ),
        dispatch=dispatch,
        give_back=give_back,
        backward=wire.rows(2 * assignments, wire.width) + wire.rows(buffer, 2 * wire.inner),
        rows_computed=computed,
        touched=wire.touched(computed),
        kept=wire.rows(capacities.rule.num_chunks * buffer + assignments, wire.width),
    )


@dataclass(frozen=True)
class Routing:
    """Sizes of the exchange of a recipe on a mesh, and the limits of its rule."""

    wire: Wire
    rule: RoutingRule
    receive_factor: Fraction
    num_waves: int

    @property
    def capacities(self) -> Capacities:
        """Limits of the gates."""
        return Capacities(self.wire.shape, self.rule)

    @property
    def pooled_capacities(self) -> PooledCapacities:
        """Limits of the pooled gates."""
        return PooledCapacities(
            self.wire.shape, self.rule.capacity_factor, self.receive_factor, self.num_waves
        )


def describe_routing(
    settings: ParallelSettings, config: ModelConfig, mesh: MeshSizes, load: Load, value_bytes: int
) -> Routing:
    """The exchange that the table [parallel] makes of a shape.

    Raises:
        UsageError: the experts do not divide, or a setting does not fit them.
    """
    shape = ExchangeShape(mesh.expert, config.num_experts, load.tokens * config.experts_per_token)
    factor = parse_capacity_factor(settings.capacity_factor)
    rule = RoutingRule(
        settings.gate, factor, settings.num_chunks, settings.group_size, settings.order
    )
    if config.expert_width % mesh.model:
        raise UsageError(
            f"{config.expert_width} columns of an expert do not divide over {mesh.model} devices "
            "of model",
            remedy="set parallel.mesh.model to a size that divides them",
        )
    inner = config.expert_width // mesh.model
    received = settings.receive_capacity_factor
    return Routing(
        Wire(shape, config.latent_width, inner, config.experts_per_token, value_bytes),
        rule,
        factor if received is None else parse_capacity_factor(received),
        settings.num_waves,
    )


def plan_exchange(routing: Routing, transport: str, *, on_cpu: bool = False) -> Exchange:
    """The exchange of a transport.

    Raises:
        UsageError: the transport is unknown, or needs all experts on every device.
    """
    wire = routing.wire
    plans: dict[str, Callable[[], Exchange]] = {
        "grouped": lambda: grouped(wire),
        "ring": lambda: ring(wire, routing.rule.capacity_factor),
        "cell": lambda: cell(wire, routing.capacities),
        "pooled": lambda: pooled(wire, routing.pooled_capacities),
        "ragged": lambda: ragged(wire, routing.capacities, emulated=on_cpu),
    }
    if transport == "grouped" and wire.shape.num_shards > 1:
        raise UsageError(
            f"transport 'grouped' needs all experts on a device; the expert axis has "
            f"{wire.shape.num_shards}",
            remedy="use transport 'ragged', or an expert axis of 1",
        )
    if transport == "pooled":
        dtype = "bfloat16" if wire.value_bytes == 2 else "float32"
        routing.pooled_capacities.check_codes(dtype)
    return plans[transport]()


DIRECTIONS: dict[Remat, int] = {"none": 4, "experts": 6, "layer": 6}
"""Exchanges of rows per layer and update: 2 forward, 2 transposed, and 2 repeated by the backward
pass where the forward pass does not keep the arrived and the returned rows."""


def num_waves(routing: Routing) -> int:
    """The recipe's waves, else the most up to 3 that divide the local experts."""
    local = routing.wire.shape.local_experts
    fitting = next(waves for waves in (3, 2, 1) if local % waves == 0)
    return routing.num_waves if routing.num_waves > 1 else fitting
