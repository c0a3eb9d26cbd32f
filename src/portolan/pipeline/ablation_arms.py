"""The arms of the ablation suite: what each changes in the recipe, and what was reported of it.

One arm changes one thing. The reported effects are those of the public run's record, at the scale
named beside them (marin issue numbers). A signed number is the Paloma macro loss of the arm minus
that of its baseline in nats per token, at equal tokens; a number with x is a multiple of compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE = "baseline"
TUNED = "tuned"
NOT_REPORTED = "no number on record"


@dataclass(frozen=True)
class Arm:
    """One variant of the recipe.

    `sweeps_rate`: it first looks for its own best learning rate. `against`: what it is compared
    with, the baseline or another arm.
    """

    name: str
    change: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reported: str = NOT_REPORTED
    scale: str = ""
    source: str = ""
    sweeps_rate: bool = False
    against: str = BASELINE


ARMS: tuple[Arm, ...] = (
    Arm(TUNED, "the recipe at its own best learning rate", sweeps_rate=True),
    Arm("adamw", "AdamW for all matrices and the head", {"optimizer.matrix": "adamw"},
        "hyperball instead of weight decay: 20-30 % fewer tokens", "up to 1.2B parameters",
        "arXiv 2606.16899", sweeps_rate=True, against=TUNED),
    Arm("adamh", "Adam directions on the hyperball for all matrices", {"optimizer.matrix": "adamh"},
        "+0.0562, +0.0351, +0.0248, +0.0177, costing 1.33, 1.26, 1.22, 1.19x in time; in a fast "
        "track about 1.6x compute", "d512, d768, d1024, d1280", "#5596, #5597, #9288",
        sweeps_rate=True, against=TUNED),
    Arm("dense", "one SwiGLU of 3 widths a layer instead of router, experts and shared experts",
        {"model.mlp": "dense"}, "MoE needs about 4.2x less compute", "20 tokens a parameter",
        "fast_track README"),
    Arm("plain-norm-no-gate", "neither gated norms nor head gates",
        {"model.norm.gated": False, "model.attention.head_gate": False},
        "+0.0296, +0.0276, +0.0142", "d512, d768, d1024", "#5726"),
    Arm("plain-norm", "RMSNorm with gain instead of gated norms", {"model.norm.gated": False}),
    Arm("no-head-gate", "no head gates", {"model.attention.head_gate": False}, "removal fails",
        "no number on record", "#4716"),
    Arm("full-kv", "as many key and value heads as query heads",
        {"model.attention.full_kv_heads": True}, "-0.0222 = 1.18x", "d768", "#8227"),
    Arm("no-conv", "no short convolutions", {"model.conv.sites": []},
        "convolutions on k, v, attention, MLP: -0.023 = 1.186x", "d1024", "#7585"),
    Arm("conv-k", "convolution on keys only", {"model.conv.sites": ["k"]},
        "1.051x over none", "d1024", "#7585"),
    Arm("conv-mlp", "convolution after the MLP only", {"model.conv.sites": ["mlp"]},
        "1.079x over none", "d1024", "#7585"),
    Arm("conv-values", "convolution on values as well",
        {"model.conv.sites": ["k", "v", "attn", "mlp"]}, "removal costs about 2 %",
        "no scale on record", "#8227"),
    Arm("conv-global", "convolutions in global layers only", {"model.conv.layers": "global"},
        "1.098x over none, against 1.186x in all layers", "d1024", "#7585"),
    Arm("conv-2-taps", "convolutions of 2 taps", {"model.overrides.conv_taps": 2},
        "1.133x over none, against 1.186x of 4", "d1024", "#7585"),
    Arm("conv-3-taps", "convolutions of 3 taps", {"model.overrides.conv_taps": 3},
        "1.178x over none, against 1.186x of 4", "d1024", "#7585"),
    Arm("no-exclusive", "attention keeps a token's own value", {"model.attention.exclusive": False},
        "tiny in loss", "no number on record", "#8227, #4772"),
    Arm("full-rotary", "rotary on all of a head", {"model.attention.rope_fraction": 1.0}),
    Arm("rotary-in-global", "rotary in global layers too", {"model.attention.nope_global": False}),
    Arm("all-global", "every layer global", {"model.overrides.global_every": 1}),
    Arm("no-qk-multiplier", "queries not multiplied by 1.3",
        {"model.overrides.qk_multiplier": 1.0}),
    Arm("qb-topk", "quantile balancing by a top-k of margins", {"model.moe.balance": "qb_topk"},
        "loss-neutral", "no scale on record", "#8278"),
    Arm("softmax-aux", "softmax router with auxiliary loss", {"model.moe.balance": "softmax_aux"}),
    Arm("no-balance", "no balancing", {"model.moe.balance": "none"}),
    Arm("combine-sigmoid", "combine weights not rescaled to 2.5", {"model.moe.combine": "sigmoid"},
        "-0.0002 (neutral)", "no scale on record", "#8227"),
    Arm("combine-softmax", "softmax over the selected logits, times 2.5",
        {"model.moe.combine": "softmax"}),
    Arm("no-latent", "routed experts at full width, same inner width",
        {"model.moe.latent": False}, "neutral at equal tokens", "fast track", "#9288"),
    Arm("no-latent-equal-flops", "routed experts at full width, same FLOPs",
        {"model.moe.latent": False, "model.moe.match_routed_flops": True},
        "latent without its norm was worse than none: bits per byte 1.0662, not 1.0481", "d1024",
        "#4378"),
    Arm("no-latent-norm", "no norm in the latent", {"model.moe.latent_norm": False},
        "called critical", "no number on record", "#8227, #6822"),
    Arm("no-shared", "no shared expert", {"model.overrides.num_shared_experts": 0}),
    Arm("one-shared", "one shared expert", {"model.overrides.num_shared_experts": 1}),
    Arm("gated-norm-adam", "gated norms in the Adam group", {"optimizer.gated_norm": "adam"},
        "+0.0082, +0.0040", "d512, d1024", "#5735, #5750"),
    Arm("gated-norm-adamh", "gated norms by AdamH", {"optimizer.gated_norm": "adamh"},
        "+0.0013, +0.0038", "d512, d1024", "#5735, #5750"),
    Arm("joint-scope", "one hyperball over all experts of a layer",
        {"optimizer.hyperball_scope": "joint"}, "3.015 against 3.018 (noise)",
        "no scale on record", "#8749, #8621"),
    Arm("no-decay", "no decay of router and head gate", {"optimizer.gate_router_decay": 0.0},
        "within 0.003", "d768, d1024", "#8818"),
    Arm("no-z-loss", "no z-loss on the logits", {"train.z_weight": 0.0},
        "+0.0016, -0.0004 (neutral)", "d512, d768", "#4803"),
)  # fmt: skip
"""The suite, most telling first: an interrupted one has those."""
