"""The routed experts without drops, with a derivative written by hand.

Shapes: T tokens, R latent width, F expert width, E experts, K experts per token.

Dispatch and combine are gathers in both directions; how the rows of the experts lie in between
depends on the mean load, which is static: see `experts_batched` and `experts_sorted`.
"""

import jax

from portolan.model.expert_rows import SAVED_PRODUCTS
from portolan.model.experts_batched import (
    BatchedDispatch,
    backward_batched,
    forward_batched,
    plan_batched,
)
from portolan.model.experts_sorted import (
    SortedDispatch,
    backward_sorted,
    forward_sorted,
    plan_sorted,
)
from portolan.model.tree import GatedMlp

__all__ = ["SAVED_PRODUCTS", "Dispatch", "apply_experts", "plan_dispatch"]

MIN_SORTED_LOAD = 128
"""Mean load from which a CPU takes experts one by one. Forward and backward of a layer on one core,
batched and sorted, processor time: load 64, R = F = 48: 3.3 and 3.9 ms; load 256, R = F = 256: 221
and 192 ms. The batched form compiles in less than half the time."""

Dispatch = BatchedDispatch | SortedDispatch


def plan_dispatch(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> Dispatch:
    """Where each assignment of a valid token goes."""
    large = experts_TK.size >= MIN_SORTED_LOAD * num_experts
    plan = plan_sorted if large and jax.default_backend() == "cpu" else plan_batched
    return plan(experts_TK, valid_T, num_experts)


@jax.custom_vjp
def apply_experts(
    x_TR: jax.Array, weights_TK: jax.Array, experts: GatedMlp, dispatch: Dispatch
) -> jax.Array:
    """Sum over the selected experts of weight * down(silu(gate x) * up x): [T, R]."""
    return _forward(x_TR, weights_TK, experts, dispatch)[0]


def _forward(x_TR, weights_TK, experts, dispatch):
    arguments = (x_TR, weights_TK, experts, dispatch)
    if isinstance(dispatch, SortedDispatch):
        out_TR, products = forward_sorted(*arguments)
    else:
        out_TR, products = forward_batched(*arguments)
    return out_TR, (*arguments, products)


def _backward(saved, grad_TR):
    x_TR, weights_TK, experts, dispatch, products = saved
    if isinstance(dispatch, SortedDispatch):
        grads = backward_sorted(x_TR, weights_TK, experts, dispatch, products, grad_TR)
    else:
        grads = backward_batched(x_TR, weights_TK, experts, dispatch, products, grad_TR)
    return *grads, None


apply_experts.defvjp(_forward, _backward)
