"""Trains one run on several meshes of eight host devices; prints JSON. Run by test_meshes.py.

Usage: mesh_child.py CASES.json, a list of {"mesh": {...}, "settings": {...}, "steps": n}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.train.runs import CONFIG, PEAK, RUN, batch

from portolan.model.transformer import Batch
from portolan.parallel_settings import MeshSettings, ParallelSettings
from portolan.train.devices import Devices, find_devices
from portolan.train.state import flatten_state, group_table, initial_state
from portolan.train.step import make_train_step

TABLE = group_table(RUN)


def devices_of(case: dict[str, Any]) -> Devices | None:
    mesh = MeshSettings(**{"data": 1} | case["mesh"])
    return find_devices(ParallelSettings(mesh=mesh, **case.get("settings", {})))


def train(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Losses, drops and router state of some updates, and the parameters after them."""
    devices = devices_of(case)
    state = devices.initial_state(RUN, TABLE) if devices else initial_state(RUN, TABLE)
    step = make_train_step(RUN, TABLE, "float32", devices)
    found: dict[str, Any] = {"loss": [], "gradient": [], "dropped": [], "drift": 0.0}
    for index in range(case["steps"]):
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
    replicas = [np.asarray(s.data) for s in state.params.blocks.moe.router.addressable_shards]
    found["replicas_equal"] = all(np.array_equal(replicas[0], other) for other in replicas)
    return found, {path: np.asarray(leaf) for path, leaf in flatten_state(state).items()}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    reports, first = [], None
    for case in json.loads(Path(sys.argv[1]).read_text()):
        found, state = train(case)
        first = first or state
        found["difference"] = max(
            float(np.abs(state[path] - first[path]).max(initial=0))
            for path in first
            if path != "router_state/beta"
        )
        reports.append(found)
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
