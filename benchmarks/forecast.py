"""Accuracy of the forecasts: public ladders, whole suites left out; curves; the public rungs.

Run `python benchmarks/forecast.py [--quick] [--json FILE]`. It reads the published figures laid
beside the checkout (`PORTOLAN_SHARED_DATA`). `--quick` leaves out the Chinchilla surface, the
schedules and the nested choice of settings.
"""

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import claim, main, report, row
from nested import score_structures

from portolan.pipeline.backtesting import F2, SCORE_LEVELS, score_tasks
from portolan.scaling.drifting_law import DriftPrior, extrapolate
from portolan.scaling.learnt import excluded_suites, learnt_prior
from portolan.scaling.task_scores import (
    TaskScore,
    by_extrapolation,
    by_suite,
    paired_ratio,
    score_samples,
    summary,
)
from portolan.scaling.tasks import MIXED_KIND, Task, read_tasks
from portolan.scaling.within_tasks import read_within_tasks, score_within

BEST_BASELINE = "0.55 x last rung, prior on E"
MEASURES = {
    "error": "% (mean over suites of the median |error|)",
    "crps": "%",
    "interval_score_90": "%",
    "coverage_80": "%",
    "coverage_90": "%",
    "width_90": "% (median over suites)",
}
CENTRES = list(itertools.product((0.5, 0.55, 0.6, 0.65, 0.7), (0.002, 0.004, 0.008),
                                 (0.002, 0.004, 0.008)))  # fmt: skip


def shared_data() -> Path:
    """Folder of the published figures."""
    beside = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    return Path(os.environ.get("PORTOLAN_SHARED_DATA", beside)) / "scaling"


def rows_of(label: str, scores: Sequence[TaskScore]) -> list[dict[str, Any]]:
    values = summary(scores)
    head = f"{label} ({values['tasks']} tasks, {values['suites']} suites)"
    return [row(f"{head}: {name}", values[name], unit) for name, unit in MEASURES.items()]


def nested_choice(tasks: Sequence[Task]) -> list[TaskScore]:
    """Settings by the best mean CRPS of the other suites: what choosing by score would earn."""
    found: dict[tuple[float, ...], list[TaskScore]] = {}
    for centre in CENTRES:
        prior = DriftPrior(*centre, decline=learnt_prior().decline)
        found[centre] = [
            score_samples(
                task.id, task.suite, "nested", task.extrapolation,
                extrapolate(task.ladder, prior).quantiles(SCORE_LEVELS[::4]),
                float(task.truth or 0),
            )
            for task in tasks
        ]  # fmt: skip
    chosen = []
    for suite in sorted({task.suite for task in tasks}):
        best = min(
            CENTRES,
            key=lambda c: summary([s for s in found[c] if s.suite != suite])["crps"],
        )
        chosen += [score for score in found[best] if score.suite == suite]
    return chosen


def one_prior(tasks: Sequence[Task]) -> list[TaskScore]:
    """The prior learnt from all suites, the scored one too: the optimism of not leaving out."""
    return [
        score_samples(
            task.id, task.suite, "all suites", task.extrapolation,
            extrapolate(task.ladder, learnt_prior()).quantiles(SCORE_LEVELS),
            float(task.truth or 0),
        )
        for task in tasks
    ]  # fmt: skip


def measure(quick: bool) -> dict[str, Any]:
    folder = shared_data()
    tasks = read_tasks(folder / "tasks.json")
    begin = time.process_time()
    for task in tasks:
        excluded = excluded_suites([task.suite, task.family])
        extrapolate(task.ladder, learnt_prior(excluded)).quantiles((0.05, 0.5, 0.95))
    seconds = time.process_time() - begin
    scores = score_tasks(tasks, runs=None if quick else folder / "runs.parquet")
    ladders = {s.task for s in scores if s.method == BEST_BASELINE}
    ours = [s for s in scores if s.method == F2 and s.task in ladders]
    rows = [row("processor seconds of all forecasts", seconds, f"s ({len(tasks)} tasks)")]
    rows += rows_of("F2, all tasks", [s for s in scores if s.method == F2])
    rows += rows_of("F2, ladders", ours)
    for method in dict.fromkeys(s.method for s in scores if s.method != F2):
        group = [s for s in scores if s.method == method]
        rows += rows_of(method, group)
        rows.append(row(f"CRPS of F2 over {method}", paired_ratio(
            [s for s in scores if s.method == F2], group)[0], "ratio, common tasks"))  # fmt: skip
    for band in by_extrapolation(ours):
        rows.append(
            row(f"F2, {band['band']}: |error|", band["error"], f"% ({band['tasks']} tasks)")
        )
        rows.append(row(f"F2, {band['band']}: inside 90 %", band["coverage_90"], "%"))
    for suite in by_suite(ours):
        rows.append(
            row(f"F2, {suite['suite']}: CRPS", suite["crps"], f"% ({suite['tasks']} tasks)")
        )
    usable = [t for t in tasks if t.id in ladders and t.kind != MIXED_KIND]
    rows += rows_of("F2, prior of all suites", one_prior(usable))
    if not quick:
        rows += rows_of("settings chosen by the CRPS of other suites", nested_choice(usable))
        baseline = [s for s in scores if s.method == BEST_BASELINE]
        for label, group in score_structures(usable).items():
            rows += rows_of(label, group)
            for name, value in zip(
                ("", ", 5 %", ", 95 %"), paired_ratio(group, baseline), strict=True
            ):
                rows.append(row(f"{label}: CRPS over {BEST_BASELINE}{name}", value, "ratio"))
        within = read_within_tasks(folder / "curve_tasks.csv", folder / "curves.parquet")
        found = [score for task in within for score in score_within(task)]
        for suite, method in itertools.product(
            sorted({s.suite for s in found}), dict.fromkeys(s.method for s in found)
        ):
            rows += rows_of(
                f"{suite}, {method}",
                [s for s in found if s.suite == suite and s.method == method],
            )
    return report(rows, _claims(scores, ours), ("numpy", "scipy"))


def _claims(scores: Sequence[TaskScore], ours: Sequence[TaskScore]) -> list[dict[str, Any]]:
    values = summary(ours)
    baseline = [s for s in scores if s.method == BEST_BASELINE]
    ratio, _, high = paired_ratio(ours, baseline)
    return [
        claim("median absolute error", values["error"], "%", "at most 0.75, goal 0.65",
              values["error"] <= 0.75),
        claim("CRPS", values["crps"], "%", "at most 0.60, goal 0.55", values["crps"] <= 0.60),
        claim("CRPS over the best baseline's", ratio, "ratio", "at most 0.85", ratio <= 0.85),
        claim("upper end of its 90 % bootstrap interval", high, "ratio", "below 1", high < 1),
        claim("80 % coverage", values["coverage_80"], "%", "75 to 88",
              75 <= values["coverage_80"] <= 88),
        claim("90 % coverage", values["coverage_90"], "%", "86 to 95",
              86 <= values["coverage_90"] <= 95),
        claim("median width of the 90 % interval", values["width_90"], "%",
              "at most 3.0, goal 2.6", values["width_90"] <= 3.0),
        claim("not suspiciously good", values["error"], "%", "at least 0.5",
              bool(np.isfinite(values["error"]) and values["error"] >= 0.5)),
    ]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, measure)
