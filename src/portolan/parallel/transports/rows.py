"""Moves of rows inside a shard: spread, permute and combine, with adjoints that are gathers."""

import jax
import jax.numpy as jnp


def invert(slots: jax.Array, num_rows: int) -> jax.Array:
    """The index that holds each row [num_rows], -1 for none, of slots [A] with -1 for none."""
    # Index -1 would wrap to the last row: the slots that hold nothing go to one row more.
    targets = jnp.where(slots < 0, num_rows, slots)
    index = jnp.arange(slots.size, dtype=jnp.int32)
    return jnp.full(num_rows + 1, -1, jnp.int32).at[targets].set(index)[:num_rows]


def rows_or_zero(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], zero where the index is -1."""
    beyond = jnp.where(index < 0, rows.shape[0], index)
    return jnp.take(rows, beyond, axis=0, mode="fill", fill_value=0)


def empty_like(rows: jax.Array) -> jax.Array:
    """[N, 0]: number and type of rows for a backward pass, without a need to compute them again."""
    return jnp.zeros((rows.shape[0], 0), rows.dtype)


def zeros_after(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros of a shape and the type of `array`, which do not exist before it.

    XLA makes buffers of constant zeros ahead of everything that fills them, and copies them: with
    chunks, the memory of all of them at once (parallel.md 6.5).
    """
    first = jax.lax.stop_gradient(array[(0,) * array.ndim])
    return jnp.broadcast_to((first > jnp.inf).astype(array.dtype), shape)


def _token(source: jax.Array, num_selected: int) -> jax.Array:
    """The token of each assignment; -1 stays -1."""
    return jnp.where(source < 0, -1, source // num_selected)


def _by_choice(slots: jax.Array, num_tokens: int) -> list[jax.Array]:
    """The slots [T] of the first choice of every token, of the second, and so on."""
    return list(slots.reshape(num_tokens, -1).T)


@jax.custom_vjp
def spread(x_TR: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows [N, R]: the token of assignment `source` [N], zero for none; `slots` [A] is its inverse.

    The gradient of a token is the sum of its rows' gradients in float32, in order of its choices.
    """
    return rows_or_zero(x_TR, _token(source, slots.size // x_TR.shape[0]))


def _spread_forward(x_TR, source, slots):
    return spread(x_TR, source, slots), (empty_like(x_TR), slots)


def _spread_backward(saved, grad_NR):
    like_T0, slots = saved
    total = jnp.zeros((like_T0.shape[0], grad_NR.shape[1]), jnp.float32)
    for slot in _by_choice(slots, like_T0.shape[0]):
        total += rows_or_zero(grad_NR, slot).astype(jnp.float32)
    return total.astype(like_T0.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def permute(rows: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[index], zero where the index is -1; `inverse` tells where each row went, or -1."""
    del inverse
    return rows_or_zero(rows, index)


permute.defvjp(
    lambda rows, index, inverse: (rows_or_zero(rows, index), inverse),
    lambda inverse, grad: (rows_or_zero(grad, inverse), None, None),
)


@jax.custom_vjp
def combine(
    weights_TK: jax.Array, returned: jax.Array, slots: jax.Array, source: jax.Array
) -> jax.Array:
    """Sum over k of weight * returned[slot], float32 [T, R]; an assignment without slot adds 0.

    `source` [N] is the inverse of `slots` [A]. Sums and the gradients of the weights are float32.
    """
    del source
    weights = weights_TK.astype(jnp.float32)
    y_TR = jnp.zeros((weights.shape[0], returned.shape[1]), jnp.float32)
    for k, slot in enumerate(_by_choice(slots, weights.shape[0])):
        y_TR += weights[:, k, None] * rows_or_zero(returned, slot).astype(jnp.float32)
    return y_TR


def _combine_forward(weights_TK, returned, slots, source):
    return combine(weights_TK, returned, slots, source), (weights_TK, returned, slots, source)


def _combine_backward(saved, grad_TR):
    weights_TK, returned, slots, source = saved
    num_tokens, num_selected = weights_TK.shape
    row_weights = rows_or_zero(weights_TK.reshape(-1).astype(jnp.float32), source)
    dreturned = row_weights[:, None] * rows_or_zero(grad_TR, _token(source, num_selected))
    dweights = [
        jnp.sum(grad_TR * rows_or_zero(returned, slot).astype(jnp.float32), axis=-1)
        for slot in _by_choice(slots, num_tokens)
    ]
    dweights_TK = jnp.stack(dweights, axis=1).astype(weights_TK.dtype)
    return dweights_TK, dreturned.astype(returned.dtype), None, None


combine.defvjp(_combine_forward, _combine_backward)
