"""The training step on one GPU: parity of its kernels, then tokens per second and MFU.

Run `python benchmarks/gpu_step.py [--quick] [--json FILE] [--platform cpu]`. Parity compares the
kernels that `portolan.model.kernels` chooses on the device with the CPU's, apart and in a whole
small model in bfloat16. The step is that of `portolan train`: bfloat16 products, float32 weights,
MuonH, rows of 4,096 tokens, for three widths of the family of the public run. All of it fits one
GPU of 141 GB and about five minutes; shapes that would begin after four are left out and named.
With --platform cpu only the parity part runs.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")

import jax
import jax.numpy as jnp
import numpy as np
from common import claim, main, report, row
from workers.portolan_step import RATES, run_settings

from portolan import accounting
from portolan.model import attention_flash, kernels, softmax_attention, transformer
from portolan.model.tree import GatedMlp
from portolan.optim.groups import GroupTable
from portolan.optim.hyperball import init_state
from portolan.shapes import ModelConfig, derive_shape
from portolan.train.state import RunSettings, TrainState, group_table
from portolan.train.step import compile_programs, make_train_step
from portolan.tree import flatten_paths, unflatten_paths

START_SECONDS = time.monotonic()
LAST_SHAPE_SECONDS = 240
WIDTHS_AND_ROWS = ((512, 16), (768, 8), (1024, 8))
"""Widths of family `ladder` with 384 experts, and rows of 4,096 tokens in a step."""
WARM_STEPS = 3
CONVENTIONS: tuple[accounting.Convention, ...] = ("published", "causal")
PARTS = "millionths of the norm"
BFLOAT16_MODEL_LIMITS = (0.05, 0.3)
"""Of loss and gradient: rounded logits send some tokens to other experts."""
EXPERT_TOKENS, EXPERT_WIDTH = 2048, 256
"""Small enough for a device that multiplies every row with each of 384 experts."""


def parity_inputs(*shapes: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """Standard normal arrays."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def differentiate(function: Callable, arguments: list[jax.Array]) -> tuple[Any, Any]:
    """Output and the gradients of the sum of its squares."""

    def total(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*arguments)
        return jnp.sum(jnp.square(out.astype(jnp.float32))), out

    with jax.default_matmul_precision("highest"):
        program = jax.jit(jax.value_and_grad(total, range(len(arguments)), has_aux=True))
        (_, out), gradient = program(*arguments)
    return out, gradient


def difference(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected, all leaves together."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    norm = sum(np.sum(b * b) for _, b in wide)
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in wide) / norm))


def parity_claims(name: str, found: tuple, expected: tuple, limits: tuple[float, float]) -> list:
    """Claims on values and gradients."""
    return [
        claim(f"{name}: {part}", 1e6 * value, PARTS, f"<= {1e6 * limit:g}", value <= limit)
        for part, value, limit in zip(
            ("values", "gradients"), map(difference, found, expected), limits, strict=True
        )
    ]


def attention_parity(platform: str) -> list[dict[str, Any]]:
    """The library's attention against the hand-written one, three documents a row."""
    implementation = "cudnn" if platform == "cuda" else "xla"
    dtype, limits = ("bfloat16", (0.01, 0.02)) if platform == "cuda" else ("float32", (1e-6, 1e-5))
    arguments = parity_inputs((2, 2, 64, 3, 32), (2, 2, 64, 32), (2, 2, 64, 32), dtype=dtype)
    segments = jnp.tile(jnp.repeat(jnp.arange(3), jnp.array([10, 30, 24])), (2, 1))
    found, expected = (
        differentiate(
            lambda q, k, v, mix=mix, more=more: mix(q, k, v, segments, jnp.asarray(9), 0.2, *more),
            arguments,
        )
        for mix, more in (
            (attention_flash.dot_product, (implementation,)),
            (softmax_attention.dot_product, ()),
        )
    )
    return parity_claims(f"attention, {implementation}, {dtype}", found, expected, limits)


def expert_programs(tokens: int, width: int, num_experts: int, selected: int) -> tuple[dict, list]:
    """Both experts' kernels as functions of one list of arguments."""
    matrix = (num_experts, width, width)
    chosen = np.argsort(np.random.default_rng(1).random((tokens, num_experts)), axis=1)
    chosen = jnp.asarray(chosen[:, :selected], jnp.int32)

    def apply(kernel: kernels.ExpertKernel) -> Callable:
        def run(x: jax.Array, weights: jax.Array, *mlp: jax.Array) -> jax.Array:
            dispatch = kernel.plan(chosen, jnp.ones(tokens, bool), num_experts)
            return kernel.apply(x, weights, GatedMlp(*mlp), dispatch)

        return run

    shapes = ((tokens, width), (tokens, selected), matrix, matrix, matrix)
    names = {"grouped": kernels.GROUPED, "ragged": kernels.RAGGED}
    return {name: apply(kernel) for name, kernel in names.items()}, list(shapes)


def expert_parity() -> list[dict[str, Any]]:
    """Ragged against grouped products in float32."""
    programs, shapes = expert_programs(48, 16, 6, 2)
    arguments = parity_inputs(*shapes, dtype="float32")
    grouped, ragged = (differentiate(programs[name], arguments) for name in ("grouped", "ragged"))
    return parity_claims("experts, ragged, float32", ragged, grouped, (1e-6, 1e-5))


def model_parity(platform: str) -> list[dict[str, Any]]:
    """A small model in bfloat16 with the device's kernels, against float32 with the CPU's."""
    config = derive_shape("small", 64, vocab_size=64, sequence_length=32, window=8, num_layers=2)
    tokens = np.random.default_rng(2).integers(0, 64, (2, 32)).astype(np.int32)
    segments = np.repeat([[0, 1]], [20, 12], axis=1).repeat(2, axis=0).astype(np.int32)
    weights = np.ones((2, 32), np.float32)
    weights[:, -1] = 0
    batch = transformer.Batch(*map(jnp.asarray, (tokens, segments, weights)))
    params = transformer.init(config, 0)
    beta = jnp.zeros((config.num_layers, config.num_balance_biases))

    def outcome(assumed: str, dtype: str) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            return transformer.loss(params, beta, batch, config, compute_dtype=jnp.dtype(dtype))[0]

        with kernels.assume_platform(assumed), jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(loss))(params)

    found, expected = outcome(platform, "bfloat16"), outcome("cpu", "float32")
    return parity_claims("whole model, bfloat16", found, expected, BFLOAT16_MODEL_LIMITS)


def time_experts() -> list[dict[str, Any]]:
    """Forward and backward of one layer's experts by both kernels."""
    programs, shapes = expert_programs(EXPERT_TOKENS, EXPERT_WIDTH, 384, 8)
    arguments = parity_inputs(*shapes, dtype="bfloat16")
    rows = []
    for name, function in programs.items():

        def total(*arguments: jax.Array, function: Callable = function) -> jax.Array:
            return jnp.sum(jnp.square(function(*arguments).astype(jnp.float32)))

        program = jax.jit(jax.grad(total, range(len(arguments))))
        jax.block_until_ready(program(*arguments))
        start = time.perf_counter()
        for _ in range(5):
            out = program(*arguments)
        jax.block_until_ready(out)
        what = f"experts, {name}: {EXPERT_TOKENS} tokens x 8 of 384, width {EXPERT_WIDTH}"
        rows.append(row(what, 1e3 * (time.perf_counter() - start) / 5, "ms"))
    return rows


def random_state(settings: RunSettings, table: GroupTable) -> TrainState:
    """A state drawn on the device: the host needs 40 s for each 10^9 of a run's own draws."""
    config = settings.config
    tree = transformer.abstract(config)
    leaves = {
        path: jnp.ones(leaf.shape)
        if path.endswith("/gain")
        else config.init_std * jax.random.normal(jax.random.key(index), leaf.shape)
        for index, (path, leaf) in enumerate(flatten_paths(tree).items())
    }
    params = unflatten_paths(tree, leaves)
    opt = init_state(params, table=table, settings=settings.optimizer)
    return TrainState(params, opt, jnp.zeros((config.num_layers, config.num_balance_biases)))


def time_step(config: ModelConfig, batch_sequences: int, steps: int) -> tuple[float, float]:
    """Tokens per second of whole updates, and the seconds of compilation."""
    settings = run_settings(config, batch_sequences, "muonh")
    optimizer = dataclasses.replace(settings.optimizer, ns_dtype="bfloat16")
    settings = dataclasses.replace(settings, compute_dtype="bfloat16", optimizer=optimizer)
    table = group_table(settings)
    state = random_state(settings, table)
    train_step = make_train_step(settings, table, jnp.bfloat16)
    shape = (batch_sequences, config.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    weights = np.ones(shape, np.float32)
    weights[:, -1] = 0
    batch = transformer.Batch(*map(jnp.asarray, (tokens, np.zeros_like(tokens), weights)))
    start = time.perf_counter()
    compile_programs(train_step.lower(state, batch, RATES))
    compiled = time.perf_counter()
    for index in range(WARM_STEPS + steps):
        if index == WARM_STEPS:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        state, metrics = train_step(state, batch, RATES)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begun
    if not metrics["finite"]:
        raise SystemExit(f"the loss at width {config.width} is not finite after {index + 1} steps")
    return steps * tokens.size / seconds, compiled - start


def measure_shapes(quick: bool) -> list[dict[str, Any]]:
    """Rows of each shape: tokens per second, utilisation, compilation, peak memory so far."""
    (device,) = jax.devices()[:1]
    rows: list[dict[str, Any]] = []
    for width, sequences in WIDTHS_AND_ROWS[: 1 if quick else None]:
        config = derive_shape("ladder", width)
        name = f"width {width}, {sequences} x {config.sequence_length}"
        if time.monotonic() - START_SECONDS > LAST_SHAPE_SECONDS:
            print(f"{name}: left out, {LAST_SHAPE_SECONDS} s are over", file=sys.stderr)
            continue
        rate, compile_seconds = time_step(config, sequences, 5 if quick else 10)
        rows.append(row(f"{name}: tokens of whole steps", rate, "tokens/s"))
        for convention in CONVENTIONS:
            used = accounting.utilisation(config, rate, 1, device.device_kind, convention)
            value = None if used is None else 100 * used.value
            unit = f"peak of {device.device_kind} unknown" if used is None else str(used)
            rows.append(row(f"{name}: MFU, {convention} FLOPs", value, unit))
        rows.append(row(f"{name}: compilation", compile_seconds, "s"))
        peak = device.memory_stats()["peak_bytes_in_use"]
        rows.append(row(f"{name}: peak memory of the process so far", peak / 1e9, "GB"))
    return rows


def run(quick: bool, platform: str) -> dict[str, Any]:
    """Parity, and on a GPU the rates."""
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        print(
            "no GPU is visible to JAX: nothing measured. Install jax[cuda12] on a machine with an "
            "NVIDIA GPU, or pass --platform cpu for the parity part alone."
        )
        sys.exit(0)
    platform = kernels.platform()
    claims = attention_parity(platform) + expert_parity() + model_parity(platform)
    rows = [] if platform == "cpu" else time_experts() + measure_shapes(quick)
    return report(rows, claims, ("portolan", "jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    main(
        __doc__,
        run,
        {"--platform": {"choices": ("gpu", "cpu"), "default": "gpu", "help": "default gpu"}},
    )
