"""What F2 learns across suites of public runs, and how: a small table, one entry per suite.

The package ships the table (`learnt.json`, written by `benchmarks/learn_priors.py` from public
ladders); a forecast combines the entries of all suites but its own.
"""

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from portolan.errors import UsageError
from portolan.scaling.drifting_law import (
    TYPICAL_DECLINE,
    Array,
    DriftPrior,
    Ladder,
    condition,
    extrapolate,
    normalised,
)

TABLE = "learnt.json"
NOISES = (0.002, 0.004, 0.008)
DRIFTS = (0.002, 0.004, 0.008)
FLOPS_AXIS = "flops"
START = DriftPrior(0.6, 0.004, 0.004, (TYPICAL_DECLINE, 0.02))
"""Used while learning, and where every suite is excluded."""


def learn_suite(ladders: Sequence[tuple[Ladder, float]], ratio: float) -> dict[str, Any]:
    """Entry of one suite from its ladders and the losses that their targets had.

    `asymptote_ratio` is the posterior mean of E over the best rung loss given rungs and outcome
    under a flat prior; `log_scores[noise][drift]` are mean log densities of ln(outcome) at the
    asymptote ratio `ratio`; `decline` is the fall of ln(loss) per e-fold of x beyond the last rung.
    """
    scores = [
        [_mean_log_score(ladders, DriftPrior(ratio, noise, drift)) for drift in DRIFTS]
        for noise in NOISES
    ]
    return {
        "num_ladders": len(ladders),
        "asymptote_ratio": round(implied_ratio(ladders), 4),
        "log_scores": [[round(value, 3) for value in row] for row in scores],
        "decline": round(float(np.mean([_decline(*pair) for pair in ladders])), 4),
    }


def implied_ratio(ladders: Sequence[tuple[Ladder, float]]) -> float:
    """Mean over ladders and settings of the asymptote ratio that rungs and outcome imply."""
    means = []
    for ladder, outcome in ladders:
        for noise in NOISES:
            for drift in DRIFTS:
                part = condition(ladder, noise, drift)
                excess = np.maximum(outcome - part.asymptotes, 1e-300)
                deviation = (np.log(excess) - part.locations) / part.scales
                density = -0.5 * deviation**2 - np.log(part.scales * excess)
                weight = normalised(part.log_evidence + density)
                means.append(weight @ part.asymptotes / ladder.losses.min())
    return float(np.mean(means))


def _mean_log_score(ladders: Sequence[tuple[Ladder, float]], prior: DriftPrior) -> float:
    densities = [
        float(extrapolate(ladder, prior).density(outcome)[0]) * outcome
        for ladder, outcome in ladders
    ]
    return float(np.mean(np.log(np.maximum(densities, 1e-300))))


def _decline(ladder: Ladder, outcome: float) -> float:
    last = np.argmax(ladder.x)
    return float(np.log(ladder.losses[last] / outcome) / np.log(ladder.target_x / ladder.x[last]))


def combine(entries: Iterable[Mapping[str, Any]]) -> DriftPrior:
    """Prior from the entries of suites, each counted as one observation.

    The asymptote ratio is their mean. Noise and drift are the geometric posterior means over the
    learning grid: the best single setting is a worse guide to another suite than an average.
    """
    entries = list(entries)
    if not entries:
        return START
    weight = normalised(np.sum([entry["log_scores"] for entry in entries], axis=0))
    declines = np.array([e["decline"] for e in entries if e["axis"] == FLOPS_AXIS])
    decline = START.decline
    if len(declines) > 1:
        decline = float(declines.mean()), float(declines.std(ddof=1))
    return DriftPrior(
        asymptote_ratio=float(np.mean([entry["asymptote_ratio"] for entry in entries])),
        rung_noise=_geometric_mean(weight.sum(axis=1), NOISES),
        drift=_geometric_mean(weight.sum(axis=0), DRIFTS),
        decline=decline,
    )


def _geometric_mean(weight: Array, values: Sequence[float]) -> float:
    return float(np.exp(weight @ np.log(np.array(values))))


@functools.cache
def learnt_table() -> dict[str, Any]:
    """The shipped table: `{suite: entry}` under `suites`, with its origin."""
    return json.loads(resources.files("portolan.scaling").joinpath(TABLE).read_text())


def excluded_suites(names: Collection[str]) -> frozenset[str]:
    """Suites of the table that one of the names belongs to.

    A name may be a suite, the beginning of suites (`marin`), or a family, of which the part
    before the slash counts (`olmo/1xC`).
    """
    excluded = set()
    for suite, entry in learnt_table()["suites"].items():
        roots = {family.split("/")[0] for family in entry["families"]}
        for name in names:
            if name and (suite.startswith(name) or name.split("/")[0] in roots):
                excluded.add(suite)
    return frozenset(excluded)


def check_names(names: Iterable[str]) -> None:
    """Refuse a family to exclude that the table does not know.

    Raises:
        UsageError: lists the suites.
    """
    for name in names:
        if not excluded_suites([name]):
            suites = ", ".join(sorted(learnt_table()["suites"]))
            raise UsageError(
                f"nothing was learnt from a suite or family {name!r}",
                remedy=f"leave it out; the table has {suites}",
            )


@functools.cache
def learnt_prior(excluded: frozenset[str] = frozenset()) -> DriftPrior:
    """Prior from all suites of the table but the excluded ones."""
    suites = learnt_table()["suites"]
    return combine(entry for suite, entry in suites.items() if suite not in excluded)
