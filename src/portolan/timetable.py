"""Settings of what changes while a run goes on: the mixture and the length of its rows."""

from typing import Annotated

import pydantic
from pydantic import Field

from portolan.settings import PositiveInt, Settings

InsideRun = Annotated[float, Field(gt=0, lt=1)]


class MixturePhase(Settings):
    """Other weights from a fraction of every run on; no weights: proportional to tokens."""

    name: Annotated[str, Field(min_length=1)]
    from_fraction: InsideRun
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})


class MixtureSettings(Settings):
    """Weights of the domains: proportional to tokens, or `weights` by source key; and the cap.

    `phases` change the weights at a fraction of every run, rungs included, at the last mixture
    block that starts before it.
    """

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    max_epochs: Annotated[float, Field(gt=0)] = 8.0
    phases: tuple[MixturePhase, ...] = ()

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> "MixtureSettings":
        _check_order("phases", [phase.from_fraction for phase in self.phases])
        return self


class ContextStage(Settings):
    """Longer rows from a fraction of the target's run on, or from an update of it.

    `qk_multiplier` is that of the shape times 1 + 0.1 ln(length / first length) unless given.
    """

    sequence_length: PositiveInt
    from_fraction: InsideRun | None = None
    from_step: PositiveInt | None = None
    qk_multiplier: Annotated[float, Field(gt=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _one_start(self) -> "ContextStage":
        if (self.from_fraction is None) == (self.from_step is None):
            raise ValueError("give from_fraction or from_step, one of them")
        return self


class ContextSettings(Settings):
    """Context extension of the target: tokens an update, optimizer state and schedule stay.

    Evaluation keeps the packing of the first length; `evaluate` adds one in rows of the length in
    force, under a name of its own.
    """

    stages: tuple[ContextStage, ...] = ()
    evaluate: bool = False


def _check_order(name: str, starts: list[float]) -> None:
    if starts != sorted(set(starts)):
        raise ValueError(f"{name} start at {starts}: need increasing fractions")
