"""Portolan's side of `train_step.py`: the training step of one shape, timed on request.

Run by the benchmark, never by hand: reads one JSON description from the command line, then one
JSON request a line from standard input, and answers each with one line.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from portolan import accounting
from portolan.model.transformer import Batch
from portolan.optim.schedule import PeakRates, Rates
from portolan.optim.settings import OptimizerSettings
from portolan.shapes import ModelConfig
from portolan.train.programs import keep_programs
from portolan.train.state import RunSettings, group_table, initial_state
from portolan.train.step import compile_programs, make_train_step

MATMUL_SIZE = 1024
NUM_BATCHES = 8
PEAK = PeakRates(hyperball=0.01, adam=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, capped=False)
RATES = Rates(np.float32(0.001), np.float32(1e-4), np.float32(0.02))


def matmul_flops_per_second(rounds: int) -> float:
    """Best rate of a float32 product of 1024 x 1024 matrices."""
    a = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), jnp.float32)
    return 2 * MATMUL_SIZE**3 / min(seconds(_square, (a,), rounds))


_square = jax.jit(lambda x: x @ x)


def seconds(program: Callable, arguments: tuple, rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, after one that does not count."""
    jax.block_until_ready(program(*arguments))
    out = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        out.append(time.perf_counter() - start)
    return out


def run_settings(config: ModelConfig, batch_sequences: int, matrix: Any) -> RunSettings:
    """A run whose programs are those of `portolan train`."""
    optimizer = OptimizerSettings(
        hyperball_scope="per_expert", ns_dtype="float32", matrix=matrix
    ).with_law(PEAK)
    return RunSettings(
        run_id="benchmark",
        role="rung",
        config=config,
        batch_sequences=batch_sequences,
        steps=1000,
        peak=PEAK,
        warmup_steps=1,
        min_ratio=0.05,
        optimizer=optimizer,
        seed=0,
        compute_dtype="float32",
        z_weight=1e-4,
        remat="none",
        norm_interval_steps=100,
        temporary_checkpoint_seconds=1e9,
        permanent_checkpoint_steps=1000,
    )


class Ours:
    """One shape with its state and a few random batches, taken in turn."""

    def __init__(self, config: ModelConfig, batch_sequences: int, matrix: str) -> None:
        self.config = config
        run = run_settings(config, batch_sequences, matrix)
        table = group_table(run)
        self.state = initial_state(run, table)
        self.train_step = make_train_step(run, table, jnp.float32)
        shape = (batch_sequences, config.sequence_length)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (NUM_BATCHES, *shape))
        weights = np.ones(shape, np.float32)
        weights[:, -1] = 0
        segments = np.zeros(shape, np.int32)
        self.batches: list[Any] = [Batch(t.astype(np.int32), segments, weights) for t in tokens]
        self.steps = 0
        start = time.perf_counter()
        compile_programs(self.train_step.lower(self.state, self.batches[0], RATES))
        self.compile_seconds = time.perf_counter() - start

    def step(self) -> dict[str, float]:
        """Seconds of both halves of an update, processor seconds of the update, and the loss."""
        start, processor = time.perf_counter(), time.process_time()
        state, batch = self.state, self.batches[self.steps % NUM_BATCHES]
        self.steps += 1
        loss, aux, grads = self.train_step.gradients(state.params, state.beta, batch)
        jax.block_until_ready(grads)
        middle = time.perf_counter()
        self.state, metrics = self.train_step.update(state, grads, loss, aux, RATES)
        jax.block_until_ready(self.state)
        return {
            "gradients": middle - start,
            "update": time.perf_counter() - middle,
            "processor": time.process_time() - processor,
            "loss": float(metrics["train/loss"]),
        }


def measure_parts(ours: Ours, rounds: int) -> dict[str, float]:
    """Median seconds that a step spends on each part."""
    from parts import measurable_parts

    parts = measurable_parts(ours.state.params, ours.batches[0], ours.config)
    return {
        name: times * statistics.median(seconds(program, arguments, rounds))
        for name, (program, arguments, times) in parts.items()
    }


def main() -> None:
    """Build, describe, then time steps until standard input ends."""
    asked = json.loads(sys.argv[1])
    config = ModelConfig(**asked["config"] | {"conv_sites": tuple(asked["config"]["conv_sites"])})
    keep_programs()
    ours = Ours(config, asked["batch_sequences"], asked["matrix"])
    ours.step()
    tokens = ours.batches[0].tokens.size
    answer = {
        "compile_seconds": ours.compile_seconds,
        "flops": float(accounting.training_flops(config, tokens, "full")),
        "active_parameters": accounting.active_parameters(config),
    }
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "parts" in request:
            found: Any = measure_parts(ours, request["parts"])
        elif "products" in request:
            found = matmul_flops_per_second(request["products"])
        else:
            found = [ours.step() for _ in range(request["steps"])]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
