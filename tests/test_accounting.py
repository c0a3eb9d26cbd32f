"""Counts of parameters, FLOPs and bytes against published figures (marin #8435)."""

import dataclasses

import pytest

from portolan import accounting
from portolan.accounting import forward_flops_per_token
from portolan.errors import UsageError
from portolan.shapes import derive_shape

# width: total, active, published FLOPs per token, causal FLOPs per token.
LADDER = {
    384: (273_900_032, 8_060_928, 130_443_264, 124_907_915.25),
    512: (597_608_192, 20_840_448, 202_547_200, 194_113_560),
    768: (1_591_848_448, 60_555_264, 381_394_944, 359_253_549),
    1024: (3_980_116_480, 162_004_992, 711_671_808, 667_389_018),
    1280: (7_098_266_112, 291_307_520, 1_088_286_720, 1_029_644_935),
    1536: (11_534_398_464, 481_296_384, 1_603_436_544, 1_514_870_964),
    2048: (27_742_902_528, 1_170_735_104, 3_311_960_064, 3_158_040_912),
    6144: (535_477_106_688, 22_762_487_808, 49_912_086_528, 48_849_299_568),
}
SMALL = {
    32: (63_024, 16_896, 84_480, 82_345),
    64: (299_616, 67_584, 337_920, 327_122),
    128: (2_110_656, 319_488, 1_961_984, 1_919_890),
    256: (18_895_104, 3_342_336, 13_529_088, 12_591_390),
    384: (53_508_480, 7_520_256, 25_251_840, 23_856_030),
}


def ladder(width):
    return derive_shape("ladder", width, **({"num_layers": 48} if width == 6144 else {}))


TARGET = ladder(6144)


def leaf_sizes(config):
    """Independent oracle: number of entries of every leaf of the parameter tree."""
    vocab, width, layers, rank = (
        config.vocab_size, config.width, config.num_layers, config.gated_norm_rank,
    )  # fmt: skip
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    latent, inner, experts = config.latent_width, config.expert_width, config.num_experts
    block = [width, width * rank, rank * width]
    return {
        "embedding": [vocab * width, *block],
        "attention": [
            layers * n
            for n in (*block, width * query, width * kv, width * kv, query * width,
                      width * config.num_heads, config.conv_taps * kv, config.conv_taps * width)
        ],
        "experts": [
            layers * n
            for n in (*block, width * experts, experts, width * latent, latent, latent * width,
                      *[experts * latent * inner] * 3,
                      *[width * config.shared_width] * 3 * config.num_shared_experts,
                      config.conv_taps * width)
        ],
        "head": [*block, width * vocab],
    }  # fmt: skip


@pytest.mark.parametrize("family_rows", [("ladder", LADDER), ("small", SMALL)])
def test_published_rows(family_rows):
    family, rows = family_rows
    for width, (total, active, published, causal) in rows.items():
        config = ladder(width) if family == "ladder" else derive_shape("small", width)
        assert accounting.total_parameters(config) == total
        assert accounting.active_parameters(config) == active
        assert forward_flops_per_token(config) == published
        assert forward_flops_per_token(config, "causal") == causal


@pytest.mark.parametrize("family", ["ladder", "small", "micro"])
def test_total_is_the_sum_over_leaves(family):
    for width in {"ladder": LADDER, "small": SMALL, "micro": (32, 48, 96)}[family]:
        config = ladder(width) if family == "ladder" else derive_shape(family, width)
        leaves = sum(sum(sizes) for sizes in leaf_sizes(config).values())
        assert accounting.total_parameters(config) == leaves
        groups = accounting.count_optimizer_groups(config)
        assert groups.trained + config.num_layers * config.num_experts == leaves


def test_components_of_the_target():
    counts = accounting.count_parameters(TARGET)
    per_layer = {
        "attention": 94_666_752,
        "convolutions": 55_296,
        "router": 2_359_680,
        "latent": 37_751_808,
        "routed_experts": 10_871_635_968,
        "shared_experts": 113_246_208,
    }
    for name, size in per_layer.items():
        assert getattr(counts, name) == 48 * size
    assert counts.norms == 48 * 3_158_016 + 2 * (6144 + 2 * 6144 * 128)
    assert accounting.matrices_only_parameters(TARGET) == 535_305_388_032
    assert accounting.active_used_parameters(TARGET) == 22_649_241_600
    assert accounting.active_with_head_parameters(TARGET) == 23_550_492_672


def test_conventions_of_the_target():
    figures = {
        "published": (49_912_086_528, 1),
        "no_latent_correction": (6.80315e10, 1.36303),
        "causal": (48_849_299_568, 0.97871),
        "full": (49_192_970_352, 0.98559),
        "no_head": (48_336_076_800, 0.96842),
    }
    assert set(figures) == set(accounting.CONVENTIONS)
    for name, (flops, ratio) in figures.items():
        found = forward_flops_per_token(TARGET, name)
        assert found == pytest.approx(flops, rel=1e-6)
        assert found / 49_912_086_528 == pytest.approx(ratio, abs=5e-6)
    with pytest.raises(UsageError, match="dense"):
        forward_flops_per_token(TARGET, "dense")


def test_training_flops():
    rows = {
        384: (12_162 * 128, 2.49527e18, 6.11037e17),
        512: (15_721 * 256, 1.00168e19, 3.52177e18),
        768: (11_420 * 1024, 5.48053e19, 2.64968e19),
        1024: (15_276 * 2048, 2.73590e20, 1.72612e20),
        1536: (15_128 * 6144, 1.83133e21, 1.38133e21),
        2048: (20_072 * 11_264, 9.20131e21, 7.74181e21),
        6144: (390_251 * 11_264, 2.69602e24, 2.61089e24),
    }
    for width, (sequences, with_head, without) in rows.items():
        tokens = 4096 * sequences
        config = ladder(width)
        assert accounting.training_flops(config, tokens) == pytest.approx(with_head, rel=5.1e-6)
        found = accounting.training_flops(config, tokens, "no_head")
        assert isinstance(found, int)
        assert found == pytest.approx(without, rel=5.1e-6)
    tokens = 390_251 * 11_264 * 4096
    assert accounting.rule_of_thumb_flops(TARGET, tokens) == pytest.approx(2.4591e24, rel=2e-5)
    with_head = accounting.rule_of_thumb_flops(TARGET, tokens, with_head=True)
    assert with_head == pytest.approx(2.5442e24, rel=2e-5)


def test_longer_sequences_cost_more():
    figures = {
        8192: 51_127_123_968,
        16_384: 53_557_198_848,
        65_536: 68_137_648_128,
        262_144: 126_459_445_248,
    }
    for length, flops in figures.items():
        longer = dataclasses.replace(TARGET, sequence_length=length)
        assert forward_flops_per_token(longer) == flops


@pytest.mark.parametrize("family", ["small", "micro"])
def test_causal_attention_equals_a_count_of_pairs(family):
    config = derive_shape(family, 64)
    length, window = config.sequence_length, config.window
    keys = {
        True: sum(i + 1 for i in range(length)) / length,
        False: sum(min(i + 1, window) for i in range(length)) / length,
    }
    scores = sum(
        (4 * config.head_dim + 3) * config.num_heads * keys[is_global]
        for is_global in config.global_layers
    )
    no_keys = dataclasses.replace(config, sequence_length=1, window=1)
    one_key = config.num_layers * (4 * config.head_dim + 3) * config.num_heads
    expected = forward_flops_per_token(no_keys, "causal") - one_key + scores
    assert float(forward_flops_per_token(config, "causal")) == pytest.approx(float(expected))


def test_state_bytes_and_groups():
    rung = ladder(768)
    groups = accounting.count_optimizer_groups(rung)
    assert dataclasses.astuple(groups) == (1_392_377_856, 98_500_608, 100_966_912, 0)
    state = accounting.state_bytes(rung)
    assert (state.optimizer, state.parameters) == (7_165_251_584, 6_367_381_504)
    assert state.total == 2 * 6_367_381_504 + 7_165_251_584
    groups = accounting.count_optimizer_groups(TARGET)
    assert dataclasses.astuple(groups) == (533_770_272_768, 788_004_864, 918_810_624, 0)
    assert accounting.state_bytes(TARGET).optimizer == pytest.approx(2.148736e12, rel=1e-6)
    assert accounting.state_bytes(TARGET).parameters == pytest.approx(2.141908e12, rel=1e-6)


def test_published_utilisation():
    """Figures of marin #7334 and #8435, in percent."""
    published = accounting.utilisation(TARGET, 237_310, 64, "NVIDIA GB200")
    assert published is not None
    assert 100 * published.value == pytest.approx(22.21, abs=0.005)
    assert "published FLOPs" in str(published)
    assert "2.5e+15" in str(published)
    whole = accounting.utilisation(TARGET, 46_137_344 / 16.8, 704, "GB200")
    assert whole is not None
    assert 100 * whole.value == pytest.approx(23.36, abs=0.005)
    lengths = {4096: (301_900, 28.25), 8192: (297_000, 28.47), 16_384: (292_500, 29.37)}
    for length, (rate, percent) in lengths.items():
        config = dataclasses.replace(TARGET, sequence_length=length)
        found = accounting.utilisation(config, rate, 64, "GB200")
        assert found is not None
        assert 100 * found.value == pytest.approx(percent, abs=0.006)


def test_unknown_peak_gives_no_utilisation():
    for device in ("cpu", "TFRT_CPU_0", "Apple M3", "NVIDIA X9000", ""):
        assert accounting.utilisation(TARGET, 1000.0, 1, device) is None
    with pytest.raises(UsageError):
        accounting.utilisation(TARGET, float("nan"), 1, "GB200")
    with pytest.raises(UsageError):
        accounting.utilisation(TARGET, 1.0, 0, "GB200")


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("TPU v5 lite", 1.97e14),
        ("TPU v5p", 4.59e14),
    ],
)
def test_device_names(device, peak):
    assert accounting.peak_flops_per_second(device) == peak


def section_nine_terms(config):
    """Forward FLOPs of one token by term, written out as in parallel.md 9."""
    layers, width, heads, size = (
        config.num_layers, config.width, config.num_heads, config.head_dim,
    )  # fmt: skip
    num_global = layers // config.global_every
    spans = [config.sequence_length] * num_global
    spans += [min(config.sequence_length, config.window)] * (layers - num_global)
    kv_heads = [config.num_kv_heads_global] * num_global
    kv_heads += [config.num_kv_heads_local] * (layers - num_global)
    inner = config.latent_width * config.expert_width * config.experts_per_token
    return {
        "routed": layers * 6 * inner,
        "shared": layers * 6 * width * config.shared_width * config.num_shared_experts,
        "router": layers * 2 * width * config.num_experts,
        "output": layers * 2 * width**2,
        "latent": layers * 4 * width * config.latent_width,
        "qkv": sum(2 * width * (heads * size + 2 * kv * size) for kv in kv_heads),
        "attention": sum(4 * s * heads * size + 3 * s * heads for s in spans),
        "head": 2 * width * config.vocab_size,
    }


def test_terms_of_the_public_convention():
    terms = section_nine_terms(TARGET)
    assert {name: round(value / 1e9, 3) for name, value in terms.items()} == {
        "routed": 21.743,
        "shared": 10.872,
        "router": 0.226,
        "output": 3.624,
        "latent": 3.624,
        "qkv": 5.209,
        "attention": 3.038,
        "head": 1.576,
    }
    assert sum(terms.values()) == forward_flops_per_token(TARGET) == 49_912_086_528
    assert accounting.routed_flops_per_token(TARGET) == terms["routed"]
    assert accounting.training_flops(TARGET, 1) == 149_736_259_584
    assert accounting.training_flops(TARGET, 18 * 10**12) == pytest.approx(2.6953e24, rel=3e-5)


def test_a_small_shape_of_the_public_convention():
    small = dataclasses.replace(
        TARGET,
        **{"width": 256, "num_layers": 4, "num_heads": 2, "num_experts": 8},
        **{"num_kv_heads_local": 1, "num_kv_heads_global": 1, "experts_per_token": 2},
        **{"latent_width": 128, "expert_width": 128, "shared_width": 128},
        **{"num_shared_experts": 1, "sequence_length": 512, "window": 256, "vocab_size": 1024},
    )
    assert forward_flops_per_token(small) == sum(section_nine_terms(small).values()) == 5_529_088


def test_utilisation_without_dropped_rows():
    """3.4 % of drops cost 1.48 % of MFU: the share of the routed experts times the drops."""
    share = accounting.routed_flops_per_token(TARGET) / 49_912_086_528
    assert share == pytest.approx(0.43563, abs=5e-6)
    adjusted = accounting.without_dropped_rows(0.2, TARGET, 0.034)
    assert 1 - adjusted / 0.2 == pytest.approx(0.0148, abs=5e-5)


def test_newton_schulz_flops_by_hand():
    # X [2, 3]: X X^T 24, its square 16, the product with X 24.
    assert accounting.newton_schulz_flops(2, 3, 1) == 24 + 16 + 24
    assert accounting.newton_schulz_flops(2, 3) == 5 * 64
