"""Large routed experts on a CPU, without drops: numpy's products, an expert at a time.

Shapes: T tokens, R latent width, F expert width, E experts, K experts per token, P = T*K rows.

Rows lie sorted by expert, without a slot too many. A program of XLA would have to know how many
rows an expert has, and a batched product of it reads and writes whole arrays between two products;
here the rows of one expert stay in the cache from the first product to the last. Threads take the
experts in turn and compute each of them alone: the result does not depend on their number.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.buffer_callback import buffer_callback
from threadpoolctl import ThreadpoolController

from portolan.model.expert_rows import SAVED_PRODUCTS
from portolan.model.tree import GatedMlp
from portolan.processes import num_threads

GATHER_MODE = "clip"
"""Row numbers are in range; numpy would buffer what it has to check."""


class SortedDispatch(NamedTuple):
    """The row of each assignment and the assignment (token * K + choice) of each row.

    `end_E` ends the rows of each expert. The rows from the last end on are those of padding tokens:
    zero, whatever is computed.
    """

    row_TK: jax.Array
    assignment_P: jax.Array
    end_E: jax.Array


def plan_sorted(experts_TK: jax.Array, valid_T: jax.Array, num_experts: int) -> SortedDispatch:
    """Sort the assignments of valid tokens by expert, in the order of the tokens."""
    shapes = (experts_TK.shape, (experts_TK.size,), (num_experts,))
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    return SortedDispatch(*buffer_callback(_sort, out)(experts_TK, valid_T))


class Stack(NamedTuple):
    """The experts of all layers [L, E, ...], and the number of one."""

    experts: GatedMlp
    layer: jax.Array


def apply_sorted(
    x_TR: jax.Array,
    weights_TK: jax.Array,
    experts: GatedMlp,
    dispatch: SortedDispatch,
    stack: Stack | None = None,
) -> jax.Array:
    """Sum over the selected experts of weight * down(silu(gate x) * up x): [T, R].

    Where `experts` is one layer of `stack`, the values are read there and `experts` has the
    gradient only: XLA would copy the layer for numpy.
    """
    if stack is None:
        one = jax.tree.map(lambda leaf: leaf[None], experts)
        stack = Stack(jax.lax.stop_gradient(one), jnp.zeros((), jnp.int32))
    return _apply(x_TR, weights_TK, experts, stack, dispatch)


@jax.custom_vjp
def _apply(x_TR, weights_TK, experts, stack, dispatch):
    return _forward(x_TR, weights_TK, experts, stack, dispatch)[0]


def _forward(x_TR, weights_TK, experts, stack, dispatch):
    num_rows, latent, inner = weights_TK.size, *experts.gate.shape[1:]
    shapes = [(num_rows, inner), (num_rows, inner), (num_rows, latent)]
    gate_PF, up_PF, y_PR = buffer_callback(_compute, _like(x_TR, shapes))(
        x_TR, dispatch.assignment_P, dispatch.end_E, *jax.tree.leaves(stack)
    )
    products = checkpoint_name((gate_PF, up_PF), SAVED_PRODUCTS)
    out_TR = jnp.sum(weights_TK[..., None] * _gather(y_PR, dispatch.row_TK), axis=1)
    return out_TR, (x_TR, weights_TK, stack, dispatch, products)


def _backward(saved, grad_TR):
    x_TR, weights_TK, stack, dispatch, (gate_PF, up_PF) = saved
    # numpy takes four times as long for an exponential.
    sigma_PF = jax.nn.sigmoid(gate_PF)
    silu_PF = gate_PF * sigma_PF
    slope_PF = sigma_PF + silu_PF * (1 - sigma_PF)
    matrices = [leaf.shape[1:] for leaf in jax.tree.leaves(stack.experts)]
    shapes = [(weights_TK.size, x_TR.shape[1]), weights_TK.shape, *matrices]
    dx_PR, dweights_TK, *dexperts = buffer_callback(_differentiate, _like(x_TR, shapes))(
        x_TR,
        grad_TR,
        weights_TK,
        dispatch.assignment_P,
        dispatch.end_E,
        *jax.tree.leaves(stack),
        silu_PF,
        slope_PF,
        up_PF,
    )
    dx_TR = jnp.sum(_gather(dx_PR, dispatch.row_TK), axis=1)
    return dx_TR, dweights_TK, GatedMlp(*dexperts), None, None


_apply.defvjp(_forward, _backward)


def _gather(rows: jax.Array, row_TK: jax.Array) -> jax.Array:
    return rows.at[row_TK].get(mode="promise_in_bounds", unique_indices=True)


def _like(x_TR: jax.Array, shapes: list[tuple[int, ...]]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, x_TR.dtype) for shape in shapes]


def _sort(context: Any, out: list[Any], *given: Any) -> None:
    """The fields of a dispatch."""
    del context
    row_TK, assignment_P, end_E = map(np.asarray, out)
    experts_TK, valid_T = map(np.asarray, given)
    num_experts = len(end_E)
    # numpy sorts 16-bit numbers by their digits.
    narrow = np.min_scalar_type(num_experts)
    expert_P = np.where(valid_T[:, None], experts_TK, num_experts).astype(narrow).ravel()
    order_P = np.argsort(expert_P, kind="stable")
    assignment_P[:] = order_P
    np.cumsum(np.bincount(expert_P, minlength=num_experts)[:num_experts], out=end_E)
    row_TK.reshape(-1)[order_P] = np.arange(len(order_P))


def _compute(context: Any, out: list[Any], *given: Any) -> None:
    """Gate and up products and the output of each row."""
    del context
    gate_PF, up_PF, y_PR = leaves = [np.asarray(buffer) for buffer in out]
    x_TR, assignment_P, end_E, *stack = map(np.asarray, given)
    gate_ERF, up_ERF, down_EFR = _read_layer(*stack)
    token_P = assignment_P // (len(assignment_P) // len(x_TR))

    def start(rows: int) -> Callable[[int, slice], None]:
        x_CR = np.empty((rows, x_TR.shape[1]), x_TR.dtype)
        inner_CF = np.empty((rows, up_PF.shape[1]), x_TR.dtype)

        def compute(expert: int, mine: slice) -> None:
            gate, up = gate_PF[mine], up_PF[mine]
            x, inner = x_CR[: len(gate)], inner_CF[: len(gate)]
            x_TR.take(token_P[mine], axis=0, out=x, mode=GATHER_MODE)
            np.matmul(x, gate_ERF[expert], out=gate)
            np.matmul(x, up_ERF[expert], out=up)
            # silu(gate) * up
            np.exp(np.negative(gate, out=inner), out=inner)
            inner += 1
            np.divide(gate, inner, out=inner)
            inner *= up
            np.matmul(inner, down_EFR[expert], out=y_PR[mine])

        return compute

    _share(end_E, start)
    for leaf in leaves:
        leaf[end_E[-1] :] = 0


def _differentiate(context: Any, out: list[Any], *given: Any) -> None:
    """Gradients of each row of x, of the combine weights and of the experts.

    The last three given are silu(gate x), the derivative of silu there, and up x.
    """
    del context
    dx_PR, dweights_TK, dgate_ERF, dup_ERF, ddown_EFR = [np.asarray(buffer) for buffer in out]
    x_TR, dy_TR, weights_TK, assignment_P, end_E, *rest = map(np.asarray, given)
    *stack, silu_PF, slope_PF, up_PF = rest
    gate_ERF, up_ERF, down_EFR = _read_layer(*stack)
    token_P = assignment_P // weights_TK.shape[1]
    weight_P = weights_TK.reshape(-1)[assignment_P]
    dweight_P = np.empty_like(weight_P)

    def start(rows: int) -> Callable[[int, slice], None]:
        x_CR, dy_CR = (np.empty((rows, x_TR.shape[1]), x_TR.dtype) for _ in range(2))
        inner_CF = [np.empty((rows, up_PF.shape[1]), x_TR.dtype) for _ in range(3)]

        def differentiate(expert: int, mine: slice) -> None:
            silu, up, token, weight = silu_PF[mine], up_PF[mine], token_P[mine], weight_P[mine]
            x, dy = x_CR[: len(token)], dy_CR[: len(token)]
            dinner, inner, dgate = (leaf[: len(token)] for leaf in inner_CF)
            x_TR.take(token, axis=0, out=x, mode=GATHER_MODE)
            dy_TR.take(token, axis=0, out=dy, mode=GATHER_MODE)
            np.matmul(dy, down_EFR[expert].T, out=dinner)
            np.multiply(silu, up, out=inner)
            np.vecdot(dinner, inner, out=dweight_P[mine])
            inner *= weight[:, None]
            dinner *= weight[:, None]
            np.multiply(slope_PF[mine], up, out=dgate)
            dgate *= dinner
            dup = np.multiply(dinner, silu, out=dinner)
            np.matmul(inner.T, dy, out=ddown_EFR[expert])
            np.matmul(x.T, dgate, out=dgate_ERF[expert])
            np.matmul(x.T, dup, out=dup_ERF[expert])
            np.matmul(dgate, gate_ERF[expert].T, out=dx_PR[mine])
            np.matmul(dup, up_ERF[expert].T, out=x)
            dx_PR[mine] += x

        return differentiate

    _share(end_E, start)
    for leaf in (dx_PR, dweight_P):
        leaf[end_E[-1] :] = 0
    dweights_TK.reshape(-1)[assignment_P] = dweight_P


def _read_layer(
    gate_LERF: np.ndarray, up_LERF: np.ndarray, down_LEFR: np.ndarray, layer: np.ndarray
) -> list[np.ndarray]:
    return [leaf[layer] for leaf in (gate_LERF, up_LERF, down_LEFR)]


def _share(end_E: np.ndarray, start: Callable[[int], Callable[[int, slice], None]]) -> None:
    """Call `start(rows)` in each thread, and what it returns for one expert after another."""
    first_E = np.concatenate([[0], end_E[:-1]])
    most = int(np.max(end_E - first_E))
    numbers = itertools.count()

    def work() -> None:
        # The exponential of a very negative gate is infinite, its silu 0.
        with np.errstate(all="ignore"):
            run = start(most)
            while (number := next(numbers)) < len(end_E):
                run(number, slice(first_E[number], end_E[number]))

    _one_thread_each()
    helpers = _helpers()
    others = [helpers.submit(work) for _ in range(num_threads() - 1)] if helpers else []
    try:
        work()
    finally:
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _helpers() -> ThreadPoolExecutor | None:
    threads = num_threads() - 1
    return ThreadPoolExecutor(threads, thread_name_prefix="experts") if threads else None


@cache
def _one_thread_each() -> None:
    """From here on numpy's products use one thread each.

    For good: to give OpenBLAS its threads back after each call made a step of two threads 25 %
    slower, because they then wait for work in a loop.
    """
    ThreadpoolController().select(user_api="blas").limit(limits=1)
