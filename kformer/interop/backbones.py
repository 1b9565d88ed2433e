"""Backbones of keras-nlp (today keras-hub) as kformer's models, weights and all.

Their layers are made in a fixed order, so each table lists kformer's parts in that order; names
would not do, because keras-hub numbers layers anew in every process. A weight goes where its part
says if its last name and its size fit, and no weight may be left over.
"""

import math

import numpy as np

from kformer import backend
from kformer.config import Config
from kformer.interop.header import brief
from kformer.interop.loading import MODELS, made_with
from kformer.weights import weight_shapes

ATTENTION = ("query", "key", "value", "output")
# What keras-hub calls the last part of a name → what kformer does.
LEAVES = {"weight": "scale", "reverse_embeddings": "kernel"}


def within(name, *parts):
    return tuple(f"{name}/{part}" for part in parts)


SELF, CROSS = within("self_attention", *ATTENTION), within("cross_attention", *ATTENTION)
UP, GATE, DOWN = "feed_forward/up", "feed_forward/gate", "feed_forward/down"
NORMS = {
    name: (
        f"self_attention_norm/{name}",
        f"cross_attention_norm/{name}",
        f"feed_forward_norm/{name}",
    )
    for name in ("before", "after")
}
SELF_BEFORE, CROSS_BEFORE, FEED_BEFORE = NORMS["before"]
SELF_AFTER, CROSS_AFTER, FEED_AFTER = NORMS["after"]

BERT_BLOCK = (*SELF, SELF_AFTER, FEED_AFTER, UP, DOWN)
LLAMA_BLOCK = (*SELF, SELF_BEFORE, UP, GATE, DOWN, FEED_BEFORE)
BART_DECODER = (*SELF, SELF_AFTER, *CROSS, CROSS_AFTER, UP, DOWN, FEED_AFTER)


def of_side(side, parts):
    return tuple(f"{side}/{part}" for part in parts)


def blocks(number, parts, side=None):
    names = [f"block_{i}/{part}" for i in range(number) for part in parts]
    return of_side(side, names) if side else tuple(names)


def bert(c):
    """(task, fields of the Config, parts in order) of a configuration of keras-hub."""
    fields = common(c, "post", "gelu_tanh") | learned(c, embedding_norm=True, norm_epsilon=1e-12)
    fields |= dict(token_types=c["num_segments"], pooler=True, pad_id=0)
    start = ("embedding/table", "positions/table", "token_types", "embedding_norm")
    return "encoder", fields, (*start, *blocks(c["num_layers"], BERT_BLOCK), "pooler")


def roberta(c):
    fields = common(c, "post", "gelu") | learned(c, embedding_norm=True) | dict(pad_id=1)
    start = ("embedding/table", "positions/table", "embedding_norm")
    return "encoder", fields, (*start, *blocks(c["num_layers"], BERT_BLOCK))


def gpt2(c):
    fields = common(c, "pre", "gelu_tanh") | learned(c) | dict(pad_id=None)
    block = (*SELF, SELF_BEFORE, UP, DOWN, FEED_BEFORE)
    parts = ("embedding/table", "positions/table", *blocks(c["num_layers"], block), "final_norm")
    return "decoder", fields, parts


def llama(c):
    fields = common(c, "pre", "silu") | dict(
        num_heads=c["num_query_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        gated=True,
        norm="rms",
        norm_epsilon=c["layer_norm_epsilon"],
        position="rotary",
        rotary_base=float(c["rope_max_wavelength"]),
        rotary_scaling=rotary_scaling(c),
        use_bias=False,
        pad_id=None,
    )
    parts = ("embedding/table", "head", *blocks(c["num_layers"], LLAMA_BLOCK), "final_norm")
    return "decoder", fields, parts


def mistral(c):
    c = c | {"rope_position_scaling_factor": c["rope_scaling_factor"]}
    task, fields, parts = llama(c)
    return task, fields | dict(window=c["sliding_window"], head_dim=c["head_dim"]), parts


def rotary_scaling(c):
    factor = c.get("rope_frequency_adjustment_factor")
    if factor is not None:
        return dict(
            type="llama3",
            factor=float(factor),
            low_freq_factor=float(c["rope_low_freq_factor"]),
            high_freq_factor=float(c["rope_high_freq_factor"]),
            original_max_length=c["rope_pretraining_sequence_length"],
        )
    factor = float(c["rope_position_scaling_factor"])
    return None if factor == 1.0 else dict(type="linear", factor=factor)


def bart(c):
    fields = common(c, "post", "gelu") | learned(c, embedding_norm=True)
    fields |= dict(pad_id=1, bos_id=2, eos_id=2)
    number = c["num_layers"]
    encoder = ("encoder/positions/table", "decoder/positions/table")
    norms = ("encoder/embedding_norm", "decoder/embedding_norm")
    sides = blocks(number, BERT_BLOCK, "encoder"), blocks(number, BART_DECODER, "decoder")
    return "seq2seq", fields, ("encoder/embedding/table", *encoder, *norms, *sides[0], *sides[1])


def t5(c):
    gates = (GATE, UP) if c["use_gated_activation"] else (UP,)
    fields = common(c, "pre", c["activation"]) | dict(
        head_dim=c["key_value_dim"],
        gated=c["use_gated_activation"],
        norm="rms",
        norm_epsilon=c["layer_norm_epsilon"],
        position="relative",
        attention_scale=1.0,
        use_bias=False,
        pad_id=0,
        bos_id=0,
        eos_id=1,
    )
    feed = (*gates, DOWN, FEED_BEFORE)
    parts = ["encoder/embedding/table", "head"]
    for side, middle in (("encoder", ()), ("decoder", (*CROSS, CROSS_BEFORE))):
        block = (*SELF, SELF_BEFORE, *middle, *feed)
        parts += [f"{side}/relative_bias/table"]
        parts += [*blocks(c["num_layers"], block, side), f"{side}/final_norm"]
    return "seq2seq", fields, tuple(parts)


def common(c, placement, activation):
    return dict(
        vocabulary_size=c["vocabulary_size"],
        num_layers=c["num_layers"],
        hidden_dim=c["hidden_dim"],
        num_heads=c.get("num_heads", 1),
        intermediate_dim=c["intermediate_dim"],
        dropout=float(c["dropout"]),
        attention_dropout=float(c["dropout"]),
        norm_placement=placement,
        activation=activation,
    )


def learned(c, **fields):
    return dict(position="learned", max_length=c["max_sequence_length"], **fields)


BACKBONES = {
    "BertBackbone": bert,
    "RobertaBackbone": roberta,
    "GPT2Backbone": gpt2,
    "LlamaBackbone": llama,
    "Llama3Backbone": llama,
    "MistralBackbone": mistral,
    "BartBackbone": bart,
    "T5Backbone": t5,
}


def from_keras_hub(backbone, task=None):
    """A backbone of keras-nlp (keras-hub) as a kformer model that gives the same outputs.

        model = kformer.from_keras_hub(keras_nlp.models.BertBackbone.from_preset("..."))

    Args:
        backbone: one of keras-nlp's for BERT, RoBERTa, GPT-2, Llama, Mistral, BART or T5.
        task: "causal_lm" for a decoder with its head on words; None = what the backbone is: an
            `Encoder`, a `Decoder` or a `Seq2Seq`.
    """
    name = type(backbone).__name__
    if name not in BACKBONES:
        raise ValueError(f"backbone must be one of {', '.join(BACKBONES)}, got {name}")
    kind, fields, parts = BACKBONES[name](backbone.get_config())
    if task not in (None, kind) and (task, kind) != ("causal_lm", "decoder"):
        known = f"{kind!r} or 'causal_lm'" if kind == "decoder" else repr(kind)
        raise ValueError(f"task must be {known} for a {name}, got {task!r}")
    untied = any(weight.path.endswith("reverse_embeddings") for weight in backbone.weights)
    config = Config(**fields, tie_embeddings=not untied)
    parts = [part for part in parts if part != "head" or untied]
    values = matched(weight_shapes(config, task or kind), parts, backbone.weights, name)
    return made_with(values, lambda: MODELS[task or kind](config))


def matched(shapes, parts, weights, name):
    """{path: function that gives its value}."""
    leaves = {}
    for path in [*shapes, "head/kernel"]:
        part, _, leaf = path.rpartition("/")
        leaves.setdefault(part, {})[leaf] = path
    expected = [path for part in parts for path in leaves.get(part, {}).values()]
    found = [(w.path.rpartition("/")[2], math.prod(w.shape)) for w in weights]
    wanted = [
        (p.rpartition("/")[2], math.prod(shapes[p]) if p in shapes else None) for p in expected
    ]
    fits = len(found) == len(wanted) and all(
        LEAVES.get(a[0], a[0]) == b[0] and b[1] in (None, a[1])
        for a, b in zip(found, wanted, strict=True)
    )
    if not fits:
        rule = f"the weights of a {name} must be those that kformer knows"
        raise ValueError(f"{rule}, got {brief([w.path for w in weights])}")

    def reader(weight, shape):
        return lambda: np.reshape(backend.to_numpy(weight.value), shape)

    pairs = zip(expected, weights, strict=True)
    return {path: reader(weight, shapes[path]) for path, weight in pairs if path in shapes}
