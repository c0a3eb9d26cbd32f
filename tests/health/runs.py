"""Synthetic curves of a ladder and its target, clean or with one planted fault."""

import dataclasses
import math

import numpy as np

from portolan.health.checklist import Evidence
from portolan.health.curves import RunCurves, Series
from portolan.health.rules import Settings
from portolan.optim.schedule import HYPERBALL_TO_ADAM, Schedule

STEPS = 6000
LAYERS = 4
EXPERTS = 384
PEAK = 0.014
HELD = ("blocks/attn/wq", "blocks/moe/experts/gate")
EVALUATIONS = {round(k * STEPS / 20): 3.0 - 0.03 * k for k in range(1, 21)}


def schedule(steps: int) -> Schedule:
    return Schedule(steps)


def rates(row: int, steps: int = STEPS) -> tuple[float, float]:
    factor = schedule(steps).factor(row)
    return PEAK * factor, PEAK / HYPERBALL_TO_ADAM * factor


def make_run(width: int, *, steps: int = STEPS, seed: int = 0, until: float = 1.0) -> RunCurves:
    """A clean run: gradient peak at a quarter, free norms that grow ever more slowly."""
    rng = np.random.default_rng(1000 * width + seed)
    completed = round(until * steps)
    every, tenth = np.arange(completed), np.arange(0, completed, 10)
    f, g = (every + 1) / steps, (tenth + 1) / steps
    size = math.log(width / 768)
    log_flops = math.log(2.6e19) + 3.3 * size
    series = {
        "train/cross_entropy": Series(
            every, 2.4 + 9 * np.exp(-f * 80) - 0.5 * f + rng.normal(0, 0.01, completed)
        ),
        "norm/gradient/global": Series(
            every,
            (0.2 + 0.4 * np.exp(-(((f - 0.25) / 0.15) ** 2)) + np.exp(-f * 300))
            * np.exp(rng.normal(0, 0.03, completed)),
        ),
        "throughput/tokens_per_second": Series(every, 2e6 * np.exp(rng.normal(0, 0.02, completed))),
        "rate/hyperball": Series(every, np.array([np.float32(rates(r, steps)[0]) for r in every],
                                                 float)),
        "rate/adam": Series(every, np.array([np.float32(rates(r, steps)[1]) for r in every],
                                            float)),
    }  # fmt: skip
    for leaf in HELD:
        series[f"norm/parameters/{leaf}"] = Series(tenth, 20 + 1e-6 * rng.normal(size=len(tenth)))
        series[f"norm/drift/{leaf}"] = Series(tenth, np.full(len(tenth), 2e-7))
    free = {"embed/table": 170, "blocks/moe/router": 60, "blocks/attn/head_gate": 5}
    for leaf, base in free.items():
        growth = base * (1 + 0.1 * size) * (1 + np.sqrt(g))
        series[f"norm/parameters/{leaf}"] = Series(
            tenth, growth * (1 + rng.normal(0, 1e-4, len(g)))
        )
    for layer in range(LAYERS):
        noise = rng.normal(0, 5e-4, len(g))
        series[f"router/entropy/{layer}"] = Series(tenth, math.log(EXPERTS) - 0.004 + noise)
        series[f"router/drop_fraction/{layer}"] = Series(tenth, 0.02 + 0.01 * g + 4 * noise)
        series[f"router/bias_max/{layer}"] = Series(tenth, 100 * (1 + 0.2 * np.sqrt(g)) + noise)
    return RunCurves(f"run-d{width}-s{seed}", f"d{width}", width, steps, log_flops, EXPERTS, series,
                     completed)  # fmt: skip


RUNGS = [make_run(width) for width in (768, 1024, 1536)]


def evidence(until: float = 1.0, **changes) -> Evidence:
    """A clean target of width 2048 with everything that the checklist asks for."""
    fields = {
        "target": make_run(2048, until=until),
        "rungs": RUNGS,
        "settings": Settings(num_experts=EXPERTS, registered={"gradient_norm_max": 2.0}),
        "evaluations": {n: x for n, x in EVALUATIONS.items() if n <= until * STEPS},
        "rates": rates,
        "config": ("c0", "c0"),
        "bands": [(0.05, "green")],
    }
    return Evidence(**(fields | changes))


def damaged(base: Evidence, key: str, change) -> Evidence:
    """The evidence with one series of the target replaced by change(fraction, values)."""
    target = base.target
    old = target.series[key]
    values = change((old.rows + 1) / target.steps, old.values.copy())
    series = dict(target.series) | {key: Series(old.rows, values)}
    return dataclasses.replace(base, target=dataclasses.replace(target, series=series, shapes={}))


def small_batch(width: int, steps: int, seed: int = 0) -> RunCurves:
    """A clean run of small batches: rows of the loss scatter, the more the larger the run, and the
    routing of one batch is uneven, most in the first 100 updates.
    """
    base = make_run(width, steps=steps, seed=seed)
    rng = np.random.default_rng(7919 * width + seed)
    series = dict(base.series)
    loss = series["train/cross_entropy"]
    scatter = 0.16 * (width / 768) ** 0.35
    series["train/cross_entropy"] = Series(
        loss.rows, loss.values + rng.normal(0, scatter, len(loss.rows))
    )
    for layer in range(LAYERS):
        old = series[f"router/entropy/{layer}"]
        dip = 0.05 + 0.03 * np.exp(-old.rows / 50) + rng.normal(0, 0.012, len(old.rows))
        series[f"router/entropy/{layer}"] = Series(old.rows, math.log(EXPERTS) - np.abs(dip))
    return dataclasses.replace(base, series=series, shapes={})
