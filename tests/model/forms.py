"""Every switch of the model away from its default, and what that must do to the parameter tree."""

from dataclasses import dataclass, field
from typing import Any

ROUTED = {
    "blocks/moe/router",
    "blocks/moe/latent_down",
    "blocks/moe/latent_norm/gain",
    "blocks/moe/latent_up",
    *(f"blocks/moe/experts/{name}" for name in ("gate", "up", "down")),
    *(f"blocks/shared/{j}/{name}" for j in (0, 1) for name in ("gate", "up", "down")),
}
EXPERTS = {f"blocks/moe/experts/{name}" for name in ("gate", "up", "down")}
CONVS = {"blocks/attn/k_conv/taps", "blocks/attn_conv/taps", "blocks/mlp_conv/taps"}
GATED_NORMS = {
    f"{place}_gnorm/{name}"
    for place in ("embed", "blocks/attn", "blocks/mlp", "final")
    for name in ("down", "up")
}
LATENT = {"blocks/moe/latent_down", "blocks/moe/latent_norm/gain", "blocks/moe/latent_up"}


@dataclass(frozen=True)
class Form:
    """Arguments of `derive_shape`, and the leaves that leave, come or change their shape."""

    fields: dict[str, Any]
    removed: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    reshaped: set[str] = field(default_factory=set)


FORMS: dict[str, Form] = {
    "no-exclusive": Form({"exclusive_attention": False}),
    "no-head-gate": Form({"head_gate": False}, removed={"blocks/attn/head_gate"}),
    "full-rotary": Form({"rope_fraction": 1.0}),
    "rotary-in-global": Form({"nope_global": False}),
    "full-kv": Form(
        {"full_kv_heads": True},
        reshaped={"blocks/attn/wk", "blocks/attn/wv", "blocks/attn/k_conv/taps"},
    ),
    "no-conv": Form({"conv_sites": ()}, removed=CONVS),
    "conv-k": Form({"conv_sites": ("k",)}, removed=CONVS - {"blocks/attn/k_conv/taps"}),
    "conv-on-values": Form(
        {"conv_sites": ("k", "v", "attn", "mlp")}, added={"blocks/attn/v_conv/taps"}
    ),
    "conv-global": Form({"conv_layers": "global"}, reshaped=CONVS),
    "conv-2-taps": Form({"conv_taps": 2}, reshaped=CONVS),
    "plain-norm": Form({"gated_norm": False}, removed=GATED_NORMS),
    "qb-topk": Form({"balance": "qb_topk"}),
    "softmax-aux": Form({"balance": "softmax_aux"}),
    "no-balance": Form({"balance": "none"}),
    "combine-sigmoid": Form({"combine": "sigmoid"}),
    "combine-softmax": Form({"combine": "softmax"}),
    "no-latent": Form({"latent": False}, removed=LATENT, reshaped=EXPERTS),
    "no-latent-norm": Form({"latent_norm": False}, removed={"blocks/moe/latent_norm/gain"}),
    "no-latent-equal-flops": Form(
        {"latent": False, "match_routed_flops": True}, removed=LATENT, reshaped=EXPERTS
    ),
    "no-shared": Form(
        {"num_shared_experts": 0}, removed={path for path in ROUTED if "/shared/" in path}
    ),
    "one-shared": Form(
        {"num_shared_experts": 1}, removed={path for path in ROUTED if "/shared/1" in path}
    ),
    "bare-experts": Form(
        {"num_shared_experts": 0, "latent": False},
        removed=LATENT | {path for path in ROUTED if "/shared/" in path},
        reshaped=EXPERTS,
    ),
    "dense": Form(
        {"mlp": "dense"},
        removed=ROUTED,
        added={f"blocks/mlp/{name}" for name in ("gate", "up", "down")},
    ),
    "all-global": Form({"global_every": 1}),
    "no-qk-multiplier": Form({"qk_multiplier": 1.0}),
    "wide-window": Form({"window": 9}),
}
"""By the name of the arm; each changes one thing, but for `bare-experts`."""
