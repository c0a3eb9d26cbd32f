"""Names of the leaves of a nested structure of arrays."""

from collections.abc import Mapping
from typing import Any

import jax


def _segment(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown key {key!r} in a tree path")


def flatten_paths(tree: Any) -> dict[str, Any]:
    """{`a/b/c`: leaf} in the order of the tree; segments are field names, keys or indices."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(_segment(key) for key in path): leaf for path, leaf in leaves}


def unflatten_paths(template: Any, leaves: Mapping[str, Any]) -> Any:
    """The structure of `template` with the leaves of the same paths; KeyError if one is missing."""
    paths = flatten_paths(template)
    structure = jax.tree_util.tree_structure(template)
    return jax.tree_util.tree_unflatten(
        structure, [jax.numpy.asarray(leaves[path]) for path in paths]
    )
