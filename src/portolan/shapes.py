"""What a width implies: the shape of the model in each family of widths.

One width sets every other dimension, so that small rungs and the target are the same recipe.
Families: `ladder` (width >= 384, head size 128, as in the public run, marin #8435), `small`
(32..384, keeps the ratios) and `micro` (fixed small experts and context, for two cores).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from portolan.errors import UsageError

Family = Literal["ladder", "small", "micro"]
Mlp = Literal["moe", "dense"]
ConvSite = Literal["k", "v", "attn", "mlp"]
ConvLayers = Literal["all", "global"]
Balance = Literal["qb_hist", "qb_topk", "softmax_aux", "none"]
Combine = Literal["sigmoid_renormalised", "sigmoid", "softmax"]
Remat = Literal["none", "experts", "layer"]
"""What the backward pass computes again: only what costs little, also the products of the routed
experts, or whole layers, of which nothing but the input is kept."""
CONV_SITES: tuple[ConvSite, ...] = get_args(ConvSite)
"""In the order in which a shape lists them."""

QK_MULTIPLIER_AT_START = 1.3
"""Multiplier on normalised queries at the length a run starts with."""
COMBINE_WEIGHT_SUM = 2.5
"""Sum of the combine weights of the selected experts of a token, at every width."""
ROPE_THETA = 10_000.0
INIT_STD_TIMES_SQRT_WIDTH = 0.5
LADDER_VOCABULARY = 128_256
MICRO_HEAD_DIM = 16
DENSE_OVER_WIDTH = 3
"""Inner width of the SwiGLU of a dense layer, over the width."""
EXPERT_WIDTH_STEP = 8
"""An expert width matched in FLOPs is rounded to a multiple of this."""
ROUTED_DIMENSIONS = (
    "num_experts",
    "experts_per_token",
    "latent_width",
    "expert_width",
    "num_shared_experts",
    "shared_width",
    "qb_bins",
)
"""Fields that are 0 in a dense model, which has no router and no experts."""


class ShapeError(UsageError):
    """An impossible combination of dimensions or forms."""


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and forms of one model; hashable: a static argument of a jitted step.

    `window` counts the keys that a local layer sees, itself included; layer i is global when
    (i + 1) % global_every == 0 or it is the last one. The fields with a default choose between
    the reference form of a component (the default) and a plain one; a tensor that the form does
    not need is in no tree and no count. `rope_fraction` is the share of a head that local layers
    rotate; without `nope_global` global layers rotate it too. `latent` off feeds the experts at
    full width. `aux_weight` and `router_z_weight` act only with `balance = "softmax_aux"`.
    """

    vocab_size: int
    sequence_length: int
    width: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_kv_heads_local: int
    num_kv_heads_global: int
    num_experts: int
    experts_per_token: int
    latent_width: int
    expert_width: int
    num_shared_experts: int
    shared_width: int
    gated_norm_rank: int
    conv_taps: int
    window: int
    global_every: int
    qk_multiplier: float
    qb_bins: int
    mlp: Mlp = "moe"
    dense_width: int = 0
    exclusive_attention: bool = True
    head_gate: bool = True
    rope_fraction: float = 0.5
    nope_global: bool = True
    conv_sites: tuple[ConvSite, ...] = ("k", "attn", "mlp")
    conv_layers: ConvLayers = "all"
    gated_norm: bool = True
    balance: Balance = "qb_hist"
    combine: Combine = "sigmoid_renormalised"
    latent: bool = True
    latent_norm: bool = True
    aux_weight: float = 0.01
    router_z_weight: float = 1e-3

    @property
    def num_kv_heads(self) -> int:
        """Stored key/value heads: the larger of local and global."""
        return max(self.num_kv_heads_local, self.num_kv_heads_global)

    @property
    def init_std(self) -> float:
        """Scale of the truncated normal that initialises every matrix."""
        return INIT_STD_TIMES_SQRT_WIDTH / math.sqrt(self.width)

    @property
    def global_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it attends without a window."""
        last = self.num_layers - 1
        return tuple((i + 1) % self.global_every == 0 or i == last for i in range(self.num_layers))

    @property
    def num_conv_layers(self) -> int:
        """Layers that have the convolutions of `conv_sites`."""
        return self.num_layers if self.conv_layers == "all" else sum(self.global_layers)

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that rotary embedding turns, in pairs."""
        return round(self.rope_fraction * self.head_dim)

    @property
    def num_balance_biases(self) -> int:
        """Experts with a quantile-balancing bias: all of them, or 0 where nothing is balanced so.

        The router state beta has the shape [num_layers, num_balance_biases].
        """
        return self.num_experts if self.balance in ("qb_hist", "qb_topk") else 0

    def __post_init__(self) -> None:
        """Refuse impossible shapes, naming the fields."""
        _check_numbers(self)
        _check_attention(self)
        _check_convolutions(self)
        if self.mlp == "dense":
            _check_dense(self)
        else:
            _check_routing(self)

    def check_expert_parallel(self, degree: int) -> None:
        """Refuse an expert-parallel degree that does not divide the experts."""
        if degree < 1 or self.num_experts % degree:
            raise ShapeError(
                f"expert-parallel degree {degree} does not divide num_experts = {self.num_experts}"
            )


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The shape written by `dataclasses.asdict` into JSON; decimal strings stand for floats.

    Fields that a record does not know yet have their reference form.

    Raises:
        ShapeError, TypeError: a field is missing, unknown or impossible.
    """
    types = {field.name: field.type for field in dataclasses.fields(ModelConfig)}

    def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return float(value) if types.get(name) is float and isinstance(value, str) else value

    return ModelConfig(**{name: read(name, value) for name, value in values.items()})


def _check_numbers(config: ModelConfig) -> None:
    may_be_zero = {"num_shared_experts", "dense_width", "aux_weight", "router_z_weight"}
    if config.mlp == "dense":
        may_be_zero.update(ROUTED_DIMENSIONS)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type not in (int, float):
            continue
        if field.type is int and type(value) is not int:
            raise ShapeError(f"{field.name} = {value!r} must be a whole number")
        if value < 0:
            raise ShapeError(f"{field.name} = {value} is negative")
        if value == 0 and field.name not in may_be_zero:
            raise ShapeError(
                f"{field.name} = {value} must be positive", remedy=f"raise {field.name} above 0"
            )


def _check_attention(config: ModelConfig) -> None:
    if config.num_heads * config.head_dim != config.width:
        raise ShapeError(
            f"num_heads * head_dim = {config.num_heads} * {config.head_dim} is not the width "
            f"{config.width}",
            remedy="choose a width that is a multiple of head_dim",
        )
    if config.head_dim % 4:
        raise ShapeError(
            f"head_dim = {config.head_dim} must be a multiple of 4: half is rotated in pairs"
        )
    num_pairs = config.rope_fraction * config.head_dim / 2
    if config.rope_fraction > 1 or num_pairs != round(num_pairs):
        raise ShapeError(
            f"rope_fraction = {config.rope_fraction} rotates {2 * num_pairs:g} of the "
            f"{config.head_dim} dimensions of a head, which are not whole pairs of it",
            remedy=f"use a multiple of {2 / config.head_dim:g} up to 1",
        )
    kv = config.num_kv_heads
    for name in ("num_kv_heads_local", "num_kv_heads_global"):
        heads = getattr(config, name)
        if config.num_heads % heads:
            raise ShapeError(f"{name} = {heads} does not divide num_heads = {config.num_heads}")
        if kv % heads:
            raise ShapeError(f"{name} = {heads} does not divide the {kv} stored KV heads")


def _check_convolutions(config: ModelConfig) -> None:
    sites = tuple(site for site in CONV_SITES if site in config.conv_sites)
    if config.conv_sites != sites:
        raise ShapeError(
            f"conv_sites = {config.conv_sites} must be some of {CONV_SITES}, once, in that order"
        )


def _check_dense(config: ModelConfig) -> None:
    routed = [name for name in ROUTED_DIMENSIONS if getattr(config, name)]
    if routed or config.latent or config.latent_norm or config.balance != "none":
        name = (routed or ["latent, latent_norm or balance"])[0]
        raise ShapeError(
            f"mlp = 'dense' has no router and no experts, but {name} is set",
            remedy="take the shape from derive_shape(..., mlp='dense')",
        )
    if not config.dense_width:
        raise ShapeError("mlp = 'dense' needs dense_width, the inner width of its SwiGLU")


def _check_routing(config: ModelConfig) -> None:
    if config.dense_width:
        raise ShapeError(f"dense_width = {config.dense_width} needs mlp = 'dense'")
    if not 1 <= config.experts_per_token < config.num_experts:
        raise ShapeError(
            f"experts_per_token = {config.experts_per_token} must lie in 1.."
            f"{config.num_experts - 1}: the router needs the next best of {config.num_experts}",
            remedy="lower model.overrides.experts_per_token or raise num_experts",
        )
    if config.latent_width > config.width:
        raise ShapeError(f"latent_width = {config.latent_width} exceeds the width {config.width}")
    if not config.latent and (config.latent_norm or config.latent_width != config.width):
        raise ShapeError(
            f"latent = False feeds the experts at full width {config.width}: latent_norm = "
            f"{config.latent_norm}, latent_width = {config.latent_width} do not fit",
            remedy="take the shape from derive_shape(..., latent=False)",
        )
    if config.balance == "softmax_aux" and config.combine != "softmax":
        raise ShapeError(
            f"balance = 'softmax_aux' weighs experts by their softmax, not by combine = "
            f"{config.combine!r}",
            remedy="leave model.moe.combine out, or set it to 'softmax'",
        )


def _even_up(value: float) -> int:
    rounded = round(value)
    return rounded + rounded % 2


def _largest_divisor(number: int, bound: int) -> int:
    return max(d for d in range(1, min(number, bound) + 1) if number % d == 0)


def _kv_heads(num_heads: int) -> tuple[int, int]:
    """Local and global KV heads: a quarter and an eighth, lowered to a divisor where needed."""
    local = _largest_divisor(num_heads, max(1, num_heads // 4))
    return local, _largest_divisor(local, max(1, num_heads // 8))


def _num_layers(width: int) -> int:
    """Depth rule of the public ladder (marin #6044), rounded up to even."""
    return _even_up(width / (55 + 4 * math.log2(width)))


def qk_multiplier(sequence_length: int, start_length: int) -> float:
    """1.3 * (1 + 0.1 ln(S / S_0)), S_0 the length the run starts with."""
    return QK_MULTIPLIER_AT_START * (1 + 0.1 * math.log(sequence_length / start_length))


def derive_shape(
    family: Family,
    width: int,
    *,
    full_kv_heads: bool = False,
    match_routed_flops: bool = False,
    **overrides: Any,
) -> ModelConfig:
    """The shape that `family` gives to `width`, then `overrides` by field name.

    Some forms imply dimensions, which win over an override of them: `mlp = "dense"` a SwiGLU of
    inner width 3 D; `latent = False` experts at full width.

    Args:
        full_kv_heads: as many key/value heads as query heads, in every layer.
        match_routed_flops: with `latent = False`, the expert width at which the routed path costs
            what it costs with the latent pair.

    Raises:
        ShapeError: the width does not belong to the family or the result is impossible.
    """
    rules = {"ladder": _ladder_shape, "small": _small_shape, "micro": _micro_shape}
    if family not in rules:
        raise ShapeError(f"family = {family!r} is unknown", remedy=f"use one of {sorted(rules)}")
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := sorted(set(overrides) - names):
        raise ShapeError(
            f"unknown shape field {unknown[0]!r}", remedy=f"use one of {', '.join(sorted(names))}"
        )
    if family == "micro":
        rule = _micro_shape(width, overrides.get("head_dim", MICRO_HEAD_DIM))
    else:
        rule = rules[family](width)
    fields: dict[str, Any] = rule | {"width": width} | overrides
    if full_kv_heads:
        fields |= dict.fromkeys(("num_kv_heads_local", "num_kv_heads_global"), fields["num_heads"])
    if fields.get("mlp") == "dense":
        fields |= dict.fromkeys(ROUTED_DIMENSIONS, 0) | {"dense_width": DENSE_OVER_WIDTH * width}
        fields |= {"latent": False, "latent_norm": False, "balance": "none"}
    elif not fields.get("latent", True):
        inner = _matched_expert_width(fields) if match_routed_flops else fields["expert_width"]
        fields |= {"latent_width": width, "latent_norm": False, "expert_width": inner}
    if fields.get("balance") == "softmax_aux":
        fields.setdefault("combine", "softmax")
    return ModelConfig(**fields)


def _matched_expert_width(fields: dict[str, Any]) -> int:
    """F' = R F / D + 2 R / (3 K), to a multiple of 8: the routed FLOPs of the latent model."""
    latent, width = fields["latent_width"], fields["width"]
    per_expert = 2 * latent / (3 * fields["experts_per_token"])
    exact = latent * fields["expert_width"] / width + per_expert
    return max(1, round(exact / EXPERT_WIDTH_STEP)) * EXPERT_WIDTH_STEP


def _half_width_experts(width: int) -> dict:
    half = width // 2
    return {
        "latent_width": half,
        "expert_width": half,
        "shared_width": half,
        "num_shared_experts": 2,
        "conv_taps": 4,
        "global_every": 4,
        "qk_multiplier": QK_MULTIPLIER_AT_START,
    }


def _ladder_shape(width: int) -> dict:
    if width < 384 or width % 128:
        raise ShapeError(
            f"width = {width} is not in family 'ladder'",
            remedy="use a multiple of 128 from 384 up, or family 'small' or 'micro'",
        )
    heads = width // 128
    local, global_ = _kv_heads(heads)
    return _half_width_experts(width) | {
        "vocab_size": LADDER_VOCABULARY,
        "sequence_length": 4096,
        "num_layers": _num_layers(width),
        "num_heads": heads,
        "head_dim": 128,
        "num_kv_heads_local": local,
        "num_kv_heads_global": global_,
        "num_experts": 384,
        "experts_per_token": 8,
        "gated_norm_rank": 128,
        "window": 2048,
        "qb_bins": 10_000,
    }


def _small_shape(width: int) -> dict:
    if not 32 <= width <= 384 or width % 32:
        raise ShapeError(
            f"width = {width} is not in family 'small'",
            remedy="use a multiple of 32 from 32 to 384",
        )
    head_dim = max(8, width // 8)
    heads = width // head_dim
    local, global_ = _kv_heads(heads)
    length = min(1024, 4 * width)
    return _half_width_experts(width) | {
        "vocab_size": {32: 512, 64: 1024, 128: 4096}.get(width, 8192),
        "sequence_length": length,
        "num_layers": max(2, _num_layers(width)),
        "num_heads": heads,
        "head_dim": head_dim,
        "num_kv_heads_local": local,
        "num_kv_heads_global": global_,
        "num_experts": max(8, width // 4),
        "experts_per_token": max(2, min(8, width // 32)),
        "gated_norm_rank": _small_rank(width),
        "window": length // 2,
        "qb_bins": 1_000 if width < 384 else 10_000,
    }


def _micro_shape(width: int, head_dim: int = MICRO_HEAD_DIM) -> dict:
    """Smaller heads than 16, shared by a whole ladder, make room for widths between."""
    if width < 16 or head_dim < 1 or width % head_dim:
        raise ShapeError(
            f"width = {width} is not in family 'micro' with heads of {head_dim}",
            remedy=f"use a multiple of {max(1, head_dim)} from 16 up",
        )
    heads = width // head_dim
    local, global_ = _kv_heads(heads)
    return _half_width_experts(width) | {
        "vocab_size": 512,
        "sequence_length": 128,
        "num_layers": 4,
        "num_heads": heads,
        "head_dim": head_dim,
        "num_kv_heads_local": local,
        "num_kv_heads_global": global_,
        "num_experts": 32,
        "experts_per_token": 2,
        "gated_norm_rank": _small_rank(width),
        "window": 64,
        "qb_bins": 1_000,
    }


def _small_rank(width: int) -> int:
    return min(128, max(8, width // 4))
