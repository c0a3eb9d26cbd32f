"""The transports of routed rows on eight host devices, and the grouped product on one.

Run `python benchmarks/transports.py [--quick] [--json FILE] [--runs FOLDER]`. Eight devices hold 64
experts and take turns over the same tokens by every transport and rule: rows that a device sends to
its peers in one direction, bytes of the forward buffers by formula (parallel.md 8), temporaries of
the compiled gradient, rows dropped, and the processor time of forward and backward. Routers are
random: the log popularity of an expert has a spread over all devices and one by device (6.7); with
--runs, the runs of a project, the first is what its widest finished run recorded.

The times are those of a CPU that emulates eight devices and the ragged exchange: they compare the
work, not the networks.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import claim, main, report, row

from portolan.parallel.planner.drops import Skew
from portolan.pipeline.plan_drops import DropOptions, choose_skews

WORKER = Path(__file__).resolve().parent / "workers" / "transport_times.py"
SKEWS = (Skew(0.1, 0.2), Skew(0.1, 0.4), Skew(0.2, 0.2))
"""Those of parallel.md 6.7; the first is about a trained router's."""
GROUPS, ROWS, WIDTH = 64, 4096, 256
LEAST_SPEEDUP = 5
MOST_OF_CELLS = 0.5


def measured_skews(runs: Path | None) -> dict[str, Skew]:
    """Skews by name, the recorded one (the mean of its layers) first."""
    named = {f"skew {skew.expert:g} and {skew.sender:g}": skew for skew in SKEWS}
    if runs is None:
        return named
    found = choose_skews(runs, DropOptions())
    experts, senders = zip(*((skew.expert, skew.sender) for skew in found.layers), strict=True)
    mean = Skew(statistics.mean(experts), statistics.mean(senders))
    print(f"skew {mean.expert:.2f} and {mean.sender:.2f}: {found.source}", file=sys.stderr)
    return {f"skew {mean.expert:.2f} and {mean.sender:.2f}": mean} | named


def measure_transports(skews: dict[str, Skew], quick: bool) -> list[dict[str, Any]]:
    """What the worker found of every skew and transport."""
    request = {
        "tokens": 128 if quick else 512,
        "rounds": 3 if quick else 9,
        "skews": {name: [skew.expert, skew.sender] for name, skew in skews.items()},
    }
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(request)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    return json.loads(done.stdout)


def transport_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sizes and times of each transport once, drops for every skew."""
    rows, seen = [], set()
    for entry in found:
        name = entry["name"]
        if name not in seen:
            seen.add(name)
            rows += [
                row(f"{name}: buffers, forward", entry["buffer_bytes"] / 1e6, "MB/device"),
                row(f"{name}: temporaries of the gradient", entry["temporary_bytes"] / 1e6, "MB"),
                row(f"{name}: forward and backward", entry["milliseconds"], "ms CPU"),
            ]
        rows += [
            row(f"{name}: rows sent, {entry['skew']}", entry["rows_sent"], "rows/device"),
            row(f"{name}: dropped, {entry['skew']}", 100 * entry["dropped"], "%"),
        ]
    return rows


def drop_claims(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At every skew, pools over several experts drop at most half of what cells do."""
    dropped = {(entry["skew"], entry["name"]): 100 * entry["dropped"] for entry in found}
    claims = []
    for skew in dict.fromkeys(entry["skew"] for entry in found):
        pools = max(dropped[skew, "ragged, receiver"], dropped[skew, "ragged, waterfill"])
        most = MOST_OF_CELLS * dropped[skew, "cell"]
        name = f"dropped by receiver and waterfill, {skew}"
        claims.append(claim(name, pools, "%", f"<= {most:.2f}, half of cells'", pools <= most))
    return claims


def grouped_products() -> dict[str, Callable[[], Any]]:
    """Forward and gradient of the product of sorted rows, in blocks and by `ragged_dot`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from portolan.parallel.transports.grouped_matmul import grouped_matmul

    rng = np.random.default_rng(0)
    sizes = jnp.asarray(rng.multinomial(ROWS, rng.dirichlet(np.full(GROUPS, 5.0))), jnp.int32)
    x = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)
    matrix = jnp.asarray(rng.standard_normal((GROUPS, WIDTH, WIDTH)), jnp.float32)

    def programs(product: Callable) -> dict[str, Callable[[], Any]]:
        gradient = jax.jit(jax.grad(lambda x, m: jnp.sum(product(x, m, sizes) ** 2), (0, 1)))
        forward = jax.jit(product)
        return {
            "forward": lambda: forward(x, matrix, sizes),
            "gradient": lambda: gradient(x, matrix),
        }

    return {
        f"{name}, {part}": program
        for name, product in (("blocks", grouped_matmul), ("ragged_dot", jax.lax.ragged_dot))
        for part, program in programs(product).items()
    }


def time_alternately(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor time of each program in ms, in turns after a warm-up."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in programs}
    for index in range(rounds + 1):
        for name, program in programs.items():
            start = time.process_time()
            jax.block_until_ready(program())
            if index:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_products(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and claims of the grouped product."""
    times = time_alternately(grouped_products(), 3 if quick else 9)
    shape = f"{ROWS} rows x {WIDTH} x {WIDTH}, {GROUPS} groups"
    rows = [row(f"{name}: {shape}", value, "ms CPU") for name, value in times.items()]
    claims = []
    for part in ("forward", "gradient"):
        ratio = times[f"ragged_dot, {part}"] / times[f"blocks, {part}"]
        name = f"ragged_dot over blocks, {part}, {GROUPS} groups"
        claims.append(claim(name, ratio, "times", f">= {LEAST_SPEEDUP}", ratio >= LEAST_SPEEDUP))
    return rows, claims


def run(quick: bool, runs: Path | None) -> dict[str, Any]:
    """Products first, then the worker's transports."""
    rows, claims = measure_products(quick)
    found = measure_transports(measured_skews(runs), quick)
    claims += drop_claims(found)
    return report(rows + transport_rows(found), claims, ("portolan", "jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    main(
        __doc__,
        run,
        {"--runs": {"type": Path, "metavar": "FOLDER", "help": "take the skew from finished runs"}},
    )
