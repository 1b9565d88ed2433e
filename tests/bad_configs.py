"""Checkpoints whose config.json and tensors do not belong together, or that are no model at all.

name → (family, changes of its config.json, what the error must say), for three families whose
good checkpoints are tiny ones: every number of their config.json, and every flag, is spoiled.
"""

import json

import numpy as np
from checkpoint_support import CONFIG, SHAPES, H, file_of

GONE = object()  # in place of a value: the key is not there
COMMON = dict(vocab_size=11, bos_token_id=1, eos_token_id=2, pad_token_id=0)
BERT = dict(
    **COMMON, model_type="bert", architectures=["BertModel"], hidden_size=8, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=12, hidden_act="gelu", max_position_embeddings=16,
    type_vocab_size=2, layer_norm_eps=1e-12, hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1, position_embedding_type="absolute",
)  # fmt: skip
T5 = dict(
    **COMMON, model_type="t5", architectures=["T5Model"], d_model=8, d_kv=3, d_ff=12, num_layers=1,
    num_decoder_layers=1, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, dropout_rate=0.1, layer_norm_epsilon=1e-6,
    feed_forward_proj="relu", decoder_start_token_id=0, is_encoder_decoder=True,
)  # fmt: skip
LINEARS = {  # of one layer of BERT
    "attention.self.query": (8, 8), "attention.self.key": (8, 8), "attention.self.value": (8, 8),
    "attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12),
}  # fmt: skip
BERT_SHAPES = {
    "embeddings.word_embeddings.weight": (11, 8),
    "embeddings.position_embeddings.weight": (16, 8),
    "embeddings.token_type_embeddings.weight": (2, 8),
    "pooler.dense.weight": (8, 8),
    "pooler.dense.bias": (8,),
}
BERT_SHAPES |= {f"encoder.layer.0.{name}.weight": shape for name, shape in LINEARS.items()}
BERT_SHAPES |= {f"encoder.layer.0.{name}.bias": shape[:1] for name, shape in LINEARS.items()}
BERT_SHAPES |= {
    f"{name}.LayerNorm.{kind}": (8,)
    for name in ("embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output")
    for kind in ("weight", "bias")
}


def t5_side(side, sublayers):
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    shapes = {f"{side}.final_layer_norm.weight": (8,), f"{side}.block.0.{bias}": (8, 2)}
    for number, name in enumerate(sublayers):
        layer = f"{side}.block.0.layer.{number}"
        shapes[f"{layer}.layer_norm.weight"] = (8,)
        if name == "DenseReluDense":
            shapes |= {f"{layer}.{name}.wi.weight": (12, 8), f"{layer}.{name}.wo.weight": (8, 12)}
        else:
            shapes |= {f"{layer}.{name}.{kind}.weight": (6, 8) for kind in "qkv"}
            shapes[f"{layer}.{name}.o.weight"] = (8, 6)
    return shapes


T5_SHAPES = {"shared.weight": (11, 8)}
T5_SHAPES |= t5_side("encoder", ("SelfAttention", "DenseReluDense"))
T5_SHAPES |= t5_side("decoder", ("SelfAttention", "EncDecAttention", "DenseReluDense"))
FAMILIES = {"llama": (CONFIG, SHAPES), "bert": (BERT, BERT_SHAPES), "t5": (T5, T5_SHAPES)}


def checkpoint_of(folder, family):
    """A good checkpoint of a family, in float32."""
    config, shapes = FAMILIES[family]
    random = np.random.default_rng(0)
    made = {name: random.normal(size=shape).astype("<f4") for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(file_of(made))
    return folder


def changed(folder, family, changes):
    """The good checkpoint of a family with a changed config.json."""
    config = FAMILIES[family][0] | changes
    checkpoint_of(folder, family)
    kept = {key: value for key, value in config.items() if value is not GONE}
    (folder / "config.json").write_text(json.dumps(kept))


# Key of a config.json → (field of a Config, the lowest and the highest value it may have).
NUMBERS = {
    "llama": {
        "vocab_size": ("vocabulary_size", 1, 2**24), "hidden_size": ("hidden_dim", 1, 2**16),
        "intermediate_size": ("intermediate_dim", 1, 2**18),
        "num_hidden_layers": ("num_layers", 1, 1024), "num_attention_heads": ("num_heads", 1, 1024),
        "num_key_value_heads": ("num_key_value_heads", 1, 1024), "head_dim": ("head_dim", 1, 2**13),
        "max_position_embeddings": ("max_length", 1, 2**24),
    },
    "bert": {
        "vocab_size": ("vocabulary_size", 1, 2**24), "hidden_size": ("hidden_dim", 1, 2**16),
        "intermediate_size": ("intermediate_dim", 1, 2**18),
        "num_hidden_layers": ("num_layers", 1, 1024), "num_attention_heads": ("num_heads", 1, 1024),
        "max_position_embeddings": ("max_length", 1, 2**24),
        "type_vocab_size": ("token_types", 0, 1024),
    },
    "t5": {
        "vocab_size": ("vocabulary_size", 1, 2**24), "d_model": ("hidden_dim", 1, 2**16),
        "d_ff": ("intermediate_dim", 1, 2**18), "d_kv": ("head_dim", 1, 2**13),
        "num_layers": ("num_encoder_layers", 1, 1024), "num_heads": ("num_heads", 1, 1024),
        "num_decoder_layers": ("num_layers", 1, 1024),
        "relative_attention_num_buckets": ("relative_buckets", 4, 2**12),
        "relative_attention_max_distance": ("relative_distance", 2, 2**24),
    },
}  # fmt: skip
REALS = {
    "llama": {"rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base"},
    "bert": {"layer_norm_eps": "norm_epsilon", "hidden_dropout_prob": "dropout"},
    "t5": {"layer_norm_epsilon": "norm_epsilon", "dropout_rate": "dropout"},
}
FLAGS = {"llama": ("tie_word_embeddings", "attention_bias"), "bert": (), "t5": ()}
SIZES = {
    f"B19 {family}: {key} {value!r:.20}": (
        family, {key: value}, rf"{field} must be from {low} to {high}, got {value}"[:200],
    )
    for family, keys in NUMBERS.items()
    for key, (field, low, high) in keys.items()
    for value in (10**9, 10**12, 10**399, low - 1, -1)
}  # fmt: skip
KINDS = {
    f"B19 {family}: {key} {value!r}": (
        family, {key: value}, rf"{field} must be a whole number, got {shown}",
    )
    for family, keys in NUMBERS.items()
    for key, (field, _, _) in keys.items()
    for value, shown in (
        (1.5, "1.5"), (8.0, "8.0"), (True, "True"), ("8", "'8'"), ([8], r"\[8\]"), ({}, "{}"),
    )
} | {
    f"B19 {family}: {key} {what}": (family, {key: value}, rf"config.json must say '{key}', got")
    for family, keys in NUMBERS.items()
    for key in keys
    for value, what in ((None, "null"), (GONE, "missing"))
    if key in ("vocab_size", "num_layers", "d_kv") or "intermediate" in key or "hidden" in key
}  # fmt: skip
RATES = {
    f"B19 {family}: {key} {value!r:.20}": (
        family, {key: value}, rf"{field} must be (a number.*|in .*), got {shown}",
    )
    for family, keys in REALS.items()
    for key, field in keys.items()
    for value, shown in (
        (10**399, "1000"), (-1, "-1"), (-0.5, "-0.5"), (True, "True"), ("1e-5", "'1e-5'"),
        ([], r"\[\]"), ({}, "{}"),
    )
} | {
    f"B19 {family}: {key} {value!r}": (family, {key: value}, "must be .*[Tt]rue or .*, got")
    for family, keys in FLAGS.items()
    for key in keys
    for value in (0, 1, 0.0, "true", None, [], {})
}  # fmt: skip
KNOWN = "must be one of bert, roberta, .*, got"
UNKNOWN = {
    f"B20 model_type {kind!r:.30}": ("llama", {"model_type": kind}, f"model_type {KNOWN}")
    for kind in ("unknown", "Llama", "llama4", "", "../llama", "os.system", "__class__", None, 1,
                 True, ["llama"], {"llama": 1}, "x" * 10_000)
} | {
    f"B20 architectures {names!r:.30}": (
        "llama", {"architectures": names}, "architectures must be one of LlamaForCausalLM, .*, got",
    )
    for names in (["Unknown"], [], None, "Unknown", 1, [1], [["LlamaModel"]], {"a": 1}, [None],
                  ["LlamaForCausalLM", "LlamaModel"], ["BertModel"], ["os.system"], ["x" * 10_000])
} | {
    f"B20 hidden_act {name!r:.30}": (
        family, {"hidden_act": name}, "hidden_act must be one of relu, gelu, .*, got",
    )
    for family in ("llama", "bert")
    for name in ("unknown", "eval", "", "ReLU", None, 1, True, ["gelu"], {}, "x" * 10_000)
} | {
    f"B20 feed_forward_proj {name!r:.30}": (
        "t5", {"feed_forward_proj": name}, "feed_forward_proj must be .*, got",
    )
    for name in ("unknown", "", "gated-", "-relu", "gated-gated-gelu", None, 1, ["relu"], {})
} | {
    f"B20 {family}: {key}": (family, {key: value}, rf"known keys only, got \['{key:.20}")
    for family in FAMILIES
    for key, value in (
        ("layer_norm_epz", 1e-5), ("code", "x"), ("", 1), ("__class__", "x"), ("use_moe", None),
        ("x" * 300, 1), ("vision_config", {}),
    )
} | {
    f"B20 {family}: {key}": (family, {key: value}, f"{family}: {key} must be .*, got")
    for family in FAMILIES
    for key, value in (
        ("quantization_config", {"quant_method": "gptq"}), ("chunk_size_feed_forward", 1),
        ("is_decoder", True), ("add_cross_attention", True), ("pruned_heads", {"0": [1]}),
        ("is_decoder", 1),
    )
} | {
    f"B20 rope_scaling {value!r:.40}": (
        "llama", {"rope_scaling": value}, "(rope|rotary)_.* must .*, got|rotary_scaling: ",
    )
    for value in (
        0, 1, True, False, "linear", [], ["linear"], {"type": "unknown"}, {"type": 1},
        {"type": None, "factor": 2.0}, {"type": ["linear"]}, {"type": "linear"},
        {"type": "linear", "factor": 0.5},
        {"type": "linear", "factor": "2"}, {"type": "linear", "factor": True}, {"factor": 2.0},
        {"type": "linear", "factor": None}, {"type": "linear", "factor": -1}, {"type": {}},
        {"type": "linear", "factor": 10**399}, {"type": "linear", "factor": 2.0, "more": 1},
        {"type": "linear", "rope_type": "dynamic", "factor": 2.0},
        {"type": "llama3", "factor": 8.0},
        {"type": "yarn", "factor": 2.0, "beta_fast": "x"}, {"type": "longrope", "factor": 2.0},
        {"type": "default", "partial_rotary_factor": "x"},
        {"type": "default", "partial_rotary_factor": 0},
        {"type": "default", "partial_rotary_factor": 10**399},
    )
}  # fmt: skip
PLAIN = dict(attention_bias=GONE, mlp_bias=GONE)
DENSE = PLAIN | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
QWEN = PLAIN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": GONE}
ROBERTA = {"model_type": "roberta", "architectures": ["RobertaModel"]}
CLASSES = {"architectures": ["BertForSequenceClassification"]}


def instead(config, other):
    """Changes that make one config.json of another one."""
    return dict.fromkeys(config, GONE) | other


TOGETHER = {
    "B19 heads do not divide": (
        "llama", dict(num_attention_heads=3, num_key_value_heads=3, head_dim=None),
        "hidden_dim must be a multiple of num_heads .*, got hidden_dim=8, num_heads=3",
    ),
    "B19 heads of BERT do not divide": (
        "bert", dict(num_attention_heads=3), "got hidden_dim=8, num_heads=3",
    ),
    "B19 no heads and no width": (
        "llama", dict(num_attention_heads=0, head_dim=None), "num_heads must be from 1 .*, got 0",
    ),
    "B19 heads for keys do not divide": (
        "llama", dict(num_key_value_heads=3), "got num_heads=4, num_key_value_heads=3",
    ),
    "B19 an odd width turns": (
        "llama", dict(head_dim=3), "rotary positions turn an even number of dimensions",
    ),
    "B19 an odd number of buckets": (
        "t5", dict(relative_attention_num_buckets=7), "relative_buckets must be even",
    ),
    "B19 an id below zero": ("bert", dict(pad_token_id=-1), "pad_id must be from 0 to .*, got -1"),
    "B19 an id that is a text": ("llama", dict(eos_token_id="2"), "eos_id must be .*, got '2'"),
    "B19 ids that are texts": ("llama", dict(eos_token_id=["2"]), "eos_id must be .*, got '2'"),
    "B19 a text among ids": ("llama", dict(eos_token_id=[2, "2"]), "eos_id must be .*, got '2'"),
    "B19 no ids": ("llama", dict(eos_token_id=[]), r"eos_id must be a whole number, got \[\]"),
    "B19 a million experts": (
        "llama", DENSE | dict(num_local_experts=10**6), "num_experts must be from 0 to 4096, got",
    ),
    "B19 four million experts": (
        "llama", DENSE | dict(num_local_experts=4096, num_hidden_layers=1024), "tensors|experts",
    ),
    "B19 more experts than there are": (
        "llama", DENSE | dict(num_local_experts=2, num_experts_per_tok=3),
        "experts_per_token must be at most num_experts, got experts_per_token=3, num_experts=2",
    ),
    "B19 a thousand wide layers": (
        "llama", dict(num_hidden_layers=1024, hidden_size=2**16, vocab_size=2**24),
        "9207 missing: .* of another shape: ",
    ),
    "B19 layers of Qwen are a text": ("llama", QWEN | dict(num_hidden_layers="1"), "got '1'"),
    "B19 a window is a text": (
        "llama", QWEN | dict(use_sliding_window=True, sliding_window="x", max_window_layers=0),
        "window must be a whole number, got 'x'",
    ),
    "B19 windows from a text on": (
        "llama", QWEN | dict(use_sliding_window=True, max_window_layers="x"),
        "max_window_layers must be .*, got 'x'",
    ),
    "B19 a text says whether there are windows": (
        "llama", QWEN | dict(use_sliding_window="false"), "use_sliding_window must .*, got 'false'",
    ),
    "B19 padding of RoBERTa is a text": (
        "bert", ROBERTA | dict(pad_token_id="1"), "pad_id must be a whole number, got '1'",
    ),
    "B19 length of RoBERTa is a text": (
        "bert", ROBERTA | dict(max_position_embeddings="16"), "max_length must be a .*, got '16'",
    ),
    "B19 RoBERTa shorter than its padding": (
        "bert", ROBERTA | dict(max_position_embeddings=1), "max_length must be from 1 to .*, got 0",
    ),
    "B11 a layer more": (
        "llama", dict(num_hidden_layers=2), "9 missing: 'model.layers.1.self_attn.q_proj.weight'",
    ),
    "B12 a layer less": ("bert", dict(num_hidden_layers=0), "num_layers must be from 1"),
    "B13 a word more": (
        "llama", dict(vocab_size=12), r"embed_tokens.weight' \[11, 8\] in place of \[12, 8\]",
    ),
    "B13 a word more in T5": ("t5", dict(vocab_size=12), r"'shared.weight' \[11, 8\] in place of"),
    "B13 a position less": (
        "bert", dict(max_position_embeddings=15), r"\[16, 8\] in place of \[15, 8\]",
    ),
    "B13 a bucket pair more": (
        "t5", dict(relative_attention_num_buckets=10), r"\[8, 2\] in place of \[10, 2\]",
    ),
    "B13 other heads": ("llama", dict(num_attention_heads=2), r"q_proj.weight' \[8, 8\] in place"),
    "B13 biases": ("llama", dict(attention_bias=True, mlp_bias=True), "missing: .*q_proj.bias'"),
    "B13 one kind of biases": (
        "llama", dict(attention_bias=True), "must be both true or both false, got True and False",
    ),
    "B14 tied, and two tables": (
        "llama", dict(tie_word_embeddings=True), f"'?{H}'? must be equal to .*embed_tokens.weight",
    ),
    "B33 BERT's weights": ("bert", instead(BERT, CONFIG), "12 missing: 'embed_tokens.*; 23 unexp"),
    "B33 Llama's weights": ("llama", instead(CONFIG, BERT), "missing: .*; 12 unexpected"),
    "B33 T5's weights": ("t5", instead(T5, CONFIG), "12 missing: .*; 26 unexpected"),
    "B33 weights of the encoder alone": (
        "bert", dict(architectures=["BertForMaskedLM"]), "missing: 'cls.predictions.transform.de",
    ),
    "B33 weights without a head": (
        "t5", dict(architectures=["T5ForConditionalGeneration"], tie_word_embeddings=False),
        "1 missing: 'lm_head.weight'",
    ),
    "B33 a key of a version to come": ("llama", dict(attention_kind="new"), "known keys only, got"),
} | {
    f"B19 id2label {value!r:.30}": ("bert", CLASSES | {"id2label": value}, "id2label must .*, got")
    for value in (1, "x", True, ["a"], [], {}, {"a": "b"}, {"0": 1}, {"1": "a"}, {"00": "a"},
                  {"0": ["a"]}, {"-1": "a"}, {"0": None})
} | {
    f"B19 num_labels {value!r:.30}": (
        "bert", CLASSES | {"num_labels": value}, "num_labels must .* got",
    )
    for value in (0, -1, 10**9, 10**399, 1.5, True, "2", None, [2], {})
} | {
    f"B19 layer_types {value!r:.30}": (
        "llama", QWEN | {"layer_types": value}, "layer_types must name 1 layers, each .*, got",
    )
    for value in (1, True, "full_attention", [], ["full_attention"] * 2, ["x"], [1], [["x"]], {},
                  [None], {"full_attention": 1}, ["x" * 10_000])
}  # fmt: skip
