"""Settings of what changes while a run goes on: the mixture and the length of its rows."""

from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from portolan.errors import UsageError
from portolan.files import read_json
from portolan.settings import PositiveInt, Settings

MAIN_PHASE = "main"
InsideRun = Annotated[float, Field(gt=0, lt=1)]


class MixturePhase(Settings):
    """Other weights from a fraction of every run on; no weights: proportional to tokens."""

    name: Annotated[str, Field(min_length=1)]
    from_fraction: InsideRun
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})


class MixtureSettings(Settings):
    """Weights of the cells: proportional to tokens, or `weights` by cell; and the cap on epochs.

    `phases` change the weights at a fraction of every run, rungs included, at the last mixture
    block that starts before it. `file`, a mixture file relative to the recipe, gives the weights
    of the first phase, `main`, and of every phase by its name.
    """

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    file: str = ""
    max_epochs: Annotated[float, Field(gt=0)] = 8.0
    phases: tuple[MixturePhase, ...] = ()

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> "MixtureSettings":
        _check_order("phases", [phase.from_fraction for phase in self.phases])
        names = [MAIN_PHASE, *(phase.name for phase in self.phases)]
        if len(set(names)) < len(names):
            raise ValueError(f"phases {names}: two have one name, or one that of the first")
        return self

    def with_file(self, folder: Path) -> "MixtureSettings":
        """These settings with the weights of the file, so that a recipe's digest covers them.

        Raises:
            UsageError: weights are given twice, or the file has other phases.
        """
        if not self.file:
            return self
        path = folder / self.file
        if self.weights or any(phase.weights for phase in self.phases):
            raise UsageError(
                f"mixture.file = {self.file!r} and mixture weights are both given",
                remedy="leave one of them out",
            )
        counts = _read_counts(path)
        names = [MAIN_PHASE, *(phase.name for phase in self.phases)]
        if list(counts) != names:
            raise UsageError(
                f"{path} has the phases {', '.join(counts)}, the recipe {', '.join(names)}",
                remedy="make the mixture again with `portolan mixture propose`",
            )
        phases = tuple(p.model_copy(update={"weights": counts[p.name]}) for p in self.phases)
        return self.model_copy(update={"weights": counts[MAIN_PHASE], "phases": phases})


def _read_counts(path: Path) -> dict[str, dict[str, float]]:
    """Counts by cell of every phase of a mixture file, in its order; all else is checked later."""
    try:
        phases: list[dict[str, Any]] = read_json(path)["phases"]
        return {
            phase["name"]: {cell: float(count) for cell, count in phase["counts"].items()}
            for phase in phases
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"mixture.file: {path} is not a mixture file: {type(error).__name__}: {error}",
            remedy="name a file of `portolan mixture propose`, or pass --set 'mixture.file=\"\"'",
        ) from error


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
