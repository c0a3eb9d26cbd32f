"""The devices of a run: its mesh, and how state and batches get onto it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from portolan.model.init import init_part
from portolan.model.transformer import Batch, abstract
from portolan.optim.groups import GroupTable
from portolan.parallel.mesh import build_mesh, resolve_sizes
from portolan.parallel.sharding import (
    REPLICATED,
    ROWS,
    optimizer_tree,
    parameter_tree,
    place,
)
from portolan.parallel.spread import Spread
from portolan.parallel_settings import ParallelSettings
from portolan.shapes import ModelConfig
from portolan.train.state import RunSettings, TrainState, abstract_state, flatten_state, state_of
from portolan.tree import flatten_paths, unflatten_paths


@dataclass(frozen=True)
class Devices:
    """A mesh, and the settings by which rows travel on it."""

    mesh: Mesh
    settings: ParallelSettings
    num_micro_batches: int = 1

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        used = self.mesh.size
        micro = f", {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        idle = jax.device_count() - used
        return f"mesh {axes or 'of one device'}: {used} devices, {idle} idle{micro}"

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length of every axis."""
        return dict(self.mesh.shape)

    @property
    def everywhere(self) -> NamedSharding:
        """Of an array that every device holds whole."""
        return NamedSharding(self.mesh, REPLICATED)

    @property
    def rows(self) -> NamedSharding:
        """Of tokens, segments and weights [B, S]."""
        return NamedSharding(self.mesh, ROWS)

    @property
    def batch_rows(self) -> NamedSharding:
        """Of the batch of an update, [B, S] or [micro-batches, B, S]."""
        if self.num_micro_batches == 1:
            return self.rows
        return NamedSharding(self.mesh, PartitionSpec(None, *ROWS))

    @property
    def num_row_shards(self) -> int:
        """Parts into which the rows of a batch are split."""
        sizes = self.sizes
        return sizes["replica"] * sizes["data"] * sizes["expert"]

    def spread(self, config: ModelConfig, batch_sequences: int) -> Spread:
        """How a shape lies here; refuses one that does not fit."""
        return Spread(self.mesh, self.settings, config, batch_sequences)

    def training_spread(self, config: ModelConfig, batch_sequences: int) -> Spread:
        """The same for an update, whose rows may come in micro-batches."""
        return dataclasses.replace(
            self.spread(config, batch_sequences), num_micro_batches=self.num_micro_batches
        )

    def parameter_shardings(self, params: Any) -> Any:
        """Shardings in the form of the tree."""
        return place(self.mesh, parameter_tree(params, self.sizes))

    def state_shardings(self, state: TrainState) -> TrainState:
        """Shardings in the form of the state."""
        return TrainState(
            params=self.parameter_shardings(state.params),
            opt=place(self.mesh, optimizer_tree(state.opt, self.sizes)),
            beta=self.everywhere,  # type: ignore[arg-type]
        )

    def initial_state(self, run: RunSettings, table: GroupTable) -> TrainState:
        """The state of `train.state.initial_state`, of which every process draws its own part."""
        shapes = abstract(run.config)
        shardings = flatten_paths(self.parameter_shardings(shapes))

        def leaf(path: str, shape: tuple[int, ...]) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                return init_part(path, shape, run.config.init_std, run.seed, index)

            return jax.make_array_from_callback(shape, shardings[path], part)

        leaves = {path: leaf(path, found.shape) for path, found in flatten_paths(shapes).items()}
        params = unflatten_paths(shapes, leaves)
        placed = self.state_shardings(abstract_state(run, table))
        return jax.jit(lambda params: state_of(params, run, table), out_shardings=placed)(params)

    def put_state(self, state: TrainState, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Saved arrays as they lie in `state`; every process passes what it has read."""
        return {
            path: jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index, a=arrays[path]: a[index]
            )
            for path, leaf in flatten_state(state).items()
        }

    def put_rows(self, rows: np.ndarray) -> jax.Array:
        """A batch of rows [B, S] that every process has whole."""
        return jax.make_array_from_callback(rows.shape, self.rows, lambda index: rows[index])

    def own_rows(self, batch_sequences: int) -> slice:
        """The rows of a batch that the devices of this process need, and those between them."""
        micro = batch_sequences // self.num_micro_batches
        shape = (micro, self.sizes["context"])
        indices = self.rows.addressable_devices_indices_map(shape).values()
        bounds = [index[0].indices(micro) for index in indices if index]
        last = batch_sequences - micro
        return slice(min(b[0] for b in bounds), last + max(b[1] for b in bounds))

    def put_batch(self, batch: Any, batch_sequences: int) -> Batch:
        """Tokens, segments and weights of a batch, of which this process has its own rows."""
        first = self.own_rows(batch_sequences).start
        micro = batch_sequences // self.num_micro_batches

        def put(rows: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                *outer, inner, positions = index
                start, stop, _ = inner.indices(micro)
                parts = range(*outer[0].indices(self.num_micro_batches)) if outer else (0,)
                found = [
                    rows[m * micro + start - first : m * micro + stop - first, positions]
                    for m in parts
                ]
                return np.stack(found) if outer else found[0]

            outer = () if self.num_micro_batches == 1 else (self.num_micro_batches,)
            shape = (*outer, micro, rows.shape[1])
            return jax.make_array_from_callback(shape, self.batch_rows, part)

        return Batch(*(put(np.asarray(rows)) for rows in batch))


def find_devices(settings: ParallelSettings, num_micro_batches: int = 1) -> Devices | None:
    """The devices that a recipe asks for; None for a single one without limits on rows.

    Raises:
        UsageError: there are too few.
    """
    sizes = resolve_sizes(settings.mesh, jax.device_count())
    plain = set(sizes.values()) == {1} and not settings.drops_rows and num_micro_batches == 1
    if plain and jax.process_count() == 1:
        return None
    return Devices(build_mesh(sizes), settings, num_micro_batches)
