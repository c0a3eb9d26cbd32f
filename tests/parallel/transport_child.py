"""Run cases on eight host devices and write what came out: `transport_child.py OUT.npz NAMES...`.

The parent compares it with the dense reference, which is computed there.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.parallel.transport_cases import (
    CASES,
    G1_IDS,
    GOLDENS,
    MEMORY,
    MORE_CASES,
    Case,
    Golden,
    make_inputs,
)
from tests.parallel.vmapped import SCALE, quick_jit

from portolan.model.tree import GatedMlp
from portolan.parallel.exchange import Exchange
from portolan.parallel.layout import COUNT_AXES
from portolan.parallel.mesh import build_mesh

jax.config.update("jax_default_matmul_precision", "highest")
# Tokens lie group by group, and in a group shard by shard.
TOKENS = P(("replica", "data", "context", "expert"))
EXPERTS = GatedMlp(
    P("expert", None, "model"), P("expert", None, "model"), P("expert", "model", None)
)


def make_loss(exchange: Exchange, mesh: jax.sharding.Mesh, experts=EXPERTS):
    """sum(y * u), with y and the drops, of x, weights, experts, u, ids, valid."""

    def shard(x, c, experts_tree, u, experts, valid):
        y, drops = exchange(x, c, experts, valid, experts_tree)
        total = jnp.sum(y.astype(jnp.float32) * u.astype(jnp.float32))
        return jax.lax.psum(total, COUNT_AXES), (y, jnp.stack(drops))

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(TOKENS, TOKENS, experts, TOKENS, TOKENS, TOKENS),
        out_specs=(P(), (TOKENS, P())),
        check_vma=False,
    )


def differentiate(loss):
    """value_and_grad of a loss by x, weights and experts, compiled in a hurry."""
    return quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def run_case(case: Case) -> dict[str, np.ndarray]:
    """What one case gives, by the names of the reference, 16-bit floats widened."""
    mesh, inputs = build_mesh(case.sizes), make_inputs(case)
    specs = (TOKENS,) * 5 + (EXPERTS.gate, EXPERTS.up, EXPERTS.down)
    x, u, c, ids, valid, *experts = (
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(inputs, specs, strict=True)
    )
    program = differentiate(make_loss(case.exchange(), mesh))
    (_, (y, drops)), (dx, dc, dtree) = program(x, c, GatedMlp(*experts), u, ids, valid)
    found = {"y": y, "dx": dx, "dc": dc, "dgate": dtree.gate, "dup": dtree.up, "ddown": dtree.down}
    wide = {key: np.asarray(value.astype(jnp.float32)) for key, value in found.items()}
    return wide | {"drops": np.asarray(drops)}


def run_golden(golden: Golden) -> dict[str, np.ndarray]:
    """y, dx, dc and the drops of the problem G1."""
    case, num_tokens = golden.case, len(G1_IDS)
    mesh = build_mesh(case.sizes)
    exchange = dataclasses.replace(case.exchange(), function=SCALE)
    ones = np.ones((num_tokens, 1), np.float32)
    x, weights = ones * (1 + np.arange(num_tokens) % 4)[:, None], np.ones(G1_IDS.shape, np.float32)
    valid, scales = np.ones(num_tokens, bool), np.arange(1, 5, dtype=np.float32)
    valid[list(golden.invalid)] = False
    program = differentiate(make_loss(exchange, mesh, P("expert")))
    (_, (y, drops)), (dx, dc, _) = program(
        *map(jnp.asarray, (x, weights, scales, ones, G1_IDS, valid))
    )
    return {"y": y, "dx": dx, "dc": dc, "drops": drops}


def measure_chunks() -> dict[str, list[int]]:
    """Temporary bytes of the forward pass for one chunk and for two."""
    found = []
    for chunks in (1, 2):
        case = Case("", (1, 1, 1, 8, 1), gate="receiver", chunks=chunks, tokens=512, experts=32)
        case = dataclasses.replace(case, width=32, inner=512)
        inputs = make_inputs(case)
        args = inputs.x, inputs.c, GatedMlp(*inputs[5:]), inputs.u, inputs.experts, inputs.valid
        program = quick_jit(make_loss(case.exchange(), build_mesh(case.sizes)))
        memory = program.lower(*args).compile().memory_analysis()
        found.append(memory.temp_size_in_bytes)
    return {MEMORY: found}


def main() -> None:
    """Write the results of the named cases as one archive of arrays."""
    assert jax.device_count() == 8
    out, names = sys.argv[1], set(sys.argv[2:])
    results = {}
    for case in CASES + MORE_CASES:
        if case.name in names:
            results |= {f"{case.name}/{key}": value for key, value in run_case(case).items()}
    for golden in GOLDENS:
        name = golden.case.name
        if name in names:
            results |= {f"{name}/{key}": value for key, value in run_golden(golden).items()}
    if MEMORY in names:
        results |= measure_chunks()
    np.savez(out, **results)


if __name__ == "__main__":
    main()
