"""The public 535B-A23B run beside this plan: what was computed or measured there, and why ours
differs.

Sources are issues of github.com/marin-community/marin. "Computed" figures are arithmetic on the
public shape (parallel.md 8 and 9), not measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from portolan import accounting
from portolan.accounting import FLOAT32_BYTES
from portolan.parallel.planner import exchange as exchanges
from portolan.parallel.planner.estimate import ParallelPlan
from portolan.parallel.planner.exchange import DIRECTIONS, Routing
from portolan.parallel.planner.machines import GIB
from portolan.parallel.planner.memory import share_of_state

GB = 1e9
PUBLIC_MESH = {"replica": 11, "data": 1, "context": 1, "expert": 64, "model": 1}
PUBLIC_SHAPE = {
    "width": 6144,
    "num_layers": 48,
    "num_experts": 384,
    "experts_per_token": 8,
    "latent_width": 3072,
    "expert_width": 3072,
    "sequence_length": 4096,
}
PUBLIC_BATCH = 11_264


@dataclass(frozen=True)
class Comparison:
    """One figure of this plan beside the public one, in `unit`."""

    quantity: str
    plan: float
    public: float
    unit: str
    kind: str
    explanation: str


def is_public_run(plan: ParallelPlan) -> bool:
    """Whether shape, batch and mesh are those of the public run."""
    shape = all(getattr(plan.config, name) == value for name, value in PUBLIC_SHAPE.items())
    return shape and plan.mesh.as_dict() == PUBLIC_MESH and plan.batch_sequences == PUBLIC_BATCH


def public_routing(plan: ParallelPlan) -> Routing:
    """The exchange of the live run: receiver gate, 2 chunks, 3 waves for the pooled one, 1.15."""
    routing = plan.routing(plan.kernels("cuda"))
    assert routing is not None
    factor = Fraction("1.15")
    rule = replace(
        routing.rule, gate="receiver", capacity_factor=factor, num_chunks=2, group_size=1
    )
    return replace(routing, rule=rule, receive_factor=factor, num_waves=3)


def compare(plan: ParallelPlan) -> tuple[Comparison, ...]:
    """All comparisons of the public run."""
    return (
        *_buffers(plan),
        *_wire(plan),
        *_state(plan),
        *_peaks(plan),
        *_utilisation(plan),
    )


def _buffers(plan: ParallelPlan) -> Iterator[Comparison]:
    routing = public_routing(plan)
    figures = {"ragged": 14.63, "pooled": 10.35, "cell": 24.16, "ring": 85.8}
    units = {
        "ragged": "of a chunk",
        "pooled": "of a wave",
        "cell": "of a layer",
        "ring": "of a layer",
    }
    for transport, public in figures.items():
        found = exchanges.plan_exchange(routing, transport).buffer_bytes / GIB
        yield Comparison(
            f"{transport} buffers {units[transport]}", found, public, "GiB", "computed", "same"
        )
    one_chunk = replace(routing, rule=replace(routing.rule, num_chunks=1))
    found = exchanges.plan_exchange(one_chunk, "ragged").buffer_bytes / GIB
    yield Comparison("ragged buffers, one chunk", found, 23.25, "GiB", "computed", "same")
    older = replace(
        routing.wire,
        shape=replace(routing.wire.shape, num_assignments=4 * plan.load.tokens),
        width=6144,
        inner=2560,
        experts_per_token=4,
    )
    rule = replace(routing.rule, gate="cell", capacity_factor=Fraction(1), num_chunks=1)
    cell = exchanges.cell_with_float32_gradients(
        older, replace(routing, wire=older, rule=rule).capacities
    )
    found = sum(size for _, size in cell) / GIB
    yield Comparison(
        "cell, top-4 at full width", found, 20.5, "GiB", "computed", "same; an earlier shape"
    )


def _wire(plan: ParallelPlan) -> Iterator[Comparison]:
    routing = public_routing(plan)
    plans = {
        name: exchanges.plan_exchange(routing, name)
        for name in ("ragged", "pooled", "cell", "ring")
    }
    pooled, ring = plans["pooled"], plans["ring"]
    for name, moved, public in (
        ("ragged, one way, a layer", plans["ragged"].dispatch, 3.171),
        ("pooled, to the experts", pooled.dispatch, 3.650),
        ("pooled, back", pooled.give_back, 3.647),
        ("cell, one way", plans["cell"].dispatch, 3.649),
        ("ring, gathered", ring.dispatch, 25.4),
        ("ring, summed", ring.give_back, 50.7),
    ):
        yield Comparison(name, moved / GB, public, "GB", "computed", "same")
    pairs = DIRECTIONS[plan.recipe.train.remat] // 2
    ragged = plans["ragged"]
    total = plan.config.num_layers * pairs * (ragged.dispatch + ragged.give_back)
    explanation = "same; drops below 0.02 % are not subtracted"
    yield Comparison("expert rows of an update", total / GB, 913, "GB", "computed", explanation)
    synced = sum(
        flow.num_bytes for flow in plan.flows(plan.kernels("cuda")) if flow.name == "gradients"
    )
    explanation = "ring, float32; its type is not public"
    yield Comparison("gradients between replicas", synced / GB, 60.7, "GB", "computed", explanation)


def _state(plan: ParallelPlan) -> Iterator[Comparison]:
    shares = {share.part: share for share in share_of_state(plan.leaves, plan.mesh)}
    total = sum(share.parameters for share in shares.values())
    for name, entries, public in (
        ("parameters, experts", shares["experts"].parameters, 30.38),
        ("parameters, split matrices", shares["matrices"].parameters, 0.73),
        ("parameters, all", total, 35.10),
        ("momentum of the experts", shares["experts"].moments, 30.4),
    ):
        size = FLOAT32_BYTES * entries / GIB
        yield Comparison(name, size, public, "GiB", "computed", "same, float32")
    carries = plan.memory("device", plan.kernels("cuda")).work.saved_activations
    yield Comparison("inputs of all layers", carries / GIB, 36.0, "GiB", "computed", "same")


def _peaks(plan: ParallelPlan) -> Iterator[Comparison]:
    routing, kernels = public_routing(plan), plan.kernels("cuda")
    plans = {name: exchanges.plan_exchange(routing, name) for name in ("pooled", "ragged")}
    ragged = plan.memory("device", kernels, plans["ragged"])
    work = ragged.work
    copied = ragged.parameters // 2
    parts = ragged.resident + copied + work.saved_activations + work.exchange_forward
    measured = "measured"
    yield Comparison(
        "peak, ragged, known parts",
        parts / GIB,
        137.9,
        "GiB",
        measured,
        "counts what the public program is known to hold: a bfloat16 copy of all weights, no "
        "gradients of buffers",
    )
    yield Comparison(
        "peak, ragged, this planner",
        ragged.peak / GIB,
        137.9,
        "GiB",
        measured,
        "one layer of weights is cast at a time (-16), but a layer's activations and the gradients "
        "of its buffers count (+25); the compiler overlaps some of them",
    )
    offloaded = replace(ragged, work=replace(work, saved_activations=0)).peak / GIB
    yield Comparison(
        "peak, ragged, carries on host",
        offloaded,
        116.5,
        "GiB",
        measured,
        "as above; here with train.offload_carries",
    )
    pooled = plan.memory("host_master", kernels, plans["pooled"])
    yield Comparison(
        "peak, pooled, host master",
        pooled.peak / GIB,
        149.9,
        "GiB",
        measured,
        f"leaf by leaf here; master and momentum moved in whole would add up to "
        f"{pooled.host / GIB:.1f}; the public breakdown is not known",
    )


def _utilisation(plan: ParallelPlan) -> Iterator[Comparison]:
    config = plan.config
    flops = float(accounting.training_flops(config, 1))
    yield Comparison(
        "training FLOPs of a token", flops / 1e9, 149.736, "GFLOP", "published", "same"
    )
    for name, tokens_per_second, devices, public, explanation in (
        ("MFU, 237,310 tokens/s on 64", 237_310, 64, 22.21, "same (#8108)"),
        ("MFU, 16.8 s a step", plan.tokens_per_step / 16.8, 704, 23.3, "same (#8506), rounded"),
        (
            "MFU, 18.5 s a step",
            plan.tokens_per_step / 18.5,
            704,
            20.5,
            "must not agree: the public figure averages MFU over rows, the time is another mean",
        ),
        ("MFU, 14.67 s a step", plan.tokens_per_step / 14.67, 704, 26.75, "same (#8506)"),
    ):
        found = accounting.utilisation(config, tokens_per_second, devices, "GB200")
        assert found is not None
        yield Comparison(name, 100 * found.value, public, "%", "published", explanation)
