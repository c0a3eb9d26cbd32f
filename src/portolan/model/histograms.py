"""Histograms of router margins: added over devices, and over the micro-batches of an update.

Shapes: E experts, J bins, T tokens, A micro-batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from portolan.model.totals import Totals


class Histogram(NamedTuple):
    """Margins of each expert by bin [E, J] int32, equal bins from `low` to `high`, the number of
    valid tokens, and whether every margin is finite."""

    counts_EJ: jax.Array
    low: jax.Array
    high: jax.Array
    num_valid: jax.Array
    finite: jax.Array


def count_bins(bins_TE: jax.Array, num_bins: int, totals: Totals) -> jax.Array:
    """Margins of each expert by bin [E, J] over all tokens; a bin below 0 counts nowhere."""
    index_E = jnp.arange(bins_TE.shape[-1], dtype=jnp.int32)
    column_TE = jnp.where(bins_TE >= 0, bins_TE, num_bins)
    counts = jnp.zeros((index_E.size, num_bins + 1), jnp.int32).at[index_E, column_TE].add(1)
    return totals.sum(counts[:, :num_bins])


def counter(counts_EJ: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Counts margins of each expert [E] in a bin [E] or above."""
    num_experts, num_bins = counts_EJ.shape
    above = jnp.flip(jnp.cumsum(jnp.flip(counts_EJ, 1), axis=1, dtype=jnp.int32), 1)
    above = jnp.pad(above, ((0, 0), (0, 1)))
    index_E = jnp.arange(num_experts)
    return lambda bin_E: above[index_E, jnp.minimum(bin_E, num_bins)]


def merge(parts: Histogram) -> Histogram:
    """One histogram of those of A micro-batches (leaves [A, ...]), re-binned by bin centre.

    It lies within one old bin and one new bin of the histogram of all margins (model.md 4).
    """
    num_bins = parts.counts_EJ.shape[-1]
    some = parts.num_valid > 0
    low = jnp.min(jnp.where(some, parts.low, jnp.inf))
    high = jnp.max(jnp.where(some, parts.high, -jnp.inf))
    width_A = (parts.high - parts.low) / num_bins
    centre_AJ = parts.low[:, None] + (jnp.arange(num_bins) + 0.5) * width_A[:, None]
    bins_AJ = jnp.floor((centre_AJ - low) / (high - low) * num_bins)
    bins_AJ = jnp.clip(jnp.nan_to_num(bins_AJ), 0, num_bins - 1).astype(jnp.int32)
    counts_EJ = jnp.zeros(parts.counts_EJ.shape[1:], jnp.int32)
    for bins_J, part_EJ in zip(bins_AJ, parts.counts_EJ, strict=True):
        counts_EJ = counts_EJ.at[:, bins_J].add(part_EJ)
    num_valid = jnp.sum(parts.num_valid, dtype=jnp.int32)
    return Histogram(counts_EJ, low, high, num_valid, jnp.all(parts.finite))
