"""The structure of F2's law, chosen without the suite that is scored, or not chosen at all.

F2's shipped structure was fixed while looking at the public ladders. This file scores 216 others
beside it: the best by the score of the other suites, which is what choosing earns on a suite that
nobody has seen, and the equal average of all of them, which chooses nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from portolan.scaling.drifting_law import ASYMPTOTE_GRID, Array, condition, normalised
from portolan.scaling.learnt import excluded_suites, learnt_prior
from portolan.scaling.task_scores import TaskScore, score_samples, summary
from portolan.scaling.tasks import Task

FACTORS = np.exp2(np.arange(-3.0, 4.0))
"""Of the learnt noise and drift."""
LOSSES = np.exp(np.linspace(-0.3, 0.3, 801))
"""Over the best rung loss times a rough decline: where distribution functions are kept."""
ASYMPTOTES = (((-0.05, 0.0, 0.05), 0.02), ((-0.05, 0.0, 0.05), 0.03),
              ((-0.1, -0.05, 0.0, 0.05, 0.1), 0.02))  # fmt: skip
"""Offsets of the asymptote ratio that are averaged, and their standard deviation."""
LEVELS = (np.arange(199) + 0.5) / 199


@dataclass(frozen=True)
class Structure:
    """Log-normal weights over the factors (centre and sd in octaves), one of ASYMPTOTES, and the
    power of the evidence by which settings weigh."""

    noise: tuple[float, float]
    drift: tuple[float, float]
    asymptote: int
    evidence_power: float


STRUCTURES = [
    Structure((noise, noise_sd), (drift, drift_sd), asymptote, power)
    for noise, drift, noise_sd, drift_sd, asymptote, power in itertools.product(
        (-1, 0, 1), (-1, 0, 1), (0.5, 1.0), (0.5, 1.0), range(len(ASYMPTOTES)), (0.0, 0.1)
    )
]


@dataclass(frozen=True)
class Table:
    """Distribution functions [noise, drift, asymptote, loss] of a task, and log evidences."""

    task: Task
    losses: Array
    functions: Array
    evidence: Array


def tabulate(task: Task) -> Table:
    """Every setting of one task, with nothing learnt from its suite."""
    from scipy.special import ndtr

    prior = learnt_prior(excluded_suites([task.suite, task.family]))
    # The middle of the grid is a forecast of its own: the truth plays no part.
    middle = float(condition_median(task, prior.rung_noise, prior.drift, prior.asymptote_ratio))
    losses = middle * LOSSES
    shape = len(FACTORS), len(FACTORS), len(ASYMPTOTES)
    functions, evidence = np.zeros((*shape, len(losses))), np.zeros(shape)
    for i, j in np.ndindex(shape[:2]):
        part = condition(task.ladder, FACTORS[i] * prior.rung_noise, FACTORS[j] * prior.drift)
        excess = losses - part.asymptotes[:, None]
        z = (np.log(np.maximum(excess, 1e-12)) - part.locations[:, None]) / part.scales[:, None]
        below = np.where(excess > 0, ndtr(z), 0.0)
        for k, (offsets, sd) in enumerate(ASYMPTOTES):
            logs = [-0.5 * ((ASYMPTOTE_GRID - prior.asymptote_ratio - o) / sd) ** 2
                    for o in offsets]  # fmt: skip
            weight = np.mean([normalised(part.log_evidence + log) for log in logs], axis=0)
            functions[i, j, k] = weight @ below
            evidence[i, j, k] = np.mean([
                np.logaddexp.reduce(part.log_evidence + log) - np.logaddexp.reduce(log)
                for log in logs
            ])  # fmt: skip
    return Table(task, losses, functions, evidence)


def condition_median(task: Task, noise: float, drift: float, ratio: float) -> float:
    """The target's loss at one asymptote ratio."""
    part = condition(task.ladder, noise, drift)
    at = int(np.argmin(np.abs(ASYMPTOTE_GRID - ratio)))
    return float(part.asymptotes[at] + np.exp(part.locations[at]))


def mixture(table: Table, structure: Structure) -> Array:
    """Distribution function of one structure."""
    octaves = np.log2(FACTORS)
    rows, columns = (
        np.exp(-0.5 * ((octaves - centre) / sd) ** 2)
        for centre, sd in (structure.noise, structure.drift)
    )
    logs = structure.evidence_power * table.evidence[:, :, structure.asymptote]
    weight = np.outer(rows, columns) * np.exp(logs - logs.max())
    return np.tensordot(weight / weight.sum(), table.functions[:, :, structure.asymptote], 2)


def score(table: Table, function: Array, label: str) -> TaskScore:
    """Score of a distribution function."""
    rising = np.maximum.accumulate(function) + 1e-12 * np.arange(len(function))
    task = table.task
    quantiles = np.interp(LEVELS, rising, table.losses)
    return score_samples(
        task.id, task.suite, label, task.extrapolation, quantiles, float(task.truth or 0)
    )


def score_structures(tasks: Sequence[Task]) -> dict[str, list[TaskScore]]:
    """Scores of the nested choice, by CRPS and by CRPS and interval score, and of the average."""
    tables = [tabulate(task) for task in tasks]
    functions = [[mixture(table, s) for s in STRUCTURES] for table in tables]
    scores = [
        [score(table, function, "structure") for function in row]
        for table, row in zip(tables, functions, strict=True)
    ]
    rules: dict[str, Callable[[dict[str, float]], float]] = {
        "structure by the CRPS of other suites": lambda v: v["crps"],
        "structure by CRPS and a tenth of the interval score of other suites": (
            lambda v: v["crps"] + v["interval_score_90"] / 10
        ),
    }
    found = {label: _nested(scores, rule) for label, rule in rules.items()}
    average = "equal average of all structures"
    found[average] = [
        score(table, np.mean(row, axis=0), average)
        for table, row in zip(tables, functions, strict=True)
    ]
    return found


def _nested(
    scores: Sequence[Sequence[TaskScore]], rule: Callable[[dict[str, float]], float]
) -> list[TaskScore]:
    """For every suite the scores of the structure that is best on the others."""
    chosen: list[TaskScore] = []
    for suite in sorted({row[0].suite for row in scores}):
        others = [row for row in scores if row[0].suite != suite]
        best = min(range(len(STRUCTURES)), key=lambda s: rule(summary([row[s] for row in others])))
        chosen += [row[best] for row in scores if row[0].suite == suite]
    return chosen
