"""Norms: of the constraint, to log, and the check that constrained norms did not move."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from portolan.errors import TrainingDiverged
from portolan.optim.groups import GroupTable
from portolan.tree import flatten_paths

Leaves = dict[str, jax.Array]

NORM_FLOOR = 1e-10
"""Norms are divided by at least this."""
NORM_DRIFT_LIMIT = 1e-4
"""Largest relative change of a constrained norm in one update (marin #8073)."""


def frobenius_norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Norm over `axes`, which stay with length 1."""
    return jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))


def norm_drifts(old: Any, new: Any, table: GroupTable) -> Leaves:
    """For each constrained leaf, the largest | |W_new| / |W_old| - 1 | of its norm groups."""
    before, after = flatten_paths(old), flatten_paths(new)
    drifts = {}
    for row in table.rows:
        if row.constrained:
            ratio = frobenius_norm(after[row.path], row.norm_axes) / frobenius_norm(
                before[row.path], row.norm_axes
            )
            drifts[row.path] = jnp.max(jnp.abs(ratio - 1))
    return drifts


def max_norm_drift(old: Any, new: Any, table: GroupTable) -> jax.Array:
    """The largest of `norm_drifts`, one scalar that is cheap enough for every update."""
    return jnp.max(jnp.stack([jnp.zeros(()), *norm_drifts(old, new, table).values()]))


def diagnostics(grads: Any, old: Any, new: Any, table: GroupTable) -> Leaves:
    """Scalars to log: those of `gradient_norms` and of `parameter_norms`."""
    return gradient_norms(grads) | parameter_norms(old, new, table)


def gradient_norms(grads: Any) -> Leaves:
    """`norm/gradient/<path>` of every leaf, and `norm/gradient/global`."""
    squares = {path: jnp.sum(jnp.square(leaf)) for path, leaf in flatten_paths(grads).items()}
    out = {f"norm/gradient/{path}": jnp.sqrt(square) for path, square in squares.items()}
    return out | {"norm/gradient/global": jnp.sqrt(jnp.sum(jnp.stack(list(squares.values()))))}


def parameter_norms(old: Any, new: Any, table: GroupTable) -> Leaves:
    """`norm/parameters/<path>` after the update, and `norm/drift/<path>` of constrained norms."""
    out = {f"norm/parameters/{path}": _norm(leaf) for path, leaf in flatten_paths(new).items()}
    drifts = norm_drifts(old, new, table)
    return out | {f"norm/drift/{path}": drift for path, drift in drifts.items()}


def check_norm_drift(drifts: Mapping[str, float], completed: int) -> None:
    """Stop a run whose constrained norms moved in update `completed`, counted from 1.

    Raises:
        TrainingDiverged: a drift is above `NORM_DRIFT_LIMIT` or not a number.
    """
    for path, drift in drifts.items():
        if not drift <= NORM_DRIFT_LIMIT:
            raise TrainingDiverged(
                f"the norm of {path} moved by {drift:.3g} in update {completed}; at most "
                f"{NORM_DRIFT_LIMIT:g} is rounding",
                remedy="a norm counts some shard twice or not at all: compare with one device",
            )


def _norm(leaf: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(leaf)))
