"""Every weight of every model: its path and its shape, from the Config alone.

What a model would weigh is counted with it, and a checkpoint is compared with it, before anything
is built.
"""

import math

TASKS = (
    "encoder", "decoder", "seq2seq", "text_classifier", "token_classifier", "masked_lm",
    "causal_lm", "seq2seq_lm",
)  # fmt: skip


def weight_shapes(config, task, num_classes=2, pooling="mean", causal=False) -> dict:
    """{path: shape} of all that a model learns.

    A path is that in the built model without the name of what holds it: "block_0/..." in an
    encoder or decoder, "encoder/block_0/..." in an encoder-decoder, "head/kernel".

    Args:
        task: "encoder", "decoder", "seq2seq", "text_classifier", "token_classifier",
            "masked_lm", "causal_lm" or "seq2seq_lm".
        num_classes, pooling, causal: as the classifiers take them.
    """
    c, width = config, config.hidden_dim
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if task in ("seq2seq", "seq2seq_lm"):
        source = stack(c, c.encoder_layers, c.vocabulary_size, c.token_types)
        target = stack(c, c.num_layers, c.target_vocabulary_size, cross=True)
        shapes = {f"encoder/{path}": shape for path, shape in source.items()}
        shapes |= {f"decoder/{path}": shape for path, shape in target.items()}
        return shapes | (head(c, c.target_size, c.output_bias) if task == "seq2seq_lm" else {})
    shapes = stack(c, c.num_layers, c.vocabulary_size, c.token_types)
    pools = task == "encoder" or task == "text_classifier" and pooling == "first" and not causal
    if c.pooler and pools:
        shapes |= dense("pooler", width, width)
    if task == "text_classifier" and pooling == "attention":
        shapes["pooling/query"] = (width,)
    if task in ("text_classifier", "token_classifier"):
        shapes |= dense("classifier", width, num_classes, task == "token_classifier" or not causal)
    if task == "masked_lm":
        shapes |= dense("transform", width, width, c.use_bias) | norm("transform_norm", c)
        shapes |= head(c, c.vocabulary_size, True)
    if task == "causal_lm":
        shapes |= head(c, c.vocabulary_size, c.output_bias)
    return shapes


def parameter_count(config, task, **arguments) -> int:
    """The exact number of parameters of a model; arguments as in `weight_shapes`."""
    return sum(math.prod(shape) for shape in weight_shapes(config, task, **arguments).values())


def stack(c, layers, vocabulary, token_types=0, cross=False):
    """Embeddings, blocks and final norm; vocabulary None = the embedding is another stack's."""
    width, shapes = c.hidden_dim, {}
    if vocabulary is not None:
        shapes["embedding/table/embeddings"] = (vocabulary, width)
    if c.position == "learned":
        shapes["positions/table/embeddings"] = (c.max_length + c.position_offset, width)
    if token_types:
        shapes["token_types/embeddings"] = (token_types, width)
    if c.embedding_norm:
        shapes |= norm("embedding_norm", c)
    if c.position == "relative":
        shapes["relative_bias/table/embeddings"] = (c.relative_buckets, c.num_heads)
    one = block(c, cross)
    for i in range(layers):
        shapes |= {f"block_{i}/{path}": shape for path, shape in one.items()}
    return shapes | (norm("final_norm", c) if c.has_final_norm else {})


def block(c, cross=False):
    shapes = attention("self_attention", c) | add_norm("self_attention_norm", c)
    if c.attention_sinks:
        shapes["self_attention/sink"] = (c.num_heads,)
    if cross:
        shapes |= attention("cross_attention", c) | add_norm("cross_attention_norm", c)
    return shapes | feed_forward("feed_forward", c) | add_norm("feed_forward_norm", c)


def attention(path, c):
    width, inner, keys = c.hidden_dim, c.num_heads * c.head_width, c.key_value_heads * c.head_width
    shapes = {}
    for name, size in (("query", inner), ("key", keys), ("value", keys)):
        shapes |= dense(f"{path}/{name}", width, size, c.has_qkv_bias)
    shapes |= dense(f"{path}/output", inner, width, c.use_bias)
    if c.qk_norm:
        shapes |= {f"{path}/{name}_norm/scale": (c.head_width,) for name in ("query", "key")}
    return shapes


def feed_forward(path, c):
    """One feed-forward network, or the router and all experts."""
    width, inner, experts = c.hidden_dim, c.inner_dim, c.num_experts
    ups = ["up", "gate"] if c.gated else ["up"]
    if not experts:
        shapes = {}
        for name in ups:
            shapes |= dense(f"{path}/{name}", width, inner, c.use_bias)
        return shapes | dense(f"{path}/down", inner, width, c.use_bias)
    shapes = {f"{path}/{name}": (experts, width, inner) for name in ups}
    shapes[f"{path}/down"] = (experts, inner, width)
    if c.expert_bias:
        shapes[f"{path}/choice_bias"] = (experts,)
    return shapes | dense(f"{path}/router", width, experts, False)


def add_norm(path, c):
    places = {"pre": ("before",), "post": ("after",), "sandwich": ("before", "inside")}
    shapes = {}
    for place in places[c.norm_placement]:
        shapes |= norm(f"{path}/{place}", c)
    return shapes


def norm(path, c):
    width = (c.hidden_dim,)
    if c.norm == "rms":
        return {f"{path}/scale": width}
    return {f"{path}/gamma": width} | ({f"{path}/beta": width} if c.use_bias else {})


def dense(path, width, units, use_bias=True):
    return {f"{path}/kernel": (width, units)} | ({f"{path}/bias": (units,)} if use_bias else {})


def head(c, vocabulary, bias):
    """The logits of a vocabulary: a projection, or the embedding and perhaps a bias."""
    if not c.tie_embeddings:
        return dense("head", c.hidden_dim, vocabulary, bias)
    return {"output_bias/bias": (vocabulary,)} if bias else {}


def path_in(model, path):
    """The path of a weight of a built model as `weight_shapes` writes it."""
    holder, _, rest = path.partition("/")
    return path if model.has_source and holder in ("encoder", "decoder") else rest
