"""The model written a second time, from its equations, in NumPy float64.

Nothing here is shared with the package: parameters come as {path: array}, positions of all rows
are handled one row after the other, experts one token after the other. Slow and literal.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Choice:
    """Routing of one layer. Rows of padding tokens hold -1 or 0."""

    experts: np.ndarray  # [B, S, K], best first
    weights: np.ndarray  # [B, S, K]
    smallest_gap: float  # between the K-th and the (K+1)-th biased logit


@dataclass
class Result:
    """What a forward pass gives."""

    logits: np.ndarray  # [B, S, V]
    states: list[np.ndarray]  # residual stream after each layer, [B, S, D]
    choices: list[Choice]
    new_beta: np.ndarray  # [L, E]
    metrics: dict[str, np.ndarray]  # name: [L]


def logistic(x):
    return (1 + np.tanh(x / 2)) / 2


def silu(x):
    return x * logistic(x)


def log_sum_exp(x):
    largest = x.max(axis=-1)
    return largest + np.log(np.exp(x - largest[..., None]).sum(axis=-1))


def normalise(x, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)


def gated_norm(x, gain, down, up):
    normed = gain * normalise(x, 1e-5)
    return normed * logistic(silu(normed @ down) @ up)


def convolve(x, taps, segments):
    """x [S, C]: sum over the taps of earlier positions of the same document."""
    out = taps[0] * x
    for t in range(len(x)):
        for back in range(1, min(len(taps), t + 1)):
            if segments[t - back] == segments[t]:
                out[t] = out[t] + taps[back] * x[t - back]
    return out


def rotate(x, base=10_000.0):
    """x [S, H]: pairs (2j, 2j+1) of the first half, by position * base^(-j / (H/4))."""
    length, size = x.shape
    num_pairs = size // 4
    out = x.copy()
    for j in range(num_pairs):
        turn = np.exp(1j * np.arange(length) * base ** (-j / num_pairs))
        turned = (x[:, 2 * j] + 1j * x[:, 2 * j + 1]) * turn
        out[:, 2 * j], out[:, 2 * j + 1] = turned.real, turned.imag
    return out


def sees(t, u, segments, window):
    """Whether position t may look at position u; window None in global layers."""
    near = window is None or t - u < window
    return u <= t and segments[u] == segments[t] and near


def exclude_self(y, v):
    """Remove from y [S, H] its component along v [S, H]."""
    along = (y * v).sum(axis=1) / ((v**2).sum(axis=1) + 1e-6)
    return y - along[:, None] * v


def stored_head(n, num_heads, num_stored, num_used):
    """Column block of wk and wv behind query head n when only the first `num_used` are kept."""
    group = n * num_stored // num_heads
    return group // (num_stored // num_used)


def attention(a, leaf, segments, config, is_global):
    """Attention branch of one row, a [S, D]; `leaf(name)` gives a parameter of this layer."""
    heads, size = config.num_heads, config.head_dim
    stored = max(config.num_kv_heads_local, config.num_kv_heads_global)
    used = config.num_kv_heads_global if is_global else config.num_kv_heads_local
    window = None if is_global else config.window
    positions = range(len(a))
    mask = np.array([[sees(t, u, segments, window) for u in positions] for t in positions])
    queries = a @ leaf("attn/wq")
    keys = convolve(a @ leaf("attn/wk"), leaf("attn/k_conv/taps"), segments)
    values = a @ leaf("attn/wv")
    gates = 2 * logistic(a @ leaf("attn/head_gate"))
    out = []
    for n in range(heads):
        own = stored_head(n, heads, stored, used)
        q = normalise(queries[:, n * size : (n + 1) * size], 1e-6)
        k = normalise(keys[:, own * size : (own + 1) * size], 1e-6)
        v = values[:, own * size : (own + 1) * size]
        if not is_global:
            q, k = rotate(q), rotate(k)
        scores = np.where(mask, (config.qk_multiplier * q) @ k.T / np.sqrt(size), -np.inf)
        share = np.exp(scores - log_sum_exp(scores)[:, None])
        out.append(gates[:, n, None] * exclude_self(share @ v, v))
    return np.concatenate(out, axis=1) @ leaf("attn/wo")


def choose(logits, bias, num_selected):
    """One token: experts (best first), combine weights, threshold, gap above the threshold."""
    biased = logits + bias
    order = np.argsort(-biased, kind="stable")
    selected, runner_up = order[:num_selected], order[num_selected]
    raw = logistic(logits[selected])
    gap = biased[selected[-1]] - biased[runner_up]
    return selected, 2.5 * raw / (raw.sum() + 1e-9), biased[runner_up], gap


def histogram(margins, num_bins):
    """Counts [E, bins] of margins [T, E], the lower end and the bin width."""
    low = margins.min()
    high = max(margins.max(), low + 1e-6)
    width = (high - low) / num_bins
    counts = np.zeros((margins.shape[1], num_bins), int)
    for row in margins:
        for expert, margin in enumerate(row):
            index = int(np.floor((margin - low) / width))
            counts[expert, min(max(index, 0), num_bins - 1)] += 1
    return counts, low, width


def quantile(counts, target):
    """(b*, C[b*], H[b*]) per expert: the last bin with at least `target` counts from it up."""
    found = []
    for row in counts:
        total, b = 0, len(row)
        while total < target:
            b -= 1
            total += row[b]
        found.append((b, total, row[b]))
    return np.array(found).T


def balance(margins, num_selected, num_bins):
    """New beta [E] from the margins [T, E] of the valid tokens."""
    num_tokens, num_experts = margins.shape
    if num_tokens == 0:
        return np.zeros(num_experts)
    counts, low, width = histogram(margins, num_bins)
    target = num_tokens * num_selected / num_experts
    b, above, inside = quantile(counts, target)
    return low + b * width + width * (above - target) / np.maximum(inside, 1)


def sorted_quantile(margins, num_selected):
    """What the histogram estimates: the ceil(T K / E)-th largest margin of each expert."""
    num_tokens, num_experts = margins.shape
    rank = -(-num_tokens * num_selected // num_experts)
    return np.sort(margins, axis=0)[num_tokens - rank]


def expert_branch(m, leaf, beta, segments, config):
    """Routed and shared experts of all rows, m [B, S, D]; also choice, new beta and metrics."""
    rows, length, _ = m.shape
    bias = beta.mean() - beta
    choice = Choice(
        np.full((rows, length, config.experts_per_token), -1),
        np.zeros((rows, length, config.experts_per_token)),
        np.inf,
    )
    out, logits, margins = np.zeros_like(m), [], []
    for b, t in np.ndindex(rows, length):
        x = m[b, t]
        for j in range(config.num_shared_experts):
            inner = silu(x @ leaf(f"shared/{j}/gate")) * (x @ leaf(f"shared/{j}/up"))
            out[b, t] += inner @ leaf(f"shared/{j}/down")
        if segments[b, t] < 0:
            continue
        s = x @ leaf("moe/router")
        selected, weights, threshold, gap = choose(s, bias, config.experts_per_token)
        latent = leaf("moe/latent_norm/gain") * normalise(x @ leaf("moe/latent_down"), 1e-5)
        mixed = 0
        for e, weight in zip(selected, weights, strict=True):
            gate, up = leaf("moe/experts/gate")[e], leaf("moe/experts/up")[e]
            mixed += weight * ((silu(latent @ gate) * (latent @ up)) @ leaf("moe/experts/down")[e])
        out[b, t] += mixed @ leaf("moe/latent_up")
        choice.experts[b, t], choice.weights[b, t] = selected, weights
        choice.smallest_gap = min(choice.smallest_gap, gap)
        logits.append(s)
        margins.append(s - threshold)
    logits = np.reshape(logits, (-1, config.num_experts))
    margins = np.reshape(margins, (-1, config.num_experts))
    new_beta = balance(margins, config.experts_per_token, config.qb_bins)
    return out, choice, new_beta, measure(logits, margins, choice, bias, config)


def measure(logits, margins, choice, bias, config):
    """Statistics of one layer over its valid tokens, logits and margins [T, E]."""
    num_tokens, num_experts = logits.shape
    chosen = choice.experts[choice.experts >= 0]
    load = np.array([np.sum(chosen == e) for e in range(num_experts)])
    share = load / (config.experts_per_token * num_tokens)
    lse = log_sum_exp(logits)
    probability = np.exp(logits - lse[:, None]).mean(axis=0)
    return {
        "entropy": -sum(p * np.log(p) for p in share if p > 0),
        "load_balance": num_experts * np.sum(load / num_tokens * probability),
        "mean_square_lse": np.mean(lse**2),
        "load_max_over_mean": load.max() / load.mean(),
        "margin_min": margins.min(),
        "margin_max": margins.max(),
        "bias_min": bias.min(),
        "bias_max": bias.max(),
        "drop_fraction": 0.0,
    }


def forward(leaves, beta, tokens, segments, config):
    """The whole model. `leaves` {path: array}, beta [L, E], tokens and segments [B, S]."""

    def norm(x, place, index=()):
        parts = (f"{place}_norm/gain", f"{place}_gnorm/down", f"{place}_gnorm/up")
        return gated_norm(x, *(leaves[part][index] for part in parts))

    x = norm(leaves["embed/table"][tokens], "embed")
    states, choices, betas, metrics = [], [], [], []
    for index in range(config.num_layers):
        is_global = (index + 1) % config.global_every == 0 or index + 1 == config.num_layers

        def leaf(name, index=index):
            return leaves[f"blocks/{name}"][index]

        a = norm(x, "blocks/attn", index)
        branch = [
            convolve(attention(a[b], leaf, row, config, is_global), leaf("attn_conv/taps"), row)
            for b, row in enumerate(segments)
        ]
        x = x + np.stack(branch)
        m = norm(x, "blocks/mlp", index)
        branch, choice, new_beta, measured = expert_branch(m, leaf, beta[index], segments, config)
        branch = [convolve(branch[b], leaf("mlp_conv/taps"), row) for b, row in enumerate(segments)]
        x = x + np.stack(branch)
        states.append(x)
        choices.append(choice)
        betas.append(new_beta)
        metrics.append(measured)
    logits = norm(x, "final") @ leaves["head/proj"]
    metrics = {name: np.array([layer[name] for layer in metrics]) for name in metrics[0]}
    return Result(logits, states, choices, np.array(betas), metrics)


def loss(logits, tokens, weights, z_weight=1e-4):
    """(loss, cross-entropy, mean squared logsumexp), weighted means over the batch."""
    lse = log_sum_exp(logits)[:, :-1]
    label = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    weights = weights[:, :-1].astype(float) / weights.sum(dtype=float)
    cross_entropy, square = np.sum(weights * (lse - label)), np.sum(weights * lse**2)
    return cross_entropy + z_weight * square, cross_entropy, square
