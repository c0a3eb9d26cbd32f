"""Choice of experts, their weights, and the ways to balance their load.

Shapes: T tokens, E experts, K experts per token, L layers. Everything here is float32 or wider.
The choice needs no sort: K+1 rounds of "largest, first index" cost less on every device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from portolan.model.drops import Drops
from portolan.model.histograms import Histogram, count_bins, counter, merge
from portolan.model.totals import ALL_TOKENS, Totals
from portolan.shapes import COMBINE_WEIGHT_SUM, Combine, ModelConfig

COMBINE_EPSILON = 1e-9
MIN_MARGIN_RANGE = 1e-6
SAVED_ROUTING = "routing"


class RouterMetrics(NamedTuple):
    """Statistics over valid tokens; scalars of one layer, or [L] when stacked.

    Margins and biases are None without quantile balancing, the counts of `Drops` where nothing
    limits the assignments.
    """

    entropy: jax.Array
    load_balance: jax.Array
    mean_square_lse: jax.Array
    load_max_over_mean: jax.Array
    margin_min: jax.Array | None
    margin_max: jax.Array | None
    bias_min: jax.Array | None
    bias_max: jax.Array | None
    drop_fraction: jax.Array
    sender_dropped: jax.Array | None
    receiver_dropped: jax.Array | None
    padding_skipped: jax.Array | None


class Routing(NamedTuple):
    """Experts of each token, best first, their combine weights and the threshold alpha."""

    experts_TK: jax.Array
    weights_TK: jax.Array
    threshold_T: jax.Array


def balance_bias(beta: jax.Array) -> jax.Array:
    """b = -beta + mean over experts, along the last axis."""
    return jnp.mean(beta, axis=-1, keepdims=True) - beta


def selection_bias(beta_E: jax.Array, config: ModelConfig) -> jax.Array:
    """What is added to the logits to select experts: 0 without quantile balancing."""
    if config.num_balance_biases:
        return balance_bias(beta_E)
    return jnp.zeros(config.num_experts, beta_E.dtype)


def select(biased_TE: jax.Array, num_selected: int) -> tuple[jax.Array, jax.Array]:
    """Indices [T, K] of the K largest entries, best first, and the (K+1)-th largest value [T].

    Of equal entries the lower index comes first.
    """
    index_E = jnp.arange(biased_TE.shape[-1], dtype=jnp.int32)
    experts = []
    for _ in range(num_selected):
        top = jnp.max(biased_TE, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(biased_TE == top, index_E, index_E.size), axis=-1, keepdims=True)
        biased_TE = jnp.where(index_E == first, -jnp.inf, biased_TE)
        experts.append(first)
    return jnp.concatenate(experts, axis=-1), jnp.max(biased_TE, axis=-1)


def renormalised_sigmoid(chosen_TK: jax.Array) -> jax.Array:
    """2.5 sigmoid(s), divided by the sum of the sigmoids."""
    weights_TK = jax.nn.sigmoid(chosen_TK)
    total = jnp.sum(weights_TK, axis=-1, keepdims=True) + COMBINE_EPSILON
    return COMBINE_WEIGHT_SUM * weights_TK / total


def scaled_softmax(chosen_TK: jax.Array) -> jax.Array:
    """2.5 softmax(s) over the selected logits."""
    return COMBINE_WEIGHT_SUM * jax.nn.softmax(chosen_TK, axis=-1)


COMBINE_WEIGHTS: dict[Combine, Callable[[jax.Array], jax.Array]] = {
    "sigmoid_renormalised": renormalised_sigmoid,
    "sigmoid": jax.nn.sigmoid,
    "softmax": scaled_softmax,
}


def route(
    logits_TE: jax.Array,
    bias_E: jax.Array,
    num_selected: int,
    combine: Combine = "sigmoid_renormalised",
) -> Routing:
    """Select on logits + bias, weigh on the unbiased logits.

    The gradient reaches the logits only through the weights.
    """
    biased = jax.lax.stop_gradient(logits_TE) + jax.lax.stop_gradient(bias_E)
    experts_TK, threshold_T = checkpoint_name(select(biased, num_selected), SAVED_ROUTING)
    index_E = jnp.arange(logits_TE.shape[-1], dtype=jnp.int32)
    one_hot = experts_TK[..., None] == index_E
    chosen_TK = jnp.sum(jnp.where(one_hot, logits_TE[:, None], 0), axis=-1)
    return Routing(experts_TK, COMBINE_WEIGHTS[combine](chosen_TK), threshold_T)


class Margins(NamedTuple):
    """Bin of each margin [T, E] (-1 for padding), the range of the bins, the number of valid
    tokens, and whether every margin of a valid token is finite."""

    bins_TE: jax.Array
    low: jax.Array
    high: jax.Array
    num_valid: jax.Array
    finite: jax.Array


def bin_margins(
    logits_TE: jax.Array,
    threshold_T: jax.Array,
    valid_T: jax.Array,
    num_bins: int,
    totals: Totals = ALL_TOKENS,
) -> Margins:
    """Margins logit - threshold over `num_bins` equal bins between their global extremes."""
    margins = logits_TE - threshold_T[:, None]
    valid = valid_T[:, None]
    low = totals.least(jnp.min(jnp.where(valid, margins, jnp.inf)))
    high = totals.largest(jnp.max(jnp.where(valid, margins, -jnp.inf)))
    high = jnp.maximum(high, low + MIN_MARGIN_RANGE)
    width = (high - low) / num_bins
    bins = jnp.clip(jnp.floor((margins - low) / width), 0, num_bins - 1).astype(jnp.int32)
    # Not read off the extremes: the CPU's minimum and maximum may pass over NaN.
    finite = totals.least(jnp.all(jnp.isfinite(margins) | ~valid).astype(jnp.int32)) > 0
    num_valid = totals.sum(jnp.sum(valid_T, dtype=jnp.int32))
    return Margins(jnp.where(valid, bins, -1), low, high, num_valid, finite)


def quantile_bins(
    margins: Margins, num_selected: int, num_bins: int, totals: Totals = ALL_TOKENS
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(b*, C[b*], H[b*]) per expert: the largest bin with at least T_valid K / E margins above.

    Equal to the integers of a full histogram, found by bisection: the count of margins in bin b
    or above falls with b.
    """
    num_experts = margins.bins_TE.shape[-1]
    needed = -(-margins.num_valid * num_selected // num_experts)
    return _search(_counter(margins.bins_TE, num_bins, totals), needed, num_experts, num_bins)


def _search(
    count: Callable[[jax.Array], jax.Array], needed: jax.Array, num_experts: int, num_bins: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest bin of each expert with at least `needed` margins in it or above, and counts."""
    low = jnp.zeros(num_experts, jnp.int32)
    high = jnp.full(num_experts, num_bins, jnp.int32)

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        enough = count(middle) >= needed
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, (num_bins - 1).bit_length(), halve, (low, high))
    above = count(low)
    return low, above, above - count(low + 1)


def _counter(bins_TE: jax.Array, num_bins: int, totals: Totals) -> Callable[[jax.Array], jax.Array]:
    """Counts margins of each expert [E] in a bin [E] or above.

    On one device log2(bins) masked counts cost less than the scatter-add of a histogram; on many
    the histograms are added once, where every count would be added.
    """
    if not totals.is_spread:
        return lambda bin_E: jnp.sum(bins_TE >= bin_E, axis=0, dtype=jnp.int32)
    return counter(count_bins(bins_TE, num_bins, totals))


def update_beta(
    margins: Margins, num_selected: int, num_bins: int, totals: Totals = ALL_TOKENS
) -> jax.Array:
    """New beta [E]: the upper K/E quantile of the margins of each expert.

    0 without valid tokens; NaN when a margin is not finite, so that the step can be refused.
    """
    found = quantile_bins(margins, num_selected, num_bins, totals)
    return _interpolate(found, margins, num_selected, num_bins)


def merged_beta(parts: Histogram, num_selected: int) -> jax.Array:
    """`update_beta` [E] from the histograms of the micro-batches of an update, leaves [A, ...]."""
    whole = merge(parts)
    num_experts, num_bins = whole.counts_EJ.shape
    needed = -(-whole.num_valid * num_selected // num_experts)
    found = _search(counter(whole.counts_EJ), needed, num_experts, num_bins)
    return _interpolate(found, whole, num_selected, num_bins)


def _interpolate(
    found: tuple[jax.Array, jax.Array, jax.Array],
    margins: Margins | Histogram,
    num_selected: int,
    num_bins: int,
) -> jax.Array:
    """The quantile [E] inside the bin that was found."""
    best, above, inside = found
    num_experts = best.shape[-1]
    quotient, remainder = jnp.divmod(margins.num_valid * num_selected, num_experts)
    dtype = margins.low.dtype
    surplus = (above - quotient).astype(dtype) - remainder.astype(dtype) / num_experts
    width = (margins.high - margins.low) / num_bins
    beta = margins.low + best * width + width * surplus / jnp.maximum(inside, 1)
    return accept(beta, margins)


def accept(beta_E: jax.Array, margins: Margins | Histogram) -> jax.Array:
    """Beta as it may be used: NaN when a margin is not finite, 0 without valid tokens."""
    beta_E = jnp.where(margins.finite, beta_E, jnp.nan)
    return jnp.where(margins.num_valid > 0, beta_E, 0)


def top_margins(
    logits_TE: jax.Array, threshold_T: jax.Array, valid_T: jax.Array, num_selected: int
) -> jax.Array:
    """Beta [E] without bins: the max(1, floor(T_valid K / E))-th largest margin of each expert."""
    num_tokens, num_experts = logits_TE.shape
    margins = jnp.where(valid_T[:, None], logits_TE - threshold_T[:, None], -jnp.inf)
    rank = jnp.sum(valid_T, dtype=jnp.int32) * num_selected // num_experts
    largest = jax.lax.top_k(margins.T, max(1, num_tokens * num_selected // num_experts))[0]
    return largest[:, jnp.maximum(rank, 1) - 1]


def rebalance(
    logits_TE: jax.Array,
    threshold_T: jax.Array,
    valid_T: jax.Array,
    beta_E: jax.Array,
    config: ModelConfig,
    totals: Totals = ALL_TOKENS,
) -> tuple[Any, Margins | None]:
    """The new beta [E] and the margins that it was read from; beta stays where none is used.

    In a micro-batch the `Histogram` of the margins takes the place of beta.
    """
    if not config.num_balance_biases:
        return beta_E, None
    margins = bin_margins(logits_TE, threshold_T, valid_T, config.qb_bins, totals)
    if totals.is_partial:
        counts = count_bins(margins.bins_TE, config.qb_bins, totals)
        return Histogram(counts, *margins[1:]), margins
    if config.balance == "qb_hist":
        return update_beta(margins, config.experts_per_token, config.qb_bins, totals), margins
    logits_TE, threshold_T, valid_T = map(totals.gather, (logits_TE, threshold_T, valid_T))
    beta = top_margins(logits_TE, threshold_T, valid_T, config.experts_per_token)
    return accept(beta, margins), margins


def router_loss(metrics: RouterMetrics, config: ModelConfig) -> jax.Array:
    """aux_weight E/K sum_e f_e p_e + router_z_weight mean lse^2, means over layers.

    1 and the squared logsumexp of a balanced router; f, the shares of assignments, has no gradient.
    """
    balance = jnp.mean(metrics.load_balance) / config.experts_per_token
    return config.aux_weight * balance + config.router_z_weight * jnp.mean(metrics.mean_square_lse)


def measure(
    logits_TE: jax.Array,
    experts_TK: jax.Array,
    valid_T: jax.Array,
    bias_E: jax.Array,
    margins: Margins | None,
    config: ModelConfig,
    totals: Totals = ALL_TOKENS,
    drops: Drops | None = None,
) -> RouterMetrics:
    """Metrics of one layer over its valid tokens."""
    num_experts = config.num_experts
    valid = valid_T[:, None].astype(logits_TE.dtype)
    count = jnp.maximum(totals.sum(jnp.sum(valid)), 1)
    index_E = jnp.arange(num_experts, dtype=jnp.int32)
    chosen_TE = jnp.any(experts_TK[:, :, None] == index_E, axis=1)
    load_E = totals.sum(jnp.sum(chosen_TE * valid, axis=0))
    exponent = jnp.exp(logits_TE - jnp.max(logits_TE, axis=-1, keepdims=True))
    total = jnp.sum(exponent, axis=-1, keepdims=True)
    lse = jnp.log(total) + jnp.max(logits_TE, axis=-1, keepdims=True)
    probability_E = totals.sum(jnp.sum(valid * exponent / total, axis=0)) / count
    share = load_E / (config.experts_per_token * count)
    lost = drops.sender + drops.receiver if drops else jnp.zeros((), jnp.int32)
    return RouterMetrics(
        entropy=-jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.maximum(share, 1e-30)), 0)),
        load_balance=num_experts * jnp.sum(load_E / count * probability_E),
        mean_square_lse=totals.sum(jnp.sum(valid * lse * lse)) / count,
        load_max_over_mean=jnp.max(share) * num_experts,
        margin_min=margins.low if margins else None,
        margin_max=margins.high if margins else None,
        bias_min=jnp.min(bias_E) if margins else None,
        bias_max=jnp.max(bias_E) if margins else None,
        drop_fraction=lost.astype(logits_TE.dtype) / (config.experts_per_token * count),
        sender_dropped=drops.sender if drops else None,
        receiver_dropped=drops.receiver if drops else None,
        padding_skipped=drops.skipped if drops else None,
    )
