"""The ragged exchange over the expert axis: segments of rows, and its adjoint by the dual plan."""

import jax
import jax.numpy as jnp

from portolan.model.kernels import platform
from portolan.parallel.routing import Updates
from portolan.parallel.transports import EXPERT_AXIS
from portolan.parallel.transports.rows import empty_like, rows_or_zero


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
    """The same by a dense exchange of blocks that hold whatever a peer may get, for CPUs.

    S * min(N, M) rows travel, most of them empty.
    """
    num_shards = jax.lax.axis_size(EXPERT_AXIS)
    block = min(operand.shape[0], out.shape[0])
    start, send, first = (part.reshape(num_shards, -1) for part in updates[:3])
    place = jnp.cumsum(send, axis=1) - send
    packed = rows_or_zero(operand, _locate(block, place, send, start).reshape(-1))
    arrived = jax.lax.all_to_all(packed, EXPERT_AXIS, 0, 0, tiled=True)
    segments = jnp.stack([place, send, first], axis=1)
    segments = jax.lax.all_to_all(segments, EXPERT_AXIS, 0, 0, tiled=True)
    place = segments[:, 0] + block * jnp.arange(num_shards, dtype=jnp.int32)[:, None]
    send, first = segments[:, 1].reshape(-1), segments[:, 2].reshape(-1)
    source = _locate(out.shape[0], first, send, place.reshape(-1))
    return jnp.where(source[:, None] < 0, out, rows_or_zero(arrived, source))


def _locate(num_rows: int, first: jax.Array, size: jax.Array, target: jax.Array) -> jax.Array:
    """Where each of `num_rows` rows is at `target`, -1 for none: int32[..., N].

    Segments [..., U] begin at row `first` and at place `target`; at most one holds a row, so that
    a sum over all finds its term.
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    first, size, target = (part[..., None, :] for part in (first, size, target))
    holds = (row[:, None] >= first) & (row[:, None] < first + size)
    offset = jnp.where(holds, target - first, 0).sum(axis=-1)
    return jnp.where(holds.any(axis=-1), offset + row, -1)


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
    return moved, (empty_like(operand), updates, dual)


def _backward(saved, grad):
    like, updates, dual = saved
    zeros = jnp.zeros((like.shape[0], grad.shape[1]), grad.dtype)
    written = written_rows(updates, dual, grad.shape[0])
    kept = jnp.where(written[:, None], jnp.zeros_like(grad), grad)
    return exchange_segments(grad, zeros, dual), kept, None, None


move.defvjp(_forward, _backward)
