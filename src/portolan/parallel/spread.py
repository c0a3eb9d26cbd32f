"""The model on a mesh: each device runs it on its own tokens, with the matrices gathered layer by
layer and the rows exchanged with the devices that hold their experts.

The whole forward pass is one `shard_map`; the gradient is taken outside of it, so that every sum
over devices is the transpose of what the forward pass did.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from portolan.errors import UsageError
from portolan.model import transformer
from portolan.model.drops import Drops
from portolan.model.placement import Placement
from portolan.model.router import Routing
from portolan.model.tree import Block, GatedMlp, Params, abstract
from portolan.parallel import context
from portolan.parallel.exchange import make_exchange
from portolan.parallel.layout import COUNT_AXES, EXPERTS, Axes, leaf_axes
from portolan.parallel.sharding import REPLICATED, ROWS, parameter_tree
from portolan.parallel_settings import ParallelSettings
from portolan.shapes import ModelConfig
from portolan.tree import flatten_paths

BATCH_DEVICES = "replica x data x expert"


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_leaf(leaf: jax.Array, axes: Axes, dim: int, dtype: Any) -> jax.Array:
    """The whole of a dimension that `axes` split, sent in `dtype`; its gradient is summed wide."""
    return jax.lax.all_gather(leaf.astype(dtype), axes, axis=dim, tiled=True)


def _gather_forward(leaf, axes, dim, dtype):
    return gather_leaf(leaf, axes, dim, dtype), jnp.zeros((), leaf.dtype)


def _gather_backward(axes, dim, dtype, like, grad):
    del dtype
    return (jax.lax.psum_scatter(grad.astype(like.dtype), axes, scatter_dimension=dim, tiled=True),)


gather_leaf.defvjp(_gather_forward, _gather_backward)


@dataclass(frozen=True)
class Spread:
    """How a model of one shape lies on a mesh; hashable, so that programs are kept by it."""

    mesh: Mesh
    settings: ParallelSettings
    config: ModelConfig
    batch_sequences: int
    num_micro_batches: int = 1
    dropless: bool = False

    def __post_init__(self) -> None:
        """Refuse a mesh that the shape or the batch does not fit, before anything is compiled."""
        sizes, config = self.sizes, self.config
        if self.num_micro_batches > 1 and config.balance == "qb_topk":
            raise UsageError(
                "model.router.balance 'qb_topk' needs all margins of an update at once",
                remedy="train without micro-batches, or balance with 'qb_hist'",
            )
        rows = sizes["replica"] * sizes["data"] * sizes["expert"] * self.num_micro_batches
        micro = f" x {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        fits = [
            ("sequences of a batch", self.batch_sequences, rows, f"{BATCH_DEVICES}{micro}"),
            ("positions of a row", config.sequence_length, sizes["context"], "context"),
        ]
        if config.mlp != "dense":
            fits += [
                ("experts", config.num_experts, sizes["expert"], "expert"),
                ("columns of an expert", config.expert_width, sizes["model"], "model"),
            ]
        for what, number, divisor, axes in fits:
            if number % divisor:
                raise UsageError(
                    f"{number} {what} do not divide over {divisor} devices of {axes}",
                    remedy="choose another mesh with --mesh, or change the recipe",
                )
        if config.mlp != "dense":
            self.exchange(jnp.float32)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length of every axis."""
        return dict(self.mesh.shape)

    def exchange(self, dtype: Any) -> Any:
        """What moves routed rows, for the tokens of one device."""
        sizes = self.sizes
        length = self.config.sequence_length // sizes["context"]
        parts = sizes["replica"] * sizes["data"] * sizes["expert"] * self.num_micro_batches
        return make_exchange(
            self.settings,
            sizes,
            num_experts=self.config.num_experts,
            num_selected=self.config.experts_per_token,
            tokens_per_shard=self.batch_sequences // parts * length,
            dtype=dtype,
            dropless=self.dropless,
        )

    def without_drops(self) -> "Spread":
        """The same for the rows of an evaluation, which loses none."""
        return dataclasses.replace(self, dropless=True, num_micro_batches=1)

    def loss(self, **settings: Any) -> Any:
        """`transformer.loss(params, beta, batch)` of this shape on the mesh."""
        local = partial(
            transformer.loss, config=self.config, placement=MeshPlacement(self), **settings
        )
        batch = transformer.Batch(ROWS, ROWS, ROWS)  # type: ignore[arg-type]
        return self._mapped(local, (batch,), (REPLICATED, REPLICATED))

    def token_losses(self, **settings: Any) -> Any:
        """`transformer.token_losses(params, beta, tokens, segments)` on the mesh."""
        local = partial(
            transformer.token_losses, config=self.config, placement=MeshPlacement(self), **settings
        )
        return self._mapped(local, (ROWS, ROWS), ROWS)

    def _mapped(self, local: Any, rows: tuple, out: Any) -> Any:
        specs = parameter_tree(abstract(self.config), self.sizes)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, REPLICATED, *rows),
            out_specs=out,
            check_vma=False,
        )


@dataclass(frozen=True)
class MeshPlacement(Placement):
    """One device of a mesh, inside `shard_map`."""

    spread: Spread

    @property
    def is_spread(self) -> bool:
        """Other devices hold other tokens."""
        return True

    @property
    def is_partial(self) -> bool:
        """Whether other micro-batches of the same update follow."""
        return self.spread.num_micro_batches > 1

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over all tokens of the batch."""
        return jax.lax.psum(x, COUNT_AXES)

    def least(self, x: jax.Array) -> jax.Array:
        """Smallest over all tokens of the batch."""
        return jax.lax.pmin(x, COUNT_AXES)

    def largest(self, x: jax.Array) -> jax.Array:
        """Largest over all tokens of the batch."""
        return jax.lax.pmax(x, COUNT_AXES)

    def gather(self, x_T: jax.Array) -> jax.Array:
        """The rows of all tokens of the batch."""
        return jax.lax.all_gather(x_T, COUNT_AXES, axis=0, tiled=True)

    def whole(self, params: Params, dtype: Any) -> Params:
        """The parameters outside the layers, gathered where a dimension is split."""
        return self._gathered(params, "", dtype, skip="blocks/")

    def whole_layer(self, layer: Block, dtype: Any) -> Block:
        """The matrices of a layer; of the experts only what `data` splits."""
        return self._gathered(layer, "blocks/", dtype)

    def in_layer(self, layers: Block, number: jax.Array) -> Placement:
        """The same: a device gathers what it reads of a layer."""
        del layers, number
        return self

    def _gathered(self, tree: Any, prefix: str, dtype: Any, skip: str | None = None) -> Any:
        shapes = {
            path: leaf.shape for path, leaf in flatten_paths(abstract(self.spread.config)).items()
        }
        found = []
        for name, leaf in flatten_paths(tree).items():
            path = prefix + name
            if skip is None or not path.startswith(skip):
                axes = leaf_axes(path, shapes[path], self.spread.sizes)
                kept = ("expert", "model") if path.startswith(EXPERTS) else ()
                leaf = _whole_leaf(leaf, axes[len(shapes[path]) - leaf.ndim :], kept, dtype)
            found.append(leaf)
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    def context(self, segments_BS: jax.Array, config: ModelConfig, dtype: Any) -> Any:
        """Of whole rows, or of the part of every row that lies here."""
        if self.spread.sizes["context"] == 1:
            return super().context(segments_BS, config, dtype)
        return context.shard_context(segments_BS, config, dtype)

    def next_tokens(self, tokens_BS: jax.Array) -> jax.Array:
        """Labels, across the ends of shards."""
        if self.spread.sizes["context"] == 1:
            return super().next_tokens(tokens_BS)
        return context.next_tokens(tokens_BS)

    def mix_experts(
        self,
        x_TR: jax.Array,
        routing: Routing,
        valid_T: jax.Array,
        experts: GatedMlp,
        config: ModelConfig,
    ) -> tuple[jax.Array, Drops | None]:
        """The routed rows through the experts, wherever those are."""
        exchange = self.spread.exchange(x_TR.dtype)
        weights = routing.weights_TK.astype(x_TR.dtype)
        routed, drops = exchange(x_TR, weights, routing.experts_TK, valid_T, experts)
        if self.spread.dropless or not self.spread.settings.drops_rows:
            return routed, None
        return routed, drops


def _whole_leaf(
    leaf: jax.Array, axes: tuple[Axes, ...], kept: tuple[str, ...], dtype: Any
) -> jax.Array:
    """A leaf with every split dimension gathered, but for the axes in `kept`."""
    for dim, names in enumerate(axes):
        gathered = tuple(name for name in names if name not in kept)
        if gathered:
            leaf = gather_leaf(leaf, gathered, dim, dtype)
    return leaf
