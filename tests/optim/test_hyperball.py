"""The update rule: golden steps, kept norms, invariances, precision and restarts."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portolan.optim import hyperball
from portolan.optim.groups import GroupRow, GroupTable, resolve_groups
from portolan.optim.norms import frobenius_norm, norm_drifts
from portolan.optim.schedule import Rates, Schedule
from portolan.optim.settings import OptimizerError, OptimizerSettings
from portolan.shapes import derive_shape
from portolan.tree import flatten_paths

MICRO = derive_shape(
    "micro", 32, num_layers=2, num_experts=4, vocab_size=24, gated_norm_rank=4, num_kv_heads_local=1
)
KEPT = (
    "embed/table",
    "embed_gnorm/down",
    "blocks/attn/wq",
    "blocks/attn/head_gate",
    "blocks/attn/k_conv/taps",
    "blocks/mlp_norm/gain",
    "blocks/moe/router",
    "blocks/moe/experts/gate",
    "blocks/shared/1/down",
    "head/proj",
)
"""One leaf of every kind: the whole tree would only compile longer."""
SETTINGS = OptimizerSettings(
    hyperball_scope="per_expert", ns_dtype="float32", beta2=0.95, epsilon=1e-15
)
RATES = Rates(np.float32(0.03), np.float32(0.01), np.float32(0.02))
STILL = Rates(np.float32(0), np.float32(0), np.float32(0.02))


def make(shapes_of, draw_tree, **change):
    """A tiny tree of every kind of leaf, with its table, jitted step, state and gradients."""
    chosen = replace(SETTINGS, **change)
    whole = resolve_groups(shapes_of(MICRO), scope=chosen.hyperball_scope, settings=chosen)
    table = GroupTable(tuple(row for row in whole.rows if row.path in KEPT))
    shapes = {row.path: row.shape for row in table.rows}
    params = draw_tree(shapes, 0, scale=0.1)
    return SimpleNamespace(
        shapes=shapes,
        settings=chosen,
        table=table,
        params=params,
        step=jax.jit(hyperball.build_step(table, chosen)),
        state=hyperball.init_state(params, table=table, settings=chosen),
        grads=[draw_tree(shapes, seed) for seed in (1, 2)],
    )


@pytest.fixture(scope="module")
def per_expert(shapes_of, draw_tree):
    return make(shapes_of, draw_tree)


@pytest.fixture(scope="module")
def joint(shapes_of, draw_tree):
    return make(shapes_of, draw_tree, hyperball_scope="joint")


def single(group: str, shape: tuple[int, ...], scope: str | None, decay: bool = False):
    table = GroupTable((GroupRow("w", shape, group, scope, decay),))
    return table, hyperball.build_step(table, SETTINGS)


def bitwise_equal(a, b) -> bool:
    left, right = flatten_paths(a), flatten_paths(b)
    return left.keys() == right.keys() and all(
        np.asarray(left[p]).tobytes() == np.asarray(right[p]).tobytes() for p in left
    )


GOLDEN_B = (
    [[0.133085, -0.219297, 0.284462], [0.387373, 0.084844, -0.126581]],
    [[0.161424, -0.240563, 0.264410], [0.368373, 0.080279, -0.154969]],
)


@pytest.mark.parametrize("x64", [False, True])
def test_golden_muonh(x64: bool) -> None:
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        atol = 5.1e-7 if x64 else 1e-5
        chosen = replace(SETTINGS, ns_dtype="float64" if x64 else "float32")
        table, _ = single("muonh", (2, 3), "matrix")
        step = hyperball.build_step(table, chosen)
        weight = jnp.asarray([[0.1, -0.2, 0.3], [0.4, 0.1, -0.1]], dtype)
        start = weight
        state = hyperball.init_state({"w": weight}, table=table, settings=chosen)
        gradients = ([[1, 2, 3], [4, 5, 7]], [[-1, 0, 1], [2, -1, 0.5]])
        for gradient, expected in zip(gradients, GOLDEN_B, strict=True):
            new, state = step(
                {"w": jnp.asarray(gradient, dtype)}, state, {"w": weight}, Rates(0.1, 0.0, 0.0)
            )
            weight = new["w"]
            np.testing.assert_allclose(weight, expected, atol=atol)
            assert jnp.linalg.norm(weight) == pytest.approx(0.565685, abs=1e-6)
        moved = jnp.linalg.norm(jnp.asarray(GOLDEN_B[0]) - start) / jnp.linalg.norm(start)
        assert moved == pytest.approx(0.093611, abs=2e-6)
        buffer = [[-0.05, 1.9, 3.85], [5.8, 3.75, 7.15]]
        np.testing.assert_allclose(state.muonh["w"]["buf"], buffer, rtol=1e-6)


def test_golden_adam_with_decay() -> None:
    table, step = single("adam", (2,), None, decay=True)
    params = {"w": jnp.asarray([1.0, -2.0])}
    state = hyperball.init_state(params, table=table, settings=SETTINGS)
    expected = ([0.9898, -1.9896], [0.980042, -1.985199])
    for t, gradient in enumerate(([0.1, -0.3], [0.2, 0.1])):
        decay = np.float32(0.02 * (1 - t / 10))
        before = params["w"]
        params, state = step(
            {"w": jnp.asarray(gradient)}, state, params, Rates(9.0, np.float32(0.01), decay)
        )
        np.testing.assert_allclose(params["w"], expected[t], atol=1e-5)
    direction = (before - params["w"]) / 0.01 - decay * before
    np.testing.assert_allclose(direction, [0.957986, -0.404307], atol=1e-4)
    assert state.count == 2


def test_bias_correction_near_one_keeps_its_digits() -> None:
    moments = {"m": jnp.zeros(1), "v": jnp.zeros(1)}
    direction, _ = hyperball.adam_direction(
        jnp.ones(1), moments, jnp.zeros((), jnp.int32), beta1=0.9, beta2=0.9999, epsilon=1e-16
    )
    assert direction[0] == pytest.approx(1, abs=5e-7)


@pytest.mark.parametrize("scope", ["joint", "per_expert"])
def test_norms_survive_100_updates(scope, request) -> None:
    case = request.getfixturevalue(scope)
    params, state = case.params, case.state
    rng = np.random.default_rng(5)
    for _ in range(100):
        sign = np.float32(rng.normal())
        grads = jax.tree.map(lambda a, b, s=sign: a + s * b, *case.grads)
        params, state = case.step(grads, state, params, RATES)
    for path, drift in norm_drifts(case.params, params, case.table).items():
        assert drift < 1e-5, path
    before, after = (
        np.linalg.norm(flatten_paths(tree)["blocks/moe/experts/gate"], axis=(2, 3))
        for tree in (case.params, params)
    )
    single_drift = np.abs(after / before - 1).max()
    assert single_drift > 1e-3 if scope == "joint" else single_drift < 1e-5


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1, 5), (2, 3, 3), (3, 7, 2), (1, 4, 6)]),
    eta=st.floats(1e-4, 0.9),
    scale=st.floats(1e-3, 1e3),
)
def test_step_has_its_length_and_keeps_the_norm(seed, shape, eta, scale) -> None:
    rng = np.random.default_rng(seed)
    weight = jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
    direction = jnp.asarray(rng.normal(size=shape), jnp.float32)
    seen = []

    def norm(x: jax.Array) -> jax.Array:
        seen.append(x)
        return frobenius_norm(x, (1, 2))

    new = hyperball.hyperball_step(weight, direction, jnp.float32(eta), norm)
    radius = np.linalg.norm(np.asarray(weight, np.float64), axis=(1, 2))
    moved = np.asarray(seen[-1], np.float64) - np.asarray(weight, np.float64)
    np.testing.assert_allclose(
        np.linalg.norm(moved, axis=(1, 2)) / radius, eta, rtol=1e-5, atol=1e-6
    )
    got = np.linalg.norm(np.asarray(new, np.float64), axis=(1, 2))
    # A step that lands near the origin leaves few digits for the direction, never for the norm.
    np.testing.assert_allclose(got, radius, rtol=1e-5)


def test_gradient_scale_cancels_and_weight_scale_carries(per_expert) -> None:
    case = per_expert
    new, _ = case.step(case.grads[0], case.state, case.params, RATES)
    louder = jax.tree.map(lambda g: 1000 * g, case.grads[0])
    same, _ = case.step(louder, case.state, case.params, RATES)
    larger = jax.tree.map(lambda p: 10 * p, case.params)
    scaled, _ = case.step(case.grads[0], case.state, larger, RATES)
    trees = [flatten_paths(tree) for tree in (case.params, new, same, scaled)]
    for row in case.table.in_group("muonh"):
        old, once, loud, big = (np.asarray(tree[row.path], np.float64) for tree in trees)
        update = once - old
        np.testing.assert_allclose(loud - old, update, atol=2e-5 * np.abs(update).max())
        np.testing.assert_allclose(big - 10 * old, 10 * update, atol=2e-4 * np.abs(update).max())


def test_no_gradient_and_no_rate_leave_constrained_leaves_bitwise(per_expert) -> None:
    case = per_expert
    zero = jax.tree.map(jnp.zeros_like, case.params)
    constrained = [row.path for row in case.table.rows if row.constrained]
    rested, state = case.step(zero, case.state, case.params, RATES)
    for path in constrained:
        assert bitwise_equal(flatten_paths(rested)[path], flatten_paths(case.params)[path]), path
    _, warm = case.step(case.grads[0], case.state, case.params, RATES)
    coasting, _ = case.step(zero, warm, case.params, RATES)
    for path in constrained:
        assert not bitwise_equal(flatten_paths(coasting)[path], flatten_paths(case.params)[path]), (
            path
        )
    first, state = case.step(case.grads[0], case.state, case.params, STILL)
    assert bitwise_equal(first, case.params)
    assert all(np.any(leaf) for leaf in flatten_paths(state).values())


def test_idle_columns_shrink_by_the_step() -> None:
    """Columns without a gradient get an exact zero direction and lose 1 / sqrt(1 + eta^2)."""
    rng = np.random.default_rng(7)
    weight = np.zeros((1, 6, 8), np.float32)
    weight[0, :3, :4] = rng.normal(size=(3, 4))
    weight[0, :, 4:] = rng.normal(size=(6, 4))
    gradient = np.zeros_like(weight)
    gradient[0, 3:, :4] = rng.normal(size=(3, 4))
    table, step = single("muonh", weight.shape, "per_layer")
    params = {"w": jnp.asarray(weight)}
    state = hyperball.init_state(params, table=table, settings=SETTINGS)
    eta = np.float32(0.1)
    new, _ = step({"w": jnp.asarray(gradient)}, state, params, Rates(eta, eta, eta))
    idle = np.asarray(new["w"])[0, :, 4:] / weight[0, :, 4:]
    np.testing.assert_allclose(idle, 1 / np.sqrt(1 + 0.01), rtol=1e-4)


def test_decay_acts_on_router_and_head_gate_only(per_expert) -> None:
    case = per_expert
    without, _ = case.step(
        case.grads[0], case.state, case.params, RATES._replace(decay=np.float32(0))
    )
    with_decay, state = case.step(case.grads[0], case.state, case.params, RATES)
    one, other = flatten_paths(without), flatten_paths(with_decay)
    assert {p for p in one if not bitwise_equal(one[p], other[p])} == {
        "blocks/moe/router",
        "blocks/attn/head_gate",
    }
    path = "blocks/moe/router"
    np.testing.assert_allclose(
        one[path] - other[path], 0.01 * 0.02 * flatten_paths(case.params)[path], atol=1e-7
    )
    resumed = jax.tree.structure(state)
    assert resumed == jax.tree.structure(case.state), "switching it on needs no new state"


def test_state_has_the_paths_of_the_parameters(per_expert) -> None:
    case = per_expert
    paths = flatten_paths(case.state)
    assert "muonh/blocks/attn/wq/buf" in paths
    assert "muonh/blocks/shared/1/down/buf" in paths
    assert {"adamh/head/proj/m", "adamh/head/proj/v", "adam/embed/table/v", "count"} <= set(paths)
    num_bytes = sum(leaf.nbytes for path, leaf in paths.items() if path != "count")
    assert num_bytes == case.table.state_bytes
    assert {leaf.dtype for leaf in paths.values()} == {np.dtype("float32"), np.dtype("int32")}


def test_everything_stays_float32_and_narrow_parameters_are_refused(per_expert) -> None:
    case = per_expert
    narrow = jax.tree.map(lambda g: g.astype(jnp.bfloat16), case.grads[0])
    new, state = case.step(narrow, case.state, case.params, RATES)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(new))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    widened = jax.tree.map(lambda g: g.astype(jnp.float32), narrow)
    assert bitwise_equal(case.step(widened, case.state, case.params, RATES), (new, state))
    with pytest.raises(OptimizerError, match="keeps float32 parameters"):
        case.step(narrow, case.state, narrow, RATES)


def test_newton_schulz_runs_in_its_type(shapes_of, draw_tree, per_expert) -> None:
    coarse = make(shapes_of, draw_tree, ns_dtype="bfloat16")
    text = coarse.step.lower(coarse.grads[0], coarse.state, coarse.params, RATES).as_text()
    assert "bf16" in text
    case = per_expert
    assert "bf16" not in case.step.lower(case.grads[0], case.state, case.params, RATES).as_text()
    a, _ = coarse.step(coarse.grads[0], coarse.state, coarse.params, RATES)
    b, _ = case.step(case.grads[0], case.state, case.params, RATES)
    old = np.asarray(flatten_paths(case.params)["blocks/attn/wq"])
    u, v = (np.asarray(flatten_paths(tree)["blocks/attn/wq"]) - old for tree in (a, b))
    assert (u * v).sum() / np.linalg.norm(u) / np.linalg.norm(v) > 0.99


def test_master_on_the_host_gets_the_update_of_the_device() -> None:
    """The gradient of a bfloat16 copy, cast up, is the gradient through the cast."""
    table, step = single("muonh", (6, 8), "matrix")
    master = {"w": jnp.asarray(np.random.default_rng(3).normal(size=(6, 8)), jnp.float32)}
    inputs = jnp.asarray(np.random.default_rng(4).normal(size=(5, 6)), jnp.bfloat16)
    state = hyperball.init_state(master, table=table, settings=SETTINGS)

    def narrow(tree: dict) -> dict:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def loss(copy: dict) -> jax.Array:
        return jnp.sum(jnp.tanh(inputs @ copy["w"]).astype(jnp.float32))

    on_device = jax.grad(lambda tree: loss(narrow(tree)))(master)
    on_host = jax.grad(loss)(narrow(master))
    assert on_host["w"].dtype == jnp.bfloat16
    assert bitwise_equal(step(on_device, state, master, RATES), step(on_host, state, master, RATES))


def test_restart_is_bitwise_equal(per_expert) -> None:
    case = per_expert
    params, state = case.step(case.grads[0], case.state, case.params, RATES)
    straight = case.step(case.grads[1], state, params, RATES)
    saved = {path: np.asarray(leaf) for path, leaf in flatten_paths(state).items()}
    structure = jax.tree.structure(
        hyperball.init_state(case.params, table=case.table, settings=case.settings)
    )
    restored = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in saved.values()])
    again = case.step(case.grads[1], restored, jax.tree.map(jnp.array, params), RATES)
    assert restored.count == 1
    assert bitwise_equal(straight, again)


def test_optax_update_adds_up_to_the_step(per_expert) -> None:
    case = per_expert
    optimizer = hyperball.build(case.table, case.settings)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)

    @jax.jit
    def apply(grads, state, params, rates):
        updates, state = optimizer.update(grads, state, params, rates=rates)
        return optax.apply_updates(params, updates), state

    params, state = apply(case.grads[0], optimizer.init(case.params), case.params, RATES)
    direct, expected = case.step(case.grads[0], case.state, case.params, RATES)
    for path, leaf in flatten_paths(direct).items():
        np.testing.assert_allclose(flatten_paths(params)[path], leaf, atol=2e-7)
    for path, leaf in flatten_paths(expected).items():
        np.testing.assert_allclose(flatten_paths(state)[path], leaf, rtol=1e-6, atol=1e-12)
    still, _ = apply(case.grads[0], case.state, case.params, STILL)
    assert bitwise_equal(still, case.params)
    with pytest.raises(OptimizerError, match="needs the parameters"):
        optimizer.update(case.grads[0], case.state, rates=RATES)


def test_initial_radius_pulls_back(shapes_of, draw_tree) -> None:
    case = make(shapes_of, draw_tree, hyperball_radius="initial")
    wider = jax.tree.map(lambda p: 1.01 * p, case.params)
    params, state = case.step(case.grads[0], case.state, wider, RATES)
    assert max(norm_drifts(case.params, params, case.table).values()) < 1e-6
    radius = flatten_paths(state)["muonh/blocks/moe/experts/gate/radius"]
    assert radius.shape == (2, 4, 1, 1)
    still, _ = case.step(case.grads[0], case.state, case.params, STILL)
    assert bitwise_equal(still, case.params)


def test_construction_errors(per_expert) -> None:
    case = per_expert
    with pytest.raises(OptimizerError, match="beta2 and epsilon"):
        hyperball.build(case.table, OptimizerSettings(hyperball_scope="joint"))

    def init(change: dict) -> None:
        params = jax.tree.map(lambda x: x, case.params)
        params["blocks"]["moe"]["experts"] |= change
        hyperball.init_state(params, table=case.table, settings=case.settings)

    gate = case.params["blocks"]["moe"]["experts"]["gate"]
    with pytest.raises(OptimizerError, match="1 matrices of blocks/moe/experts/gate are zero"):
        init({"gate": gate.at[1, 2].set(0)})
    with pytest.raises(OptimizerError, match="differ in leaf blocks/moe/experts/extra"):
        init({"extra": gate})
    with pytest.raises(OptimizerError, match="the group table says"):
        init({"gate": gate[:, :1]})
    abstract = jax.eval_shape(
        lambda p: hyperball.init_state(p, table=case.table, settings=case.settings), case.params
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(case.state)


def quadratic(params: dict, target: dict) -> jax.Array:
    return sum(
        jnp.sum(jnp.square(a - b))
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True)
    )


@pytest.mark.parametrize("change", [{"matrix": "adamh"}, {"matrix": "adamw"}, {"gnorm": "adam"}])
def test_ablation_arms_learn(shapes_of, draw_tree, change) -> None:
    case = make(shapes_of, draw_tree, **change)
    target = draw_tree(case.shapes, 9, scale=0.1)
    gradient = jax.jit(jax.value_and_grad(quadratic))
    schedule = Schedule(30)
    params, state, losses = case.params, case.state, []
    for t in range(30):
        loss, grads = gradient(params, target)
        rates = Rates(*(np.float32(r * schedule.factor(t)) for r in (0.03, 0.01, 0.02)))
        params, state = case.step(grads, state, params, rates)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]
    moved = norm_drifts(case.params, params, case.table)
    assert all(drift < 1e-5 for drift in moved.values())
    assert bool(moved) == (change != {"matrix": "adamw"})
    num_bytes = sum(x.nbytes for p, x in flatten_paths(state).items() if p != "count")
    assert num_bytes == case.table.state_bytes


def test_adamw_step_by_hand_and_its_clip() -> None:
    chosen = replace(SETTINGS, matrix="adamw", beta2=0.95)
    table = GroupTable((GroupRow("w", (2, 2), "adamw", None, False),))
    step = hyperball.build_step(table, chosen)
    weight, grad = jnp.asarray([[1.0, -2], [3, 4]]), jnp.asarray([[3.0, 4], [0, 12]])
    state = hyperball.init_state({"w": weight}, table=table, settings=chosen)
    new, state = step({"w": grad}, state, {"w": weight}, Rates(0.0, 0.1, 0.0))
    np.testing.assert_allclose(state.adamw["w"]["m"], 0.1 * grad / 13, rtol=1e-6)
    expected = weight - 0.1 * (jnp.sign(grad) + 0.1 * weight)
    np.testing.assert_allclose(new["w"], expected, rtol=1e-5)


def test_clip_of_chosen_groups(shapes_of, draw_tree) -> None:
    case = make(shapes_of, draw_tree, clip=0.5, clip_groups=("adam",))
    _, state = case.step(case.grads[0], case.state, case.params, RATES)
    moments = [x["m"] for x in jax.tree.leaves(state.adam, is_leaf=lambda x: "m" in x)]
    assert jnp.sqrt(sum(jnp.sum(m * m) for m in moments)) == pytest.approx(0.05, rel=1e-5)
    wq = flatten_paths(case.grads[0])["blocks/attn/wq"]
    np.testing.assert_array_equal(state.muonh["blocks"]["attn"]["wq"]["buf"], wq)
