"""Compile the real step of a recipe for its mesh and say what XLA reports; a program of its own.

It reads the recipe as JSON from standard input and the number of micro-batches of an update from
its argument, and writes JSON to standard output. It must be the first to use JAX in its process,
which is told how many devices to pretend; nothing is executed.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from portolan.model.transformer import Batch
from portolan.model.tree import parameter_shapes
from portolan.optim.groups import components_of, resolve_groups
from portolan.optim.schedule import Rates
from portolan.parallel.planner.hlo import parse_collectives, summarise
from portolan.parallel.planner.mesh import resolve_mesh
from portolan.parallel.routing import Updates
from portolan.parallel.transports import EXPERT_AXIS, move
from portolan.pipeline.plan import plan_width
from portolan.pipeline.plan_compile import PROGRAMS
from portolan.pipeline.runs import PlannedRun, run_settings
from portolan.recipe import Recipe
from portolan.train.devices import find_devices
from portolan.train.state import abstract_state
from portolan.train.step import make_train_step

FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""Machine code is never run: fusion and buffers are decided before it is made."""


def padded_exchange(operand: jax.Array, out: jax.Array, updates: Updates) -> jax.Array:
    """What the ragged exchange of accelerators reads and fills, by an exchange that CPUs have.

    As many rows travel as fit both buffers. Only sizes matter here, but rows are read at a place
    that the plan sets and added, or the compiler would find exchanges equal or overwritten.
    """
    num_shards = jax.lax.axis_size(EXPERT_AXIS)
    rows = min(operand.shape[0], out.shape[0]) // num_shards * num_shards
    place = jnp.minimum(updates.send.sum(), operand.shape[0] - rows)
    read = jax.lax.dynamic_slice_in_dim(operand, place, rows)
    moved = jax.lax.all_to_all(read, EXPERT_AXIS, 0, 0, tiled=True)
    return out.at[:rows].add(moved)


def lower_step(recipe: Recipe, num_micro_batches: int) -> list[Any]:
    """The programs of one update of the target, traced for the recipe's mesh."""
    rung = plan_width(recipe, recipe.model.width)
    run = PlannedRun("plan", "target", recipe.seed, rung, rung, "")
    settings = run_settings(recipe, run)
    table = resolve_groups(
        parameter_shapes(settings.config),
        scope=settings.optimizer.hyperball_scope,
        settings=settings.optimizer,
        components=components_of(settings.config),
    )
    dtype = recipe.train.compute_dtype
    step = make_train_step(
        settings,
        table,
        jnp.dtype("bfloat16" if dtype == "auto" else dtype),
        find_devices(recipe.parallel, num_micro_batches),
    )
    shape = (settings.batch_sequences, settings.config.sequence_length)
    if num_micro_batches > 1:
        shape = (num_micro_batches, shape[0] // num_micro_batches, shape[1])
    kinds = ("int32", "int32", "float32")
    batch = Batch(*(cast(Any, jax.ShapeDtypeStruct(shape, kind)) for kind in kinds))
    zero = np.float32(0)
    return step.lower(abstract_state(settings, table), batch, Rates(zero, zero, zero))


def describe_program(compiled: Any, recipe: Recipe) -> dict[str, Any]:
    """Bytes of a compiled program on one device, and its collectives by kind and axes."""
    memory = compiled.memory_analysis()
    mesh = resolve_mesh(recipe.parallel.mesh, jax.device_count())
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "result_bytes": memory.output_size_in_bytes,
        "reused_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": [
            dataclasses.asdict(one)
            for one in summarise(parse_collectives(compiled.as_text()), mesh)
        ],
    }


def main() -> None:
    """Compile both programs, side by side."""
    started = time.monotonic()
    recipe = Recipe.model_validate_json(sys.stdin.read())
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    move.exchange_segments = padded_exchange
    lowered = lower_step(recipe, int(sys.argv[1]))
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiled = list(pool.map(lambda one: one.compile(compiler_options=FAST_COMPILE), lowered))
    found = {
        name: describe_program(program, recipe)
        for name, program in zip(PROGRAMS, compiled, strict=True)
    }
    found |= {
        "seconds": time.monotonic() - started,
        "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    with os.fdopen(output, "w") as stream:
        json.dump(found, stream)


if __name__ == "__main__":
    main()
