"""MuonH, AdamH and Adam as one gradient transformation.

Hidden matrices step along an orthogonalised momentum (MuonH), the output head along Adam's
direction (AdamH); both are projected back to their norm, so neither needs weight decay
(arXiv 2606.16899). Everything else follows Adam, router and head gate with annealed decay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from portolan.optim.adam import accept, adam_direction, adam_step, clip_gradients, settle
from portolan.optim.groups import GroupRow, GroupTable
from portolan.optim.newton_schulz import (
    cpu_chunk,
    from_wide,
    newton_schulz,
    orthogonalise_leaves,
    to_wide,
)
from portolan.optim.norms import NORM_FLOOR, Leaves, diagnostics, frobenius_norm
from portolan.optim.schedule import Rates
from portolan.optim.settings import ADAMW_EPSILON, OptimizerError, OptimizerSettings
from portolan.optim.sharding import Layout
from portolan.tree import flatten_paths

__all__ = [
    "OptimizerState",
    "Rates",
    "adam_direction",
    "build",
    "build_step",
    "diagnostics",
    "hyperball_step",
    "init_state",
]

NormFunction = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState:
    """Float32 state under the paths of the parameters, and the count of finished updates.

    A leaf of `muonh` holds `buf`, one of the other groups `m` and `v`; a constrained leaf also
    `radius` where the initial norm is kept.
    """

    count: jax.Array
    muonh: dict[str, Any]
    adamh: dict[str, Any]
    adam: dict[str, Any]
    adamw: dict[str, Any]


StepFunction = Callable[..., tuple[Any, OptimizerState]]


def hyperball_step(
    weight: jax.Array,
    direction: jax.Array,
    eta: jax.Array,
    norm: NormFunction,
    radius: jax.Array | None = None,
) -> jax.Array:
    """Move `weight` by eta * R along `direction`, then scale it back to the norm R.

    R is the current norm or `radius`. A zero direction or rate leaves `weight` bitwise unchanged.
    `norm` keeps reduced axes with length 1; the same function must serve all three norms, so that
    its rounding cancels.
    """
    if radius is None:
        radius = norm(weight)
    length = norm(direction)
    moved = weight - (eta * radius / jnp.maximum(length, NORM_FLOOR)) * direction
    factor = radius / jnp.maximum(norm(moved), NORM_FLOOR)
    return jnp.where((eta == 0) | (length == 0), 1, factor) * moved


def build(
    table: GroupTable, settings: OptimizerSettings, *, layout: Layout | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of `table`; `update` takes `rates=Rates(...)` of float32 scalars.

    `init` refuses zero matrices in constrained groups when the values are known. Adding the
    returned updates rounds once more than `build_step`, which returns the parameters themselves.
    """
    step = build_step(table, settings, layout=layout)

    def update(
        updates: Any, state: OptimizerState, params: Any = None, *, rates: Rates, **_: Any
    ) -> tuple[Any, OptimizerState]:
        if params is None:
            raise OptimizerError("the optimizer needs the parameters: their norms are kept")
        new_params, new_state = step(updates, state, params, rates)
        return jax.tree.map(jnp.subtract, new_params, params), new_state

    init: Any = partial(init_state, table=table, settings=settings)
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def init_state(params: Any, *, table: GroupTable, settings: OptimizerSettings) -> OptimizerState:
    """Zero state for `params`, or shapes of it under `jax.eval_shape`.

    Raises:
        OptimizerError: the tree is not that of the table, a leaf is narrower than float32, or a
            constrained matrix is zero (checked when the values are known).
    """
    leaves = _checked_leaves(params, table)
    _refuse_zero_matrices(leaves, table)
    groups: dict[str, dict[str, Any]] = {name: {} for name in ("muonh", "adamh", "adam", "adamw")}
    for row in table.rows:
        leaf = leaves[row.path]
        names = ("buf",) if row.group == "muonh" else ("m", "v")
        state = {name: jnp.zeros_like(leaf) for name in names}
        if settings.hyperball_radius == "initial" and row.constrained:
            state["radius"] = frobenius_norm(leaf, row.norm_axes)
        groups[row.group][row.path] = state
    nested = {name: _nest(members) for name, members in groups.items()}
    return OptimizerState(count=jnp.zeros((), jnp.int32), **nested)


def build_step(
    table: GroupTable, settings: OptimizerSettings, *, layout: Layout | None = None
) -> StepFunction:
    """A pure function (grads, state, params, rates) -> (new params, new state), to be jitted.

    With `accepted=flag` it returns the old ones where the flag is false: written this way the
    arrays of a donated state are updated in place.
    """
    if settings.beta2 is None or settings.epsilon is None:
        raise OptimizerError(
            "beta2 and epsilon of Adam are unset",
            remedy="take them from the law with OptimizerSettings.with_law",
        )
    rule = _UpdateRule(table, settings, layout)

    def step(
        grads: Any,
        state: OptimizerState,
        params: Any,
        rates: Rates,
        accepted: jax.Array | None = None,
    ) -> tuple[Any, OptimizerState]:
        weights = _checked_leaves(params, table)
        named = flatten_paths(grads)
        if named.keys() != weights.keys():
            raise OptimizerError("the gradients and the parameters are different trees")
        gradients = {path: named[path].astype(leaf.dtype) for path, leaf in weights.items()}
        new, members = rule.apply(rule.clip(gradients), state, weights, rates, accepted)
        structure = jax.tree.structure(params)
        count = accept(state.count + 1, state.count, accepted)
        new_state = OptimizerState(count=count, **members)
        return jax.tree.unflatten(structure, [new[path] for path in weights]), new_state

    return step


@dataclass(frozen=True)
class _UpdateRule:
    """The update of all leaves, given as dicts by path."""

    table: GroupTable
    settings: OptimizerSettings
    layout: Layout | None

    def apply(
        self,
        grads: Leaves,
        state: OptimizerState,
        weights: Leaves,
        rates: Rates,
        accepted: jax.Array | None,
    ) -> tuple[Leaves, dict[str, dict[str, Any]]]:
        """New weights, and the new state of each group, nested."""
        new: Leaves = {}
        members: dict[str, dict[str, Any]] = {}
        for group in ("muonh", "adamh", "adam", "adamw"):
            rows = self.table.in_group(group)
            old = {row.path: _look_up(getattr(state, group), row.path) for row in rows}
            if group == "muonh":
                directions, states = self.muon_directions(grads, old, accepted)
            else:
                directions, states = self.adam_directions(group, grads, old, state.count, accepted)
            for row in rows:
                if "radius" in old[row.path]:
                    states[row.path]["radius"] = old[row.path]["radius"]
                moved = self.move(row, weights, directions, old, rates)
                new[row.path] = accept(moved, weights[row.path], accepted)
            members[group] = _nest(states)
        return new, members

    def move(
        self,
        row: GroupRow,
        weights: Leaves,
        directions: Leaves,
        states: Mapping[str, Mapping[str, jax.Array]],
        rates: Rates,
    ) -> jax.Array:
        """One new leaf."""
        weight, direction = weights[row.path], directions[row.path]
        if not row.constrained:
            return adam_step(weight, direction, row, rates, self.settings)
        eta, radius = jnp.asarray(rates.eta, weight.dtype), states[row.path].get("radius")
        return self.pin(row, hyperball_step(weight, direction, eta, self.norm(row), radius))

    def muon_directions(
        self,
        grads: Leaves,
        states: Mapping[str, Mapping[str, jax.Array]],
        accepted: jax.Array | None,
    ) -> tuple[Leaves, dict[str, dict[str, jax.Array]]]:
        """Orthogonalised momentum of every muonh leaf, and the new momentum."""
        momentum = self.settings.momentum
        buffers, inputs = {}, {}
        for path, state in states.items():
            buffer = momentum * state["buf"] + grads[path]
            buffers[path] = settle({"buf": buffer}, state, accepted)
            buffer = buffers[path]["buf"]
            inputs[path] = momentum * buffer + grads[path] if self.settings.nesterov else buffer
        if self.layout is None:
            return orthogonalise_leaves(inputs, self.iterate), buffers
        directions = {}
        for path, leaf in inputs.items():
            directions[path] = self.layout.orthogonalise(path, leaf, self.iterate_any)
        return directions, buffers

    def iterate(self, stack: jax.Array) -> jax.Array:
        """Newton-Schulz on [n, a, b], in pieces that fit the cache on a CPU."""
        on_cpu = jax.default_backend() == "cpu"
        return self.iterate_whole(stack, chunk=cpu_chunk(*stack.shape) if on_cpu else None)

    def iterate_any(self, leaf: jax.Array) -> jax.Array:
        """Newton-Schulz on [..., a, b], whichever of a and b is larger; keeps shape and type."""
        return from_wide(self.iterate_whole(to_wide(leaf)).astype(leaf.dtype), leaf.shape)

    def iterate_whole(self, stack: jax.Array, chunk: int | None = None) -> jax.Array:
        """Newton-Schulz on [..., a, b] with the constants of the settings."""
        return newton_schulz(
            stack,
            num_steps=self.settings.ns_steps,
            dtype=self.settings.ns_dtype,
            eps=self.settings.muon_eps,
            chunk=chunk,
        )

    def adam_directions(
        self,
        group: str,
        grads: Leaves,
        states: Mapping[str, Mapping[str, jax.Array]],
        count: jax.Array,
        accepted: jax.Array | None,
    ) -> tuple[Leaves, dict[str, dict[str, jax.Array]]]:
        """Adam's direction for every leaf of `group`, and the new moments."""
        assert self.settings.beta2 is not None and self.settings.epsilon is not None
        epsilon = ADAMW_EPSILON if group == "adamw" else self.settings.epsilon
        directions, moments = {}, {}
        for path, state in states.items():
            directions[path], moments[path] = adam_direction(
                grads[path],
                state,
                count,
                beta1=self.settings.beta1,
                beta2=self.settings.beta2,
                epsilon=epsilon,
                accepted=accepted,
            )
        return directions, moments

    def norm(self, row: GroupRow) -> NormFunction:
        """The norm over the scope of a constrained leaf."""
        if self.layout is None:
            return partial(frobenius_norm, axes=row.norm_axes)
        return self.layout.norm(row.path, row.norm_axes)

    def pin(self, row: GroupRow, leaf: jax.Array) -> jax.Array:
        """Keep the layout of a new leaf equal to that of the old one."""
        if self.layout is None:
            return leaf
        return self.layout.pin(leaf, self.layout.spec(row.path))

    def clip(self, grads: Leaves) -> Leaves:
        """Scale gradients so that their joint norm over the clipped groups is bounded."""
        bound = self.settings.resolved_clip
        if bound is None:
            return grads
        groups = self.settings.clip_groups or self.table.groups
        paths = [row.path for row in self.table.rows if row.group in groups]
        return clip_gradients(grads, paths, bound)


def _checked_leaves(params: Any, table: GroupTable) -> Leaves:
    leaves = flatten_paths(params)
    rows = table.by_path
    if different := sorted(set(leaves) ^ set(rows)):
        raise OptimizerError(f"the parameters and the group table differ in leaf {different[0]}")
    for path, leaf in leaves.items():
        if tuple(leaf.shape) != rows[path].shape:
            raise OptimizerError(
                f"parameter {path} has shape {tuple(leaf.shape)}, the group table says "
                f"{rows[path].shape}"
            )
        if jnp.promote_types(leaf.dtype, jnp.float32) != leaf.dtype:
            raise OptimizerError(
                f"parameter {path} is {leaf.dtype}; the optimizer keeps float32 parameters",
                remedy="cast to the compute type inside the loss",
            )
    return leaves


def _refuse_zero_matrices(leaves: Leaves, table: GroupTable) -> None:
    constrained = {row.path: leaves[row.path] for row in table.rows if row.constrained}
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in constrained.values()):
        return
    empty = jax.device_get(jax.jit(_count_zero_matrices)(constrained))
    for path, count in empty.items():
        if count:
            raise OptimizerError(
                f"{int(count)} matrices of {path} are zero at the start; their norm is kept, so "
                f"they would stay zero",
                remedy="initialise them with a truncated normal",
            )


def _count_zero_matrices(leaves: Leaves) -> Leaves:
    return {path: jnp.sum(~jnp.any(x != 0, axis=(-2, -1))) for path, x in leaves.items()}


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}, so that state paths are parameter paths."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = root
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return root


def _look_up(nested: Mapping[str, Any], path: str) -> Any:
    for name in path.split("/"):
        nested = nested[name]
    return nested
