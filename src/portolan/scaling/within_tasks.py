"""Backtest tasks within a run: another learning-rate schedule, or more tokens."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from portolan.errors import UsageError
from portolan.scaling.task_scores import TaskScore, score_samples
from portolan.scaling.tasks import QUANTILE_NAMES, quantile_record
from portolan.scaling.within_run import (
    Array,
    ScheduledRun,
    forecast_schedule,
    forecast_tokens,
)

TOKENS_RULE = re.compile(r"tokens<=([0-9.]+)B")
BILLION = 1e9
TOKEN_SLACK = 1.005
NUM_LEVELS = 199
LEVELS = tuple((np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS)
NO_ANNEALING = "law without annealing"


@dataclass(frozen=True)
class WithinTask:
    """Curves to learn from and the schedule or tokens of the run to forecast.

    `train` has one run under a token rule, cut to the tokens allowed; `target` has no losses
    that a forecast reads, its `losses` are the outcome. `baseline` is a forecast given with the
    task, None without one.
    """

    id: str
    suite: str
    train: tuple[ScheduledRun, ...]
    target: ScheduledRun
    by_tokens: bool
    baseline: float | None


def read_within_tasks(path: Path, curves: Path) -> list[WithinTask]:
    """Tasks of a CSV with the columns id, suite, train and target, and a table of curves.

    `train` names runs joined by `+`, or says `tokens<=100B` of the target's own curve.

    Raises:
        UsageError: names the task, and the run that the table lacks.
    """
    table = pl.read_parquet(curves)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"id", "suite", "train", "target"} <= set(rows[0]):
        raise UsageError(f"{path} is no table of tasks with id, suite, train and target")
    return [_parse(row, table) for row in rows]


def _parse(row: dict[str, str], table: pl.DataFrame) -> WithinTask:
    rule = TOKENS_RULE.search(row["train"])
    metric = row["id"].partition(f"{row['target']}_")[2] if rule else ""
    target = _curve(row, table, row["target"], metric, "tokens" if rule else "step")
    final, predicted = row.get("final_true"), row.get("final_pred")
    baseline = float(predicted) if predicted and final else None
    if rule:
        limit = float(rule[1]) * BILLION * TOKEN_SLACK
        seen = target.steps <= limit
        train = (ScheduledRun(target.steps[seen], target.rates[seen], target.losses[seen]),)
    else:
        prefix = row["target"].rpartition("/")[0]
        names = [f"{prefix}/{name}" if prefix else name for name in row["train"].split("+")]
        train = tuple(_curve(row, table, name, "", "step") for name in names)
    return WithinTask(row["id"], row["suite"], train, target, rule is not None, baseline)


def _curve(
    row: dict[str, str], table: pl.DataFrame, run: str, metric: str, axis: str
) -> ScheduledRun:
    """Rows of one run, `steps` being steps or tokens."""
    chosen = table.filter((pl.col("suite") == row["suite"]) & (pl.col("run_id") == run))
    if metric:
        chosen = chosen.filter(pl.col("metric") == metric)
    chosen = chosen.drop_nulls([axis, "loss"]).sort(axis)
    if len(chosen) < 4:
        raise UsageError(
            f"task {row['id']}: the table of curves has {len(chosen)} points of run {run!r}",
            remedy="name a run of the table in train and target",
        )
    rates = chosen["lr"].fill_null(0.0)
    return ScheduledRun(*(column.to_numpy() for column in (chosen[axis], rates, chosen["loss"])))


def _quantiles(task: WithinTask, levels: Sequence[float]) -> Array:
    if task.by_tokens:
        (seen,) = task.train
        return forecast_tokens(seen.steps, seen.losses, float(task.target.steps[-1]), levels)
    return forecast_schedule(task.train, task.target.steps, task.target.rates, levels)[1]


def predict_within(task: WithinTask) -> dict[str, Any]:
    """Quantiles of the last loss of the target."""
    return quantile_record(task.id, _quantiles(task, tuple(QUANTILE_NAMES.values())))


def score_within(task: WithinTask) -> list[TaskScore]:
    """Scores of the forecast, and of the one given with the task as a point."""
    reach = float(task.target.steps[-1] / max(run.steps[-1] for run in task.train))
    outcome = float(task.target.losses[-1])
    suite = f"{task.suite}, more tokens" if task.by_tokens else f"{task.suite}, schedules"
    scores = [score_samples(task.id, suite, "F2", reach, _quantiles(task, LEVELS), outcome)]
    if task.baseline is not None:
        point = np.full(2, task.baseline)
        scores.append(score_samples(task.id, suite, NO_ANNEALING, reach, point, outcome))
    return scores
