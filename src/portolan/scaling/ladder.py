"""Rungs: what a width and a ratio of tokens to active parameters imply.

`derive` is pure. Nothing about a rung is typed by hand except an override, which is recorded.
Rules of the public ladder: marin #6044 (depth), #7856 (rates), #8435 (batches, budget).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from portolan import accounting
from portolan.errors import UsageError
from portolan.optim.schedule import Law, count_warmup_steps, peak_rates, scale_rates
from portolan.shapes import MICRO_HEAD_DIM, Family, ModelConfig, derive_shape

BatchPolicy = Literal["per_rack", "token_power", "fixed"]

SEQUENCES_PER_RACK = 1024
"""16 sequences on each of the 64 devices of a rack."""
PUBLIC_RACKS = {768: 1, 1024: 2, 1536: 6, 2048: 11, 6144: 11}
"""Racks of the public runs (marin #8435): chosen there, not derived."""
TOKEN_POWER = 0.6
NUM_MARKS = 20
MIN_FORECAST_STEPS = 20
MIN_TOKENS_PER_EXPERT = 256
"""Tokens per expert and step below which the noise of the balance dominates."""
LAW_WIDTHS = (512, 2048)
LAW_RATIOS = (30, 600)
LATTICE_SEQUENCES = 49_152
"""Sequences of one mixture block in the public run."""
INPUT_FIELDS = (
    "width",
    "tokens_per_active_param",
    "family",
    "batch_policy",
    "racks",
    "batch",
    "overrides",
    "vocab_size",
    "stop_after",
    "law",
    "rate_multiplier",
    "use_beta2_guard",
)
"""Fields of a rung that a person chooses; every other one is derived."""


@dataclass(frozen=True)
class Rung:
    """One planned run: inputs, shape, budget, compute on every axis, peak rates, warnings.

    `steps` and `tokens` are those of the full plan, which sets the rates and the schedule;
    `stop_after` says how many updates are executed when a diagnostic stops early.
    """

    width: int
    tokens_per_active_param: float
    family: Family
    batch_policy: BatchPolicy
    racks: int | None
    batch: int | None
    overrides: tuple[tuple[str, Any], ...]
    vocab_size: int | None
    stop_after: int | None
    law: Law
    rate_multiplier: float
    use_beta2_guard: bool
    config: ModelConfig
    batch_sequences: int
    tokens_per_step: int
    steps: int
    tokens: int
    active_params: int
    total_params: int
    flops_per_token_no_head: int
    flops_no_head: int
    flops_with_head: int
    flops_6nt: int
    hyperball: float
    adam: float
    beta1: float
    beta2: float
    epsilon: float
    warmup_steps: int
    lr_capped: bool
    beta2_guard: bool
    mixture_block: int
    warnings: tuple[str, ...]

    @property
    def executed_steps(self) -> int:
        """Updates that this run performs."""
        return self.steps if self.stop_after is None else self.stop_after

    @property
    def flops_per_step_no_head(self) -> int:
        """Training FLOPs of one update on the axis of the forecast."""
        return (
            accounting.TRAINING_OVER_FORWARD * self.flops_per_token_no_head * self.tokens_per_step
        )

    @property
    def tokens_per_expert(self) -> float:
        """Assignments per expert and update, over the whole batch; infinite without experts."""
        config = self.config
        if not config.num_experts:
            return math.inf
        return self.tokens_per_step * config.experts_per_token / config.num_experts

    @property
    def evaluation_marks(self) -> tuple[int, ...]:
        """Completed updates after which the run is evaluated."""
        return evaluation_marks(self.steps)

    def plan(self) -> dict[str, Any]:
        """All fields but the shape and the derived properties, ready for JSON."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "config"
        }
        return fields | {"overrides": dict(self.overrides), "warnings": list(self.warnings)}


DERIVED_FIELDS = tuple(
    field.name for field in dataclasses.fields(Rung) if field.name not in INPUT_FIELDS
)


@dataclass(frozen=True)
class Differences:
    """How two rungs differ: `derived` follows from the width, `chosen` was decided by somebody.

    Keys are field names (`config.num_layers` for a dimension), values pairs.
    """

    derived: dict[str, tuple[Any, Any]]
    chosen: dict[str, tuple[Any, Any]]


def derive(
    width: int,
    tokens_per_active_param: float,
    family: Family,
    batch_policy: BatchPolicy,
    *,
    racks: int | None = None,
    batch: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    steps: int | None = None,
    law: Law = "aug",
    rate_multiplier: float = 1.0,
    beta2_guard: bool = False,
) -> Rung:
    """Everything that a width implies.

    Args:
        racks: for `per_rack`; a public width may leave it out.
        batch: sequences per step, for `fixed`.
        overrides: arguments of `derive_shape` set by hand; they are recorded.
        steps: stop after this many updates; rates and schedule keep the full plan.
        law: learning-rate law, `aug` (marin #7856) or the earlier `may` (marin #5951).
        rate_multiplier: scales both peak rates, past the cap if need be.
        beta2_guard: lower beta2 to at most 1 - 10 / steps (measured worse at small widths).
    """
    if not tokens_per_active_param > 0 or not math.isfinite(tokens_per_active_param):
        raise UsageError(
            f"tokens_per_active_param = {tokens_per_active_param} must be positive and finite"
        )
    shape_overrides = dict(overrides or {})
    if vocab_size is not None:
        shape_overrides["vocab_size"] = vocab_size
    config = derive_shape(family, width, **shape_overrides)
    wanted_tokens = Fraction(tokens_per_active_param) * accounting.active_parameters(config)
    sequences = _batch(batch_policy, width, wanted_tokens, config.sequence_length, racks, batch)
    full_steps = max(1, round(wanted_tokens / (sequences * config.sequence_length)))
    if steps is not None and not 1 <= steps <= full_steps:
        raise UsageError(
            f"steps = {steps} must lie in 1..{full_steps}, the plan of width {width}",
            remedy="raise tokens_per_active_param for a longer plan",
        )
    chosen = {
        "width": width,
        "tokens_per_active_param": tokens_per_active_param,
        "family": family,
        "batch_policy": batch_policy,
        "racks": _racks(width, racks) if batch_policy == "per_rack" else None,
        "batch": batch,
        "overrides": tuple(sorted((overrides or {}).items())),
        "vocab_size": vocab_size,
        "stop_after": steps,
        "law": law,
        "rate_multiplier": rate_multiplier,
        "use_beta2_guard": beta2_guard,
    }
    rung = Rung(**chosen, **_derived(chosen, config, sequences, full_steps))
    return dataclasses.replace(rung, warnings=tuple(_warnings(rung)))


def _derived(
    chosen: Mapping[str, Any], config: ModelConfig, sequences: int, steps: int
) -> dict[str, Any]:
    """Every derived field of a rung but its warnings."""
    tokens_per_step = sequences * config.sequence_length
    tokens = steps * tokens_per_step
    rates = peak_rates(
        tokens,
        config.width,
        tokens_per_step,
        chosen["law"],
        beta2_guard=chosen["use_beta2_guard"],
    )
    scaled = scale_rates(rates, chosen["rate_multiplier"])
    return {
        "config": config,
        "batch_sequences": sequences,
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "tokens": tokens,
        "active_params": accounting.active_parameters(config),
        "total_params": accounting.total_parameters(config),
        "flops_per_token_no_head": int(accounting.forward_flops_per_token(config, "no_head")),
        "flops_no_head": int(accounting.training_flops(config, tokens, "no_head")),
        "flops_with_head": int(accounting.training_flops(config, tokens, "published")),
        "flops_6nt": accounting.rule_of_thumb_flops(config, tokens),
        "hyperball": scaled.hyperball,
        "adam": scaled.adam,
        "beta1": rates.beta1,
        "beta2": rates.beta2,
        "epsilon": rates.epsilon,
        "warmup_steps": count_warmup_steps(steps),
        "lr_capped": rates.capped,
        "beta2_guard": rates.beta2_guarded,
        "mixture_block": mixture_block(chosen["family"], steps, sequences),
        "warnings": (),
    }


def _racks(width: int, racks: int | None) -> int:
    number = PUBLIC_RACKS.get(width) if racks is None else racks
    if number is None or number < 1:
        raise UsageError(
            f"batch policy per_rack needs racks >= 1 for width {width}, got {racks}",
            remedy="set racks, or use batch policy token_power",
        )
    return number


def _batch(
    policy: BatchPolicy,
    width: int,
    wanted_tokens: Fraction,
    sequence_length: int,
    racks: int | None,
    batch: int | None,
) -> int:
    """Sequences per step under a batch policy."""
    if policy == "per_rack":
        return SEQUENCES_PER_RACK * _racks(width, racks)
    if policy == "token_power":
        bound = float(wanted_tokens) ** TOKEN_POWER / sequence_length
        return 2 ** max(0, math.floor(math.log2(bound)))
    if policy == "fixed":
        if batch is None or batch < 1:
            raise UsageError(
                f"batch policy fixed needs batch >= 1, got {batch}", remedy="set batch"
            )
        return batch
    raise UsageError(
        f"batch policy {policy!r} is unknown", remedy="use per_rack, token_power or fixed"
    )


def _outside(value: float, bounds: tuple[int, int]) -> bool:
    return not bounds[0] <= value <= bounds[1]


def _family_value(rung: Rung, name: str) -> Any:
    """What the family gives to a field at this width; a switch that is no field is off."""
    if rung.family != "micro":
        return getattr(derive_shape(rung.family, rung.width), name, False)
    if name == "head_dim":
        return MICRO_HEAD_DIM
    plain = derive_shape("micro", rung.width, head_dim=rung.config.head_dim)
    return getattr(plain, name, False)


def _warnings(rung: Rung) -> list[str]:
    """What a reader of this plan should know before trusting it."""
    config = rung.config
    warnings = [
        f"{name} = {value} was set by hand; family {rung.family} gives {reference}"
        for name, value in rung.overrides
        if (reference := _family_value(rung, name)) != value
    ]
    for name, divisor in (("num_kv_heads_local", 4), ("num_kv_heads_global", 8)):
        rule = max(1, config.num_heads // divisor)
        if getattr(config, name) < rule:
            warnings.append(f"{name} = {getattr(config, name)}: the rule's {rule} does not divide")
    if _outside(rung.width, LAW_WIDTHS) or _outside(rung.tokens_per_active_param, LAW_RATIOS):
        warnings.append(
            "learning rates are extrapolated: the law was fitted at widths "
            f"{LAW_WIDTHS[0]}-{LAW_WIDTHS[1]} and {LAW_RATIOS[0]}-{LAW_RATIOS[1]} tokens per "
            "active parameter"
        )
    if rung.lr_capped:
        warnings.append("lr_capped: a learning rate is at its cap of 0.05; train longer or wider")
    if rung.beta2_guard:
        warnings.append("beta2_guard: beta2 was lowered to 1 - 10 / steps")
    if rung.steps < MIN_FORECAST_STEPS:
        warnings.append(
            f"{rung.steps} steps are fewer than {MIN_FORECAST_STEPS}: no forecast can use this run"
        )
    elif rung.warmup_steps == 0:
        warnings.append("fewer than 100 steps: no warm-up, the rate starts at its peak")
    if rung.stop_after is not None and rung.stop_after < rung.steps:
        warnings.append(
            f"stops after {rung.stop_after} of {rung.steps} steps; rates are of the full plan"
        )
    if rung.tokens_per_expert < MIN_TOKENS_PER_EXPERT:
        warnings.append(
            f"{rung.tokens_per_expert:.0f} tokens per expert and step: below "
            f"{MIN_TOKENS_PER_EXPERT} the noise of the balance dominates"
        )
    return warnings


def evaluation_marks(steps: int) -> tuple[int, ...]:
    """Completed updates of the evaluations: max(1, round(k * steps / 20)) for k = 1..20.

    Below 20 steps marks coincide and are listed once.
    """
    marks = (max(1, round(Fraction(k * steps, NUM_MARKS))) for k in range(1, NUM_MARKS + 1))
    return tuple(sorted(set(marks)))


def mixture_block(family: Family, steps: int, batch: int) -> int:
    """Sequences in one block of the mixture order.

    49,152 as in the public run; `micro` uses a power of two near a fortieth of the run, at least
    64. Halved until a block's period is at most a tenth of the run.
    """
    block = LATTICE_SEQUENCES
    if family == "micro":
        block = max(64, 2 ** math.floor(math.log2(max(1, steps * batch / 40))))
    while block > 1 and phase_granule(batch, block) * 10 > steps and block % 2 == 0:
        block //= 2
    return block


def phase_granule(batch: int, block: int) -> int:
    """Updates after which whole blocks have been consumed."""
    return block // math.gcd(block, batch)


def phase_boundary(fraction: float | str, steps: int, batch: int, block: int) -> int:
    """Step at which a mixture phase starts: floor(fraction * steps), floored to the granule."""
    granule = phase_granule(batch, block)
    return math.floor(Fraction(str(fraction)) * steps) // granule * granule


def differences(first: Rung, second: Rung) -> Differences:
    """What differs between two rungs. In one ladder `chosen` is empty, the width apart."""
    pairs = {
        field.name: (getattr(first, field.name), getattr(second, field.name))
        for field in dataclasses.fields(Rung)
        if field.name not in ("config", "warnings")
    }
    pairs |= {
        f"config.{field.name}": (
            getattr(first.config, field.name),
            getattr(second.config, field.name),
        )
        for field in dataclasses.fields(ModelConfig)
    }
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    chosen = {n: p for n, p in differing.items() if n in INPUT_FIELDS and n != "width"}
    derived = {n: p for n, p in differing.items() if n not in INPUT_FIELDS}
    return Differences(derived=derived, chosen=chosen)
