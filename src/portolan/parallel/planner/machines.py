"""Named machines: what one device computes, holds and sends. Vendor figures, or a TOML file.

Bandwidths are bytes a second and device in one direction. A `domain` is the set of devices behind
the fast links; mesh axes are laid out from `model` (fastest) to `replica`, and an axis that leaves
the domain has the slow links.
"""

import os
import time
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from portolan.accounting import peak_flops_per_second
from portolan.errors import UsageError
from portolan.parallel.layout import MESH_AXES
from portolan.parallel.planner.mesh import MeshSizes
from portolan.settings import Fraction, PositiveInt, Settings

Rate = Annotated[float, Field(gt=0)]
GIB = 2**30
GPU_MEAN_HOURS = 50_000.0
"""Device hours between interruptions: 419 unexpected ones in 54 days on 16,384 H100
(arXiv:2407.21783, table 5) are 50,700."""


class Machine(Settings):
    """One device of a machine and its links.

    `peak_flops_per_second` is dense, of the type that the model computes in; `attained_mfu` is
    what a published run of this kind reached, none where no such run is known.
    """

    name: str
    platform: Literal["cuda", "tpu", "cpu"]
    peak_flops_per_second: Rate
    peak_source: str
    memory_bytes: PositiveInt
    memory_bytes_per_second: Rate
    domain_devices: PositiveInt
    fast_bytes_per_second: Rate
    slow_bytes_per_second: Rate
    axis_bytes_per_second: dict[str, Rate] = Field(default={})
    checkpoint_bytes_per_second: Rate = 1e9
    mean_hours_between_failures: Rate = GPU_MEAN_HOURS
    restart_seconds: Rate = 1800.0
    attained_mfu: Fraction | None = None
    source: str = ""

    @pydantic.model_validator(mode="after")
    def _known_axes(self) -> "Machine":
        if unknown := sorted(set(self.axis_bytes_per_second) - set(MESH_AXES)):
            raise ValueError(f"axis_bytes_per_second names {unknown[0]!r}; axes are {MESH_AXES}")
        return self

    def slow_axes(self, mesh: MeshSizes) -> tuple[str, ...]:
        """Axes whose groups leave the domain of fast links."""
        slow, devices = [], 1
        for axis in reversed(MESH_AXES):
            devices *= mesh.size(axis)
            inside = devices <= self.domain_devices and (
                self.domain_devices % devices == 0 or devices == mesh.num_devices
            )
            if mesh.size(axis) > 1 and not inside:
                slow.append(axis)
        return tuple(slow)

    def bandwidth(self, axes: tuple[str, ...], mesh: MeshSizes) -> float:
        """Bytes a second of the slowest of `axes`."""
        slow = self.slow_axes(mesh)

        def rate(axis: str) -> float:
            link = self.slow_bytes_per_second if axis in slow else self.fast_bytes_per_second
            return self.axis_bytes_per_second.get(axis, link)

        return min(rate(axis) for axis in axes)


def _gpu(name: str, device: str, **fields) -> Machine:
    peak = peak_flops_per_second(device)
    assert peak is not None
    source = "dense bfloat16, vendor's data sheet; the figure that MFU uses"
    return Machine(
        name=name,
        platform="cuda",
        peak_flops_per_second=peak,
        peak_source=source,
        slow_bytes_per_second=5e10,
        **fields,
    )


def _gpus() -> tuple[Machine, ...]:
    return (
        _gpu(
            "gb200-nvl72",
            "GB200",
            memory_bytes=184 * GIB,
            memory_bytes_per_second=8e12,
            domain_devices=64,
            fast_bytes_per_second=9e11,
            attained_mfu=0.2675,
            source="184 GiB and 64 of 72 devices in use, as in the public run; NVLink 5, 400 Gb/s "
            "a device outside; MFU of rows 146,139 on (marin #8506)",
        ),
        _gpu(
            "h100-node",
            "H100",
            memory_bytes=79 * GIB,
            memory_bytes_per_second=3.35e12,
            domain_devices=8,
            fast_bytes_per_second=4.5e11,
            source="H100 SXM: NVLink 4 in nodes of 8, 400 Gb/s a device outside",
        ),
        _gpu(
            "h200-node",
            "H200",
            memory_bytes=139 * GIB,
            memory_bytes_per_second=4.8e12,
            domain_devices=8,
            fast_bytes_per_second=4.5e11,
            source="H200 SXM: NVLink 4 in nodes of 8, 400 Gb/s a device outside",
        ),
    )


def _others() -> tuple[Machine, ...]:
    tpu_peak = peak_flops_per_second("TPU v5p")
    assert tpu_peak is not None
    return (
        Machine(
            name="tpu-v5p",
            platform="tpu",
            peak_flops_per_second=tpu_peak,
            peak_source="dense bfloat16, vendor's documentation",
            memory_bytes=95 * GIB,
            memory_bytes_per_second=2.765e12,
            domain_devices=6144,
            fast_bytes_per_second=2e11,
            slow_bytes_per_second=6.25e9,
            source="one of three torus axes, both directions, of 1,200 GB/s a chip; 50 Gb/s a chip "
            "between slices of up to 6,144",
        ),
        Machine(
            name="cpu-2-core",
            platform="cpu",
            peak_flops_per_second=2e11,
            peak_source="float32 matrix products measured on two AVX-512 cores",
            memory_bytes=24 * GIB,
            memory_bytes_per_second=2e10,
            domain_devices=1,
            fast_bytes_per_second=1e10,
            slow_bytes_per_second=1e9,
            checkpoint_bytes_per_second=1e8,
            restart_seconds=30.0,
            source="a laptop; bandwidths are round numbers",
        ),
    )


MACHINES: dict[str, Machine] = {machine.name: machine for machine in (*_gpus(), *_others())}
THIS_CPU = "this-cpu"
MEASURED_ROWS = 1024
MEASURED_BYTES = 64 * 2**20


def measure_this_cpu() -> Machine:
    """This machine: its memory, its float32 products and its copies, measured in 0.2 s."""
    import numpy as np

    left = np.ones((MEASURED_ROWS, MEASURED_ROWS), np.float32)
    product = min(_seconds(lambda: left @ left) for _ in range(4))
    source = np.ones(MEASURED_BYTES // 4, np.float32)
    target = np.empty_like(source)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(4))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MACHINES["cpu-2-core"].model_copy(
        update={
            "name": THIS_CPU,
            "peak_flops_per_second": 2 * MEASURED_ROWS**3 / product,
            "peak_source": "float32 matrix product, measured now",
            "memory_bytes": pages,
            "memory_bytes_per_second": 2 * MEASURED_BYTES / copy,
            "source": "memory, product and copy measured now; links are round numbers",
        }
    )


def _seconds(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def find_machine(name_or_path: str) -> Machine:
    """A machine by name, `this-cpu`, or the path of a TOML file with the keys of `Machine`.

    Raises:
        UsageError: no such machine, or the file does not describe one.
    """
    if name_or_path == THIS_CPU:
        return measure_this_cpu()
    if name_or_path in MACHINES:
        return MACHINES[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml":
        known = ", ".join([*MACHINES, THIS_CPU])
        raise UsageError(
            f"machine {name_or_path!r} is unknown",
            remedy=f"use one of {known}, or the path of a .toml file",
        )
    try:
        return Machine.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read machine {path}: {error}") from error
    except pydantic.ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'machine'}: {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise UsageError(
            f"{path} does not describe a machine: " + "\n  ".join(lines),
            remedy="see the keys of a machine in docs/planning.md",
        ) from None
