"""What this machine can do, measured in a few seconds."""

import os
import platform
import shutil
import statistics
import time
from importlib import metadata
from pathlib import Path

import psutil

from portolan.console import say
from portolan.processes import usable_cores

MATMUL_SIZE = 1024
MATMUL_ROUNDS = 5
WRITE_BYTES = 32 * 1024 * 1024
LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "pyarrow", "tokenizers")
EXTRAS = {
    "ray": "ray",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "hf": "transformers",
    "eval": "lm_eval",
}


def print_report(root: Path) -> None:
    """Print versions, processors, memory, disk, matrix-product speed and missing extras."""
    say(f"python: {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in LIBRARIES:
        say(f"{name}: {_version(name)}")
    memory = psutil.virtual_memory()
    say(f"cores: {usable_cores()} usable, load {os.getloadavg()[0]:.2f}")
    say(f"memory: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available")
    folder = root if root.is_dir() else Path()
    say(f"disk: {shutil.disk_usage(folder).free / 2**30:.1f} GiB free at the project")
    say(f"disk write: {_write_speed(folder)}")
    import jax

    devices = jax.devices()
    say(f"devices: {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
    say(f"matmul float32 {MATMUL_SIZE}^3: {_matmul_gflops():.0f} GFLOP/s (median of 5)")
    for extra, module in EXTRAS.items():
        state = "installed" if _version(module.replace("_", "-")) != "missing" else "not installed"
        say(f"extra {extra}: {state}")
    say(f"browser for page tests: {shutil.which('chromium') or 'not installed'}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _matmul_gflops() -> float:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    seconds = []
    for _ in range(MATMUL_ROUNDS):
        start = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / statistics.median(seconds) / 1e9


def _write_speed(folder: Path) -> str:
    """Megabytes per second of one fsynced file, or why it cannot be written."""
    path = folder / f".portolan-doctor-{os.getpid()}"
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            file.write(b"\0" * WRITE_BYTES)
            file.flush()
            os.fsync(file.fileno())
        return f"{WRITE_BYTES / (time.perf_counter() - start) / 1e6:.0f} MB/s"
    except OSError as error:
        return f"not possible here ({error.strerror})"
    finally:
        path.unlink(missing_ok=True)
