"""Cross-entropy with a squared-logsumexp term, over vocabulary blocks.

Shapes: T tokens, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from portolan.model.norms import wide

VOCABULARY_BLOCK = 4096


def _token_losses(
    x_TD: jax.Array, head_DV: jax.Array, labels_T: jax.Array, block: int = VOCABULARY_BLOCK
) -> tuple[jax.Array, jax.Array]:
    """(negative log-likelihood [T], logsumexp [T]) of x @ head, in float32 or wider.

    At most `block` columns of logits exist at a time, in both directions.
    """
    return _forward(x_TD, head_DV, labels_T, block)[0]


token_losses = jax.custom_vjp(_token_losses, nondiff_argnums=(3,))


def _blocks(vocab_size: int, block: int) -> list[slice]:
    return [slice(i, min(i + block, vocab_size)) for i in range(0, vocab_size, block)]


def _logits(x_TD: jax.Array, head_DV: jax.Array) -> jax.Array:
    return (x_TD @ head_DV).astype(wide(x_TD.dtype))


def _forward(x_TD, head_DV, labels_T, block):
    lse = jnp.full(labels_T.shape, -jnp.inf, wide(x_TD.dtype))
    label_logit = jnp.zeros_like(lse)
    for columns in _blocks(head_DV.shape[1], block):
        logits = _logits(x_TD, head_DV[:, columns])
        inside = (labels_T >= columns.start) & (labels_T < columns.stop)
        index = jnp.clip(labels_T - columns.start, 0, logits.shape[1] - 1)
        chosen = jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0]
        lse = jnp.logaddexp(lse, jax.nn.logsumexp(logits, axis=-1))
        label_logit += jnp.where(inside, chosen, 0)
    return (lse - label_logit, lse), (x_TD, head_DV, labels_T, lse)


def _backward(block, saved, grads):
    x_TD, head_DV, labels_T, lse = saved
    grad_nll, grad_lse = grads
    dx, dhead = 0, []
    for columns in _blocks(head_DV.shape[1], block):
        head = head_DV[:, columns]
        probability = jnp.exp(_logits(x_TD, head) - lse[:, None])
        index = columns.start + jnp.arange(head.shape[1], dtype=labels_T.dtype)
        dlogits = (grad_nll + grad_lse)[:, None] * probability
        dlogits -= jnp.where(labels_T[:, None] == index, grad_nll[:, None], 0)
        dlogits = dlogits.astype(x_TD.dtype)
        dx += dlogits @ head.T
        dhead.append(x_TD.T @ dlogits)
    return dx, jnp.concatenate(dhead, axis=1), None


token_losses.defvjp(_forward, _backward)
