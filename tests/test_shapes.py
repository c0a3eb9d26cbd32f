"""Shapes of every family against published tables, and every refusal."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.canonical import stringify_floats
from portolan.shapes import ShapeError, config_from_json, derive_shape, qk_multiplier

# width: layers, heads, local and global KV heads, number of global layers (marin #8435).
LADDER = {
    384: (4, 3, 1, 1, 1),
    512: (6, 4, 1, 1, 2),
    768: (8, 6, 1, 1, 2),
    1024: (12, 8, 2, 1, 3),
    1280: (14, 10, 2, 1, 4),
    1536: (16, 12, 3, 1, 4),
    2048: (22, 16, 4, 2, 6),
    6144: (48, 48, 12, 6, 12),
}
# width: layers, heads, head size, local and global KV heads, experts, experts per token, rank,
# sequence length, window, vocabulary.
SMALL = {
    32: (2, 4, 8, 1, 1, 8, 2, 8, 128, 64, 512),
    64: (2, 8, 8, 2, 1, 16, 2, 16, 256, 128, 1024),
    128: (2, 8, 16, 2, 1, 32, 4, 32, 512, 256, 4096),
    256: (4, 8, 32, 2, 1, 64, 8, 64, 1024, 512, 8192),
    384: (4, 8, 48, 2, 1, 96, 8, 96, 1024, 512, 8192),
}


@pytest.mark.parametrize("width", LADDER)
def test_ladder_rows(width):
    overrides = {"num_layers": 48} if width == 6144 else {}
    config = derive_shape("ladder", width, **overrides)
    found = (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads_local,
        config.num_kv_heads_global,
        sum(config.global_layers),
    )
    assert found == LADDER[width]
    assert config.head_dim == config.gated_norm_rank == 128
    assert config.latent_width == config.expert_width == config.shared_width == width // 2
    assert (config.num_experts, config.experts_per_token, config.num_shared_experts) == (384, 8, 2)
    assert (config.sequence_length, config.window, config.conv_taps) == (4096, 2048, 4)


@pytest.mark.parametrize(
    ("width", "layers"),
    [(384, 4), (512, 6), (768, 8), (1024, 12), (1280, 14), (1536, 16), (2048, 22), (2560, 26),
     (4992, 48), (6144, 58)],
)  # fmt: skip
def test_depth_rule(width, layers):
    assert derive_shape("ladder", width).num_layers == layers


@pytest.mark.parametrize("width", SMALL)
def test_small_rows(width):
    config = derive_shape("small", width)
    found = (
        config.num_layers,
        config.num_heads,
        config.head_dim,
        config.num_kv_heads_local,
        config.num_kv_heads_global,
        config.num_experts,
        config.experts_per_token,
        config.gated_norm_rank,
        config.sequence_length,
        config.window,
        config.vocab_size,
    )
    assert found == SMALL[width]
    assert config.qb_bins == (10_000 if width == 384 else 1_000)


@pytest.mark.parametrize("width", [32, 48, 64, 96, 192])
def test_micro_fixes_everything_but_the_width(width):
    config = derive_shape("micro", width)
    assert (config.head_dim, config.num_layers, config.vocab_size) == (16, 4, 512)
    assert (config.num_experts, config.experts_per_token) == (32, 2)
    assert (config.sequence_length, config.window, config.qb_bins) == (128, 64, 1000)


def test_smaller_heads_make_room_for_micro_widths_between():
    config = derive_shape("micro", 40, head_dim=8)
    assert (config.num_heads, config.head_dim, config.latent_width) == (5, 8, 20)
    assert (config.num_kv_heads_local, config.num_kv_heads_global) == (1, 1)
    for width, head_dim in ((40, 16), (36, 8), (8, 8), (40, 0)):
        with pytest.raises(ShapeError, match=f"width = {width} is not in family 'micro'"):
            derive_shape("micro", width, head_dim=head_dim)


def test_kv_heads_fall_to_a_divisor():
    config = derive_shape("ladder", 14 * 128)
    assert (config.num_heads, config.num_kv_heads_local, config.num_kv_heads_global) == (14, 2, 1)
    wide = derive_shape("ladder", 2560)
    assert (wide.num_kv_heads_local, wide.num_kv_heads_global) == (5, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 64}, "not the width"),
        ({"head_dim": 6, "num_heads": 128}, "multiple of 4"),
        ({"num_kv_heads_local": 4}, "does not divide num_heads"),
        ({"num_kv_heads_global": 4}, "does not divide num_heads"),
        ({"num_kv_heads_local": 2, "num_kv_heads_global": 3}, "stored KV heads"),
        ({"num_kv_heads_local": 3, "num_kv_heads_global": 2}, "stored KV heads"),
        ({"experts_per_token": 384}, "experts_per_token"),
        ({"experts_per_token": 0}, "experts_per_token"),
        ({"latent_width": 769}, "latent_width"),
        ({"window": 0}, "window"),
        ({"conv_taps": 0}, "conv_taps"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    config = derive_shape("ladder", 768)
    with pytest.raises(ShapeError, match=words):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_fraction": 0.3}, "rope_fraction = 0.3 rotates 38.4 of the 128"),
        ({"rope_fraction": 1.5}, "rope_fraction = 1.5"),
        ({"rope_fraction": 0.0}, "rope_fraction = 0.0"),
        ({"conv_sites": ("attn", "k")}, "conv_sites"),
        ({"conv_sites": ("k", "q")}, "conv_sites"),
        ({"latent": False}, "latent = False feeds the experts at full width"),
        ({"balance": "softmax_aux"}, "combine = 'sigmoid_renormalised'"),
        ({"mlp": "dense"}, "num_experts is set"),
        ({"dense_width": 64}, "dense_width = 64 needs mlp = 'dense'"),
        ({"aux_weight": -1.0}, "aux_weight = -1.0 is negative"),
    ],
)
def test_impossible_forms_are_refused(change, words):
    config = derive_shape("ladder", 768)
    with pytest.raises(ShapeError, match=words):
        dataclasses.replace(config, **change)


def test_a_dense_shape_has_no_routed_dimension():
    config = derive_shape("micro", 64, mlp="dense", num_experts=16)
    assert (config.dense_width, config.balance, config.latent) == (192, "none", False)
    assert (config.num_experts, config.latent_width, config.qb_bins) == (0, 0, 0)
    with pytest.raises(ShapeError, match="dense_width"):
        dataclasses.replace(config, dense_width=0)


@pytest.mark.parametrize("form", [{}, {"mlp": "dense"}, {"conv_sites": ("v", "mlp")}])
def test_a_shape_survives_the_json_of_a_record(form):
    config = derive_shape("micro", 64, **form)
    text = json.dumps(stringify_floats(dataclasses.asdict(config)))
    assert config_from_json(json.loads(text)) == config
    with pytest.raises(TypeError, match="depth"):
        config_from_json({"depth": 3})


def test_expert_parallel_degree_must_divide_the_experts():
    config = derive_shape("ladder", 768)
    config.check_expert_parallel(64)
    with pytest.raises(ShapeError, match="7"):
        config.check_expert_parallel(7)


@pytest.mark.parametrize(
    ("family", "width"), [("ladder", 320), ("ladder", 700), ("small", 416), ("small", 40),
                          ("micro", 40), ("micro", 0), ("huge", 768)],
)  # fmt: skip
def test_foreign_widths_are_refused(family, width):
    with pytest.raises(ShapeError):
        derive_shape(family, width)


def test_unknown_override_is_refused():
    with pytest.raises(ShapeError, match="depth"):
        derive_shape("ladder", 768, depth=3)


def test_query_key_multiplier_table():
    lengths = {4096: 1.3, 8192: 1.39011, 16_384: 1.48022, 65_536: 1.66044, 262_144: 1.84065}
    for length, value in lengths.items():
        assert qk_multiplier(length, 4096) == pytest.approx(value, abs=5e-6)


@given(st.integers(3, 100))
def test_every_ladder_width_gives_a_valid_shape(heads):
    config = derive_shape("ladder", 128 * heads)
    assert config.num_heads % config.num_kv_heads_local == 0
    assert config.num_kv_heads_local % config.num_kv_heads_global == 0
    assert config.num_layers % 2 == 0
    assert config.global_layers[-1]
