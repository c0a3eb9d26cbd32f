"""An exchange on one device: the mesh axes are named axes of nested `vmap`s."""

import jax
import jax.numpy as jnp

from portolan.parallel.layout import MESH_AXES
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.expert_function import ExpertFunction


def quick_jit(function, **options):
    """`jax.jit` that compiles in a third of the time: tests run each program once or twice."""
    settings = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    return jax.jit(function, compiler_options=settings, **options)


def over_axes(function):
    """A function of one shard as one of arguments with a leading axis of shards."""
    mapped = jax.vmap(function, axis_name=EXPERT_AXIS)
    for axis in MESH_AXES:
        if axis != EXPERT_AXIS:
            mapped = jax.vmap(mapped, in_axes=None, axis_size=1, axis_name=axis)

    def run(*args):
        return jax.tree.map(lambda leaf: leaf[0, 0, 0, 0], mapped(*args))

    return run


def _scale_rows(rows, sizes, scales, expected):
    del expected
    ends = jnp.cumsum(sizes)
    expert = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")
    return rows * jnp.take(scales, expert, mode="fill", fill_value=0)[:, None]


SCALE = ExpertFunction(_scale_rows, lambda rows, scales: rows * scales[:, None, None])
"""Expert g multiplies by its entry of `experts`, an array [El]."""
