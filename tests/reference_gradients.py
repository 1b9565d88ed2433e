"""The gradient of an attention layer in float64 NumPy, by the chain rule, step by step backwards.

Differences, as elsewhere, give the slope in one direction; the rule for low precision compares
largest errors, so there every single number of a gradient is needed.
"""

import numpy as np
from reference import multi_head, rotate


def multi_head_gradients(x, context, c, w, path, visible, positions, bias, key_positions, d_out):
    """{"x", "context", and every weight's path: gradient of Σ output · d_out}."""
    _, (query, key, value, weights, joined) = multi_head(
        x, context, c, w, path, visible, positions, bias, key_positions
    )
    found = {}

    def dense(a, name, d):
        kernel = f"{path}/{name}/kernel"
        found[kernel] = np.einsum("bti,bto->io", a, d)
        if f"{path}/{name}/bias" in w:
            found[f"{path}/{name}/bias"] = d.sum((0, 1))
        return d @ w[kernel].T

    def heads(a, name, d, at):
        """Back through the turn, the norm and the projection of queries or keys."""
        if c.position == "rotary" and at is not None:
            turning, layout = c.rotary_dim or c.head_width, c.position_layout or "half"
            d = rotate(d, -at, c.rotary_base, turning, layout)
        if c.qk_norm:
            projected = a @ w[f"{path}/{name}/kernel"] + w.get(f"{path}/{name}/bias", 0.0)
            d, found[f"{path}/{name}_norm/scale"] = rms_norm(
                projected.reshape(d.shape), w[f"{path}/{name}_norm/scale"], c.norm_epsilon, d
            )
        return dense(a, name, d.reshape(*d.shape[:2], -1))

    d = dense(joined, "output", d_out).reshape(query.shape)
    scale = c.head_width**-0.5 if c.attention_scale is None else c.attention_scale
    d_query, d_key, d_value, d_sink = attention(query, key, value, weights, scale, c, d)
    if path + "/sink" in w:
        found[path + "/sink"] = d_sink
    found["x"] = heads(x, "query", d_query, positions)
    found["context"] = heads(context, "key", d_key, key_positions)
    found["context"] += dense(context, "value", d_value.reshape(*d_value.shape[:2], -1))
    return found


def attention(query, key, value, weights, scale, c, d):
    """Gradients of the heads, and of the sinks, from that of the attention's output."""
    d_query, d_key, d_value = (np.zeros(a.shape) for a in (query, key, value))
    d_sink = np.zeros(query.shape[2])
    groups = query.shape[2] // key.shape[2]
    for b in range(query.shape[0]):
        for n in range(query.shape[2]):
            q, k, v = query[b, :, n], key[b, :, n // groups], value[b, :, n // groups]
            p = weights[b, n]
            d_value[b, :, n // groups] += p.T @ d[b, :, n]
            d_weights = d[b, :, n] @ v.T
            mean = (p * d_weights).sum(-1, keepdims=True)
            d_scores = p * (d_weights - mean)
            d_sink[n] -= ((1.0 - p.sum(-1, keepdims=True)) * mean).sum()
            if c.logit_softcap is not None:
                d_scores = d_scores / np.cosh(q @ k.T * scale / c.logit_softcap) ** 2
            d_query[b, :, n] += d_scores @ k * scale
            d_key[b, :, n // groups] += d_scores.T @ q * scale
    return d_query, d_key, d_value, d_sink


def rms_norm(x, gain, epsilon, d):
    """Gradients of gain · x / r by x and by the gain, where r = √(mean x² + ε)."""
    r = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    inner = (gain * d * x).mean(-1, keepdims=True)
    by_gain = (d * x / r).sum(tuple(range(x.ndim - 1)))
    return gain * d / r - x * inner / r**3, by_gain
