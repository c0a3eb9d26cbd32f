"""The device mesh: five named axes, those of length 1 kept, so that one device and a rack run the
same program."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from portolan.parallel.layout import MESH_AXES
from portolan.parallel_settings import MeshSettings


def resolve_sizes(settings: MeshSettings, num_devices: int) -> dict[str, int]:
    """Length of every axis on `num_devices` devices.

    Raises:
        UsageError: the axes need more devices than there are.
    """
    return settings.sizes_on(
        num_devices,
        found=f"{num_devices} are here",
        remedy="choose another one with --mesh, such as --mesh data=-1",
    )


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The first devices, by process and number, laid out row by row; further ones stay idle."""
    found = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    lengths = [sizes[axis] for axis in MESH_AXES]
    chosen = np.array(found[: int(np.prod(lengths))], dtype=object).reshape(lengths)
    return Mesh(chosen, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
