"""Where parameters, optimizer state and batches lie on a mesh."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from portolan.parallel.layout import BATCH_AXES, Axes, leaf_axes
from portolan.tree import flatten_paths

REPLICATED = PartitionSpec()
ROWS = PartitionSpec(BATCH_AXES, "context")
"""Tokens, segments and weights [B, S]."""


def partition_spec(axes: tuple[Axes, ...]) -> PartitionSpec:
    """Axes by dimension as JAX writes them."""
    entries = [names[0] if len(names) == 1 else names or None for names in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def parameter_specs(params: Any, sizes: Mapping[str, int]) -> dict[str, PartitionSpec]:
    """Partition spec by path of a tree of parameters (or of their shapes)."""
    return {
        path: partition_spec(leaf_axes(path, leaf.shape, sizes))
        for path, leaf in flatten_paths(params).items()
    }


def parameter_tree(params: Any, sizes: Mapping[str, int]) -> Any:
    """`parameter_specs` in the form of the tree."""
    return _in_form_of(params, parameter_specs(params, sizes))


def optimizer_tree(opt: Any, sizes: Mapping[str, int]) -> Any:
    """Partition specs of the optimizer state: every moment lies as its parameter does."""
    specs = {}
    for path, leaf in flatten_paths(opt).items():
        of_parameter = "/".join(path.split("/")[1:-1])
        specs[path] = partition_spec(leaf_axes(of_parameter, leaf.shape, sizes))
    return _in_form_of(opt, specs)


def _in_form_of(tree: Any, specs: dict[str, PartitionSpec]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), list(specs.values()))


def place(mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """Shardings of a tree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
