"""The routed experts without drops, with a derivative written by hand.

Dispatch and combine are gathers in both directions; `experts_batched` says how the rows of the
experts lie in between.
"""

import jax

from portolan.model.expert_rows import SAVED_PRODUCTS
from portolan.model.experts_batched import (
    BatchedDispatch,
    backward_batched,
    forward_batched,
    plan_batched,
)
from portolan.model.tree import GatedMlp

__all__ = ["SAVED_PRODUCTS", "Dispatch", "apply_experts", "plan_dispatch"]

Dispatch = BatchedDispatch
plan_dispatch = plan_batched


@jax.custom_vjp
def apply_experts(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: Dispatch
) -> jax.Array:
    """Sum over the selected experts of weight * down(silu(gate x) * up x): [T, R]."""
    return _forward(x_TR, weights_TK, experts, dispatch)[0]


def _forward(x_TR, weights_TK, experts, dispatch):
    out_TR, products = forward_batched(x_TR, weights_TK, experts, dispatch)
    return out_TR, (x_TR, weights_TK, experts, dispatch, products)


def _backward(saved, grad_TR):
    x_TR, weights_TK, experts, dispatch, products = saved
    grads = backward_batched(x_TR, weights_TK, experts, dispatch, products, grad_TR)
    return *grads, None


apply_experts.defvjp(_forward, _backward)
