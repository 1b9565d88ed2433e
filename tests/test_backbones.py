"""keras-nlp's backbones: kformer's models give the same outputs."""

import keras
import numpy as np
import pytest

import kformer
from kformer import backend

SIZE = dict(vocabulary_size=31, num_layers=2, hidden_dim=12, intermediate_dim=20)
HEADS = SIZE | dict(num_heads=3, max_sequence_length=16)
GROUPS = SIZE | dict(num_query_heads=4, num_key_value_heads=2, layer_norm_epsilon=1e-3)
GROUPS |= dict(hidden_dim=16, rope_max_wavelength=500)
CASES = {
    "BertBackbone": HEADS,
    "RobertaBackbone": HEADS,
    "GPT2Backbone": HEADS,
    "LlamaBackbone": GROUPS,
    "Llama3Backbone": GROUPS
    | dict(
        rope_frequency_adjustment_factor=4.0,
        rope_low_freq_factor=0.5,
        rope_high_freq_factor=2.0,
        rope_pretraining_sequence_length=8,
    ),
    "MistralBackbone": GROUPS | dict(sliding_window=3),
    "BartBackbone": HEADS,
    "T5Backbone": SIZE | dict(num_heads=3, key_value_dim=4, activation="gelu"),
}


def make(name):
    models = pytest.importorskip("keras_hub").models
    backbone = getattr(models, name)(**CASES[name])
    rng = np.random.default_rng(0)
    for weight in backbone.weights:
        weight.assign(weight + 0.15 * rng.normal(size=weight.shape).astype("float32"))
    return backbone


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_same_outputs(name):
    backbone = make(name)
    model = kformer.from_keras_hub(backbone)
    rng = np.random.default_rng(1)
    ids, real = rng.integers(2, 31, (2, 7)), np.ones((2, 7), bool)
    real[1, 5:] = False
    if model.has_source:
        target = rng.integers(2, 31, (2, 6))
        given = {
            "encoder_token_ids": ids, "encoder_padding_mask": real.astype("int32"),
            "decoder_token_ids": target, "decoder_padding_mask": np.ones((2, 6), "int32"),
        }  # fmt: skip
        want = backbone(given)["decoder_sequence_output"]
        found, real = model({"source": {"ids": ids, "padding_mask": real}, "target": target}), ...
    else:
        given = {"token_ids": ids, "padding_mask": real.astype("int32")}
        if name == "BertBackbone":
            given["segment_ids"] = np.zeros_like(ids)
        want = backbone(given)
        want = want["sequence_output"] if isinstance(want, dict) else want
        found = model({"ids": ids, "padding_mask": real})
    found, want = backend.to_numpy(found), keras.ops.convert_to_numpy(want)
    np.testing.assert_allclose(found[real], want[real], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_with_its_head():
    backbone = make("LlamaBackbone")
    model = kformer.from_keras_hub(backbone, task="causal_lm")
    ids = np.arange(2, 8)[None]
    hidden = backbone({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    want = backbone.token_embedding(hidden, reverse=True)
    np.testing.assert_allclose(
        backend.to_numpy(model(ids)), keras.ops.convert_to_numpy(want), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="task must be 'decoder' or 'causal_lm'.*got 'encoder'"):
        kformer.from_keras_hub(backbone, task="encoder")


def test_others_are_refused_by_name():
    with pytest.raises(ValueError, match="backbone must be one of BertBackbone.*got Sequential"):
        kformer.from_keras_hub(keras.Sequential())
