"""Trains one run on several meshes of eight host devices; prints JSON. Run by test_meshes.py.

Usage: mesh_child.py CASES.json, a list of {"mesh": {...}, "settings": {...}, "steps": n,
"micro_batches": n, "first": update at which it takes over the state of the case before it}.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.train.runs import CONFIG, PEAK, RUN, batch

from portolan.model.transformer import Batch
from portolan.model.tree import Params
from portolan.parallel.replicas import differing_leaves
from portolan.parallel_settings import MeshSettings, ParallelSettings
from portolan.train.devices import Devices, find_devices
from portolan.train.state import (
    TrainState,
    flatten_state,
    group_table,
    initial_state,
    restore_state,
)
from portolan.train.step import make_train_step

TABLE = group_table(RUN)


def devices_of(case: dict[str, Any]) -> Devices | None:
    mesh = MeshSettings(**{"data": 1} | case["mesh"])
    settings = ParallelSettings(mesh=mesh, **case.get("settings", {}))
    return find_devices(settings, case.get("micro_batches", 1))


def flip_a_bit(params: Params) -> Params:
    """The parameters with one bit of one device's copy of the router changed."""
    router = params.blocks.moe.router
    copies = [np.array(shard.data) for shard in router.addressable_shards]
    copies[-1].view(np.uint32).reshape(-1)[3] ^= 1
    shards = zip(copies, router.addressable_shards, strict=True)
    placed = [jax.device_put(copy, shard.device) for copy, shard in shards]
    broken = jax.make_array_from_single_device_arrays(router.shape, router.sharding, placed)
    moe = dataclasses.replace(params.blocks.moe, router=broken)
    return dataclasses.replace(params, blocks=dataclasses.replace(params.blocks, moe=moe))


def start(devices: Devices | None, before: dict[str, np.ndarray] | None) -> TrainState:
    """A fresh state, or the saved one where these devices want it."""
    state = devices.initial_state(RUN, TABLE) if devices else initial_state(RUN, TABLE)
    if before is None:
        return state
    arrays = devices.put_state(state, before) if devices else before
    return restore_state(state, arrays)


def train(
    case: dict[str, Any], before: dict[str, np.ndarray] | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Losses and drops of some updates, and the state after them."""
    devices = devices_of(case)
    state = start(devices, before)
    exact = before is None or all(
        np.array_equal(np.asarray(leaf), before[path])
        for path, leaf in flatten_state(state).items()
    )
    step = make_train_step(RUN, TABLE, "float32", devices)
    found: dict[str, Any] = {
        "restored_exactly": exact,
        "loss": [],
        "gradient": [],
        "dropped": [],
        "drift": 0.0,
    }
    first = case.get("first", 0)
    for index in range(first, first + case["steps"]):
        rows = batch(index)
        fed = devices.put_batch(rows, RUN.batch_sequences) if devices else Batch(*rows)
        rates = RUN.schedule.rates(index, PEAK, initial_decay=0.02, start=0)
        state, metrics = step(state, fed, rates)
        found["loss"].append(float(metrics["train/loss"]))
        found["gradient"].append(float(metrics["norm/gradient/global"]))
        found["drift"] = max(float(x) for k, x in metrics.items() if k.startswith("norm/drift/"))
        dropped = metrics.get("router/receiver_dropped", np.zeros(CONFIG.num_layers))
        found["dropped"].append(int(np.sum(dropped)))
    shardings = flatten_state(devices.state_shardings(state)) if devices else {}
    found["placed"] = all(
        leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim)
        for path, leaf in flatten_state(state).items()
        if path in shardings
    )
    if devices:
        found["differing"] = differing_leaves(state.params, devices.mesh)
        found["flipped"] = differing_leaves(flip_a_bit(state.params), devices.mesh)
    return found, {path: np.asarray(leaf) for path, leaf in flatten_state(state).items()}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    reports, states = [], []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        found, state = train(case, states[-1] if case.get("first") else None)
        states.append(state)
        found["difference"] = max(
            float(np.abs(leaf - states[0][path]).max(initial=0))
            for path, leaf in state.items()
            if path != "router_state/beta"
        )
        reports.append(found)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
