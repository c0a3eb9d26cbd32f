"""The training step against transformers' Qwen3-MoE in torch, on one core and on two.

Run `python benchmarks/train_step.py [--quick] [--only PART] [--json FILE] [--peer-python PYTHON]`.
Parts: one-core takes about ten minutes, two-cores six, pocket four. Both sides train the same shape
in float32 without dropped tokens, in processes of their own that take turns, pinned to the same
cores, with the same allocator settings. A step is forward, backward and an AdamW optimizer, the
peer's fused one; the optimizer is reported apart as well. The share of the matrix product is that
of each round. The peer runs in a virtual environment that the first run makes in a cache folder,
unless --peer-python names one.

`ours` has every component of the model but the latent pair and the shared experts; `plain` also
lacks what the peer lacks: gated norms, convolutions, head gates and exclusive attention. `default`
has the latent pair and two shared experts at the same active parameters.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import claim, main, report, row

from portolan.pipeline.plan import plan_width
from portolan.recipe import find_recipe, load_recipe
from portolan.shapes import ModelConfig

WORKERS = Path(__file__).resolve().parent / "workers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser())) / "portolan-bench"
PEER_PACKAGES = ("torch==2.14.1", "transformers==5.24.0")
HAS_PEER = "from importlib.util import find_spec as f; exit(not (f('torch') and f('transformers')))"
SAME_ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:"
    f"glibc.malloc.trim_threshold={2**40}"
}
"""Huge pages, as in `make demo`, and nothing given back between steps, for both sides."""
SETTLE_SECONDS = 0.3
NUM_ROUNDS = 20
"""One program runs 10 % faster or slower from one step to the next; six rounds leave 3 %."""
NUM_PRODUCTS = 10
"""1024 x 1024 matrices, of each worker in each round; the fastest of all is the round's peak."""
BATCH_SEQUENCES = 8

OURS = ModelConfig(
    vocab_size=8192,
    sequence_length=256,
    width=256,
    num_layers=8,
    num_heads=4,
    head_dim=64,
    num_kv_heads_local=1,
    num_kv_heads_global=1,
    num_experts=32,
    experts_per_token=4,
    latent_width=256,
    expert_width=256,
    num_shared_experts=0,
    shared_width=256,
    gated_norm_rank=64,
    conv_taps=4,
    window=256,
    global_every=4,
    qk_multiplier=1.3,
    qb_bins=1000,
    latent=False,
    latent_norm=False,
)
PLAIN = dataclasses.replace(
    OURS, gated_norm=False, conv_sites=(), head_gate=False, exclusive_attention=False
)
DEFAULT = dataclasses.replace(
    OURS,
    latent=True,
    latent_norm=True,
    latent_width=128,
    expert_width=232,
    num_shared_experts=2,
    shared_width=232,
)


class Worker:
    """A process that answers a JSON line with a JSON line; it sleeps in between."""

    def __init__(self, command: list[str], cores: list[int]) -> None:
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SAME_ALLOCATOR,
        )
        self.description = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, **request: int) -> Any:
        """The answer to one request."""
        assert self.process.stdin is not None
        time.sleep(SETTLE_SECONDS)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start_ours(config: ModelConfig, batch_sequences: int, matrix: str, cores: list[int]) -> Worker:
    """Our step of a shape, with an optimizer."""
    asked = {
        "config": dataclasses.asdict(config),
        "batch_sequences": batch_sequences,
        "matrix": matrix,
    }
    return Worker([sys.executable, str(WORKERS / "portolan_step.py"), json.dumps(asked)], cores)


def start_peer(python: Path, cores: list[int]) -> Worker:
    """The peer's step of the shape of `OURS`."""
    asked = dataclasses.asdict(OURS) | {
        "num_kv_heads": OURS.num_kv_heads,
        "batch_sequences": BATCH_SEQUENCES,
    }
    return Worker([str(python), str(WORKERS / "qwen3_moe.py"), json.dumps(asked)], cores)


def find_peer(python: Path | None) -> Path | None:
    """The interpreter of the peer's environment, made if needed; None without a network."""
    if python is not None:
        return python
    folder = CACHE / "peer"
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([str(python), "-c", HAS_PEER], check=False).returncode:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
        if subprocess.run([str(part) for part in command], check=False).returncode:
            print(
                f"the peer could not be installed ({' '.join(PEER_PACKAGES)} from the package "
                f"index into {folder}): only our side is measured. Connect to a network, or pass "
                "--peer-python with an interpreter that has them.",
                file=sys.stderr,
            )
            return None
    return python


def alternate(workers: dict[str, Worker], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Steps of each worker, one after the other in each round; the first round does not count.

    `peak` of a step is the fastest product of its round, of any worker, in FLOP/s.
    """
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for index in range(rounds + 1):
        taken, peaks = {}, []
        for name, worker in workers.items():
            (taken[name],) = worker.ask(steps=1)
            peaks.append(worker.ask(products=NUM_PRODUCTS))
        for name, step in taken.items():
            if index:
                steps[name].append(step | {"peak": max(peaks)})
    return steps


def median(steps: list[dict[str, float]], *keys: str) -> float:
    """Median over steps of the sum of some fields."""
    return statistics.median(sum(step[key] for key in keys) for step in steps)


def speed_ratio(mine: list[dict[str, float]], theirs: list[dict[str, float]], *keys: str) -> float:
    """Median over rounds of their seconds over ours."""
    return statistics.median(
        sum(their[key] for key in keys) / sum(my[key] for key in keys)
        for my, their in zip(mine, theirs, strict=True)
    )


def compare(cores: list[int], python: Path | None, rounds: int, quick: bool) -> tuple[list, list]:
    """Rows and claims of one number of cores."""
    on = f"{len(cores)} core{'s' * (len(cores) > 1)}"
    shapes = {"plain": PLAIN} if quick else {"plain": PLAIN, "ours": OURS, "default": DEFAULT}
    workers = {
        name: start_ours(config, BATCH_SEQUENCES, "adamw", cores) for name, config in shapes.items()
    }
    if python:
        workers["peer"] = start_peer(python, cores)
    steps = alternate(workers, rounds)
    rows, claims = [], []
    tokens = BATCH_SEQUENCES * OURS.sequence_length
    peak = median(steps["plain"], "peak")
    rows.append(
        row(f"{on}: float32 matrix product, 1024^3, median of rounds", peak / 1e9, "GFLOP/s")
    )
    for name, measured in steps.items():
        whole = median(measured, "gradients", "update")
        rows += [
            row(f"{on}, {name}: tokens of whole steps", tokens / whole, "tokens/s"),
            row(f"{on}, {name}: forward and backward", 1e3 * median(measured, "gradients"), "ms"),
            row(f"{on}, {name}: optimizer, AdamW", 1e3 * median(measured, "update"), "ms"),
            row(f"{on}, {name}: processor time", 1e3 * median(measured, "processor"), "ms"),
        ]
        if name != "peer":
            flops = workers[name].description["flops"]
            share = statistics.median(flops / step["gradients"] / step["peak"] for step in measured)
            rows.append(row(f"{on}, {name}: share of the matrix product", 100 * share, "%"))
            if name == "plain":
                claims.append(
                    claim(
                        f"{on}: share of the matrix product",
                        100 * share,
                        "%",
                        ">= 50",
                        share >= 0.5,
                    )
                )
    for name in shapes if python else ():
        ratio = speed_ratio(steps[name], steps["peer"], "gradients", "update")
        rows.append(row(f"{on}, {name}: speed over the peer's, median of rounds", ratio, ""))
        processor = speed_ratio(steps[name], steps["peer"], "processor")
        rows.append(row(f"{on}, {name}: the same by processor time", processor, ""))
        if name == "plain":
            claims.append(claim(f"{on}: level with the peer", ratio, "", ">= 1.0", ratio >= 1))
    for name, milliseconds in measure_apart(workers, cores, quick).items():
        rows.append(row(f"{on}, {name}", milliseconds, "ms"))
    for worker in workers.values():
        worker.close()
    if python:
        describe_peer(workers["peer"].description)
    return rows, claims


def measure_apart(workers: dict[str, Worker], cores: list[int], quick: bool) -> dict[str, float]:
    """Milliseconds of the parts of our step, and of the optimizer of the recipes."""
    if quick:
        return {}
    found = {
        f"ours: part {name}": 1e3 * value for name, value in workers["ours"].ask(parts=3).items()
    }
    muon = start_ours(OURS, BATCH_SEQUENCES, "muonh", cores)
    found["ours: optimizer, MuonH"] = 1e3 * median(muon.ask(steps=3)[1:], "update")
    muon.close()
    return found


def describe_peer(description: dict[str, Any]) -> None:
    """Print how the peer computes its experts."""
    print(
        f"peer: {description['versions']}, {description['threads']} threads, experts "
        f"{description['experts']}, products per step {description['operators']}"
    )


def measure_pocket(cores: list[int], quick: bool) -> list[dict[str, Any]]:
    """Rows of the pocket recipe's own updates."""
    recipe = load_recipe(find_recipe("pocket"))
    rows = []
    for width in (recipe.model.width,) if quick else (*recipe.ladder.widths, recipe.model.width):
        rung = plan_width(recipe, width)
        worker = start_ours(rung.config, rung.batch_sequences, "muonh", cores)
        steps = worker.ask(steps=12 if quick else 40)[2:]
        name = f"pocket width {width}, {rung.batch_sequences} x {rung.config.sequence_length}"
        rows += [
            row(
                f"{name}: tokens",
                rung.tokens_per_step / median(steps, "gradients", "update"),
                "tokens/s",
            ),
            row(f"{name}: processor time of an update", 1e3 * median(steps, "processor"), "ms"),
            row(f"{name}: compile", worker.description["compile_seconds"], "s"),
        ]
        worker.close()
    return rows


def run(quick: bool, peer_python: Path | None, only: str | None) -> dict[str, Any]:
    """All measurements."""
    usable = sorted(os.sched_getaffinity(0))[:2]
    counts = {"one-core": 1, "two-cores": 2}
    parts = [only] if only else ["two-cores", "pocket"] if quick else [*counts, "pocket"]
    rows, claims = [], []
    for part in parts:
        if part == "pocket":
            rows += measure_pocket(usable, quick)
        elif counts[part] <= len(usable):
            python = find_peer(peer_python)
            new_rows, new_claims = compare(
                usable[: counts[part]], python, 3 if quick else NUM_ROUNDS, quick
            )
            rows += new_rows
            claims += new_claims
    return report(rows, claims, ("portolan", "jax", "jaxlib", "numpy"))


ARGUMENTS = {
    "--peer-python": {"type": Path, "help": "interpreter with torch"},
    "--only": {"choices": ("one-core", "two-cores", "pocket"), "help": "one part"},
}

if __name__ == "__main__":
    main(__doc__, run, ARGUMENTS)
