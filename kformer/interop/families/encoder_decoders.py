"""T5, and BART and its kin: an encoder and a decoder on one embedding."""

from kformer.interop.family import ACTIVATIONS, Family, read_activation
from kformer.interop.header import CheckpointError, brief

SOURCE = {"is_encoder_decoder": (True,)}


def t5_stack(side, feed_forward):
    """Parts of T5's encoder or decoder; its feed-forward is sublayer 1 or 2."""
    block, layer = f"{side}/block_{{i}}/", f"{side}.block.{{i}}.layer."
    parts = {
        f"{side}/relative_bias/table": layer.format(i=0)
        + "0.SelfAttention.relative_attention_bias",
        f"{side}/final_norm": f"{side}.final_layer_norm",
        block + "self_attention_norm/before": layer + "0.layer_norm",
        block + "cross_attention_norm/before": layer + "1.layer_norm",
        block + "feed_forward_norm/before": layer + f"{feed_forward}.layer_norm",
        block + "feed_forward/down": layer + f"{feed_forward}.DenseReluDense.wo",
    }
    for name in ("query", "key", "value", "output"):
        parts[block + f"self_attention/{name}"] = layer + f"0.SelfAttention.{name[0]}"
        parts[block + f"cross_attention/{name}"] = layer + f"1.EncDecAttention.{name[0]}"
    return parts


T5_UP = {
    f"{side}/block_{{i}}/feed_forward/up": f"{side}.block.{{i}}.layer.{number}.DenseReluDense.wi"
    for side, number in (("encoder", 1), ("decoder", 2))
}
T5_GATED = {part: module + "_1" for part, module in T5_UP.items()}
T5_GATED |= {part.replace("/up", "/gate"): module + "_0" for part, module in T5_UP.items()}


def read_t5(hf, fields):
    """What the feed-forward does; the factor before the logits, which 1.1 has not: there
    `tie_word_embeddings` is false, or, in files of late, `scale_decoder_outputs`."""
    kind = hf.pop("feed_forward_proj", "relu")
    gated, _, name = kind.rpartition("-") if isinstance(kind, str) else ("?", "", kind)
    if gated not in ("", "gated") or kind == f"-{name}":
        raise CheckpointError(f"feed_forward_proj must be a name or gated-name, got {brief(kind)}")
    fields["gated"] = gated == "gated"
    fields["activation"] = read_activation("feed_forward_proj", name)
    if kind == "gated-gelu":  # which has always meant the approximation
        fields["activation"] = "gelu_tanh"
    tied = hf.pop("tie_word_embeddings", True)
    scaled = hf.pop("scale_decoder_outputs", tied)
    if not isinstance(scaled, bool):
        raise CheckpointError(f"scale_decoder_outputs must be true or false, got {brief(scaled)}")
    fields["output_scale"] = fields["hidden_dim"] ** -0.5 if scaled else None
    fields["tie_embeddings"] = tied
    if fields["num_layers"] is None:
        fields["num_layers"] = fields["num_encoder_layers"]


def write_t5(config, task):
    name = ACTIVATIONS[config.activation][0]
    if config.gated:
        name = "gated-gelu" if config.activation == "gelu_tanh" else f"gated-{name}"
    scaled = config.output_scale is not None
    tied = config.tie_embeddings
    return {"feed_forward_proj": name, "tie_word_embeddings": tied, "scale_decoder_outputs": scaled}


T5 = Family(
    model_type="t5",
    architectures={
        "T5ForConditionalGeneration": "seq2seq_lm",
        "T5WithLMHeadModel": "seq2seq_lm",
        "T5Model": "seq2seq",
    },
    fields={
        "vocabulary_size": ("vocab_size",),
        "num_encoder_layers": ("num_layers",),
        "num_layers": ("num_decoder_layers", None),
        "hidden_dim": ("d_model",),
        "num_heads": ("num_heads",),
        "head_dim": ("d_kv",),
        "intermediate_dim": ("d_ff",),
        "relative_buckets": ("relative_attention_num_buckets", 32),
        "relative_distance": ("relative_attention_max_distance", 128),
        "dropout": ("dropout_rate", 0.1),
        "norm_epsilon": ("layer_norm_epsilon", 1e-6),
        "pad_id": ("pad_token_id", 0),
        "bos_id": ("decoder_start_token_id", 0),
        "eos_id": ("eos_token_id", 1),
    },
    always=dict(norm="rms", position="relative", attention_scale=1.0, use_bias=False),
    must=SOURCE,
    silent=("bos_token_id", "dense_act_fn", "is_gated_act", "n_positions"),
    parts={"encoder/embedding/table": "shared"}
    | t5_stack("encoder", 1) | t5_stack("decoder", 2) | T5_UP,
    gated=T5_GATED,
    heads={"seq2seq_lm": {"head": "lm_head"}},
    same=(
        (
            "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
            "lm_head.weight",
        ),
    ),
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    read=read_t5,
    write=write_t5,
)  # fmt: skip


def bart_stack(side, norm):
    """Parts of an encoder or decoder of BART's kin; norm: "before" or "after" the sublayers."""
    block, layer = f"{side}/block_{{i}}/", f"{side}.layers.{{i}}."
    parts = {
        block + f"self_attention_norm/{norm}": layer + "self_attn_layer_norm",
        block + f"cross_attention_norm/{norm}": layer + "encoder_attn_layer_norm",
        block + f"feed_forward_norm/{norm}": layer + "final_layer_norm",
        block + "feed_forward/up": layer + "fc1",
        block + "feed_forward/down": layer + "fc2",
    }
    projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    for name, theirs in projections.items():
        parts[block + f"self_attention/{name}"] = layer + f"self_attn.{theirs}"
        parts[block + f"cross_attention/{name}"] = layer + f"encoder_attn.{theirs}"
    return parts


def bart_like(model_type, model, head, norm, parts=None, **table):
    """A family of BART's kin: what is given here differs."""
    tables = [f"model.{side}embed_tokens.weight" for side in ("encoder.", "decoder.")]
    given = dict(
        model_type=model_type,
        architectures={head: "seq2seq_lm", model: "seq2seq"},
        fields=FIELDS,
        must=SOURCE,
        base="model.",
        parts={"encoder/embedding/table": "shared"}
        | bart_stack("encoder", norm)
        | bart_stack("decoder", norm)
        | (parts or {}),
        heads={"seq2seq_lm": {"head": "lm_head", "output_bias/bias": "final_logits_bias"}},
        same=(("model.shared.weight", *tables, "lm_head.weight"),),
        ignored=(r"(model\.)?(en|de)coder\.embed_positions\.weights?",),
        read=read_sides,
        write=write_sides,
    )
    return Family(**{**given, **table})


FIELDS = {
    "vocabulary_size": ("vocab_size",),
    "num_encoder_layers": ("encoder_layers",),
    "num_layers": ("decoder_layers",),
    "hidden_dim": ("d_model",),
    "num_heads": ("encoder_attention_heads",),
    "intermediate_dim": ("encoder_ffn_dim",),
    "activation": ("activation_function", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "max_length": ("max_position_embeddings", 1024),
    "scale_embeddings": ("scale_embedding", False),
    "tie_embeddings": ("tie_word_embeddings", True),
    "pad_id": ("pad_token_id", 1),
    "bos_id": ("decoder_start_token_id", 2),
    "eos_id": ("eos_token_id", 2),
}


def read_sides(hf, fields):
    """Both sides must have the same widths, as in kformer."""
    keys = dict(
        num_heads="decoder_attention_heads",
        intermediate_dim="decoder_ffn_dim",
        vocabulary_size="decoder_vocab_size",
    )
    for name, key in keys.items():
        if (value := hf.pop(key, fields[name])) != fields[name]:
            rule = f"{key} must be that of the encoder, {brief(fields[name])}"
            raise CheckpointError(f"{rule}, got {brief(value)}")
    hf.pop("num_hidden_layers", None)  # the encoder's, once more


def write_sides(config, task):
    sizes = {"decoder_attention_heads": config.num_heads, "decoder_ffn_dim": config.inner_dim}
    return sizes | {"num_hidden_layers": config.encoder_layers}


def read_m2m(hf, fields):
    read_sides(hf, fields)
    fields["position_offset"] = (fields["pad_id"] or 0) + 1


COMMON_SILENT = ("activation_dropout", "bos_token_id", "static_position_embeddings")

BART = bart_like(
    "bart", "BartModel", "BartForConditionalGeneration", "after",
    always=dict(
        norm_placement="post", position="learned", position_offset=2, embedding_norm=True,
        output_bias=True,
    ),
    must=SOURCE | {
        "normalize_before": (False,), "add_final_layer_norm": (False,),
        "normalize_embedding": (True,), "add_bias_logits": (False,),
    },
    silent=(*COMMON_SILENT, "num_hidden_layers", "force_bos_token_to_be_generated"),
    parts={
        f"{side}/{part}": f"{side}.{module}"
        for side in ("encoder", "decoder")
        for part, module in (
            ("embedding_norm", "layernorm_embedding"), ("positions/table", "embed_positions"),
        )
    },
    ignored=(),
)  # fmt: skip
MARIAN = bart_like(
    "marian", "MarianModel", "MarianMTModel", "after",
    fields=FIELDS | {
        "pad_id": ("pad_token_id", 58100),
        "bos_id": ("decoder_start_token_id", 58100),
        "eos_id": ("eos_token_id", 0),
    },
    always=dict(
        norm_placement="post", position="sinusoidal", position_layout="half", output_bias=True
    ),
    must=SOURCE | {
        "normalize_before": (False,), "add_final_layer_norm": (False,),
        "normalize_embedding": (False,), "add_bias_logits": (False,),
        "share_encoder_decoder_embeddings": (True,), "static_position_embeddings": (True,),
    },
    silent=COMMON_SILENT,
)  # fmt: skip
M2M100 = bart_like(
    "m2m_100", "M2M100Model", "M2M100ForConditionalGeneration", "before",
    fields=FIELDS | {
        "activation": ("activation_function", "relu"),
        "attention_dropout": ("attention_dropout", 0.1),
        "scale_embeddings": ("scale_embedding", True),
    },
    always=dict(position="sinusoidal", position_layout="spread"),
    must=SOURCE,
    silent=COMMON_SILENT,
    parts={f"{side}/final_norm": f"{side}.layer_norm" for side in ("encoder", "decoder")},
    read=read_m2m,
)  # fmt: skip
