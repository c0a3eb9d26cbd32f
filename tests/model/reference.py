"""The model again, in plain NumPy float64 with loops: slow, and independent of the package."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)


def gated_norm(x, gain, down, up):
    n = gain * rms(x, 1e-5)
    return n * sigmoid(silu(n @ down) @ up)


def conv(x, taps, segments):
    """One row: x [S, C]."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for back in range(len(taps)):
            if t - back >= 0 and segments[t - back] == segments[t]:
                out[t] += taps[back] * x[t - back]
    return out


def rotate(x, position):
    """One head vector."""
    out = x.copy()
    pairs = len(x) // 4
    for j in range(pairs):
        angle = position * 10_000.0 ** (-j / pairs)
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j] = a * np.cos(angle) - b * np.sin(angle)
        out[2 * j + 1] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(a, p, prefix, layer, is_global, segments, config):
    """One row: a [S, D]."""
    length = len(a)
    heads, size = config.num_heads, config.head_dim
    stored = max(config.num_kv_heads_local, config.num_kv_heads_global)
    used = config.num_kv_heads_global if is_global else config.num_kv_heads_local

    def leaf(name):
        return p[prefix + name][layer]

    q = (a @ leaf("wq")).reshape(length, heads, size)
    k = conv(a @ leaf("wk"), leaf("k_conv/taps"), segments).reshape(length, stored, size)
    v = (a @ leaf("wv")).reshape(length, stored, size)
    source = [m // (stored // used) for m in range(stored)]
    k, v = k[:, source], v[:, source]
    q, k = rms(q, 1e-6), rms(k, 1e-6)
    if not is_global:
        for t in range(length):
            for n in range(heads):
                q[t, n] = rotate(q[t, n], t)
            for m in range(stored):
                k[t, m] = rotate(k[t, m], t)
    q = q * config.qk_multiplier
    gate = 2 * sigmoid(a @ leaf("head_gate"))
    out = np.zeros((length, heads, size))
    for n in range(heads):
        m = n * stored // heads
        for t in range(length):
            keys = [
                u
                for u in range(t + 1)
                if segments[u] == segments[t] and (is_global or u >= t - (config.window - 1))
            ]
            score = np.array([q[t, n] @ k[u, m] for u in keys]) / np.sqrt(size)
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            y = sum(w * v[u, m] for w, u in zip(weight, keys, strict=True))
            own = v[t, m]
            out[t, n] = gate[t, n] * (y - (y @ own) / (own @ own + 1e-6) * own)
    return out.reshape(length, -1) @ leaf("wo")


def route(s, bias, num_selected):
    """Experts (best first), combine weights and the threshold of one token."""
    order = sorted(range(len(s)), key=lambda e: (-(s[e] + bias[e]), e))
    chosen = order[:num_selected]
    c = sigmoid(s[chosen])
    threshold = s[order[num_selected]] + bias[order[num_selected]]
    return chosen, 2.5 * c / (c.sum() + 1e-9), threshold


def new_beta(margins, num_valid, num_selected, num_bins):
    """margins [T_valid, E]: the histogram estimator, by counting."""
    num_experts = margins.shape[1]
    if num_valid == 0:
        return np.zeros(num_experts)
    low = margins.min()
    high = max(margins.max(), low + 1e-6)
    width = (high - low) / num_bins
    bins = np.clip(np.floor((margins - low) / width), 0, num_bins - 1).astype(int)
    target = num_valid * num_selected / num_experts
    beta = []
    for e in range(num_experts):
        histogram = np.bincount(bins[:, e], minlength=num_bins)
        above = np.cumsum(histogram[::-1])[::-1]
        best = max(b for b in range(num_bins) if above[b] >= target)
        beta.append(low + best * width + width * (above[best] - target) / max(histogram[best], 1))
    return np.array(beta)


def mixture_of_experts(m, p, layer, beta, segments, config):
    """All rows: m [B, S, D]. Returns the output, the new beta and the routing of valid tokens."""
    bias = beta.mean() - beta
    out = np.zeros_like(m)
    margins, routing = [], {}
    for b in range(m.shape[0]):
        for t in range(m.shape[1]):
            x = m[b, t]
            if segments[b, t] >= 0:
                s = x @ p["blocks/moe/router"][layer]
                chosen, c, threshold = route(s, bias, config.experts_per_token)
                routing[b, t] = chosen, c
                margins.append(s - threshold)
                latent = p["blocks/moe/latent_norm/gain"][layer] * rms(
                    x @ p["blocks/moe/latent_down"][layer], 1e-5
                )
                mixed = np.zeros(config.latent_width)
                for e, weight in zip(chosen, c, strict=True):
                    gate, up, down = (
                        p[f"blocks/moe/experts/{name}"][layer, e] for name in ("gate", "up", "down")
                    )
                    mixed += weight * ((silu(latent @ gate) * (latent @ up)) @ down)
                out[b, t] = mixed @ p["blocks/moe/latent_up"][layer]
            for j in range(config.num_shared_experts):
                gate, up, down = (
                    p[f"blocks/shared/{j}/{name}"][layer] for name in ("gate", "up", "down")
                )
                out[b, t] += (silu(x @ gate) * (x @ up)) @ down
    margins = np.array(margins).reshape(-1, config.num_experts)
    beta = new_beta(margins, len(margins), config.experts_per_token, config.qb_bins)
    return out, beta, routing


def forward(p, beta, tokens, segments, config):
    """logits [B, S, V], hidden states after each layer, new beta [L, E], routing per layer."""

    def norm(x, name, layer=...):
        return gated_norm(
            x,
            p[f"{name}_norm/gain"][layer],
            p[f"{name}_gnorm/down"][layer],
            p[f"{name}_gnorm/up"][layer],
        )

    x = norm(p["embed/table"][tokens], "embed")
    states, betas, routings = [], [], []
    rows = range(len(tokens))
    for layer in range(config.num_layers):
        is_global = (layer + 1) % config.global_every == 0 or layer == config.num_layers - 1
        a = norm(x, "blocks/attn", layer)
        for b in rows:
            y = attention(a[b], p, "blocks/attn/", layer, is_global, segments[b], config)
            x[b] += conv(y, p["blocks/attn_conv/taps"][layer], segments[b])
        m = norm(x, "blocks/mlp", layer)
        y, updated, routing = mixture_of_experts(m, p, layer, beta[layer], segments, config)
        for b in rows:
            x[b] += conv(y[b], p["blocks/mlp_conv/taps"][layer], segments[b])
        states.append(x.copy())
        betas.append(updated)
        routings.append(routing)
    return norm(x, "final") @ p["head/proj"], states, np.array(betas), routings


def loss(logits, tokens, weights, z_weight=1e-4):
    """(loss, cross-entropy, mean squared logsumexp)."""
    ce = square = 0.0
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1] - 1):
            top = logits[b, t].max()
            lse = top + np.log(np.sum(np.exp(logits[b, t] - top)))
            ce += float(weights[b, t]) * (lse - logits[b, t, tokens[b, t + 1]])
            square += float(weights[b, t]) * lse * lse
    total = weights.sum(dtype=np.float64)
    return (ce + z_weight * square) / total, ce / total, square / total
