"""Tokens per second of the training step at the widths of the pocket recipe.

Run `python benchmarks/train_step.py [--quick] [--json FILE]`. Medians of whole updates, and the
share of the float32 matrix-product rate measured in the same run.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import claim, main, report, row

from portolan import accounting
from portolan.model.transformer import Batch
from portolan.pipeline.plan import plan_width
from portolan.pipeline.runs import PlannedRun, run_settings
from portolan.project import Project
from portolan.recipe import find_recipe, load_recipe
from portolan.train.state import group_table, initial_state
from portolan.train.step import compile_programs, make_train_step

MATMUL_SIZE = 1024


def matmul_flops_per_second(rounds: int) -> float:
    """Median rate of a float32 product of 1024 x 1024 matrices."""
    a = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / statistics.median(seconds)


def measure(width: int, rounds: int) -> tuple[float, float, Any]:
    """Compile seconds, median step seconds, and the planned rung of one width."""
    recipe = load_recipe(find_recipe("pocket"))
    rung = plan_width(recipe, width)
    project = Project(root=find_recipe("pocket").parent, recipe=recipe)
    run = run_settings(project, PlannedRun("benchmark", "rung", 0, rung, ""))
    table = group_table(run)
    state = initial_state(run, table)
    step = make_train_step(run, table, jnp.float32)
    rng = np.random.default_rng(0)
    shape = (rung.batch_sequences, rung.config.sequence_length)
    tokens = rng.integers(0, rung.config.vocab_size, shape).astype(np.int32)
    batch: Any = Batch(tokens, np.zeros(shape, np.int32), np.ones(shape, np.float32))  # type: ignore
    rates = run.schedule.rates(rung.steps // 2, run.peak)
    start = time.perf_counter()
    compile_programs(step.lower(state, batch, rates))
    compile_seconds = time.perf_counter() - start
    state, metrics = step(state, batch, rates)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        state, metrics = step(state, batch, rates)
        jax.device_get(metrics)
        seconds.append(time.perf_counter() - start)
    return compile_seconds, statistics.median(seconds), rung


def run(quick: bool) -> dict[str, Any]:
    """All widths of the pocket recipe."""
    recipe = load_recipe(find_recipe("pocket"))
    rounds = 10 if quick else 40
    peak = matmul_flops_per_second(rounds)
    rows = [row("float32 matrix product, 1024^3", peak / 1e9, "GFLOP/s")]
    rates = {}
    for width in (*recipe.ladder.widths, recipe.model.width):
        compile_seconds, seconds, rung = measure(width, rounds)
        name = f"width {width}, {rung.batch_sequences} x {rung.config.sequence_length}"
        rates[width] = rung.tokens_per_step / seconds
        flops = float(accounting.training_flops(rung.config, rung.tokens_per_step, "full"))
        rows += [
            row(f"{name}: tokens", rates[width], "tokens/s"),
            row(f"{name}: share of the matrix product", 100 * flops / seconds / peak, "%"),
            row(f"{name}: compile", compile_seconds, "s"),
        ]
    claims = [
        claim(
            "width 64 is faster than a first plain step (7,000 tokens/s on this kind of machine)",
            rates[64],
            "tokens/s",
            "> 7000",
            rates[64] > 7000,
        )
    ]
    return report(rows, claims, ("portolan", "jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    main(__doc__, run)
