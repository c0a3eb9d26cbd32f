"""The ragged exchange over the expert axis: segments of rows, and its adjoint by the dual plan."""

import jax
import jax.numpy as jnp

from portolan.model.kernels import platform
from portolan.parallel.routing import Updates
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.rows import rows_or_zero


def exchange_segments(operand: jax.Array, out: jax.Array, updates: Updates) -> jax.Array:
    """`out` [M, R] with the segments of `operand` [N, R] that the peers send here.

    Offsets `updates.out` are in the receiver's coordinates and held by the sender. Rows that nobody
    writes keep their value. Accelerators have one instruction for it; on CPU, where it does not
    compile, and on an axis of one it is emulated.
    """
    if platform() == "cpu" or jax.lax.axis_size(EXPERT_AXIS) == 1:
        return emulate_exchange(operand, out, updates)
    return jax.lax.ragged_all_to_all(
        operand,
        out,
        updates.start,
        updates.send,
        updates.out,
        updates.receive,
        axis_name=EXPERT_AXIS,
    )


def emulate_exchange(operand: jax.Array, out: jax.Array, updates: Updates) -> jax.Array:
    """The same by gathering all operands: S times the bytes, for CPUs and tests."""
    num_shards, me = jax.lax.axis_size(EXPERT_AXIS), jax.lax.axis_index(EXPERT_AXIS)
    operands = jax.lax.all_gather(operand, EXPERT_AXIS, tiled=True)
    plans = jax.lax.all_gather(jnp.stack([updates.start, updates.send, updates.out]), EXPERT_AXIS)
    mine = plans.reshape(num_shards, 3, num_shards, -1)[:, :, me]
    start, send, first = mine.swapaxes(0, 1).reshape(3, -1)
    row = jnp.arange(out.shape[0], dtype=jnp.int32)
    holds = (row[:, None] >= first) & (row[:, None] < first + send)
    peer = jnp.arange(start.size, dtype=jnp.int32) // (start.size // num_shards)
    # Segments are disjoint: at most one holds a row, and the sum is its term.
    offset = jnp.where(holds, peer * operand.shape[0] + start - first, 0).sum(axis=1)
    source = jnp.where(holds.any(axis=1), offset + row, -1)
    arrived = rows_or_zero(operands, source)
    return jnp.where(source[:, None] < 0, out, arrived)


def written_rows(updates: Updates, dual: Updates, num_rows: int) -> jax.Array:
    """Which of `num_rows` rows here the peers write, bool.

    Segments arrive where the dual reads them. A running sum of +1 at their starts and -1 at their
    ends is exact because equal places are added, never overwritten (parallel.md 6.5).
    """
    edges = jnp.zeros(num_rows + 1, jnp.int32)
    edges = edges.at[dual.start].add(1).at[dual.start + updates.receive].add(-1)
    return jnp.cumsum(edges)[:num_rows] > 0


@jax.custom_vjp
def move(operand: jax.Array, out: jax.Array, updates: Updates, dual: Updates) -> jax.Array:
    """`exchange_segments`; its adjoint sends the rows back by the dual plan.

    The adjoint exchanges no offsets. A row of `out` that is overwritten has gradient zero.
    """
    del dual
    return exchange_segments(operand, out, updates)


def _forward(operand, out, updates, dual):
    moved = exchange_segments(operand, out, updates)
    return moved, (operand[:, :0], updates, dual)


def _backward(saved, grad):
    like, updates, dual = saved
    zeros = jnp.zeros((like.shape[0], grad.shape[1]), grad.dtype)
    written = written_rows(updates, dual, grad.shape[0])
    kept = jnp.where(written[:, None], jnp.zeros_like(grad), grad)
    return exchange_segments(grad, zeros, dual), kept, None, None


move.defvjp(_forward, _backward)
