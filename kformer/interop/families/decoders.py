"""GPT-2, and Llama and its kin: decoders with the norm before each sublayer."""

from kformer.config import check_whole
from kformer.interop.family import Family
from kformer.interop.header import CheckpointError, brief
from kformer.interop.rotary import read_rotary, write_rotary

SIDE_BY_SIDE = " ".join(f"block_{{i}}/self_attention/{name}" for name in ("query", "key", "value"))
GPT2 = Family(
    model_type="gpt2",
    architectures={
        "GPT2LMHeadModel": "causal_lm",
        "GPT2Model": "decoder",
        "GPT2ForSequenceClassification": "text_classifier",
        "GPT2ForTokenClassification": "token_classifier",
    },
    fields={
        "vocabulary_size": ("vocab_size",),
        "num_layers": ("n_layer",),
        "hidden_dim": ("n_embd",),
        "num_heads": ("n_head",),
        "intermediate_dim": ("n_inner", None),
        "activation": ("activation_function", "gelu_new"),
        "dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "max_length": ("n_positions", 1024),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "tie_embeddings": ("tie_word_embeddings", True),
        "pad_id": ("pad_token_id", None),
        "bos_id": ("bos_token_id", 50256),
        "eos_id": ("eos_token_id", 50256),
    },
    always=dict(position="learned"),
    must={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "is_encoder_decoder": (False,),
    },
    write=lambda config, task: {"embd_pdrop": config.dropout},
    base="transformer.",
    parts={
        "embedding/table": "wte",
        "positions/table": "wpe",
        SIDE_BY_SIDE: "h.{i}.attn.c_attn",
        "block_{i}/self_attention/output": "h.{i}.attn.c_proj",
        "block_{i}/self_attention_norm/before": "h.{i}.ln_1",
        "block_{i}/feed_forward/up": "h.{i}.mlp.c_fc",
        "block_{i}/feed_forward/down": "h.{i}.mlp.c_proj",
        "block_{i}/feed_forward_norm/before": "h.{i}.ln_2",
        "final_norm": "ln_f",
    },
    heads={
        "causal_lm": {"head": "lm_head"},
        "text_classifier": {"classifier": "score"},
        "token_classifier": {"classifier": "classifier"},
    },
    same=(("transformer.wte.weight", "lm_head.weight"),),
    transposed=False,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)  # fmt: skip

ATTENTION = {
    "embedding/table": "embed_tokens",
    "block_{i}/self_attention/query": "layers.{i}.self_attn.q_proj",
    "block_{i}/self_attention/key": "layers.{i}.self_attn.k_proj",
    "block_{i}/self_attention/value": "layers.{i}.self_attn.v_proj",
    "block_{i}/self_attention/output": "layers.{i}.self_attn.o_proj",
    "block_{i}/self_attention_norm/before": "layers.{i}.input_layernorm",
    "block_{i}/feed_forward_norm/before": "layers.{i}.post_attention_layernorm",
    "final_norm": "norm",
}
FEED_FORWARD = {
    "block_{i}/feed_forward/gate": "layers.{i}.mlp.gate_proj",
    "block_{i}/feed_forward/up": "layers.{i}.mlp.up_proj",
    "block_{i}/feed_forward/down": "layers.{i}.mlp.down_proj",
}
FIELDS = {
    "vocabulary_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers",),
    "hidden_dim": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "intermediate_dim": ("intermediate_size",),
    "activation": ("hidden_act", "silu"),
    "attention_dropout": ("attention_dropout", 0.0),
    "max_length": ("max_position_embeddings", 2048),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "pad_id": ("pad_token_id", None),
    "bos_id": ("bos_token_id", None),
    "eos_id": ("eos_token_id", None),
}
NO_SOURCE = {"is_encoder_decoder": (False,)}


def read_llama(hf, fields):
    """Rotary positions; biases, which kformer has in attention or in both kinds of sublayer."""
    read_positions(hf, fields)
    attention, feed_forward = hf.pop("attention_bias", False), hf.pop("mlp_bias", False)
    if attention is not feed_forward:
        rule = "attention_bias and mlp_bias must be both true or both false"
        raise CheckpointError(f"{rule}, got {brief(attention)} and {brief(feed_forward)}")
    fields["use_bias"] = attention


def read_positions(hf, fields, base=10000.0):
    width = fields["head_dim"]
    if width is None:
        width = fields["hidden_dim"] // fields["num_heads"]
    # a scaling may stand on the length that the Config has taken
    fields |= read_rotary(hf | {"max_position_embeddings": fields["max_length"]}, width, base)
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        hf.pop(key, None)


def write_llama(config, task):
    bias = {"attention_bias": config.use_bias, "mlp_bias": config.use_bias}
    return write_rotary(config) | bias


def read_window(hf, fields):
    """The window of Mistral and Mixtral, of all layers."""
    check_whole(1, num_local_experts=fields.get("num_experts", 1))
    read_positions(hf, fields, 1000000.0 if "num_experts" in fields else 10000.0)
    fields["window"] = hf.pop("sliding_window", None if "num_experts" in fields else 4096)


def write_window(config, task):
    window = config.window[0] if isinstance(config.window, tuple) else config.window
    return write_rotary(config) | {"sliding_window": window}


def read_qwen(hf, fields):
    """Some of the layers have the window: those that `layer_types` says, or the upper ones."""
    read_positions(hf, fields)
    layers = fields["num_layers"]
    sliding = hf.pop("use_sliding_window", False)
    window, first = hf.pop("sliding_window", 4096), hf.pop("max_window_layers", 28)
    kinds = hf.pop("layer_types", None)
    check_whole(0, max_window_layers=first)
    if not isinstance(sliding, bool):
        raise CheckpointError(f"use_sliding_window must be true or false, got {brief(sliding)}")
    if kinds is None:
        full, half = "full_attention", "sliding_attention"
        kinds = [half if sliding and i >= first else full for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    named = isinstance(kinds, list) and all(kind in list(known) for kind in kinds)
    if not named or len(kinds) != layers:
        rule = f"layer_types must name {layers} layers, each {' or '.join(known)}"
        raise CheckpointError(f"{rule}, got {brief(kinds)}")
    windows = tuple(known[kind] for kind in kinds)
    fields["window"] = windows if any(windows) else None


def write_qwen(config, task):
    windows = [config.window_of(i) for i in range(config.num_layers)]
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    window = next((w for w in windows if w), None)
    more = {"sliding_window": window, "use_sliding_window": window is not None}
    first = next((i for i, w in enumerate(windows) if w), config.num_layers)
    return write_rotary(config) | more | {"layer_types": kinds, "max_window_layers": first}


def llama_like(model_type, name, **table):
    """A family of Llama's kin: what is given here differs."""
    given = dict(
        model_type=model_type,
        architectures={
            f"{name}ForCausalLM": "causal_lm",
            f"{name}Model": "decoder",
            f"{name}ForSequenceClassification": "text_classifier",
            f"{name}ForTokenClassification": "token_classifier",
        },
        fields=FIELDS,
        must=NO_SOURCE,
        base="model.",
        parts=ATTENTION | FEED_FORWARD,
        heads={
            "causal_lm": {"head": "lm_head"},
            "text_classifier": {"classifier": "score"},
            "token_classifier": {"classifier": "score"},
        },
        same=(("model.embed_tokens.weight", "lm_head.weight"),),
    )
    always = dict(norm="rms", position="rotary", gated=True, use_bias=False)
    return Family(**{**given, **table, "always": always | table.get("always", {})})


LLAMA = llama_like(
    "llama",
    "Llama",
    fields=FIELDS | {"bos_id": ("bos_token_id", 1), "eos_id": ("eos_token_id", 2)},
    read=read_llama,
    write=write_llama,
)
MISTRAL_FIELDS = LLAMA.fields | {
    "num_key_value_heads": ("num_key_value_heads", 8),
    "max_length": ("max_position_embeddings", 131072),
}
MISTRAL = llama_like(
    "mistral", "Mistral", fields=MISTRAL_FIELDS, read=read_window, write=write_window
)
MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    fields=MISTRAL_FIELDS | {
        "norm_epsilon": ("rms_norm_eps", 1e-5),
        "num_experts": ("num_local_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
        "expert_balance": ("router_aux_loss_coef", 0.001),
    },
    always=dict(expert_z=0.0),
    read=read_window,
    write=write_window,
    parts=ATTENTION | {
        "block_{i}/feed_forward/router": "layers.{i}.block_sparse_moe.gate",
        "block_{i}/feed_forward/gate": "layers.{i}.block_sparse_moe.experts.{e}.w1",
        "block_{i}/feed_forward/down": "layers.{i}.block_sparse_moe.experts.{e}.w2",
        "block_{i}/feed_forward/up": "layers.{i}.block_sparse_moe.experts.{e}.w3",
    },
)  # fmt: skip
QWEN_FIELDS = FIELDS | {"max_length": ("max_position_embeddings", 32768)}
QWEN2 = llama_like(
    "qwen2",
    "Qwen2",
    fields={name: key for name, key in QWEN_FIELDS.items() if name != "head_dim"},
    always=dict(qkv_bias=True, head_dim=None),
    read=read_qwen,
    write=write_qwen,
)
QWEN3 = llama_like(
    "qwen3",
    "Qwen3",
    fields=QWEN_FIELDS | {"head_dim": ("head_dim", 128)},
    always=dict(qk_norm=True),
    must=NO_SOURCE | {"attention_bias": (False,)},
    read=read_qwen,
    write=write_qwen,
    parts=ATTENTION | FEED_FORWARD | {
        "block_{i}/self_attention/query_norm": "layers.{i}.self_attn.q_norm",
        "block_{i}/self_attention/key_norm": "layers.{i}.self_attn.k_norm",
    },
)  # fmt: skip


def read_gemma(hf, fields):
    """Before its activation was called by name, "gelu" meant the approximation."""
    read_positions(hf, fields)
    named = hf.pop("hidden_activation", None)
    if named not in (None, "gelu_pytorch_tanh"):
        rule = "hidden_activation must be 'gelu_pytorch_tanh'"
        raise CheckpointError(f"{rule}, got {brief(named)}")
    if fields["activation"] == "gelu":
        fields["activation"] = "gelu_tanh"


GEMMA = llama_like(
    "gemma",
    "Gemma",
    fields=FIELDS | {
        "num_key_value_heads": ("num_key_value_heads", 16),
        "head_dim": ("head_dim", 256),
        "activation": ("hidden_act", "gelu_pytorch_tanh"),
        "max_length": ("max_position_embeddings", 8192),
        "tie_embeddings": ("tie_word_embeddings", True),
        "pad_id": ("pad_token_id", 0),
        "bos_id": ("bos_token_id", 2),
        "eos_id": ("eos_token_id", 1),
    },
    always=dict(scale_embeddings=True),
    must=NO_SOURCE | {
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    read=read_gemma,
    write=lambda config, task: write_rotary(config),
    shift=1.0,
)  # fmt: skip
