"""Metrics of a run, condensed for drawing: at most a few hundred points a curve.

Only the canonical curve counts, not the rows that a later attempt repeated. Gradient and parameter
norms of leaves are combined into a few groups (root of the sum of squares).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portolan.report.facts import Bucket, Evaluation

MAX_POINTS = 120
"""Points of one curve; a bucket of rows becomes one point with mean, smallest and largest."""
EVALUATION_PREFIXES = ("eval_dropless/", "eval/")
SERIES_PREFIXES = (
    "train/cross_entropy",
    "train/loss",
    "rate/",
    "router/entropy/",
    "router/load_max_over_mean/",
    "router/drop_fraction/",
    "norm/gradient/global",
    "throughput/tokens_per_second",
)
NORM_KINDS = ("norm/gradient/", "norm/parameters/")

LEAF_GROUPS: tuple[tuple[str, str], ...] = (
    ("embed/table", "embedding"),
    ("head/proj", "output head"),
    ("blocks/moe/router", "router"),
    ("blocks/attn/head_gate", "attention gate"),
    ("blocks/moe/experts/", "experts"),
    ("blocks/moe/latent_", "latent pair"),
    ("blocks/shared/", "shared experts"),
    ("blocks/attn/w", "attention"),
)
LEAF_SUFFIX_GROUPS: tuple[tuple[str, str], ...] = (
    ("/gain", "norm gains"),
    ("/taps", "short convolutions"),
    ("_gnorm/down", "gated norms"),
    ("_gnorm/up", "gated norms"),
)


@dataclass(frozen=True)
class RunSeries:
    """Metrics of one run."""

    completed: int
    train_seconds: float | None
    evaluations: dict[str, tuple[Evaluation, ...]]
    series: dict[str, tuple[Bucket, ...]]


NO_SERIES = RunSeries(0, None, {}, {})


def leaf_group(path: str) -> str:
    """Display group of a parameter by its tree path."""
    for suffix, group in LEAF_SUFFIX_GROUPS:
        if path.endswith(suffix):
            return group
    for prefix, group in LEAF_GROUPS:
        if path.startswith(prefix):
            return group
    return "other"


def read_series(
    run_folder: Path, num_steps: int | None, prefixes: Sequence[str] = SERIES_PREFIXES
) -> RunSeries:
    """Read and condense the metrics of a run; empty when it has none yet.

    Of the series only those are kept whose key begins with one of `prefixes`.
    """
    has_segments = any((run_folder / "metrics").glob("*.parquet"))
    if not has_segments and not (run_folder / "metrics.jsonl").is_file():
        return NO_SERIES
    import polars as pl

    from portolan.track.tracker import read_metrics

    frame = read_metrics(run_folder).filter(pl.col("value").is_not_null())
    if frame.is_empty():
        return NO_SERIES
    frame = frame.select("row", "completed", "key", "value").sort("row", maintain_order=True)
    completed = int(frame["completed"].cast(pl.Int64).max() or 0)  # type: ignore[arg-type]
    seconds = frame.filter(pl.col("key") == "throughput/step_seconds")["value"]
    rows = max(num_steps or 0, completed)
    drawn = pl.any_horizontal(pl.col("key").str.starts_with(p) for p in prefixes)
    parts = [frame.filter(drawn), *(_grouped_norms(frame, kind) for kind in NORM_KINDS)]
    return RunSeries(
        completed=completed,
        train_seconds=float(seconds.sum()) if len(seconds) else None,
        evaluations=_evaluations(frame),
        series=_condense(pl.concat([part.select("row", "key", "value") for part in parts]), rows),
    )


def _evaluations(frame: Any) -> dict[str, tuple[Evaluation, ...]]:
    import polars as pl

    wanted = pl.any_horizontal(pl.col("key").str.starts_with(p) for p in EVALUATION_PREFIXES)
    evaluations: dict[str, list[Evaluation]] = {}
    for key, completed, value in frame.filter(wanted).select("key", "completed", "value").rows():
        if math.isfinite(value):
            evaluations.setdefault(key, []).append(Evaluation(int(completed), float(value)))
    return {key: tuple(sorted(values)) for key, values in sorted(evaluations.items())}


def _grouped_norms(frame: Any, kind: str) -> Any:
    """Rows `<kind><constrained|free>/<group>`: leaf norms combined per row by sum of squares.

    A leaf is constrained when the run logs its drift, which only fixed-norm leaves have.
    """
    import polars as pl

    drift = "norm/drift/"
    keys = frame["key"].unique().to_list()
    fixed = {key.removeprefix(drift) for key in keys if key.startswith(drift)}
    names = {}
    for key in keys:
        leaf = key.removeprefix(kind)
        if key.startswith(kind) and leaf != "global":
            names[key] = f"{kind}{'constrained' if leaf in fixed else 'free'}/{leaf_group(leaf)}"
    return (
        frame.filter(pl.col("key").is_in(list(names)))
        .with_columns(pl.col("key").replace(names))
        .group_by("row", "key", maintain_order=True)
        .agg((pl.col("value") ** 2).sum().sqrt())
    )


def _condense(frame: Any, num_rows: int) -> dict[str, tuple[Bucket, ...]]:
    """Mean, smallest and largest finite value of each key in at most MAX_POINTS buckets."""
    import polars as pl

    width = max(1, math.ceil(num_rows / MAX_POINTS))
    condensed = (
        frame.filter(pl.col("value").is_finite())
        .group_by("key", (pl.col("row") // width).alias("bucket"))
        .agg(
            (pl.col("row").max() + 1).alias("completed"),
            pl.col("value").mean().alias("mean"),
            pl.col("value").min().alias("low"),
            pl.col("value").max().alias("high"),
        )
        .sort("key", "bucket")
    )
    series: dict[str, list[Bucket]] = {}
    for key, _, completed, mean, low, high in condensed.rows():
        series.setdefault(key, []).append(Bucket(int(completed), mean, low, high))
    return {key: tuple(points) for key, points in series.items()}
