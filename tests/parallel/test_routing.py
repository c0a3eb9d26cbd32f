"""Routing arithmetic against parallel.md's goldens and a plain reference with exact fractions."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.errors import UsageError
from portolan.parallel.capacity import (
    Capacities,
    ExchangeShape,
    Limit,
    PooledCapacities,
    RoutingRule,
    parse_capacity_factor,
)
from portolan.parallel.pooled import plan_pooled
from portolan.parallel.routing import (
    count_assignments,
    dispatch_updates,
    keep_mask,
    plan,
    rank_in_class,
    return_updates,
)

# The golden problem G1: S = 2, E = 4, T = 4, K = 2.
G1_IDS = np.array([[0, 2, 1, 0, 0, 3, 1, 2], [0, 1, 0, 2, 3, 3, 2, 0]], np.int32)
G1_COUNTS = np.array([[3, 2, 2, 1], [3, 1, 2, 2]], np.int32)
G1_SHAPE = ExchangeShape(2, 4, 8)
THREE_QUARTERS = Fraction(3, 4)


def rule(gate, factor=THREE_QUARTERS, chunks=1, group=1, order="source_major"):
    return RoutingRule(gate, Fraction(factor), chunks, group, order)


def bits(mask):
    return "".join(str(int(bit)) for bit in mask)


def outputs(ids, keep, top_k=2):
    """y[s][t] = sum of kept (g + 1) x, with x[t] = t + 1."""
    tokens = np.arange(ids.shape[1]) // top_k
    terms = keep * (ids + 1) * (tokens + 1)
    return [terms[s].reshape(-1, top_k).sum(axis=1).tolist() for s in range(len(ids))]


@pytest.mark.parametrize(
    ("case", "kept", "masks", "y"),
    [
        (rule("none"), [6, 3, 4, 3], ["11111111", "11111111"], [[4, 6, 15, 20], [3, 8, 24, 16]]),
        (rule("cell"), [4, 3, 4, 3], ["11110111", "11111110"], [[4, 6, 12, 20], [3, 8, 24, 12]]),
        (
            rule("receiver"),
            [6, 0, 4, 2],
            ["11011101", "10111011"],
            [[4, 2, 15, 12], [1, 8, 12, 16]],
        ),
        (
            rule("receiver", order="round_robin"),
            [6, 0, 4, 2],
            ["11011101", "10111011"],
            [[4, 2, 15, 12], [1, 8, 12, 16]],
        ),
        (
            rule("receiver", chunks=2),
            [3, 3, 3, 3],
            ["11111111", "01011100"],
            [[4, 6, 15, 20], [2, 6, 24, 0]],
        ),
        (
            rule("waterfill", group=2),
            [3, 3, 3, 3],
            ["11111111", "01011100"],
            [[4, 6, 15, 20], [2, 6, 24, 0]],
        ),
        (
            rule("waterfill", group=2, order="round_robin"),
            [3, 3, 3, 3],
            ["11110111", "11011100"],
            [[4, 6, 12, 20], [3, 6, 24, 0]],
        ),
    ],
)
def test_golden_problem(case, kept, masks, y):
    found = plan(G1_COUNTS, Capacities(G1_SHAPE, case))
    assert found.kept.tolist() == kept
    keep = np.stack([keep_mask(G1_IDS[s], found.accepted[s]) for s in range(2)])
    assert [bits(row) for row in keep] == masks
    assert outputs(G1_IDS, keep) == y


def test_golden_sizes_and_counts():
    sizes = Capacities(G1_SHAPE, rule("cell")), Capacities(G1_SHAPE, rule("waterfill", group=2))
    assert (sizes[0].cell.physical, sizes[0].receiver.physical) == (2, 6)
    assert sizes[1].waterfill.physical == 3
    assert np.stack([count_assignments(row, 4) for row in G1_IDS]).tolist() == G1_COUNTS.tolist()


def test_padding_uses_no_capacity():
    ids = G1_IDS.copy()
    ids[0, 4:6] = 4
    counts = np.stack([count_assignments(row, 4) for row in ids])
    assert counts.tolist() == [[2, 2, 2, 0], [3, 1, 2, 2]]
    found = plan(counts, Capacities(G1_SHAPE, rule("waterfill", group=2, order="round_robin")))
    assert found.kept.tolist() == [3, 3, 4, 2]
    keep = np.stack([keep_mask(ids[s], found.accepted[s]) for s in range(2)])
    assert [bits(row) for row in keep] == ["11110011", "11011110"]
    assert outputs(np.where(ids == 4, -1, ids), keep) == [[4, 6, 0, 20], [3, 6, 24, 12]]
    assert (counts.sum() - keep.sum(), (ids == 4).sum()) == (2, 2)


def test_pooled_golden():
    found = plan_pooled(G1_IDS, PooledCapacities(G1_SHAPE, THREE_QUARTERS, THREE_QUARTERS, 2))
    assert [bits(row) for row in found.kept] == ["11101100", "11011111"]
    assert outputs(G1_IDS, found.kept) == [[4, 4, 15, 0], [3, 6, 24, 16]]
    assert found.dropped(G1_IDS < 4) == (1, 3)
    first = [0, 2, 3, 4, 6]
    pairs = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert list(zip(found.wave[0, first], found.position[0, first], strict=True)) == pairs


def test_offsets_golden():
    accepted = plan(G1_COUNTS, Capacities(G1_SHAPE, rule("receiver"))).accepted
    rows = []
    for updates in (dispatch_updates, return_updates):
        for shard in (0, 1):
            found = updates(G1_COUNTS, accepted, shard)
            rows.append([x.tolist() for x in (found.start, found.send, found.out, found.receive)])
    assert rows == [
        [[0, 3, 5, 7], [3, 0, 2, 1], [0, 6, 0, 4], [3, 0, 3, 0]],
        [[0, 3, 4, 6], [3, 0, 2, 1], [3, 6, 2, 5], [2, 1, 2, 1]],
        [[0, 6, 3, 6], [3, 0, 3, 0], [0, 3, 0, 3], [3, 0, 2, 1]],
        [[0, 4, 2, 5], [2, 1, 2, 1], [5, 7, 4, 6], [3, 0, 2, 1]],
    ]


def test_second_offsets_golden():
    counts = np.array([[2, 3, 1, 2], [3, 1, 2, 2]], np.int32)
    one = plan(counts, Capacities(G1_SHAPE, rule("receiver", "0.875")))
    assert one.accepted.tolist() == [[2, 2, 1, 2], [3, 0, 2, 2]]
    two = plan(counts, Capacities(G1_SHAPE, rule("receiver", "0.875", chunks=2)))
    assert two.chunk(0).tolist() == [[2, 0, 1, 0], [2, 0, 2, 0]]
    assert two.chunk(1).tolist() == [[0, 3, 0, 2], [0, 1, 0, 2]]


@pytest.mark.parametrize(("totals", "kept"), [((9, 2, 7), [8, 2, 5]), ((6, 1, 5), [6, 1, 5])])
def test_waterfill_goldens(totals, kept):
    # Capacity 5 per expert whatever the counts: 5 of 15 valid rows a third.
    counts = np.array([totals], np.int32)
    factor = Fraction(15, sum(totals))
    capacities = Capacities(ExchangeShape(1, 3, sum(totals)), rule("waterfill", factor, 1, 3))
    assert capacities.waterfill.physical == 5
    assert plan(counts, capacities).kept.tolist() == kept


@pytest.mark.parametrize(
    ("order", "kept", "accepted"),
    [
        ("source_major", 7, [5, 1, 1]),
        ("source_major", 8, [5, 1, 2]),
        ("round_robin", 7, [3, 1, 3]),
        ("round_robin", 8, [4, 1, 3]),
    ],
)
def test_split_goldens(order, kept, accepted):
    counts = np.array([[5, 0, 0], [1, 0, 0], [4, 0, 0]], np.int32)
    case = rule("waterfill", Fraction(kept * 3, 10), 1, 1, order)
    found = plan(counts, Capacities(ExchangeShape(3, 3, 10), case))
    assert found.accepted[:, 0].tolist() == accepted


def test_capacities_of_the_public_run():
    shape = ExchangeShape(64, 384, 524_288)
    factor = parse_capacity_factor("1.15")
    two = Capacities(shape, RoutingRule("receiver", factor, num_chunks=2))
    assert (two.cell.physical, two.receiver.physical, two.receiver_chunk) == (
        1571,
        602_932,
        301_466,
    )
    fill = Capacities(shape, RoutingRule("waterfill", factor, num_chunks=2, group_size=3))
    assert (fill.waterfill.physical, fill.chunk_buffer) == (100_489, 301_467)
    pooled = PooledCapacities(shape, factor, factor, 3)
    assert (pooled.send.physical, pooled.receive.physical) == (3141, 33_497)
    assert pooled.header_rows(3072) == 2
    lower = PooledCapacities(shape, Fraction("1.05"), Fraction("1.05"), 3)
    sizes = (lower.send.physical, lower.header_rows(3072), lower.receive.physical)
    assert sizes == (2868, 1, 30_584)


def test_ceilings_are_exact():
    assert math.ceil(1.1 * 50) == 56
    assert Limit(10**6, parse_capacity_factor("1.1"), 1, 1).logical(50, np) == 55
    assert math.ceil(np.float32(4.05) * np.float32(7680) / np.float32(8)) == 3889
    assert Limit(10**6, parse_capacity_factor("4.05"), 8, 1).logical(7680, np) == 3888


@settings(max_examples=300)
@given(
    total=st.integers(1, 4_000_000),
    share=st.floats(0, 1),
    cents=st.integers(1, 999),
    divisor=st.integers(1, 4096),
)
def test_the_logical_limit_is_exact_and_never_above_the_physical(total, share, cents, divisor):
    factor = Fraction(cents, 100)
    physical = max(1, math.ceil(factor * total / divisor))
    limit = Limit(physical, factor, divisor, 1)
    valid = int(share * total)
    exact = min(max(1, math.ceil(Fraction(valid) * factor / divisor)), physical)
    assert int(limit.logical(np.int32(valid), np)) == exact <= physical


def plain_plan(counts, capacities):
    """Row by row: who is kept, by the words of parallel.md, with exact fractions."""
    case, shape = capacities.rule, capacities.shape
    num_shards, num_experts = counts.shape
    local, width = shape.local_experts, capacities.chunk_experts
    total, factor = int(counts.sum()), case.capacity_factor
    if case.gate == "none":
        return counts.copy()
    if case.gate == "cell":
        limits = [
            min(max(1, math.ceil(row.sum() * factor / num_experts)), capacities.cell.physical)
            for row in counts.astype(object)
        ]
        return np.minimum(counts, np.array(limits)[:, None])
    kept = [0] * num_experts
    totals = [int(n) for n in counts.sum(axis=0)]
    if case.gate == "receiver":
        owner = min(
            max(local, math.ceil(total * factor / num_shards)), capacities.receiver.physical
        )
        share = min(capacities.receiver_chunk, math.ceil(Fraction(owner, case.num_chunks)))
        for begin in range(0, num_experts, width):
            room = share
            for g in range(begin, begin + width):
                kept[g] = min(totals[g], room)
                room -= kept[g]
    else:
        base = min(max(1, math.ceil(total * factor / num_experts)), capacities.waterfill.physical)
        for begin in range(0, num_experts, case.group_size):
            group = range(begin, begin + case.group_size)
            slack = sum(max(0, base - totals[g]) for g in group)
            for g in group:
                more = min(max(0, totals[g] - base), slack)
                kept[g] = min(totals[g], base) + more
                slack -= more
    accepted = np.zeros_like(counts)
    for g in range(num_experts):
        left = kept[g]
        while left:
            for s in range(num_shards):
                free = counts[s, g] - accepted[s, g]
                take = min(free, left) if case.order == "source_major" else min(free, left, 1)
                accepted[s, g] += take
                left -= take
    return accepted


@st.composite
def problems(draw):
    num_shards = draw(st.sampled_from([1, 2, 4, 8]))
    local = draw(st.sampled_from([1, 2, 4, 6]))
    assignments = draw(st.integers(1, 40))
    shape = ExchangeShape(num_shards, num_shards * local, assignments)
    chunks = draw(st.sampled_from([q for q in (1, 2, 3) if local % q == 0]))
    group = draw(st.sampled_from([g for g in (1, 2, 3) if (local // chunks) % g == 0]))
    case = RoutingRule(
        draw(st.sampled_from(["none", "cell", "receiver", "waterfill"])),
        Fraction(draw(st.integers(10, 300)), 100),
        chunks,
        group,
        draw(st.sampled_from(["source_major", "round_robin"])),
    )
    hot = draw(st.integers(0, shape.num_experts))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, shape.num_experts + 1, (num_shards, assignments)).astype(np.int32)
    skewed = rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return shape, case, np.where(skewed, np.int32(hot), ids)


@settings(max_examples=200)
@given(problems())
def test_plans_equal_the_plain_reference_and_keep_their_promises(problem):
    shape, case, ids = problem
    counts = np.stack([count_assignments(row, shape.num_experts) for row in ids])
    capacities = Capacities(shape, case)
    found = plan(counts, capacities)
    assert found.accepted.dtype == found.kept.dtype == np.int32
    assert found.accepted.tolist() == plain_plan(counts, capacities).tolist()
    assert (found.accepted >= 0).all() and (found.accepted <= counts).all()
    assert found.accepted.sum(axis=0).tolist() == found.kept.tolist()
    chunks = [found.chunk(q) for q in range(case.num_chunks)]
    assert (sum(chunks) == found.accepted).all()
    owners = [chunk.reshape(len(ids), len(ids), -1).sum(axis=(0, 2)) for chunk in chunks]
    assert max(rows.max() for rows in owners) <= capacities.chunk_buffer
    for s, row in enumerate(ids):
        keep = keep_mask(row, found.accepted[s])
        assert count_assignments(row[keep], shape.num_experts).tolist() == (
            found.accepted[s].tolist()
        )
        for g in range(shape.num_experts):
            assert not np.diff(keep[row == g].astype(int)).max(initial=-1) > 0


@settings(max_examples=100)
@given(problems())
def test_updates_are_disjoint_dual_and_inverse(problem):
    shape, case, ids = problem
    counts = np.stack([count_assignments(row, shape.num_experts) for row in ids])
    accepted = plan(counts, Capacities(shape, case)).accepted
    num_shards, local = shape.num_shards, shape.local_experts
    there = [dispatch_updates(counts, accepted, s) for s in range(num_shards)]
    back = [return_updates(counts, accepted, s) for s in range(num_shards)]

    def exchanged(values):
        return np.stack(values).reshape(num_shards, num_shards, local).swapaxes(0, 1)

    for mine, theirs in ((there, back), (back, there)):
        for name, other in (("start", "out"), ("out", "start"), ("send", "receive")):
            swapped = exchanged([getattr(u, other) for u in theirs])
            own = np.stack([getattr(u, name) for u in mine]).reshape(swapped.shape)
            if name == "send":
                assert (own == exchanged([u.receive for u in mine])).all()
            else:
                assert (own == swapped).all()
    sources = [np.arange(counts[s].sum()) + 1000 * s for s in range(num_shards)]
    arrived = [np.full(accepted.sum(), -1) for _ in range(num_shards)]
    _move(sources, arrived, there, local)
    for d, rows in enumerate(arrived):
        filled = accepted[:, d * local : (d + 1) * local].sum()
        assert (rows[:filled] >= 0).all() and (rows[filled:] == -1).all()
    home = [np.full(len(rows), -1) for rows in sources]
    _move(arrived, home, back, local)
    for s, rows in enumerate(home):
        ids_sorted = np.repeat(np.arange(shape.num_experts), counts[s])
        kept = keep_mask(ids_sorted, accepted[s])
        assert (rows == np.where(kept, sources[s], -1)).all()


def _move(operands, outs, updates, local):
    """Copy every segment; a row written twice is an error."""
    for s, found in enumerate(updates):
        for u, (begin, send, out) in enumerate(
            zip(found.start, found.send, found.out, strict=True)
        ):
            target = outs[u // local]
            assert (target[out : out + send] == -1).all()
            target[out : out + send] = operands[s][begin : begin + send]


def test_numpy_and_jax_agree():
    rng = np.random.default_rng(0)
    shape = ExchangeShape(4, 16, 32)
    gates = ("none", "cell", "receiver", "waterfill")
    for number in range(40):
        ids = rng.integers(0, 17, (4, 32)).astype(np.int32)
        ids[rng.random(ids.shape) < rng.random()] = rng.integers(0, 17)
        counts = np.stack([count_assignments(row, 16) for row in ids])
        case = RoutingRule(
            gates[number % 4],
            Fraction(int(rng.integers(20, 200)), 100),
            1 + number // 4 % 2,
            2,
            ("source_major", "round_robin")[number // 8 % 2],
        )
        capacities = Capacities(shape, case)
        a, b = plan(counts, capacities), plan(jnp.asarray(counts), capacities)
        assert np.array_equal(a.kept, b.kept) and np.array_equal(a.accepted, b.accepted)
        assert b.accepted.dtype == jnp.int32
        masks = keep_mask(ids[1], a.accepted[1]), keep_mask(jnp.asarray(ids[1]), b.accepted[1])
        assert np.array_equal(*masks)
        for updates in (dispatch_updates, return_updates):
            pair = updates(counts, a.accepted, 2), updates(jnp.asarray(counts), b.accepted, 2)
            for name in ("start", "send", "out", "receive"):
                assert np.array_equal(*(getattr(one, name) for one in pair))


def test_waterfill_by_source_keeps_the_same_rows_for_every_axis():
    rng = np.random.default_rng(3)
    ids = np.minimum(rng.geometric(0.2, 512) - 1, 15).astype(np.int32)
    masks = {}
    for order in ("source_major", "round_robin"):
        for num_shards in (1, 2, 4, 8):
            rows = ids.reshape(num_shards, -1)
            counts = np.stack([count_assignments(row, 16) for row in rows])
            shape = ExchangeShape(num_shards, 16, rows.shape[1])
            found = plan(counts, Capacities(shape, rule("waterfill", "1.15", 1, 2, order)))
            keep = [keep_mask(row, found.accepted[s]) for s, row in enumerate(rows)]
            masks[order, num_shards] = np.concatenate(keep)
    assert not masks["source_major", 1].all()
    assert all((masks["source_major", s] == masks["source_major", 1]).all() for s in (2, 4, 8))
    assert not (masks["round_robin", 4] == masks["round_robin", 1]).all()


@settings(max_examples=60)
@given(problems(), st.integers(1, 3), st.integers(20, 200))
def test_pooled_keeps_by_rank_and_by_round_robin(problem, waves, percent):
    shape, _, ids = problem
    waves = waves if shape.local_experts % waves == 0 else 1
    factor = Fraction(percent, 100)
    capacities = PooledCapacities(shape, factor, factor, waves)
    found = plan_pooled(ids, capacities)
    valid = ids < shape.num_experts
    receive = int(capacities.receive.logical(valid.sum(), np))
    assert not (found.kept & ~found.sent).any() and not (found.sent & ~valid).any()
    for s, row in enumerate(ids):
        send = int(capacities.send.logical(valid[s].sum(), np))
        for d in range(shape.num_shards):
            here = np.flatnonzero(row // shape.local_experts == d)
            here = here[valid[s, here]]
            for w in range(waves):
                in_wave = here[w::waves]
                assert (found.wave[s, in_wave] == w).all()
                assert found.sent[s, in_wave].tolist() == [i < send for i in range(len(in_wave))]
    for g in range(shape.num_experts):
        for w in range(waves):
            rows = [
                (found.position[s, j], s, j)
                for s, j in np.argwhere(found.sent & (ids == g) & (found.wave == w))
            ]
            expected = sorted((p, s) for p, s, _ in rows)[:receive]
            assert sorted((p, s) for p, s, j in rows if found.kept[s, j]) == expected


def test_rank_in_class_counts_from_zero_in_flat_order():
    keys = np.array([2, 0, 2, 2, 1, 0], np.int32)
    assert rank_in_class(keys, 3).tolist() == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExchangeShape(3, 8, 4), "8 experts do not divide"),
        (lambda: ExchangeShape(64, 64, 2**25), "do not fit 32-bit"),
        (lambda: Capacities(G1_SHAPE, rule("receiver", chunks=3)), "3 chunks do not divide 2"),
        (lambda: Capacities(G1_SHAPE, rule("waterfill", group=4)), "groups of 4"),
        (lambda: PooledCapacities(G1_SHAPE, Fraction(1), Fraction(1), 3), "3 waves"),
        (lambda: parse_capacity_factor("0"), "not a positive decimal"),
        (lambda: parse_capacity_factor("much"), "not a positive decimal"),
        (lambda: parse_capacity_factor(1.15), "not a positive decimal"),
        (
            lambda: PooledCapacities(
                ExchangeShape(1, 257, 512), Fraction(1), Fraction(1), 1
            ).check_codes("bfloat16"),
            "257 local experts have no exact codes",
        ),
    ],
)
def test_misfits_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
