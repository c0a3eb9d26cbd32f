"""Cross-entropy with a squared-logsumexp term, over blocks of tokens.

Shapes: T tokens, D width, V vocabulary, C tokens of a block. Logits exist for one block at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.norms import wide
from portolan.model.totals import ALL_TOKENS, Totals

CPU_BLOCK_ENTRIES = 2 * 1024**2
"""Logits of a block: 8 MB of float32 stay in the cache of a CPU."""
BLOCK_ENTRIES = 256 * 1024**2
"""On an accelerator a block is as large as its memory allows: 1 GiB of float32."""
SMALLEST_TOTAL = 1e-30


class LossParts(NamedTuple):
    """Weighted means over tokens: cross-entropy and squared logsumexp. They have no gradient."""

    ce: jax.Array
    mean_square_lse: jax.Array


def token_losses(
    x_TD: jax.Array, head_DV: jax.Array, labels_T: jax.Array, block: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(negative log-likelihood [T], logsumexp [T]) of x @ head, in float32 or wider.

    Args:
        x_TD: final activations.
        head_DV: output projection.
        labels_T: next tokens.
        block: C; None for what fits the memory of the device.
    """

    def losses(x_CD: jax.Array, labels_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = _block_softmax(x_CD, head_DV, labels_C)
        return part.lse_C - part.label_logit_C, part.lse_C

    nll_T, lse_T = _over_blocks(losses, _tokens_per_block(head_DV, block), x_TD, labels_T)
    return nll_T, lse_T


def weighted_loss(
    x_TD: jax.Array,
    head_DV: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    z_weight: float,
    block: int | None = None,
    totals: Totals = ALL_TOKENS,
) -> tuple[jax.Array, LossParts]:
    """Sum of w (lse - label logit + z lse^2) over the sum of w, and its parts.

    The weights are known before the logits, so the pass that computes the loss computes its
    gradient too: no product is done twice. Labels and weights have no gradient.
    """
    total = totals.sum(jnp.sum(weights_T.astype(wide(x_TD.dtype))))
    value_and_parts: Any = _loss(x_TD, head_DV, labels_T, weights_T, total, z_weight, block)
    value, parts = jax.tree.map(totals.sum, value_and_parts)
    return value, jax.lax.stop_gradient(parts)


class _Softmax(NamedTuple):
    """exp(logits - maximum) [C, V], its sum, the logsumexp and the logit of the label, each [C]."""

    exponent_CV: jax.Array
    total_C: jax.Array
    lse_C: jax.Array
    label_logit_C: jax.Array


def _block_softmax(x_CD: jax.Array, head_DV: jax.Array, labels_C: jax.Array) -> _Softmax:
    logits_CV = (x_CD @ head_DV).astype(wide(x_CD.dtype))
    top_C = jnp.max(logits_CV, axis=1)
    exponent_CV = jnp.exp(logits_CV - top_C[:, None])
    total_C = jnp.sum(exponent_CV, axis=1)
    label_logit_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=1)[:, 0]
    return _Softmax(exponent_CV, total_C, top_C + jnp.log(total_C), label_logit_C)


def _tokens_per_block(head_DV: jax.Array, block: int | None) -> int:
    entries = CPU_BLOCK_ENTRIES if jax.default_backend() == "cpu" else BLOCK_ENTRIES
    return block or max(1, entries // head_DV.shape[1])


def _over_blocks(function: Callable, block: int, *leaves_T: jax.Array) -> Any:
    """`function` of blocks of tokens, joined along them; the last one is padded with zeros."""
    num_tokens = leaves_T[0].shape[0]
    if num_tokens <= block:
        return function(*leaves_T)
    blocks = _split(block, leaves_T)
    joined = jax.lax.map(lambda leaves: function(*leaves), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_tokens], joined)


def _split(block: int, leaves_T: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """[T, ...] as [blocks, C, ...]."""
    missing = -leaves_T[0].shape[0] % block
    padded = (jnp.pad(leaf, ((0, missing), *[(0, 0)] * (leaf.ndim - 1))) for leaf in leaves_T)
    return tuple(leaf.reshape(-1, block, *leaf.shape[1:]) for leaf in padded)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _loss(x_TD, head_DV, labels_T, weights_T, total, z_weight, block):
    nll, lse = token_losses(x_TD, head_DV, labels_T, block)
    return _means(nll, lse, weights_T, total, z_weight)


def _means(nll_T, lse_T, weights_T, total, z_weight) -> tuple[jax.Array, LossParts]:
    weights_T = weights_T.astype(nll_T.dtype)
    total = jnp.maximum(total, SMALLEST_TOTAL)
    ce = jnp.sum(weights_T * nll_T) / total
    mean_square_lse = jnp.sum(weights_T * lse_T * lse_T) / total
    return ce + z_weight * mean_square_lse, LossParts(ce, mean_square_lse)


def _loss_forward(x_TD, head_DV, labels_T, weights_T, total, z_weight, block):
    dtype = wide(x_TD.dtype)
    share_T = weights_T.astype(dtype) / jnp.maximum(total, SMALLEST_TOTAL)
    index_V = jnp.arange(head_DV.shape[1], dtype=labels_T.dtype)

    def add_block(dhead_DV, leaves):
        x_CD, labels_C, share_C = leaves
        part = _block_softmax(x_CD, head_DV, labels_C)
        # d(loss)/d(logit) is scale * exponent, less the share of the token at its label.
        scale_C = share_C * (1 + 2 * z_weight * part.lse_C) / part.total_C
        at_label = jnp.where(labels_C[:, None] == index_V, share_C[:, None], 0)
        dlogits_CV = (scale_C[:, None] * part.exponent_CV - at_label).astype(x_CD.dtype)
        # Behind the barrier the transpose is made, not folded into the product: 2.4x on a CPU.
        x_DC = jax.lax.optimization_barrier(x_CD.T)
        dhead_DV += jnp.matmul(x_DC, dlogits_CV, preferred_element_type=dtype)
        nll_C = part.lse_C - part.label_logit_C
        return dhead_DV, (nll_C, part.lse_C, dlogits_CV @ head_DV.T)

    leaves = (x_TD, labels_T, share_T)
    size = _tokens_per_block(head_DV, block)
    zero = jnp.zeros(head_DV.shape, dtype)
    if x_TD.shape[0] <= size:
        dhead_DV, (nll_T, lse_T, dx_TD) = add_block(zero, leaves)
    else:
        dhead_DV, joined = jax.lax.scan(add_block, zero, _split(size, leaves))
        nll_T, lse_T, dx_TD = (
            leaf.reshape(-1, *leaf.shape[2:])[: x_TD.shape[0]] for leaf in joined
        )
    out = _means(nll_T, lse_T, weights_T, total, z_weight)
    return out, (dx_TD, dhead_DV.astype(head_DV.dtype))


def _loss_backward(z_weight, block, saved, grads):
    del z_weight, block
    dx_TD, dhead_DV = saved
    return (
        (grads[0] * dx_TD).astype(dx_TD.dtype),
        (grads[0] * dhead_DV).astype(dhead_DV.dtype),
        None,
        None,
        None,
    )


_loss.defvjp(_loss_forward, _loss_backward)
