"""Parameters, FLOPs, bytes and utilisation of a shape: arithmetic only.

This is the one place that counts. Every FLOP figure names its convention, because the choice of
convention alone moves a utilisation by a third.
"""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from portolan.errors import UsageError
from portolan.shapes import ModelConfig

FLOAT32_BYTES = 4
TRAINING_OVER_FORWARD = 3
"""Backward costs twice the forward; recomputation and the optimizer are not counted."""

Convention = Literal["published", "causal", "full", "no_head", "no_latent_correction"]

CONVENTIONS: dict[str, str] = {
    "published": "non-causal attention, floor(layers / global_every) global layers, with head "
    "(public convention, marin #8435)",
    "causal": "keys actually attended, true number of global layers, with head",
    "full": "causal, plus gates, convolutions and exclusive attention",
    "no_head": "published without the output head: the compute axis of the loss forecast",
    "no_latent_correction": "WRONG: prices the routed experts at the full width; kept to "
    "recognise figures that forgot the latent width",
}

PEAK_FLOPS_PER_SECOND: dict[str, float] = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200 NVL": 8.36e14,
    "H200": 9.89e14,
    "H100 NVL": 8.35e14,
    "H100 PCIE": 7.56e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "TPU V6 LITE": 9.18e14,
    "TPU V5 LITE": 1.97e14,
    "TPU V5P": 4.59e14,
    "TPU V5": 4.59e14,
    "TPU V4": 2.75e14,
}
"""Dense bfloat16 peak of one device, from the vendors' data sheets."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by component, summed over layers.

    `attention` includes the head gates; `router` includes the balance biases, which are state,
    not trained, and belong to the exact total; `norms` includes the gated norms.
    """

    attention: int
    convolutions: int
    norms: int
    router: int
    latent: int
    routed_experts: int
    shared_experts: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """Exact total."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class OptimizerCounts:
    """Trained parameters by optimizer group (the balance biases are in none)."""

    muonh: int
    adamh: int
    adam: int

    @property
    def trained(self) -> int:
        """All trained parameters."""
        return self.muonh + self.adamh + self.adam


@dataclass(frozen=True)
class StateBytes:
    """Float32 bytes of the training state of one replica."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs utilisation, inseparable from its convention and its peak."""

    value: float
    convention: str
    device: str
    peak_flops_per_second: float

    def __str__(self) -> str:
        return (
            f"{100 * self.value:.2f} % MFU ({self.convention} FLOPs, {self.device} at "
            f"{self.peak_flops_per_second:.3g} FLOP/s)"
        )


def _attention_matrices(config: ModelConfig) -> int:
    """Query, key, value and output projections of one layer, with the stored KV heads."""
    per_head = 2 * config.width * config.head_dim
    return per_head * (config.num_heads + config.num_kv_heads)


def _shared_matrices(config: ModelConfig) -> int:
    return config.num_shared_experts * 3 * config.width * config.shared_width


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Exact parameter counts by component."""
    layers, width, rank = config.num_layers, config.width, config.gated_norm_rank
    kv_width = config.num_kv_heads * config.head_dim
    gated_norm = 2 * width * rank
    latent = config.latent_width
    experts = 3 * config.num_experts * latent * config.expert_width
    return ParameterCounts(
        attention=layers * (_attention_matrices(config) + width * config.num_heads),
        convolutions=layers * config.conv_taps * (kv_width + 2 * width),
        norms=(2 * layers + 2) * (width + gated_norm),
        router=layers * (width * config.num_experts + config.num_experts),
        latent=layers * (2 * width * latent + latent),
        routed_experts=layers * experts,
        shared_experts=layers * _shared_matrices(config),
        embedding=config.vocab_size * width,
        head=config.vocab_size * width,
    )


def total_parameters(config: ModelConfig) -> int:
    """Exact total, balance biases included."""
    return count_parameters(config).total


def matrices_only_parameters(config: ModelConfig) -> int:
    """Total without norms, gates, convolutions and biases: the basis of "535.3B"."""
    latent, width = config.latent_width, config.width
    per_layer = (
        _attention_matrices(config)
        + width * config.num_experts
        + 3 * config.num_experts * latent * config.expert_width
        + 2 * width * latent
        + _shared_matrices(config)
    )
    return config.num_layers * per_layer + 2 * config.vocab_size * width


def active_parameters(config: ModelConfig) -> int:
    """Active non-embedding parameters N: the basis of every token budget.

    Counts stored KV heads; leaves out embedding, head, norms, gates and convolutions.
    """
    latent, width = config.latent_width, config.width
    per_layer = (
        _attention_matrices(config)
        + width * config.num_experts
        + config.experts_per_token * 3 * latent * config.expert_width
        + 2 * width * latent
        + _shared_matrices(config)
    )
    return config.num_layers * per_layer


def active_used_parameters(config: ModelConfig) -> int:
    """Active parameters without the KV columns that global layers store and never use."""
    unused = config.num_kv_heads - config.num_kv_heads_global
    num_global = sum(config.global_layers)
    return active_parameters(config) - num_global * 2 * config.width * unused * config.head_dim


def active_with_head_parameters(config: ModelConfig) -> int:
    """Active parameters plus the output head."""
    return active_parameters(config) + config.vocab_size * config.width


def count_optimizer_groups(config: ModelConfig) -> OptimizerCounts:
    """Sizes of the optimizer groups: Newton-Schulz, constrained Adam (head), plain Adam."""
    counts = count_parameters(config)
    layers, width = config.num_layers, config.width
    head_gates = layers * width * config.num_heads
    gains = layers * (2 * width + config.latent_width) + 2 * width
    gated_norms = (2 * layers + 2) * 2 * width * config.gated_norm_rank
    biases = layers * config.num_experts
    muonh = (
        layers * _attention_matrices(config)
        + gated_norms
        + layers * 2 * width * config.latent_width
        + counts.routed_experts
        + counts.shared_experts
    )
    adam = counts.embedding + counts.router - biases + head_gates + gains + counts.convolutions
    return OptimizerCounts(muonh=muonh, adamh=counts.head, adam=adam)


def state_bytes(config: ModelConfig) -> StateBytes:
    """Float32 training state: one momentum per muonh leaf, two moments per Adam leaf."""
    groups = count_optimizer_groups(config)
    trained = FLOAT32_BYTES * groups.trained
    optimizer = FLOAT32_BYTES * (groups.muonh + 2 * (groups.adamh + groups.adam))
    return StateBytes(parameters=trained, gradients=trained, optimizer=optimizer)


def _keys_per_query(config: ModelConfig, *, causal: bool) -> tuple[Fraction, Fraction]:
    """Mean number of keys a query is priced at in a global and in a local layer."""
    length = config.sequence_length
    window = min(config.window, length)
    if not causal:
        return Fraction(length), Fraction(window)
    local = Fraction(window * (window + 1), 2) + (length - window) * window
    return Fraction(length + 1, 2), local / length


def _attention_flops(config: ModelConfig, *, causal: bool) -> Fraction:
    """Query, key and value projections, scores and weighted sums, all layers."""
    heads, head_dim, width = config.num_heads, config.head_dim, config.width
    num_global = config.num_layers // config.global_every
    if causal:
        num_global = sum(config.global_layers)
    keys_global, keys_local = _keys_per_query(config, causal=causal)

    def layer(num_kv_heads: int, keys: Fraction) -> Fraction:
        projections = 2 * width * (heads + 2 * num_kv_heads) * head_dim
        return projections + (4 * head_dim + 3) * heads * keys

    num_local = config.num_layers - num_global
    return num_global * layer(config.num_kv_heads_global, keys_global) + num_local * layer(
        config.num_kv_heads_local, keys_local
    )


def _dense_flops(config: ModelConfig, *, priced_width: int) -> int:
    """Routed and shared experts, router and output projection, all layers."""
    width = config.width
    routed = 6 * priced_width * config.expert_width * config.experts_per_token
    shared = 2 * _shared_matrices(config)
    router = 2 * width * config.num_experts
    output = 2 * width * config.num_heads * config.head_dim
    return config.num_layers * (routed + shared + router + output)


def _gate_flops(config: ModelConfig) -> int:
    """Gated norms, head gates, convolutions and exclusive attention."""
    layers, width = config.num_layers, config.width
    kv_width = config.num_kv_heads * config.head_dim
    gated_norms = 4 * width * config.gated_norm_rank * (2 * layers + 2)
    convolutions = 2 * config.conv_taps * (kv_width + 2 * width)
    exclusive = 6 * config.num_heads * config.head_dim
    return gated_norms + layers * (2 * width * config.num_heads + convolutions + exclusive)


def forward_flops_per_token(
    config: ModelConfig, convention: Convention = "published"
) -> int | Fraction:
    """Forward FLOPs of one token under a named convention; exact (integer when it is one)."""
    if convention not in CONVENTIONS:
        raise UsageError(
            f"FLOP convention {convention!r} is unknown",
            remedy=f"use one of {', '.join(CONVENTIONS)}",
        )
    head = 2 * config.width * config.vocab_size
    latent = config.num_layers * 4 * config.width * config.latent_width
    causal = convention in ("causal", "full")
    flops = _attention_flops(config, causal=causal)
    if convention == "no_latent_correction":
        flops += _dense_flops(config, priced_width=config.width) + head
    else:
        flops += _dense_flops(config, priced_width=config.latent_width) + latent + head
    if convention == "no_head":
        flops -= head
    if convention == "full":
        flops += _gate_flops(config)
    return int(flops) if flops.denominator == 1 else flops


def training_flops(
    config: ModelConfig, tokens: int, convention: Convention = "published"
) -> int | Fraction:
    """Training FLOPs of `tokens`: three forwards, no recomputation, no optimizer.

    Dropped assignments are credited as if computed.
    """
    flops = TRAINING_OVER_FORWARD * forward_flops_per_token(config, convention) * tokens
    return int(flops) if flops.denominator == 1 else flops


def rule_of_thumb_flops(config: ModelConfig, tokens: int, *, with_head: bool = False) -> int:
    """6 N T with N the active parameters, with or without the output head."""
    params = active_with_head_parameters(config) if with_head else active_parameters(config)
    return 6 * params * tokens


def peak_flops_per_second(device: str) -> float | None:
    """Dense bfloat16 peak of a device by its name; None for a CPU or an unknown device."""
    name = device.upper().replace("-", " ")
    for known in sorted(PEAK_FLOPS_PER_SECOND, key=len, reverse=True):
        words = known.split()
        if all(any(word == part for part in name.split()) for word in words):
            return PEAK_FLOPS_PER_SECOND[known]
    return None


def utilisation(
    config: ModelConfig,
    tokens_per_second: float,
    num_devices: int,
    device: str,
    convention: Convention = "published",
) -> Utilisation | None:
    """Model FLOPs utilisation 3 F (tokens/s) / (devices * peak); None where the peak is unknown.

    Raises:
        UsageError: the rate is not positive and finite, or there is no device.
    """
    if num_devices < 1 or not (tokens_per_second > 0 and math.isfinite(tokens_per_second)):
        raise UsageError(
            f"utilisation needs a positive rate and device count, got {tokens_per_second} "
            f"tokens/s on {num_devices} devices"
        )
    peak = peak_flops_per_second(device)
    if peak is None:
        return None
    flops = TRAINING_OVER_FORWARD * float(forward_flops_per_token(config, convention))
    value = flops * tokens_per_second / (num_devices * peak)
    return Utilisation(value, convention, device, peak)
