"""BERT and its kin: encoders with the norm behind the sum and learned positions."""

from kformer.interop.family import Family
from kformer.interop.header import CheckpointError

POST_NORM = dict(norm_placement="post", position="learned", embedding_norm=True)
BLOCK = {
    "block_{i}/self_attention/query": "encoder.layer.{i}.attention.self.query",
    "block_{i}/self_attention/key": "encoder.layer.{i}.attention.self.key",
    "block_{i}/self_attention/value": "encoder.layer.{i}.attention.self.value",
    "block_{i}/self_attention/output": "encoder.layer.{i}.attention.output.dense",
    "block_{i}/self_attention_norm/after": "encoder.layer.{i}.attention.output.LayerNorm",
    "block_{i}/feed_forward/up": "encoder.layer.{i}.intermediate.dense",
    "block_{i}/feed_forward/down": "encoder.layer.{i}.output.dense",
    "block_{i}/feed_forward_norm/after": "encoder.layer.{i}.output.LayerNorm",
}
EMBEDDINGS = {
    "embedding/table": "embeddings.word_embeddings",
    "positions/table": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
FIELDS = {
    "vocabulary_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers",),
    "hidden_dim": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "intermediate_dim": ("intermediate_size",),
    "activation": ("hidden_act", "gelu"),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "max_length": ("max_position_embeddings", 512),
    "token_types": ("type_vocab_size", 2),
    "norm_epsilon": ("layer_norm_eps", 1e-12),
    "tie_embeddings": ("tie_word_embeddings", True),
    "pad_id": ("pad_token_id", 0),
    "bos_id": ("bos_token_id", None),
    "eos_id": ("eos_token_id", None),
}
MUST = {"position_embedding_type": ("absolute",), "is_encoder_decoder": (False,)}


def read_bert(hf, fields):
    """There is always a table of token types."""
    if fields["token_types"] == 0:
        raise CheckpointError("type_vocab_size must be at least 1, got 0")


BERT = Family(
    model_type="bert",
    architectures={
        "BertModel": "encoder",
        "BertForMaskedLM": "masked_lm",
        "BertForPreTraining": "masked_lm",
        "BertForSequenceClassification": "text_classifier",
        "BertForTokenClassification": "token_classifier",
    },
    fields=FIELDS,
    always=POST_NORM,
    must=MUST,
    silent=(
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    ),
    base="bert.",
    parts=EMBEDDINGS | BLOCK | {"pooler": "pooler.dense"},
    heads={
        "masked_lm": {
            "transform": "cls.predictions.transform.dense",
            "transform_norm": "cls.predictions.transform.LayerNorm",
            "output_bias": "cls.predictions",
            "head": "cls.predictions.decoder",
        },
        "text_classifier": {"classifier": "classifier"},
        "token_classifier": {"classifier": "classifier"},
    },
    same=(
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    ignored=(r".*\.position_ids", r"cls\.seq_relationship\..*"),
    read=read_bert,
)  # fmt: skip


def read_roberta(hf, fields):
    """Positions start behind the number of the padding, and the table holds the rows before."""
    read_bert(hf, fields)
    offset = (fields["pad_id"] or 0) + 1
    fields["position_offset"] = offset
    fields["max_length"] = fields["max_length"] - offset


def write_roberta(config, task):
    return {"max_position_embeddings": config.max_length + config.position_offset}


ROBERTA = Family(
    model_type="roberta",
    architectures={
        "RobertaModel": "encoder",
        "RobertaForMaskedLM": "masked_lm",
        "RobertaForSequenceClassification": "text_classifier",
        "RobertaForTokenClassification": "token_classifier",
    },
    fields={name: key for name, key in FIELDS.items() if name != "activation"} | {
        "pad_id": ("pad_token_id", 1),
        "bos_id": ("bos_token_id", 0),
        "eos_id": ("eos_token_id", 2),
    },
    always=POST_NORM | dict(activation="gelu"),
    must=MUST | {"hidden_act": ("gelu",)},  # its head for words has no other
    base="roberta.",
    parts=EMBEDDINGS | BLOCK | {"pooler": "pooler.dense"},
    heads={
        "masked_lm": {
            "transform": "lm_head.dense",
            "transform_norm": "lm_head.layer_norm",
            "output_bias": "lm_head",
            "head": "lm_head.decoder",
        },
        "text_classifier": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        "token_classifier": {"classifier": "classifier"},
    },
    same=(
        ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ),
    read=read_roberta,
    write=write_roberta,
)  # fmt: skip

LAYER = "transformer.layer.{i}."
DISTILBERT = Family(
    model_type="distilbert",
    architectures={
        "DistilBertModel": "encoder",
        "DistilBertForMaskedLM": "masked_lm",
        "DistilBertForSequenceClassification": "text_classifier",
        "DistilBertForTokenClassification": "token_classifier",
    },
    fields={
        "vocabulary_size": ("vocab_size",),
        "num_layers": ("n_layers",),
        "hidden_dim": ("dim",),
        "num_heads": ("n_heads",),
        "intermediate_dim": ("hidden_dim",),
        "activation": ("activation", "gelu"),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "max_length": ("max_position_embeddings", 512),
        "tie_embeddings": ("tie_word_embeddings", True),
        "pad_id": ("pad_token_id", 0),
        "bos_id": ("bos_token_id", None),
        "eos_id": ("eos_token_id", None),
    },
    always=POST_NORM | dict(norm_epsilon=1e-12, pooler_activation="relu"),
    must={"is_encoder_decoder": (False,)},
    silent=("sinusoidal_pos_embds", "tie_weights_"),  # how the table of positions was filled
    base="distilbert.",
    parts={part: module for part, module in EMBEDDINGS.items() if part != "token_types"} | {
        "block_{i}/self_attention/query": LAYER + "attention.q_lin",
        "block_{i}/self_attention/key": LAYER + "attention.k_lin",
        "block_{i}/self_attention/value": LAYER + "attention.v_lin",
        "block_{i}/self_attention/output": LAYER + "attention.out_lin",
        "block_{i}/self_attention_norm/after": LAYER + "sa_layer_norm",
        "block_{i}/feed_forward/up": LAYER + "ffn.lin1",
        "block_{i}/feed_forward/down": LAYER + "ffn.lin2",
        "block_{i}/feed_forward_norm/after": LAYER + "output_layer_norm",
    },
    heads={
        "masked_lm": {
            "transform": "vocab_transform",
            "transform_norm": "vocab_layer_norm",
            "output_bias": "vocab_projector",
            "head": "vocab_projector",
        },
        "text_classifier": {"pooler": "pre_classifier", "classifier": "classifier"},
        "token_classifier": {"classifier": "classifier"},
    },
    same=(("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),),
)  # fmt: skip
