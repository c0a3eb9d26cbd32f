"""Copies that should be equal: a checksum of every shard, compared over the axes that repeat it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from portolan.parallel.layout import MESH_AXES
from portolan.tree import flatten_paths

ODD = 0x9E3779B1
"""Multiplier of positions, odd so that no bit of a product is lost (2^32 over the golden ratio)."""


def checksum(shard: jax.Array) -> jax.Array:
    """uint32 of the bits of a float32 array; it changes with any bit and with any swap."""
    bits = jax.lax.bitcast_convert_type(shard.astype(jnp.float32), jnp.uint32).reshape(-1)
    position = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(ODD) | jnp.uint32(1)
    return jnp.sum(bits * position, dtype=jnp.uint32)


@functools.lru_cache
def _comparison(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """A program that says for each leaf whether copies of a shard differ."""

    def differ(leaves: list[jax.Array]) -> jax.Array:
        found = []
        for leaf, spec in zip(leaves, specs, strict=True):
            copies = tuple(axis for axis in MESH_AXES if axis not in _names(spec))
            value = jax.lax.bitcast_convert_type(checksum(leaf), jnp.int32)
            unequal = jax.lax.pmax(value, copies) != jax.lax.pmin(value, copies)
            found.append(jax.lax.pmax(unequal.astype(jnp.int32), MESH_AXES))
        return jnp.stack(found)

    mapped = jax.shard_map(
        differ, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(mapped)


def _names(spec: PartitionSpec) -> set[str]:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return {name for entry in entries for name in entry if name is not None}


def differing_leaves(params: Any, mesh: Mesh) -> list[str]:
    """Paths of the parameters whose copies on the mesh are not equal to the bit."""
    leaves = flatten_paths(params)
    specs = tuple(leaf.sharding.spec for leaf in leaves.values())
    unequal = jax.device_get(_comparison(mesh, specs)(list(leaves.values())))
    return [path for path, flag in zip(leaves, unequal, strict=True) if flag]
