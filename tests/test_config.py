"""Config: every rule by its values; presets and their parameter counts."""

import json
import math

import numpy as np
import pytest
from support import config

import kformer
from kformer.weights import TASKS, path_in, weight_shapes
from kformer.zoo import PRESETS

# What is wrong, and what the message must say: field, rule or value.
WRONG = [
    (dict(vocabulary_size=0), "vocabulary_size must be from 1 .*got 0"),
    (dict(vocabulary_size=10**9), "vocabulary_size must be from.*got 1000000000"),
    (dict(vocabulary_size=10**12), "vocabulary_size must be from.*got 1000000000000"),
    (dict(vocabulary_size=1.5), "vocabulary_size must be a whole number, got 1.5"),
    (dict(vocabulary_size=True), "vocabulary_size must be a whole number, got True"),
    (dict(vocabulary_size="9"), "vocabulary_size must be a whole number, got '9'"),
    (dict(vocabulary_size=None), "vocabulary_size must be a whole number, got None"),
    (dict(vocabulary_size=math.nan), "vocabulary_size must be a whole number, got nan"),
    (dict(target_vocabulary_size=-3), "target_vocabulary_size must be from.*got -3"),
    (dict(num_layers=10**6), "num_layers must be from 1 to 1024, got 1000000"),
    (dict(num_encoder_layers=0), "num_encoder_layers must be from 1.*got 0"),
    (dict(num_heads=0), "num_heads must be from 1.*got 0"),
    (dict(num_heads=-1), "num_heads must be from 1.*got -1"),
    (dict(num_heads=3), "hidden_dim=16, num_heads=3"),
    (dict(num_key_value_heads=3), "num_heads=4, num_key_value_heads=3"),
    (dict(hidden_dim=1e400), "hidden_dim must be a whole number, got inf"),
    (dict(activation="swish"), "activation must be one of 'relu'.*got 'swish'"),
    (dict(norm=None), "norm must be one of.*got None"),
    (dict(norm_placement="mid"), "norm_placement must be one of.*got 'mid'"),
    (dict(norm_epsilon=0.0), r"norm_epsilon must be in \(0.0, 1.0\], got 0.0"),
    (dict(norm_epsilon="1e-5"), "norm_epsilon must be a number, got '1e-5'"),
    (dict(position="absolute"), "position must be one of.*got 'absolute'"),
    (dict(dropout=1.0), r"dropout must be in \[0.0, 1.0\), got 1.0"),
    (dict(dropout=math.nan), "dropout must be in.*got nan"),
    (dict(attention_dropout=-0.1), "attention_dropout must be in.*got -0.1"),
    (dict(logit_softcap=0), "logit_softcap must be in.*got 0"),
    (dict(window=0), "window must be from 1.*got 0"),
    (dict(window=()), r"window must not be empty, got \(\)"),
    (dict(window=(4, "x")), "window must be a whole number, got 'x'"),
    (dict(gated=1), "gated must be True or False, got 1"),
    (dict(use_bias=None), "use_bias must be True or False, got None"),
    (dict(pad_id=23), "pad_id must be below the vocabulary size 23, got pad_id=23"),
    (dict(pad_id=-1), "pad_id must be from 0.*got -1"),
    (dict(eos_id=19, target_vocabulary_size=19), "eos_id must be below.*19, got eos_id=19"),
    (dict(position="rotary", head_dim=5), "even number.*head_width=5"),
    (dict(position="rotary", rotary_dim=6), "rotary_dim=6, head_width=4"),
    (dict(rotary_dim=2), "need position='rotary', got position='sinusoidal'"),
    (dict(rotary_scaling={"type": "linear", "factor": 2.0}), "need position='rotary'"),
    (dict(position="rotary", rotary_scaling="linear"), "a dict with 'type'.*got 'linear'"),
    (dict(position="rotary", rotary_scaling={"type": "magic"}), "a dict with 'type'.*magic"),
    (dict(position="rotary", rotary_scaling={"type": "linear"}), r"missing \['factor'\]"),
    (
        dict(position="rotary", rotary_scaling={"type": "linear", "factor": 2.0, "x": 1}),
        r"unknown \['x'\]",
    ),
    (
        dict(position="rotary", rotary_scaling={"type": "linear", "factor": 0.5}),
        r"rotary_scaling\['factor'\] must be in \[1.0, inf\), got 0.5",
    ),
    (
        dict(position="rotary", rotary_scaling=dict(
            type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0,
            original_max_length=64)),
        "low_freq_factor must be below high",
    ),
    (dict(position="alibi", position_offset=2), "position_offset needs.*got position='alibi'"),
    (dict(position="learned", position_layout="spread"), "'spread' needs.*position='learned'"),
    (dict(position_layout="spread", hidden_dim=3, num_heads=1), "'spread' needs.*hidden_dim=3"),
    (dict(num_experts=2, experts_per_token=3), "experts_per_token=3, num_experts=2"),
    (dict(position="relative", relative_buckets=7), "relative_buckets=7"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(w[0])[:60] for w in WRONG])
def test_b19_wrong_values(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_round_trip():
    c = config(window=[4, None], rotary_scaling={"type": "linear", "factor": 2}, position="rotary")
    again = kformer.Config.from_dict(json.loads(json.dumps(c.to_dict())))
    assert again == c and again.window == (4, None)
    assert [c.window_of(i) for i in range(3)] == [4, None, 4]
    assert config(hidden_dim=np.int64(32)).hidden_dim == 32
    with pytest.raises(ValueError, match="no field named nonsense"):
        kformer.Config.from_dict({**c.to_dict(), "nonsense": 1})
    with pytest.raises(TypeError):
        kformer.Config(100)  # keyword only


def test_defaults_that_follow_from_others():
    c = config(num_key_value_heads=2)
    assert (c.head_width, c.key_value_heads, c.inner_dim, c.encoder_layers) == (4, 2, 64, 2)
    assert c.has_final_norm and not config(norm_placement="post").has_final_norm
    assert config(norm_placement="post", final_norm=True).has_final_norm


COUNTS = [  # (preset, task, the count of the original)
    ("bert_base", "encoder", 109_482_240),
    ("roberta_base", "encoder", 124_645_632),
    ("distilbert", "encoder", 66_362_880),
    ("minilm_l6", "encoder", 22_713_216),
    ("gpt2", "causal_lm", 124_439_808),
    ("gpt2_medium", "causal_lm", 354_823_168),
    ("gpt2_large", "causal_lm", 774_030_080),
    ("gpt2_xl", "causal_lm", 1_557_611_200),
    ("llama3.2_1b", "causal_lm", 1_235_814_400),
    ("smollm2_135m", "causal_lm", 134_515_008),
    ("qwen2.5_0.5b", "causal_lm", 494_032_768),
    ("qwen3_0.6b", "causal_lm", 596_049_920),
    ("gemma_2b", "causal_lm", 2_506_172_416),
    ("mistral_7b", "causal_lm", 7_241_732_096),
    ("mixtral_8x7b", "causal_lm", 46_702_792_704),
    ("t5_small", "seq2seq_lm", 60_506_624),
    ("bart_base", "seq2seq", 139_420_416),
    ("m2m100_418m", "seq2seq_lm", 483_905_536),
]


@pytest.mark.parametrize(("name", "task", "count"), COUNTS)
def test_parameter_counts_of_the_originals(name, task, count):
    assert kformer.Config.preset(name).parameter_count(task) == count


KINDS = dict(
    encoder="Encoder", decoder="Decoder", seq2seq="Seq2Seq", text_classifier="TextClassifier",
    token_classifier="TokenClassifier", masked_lm="MaskedLM", causal_lm="CausalLM",
    seq2seq_lm="Seq2SeqLM",
)  # fmt: skip


def tiny(name):
    """A preset in its own shape, made small."""
    c = kformer.Config.preset(name)
    heads = 4
    groups = max(1, heads * c.key_value_heads // c.num_heads)
    return kformer.Config.preset(
        name, vocabulary_size=37, num_layers=2, hidden_dim=16, num_heads=heads,
        num_key_value_heads=groups, head_dim=c.head_dim and 6, intermediate_dim=24, max_length=12,
    )  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_of_built_models(name):
    """Every preset's shape, as every task, against what is really built."""
    c = tiny(name)
    for task in TASKS:
        arguments = {"num_classes": 3} if "classifier" in task else {}
        model = getattr(kformer, KINDS[task])(c, **arguments)
        assert model.count_params() == c.parameter_count(task, **arguments), task
        built = {path_in(model, w.path): tuple(w.shape) for w in model.weights}
        built = {path: shape for path, shape in built.items() if not path.endswith("/statistics")}
        assert built == weight_shapes(c, task, **arguments), task


@pytest.mark.parametrize("pooling", ["first", "attention"])
def test_parameter_count_of_poolings(pooling):
    c = tiny("bert_base")
    model = kformer.TextClassifier(c, 4, pooling=pooling)
    assert model.count_params() == c.parameter_count(
        "text_classifier", num_classes=4, pooling=pooling
    )


def test_presets():
    assert kformer.presets() == tuple(PRESETS)
    c = kformer.Config.preset("gpt2", vocabulary_size=8000)
    assert c.vocabulary_size == 8000 and c.eos_id is None and c.pad_id == 0
    assert kformer.Config.preset("gpt2").eos_id == 50256
    with pytest.raises(ValueError, match="preset must be one of.*got 'gpt9'"):
        kformer.Config.preset("gpt9")
    with pytest.raises(ValueError, match="task must be one of.*got 'poetry'"):
        c.parameter_count("poetry")


def test_configs_are_keys():
    """Equal ones have equal hashes, also with a scaling, which is a dict."""
    first, second = (kformer.Config.preset("llama3.2_1b") for _ in range(2))
    assert {first: 1}[second] == 1 and hash(first) != hash(kformer.Config.preset("gpt2"))
