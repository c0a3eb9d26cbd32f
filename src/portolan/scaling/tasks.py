"""Backtest tasks: ladders of final losses with one larger run to forecast."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portolan.errors import UsageError
from portolan.files import read_json
from portolan.scaling.drifting_law import Ladder, extrapolate
from portolan.scaling.learnt import excluded_suites, learnt_prior

QUANTILE_NAMES = {
    "q025": 0.025,
    "q05": 0.05,
    "q10": 0.1,
    "q25": 0.25,
    "median": 0.5,
    "q75": 0.75,
    "q90": 0.9,
    "q95": 0.95,
    "q975": 0.975,
}
SIGNIFICANT_DIGITS = 9
MIXED_KIND = "nd_grid"
"""Kind of tasks whose rungs differ in more than size; one law through them means little."""
UNSCORED_SPLIT = "stress"


@dataclass(frozen=True)
class Task:
    """One ladder; `truth` is None where the outcome is not known.

    `extrapolation` is the target's x over the largest rung's. `target_params` and `target_tokens`
    are None where the file does not state them.
    """

    id: str
    suite: str
    family: str
    kind: str
    axis: str
    metric: str
    ladder: Ladder
    rung_ids: tuple[str, ...]
    target_id: str
    target_params: float | None
    target_tokens: float | None
    truth: float | None
    scored: bool

    @property
    def extrapolation(self) -> float:
        """Target x over the x of the largest rung."""
        return self.ladder.target_x / float(self.ladder.x.max())


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSON file: a list of objects with `id`, `rung_x`, `rung_loss` and `target_x`.

    `suite`, `family`, `kind`, `metric`, `rung_sd` (absolute), `true`, ids of runs and the target's
    N and D are optional; other fields are ignored.

    Raises:
        UsageError: names the task and the field that is wrong.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {error}", remedy="give a JSON list of tasks"
        ) from None
    if not isinstance(content, list) or not content:
        raise UsageError(f"{path} is not a list of tasks", remedy="give a JSON list of objects")
    tasks = [_parse(entry, f"task {number}") for number, entry in enumerate(content, start=1)]
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UsageError(f"two tasks have the id {task.id!r}", remedy="give each its own id")
        seen.add(task.id)
    return tasks


def _parse(entry: Any, place: str) -> Task:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place} is not an object", remedy="give a JSON list of objects")
    identity = entry.get("id")
    if not isinstance(identity, str) or not identity:
        raise UsageError(f"{place} has no id", remedy="give every task a text `id`")
    place = f"task {identity}"
    x, losses = (_positive_list(entry, name, place) for name in ("rung_x", "rung_loss"))
    if len(x) != len(losses):
        raise UsageError(
            f"{place}: {len(x)} values in rung_x and {len(losses)} in rung_loss",
            remedy="give one x and one loss per rung",
        )
    rung_sd = _positive_list(entry, "rung_sd", place) if entry.get("rung_sd") else None
    if rung_sd is not None and len(rung_sd) != len(x):
        raise UsageError(f"{place}: rung_sd needs one value per rung, has {len(rung_sd)}")
    order = np.argsort(x, kind="stable")
    ladder = Ladder(
        x=x[order],
        losses=losses[order],
        target_x=_positive(entry.get("target_x"), "target_x", place),
        rung_sd=None if rung_sd is None else (rung_sd / losses)[order],
    )
    rung_ids = entry.get("rung_ids")
    optional = {
        name: None if entry.get(name) is None else _positive(entry[name], name, place)
        for name in ("true", "target_N", "target_D")
    }
    return Task(
        id=identity,
        ladder=ladder,
        rung_ids=tuple(map(str, rung_ids)) if isinstance(rung_ids, list) else (),
        target_params=optional["target_N"],
        target_tokens=optional["target_D"],
        truth=optional["true"],
        scored=entry.get("split") != UNSCORED_SPLIT,
        **{
            name: str(entry.get(name) or "")
            for name in ("suite", "family", "kind", "metric", "target_id")
        },
        axis=str(entry.get("x") or ""),
    )


def _positive(value: Any, name: str, place: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise UsageError(
            f"{place}: {name} is {value!r}, not a positive number",
            remedy="sizes and losses are positive, finite numbers, such as 2.9 or 1e20",
        )
    return float(value)


def _positive_list(entry: Mapping[str, Any], name: str, place: str) -> np.ndarray:
    values = entry.get(name)
    if not isinstance(values, list) or not values:
        raise UsageError(
            f"{place}: {name} is {values!r}, not a list of numbers",
            remedy="give rung_x and rung_loss with one number per rung",
        )
    return np.array([_positive(value, name, place) for value in values])


def predict_task(task: Task, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """Quantiles of the target's loss, with nothing learnt from the task's own suite and family."""
    excluded = excluded_suites([task.suite, task.family, *exclude])
    predictive = extrapolate(task.ladder, learnt_prior(excluded))
    return quantile_record(task.id, predictive.quantiles(tuple(QUANTILE_NAMES.values())))


def quantile_record(identity: str, values: np.ndarray) -> dict[str, Any]:
    """The written form of a prediction; `values` in the order of QUANTILE_NAMES."""
    named = dict(zip(QUANTILE_NAMES, values, strict=True))
    order = ("median", *(name for name in QUANTILE_NAMES if name != "median"))
    return {"id": identity} | {
        name: float(f"{named[name]:.{SIGNIFICANT_DIGITS}g}") for name in order
    }
