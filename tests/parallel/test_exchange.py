"""Which transport a run gets, what is refused before compilation, and what the programs hold."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from portolan.errors import UsageError
from portolan.model.expert_rows import SAVED_ARRIVED, SAVED_PRODUCTS, SAVED_RETURNED
from portolan.model.kernels import assume_platform
from portolan.model.router import SAVED_ROUTING
from portolan.model.tree import GatedMlp
from portolan.parallel.exchange import make_exchange
from portolan.parallel.layout import COUNT_AXES, MESH_AXES
from portolan.parallel_settings import ParallelSettings

TOKENS = P(COUNT_AXES)
JAXPRS = (ClosedJaxpr, Jaxpr)


def make(expert=4, *, sizes=(), num_experts=8, tokens=16, dtype="float32", dropless=False, **keys):
    lengths = dict.fromkeys(MESH_AXES, 1) | {"expert": expert} | dict(sizes)
    return make_exchange(
        ParallelSettings(**keys),
        lengths,
        num_experts=num_experts,
        num_selected=2,
        tokens_per_shard=tokens,
        dtype=dtype,
        dropless=dropless,
    )


@pytest.mark.parametrize(
    ("expert", "keys", "transport"),
    [
        (1, {}, "grouped"),
        (1, {"gate": "waterfill"}, "ragged"),
        (4, {}, "ragged"),
        (4, {"gate": "receiver"}, "ragged"),
        (4, {"transport": "pooled"}, "pooled"),
        (1, {"transport": "grouped"}, "grouped"),
    ],
)
def test_automatic_choice(expert, keys, transport):
    found = make(expert, **keys)
    assert found.transport == transport
    assert found == make(expert, **keys) and hash(found) == hash(make(expert, **keys))


def test_evaluation_drops_nothing():
    assert make(transport="pooled", dropless=True) == make()
    assert make(1, gate="waterfill", dropless=True) == make(1)
    assert make(transport="ring", dropless=True).transport == "ring"


@pytest.mark.parametrize(
    ("keys", "message", "remedy"),
    [
        ({"expert": 3}, "8 experts do not divide over an expert axis of 3", "mesh.expert"),
        ({"transport": "grouped"}, r'transport = "grouped" needs .*mesh.expert = 4', '"auto"'),
        ({"num_chunks": 4}, "4 chunks do not divide 2 local experts", "num_chunks"),
        ({"transport": "pooled", "num_waves": 3}, "3 waves do not divide 2", "num_waves"),
        ({"gate": "waterfill", "group_size": 3}, "groups of 3 do not divide the 2", "group_size"),
        (
            {"transport": "cell", "gate": "cell", "capacity_factor": "0.2"},
            r'capacity_factor = "0.2" leaves 0.8 rows to a \(sender, expert\) pair',
            "at least 0.25,",
        ),
        (
            {"gate": "waterfill", "capacity_factor": "0.06"},
            r'capacity_factor = "0.06" leaves 0.96 rows to an expert',
            "at least 0.063,",
        ),
        (
            {"gate": "receiver", "capacity_factor": "0.05"},
            r'capacity_factor = "0.05" leaves 0.8 rows to an expert',
            "at least 0.063,",
        ),
        (
            {"transport": "pooled", "num_waves": 2, "capacity_factor": "0.2"},
            r"0.8 rows to a \(sender, owner, wave\)",
            "at least 0.25,",
        ),
        (
            {"transport": "pooled", "receive_capacity_factor": "0.05"},
            r'receive_capacity_factor = "0.05" leaves 0.8 rows to an \(expert, wave\)',
            "at least 0.063,",
        ),
        (
            {"transport": "pooled", "num_experts": 4 * 257, "tokens": 5000, "dtype": jnp.bfloat16},
            "257 local experts have no exact codes in bfloat16",
            "at most 256",
        ),
        ({"transport": "pooled", "dtype": "float64"}, "cannot carry ids in float64", "bfloat16"),
        ({"tokens": 2**28}, "do not fit 32-bit offsets", "more replicas"),
        ({"tokens": 2**26, "sizes": {"replica": 8}}, "32-bit counts of drops", "smaller batch"),
        (
            {"gate": "cell", "capacity_factor": "1.00000000001"},
            "overflows 32 bits",
            "fewer decimals",
        ),
    ],
)
def test_misfits_are_refused_before_compilation(keys, message, remedy):
    with pytest.raises(UsageError, match=message) as raised:
        make(**keys)
    assert remedy in raised.value.remedy


def sharded_loss(exchange, mesh, outer=lambda f: f):
    """Sum of squares of y, as a function of x, weights, experts, ids, valid."""

    def shard(x, weights, experts, ids, valid):
        y = outer(lambda *args: exchange(*args[:2], ids, valid, args[2])[0])(x, weights, experts)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), COUNT_AXES)

    expert = GatedMlp(*(P("expert"),) * 3)
    specs = (TOKENS, TOKENS, expert, TOKENS, TOKENS)
    return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False), specs


def arguments(exchange, mesh, specs, dtype=jnp.float32, width=8, inner=12):
    """Abstract arguments of `sharded_loss`."""
    shape = exchange.capacities.shape
    selected = exchange.num_selected
    tokens = shape.total_assignments // selected
    matrix = shape.num_experts, width, inner
    leaves = (
        ((tokens, width), dtype),
        ((tokens, selected), jnp.float32),
        *((s, dtype) for s in (matrix, matrix, (shape.num_experts, inner, width))),
        ((tokens, selected), jnp.int32),
        ((tokens,), jnp.bool_),
    )
    flat, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    return tree.unflatten(
        jax.ShapeDtypeStruct(*leaf, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, flat, strict=True)
    )


def abstract_mesh(expert):
    return AbstractMesh((1, 1, 1, expert, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 5)


def count_primitives(jaxpr, found=None) -> collections.Counter:
    """Primitives over all nested programs; exchanges of integers are called `integer exchange`."""
    found = collections.Counter() if found is None else found
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        whole = (
            jnp.issubdtype(equation.invars[0].aval.dtype, jnp.integer)
            if ("all_to_all" in name)
            else False
        )
        found["integer exchange" if whole else name] += 1
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, JAXPRS)
        ):
            if isinstance(inner, JAXPRS):
                count_primitives(getattr(inner, "jaxpr", inner), found)
    return found


@pytest.mark.parametrize(
    ("keys", "exchange", "number"),
    [
        ({}, "ragged_all_to_all", 1),
        ({"gate": "waterfill", "num_chunks": 2}, "ragged_all_to_all", 2),
        ({"transport": "pooled"}, "all_to_all", 1),
        ({"transport": "pooled", "num_waves": 2}, "all_to_all", 2),
        ({"transport": "cell", "gate": "cell"}, "all_to_all", 2),
    ],
)
def test_exchanges_of_a_gradient(keys, exchange, number):
    """Two forward and two transposed, and two more where the layer is computed again."""
    made, mesh = make(**keys), abstract_mesh(4)
    for outer, factor in ((lambda f: f, 4), (jax.checkpoint, 6)):
        loss, specs = sharded_loss(made, mesh, outer)
        with assume_platform("cuda"):
            traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments(made, mesh, specs))
        found = count_primitives(traced.jaxpr)
        assert found[exchange] == factor * number
        assert found["integer exchange"] == 0
        if exchange == "ragged_all_to_all":
            # The counts, and again with the layer.
            assert found["all_gather"] == factor // 2 - 1
            assert found["optimization_barrier"] >= number - 1


@pytest.mark.parametrize("keys", [{"num_chunks": 2}, {"transport": "cell", "gate": "cell"}])
def test_no_exchange_is_repeated_where_its_rows_are_saved(keys):
    made, mesh = make(**keys), abstract_mesh(4)
    names = SAVED_ROUTING, SAVED_PRODUCTS, SAVED_ARRIVED, SAVED_RETURNED
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    loss, specs = sharded_loss(made, mesh, functools.partial(jax.checkpoint, policy=policy))
    with assume_platform("cuda"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments(made, mesh, specs))
    found = count_primitives(traced.jaxpr)
    assert found["ragged_all_to_all"] + found["all_to_all"] == 4 * 2
    products = found["dot_general"] + found["ragged_dot_general"]
    assert products == 9 * (2 if made.transport == "ragged" else 1)


def test_ragged_exchange_is_never_traced_for_a_cpu():
    made, mesh = make(), abstract_mesh(4)
    loss, specs = sharded_loss(made, mesh)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments(made, mesh, specs))
    assert count_primitives(traced.jaxpr)["ragged_all_to_all"] == 0


def test_rack_lowers_for_cuda():
    """64 devices of one expert group, seen from a host without any of them."""
    made, mesh = make(64, num_experts=128, gate="receiver", num_chunks=2), abstract_mesh(64)
    loss, specs = sharded_loss(made, mesh)
    leaves = arguments(made, mesh, specs, jnp.bfloat16, width=32, inner=32)
    with assume_platform("cuda"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*leaves)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "num_partitions = 64" in text
    assert text.count("@ragged_all_to_all") == 4 * 2
    assert "ragged_dot" in text
