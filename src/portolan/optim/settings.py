"""What an optimizer is told: frozen, and checked when it is made. No JAX here."""

from dataclasses import dataclass, replace
from typing import Literal

from portolan.errors import UsageError
from portolan.optim.schedule import BETA1, DECAY_INITIAL, PeakRates

Matrix = Literal["muonh", "adamh", "adamw"]
GatedNormMatrix = Literal["muonh", "adamh", "adam"]
Scope = Literal["joint", "per_expert"]
Radius = Literal["current", "initial"]
StackType = Literal["bfloat16", "float32", "float64"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "matrix": ("muonh", "adamh", "adamw"),
    "gnorm": ("muonh", "adamh", "adam", None),
    "hyperball_scope": ("joint", "per_expert", None),
    "hyperball_radius": ("current", "initial"),
    "ns_dtype": ("bfloat16", "float32", "float64"),
}
ADAMW_EPSILON = 1e-8
ADAMW_WEIGHT_DECAY = 0.1
ADAMW_CLIP = 1.0


class OptimizerError(UsageError):
    """Settings or a parameter tree that the optimizer refuses."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Constants of the update rule; hashable, part of the recipe.

    Args:
        hyperball_scope: one norm per layer over all experts (`joint`) or one per expert matrix;
            has no default: it must be chosen wherever experts exist.
        hyperball_radius: keep the `current` norm, or the `initial` one stored in the state.
        matrix: rule for hidden matrices; `adamh` and `adamw` are ablation arms, and `adamw` takes
            the head too.
        gnorm: rule for the gate matrices of the gated norms; None follows `matrix`.
        beta2, epsilon: of Adam; None until `with_law` fills them in.
        gate_router_decay, decay_start: annealed decay of router and head gate; the first update
            that decays.
        clip: global-norm bound of the gradient, over `clip_groups` (None: all); None is no bound.
        weight_decay: of the `adamw` arm only.
    """

    hyperball_scope: Scope | None
    matrix: Matrix = "muonh"
    gnorm: GatedNormMatrix | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_dtype: StackType = "bfloat16"
    ns_steps: int = 5
    muon_eps: float = 1e-8
    hyperball_radius: Radius = "current"
    beta1: float = BETA1
    beta2: float | None = None
    epsilon: float | None = None
    gate_router_decay: float = DECAY_INITIAL
    decay_start: int = 0
    clip: float | None = None
    clip_groups: tuple[str, ...] | None = None
    weight_decay: float = ADAMW_WEIGHT_DECAY

    def __post_init__(self) -> None:
        """Refuse unknown choices and constants out of range."""
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                allowed = ", ".join(str(choice) for choice in choices)
                raise OptimizerError(
                    f"optim.{name} = {value!r} is unknown", remedy=f"use one of {allowed}"
                )
        ranges = {
            "momentum": 0 <= self.momentum < 1,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": self.beta2 is None or 0 <= self.beta2 < 1,
            "epsilon": self.epsilon is None or self.epsilon > 0,
            "muon_eps": self.muon_eps > 0,
            "ns_steps": 1 <= self.ns_steps <= 5,
            "gate_router_decay": self.gate_router_decay >= 0,
            "decay_start": self.decay_start >= 0,
            "weight_decay": self.weight_decay >= 0,
            "clip": self.clip is None or self.clip > 0,
        }
        for name, holds in ranges.items():
            if not holds:
                raise OptimizerError(f"optim.{name} = {getattr(self, name)} is out of range")

    def with_law(self, peak: PeakRates) -> "OptimizerSettings":
        """Fill beta1 and what is still unset (beta2, epsilon) from the resolved law."""
        return replace(
            self,
            beta1=peak.beta1,
            beta2=peak.beta2 if self.beta2 is None else self.beta2,
            epsilon=peak.epsilon if self.epsilon is None else self.epsilon,
        )

    @property
    def resolved_gnorm(self) -> str:
        """The rule of the gated-norm matrices."""
        return self.matrix if self.gnorm is None else self.gnorm

    @property
    def resolved_clip(self) -> float | None:
        """The bound on the global gradient norm; the `adamw` arm always has one, by default 1."""
        return ADAMW_CLIP if self.clip is None and self.matrix == "adamw" else self.clip
