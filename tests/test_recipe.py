"""Recipes: what they say, and how they refuse what they cannot mean."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.errors import UsageError
from portolan.pipeline.ablation_arms import ARMS
from portolan.recipe import DataSettings, _key_lines, find_recipe, load_recipe

NAMES = ("pocket", "laptop", "single-gpu", "rack", "marin-535b")


def edited(tmp_path: Path, old: str, new: str) -> tuple[Path, int]:
    """The pocket recipe with one text replaced, and the line of the replacement."""
    text = find_recipe("pocket").read_text()
    assert old in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(old, new, 1))
    line = path.read_text()[: path.read_text().index(new)].count("\n") + 1
    return path, line


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_is_reachable_from_the_root(name: str) -> None:
    recipe = load_recipe(find_recipe(name))
    assert recipe.name == name
    root = Path(__file__).resolve().parent.parent / "recipes" / f"{name}.toml"
    assert root.read_bytes() == find_recipe(name).read_bytes()


def test_marin_shape_is_the_published_one() -> None:
    shape = load_recipe(find_recipe("marin-535b")).shape(6144)
    assert (shape.num_layers, shape.num_experts, shape.experts_per_token) == (48, 384, 8)
    assert (shape.num_kv_heads_local, shape.num_kv_heads_global) == (12, 6)


def test_rungs_do_not_inherit_the_depth_of_the_target() -> None:
    recipe = load_recipe(find_recipe("marin-535b"))
    assert recipe.shape(768).num_layers == 8


def test_single_gpu_rungs_see_the_rows_of_the_target() -> None:
    recipe = load_recipe(find_recipe("single-gpu"))
    assert {recipe.shape(w).sequence_length for w in recipe.ladder.widths} == {1024}


def test_unknown_key_names_key_file_line_and_remedy(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "vocab_size = 512", "vocab_sise = 512")
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    text = str(error.value)
    assert f"{path}, line {line}" in text
    assert "'tokenizer.vocab_sise'" in text
    assert "did you mean 'vocab_size'" in text


def test_unknown_key_in_a_source_is_found_by_its_line(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "max_bytes = 3_000_000", "max_byte = 3_000_000")
    with pytest.raises(UsageError, match=f"line {line}: unknown key .*did you mean 'max_bytes'"):
        load_recipe(path)


def test_wrong_type_names_the_value(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "width = 96", 'width = "wide"')
    with pytest.raises(UsageError, match=rf"line {line}: model.width = 'wide'.*integer"):
        load_recipe(path)


def test_a_float_is_not_an_integer(tmp_path: Path) -> None:
    path, _ = edited(tmp_path, "width = 96", "width = 96.5")
    with pytest.raises(UsageError, match=r"model\.width = 96\.5"):
        load_recipe(path)


def test_impossible_shape_names_line_and_remedy(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "width = 96", "width = 90")
    with pytest.raises(UsageError, match=rf"line {line}: width = 90.*\n.*multiple of 16"):
        load_recipe(path)


def test_impossible_override_names_its_own_line(tmp_path: Path) -> None:
    new = "width = 96\noverrides = { num_experts = 2 }"
    path, line = edited(tmp_path, "width = 96", new)
    with pytest.raises(UsageError, match=rf"line {line + 1}: experts_per_token = 2"):
        load_recipe(path)


def test_impossible_rung_points_at_the_ladder(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "widths = [32, 48, 64]", "widths = [32, 40, 64]")
    with pytest.raises(UsageError, match=rf"line {line}: width = 40"):
        load_recipe(path)


def test_missing_key_is_named(tmp_path: Path) -> None:
    path, _ = edited(tmp_path, 'hyperball_scope = "per_expert"\n', "\n")
    with pytest.raises(UsageError, match=r"required key 'optimizer.hyperball_scope' is missing"):
        load_recipe(path)


def test_unknown_installed_source_lists_the_known_ones(tmp_path: Path) -> None:
    path, _ = edited(tmp_path, 'key = "stdlib-tests"', 'key = "stdlib-jokes"')
    with pytest.raises(UsageError, match=r"'stdlib-jokes' is unknown; use one of stdlib-sources"):
        load_recipe(path)


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    path, line = edited(tmp_path, "width = 96", "width = = 96")
    with pytest.raises(UsageError, match=rf"not valid TOML.*line {line}"):
        load_recipe(path)


def test_binary_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\x00" * 10)
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(path)


def test_override_changes_value_and_digest(tmp_path: Path) -> None:
    path = find_recipe("pocket")
    plain = load_recipe(path)
    changed = load_recipe(path, ("seed=3", "model.width=128"))
    assert (changed.seed, changed.model.width) == (3, 128)
    assert plain.digest() == load_recipe(path).digest() != changed.digest()


@pytest.mark.parametrize("override", ["seed", "=3", "model.widht=3", "seed=abc", "seed.x=1"])
def test_bad_override_is_named(override: str) -> None:
    with pytest.raises(UsageError, match=re.escape(override.split("=")[0] or "--set")):
        load_recipe(find_recipe("pocket"), (override,))


def test_digest_does_not_depend_on_layout(tmp_path: Path) -> None:
    path, _ = edited(tmp_path, "seed = 0", "# a comment\nseed   =   0")
    assert load_recipe(path).digest() == load_recipe(find_recipe("pocket")).digest()


KEY = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)


@given(st.dictionaries(KEY, st.dictionaries(KEY, st.integers(), min_size=1), min_size=1))
def test_key_lines_finds_every_key(tables: dict[str, dict[str, int]]) -> None:
    lines, expected = [], {}
    for table, values in tables.items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            lines.append(f"{key} = {value}")
            expected[f"{table}.{key}"] = len(lines)
    found = _key_lines("\n".join(lines))
    assert {key: found[key] for key in expected} == expected


def test_a_fractional_dimension_is_refused(tmp_path: Path) -> None:
    new = "width = 96\noverrides = { num_experts = 8.5 }"
    path, _ = edited(tmp_path, "width = 96", new)
    with pytest.raises(UsageError, match=r"num_experts = 8\.5 must be a whole number"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("model.attention.exclusive=false", "exclusive_attention", False),
        ("model.attention.head_gate=false", "head_gate", False),
        ("model.attention.rope_fraction=1.0", "rope_fraction", 1.0),
        ("model.attention.nope_global=false", "nope_global", False),
        ("model.attention.full_kv_heads=true", "num_kv_heads_global", 6),
        ("model.conv.sites=[]", "conv_sites", ()),
        ('model.conv.sites=["mlp", "v"]', "conv_sites", ("v", "mlp")),
        ("model.conv.layers=global", "conv_layers", "global"),
        ("model.overrides.conv_taps=2", "conv_taps", 2),
        ("model.norm.gated=false", "gated_norm", False),
        ("model.moe.balance=qb_topk", "balance", "qb_topk"),
        ("model.moe.balance=softmax_aux", "combine", "softmax"),
        ("model.moe.combine=sigmoid", "combine", "sigmoid"),
        ("model.moe.latent=false", "latent_width", 96),
        ("model.moe.latent_norm=false", "latent_norm", False),
        ("model.mlp=dense", "dense_width", 288),
    ],
)
def test_a_switch_reaches_the_shape_of_every_width(override: str, field: str, value) -> None:
    path = find_recipe("pocket")
    recipe, plain = load_recipe(path, (override,)), load_recipe(path)
    assert getattr(recipe.shape(96), field) == value != getattr(plain.shape(96), field)
    assert getattr(recipe.shape(48), field) != getattr(plain.shape(48), field)
    assert recipe.digest() != plain.digest()


def test_the_reference_model_sets_no_switch() -> None:
    recipe = load_recipe(find_recipe("pocket"))
    assert recipe.model.switches() == {}
    assert recipe.canonical()["model"]["moe"]["balance"] == "qb_hist"


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (("model.moe.latent=false", "model.moe.latent_norm=true"), "moe.latent_norm", "leave it"),
        (("model.mlp=dense", "model.moe.balance=none"), "moe.balance", "leave it out"),
        (("model.moe.match_routed_flops=true",), "moe.match_routed_flops", "latent = false too"),
        (("model.moe.aux_weight=0.1",), "moe.aux_weight", "set model.moe.balance too"),
        (
            ("model.moe.balance=softmax_aux", "model.moe.combine=sigmoid"),
            "moe.combine",
            "leave it out",
        ),
        (("model.conv.sites=[]", "model.conv.layers=global"), "conv.layers", "name a site"),
        (("model.overrides.rope_fraction=1.0",), "rope_fraction", "set model.attention.rope_f"),
        (
            ("model.norm.gated=false", "optimizer.gated_norm=adam"),
            "optimizer.gated_norm",
            "leave it out",
        ),
        (("model.attention.rope_fraction=0.3",), "rope_fraction", "multiple of 0.125"),
        (('model.conv.sites=["k", "k"]',), "conv.sites", "listed twice"),
        (("model.moe.balance=best",), "moe.balance", "qb_hist"),
        (("optimizer.matrix=sgd",), "optimizer.matrix", "adamw"),
        (
            ("data.fuzzy.enabled=false", "data.fuzzy.containment=0.75"),
            "data.fuzzy.containment",
            "leave this key out",
        ),
    ],
)
def test_a_contradiction_names_key_place_and_remedy(overrides, key: str, remedy: str) -> None:
    with pytest.raises(UsageError) as error:
        load_recipe(find_recipe("pocket"), overrides)
    text = str(error.value)
    assert f"--set {overrides[-1]}" in text
    assert key in text
    assert remedy in text


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"embedding": {"dimension": 128}}, "embedding.dimension"),
        ({"domains": {"fine": 64}}, "domains.fine"),
        ({"quality": {"labeller": "heuristic"}}, "quality.labeller"),
        ({"domains": {"count": 4}, "quality": {"seed": 1}}, "quality.seed"),
        ({"decontamination": {"enabled": False, "fold": "none"}}, "decontamination.fold"),
    ],
)
def test_a_data_key_that_nothing_reads_is_a_contradiction(tables, key: str) -> None:
    source = {"key": "a", "kind": "text", "path": "in"}
    settings = DataSettings.model_validate_json(json.dumps({"sources": [source], **tables}))
    assert key in [name for name, _, _ in settings.contradictions()]


def test_every_arm_of_the_ablation_suite_is_a_recipe() -> None:
    path, plain = find_recipe("pocket"), load_recipe(find_recipe("pocket"))
    for arm in ARMS:
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in arm.settings.items())
        changed = load_recipe(path, overrides).digest() != plain.digest()
        assert changed == bool(arm.settings), arm.name
