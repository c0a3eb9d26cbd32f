"""Backtests from files: read tasks, write predictions, score them beside the baselines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from portolan.console import say
from portolan.files import write_json_atomic
from portolan.scaling.drifting_law import extrapolate
from portolan.scaling.learnt import check_names, excluded_suites, learnt_prior
from portolan.scaling.pools import read_pools
from portolan.scaling.task_baselines import baseline_samples, chinchilla_samples
from portolan.scaling.task_scores import TaskScore, by_method, paired_ratio, score_samples, summary
from portolan.scaling.tasks import MIXED_KIND, Task, predict_task, read_tasks
from portolan.scaling.within_tasks import predict_within, read_within_tasks, score_within

F2 = "F2"
CHINCHILLA = "Chinchilla N, D"
MISSING_SUITE = "not stated"
NUM_LEVELS = 199
SCORE_LEVELS = tuple((np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS)


def predict_tasks(
    path: Path,
    output: Path,
    *,
    exclude: Sequence[str] = (),
    runs: Path | None = None,
    report: Path | None = None,
) -> None:
    """Write one object of quantiles a task; print scores of the tasks whose outcome is given."""
    check_names(exclude)
    tasks = read_tasks(path)
    write_json_atomic(output, [predict_task(task, exclude) for task in tasks])
    say(f"{len(tasks)} forecasts in {output}")
    scores = score_tasks(tasks, exclude, runs)
    if scores:
        print_scores(scores)
    if report is not None and scores:
        from portolan.report.backtest import build_page

        build_page(report, scores, F2)
        say(f"page: {report}")


def score_tasks(
    tasks: Sequence[Task], exclude: Sequence[str] = (), runs: Path | None = None
) -> list[TaskScore]:
    """Scores of F2 and of every baseline that applies, for tasks with a known outcome.

    `runs` is a table of runs, from which the Chinchilla baseline takes its pools.
    """
    known = [task for task in tasks if task.truth is not None and task.scored]
    pools = read_pools(runs, known) if runs is not None else {}
    scores = []
    for task in known:
        excluded = excluded_suites([task.suite, task.family, *exclude])
        quantiles = extrapolate(task.ladder, learnt_prior(excluded)).quantiles(SCORE_LEVELS)
        samples = {F2: (quantiles, None)}
        if task.kind != MIXED_KIND:
            samples |= {k: (v[1:], v[0]) for k, v in baseline_samples(task.ladder).items()}
        pool = pools.get(task.id)
        if pool is not None and task.target_params and task.target_tokens:
            drawn = chinchilla_samples(pool, task.target_params, task.target_tokens)
            if drawn is not None:
                samples[CHINCHILLA] = drawn[1:], drawn[0]
        for method, (values, point) in samples.items():
            scores.append(
                score_samples(
                    task.id, task.suite or MISSING_SUITE, method, task.extrapolation, values,
                    float(task.truth or 0), point,
                )
            )  # fmt: skip
    return scores


def print_scores(scores: Sequence[TaskScore]) -> None:
    """One line per method; F2 also over the tasks that the baselines can forecast."""
    groups = by_method(scores, F2)
    ours = groups[F2]
    say("suites counted once, per cent of the outcome; CRPS ratio with a 90 % bootstrap interval:")
    for name, group in groups.items():
        v: dict[str, Any] = summary(group)
        ratio = ""
        if not name.startswith(F2):
            ratio = "  F2/this {:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(ours, group))
        say(
            f"  {name:<29} {v['tasks']:>3} tasks {v['suites']:>2} suites  error {v['error']:.2f}"
            f"  CRPS {v['crps']:.3f}  inside 80 % {v['coverage_80']:.0f}, 90 % "
            f"{v['coverage_90']:.0f}  width {v['width_90']:.2f}{ratio}"
        )


def predict_curves(path: Path, curves: Path, output: Path, *, report: Path | None = None) -> None:
    """Forecast ends of curves under another schedule or after more tokens; write and score them."""
    tasks = read_within_tasks(path, curves)
    write_json_atomic(output, [predict_within(task) for task in tasks])
    say(f"{len(tasks)} forecasts in {output}")
    scores = [score for task in tasks for score in score_within(task)]
    if scores:
        print_scores(scores)
    if report is not None and scores:
        from portolan.report.backtest import build_page

        build_page(report, scores, F2)
        say(f"page: {report}")
