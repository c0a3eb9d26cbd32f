"""The optimizer on a mesh: where its stacks lie, and norms that count every entry once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Layout:
    """How leaves lie on a mesh.

    Args:
        mesh: the device mesh.
        specs: partition spec by path; a path without one is replicated.
        stack_axes: mesh axes over which [L, a, b] stacks are split for Newton-Schulz, so that no
            matrix is cut and no replica is crossed.
    """

    mesh: Mesh
    specs: Mapping[str, PartitionSpec]
    stack_axes: tuple[str, ...] = ()

    def spec(self, path: str) -> PartitionSpec:
        """The partition spec of a leaf."""
        return self.specs.get(path, PartitionSpec())

    def pin(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Constrain `x` to `spec`."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def norm(self, path: str, axes: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """A function that gives the Frobenius norm over `axes`, kept as axes of length 1."""
        return partial(sharded_norm, axes=axes, mesh=self.mesh, spec=self.spec(path))

    def orthogonalise(
        self, path: str, leaf: jax.Array, iterate: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Run `iterate` on whole matrices of a wide leaf [..., a, b], a <= b.

        A single matrix is replicated, [L, a, b] is padded with zero matrices and split over
        `stack_axes`, and [L, E, a, b] stays split as its own leading axes are.
        """
        if leaf.ndim == 2:
            return iterate(self.pin(leaf, PartitionSpec()))
        if leaf.ndim == 3:
            num_parts = math.prod(self.mesh.shape[name] for name in self.stack_axes)
            padding = -leaf.shape[0] % num_parts
            padded = jnp.pad(leaf, ((0, padding), (0, 0), (0, 0)))
            split = self.pin(padded, PartitionSpec(self.stack_axes or None))
            return iterate(split)[: leaf.shape[0]]
        leading = tuple(self.spec(path))[: leaf.ndim - 2]
        return iterate(self.pin(leaf, PartitionSpec(*leading)))


def sharded_norm(
    x: jax.Array, *, axes: tuple[int, ...], mesh: Mesh, spec: PartitionSpec
) -> jax.Array:
    """Frobenius norm over `axes` of a leaf that lies as `spec` says, axes kept with length 1.

    Sums of squares in float32 on each shard, then one sum over exactly the mesh axes that split a
    reduced axis: a norm left to automatic partitioning was once over-counted about sevenfold
    (marin #8073).
    """
    axes = tuple(axis % x.ndim for axis in axes)
    entries = (*spec, *(None,) * (x.ndim - len(spec)))
    names = tuple(name for axis in axes for name in _names(entries[axis]))
    kept = PartitionSpec(*(None if i in axes else entry for i, entry in enumerate(entries)))

    def local(shard: jax.Array) -> jax.Array:
        total = jnp.sum(shard * shard, axis=axes, keepdims=True)
        return jax.lax.psum(total, names) if names else total

    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    summed = jax.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=kept)(x)
    return jnp.sqrt(summed)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
