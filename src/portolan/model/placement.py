"""What the model asks of the devices that it runs on. Here: one, which holds all of it.

A mesh (`portolan.parallel.spread`) overrides every method: there a function of the model sees the
tokens and the matrices of one device only.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.attention import Context, rotary_tables
from portolan.model.conv import find_neighbours
from portolan.model.drops import Drops
from portolan.model.experts_blas import Stack
from portolan.model.kernels import choose_experts
from portolan.model.norms import wide
from portolan.model.router import SAVED_ROUTING, Routing
from portolan.model.totals import Totals
from portolan.model.tree import Block, GatedMlp, Params
from portolan.shapes import ModelConfig


class Placement(Totals):
    """One device with all tokens and all parameters."""

    stack: Stack | None = None
    """Where the experts of the layer at hand lie, once that is known."""

    def whole(self, params: Params, dtype: Any) -> Params:
        """The parameters outside the layers, whole."""
        del dtype
        return params

    def whole_layer(self, layer: Block, dtype: Any) -> Block:
        """The parameters of one layer, whole but for the experts."""
        del dtype
        return layer

    def in_layer(self, layers: Block, number: jax.Array) -> "Placement":
        """The placement for one of the stacked layers."""
        if layers.moe is None:
            return self
        placed = copy.copy(self)
        placed.stack = Stack(jax.lax.stop_gradient(layers.moe.experts), number)
        return placed

    def context(self, segments_BS: jax.Array, config: ModelConfig, dtype: Any) -> Any:
        """What the layers know about other positions of their rows."""
        cos, sin = rotary_tables(segments_BS.shape[1], config, wide(dtype))
        return Context(segments_BS, find_neighbours(segments_BS, config.conv_taps, dtype), cos, sin)

    def next_tokens(self, tokens_BS: jax.Array) -> jax.Array:
        """Labels; the last position of a row has none (0, which must carry weight 0)."""
        return jnp.pad(tokens_BS[:, 1:], ((0, 0), (0, 1)))

    def mix_experts(
        self,
        x_TR: jax.Array,
        routing: Routing,
        valid_T: jax.Array,
        experts: GatedMlp,
        config: ModelConfig,
    ) -> tuple[jax.Array, Drops | None]:
        """Weighted sum over the selected experts [T, R], and what was dropped on the way."""
        kernel = choose_experts(experts, routing.experts_TK.size)
        dispatch = kernel.plan(routing.experts_TK, valid_T, config.num_experts)
        dispatch = checkpoint_name(dispatch, SAVED_ROUTING)
        weights_TK = routing.weights_TK.astype(x_TR.dtype)
        place = (self.stack,) if kernel.reads_stack else ()
        return kernel.apply(x_TR, weights_TK, experts, dispatch, *place), None


ONE_DEVICE = Placement()
