"""Pools of runs for the Chinchilla baseline, from a table of public runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from portolan.errors import UsageError
from portolan.scaling.task_baselines import Pool
from portolan.scaling.tasks import Task

RATIO_RANGE = (2.0, 1500.0)
COLUMNS = ("suite", "run_id", "metric", "params_active", "tokens", "flops", "final_loss", "dataset")


def read_pools(path: Path, tasks: Sequence[Task]) -> Mapping[str, Pool]:
    """Per task, the smaller runs of its suite, metric and data set, 2 < D/N < 1,500.

    Smaller is N below the target's, and never more FLOPs than the largest rung where only these
    are known to be comparable (iso-FLOP suites).
    """
    table = pl.read_parquet(path)
    if missing := [name for name in COLUMNS if name not in table.columns]:
        raise UsageError(
            f"{path} has no column {missing[0]!r}", remedy=f"it needs {', '.join(COLUMNS)}"
        )
    table = table.drop_nulls(["params_active", "tokens", "final_loss"])
    ratio = pl.col("tokens") / pl.col("params_active")
    table = table.filter((ratio > RATIO_RANGE[0]) & (ratio < RATIO_RANGE[1]))
    pools = {}
    for task in tasks:
        if task.target_params is None:
            continue
        rows = table.filter((pl.col("suite") == task.suite) & (pl.col("metric") == task.metric))
        rungs = rows.filter(pl.col("run_id").is_in(list(task.rung_ids)))
        sets = rungs["dataset"].drop_nulls().unique().to_list()
        if sets:
            rows = rows.filter(pl.col("dataset").is_in(sets))
        rows = rows.filter(
            (pl.col("params_active") < task.target_params) & (pl.col("run_id") != task.target_id)
        )
        if "isoflop" in task.suite or task.kind == "nd_grid":
            rows = rows.filter(pl.col("flops") <= 1.001 * float(task.ladder.x.max()))
        if len(rows):
            pools[task.id] = Pool(
                *(rows[name].to_numpy() for name in ("params_active", "tokens", "final_loss"))
            )
    return pools
