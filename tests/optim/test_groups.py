"""The group table: every leaf once, by exact path, or an error."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from portolan.optim.groups import DEFAULT_COMPONENTS, resolve_groups
from portolan.optim.schedule import peak_rates
from portolan.optim.settings import OptimizerError, OptimizerSettings
from portolan.shapes import derive_shape

P64 = derive_shape("small", 64)
HERO = derive_shape("ladder", 6144, num_layers=48)
SETTINGS = OptimizerSettings(hyperball_scope="joint")


@pytest.mark.parametrize(
    ("config", "muonh", "adamh", "adam", "state_bytes", "parameter_bytes"),
    [
        (derive_shape("ladder", 768), 1_392_377_856, 98_500_608, 100_966_912, 7_165_251_584,
         6_367_381_504),
        (HERO, 533_770_272_768, 788_004_864, 918_810_624, None, None),
        (P64, None, None, None, None, None),
    ],
    ids=["d768", "d6144", "p64"],
)  # fmt: skip
def test_sizes_of_the_public_run(
    shapes_of, config, muonh, adamh, adam, state_bytes, parameter_bytes
) -> None:
    shapes = shapes_of(config)
    table = resolve_groups(shapes, scope="joint")
    assert [row.path for row in table.rows] == list(shapes)
    counts = {group: table.num_parameters(group) for group in ("muonh", "adamh", "adam")}
    if muonh is not None:
        assert counts == {"muonh": muonh, "adamh": adamh, "adam": adam}
    if state_bytes is not None:
        assert table.state_bytes == state_bytes
    biases = config.num_layers * config.num_experts
    if parameter_bytes is not None:
        assert table.parameter_bytes == parameter_bytes
    if config is HERO:
        assert table.state_bytes == pytest.approx(2.148736e12, rel=1e-6)
        assert table.parameter_bytes == pytest.approx(2.141908e12, rel=1e-6)
        assert sum(counts.values()) + biases == 535_477_106_688
    if config is P64:
        assert sum(counts.values()) + biases == 299_616


def test_table_of_p64(shapes_of) -> None:
    table = resolve_groups(shapes_of(P64), scope="per_expert")
    assert Counter(row.group for row in table.rows) == {"muonh": 23, "adam": 11, "adamh": 1}
    assert [row.path for row in table.rows if row.decay] == [
        "blocks/attn/head_gate",
        "blocks/moe/router",
    ]
    for row in table.rows:
        name = row.path.rpartition("/")[2]
        if "gnorm" in row.path:
            assert row.group == "muonh"
        if name in ("gain", "taps", "router", "head_gate", "table"):
            assert (row.group, row.norm_scope) == ("adam", None)
    scopes = {row.path: (row.norm_scope, row.norm_axes) for row in table.rows}
    assert scopes["head/proj"] == ("matrix", (0, 1))
    assert scopes["embed_gnorm/up"] == ("matrix", (0, 1))
    assert scopes["blocks/attn/wq"] == ("per_layer", (1, 2))
    assert scopes["blocks/moe/experts/gate"] == ("per_expert", (2, 3))
    joint = resolve_groups(shapes_of(P64), scope="joint")["blocks/moe/experts/gate"]
    assert (joint.norm_scope, joint.norm_axes) == ("joint", (1, 2, 3))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("blocks/attn/wq", "blocks/attn/wqq"),
        ("blocks/attn/wq", "blocks/attention/wq"),
        ("blocks/attn_gnorm/down", "blocks/attn_gated_norm/down"),
        ("blocks/attn/head_gate", "blocks/attn/head_gate/kernel"),
        ("blocks/attn_norm/gain", "blocks/attn_norm/scale"),
        ("blocks/shared/0/gate", "blocks/shared/first/gate"),
        ("embed/table", "embed/tables"),
    ],
)
def test_a_renamed_leaf_has_no_rule(shapes_of, old: str, new: str) -> None:
    shapes = {new if path == old else path: shape for path, shape in shapes_of(P64).items()}
    with pytest.raises(OptimizerError, match=f"{new} .* has no optimizer rule"):
        resolve_groups(shapes, scope="joint")


def test_added_missing_and_misshapen_leaves(shapes_of) -> None:
    shapes = shapes_of(P64)
    with pytest.raises(OptimizerError, match="blocks/attn/bias"):
        resolve_groups(shapes | {"blocks/attn/bias": (2, 64)}, scope="joint")
    for path in shapes:
        if not path.startswith("blocks/shared/1"):
            less = {p: s for p, s in shapes.items() if p != path}
            if path.startswith("blocks/shared/0"):
                less = {p: s for p, s in less.items() if p != path.replace("/0/", "/1/")}
            with pytest.raises(OptimizerError, match="no parameter matches"):
                resolve_groups(less, scope="joint")
    with pytest.raises(OptimizerError, match="has shape"):
        resolve_groups(shapes | {"blocks/attn/wq": (64, 64)}, scope="joint")


def test_components_can_be_switched_off(shapes_of) -> None:
    shapes = {p: s for p, s in shapes_of(P64).items() if "gnorm" not in p}
    table = resolve_groups(shapes, scope="joint", components=DEFAULT_COMPONENTS - {"gated_norm"})
    assert len(table.rows) == len(shapes)
    with pytest.raises(OptimizerError, match="component gated_norm is on"):
        resolve_groups(shapes, scope="joint")
    with pytest.raises(OptimizerError, match="has no optimizer rule"):
        resolve_groups(
            shapes_of(P64), scope="joint", components=DEFAULT_COMPONENTS - {"gated_norm"}
        )


def test_the_scope_has_no_default(shapes_of) -> None:
    shapes = shapes_of(P64)
    for scope in (None, "layer"):
        with pytest.raises(OptimizerError, match="hyperball_scope"):
            resolve_groups(shapes, scope=scope)
    dense = {p: s for p, s in shapes.items() if "/moe/" not in p}
    dense |= {f"blocks/mlp/{name}": (2, 64, 192) for name in ("gate", "up", "down")}
    components = DEFAULT_COMPONENTS - {"routed", "latent", "latent_norm"} | {"dense"}
    assert resolve_groups(dense, scope=None, components=components)["blocks/mlp/up"].constrained


@pytest.mark.parametrize(
    ("change", "head", "wq", "gnorm", "num_moments"),
    [
        ({}, "adamh", "muonh", "muonh", 1),
        ({"matrix": "adamh"}, "adamh", "adamh", "adamh", 2),
        ({"matrix": "adamw"}, "adamw", "adamw", "adamw", 2),
        ({"gnorm": "adam"}, "adamh", "muonh", "adam", 1),
        ({"gnorm": "adamh"}, "adamh", "muonh", "adamh", 1),
    ],
)
def test_ablation_arms(shapes_of, change, head, wq, gnorm, num_moments) -> None:
    shapes = shapes_of(P64)
    table = resolve_groups(shapes, scope="joint", settings=replace(SETTINGS, **change))
    assert table["head/proj"].group == head
    assert table["blocks/attn/wq"].group == wq
    assert table["final_gnorm/up"].group == gnorm
    assert table["embed/table"].group == "adam"
    small = resolve_groups(shapes, scope="joint").state_bytes
    muonh = resolve_groups(shapes, scope="joint").num_parameters("muonh")
    if change.get("matrix"):
        assert table.state_bytes == small + 4 * muonh * (num_moments - 1)


def test_restore_compares_tables(shapes_of) -> None:
    shapes = shapes_of(P64)
    joint, split = (resolve_groups(shapes, scope=scope) for scope in ("joint", "per_expert"))
    stored = json.loads(json.dumps(joint.to_json()))
    joint.check_equal(stored)
    with pytest.raises(OptimizerError, match="norm_scope is joint in the checkpoint"):
        split.check_equal(stored)
    split.check_equal(stored, recorded={"norm_scope"})
    with pytest.raises(OptimizerError, match="can never be restored"):
        split.check_equal(stored, recorded={"group"})
    with pytest.raises(OptimizerError, match="differ in leaf head/proj"):
        joint.check_equal(stored[:-1])


@pytest.mark.parametrize(
    "bad",
    [
        {"matrix": "sgd"},
        {"hyperball_radius": "largest"},
        {"ns_dtype": "float8"},
        {"momentum": 1.0},
        {"ns_steps": 6},
        {"beta2": 1.0},
        {"epsilon": 0.0},
        {"clip": 0.0},
    ],
)
def test_settings_are_checked(bad: dict) -> None:
    with pytest.raises(OptimizerError, match=f"optim.{next(iter(bad))} "):
        replace(SETTINGS, **bad)


def test_settings_take_the_law() -> None:
    peak = peak_rates(10**9, 512, 2**19)
    resolved = SETTINGS.with_law(peak)
    assert (resolved.beta1, resolved.beta2, resolved.epsilon) == (0.9, peak.beta2, peak.epsilon)
    assert replace(SETTINGS, beta2=0.5).with_law(peak).beta2 == 0.5
