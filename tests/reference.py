"""The mathematics once more, in float64 NumPy, written from the formulas and not from kformer.

Plain loops where they are clearer than array tricks: nothing here is meant to be fast.
`model_output` takes the weights of a model as {path: array} and computes what the model must.
"""

import math

import numpy as np


def softmax_row(scores, allowed, sink=None):
    """Weights of one query: zero for keys that are not allowed, all zero if none is."""
    if not allowed.any():
        return np.zeros(len(scores))
    top = scores[allowed].max()
    top = top if sink is None else max(top, sink)
    raised = np.where(allowed, np.exp(np.where(allowed, scores - top, 0.0)), 0.0)
    return raised / (raised.sum() + (0.0 if sink is None else math.exp(sink - top)))


def attention(query, key, value, visible, bias=None, scale=1.0, softcap=None, sink=None):
    """query (B, T, N, H), key and value (B, S, K, H), visible (B, N, T, S) → out, weights."""
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    out, weights = np.zeros(query.shape), np.zeros((batch, heads, length, key.shape[1]))
    for b in range(batch):
        for n in range(heads):
            keys, values = key[b, :, n // groups], value[b, :, n // groups]
            scores = query[b, :, n] @ keys.T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[b if bias.shape[0] > 1 else 0, n]
            for t in range(length):
                row = softmax_row(scores[t], visible[b, n, t], None if sink is None else sink[n])
                weights[b, n, t] = row
                out[b, t, n] = row[visible[b, n, t]] @ values[visible[b, n, t]]
    return out, weights


def may_see(
    real_q, real_k, segments_q=None, segments_k=None, causal=False, window=None, prefix=None
):
    """(B, 1, T, S) by asking for every pair; rows are counted from their first column."""
    batch, length = real_q.shape
    seen = np.zeros((batch, 1, length, real_k.shape[1]), dtype=bool)
    for b in range(batch):
        rank = np.cumsum(real_k[b]) - 1
        for t in range(length):
            for s in range(real_k.shape[1]):
                ok = bool(real_k[b, s])
                if causal and s > t:
                    ok = ok and prefix is not None and rank[s] < prefix[b]
                if window is not None:
                    ok = ok and abs(s - t) < window
                if segments_q is not None:
                    ok = ok and segments_q[b, t] == segments_k[b, s]
                seen[b, 0, t, s] = ok
    return seen


def positions_of(real, segments=None):
    out = np.zeros(real.shape, dtype=int)
    for b in range(real.shape[0]):
        seen = {}
        for t in range(real.shape[1]):
            document = 0 if segments is None else int(segments[b, t])
            out[b, t] = max(seen.get(document, 0) - (0 if real[b, t] else 1), 0)
            seen[document] = seen.get(document, 0) + int(real[b, t])
    return out


def erf(x):
    return np.vectorize(math.erf)(x)


def activation(x, name):
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "gelu":
        return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1.0 + np.exp(-x))


def norm(x, w, path, kind, epsilon):
    if kind == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w[path + "/scale"]
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return y * w[path + "/gamma"] + w.get(path + "/beta", 0.0)


def dense(x, w, path):
    return x @ w[path + "/kernel"] + w.get(path + "/bias", 0.0)


def sinusoid(positions, width, layout):
    out = np.zeros((*positions.shape, width))
    sines = (width + 1) // 2
    if layout == "spread":  # an odd width leaves the last column as it is
        half = width // 2
        for pair in range(half):
            phase = positions * math.exp(-math.log(10000.0) * pair / (half - 1))
            out[..., pair], out[..., half + pair] = np.sin(phase), np.cos(phase)
        return out
    for column in range(width):
        pair = column // 2 if layout == "interleaved" else column % sines
        is_sine = column % 2 == 0 if layout == "interleaved" else column < sines
        phase = positions / 10000.0 ** (2 * pair / width)
        out[..., column] = np.sin(phase) if is_sine else np.cos(phase)
    return out


def rotate(x, positions, base, turning, layout):
    """x (B, T, N, H): complex multiplication of each pair."""
    out = x.copy()
    for i in range(turning // 2):
        first, second = (i, i + turning // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = positions * base ** (-2.0 * i / turning)
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, :, None]
        out[..., first], out[..., second] = turned.real, turned.imag
    return out


def alibi_slopes(heads):
    """The published recipe, recursively."""
    if math.log2(heads).is_integer():
        start = 2.0 ** (-(2.0 ** -(math.log2(heads) - 3)))
        return [start ** (i + 1) for i in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def relative_bucket(distance, buckets, reach, bidirectional):
    """T5's bucket of one distance (key − query)."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    log = math.log(distance / exact) / math.log(reach / exact) * (buckets - exact)
    return start + min(exact + int(log + 1e-9), buckets - 1)


def score_bias(config, w, stack, positions, causal):
    """(B, N, T, S), or None."""
    if config.position not in ("alibi", "relative"):
        return None
    batch, length = positions.shape
    out = np.zeros((batch, config.num_heads, length, length))
    slopes = alibi_slopes(config.num_heads)
    for b in range(batch):
        for t in range(length):
            for s in range(length):
                distance = int(positions[b, s] - positions[b, t])
                if config.position == "alibi":
                    out[b, :, t, s] = [-slope * abs(distance) for slope in slopes]
                else:
                    bucket = relative_bucket(
                        distance, config.relative_buckets, config.relative_distance, not causal
                    )
                    out[b, :, t, s] = w[f"{stack}/relative_bias/table/embeddings"][bucket]
    return out


def multi_head(x, context, c, w, path, visible, positions=None, bias=None, key_positions=None):
    """The layer's output, and what its gradient needs: the heads of all three, and the weights."""
    width, heads, groups = c.head_width, c.num_heads, c.key_value_heads
    key_positions = positions if key_positions is None else key_positions

    def project(a, name, number, at):
        out = dense(a, w, f"{path}/{name}").reshape(*a.shape[:2], number, width)
        if c.qk_norm and name != "value":
            out = norm(out, w, f"{path}/{name}_norm", "rms", c.norm_epsilon)
        if c.position == "rotary" and at is not None and name != "value":
            turning, layout = c.rotary_dim or width, c.position_layout or "half"
            out = rotate(out, at, c.rotary_base, turning, layout)
        return out

    query = project(x, "query", heads, positions)
    key, value = (project(context, name, groups, key_positions) for name in ("key", "value"))
    scale = width**-0.5 if c.attention_scale is None else c.attention_scale
    visible = np.broadcast_to(visible, (x.shape[0], heads, x.shape[1], context.shape[1]))
    rest = scale, c.logit_softcap, w.get(path + "/sink")
    out, weights = attention(query, key, value, visible, bias, *rest)
    out = out.reshape(*x.shape[:2], heads * width)
    return dense(out, w, path + "/output"), (query, key, value, weights, out)


def feed_forward(x, c, w, path, real):
    if not c.num_experts:
        inner = activation(dense(x, w, path + ("/gate" if c.gated else "/up")), c.activation)
        inner = inner * dense(x, w, path + "/up") if c.gated else inner
        return dense(inner, w, path + "/down")
    out = np.zeros(x.shape)
    for index in zip(*np.nonzero(real), strict=True):  # padding is not routed
        h = x[index]
        logits = h @ w[path + "/router/kernel"]
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        best = np.argsort(-chances, kind="stable")[: c.experts_per_token]
        total = chances[best].sum() if c.experts_per_token > 1 else 1.0
        for e in best:
            inner = activation(h @ w[path + ("/gate" if c.gated else "/up")][e], c.activation)
            inner = inner * (h @ w[path + "/up"][e]) if c.gated else inner
            out[index] += chances[e] / total * (inner @ w[path + "/down"][e])
    return out


def residual(x, f, c, w, path):
    """x and a sublayer f in the norm placement of the config."""
    kind = c.norm, c.norm_epsilon
    before = norm(x, w, path + "/before", *kind) if c.norm_placement != "post" else x
    y = f(before)
    if c.norm_placement == "sandwich":
        y = norm(y, w, path + "/inside", *kind)
    x = x + y
    return norm(x, w, path + "/after", *kind) if c.norm_placement == "post" else x


def block(x, c, w, path, real, visible, positions, bias, memory=None, memory_visible=None):
    def to_self(h):
        return multi_head(h, h, c, w, path + "/self_attention", visible, positions, bias)[0]

    def to_memory(h):
        return multi_head(h, memory, c, w, path + "/cross_attention", memory_visible)[0]

    x = residual(x, to_self, c, w, path + "/self_attention_norm")
    if memory is not None:
        x = residual(x, to_memory, c, w, path + "/cross_attention_norm")

    def inner(h):
        return feed_forward(h, c, w, path + "/feed_forward", real)

    return residual(x, inner, c, w, path + "/feed_forward_norm")


def as_inputs(inputs, c, is_target=False):
    """ids, real, segments, positions, prefix of a model's inputs."""
    given = inputs if isinstance(inputs, dict) else {"ids": inputs}
    ids = np.asarray(given["ids"])
    real = np.ones(ids.shape, bool) if c.pad_id is None else ids != c.pad_id
    if is_target and c.bos_id is not None and c.bos_id == c.pad_id:
        real[:, 0] = True
    if "padding_mask" in given:
        real = np.asarray(given["padding_mask"])
    segments = given.get("segments")
    if segments is not None:
        real = real & (np.asarray(segments) > 0)
    positions = given.get("positions")
    positions = positions_of(real, segments) if positions is None else np.asarray(positions)
    return ids, real, segments, positions, given


def stack(inputs, c, w, name, layers, causal, memory=None, memory_real=None, table=None):
    """Hidden states of a stack, and which of its tokens are real."""
    ids, real, segments, positions, given = as_inputs(inputs, c, is_target=memory is not None)
    x = w[table or f"{name}/embedding/table/embeddings"][ids]
    x = x * math.sqrt(c.hidden_dim) if c.scale_embeddings else x
    if c.token_types and memory is None:
        x = x + w[f"{name}/token_types/embeddings"][given.get("token_types", np.zeros_like(ids))]
    if c.position == "sinusoidal":
        layout = c.position_layout or "interleaved"
        x = x + sinusoid(positions + c.position_offset, c.hidden_dim, layout)
    if c.position == "learned":
        x = x + w[f"{name}/positions/table/embeddings"][positions + c.position_offset]
    x = np.where(real[..., None], x, 0.0)
    if c.embedding_norm:
        x = norm(x, w, f"{name}/embedding_norm", c.norm, c.norm_epsilon)
    bias = score_bias(c, w, name, positions, causal)
    for i in range(layers):
        seen = may_see(real, real, segments, segments, causal, c.window_of(i), given.get("prefix"))
        across = None
        if memory is not None:
            across = may_see(real, memory_real)
        x = block(x, c, w, f"{name}/block_{i}", real, seen, positions, bias, memory, across)
    if c.has_final_norm:
        x = norm(x, w, f"{name}/final_norm", c.norm, c.norm_epsilon)
    return x, real


def vocabulary_logits(x, c, w, model, table):
    x = x if c.output_scale is None else x * c.output_scale
    if not c.tie_embeddings:
        return dense(x, w, f"{model}/head")
    return x @ w[table].T + w.get(f"{model}/output_bias/bias", 0.0)


def seq2seq(inputs, c, w):
    memory, memory_real = stack(inputs["source"], c, w, "encoder", c.encoder_layers, False)
    shared = c.target_vocabulary_size is None
    table = "encoder/embedding/table/embeddings" if shared else "decoder/embedding/table/embeddings"
    args = c, w, "decoder", c.num_layers, True, memory, memory_real, table
    return stack(inputs["target"], *args)[0], table


def pool(x, real, mode, query=None):
    out = np.zeros((x.shape[0], x.shape[2]))
    for b in range(x.shape[0]):
        rows = x[b][real[b]]
        if not len(rows):
            continue
        if mode == "attention":
            weights = softmax_row(rows @ query * x.shape[2] ** -0.5, np.ones(len(rows), bool))
            out[b] = weights @ rows
        else:
            out[b] = {"mean": rows.mean(0), "first": rows[0], "last": rows[-1]}[mode]
    return out


def model_output(kind, c, w, inputs, pooling="mean", causal=False):
    """The output of a kformer model by the name of its class."""
    if kind in ("Seq2Seq", "Seq2SeqLM"):
        x, table = seq2seq(inputs, c, w)
        return x if kind == "Seq2Seq" else vocabulary_logits(x, c, w, "seq2seq_lm", table)
    causal = causal or kind in ("Decoder", "CausalLM")
    name = "decoder" if causal else "encoder"
    x, real = stack(inputs, c, w, name, c.num_layers, causal)
    if kind == "TextClassifier":
        x = pool(x, real, pooling, w.get("text_classifier/pooling/query"))
        x = np.tanh(dense(x, w, "encoder/pooler")) if c.pooler and pooling == "first" else x
        return dense(x, w, "text_classifier/classifier")
    if kind == "TokenClassifier":
        return dense(x, w, "token_classifier/classifier")
    if kind == "MaskedLM":
        x = activation(dense(x, w, "masked_lm/transform"), c.activation)
        x = norm(x, w, "masked_lm/transform_norm", c.norm, c.norm_epsilon)
    if kind in ("MaskedLM", "CausalLM"):
        model = "masked_lm" if kind == "MaskedLM" else "causal_lm"
        return vocabulary_logits(x, c, w, model, f"{name}/embedding/table/embeddings")
    return x


def crossentropy(logits, labels, counts, smoothing=0.0):
    """The mean over the counted tokens."""
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    total = 0.0
    for index in zip(*np.nonzero(counts), strict=True):
        target = np.full(logits.shape[-1], smoothing / logits.shape[-1])
        target[labels[index]] += 1.0 - smoothing
        total -= (target * logs[index]).sum()
    return total / max(counts.sum(), 1)
