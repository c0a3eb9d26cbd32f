"""What is computed on routed rows once they lie at their experts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from portolan.model.expert_rows import SAVED_PRODUCTS
from portolan.model.tree import GatedMlp
from portolan.parallel.transports.grouped_matmul import choose_layout

Array = jax.Array


class ExpertFunction(NamedTuple):
    """The experts, in the two layouts that transports use.

    `grouped(rows [N, R], sizes int32[El], experts, expected)` takes rows sorted by expert from row
    0 on, about `expected` of them, and zeros after them; `batched(rows [El, C, R], experts)` as
    many rows of every expert. `experts` is a tree with leading El. Both return rows in the same
    layout, and zero for a row of zeros.
    """

    grouped: Callable[[Array, Array, Any, int], Array]
    batched: Callable[[Array, Any], Array]


def _grouped_mlp(rows: Array, sizes: Array, experts: GatedMlp, expected: int) -> Array:
    layout = choose_layout(sizes, rows.shape[0], expected)
    x = layout.enter(rows)
    products = layout.multiply(x, experts.gate), layout.multiply(x, experts.up)
    gate, up = checkpoint_name(products, SAVED_PRODUCTS)
    return layout.leave(layout.multiply(jax.nn.silu(gate) * up, experts.down))


def _batched_mlp(rows_ECR: Array, experts: GatedMlp) -> Array:
    products = rows_ECR @ experts.gate, rows_ECR @ experts.up
    gate, up = checkpoint_name(products, SAVED_PRODUCTS)
    return (jax.nn.silu(gate) * up) @ experts.down


GATED_MLP = ExpertFunction(_grouped_mlp, _batched_mlp)
"""(silu(x gate) * (x up)) down, with experts.GatedMlp of [El, R, F], [El, R, F], [El, F, R]."""
