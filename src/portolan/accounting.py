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
from portolan.shapes import ModelConfig, Remat

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
    not trained, and belong to the exact total; `norms` includes the gated norms. What a shape
    leaves out counts 0.
    """

    attention: int
    convolutions: int
    norms: int
    router: int
    latent: int
    routed_experts: int
    shared_experts: int
    dense: int
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
    adamw: int = 0

    @property
    def trained(self) -> int:
        """All trained parameters."""
        return self.muonh + self.adamh + self.adam + self.adamw


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


def _latent_matrices(config: ModelConfig) -> int:
    """The projections into and out of the latent width of one layer."""
    return 2 * config.width * config.latent_width if config.latent else 0


def _expert_matrices(config: ModelConfig, num_experts: int) -> int:
    return 3 * num_experts * config.latent_width * config.expert_width


def _full_width_inner(config: ModelConfig) -> int:
    """Inner width of the shared experts together or of the dense SwiGLU."""
    return config.num_shared_experts * config.shared_width + config.dense_width


def _full_width_mlps(config: ModelConfig) -> int:
    """Shared experts or the dense SwiGLU of one layer."""
    return 3 * config.width * _full_width_inner(config)


def _head_gates(config: ModelConfig) -> int:
    return config.num_layers * config.width * config.num_heads if config.head_gate else 0


def _gated_norms(config: ModelConfig) -> int:
    """Gate matrices of the norms in front of both branches, after the embedding and at the end."""
    num_norms = 2 * config.num_layers + 2
    return num_norms * 2 * config.width * config.gated_norm_rank if config.gated_norm else 0


def _gains(config: ModelConfig) -> int:
    latent = config.num_layers * config.latent_width if config.latent_norm else 0
    return (2 * config.num_layers + 2) * config.width + latent


def _convolutions(config: ModelConfig) -> int:
    kv_width = config.num_kv_heads * config.head_dim
    channels = {"k": kv_width, "v": kv_width, "attn": config.width, "mlp": config.width}
    sites = sum(channels[site] for site in config.conv_sites)
    return config.num_conv_layers * config.conv_taps * sites


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Exact parameter counts by component."""
    layers, width = config.num_layers, config.width
    latent_gains = layers * config.latent_width if config.latent_norm else 0
    return ParameterCounts(
        attention=layers * _attention_matrices(config) + _head_gates(config),
        convolutions=_convolutions(config),
        norms=_gains(config) - latent_gains + _gated_norms(config),
        router=layers * (width * config.num_experts + config.num_balance_biases),
        latent=layers * _latent_matrices(config) + latent_gains,
        routed_experts=layers * _expert_matrices(config, config.num_experts),
        shared_experts=0 if config.dense_width else layers * _full_width_mlps(config),
        dense=layers * _full_width_mlps(config) if config.dense_width else 0,
        embedding=config.vocab_size * width,
        head=config.vocab_size * width,
    )


def total_parameters(config: ModelConfig) -> int:
    """Exact total, balance biases included."""
    return count_parameters(config).total


def _layer_matrices(config: ModelConfig, num_experts: int) -> int:
    """Matrices of one layer with `num_experts` of the routed ones, without gates."""
    return (
        _attention_matrices(config)
        + config.width * config.num_experts
        + _expert_matrices(config, num_experts)
        + _latent_matrices(config)
        + _full_width_mlps(config)
    )


def matrices_only_parameters(config: ModelConfig) -> int:
    """Total without norms, gates, convolutions and biases: the basis of "535.3B"."""
    per_layer = _layer_matrices(config, config.num_experts)
    return config.num_layers * per_layer + 2 * config.vocab_size * config.width


def active_parameters(config: ModelConfig) -> int:
    """Active non-embedding parameters N: the basis of every token budget.

    Counts stored KV heads; leaves out embedding, head, norms, gates and convolutions.
    """
    return config.num_layers * _layer_matrices(config, config.experts_per_token)


def active_used_parameters(config: ModelConfig) -> int:
    """Active parameters without the KV columns that global layers store and never use."""
    unused = config.num_kv_heads - config.num_kv_heads_global
    num_global = sum(config.global_layers)
    return active_parameters(config) - num_global * 2 * config.width * unused * config.head_dim


def active_with_head_parameters(config: ModelConfig) -> int:
    """Active parameters plus the output head."""
    return active_parameters(config) + config.vocab_size * config.width


def count_optimizer_groups(
    config: ModelConfig, matrix: str = "muonh", gated_norm: str = "muonh"
) -> OptimizerCounts:
    """Sizes of the optimizer groups: Newton-Schulz, constrained Adam, plain Adam, AdamW.

    Args:
        config: the shape.
        matrix: group of the hidden matrices, as the recipe's `optimizer.matrix`; `adamw` takes
            the head, which is otherwise in `adamh`.
        gated_norm: group of the gates of the norms; `muonh` leaves them with the matrices.
    """
    counts = count_parameters(config)
    router = config.num_layers * config.width * config.num_experts
    others = counts.embedding + router + _head_gates(config) + _gains(config) + counts.convolutions
    gates = _gated_norms(config)
    sizes = dict.fromkeys(("muonh", "adamh", "adam", "adamw"), 0) | {"adam": others}
    sizes["adamw" if matrix == "adamw" else "adamh"] += counts.head
    sizes[matrix if gated_norm == "muonh" else gated_norm] += gates
    trained = counts.total - config.num_layers * config.num_balance_biases
    sizes[matrix] += trained - others - gates - counts.head
    return OptimizerCounts(**sizes)


def state_bytes(
    config: ModelConfig, matrix: str = "muonh", gated_norm: str = "muonh"
) -> StateBytes:
    """Float32 training state: one momentum per muonh leaf, two moments per other leaf."""
    groups = count_optimizer_groups(config, matrix, gated_norm)
    trained = FLOAT32_BYTES * groups.trained
    optimizer = FLOAT32_BYTES * (2 * groups.trained - groups.muonh)
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


def _feed_forward_flops(config: ModelConfig, *, priced_width: int) -> int:
    """Routed and shared experts or dense SwiGLU, router and attention output, all layers."""
    width = config.width
    routed = 6 * priced_width * config.expert_width * config.experts_per_token
    full_width = 2 * _full_width_mlps(config)
    router = 2 * width * config.num_experts
    output = 2 * width * config.num_heads * config.head_dim
    return config.num_layers * (routed + full_width + router + output)


def _gate_flops(config: ModelConfig) -> int:
    """Gated norms, head gates, convolutions and exclusive attention."""
    exclusive = 6 * config.num_heads * config.head_dim if config.exclusive_attention else 0
    multiplied = _gated_norms(config) + _head_gates(config) + _convolutions(config)
    return 2 * multiplied + config.num_layers * exclusive


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
    latent = config.num_layers * 2 * _latent_matrices(config)
    causal = convention in ("causal", "full")
    flops = _attention_flops(config, causal=causal)
    if convention == "no_latent_correction":
        flops += _feed_forward_flops(config, priced_width=config.width) + head
    else:
        flops += _feed_forward_flops(config, priced_width=config.latent_width) + latent + head
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


def routed_flops_per_token(config: ModelConfig) -> int:
    """Forward FLOPs of one token in its routed experts, all layers."""
    return config.num_layers * 2 * _expert_matrices(config, config.experts_per_token)


def without_dropped_rows(mfu: float, config: ModelConfig, drop_fraction: float) -> float:
    """A utilisation less what was credited for rows that no expert saw (parallel.md 9)."""
    share = routed_flops_per_token(config) / float(forward_flops_per_token(config))
    return mfu * (1 - share * drop_fraction)


def newton_schulz_flops(rows: int, columns: int, num_steps: int = 5) -> int:
    """FLOPs of one matrix: per step X X^T, its square and a product with X; rows <= columns."""
    return num_steps * 2 * rows * rows * (2 * columns + rows)


CPU_LOGITS_ENTRIES = 2 * 1024**2
ACCELERATOR_LOGITS_ENTRIES = 256 * 1024**2
LOGITS_COPIES = 4
"""Of a block: logits, exponentials, and two on the way to their gradient."""
EXPERT_ROWS_OVER_MEAN = 1.1
"""Rows of expert input over assignments: what the grouped products leave room for."""


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one training step on one device, and the parts that meet at its peak.

    Saved activations and the larger of the logits block and one layer's work meet inside the
    gradient program; the update needs as much as the optimizer state once more.
    """

    parameters: int
    optimizer: int
    gradients: int
    saved_activations: int
    logits_block: int
    layer_work: int

    @property
    def gradient_temporaries(self) -> int:
        """What the gradient program needs beside its arguments and results."""
        return self.saved_activations + max(self.logits_block, self.layer_work)

    @property
    def peak(self) -> int:
        """Everything alive at the worst moment of a step."""
        state = self.parameters + self.optimizer + self.gradients
        return state + max(self.gradient_temporaries, self.optimizer)


def saved_bytes_per_token(config: ModelConfig, remat: Remat, value_bytes: int) -> float:
    """Bytes that the forward pass of one layer leaves for the backward pass."""
    heads, head_dim = config.num_heads, config.head_dim
    values = config.width
    if remat == "layer":
        return value_bytes * values
    values += (heads + 2 * config.num_kv_heads) * head_dim + heads + config.width
    values += config.latent_width
    attended = FLOAT32_BYTES * heads * (head_dim + 1)
    routing = 4 * FLOAT32_BYTES * config.experts_per_token
    if remat == "none":
        values += EXPERT_ROWS_OVER_MEAN * config.experts_per_token * 2 * config.expert_width
        values += 2 * _full_width_inner(config) + config.num_experts
        values += config.latent_width if config.latent else 0
        values += config.width * len({"attn", "mlp"}.intersection(config.conv_sites))
    return value_bytes * values + attended + routing


def _layer_work_bytes(config: ModelConfig, batch_sequences: int, value_bytes: int) -> float:
    """Working memory of the backward pass of one layer: scores or expert rows, and activations."""
    length = config.sequence_length
    tokens = batch_sequences * length
    scores = 3 * FLOAT32_BYTES * batch_sequences * config.num_heads * length * length / 2
    row = 3 * config.latent_width + 6 * config.expert_width
    rows = EXPERT_ROWS_OVER_MEAN * tokens * config.experts_per_token
    activations = FLOAT32_BYTES * tokens * (10 * config.width + 2 * config.num_experts)
    return max(scores, value_bytes * rows * row) + activations


def memory_bytes(
    config: ModelConfig,
    batch_sequences: int,
    *,
    remat: Remat,
    on_accelerator: bool,
    matrix: str = "muonh",
    gated_norm: str = "muonh",
) -> MemoryBytes:
    """Memory of a training step, by arithmetic: an estimate, good to a factor of 2 on a CPU.

    Args:
        config: the shape.
        batch_sequences: rows of a step.
        remat: what the backward pass computes again.
        on_accelerator: bfloat16 activations and large blocks of logits; else float32, small ones.
        matrix: group of the hidden matrices.
        gated_norm: group of the gates of the norms.
    """
    state = state_bytes(config, matrix, gated_norm)
    tokens = batch_sequences * config.sequence_length
    value_bytes = FLOAT32_BYTES // 2 if on_accelerator else FLOAT32_BYTES
    entries = ACCELERATOR_LOGITS_ENTRIES if on_accelerator else CPU_LOGITS_ENTRIES
    block_tokens = min(tokens, max(1, entries // config.vocab_size))
    per_token = saved_bytes_per_token(config, remat, value_bytes)
    return MemoryBytes(
        parameters=state.parameters,
        optimizer=state.optimizer,
        gradients=state.gradients,
        saved_activations=round(config.num_layers * tokens * per_token),
        logits_block=LOGITS_COPIES * FLOAT32_BYTES * block_tokens * config.vocab_size,
        layer_work=round(_layer_work_bytes(config, batch_sequences, value_bytes)),
    )
