"""Eight host devices against one; run by test_sharding.py in its own process, prints JSON."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from portolan.optim import hyperball
from portolan.optim.groups import GroupRow, GroupTable
from portolan.optim.norms import frobenius_norm, max_norm_drift
from portolan.optim.schedule import Rates
from portolan.optim.settings import OptimizerSettings
from portolan.optim.sharding import Layout, sharded_norm

SETTINGS = OptimizerSettings(hyperball_scope="joint", ns_dtype="float32", beta2=0.95, epsilon=1e-15)
SPECS = {
    "head/proj": PartitionSpec(("data", "expert"), None),
    "wq": PartitionSpec(None, ("data", "expert"), None),
    "wo": PartitionSpec(None, None, ("data", "expert")),
    "gate": PartitionSpec(None, "expert", "data", None),
    "router": PartitionSpec(),
}
SHAPES = {
    "head/proj": (16, 12),
    "wq": (3, 8, 12),
    "wo": (3, 12, 8),
    "gate": (3, 4, 6, 6),
    "gnorm": (8, 4),
    "router": (3, 8, 4),
}
RATES = Rates(np.float32(0.03), np.float32(0.01), np.float32(0.02))


def table(scope: str) -> GroupTable:
    scopes = {"head/proj": "matrix", "gnorm": "matrix", "gate": scope, "router": None}
    groups = {"head/proj": "adamh", "router": "adam"}
    return GroupTable(
        tuple(
            GroupRow(p, s, groups.get(p, "muonh"), scopes.get(p, "per_layer"), p == "router")
            for p, s in SHAPES.items()
        )
    )


def draw(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {p: jnp.asarray(rng.normal(size=s), jnp.float32) for p, s in SHAPES.items()}


def compare(mesh: jax.sharding.Mesh, scope: str) -> dict[str, float]:
    """Largest relative difference of a leaf after two updates, and the drift on the mesh."""
    settings = replace(SETTINGS, hyperball_scope=scope)
    groups = table(scope)
    layout = Layout(mesh, SPECS, stack_axes=("data", "expert"))
    place = {p: NamedSharding(mesh, layout.spec(p)) for p in SHAPES}
    results = []
    for where in (None, layout):
        step = jax.jit(hyperball.build_step(groups, settings, layout=where))
        first = params = draw(0) if where is None else jax.device_put(draw(0), place)
        state = hyperball.init_state(params, table=groups, settings=settings)
        for seed in (1, 2):
            grads = draw(seed) if where is None else jax.device_put(draw(seed), place)
            params, state = step(grads, state, params, RATES)
        results.append((first, params))
    (_, alone), (first, sharded) = results
    difference = max(
        float(np.abs(np.asarray(sharded[p]) - alone[p]).max() / np.abs(alone[p]).max())
        for p in SHAPES
    )
    kept = all(sharded[p].sharding.is_equivalent_to(place[p], sharded[p].ndim) for p in SHAPES)
    return {
        "difference": difference,
        "drift": float(max_norm_drift(first, sharded, groups)),
        "layout_kept": kept,
    }


def over_counted(mesh: jax.sharding.Mesh) -> dict[str, float]:
    """A reduction of the moved weight that also sums over the replicas."""
    weight = jnp.asarray([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    spec = PartitionSpec("expert")
    weight = jax.device_put(weight, NamedSharding(mesh, spec))
    right = jax.jit(lambda x: sharded_norm(x, axes=(0, 1), mesh=mesh, spec=spec))(weight)

    def wrong(x: jax.Array) -> jax.Array:
        def local(shard: jax.Array) -> jax.Array:
            total = jnp.sum(shard * shard, keepdims=True)
            return jax.lax.psum(total, ("expert", "replica"))

        summed = jax.shard_map(
            local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
        )(x)
        return jnp.sqrt(summed)

    calls = []

    def norm(x: jax.Array) -> jax.Array:
        calls.append(x)
        return wrong(x) if len(calls) == 3 else frobenius_norm(x, (0, 1))

    def step(w: jax.Array) -> jax.Array:
        return hyperball.hyperball_step(w, jnp.ones_like(w), jnp.float32(0.01), norm)

    moved = jax.jit(step)(weight)
    groups = GroupTable((GroupRow("w", (4, 2), "muonh", "matrix", False),))
    return {
        "right": float(right[0, 0]),
        "wrong": float(jax.jit(wrong)(weight)[0, 0]),
        "shrunk_to": float(jnp.linalg.norm(moved) / jnp.linalg.norm(weight)),
        "drift": float(max_norm_drift({"w": weight}, {"w": moved}, groups)),
    }


def main() -> None:
    """Print the measurements of all meshes."""
    auto = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "expert"), axis_types=auto)
    report = {scope: compare(mesh, scope) for scope in ("joint", "per_expert")}
    report["over_counted"] = over_counted(mesh)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
