"""The model written a second time, from its equations, in NumPy float64, with every plain form.

Nothing here is shared with the package: parameters come as {path: array}, positions of all rows
are handled one row after the other, experts one token after the other. Slow and literal. A shape
says what is switched off; a parameter of a part that is off is never read.
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
    balance_loss: float  # of the auxiliary loss, 0 without one


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


def rotate(x, fraction, base=10_000.0):
    """x [S, H]: the P pairs (2j, 2j+1) of the first `fraction`, by position * base^(-j / P)."""
    length, size = x.shape
    num_pairs = int(size * fraction) // 2
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


class Layer:
    """One layer's parameters by name, and its convolutions."""

    def __init__(self, leaves, index, config):
        self.leaves, self.index, self.config = leaves, index, config
        self.is_global = self.sees_all(index)

    def sees_all(self, index):
        config = self.config
        return (index + 1) % config.global_every == 0 or index + 1 == config.num_layers

    def __call__(self, name):
        return self.leaves[f"blocks/{name}"][self.index]

    def convolve(self, x, site, place, segments):
        """x [S, C] of one row, unless the shape has no convolution here."""
        if site not in self.config.conv_sites:
            return x
        number = self.index
        if self.config.conv_layers == "global":
            if not self.is_global:
                return x
            number = sum(self.sees_all(before) for before in range(self.index))
        return convolve(x, self.leaves[f"blocks/{place}/taps"][number], segments)


def attention(a, leaf, segments, config):
    """Attention branch of one row, a [S, D]; `leaf(name)` gives a parameter of this layer."""
    is_global = leaf.is_global
    heads, size = config.num_heads, config.head_dim
    stored = max(config.num_kv_heads_local, config.num_kv_heads_global)
    used = config.num_kv_heads_global if is_global else config.num_kv_heads_local
    window = None if is_global else config.window
    positions = range(len(a))
    mask = np.array([[sees(t, u, segments, window) for u in positions] for t in positions])
    queries = a @ leaf("attn/wq")
    keys = leaf.convolve(a @ leaf("attn/wk"), "k", "attn/k_conv", segments)
    values = leaf.convolve(a @ leaf("attn/wv"), "v", "attn/v_conv", segments)
    gates = np.ones((len(a), heads))
    if config.head_gate:
        gates = 2 * logistic(a @ leaf("attn/head_gate"))
    out = []
    for n in range(heads):
        own = stored_head(n, heads, stored, used)
        q = normalise(queries[:, n * size : (n + 1) * size], 1e-6)
        k = normalise(keys[:, own * size : (own + 1) * size], 1e-6)
        v = values[:, own * size : (own + 1) * size]
        if not (is_global and config.nope_global):
            q, k = rotate(q, config.rope_fraction), rotate(k, config.rope_fraction)
        scores = np.where(mask, (config.qk_multiplier * q) @ k.T / np.sqrt(size), -np.inf)
        share = np.exp(scores - log_sum_exp(scores)[:, None])
        y = exclude_self(share @ v, v) if config.exclusive_attention else share @ v
        out.append(gates[:, n, None] * y)
    return np.concatenate(out, axis=1) @ leaf("attn/wo")


def choose(logits, bias, num_selected, combine="sigmoid_renormalised"):
    """One token: experts (best first), combine weights, threshold, gap above the threshold."""
    biased = logits + bias
    order = np.argsort(-biased, kind="stable")
    selected, runner_up = order[:num_selected], order[num_selected]
    raw = logistic(logits[selected])
    if combine == "sigmoid_renormalised":
        raw = 2.5 * raw / (raw.sum() + 1e-9)
    if combine == "softmax":
        share = np.exp(logits - log_sum_exp(logits))[selected]
        raw = 2.5 * share / share.sum()
    return selected, raw, biased[runner_up], biased[selected[-1]] - biased[runner_up]


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


def top_margin(margins, num_selected):
    """The other estimator: the max(1, floor(T K / E))-th largest margin of each expert."""
    num_tokens, num_experts = margins.shape
    rank = max(1, num_tokens * num_selected // num_experts)
    return np.sort(margins, axis=0)[num_tokens - rank]


def swiglu(x, leaf, place):
    return (silu(x @ leaf(f"{place}/gate")) * (x @ leaf(f"{place}/up"))) @ leaf(f"{place}/down")


def expert_branch(m, leaf, beta, segments, config):
    """Routed and shared experts of all rows, m [B, S, D]; also choice, new beta and metrics."""
    rows, length, _ = m.shape
    quantiles = config.balance in ("qb_hist", "qb_topk")
    bias = beta.mean() - beta if quantiles else np.zeros(config.num_experts)
    choice = Choice(
        np.full((rows, length, config.experts_per_token), -1),
        np.zeros((rows, length, config.experts_per_token)),
        np.inf,
    )
    out, logits, margins = np.zeros_like(m), [], []
    for b, t in np.ndindex(rows, length):
        x = m[b, t]
        for j in range(config.num_shared_experts):
            out[b, t] += swiglu(x, leaf, f"shared/{j}")
        if segments[b, t] < 0:
            continue
        s = x @ leaf("moe/router")
        selected, weights, threshold, gap = choose(
            s, bias, config.experts_per_token, config.combine
        )
        latent = x @ leaf("moe/latent_down") if config.latent else x
        if config.latent_norm:
            latent = leaf("moe/latent_norm/gain") * normalise(latent, 1e-5)
        mixed = 0
        for e, weight in zip(selected, weights, strict=True):
            gate, up = leaf("moe/experts/gate")[e], leaf("moe/experts/up")[e]
            mixed += weight * ((silu(latent @ gate) * (latent @ up)) @ leaf("moe/experts/down")[e])
        out[b, t] += mixed @ leaf("moe/latent_up") if config.latent else mixed
        choice.experts[b, t], choice.weights[b, t] = selected, weights
        choice.smallest_gap = min(choice.smallest_gap, gap)
        logits.append(s)
        margins.append(s - threshold)
    logits = np.reshape(logits, (-1, config.num_experts))
    margins = np.reshape(margins, (-1, config.num_experts))
    measured = measure(logits, margins, choice, bias, config)
    if not quantiles:
        for name in ("margin_min", "margin_max", "bias_min", "bias_max"):
            del measured[name]
        return out, choice, beta, measured
    new_beta = balance(margins, config.experts_per_token, config.qb_bins)
    if config.balance == "qb_topk":
        new_beta = top_margin(margins, config.experts_per_token)
    return out, choice, new_beta, measured


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


def balance_loss(metrics, config):
    """Mean over layers of 0.01 E/K sum f p and of 1e-3 lse^2, with the weights of the shape."""
    if config.balance != "softmax_aux":
        return 0.0
    balance = np.mean(metrics["load_balance"]) / config.experts_per_token
    return config.aux_weight * balance + config.router_z_weight * np.mean(
        metrics["mean_square_lse"]
    )


def forward(leaves, beta, tokens, segments, config):
    """The whole model. `leaves` {path: array}, beta [L, E], tokens and segments [B, S]."""

    def norm(x, place, index=()):
        gain = leaves[f"{place}_norm/gain"][index]
        if not config.gated_norm:
            return gain * normalise(x, 1e-5)
        gate = (leaves[f"{place}_gnorm/{name}"][index] for name in ("down", "up"))
        return gated_norm(x, gain, *gate)

    x = norm(leaves["embed/table"][tokens], "embed")
    states, choices, betas, metrics = [], [], [], []
    for index in range(config.num_layers):
        leaf = Layer(leaves, index, config)
        a = norm(x, "blocks/attn", index)
        x = x + np.stack(
            [
                leaf.convolve(attention(a[b], leaf, row, config), "attn", "attn_conv", row)
                for b, row in enumerate(segments)
            ]
        )
        m = norm(x, "blocks/mlp", index)
        if config.mlp == "dense":
            branch = swiglu(m, leaf, "mlp")
        else:
            branch, choice, new_beta, measured = expert_branch(
                m, leaf, beta[index], segments, config
            )
            choices.append(choice)
            betas.append(new_beta)
            metrics.append(measured)
        x = x + np.stack(
            [leaf.convolve(branch[b], "mlp", "mlp_conv", row) for b, row in enumerate(segments)]
        )
        states.append(x)
    logits = norm(x, "final") @ leaves["head/proj"]
    names = metrics[0] if metrics else ()
    metrics = {name: np.array([layer[name] for layer in metrics]) for name in names}
    new_beta = np.array(betas) if betas else beta
    return Result(logits, states, choices, new_beta, metrics, balance_loss(metrics, config))


def loss(logits, tokens, weights, z_weight=1e-4):
    """(loss, cross-entropy, mean squared logsumexp), weighted means over the batch."""
    lse = log_sum_exp(logits)[:, :-1]
    label = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    weights = weights[:, :-1].astype(float) / weights.sum(dtype=float)
    cross_entropy, square = np.sum(weights * (lse - label)), np.sum(weights * lse**2)
    return cross_entropy + z_weight * square, cross_entropy, square
