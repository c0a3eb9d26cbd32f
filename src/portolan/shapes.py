"""What a width implies: the shape of the model in each family of widths.

One width sets every other dimension, so that small rungs and the target are the same recipe.
Families: `ladder` (width >= 384, head size 128, as in the public run, marin #8435), `small`
(32..384, keeps the ratios) and `micro` (fixed small experts and context, for two cores).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from portolan.errors import UsageError

Family = Literal["ladder", "small", "micro"]

QK_MULTIPLIER_AT_START = 1.3
"""Multiplier on normalised queries at the length a run starts with."""
COMBINE_WEIGHT_SUM = 2.5
"""Sum of the combine weights of the selected experts of a token, at every width."""
ROPE_THETA = 10_000.0
INIT_STD_TIMES_SQRT_WIDTH = 0.5
LADDER_VOCABULARY = 128_256


class ShapeError(UsageError):
    """An impossible combination of dimensions."""


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one model; hashable, so that it can be a static argument of a jitted step.

    `window` counts the keys that a local layer sees, itself included; layer i is global when
    (i + 1) % global_every == 0 or it is the last one.
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

    def __post_init__(self) -> None:
        """Refuse impossible shapes, naming the fields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and type(value) is not int:
                raise ShapeError(f"{field.name} = {value!r} must be a whole number")
            if value <= 0 and field.name != "num_shared_experts":
                raise ShapeError(
                    f"{field.name} = {value} must be positive",
                    remedy=f"set model.overrides.{field.name} to at least 1",
                )
        if self.num_shared_experts < 0:
            raise ShapeError(f"num_shared_experts = {self.num_shared_experts} is negative")
        if self.num_heads * self.head_dim != self.width:
            raise ShapeError(
                f"num_heads * head_dim = {self.num_heads} * {self.head_dim} is not the width "
                f"{self.width}",
                remedy="choose a width that is a multiple of head_dim",
            )
        if self.head_dim % 4:
            raise ShapeError(
                f"head_dim = {self.head_dim} must be a multiple of 4: half is rotated in pairs"
            )
        kv = self.num_kv_heads
        for name in ("num_kv_heads_local", "num_kv_heads_global"):
            heads = getattr(self, name)
            if self.num_heads % heads:
                raise ShapeError(f"{name} = {heads} does not divide num_heads = {self.num_heads}")
            if kv % heads:
                raise ShapeError(f"{name} = {heads} does not divide the {kv} stored KV heads")
        if not 1 <= self.experts_per_token < self.num_experts:
            raise ShapeError(
                f"experts_per_token = {self.experts_per_token} must lie in 1.."
                f"{self.num_experts - 1}: the router needs the next best of {self.num_experts}",
                remedy="lower model.overrides.experts_per_token or raise num_experts",
            )
        if self.latent_width > self.width:
            raise ShapeError(f"latent_width = {self.latent_width} exceeds the width {self.width}")

    def check_expert_parallel(self, degree: int) -> None:
        """Refuse an expert-parallel degree that does not divide the experts."""
        if degree < 1 or self.num_experts % degree:
            raise ShapeError(
                f"expert-parallel degree {degree} does not divide num_experts = {self.num_experts}"
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


def derive_shape(family: Family, width: int, **overrides: int | float) -> ModelConfig:
    """The shape that `family` gives to `width`, then `overrides` by field name.

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
    fields: dict[str, Any] = rules[family](width) | {"width": width} | overrides
    return ModelConfig(**fields)


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


def _micro_shape(width: int) -> dict:
    if width < 16 or width % 16:
        raise ShapeError(
            f"width = {width} is not in family 'micro'", remedy="use a multiple of 16 from 16 up"
        )
    heads = width // 16
    local, global_ = _kv_heads(heads)
    return _half_width_experts(width) | {
        "vocab_size": 512,
        "sequence_length": 128,
        "num_layers": 4,
        "num_heads": heads,
        "head_dim": 16,
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
