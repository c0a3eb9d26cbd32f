"""The tables `[model...]` of a recipe: a width, and the form of every component.

Each switch has the reference model's form as its default and at least one plain form; the arms of
an ablation are these keys. A switch reaches the model as a field of its shape (`shapes.py`), which
the tree, the counts, the optimizer groups and the diagnostics follow.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic
from pydantic import Field

from portolan.settings import PositiveInt, Settings
from portolan.shapes import (
    CONV_SITES,
    Balance,
    Combine,
    ConvLayers,
    ConvSite,
    Family,
    Mlp,
    ModelConfig,
)

Weight = Annotated[float, Field(ge=0)]


class AttentionSwitches(Settings):
    """Forms of attention.

    `exclusive`: remove from a head's output its component along the token's own value (XSA).
    `head_gate`: scale each head by a gate on the input. `rope_fraction`: share of a head that is
    rotated. `nope_global`: global layers rotate nothing. `full_kv_heads`: as many key/value heads
    as query heads.
    """

    exclusive: bool = True
    head_gate: bool = True
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    nope_global: bool = True
    full_kv_heads: bool = False


class ConvSwitches(Settings):
    """Short convolutions: after which products (`k`, `v`, the `attn` and the `mlp` branch; none
    with an empty list), and in which `layers` (`all` or `global`)."""

    sites: tuple[ConvSite, ...] = ("k", "attn", "mlp")
    layers: ConvLayers = "all"

    @pydantic.field_validator("sites")
    @classmethod
    def _once(cls, sites: tuple[ConvSite, ...]) -> tuple[ConvSite, ...]:
        if len(set(sites)) != len(sites):
            raise ValueError("a site is listed twice")
        return tuple(site for site in CONV_SITES if site in sites)


class NormSwitches(Settings):
    """`gated`: norms carry a low-rank gate; without it they are plain RMS norms with a gain."""

    gated: bool = True


class MoeSwitches(Settings):
    """Forms of the routed layer.

    `balance`: quantile balancing by histogram or by `qb_topk`, an auxiliary loss (`softmax_aux`,
    weighted by `aux_weight` and `router_z_weight`, which also weighs experts by their softmax), or
    `none`. `combine`: weights of the selected experts. `latent`: experts work behind a projection
    to a smaller width; without it at full width, with `match_routed_flops` at equal FLOPs.
    `latent_norm`: RMS norm behind that projection.
    """

    balance: Balance = "qb_hist"
    combine: Combine = "sigmoid_renormalised"
    latent: bool = True
    match_routed_flops: bool = False
    latent_norm: bool = True
    aux_weight: Weight = 0.01
    router_z_weight: Weight = 1e-3


class ModelSettings(Settings):
    """Target model: a width of a family, the form of its components, single dimensions by hand.

    `mlp = "dense"` puts one SwiGLU of inner width 3 D in the place of router and experts.
    `overrides` replaces dimensions of the shape.
    """

    family: Family
    width: PositiveInt
    mlp: Mlp = "moe"
    attention: AttentionSwitches = AttentionSwitches()
    conv: ConvSwitches = ConvSwitches()
    norm: NormSwitches = NormSwitches()
    moe: MoeSwitches = MoeSwitches()
    overrides: dict[str, int | float] = Field(default={})

    def switches(self) -> dict[str, Any]:
        """Arguments of `derive_shape` that differ from the reference model."""
        chosen = {name: self._at(key) for name, key in KEYS.items()}
        return {name: value for name, value in chosen.items() if value != REFERENCE[name]}

    def _at(self, key: str) -> Any:
        return functools.reduce(getattr, key.split("."), self)

    def contradictions(self) -> Iterator[tuple[str, str, str]]:
        """(key below `model`, what is wrong with it, remedy) of keys that can have no effect."""
        for name in sorted(set(self.overrides) & set(REFERENCE)):
            key = KEYS.get(name, "mlp")
            yield f"overrides.{name}", f"this is what model.{key} sets", f"set model.{key}"
        moe = self.moe.model_fields_set
        if self.mlp == "dense":
            for name in sorted(moe):
                yield f"moe.{name}", "mlp = 'dense' has no router and no experts", "leave it out"
            return
        if not self.moe.latent and self.moe.latent_norm and "latent_norm" in moe:
            yield (
                "moe.latent_norm",
                "moe.latent = false leaves nothing to normalise",
                "leave it out",
            )
        if self.moe.match_routed_flops and self.moe.latent:
            yield (
                "moe.match_routed_flops",
                "the latent model is what it would be matched to",
                "set model.moe.latent = false too",
            )
        if self.moe.balance == "softmax_aux":
            if "combine" in moe and self.moe.combine != "softmax":
                yield (
                    "moe.combine",
                    "moe.balance = 'softmax_aux' weighs experts by their softmax",
                    "leave it out",
                )
        else:
            for name in sorted(moe & {"aux_weight", "router_z_weight"}):
                yield f"moe.{name}", "only 'softmax_aux' has this loss", "set model.moe.balance too"
        if not self.conv.sites and self.conv.layers != "all":
            yield "conv.layers", "conv.sites is empty", "name a site, or leave layers out"


REFERENCE: dict[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING
} | {"full_kv_heads": False, "match_routed_flops": False}
"""The reference model's form of every component, by argument of `derive_shape`."""

KEYS: dict[str, str] = {
    "mlp": "mlp",
    "exclusive_attention": "attention.exclusive",
    "head_gate": "attention.head_gate",
    "rope_fraction": "attention.rope_fraction",
    "nope_global": "attention.nope_global",
    "full_kv_heads": "attention.full_kv_heads",
    "conv_sites": "conv.sites",
    "conv_layers": "conv.layers",
    "gated_norm": "norm.gated",
    "balance": "moe.balance",
    "combine": "moe.combine",
    "latent": "moe.latent",
    "match_routed_flops": "moe.match_routed_flops",
    "latent_norm": "moe.latent_norm",
    "aux_weight": "moe.aux_weight",
    "router_z_weight": "moe.router_z_weight",
}
"""Recipe key below `model` of each of them."""
