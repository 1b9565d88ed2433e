"""`kformer.check` finds planted faults and names the sub-layer; good models pass."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import CASES, CONFIGS, config, make_model

import kformer
from kformer import backend
from kformer.laws import LAWS


@pytest.mark.parametrize("kind", ["CausalLM", "MaskedLM", "Seq2SeqLM", "TextClassifier"])
def test_good_models_pass(kind, capsys):
    name, arguments = next((n, a) for k, n, a in CASES if k == kind)
    model = make_model(kind, CONFIGS[name].replace(bos_id=1), **arguments)
    report = kformer.check(model)
    printed = capsys.readouterr().out
    assert report.ok, str(report)
    held = sum(finding.ok is True for finding in report.findings)
    assert f"{held} laws hold" in printed and len(report.findings) == len(LAWS)
    assert held >= (9 if kind != "TextClassifier" else 8), printed


@keras.saving.register_keras_serializable("test")
class Attend(layers.Layer):
    """A hand-made attention with a switch for each fault."""

    def __init__(self, causal=True, padded=True, **kwargs):
        super().__init__(**kwargs)
        self.causal, self.padded, self.supports_masking = causal, padded, True
        self.project = layers.Dense(48, name="project")
        self.supports_masking = True

    def build(self, shape):
        self.project.build(shape)

    def call(self, x, mask=None):
        q, k, v = ops.split(self.project(x), 3, axis=-1)
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) / 4.0
        length = ops.shape(x)[1]
        if self.causal:
            row = ops.arange(length)
            scores = ops.where(row[:, None] >= row[None], scores, -1e9)
        if self.padded and mask is not None:
            scores = ops.where(mask[:, None, :], scores, -1e9)
        return ops.matmul(ops.softmax(scores), v)


def foreign(fault=None, table=64):
    """A small Keras model that is not kformer's, with one fault planted."""
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(40, 16, mask_zero=True, name="tokens")(ids)
    if fault == "overrun":
        x = Positions(table, name="positions")(x)
    if fault == "dropout":
        x = AlwaysDrop(name="always")(x)
    for i in range(2):
        bad = i == 1
        attend = Attend(
            causal=not (fault == "future" and bad),
            padded=not (fault == "padding" and bad),
            name=f"attend_{i}",
        )
        y = attend(x)
        x = x + y if fault == "mask lost" else layers.Add(name=f"add_{i}")([x, y])
    return keras.Model(ids, layers.Dense(40, name="head")(x))


@keras.saving.register_keras_serializable("test")
class AlwaysDrop(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds, self.supports_masking = keras.random.SeedGenerator(1), True

    def call(self, x):
        return keras.random.dropout(x, 0.3, seed=self.seeds)


@keras.saving.register_keras_serializable("test")
class Positions(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size, self.supports_masking = size, True
        self.table = layers.Embedding(size, 16, name="table")

    def build(self, shape):
        self.table.build()

    def call(self, x):
        return x + self.table(ops.arange(ops.shape(x)[1]))


def test_a_foreign_model_without_fault():
    report = kformer.check(foreign(), verbose=False)
    assert report.ok, str(report)


def test_a_forgotten_causal_mask():
    """A language model from kformer's own part, without causal=True."""
    ids = keras.Input((None,), dtype="int32")
    x = kformer.layers.TokenEmbedding(40, 16, pad_id=0)(ids)
    x = kformer.layers.MultiHeadAttention(16, 2, name="forgetful")(x)
    model = keras.Model(ids, layers.Dense(40)(x))
    report = kformer.check(model, verbose=False)
    assert "forgetful" in report["no future leak"].where


PLANTED = [
    ("future", "no future leak", "attend_1"),
    ("padding", "padding on the left", "attend_1"),
    ("mask lost", "padding on the left", "attend_1"),
    ("dropout", "same twice, dropout off", "always"),
    ("overrun", "length past the table refused", "positions/table"),
]


@pytest.mark.parametrize(("fault", "law", "where"), PLANTED)
def test_planted_faults(fault, law, where, capsys):
    keras.utils.set_random_seed(1)
    report = kformer.check(foreign(fault, table=20))
    finding = report[law]
    assert not report.ok and not finding.ok, str(report)
    assert where in finding.where, str(report)
    assert "BROKEN" in capsys.readouterr().out


def test_bidirectional_padding_fault():
    """Without causality a padding leak shows on the right as well."""
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(40, 16, mask_zero=True)(ids)
    x = Attend(causal=False, padded=False, name="leaky")(x)
    model = keras.Model(ids, layers.Dense(40)(x))
    report = kformer.check(model, causal=False, verbose=False)
    assert report["padding on the right"].where == "leaky"
    assert report["no future leak"].note == "not causal"


class MeanOfAll(layers.Layer):
    """A pooling that counts padding."""

    supports_masking = True

    def call(self, x, mask=None):
        return ops.mean(x, axis=1)

    def compute_mask(self, x, mask=None):
        return None


def test_a_classifier_that_pools_padding():
    """Small first weights hide nothing, and the pooling is named, not what comes before it."""
    ids = keras.Input((None,), dtype="int32")
    x = kformer.layers.TokenEmbedding(40, 16, pad_id=0, name="tokens")(ids)
    x = kformer.layers.MultiHeadAttention(16, 2, name="good")(x)
    model = keras.Model(ids, layers.Dense(3)(MeanOfAll(name="pool")(x)))
    report = kformer.check(model, causal=True, verbose=False)
    assert report["padding on the right"].where == "pool", str(report)
    assert report["no future leak"].note == "one output for a row"


def test_a_source_mask_that_is_dropped(monkeypatch):
    from kformer import masks

    model = make_model("Seq2SeqLM", CONFIGS["sinusoidal"])
    assert kformer.check(model, verbose=False)["padding of the source"].ok
    everything = lambda query, key, seen=None: ops.ones_like(key.real[:, None, None, :])  # noqa: E731
    real = masks.visible

    def leaky(query, key, causal=False, window=None):
        return real(query, key, causal, window) if query is key else everything(query, key)

    monkeypatch.setattr(masks, "visible", leaky)
    finding = kformer.check(model, verbose=False)["padding of the source"]
    assert finding.ok is False and "cross_attention" in finding.where


def test_what_cannot_be_tried_is_said():
    """Outputs that are zero whatever the tokens prove nothing; nor does a model without tables."""
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(40, 16, mask_zero=True)(ids)
    x = Attend(causal=False, name="leaky")(x)
    model = keras.Model(ids, layers.Dense(40, kernel_initializer="zeros")(x))
    report = kformer.check(model, verbose=False)
    assert report["no future leak"].ok is None and "hardly depend" in str(report)
    assert report["length past the table refused"].ok is None


@pytest.mark.parametrize("how", ["mixed_bfloat16", "large"])
def test_precision_and_size_are_no_fault(how):
    model = make_model("CausalLM", config(), dtype="float32" if how == "large" else how)
    if how == "large":
        table = model.backbone.embedding.table.embeddings
        table.assign(backend.to_numpy(table) * 300)
    report = kformer.check(model, verbose=False)
    assert report.ok and report["padding on the left"].ok, str(report)


def test_unsaveable_and_bad_gradients():
    class Secret(layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(40, 16)(ids)
    model = keras.Model(ids, Secret(lambda x: ops.sqrt(x - x) + x)(x))
    report = kformer.check(model, causal=True, pad_id=None, verbose=False)
    assert not report["saved = loaded"].ok
    assert not report["gradients finite"].ok and "embedding" in report["gradients finite"].where
    assert report["padding on the left"].note == "no padding id"
    assert report["padding on the left"].ok is None


def test_arguments():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(ValueError, match="vocabulary_size must be given"):
        kformer.check(model)
    with pytest.raises(ValueError, match="two ids to try, got 2"):
        kformer.check(kformer.CausalLM(config(vocabulary_size=2)))
    report = kformer.check(
        kformer.CausalLM(config()), inputs=lambda ids: {"ids": ids}, verbose=False
    )
    assert report.ok


def test_attention_maps(tmp_path):
    from kformer.explorer import draw

    model = make_model("Seq2SeqLM", config(window=2, attention_dropout=0.5))
    ids = np.array([[3, 4, 5, 0]], "int32")
    maps = kformer.attention_maps(model, {"source": ids, "target": ids})
    assert list(maps) == [
        "encoder/block_0/self_attention", "encoder/block_1/self_attention",
        "decoder/block_0/self_attention", "decoder/block_0/cross_attention",
        "decoder/block_1/self_attention", "decoder/block_1/cross_attention",
    ]  # fmt: skip
    for weights in maps.values():
        assert weights.shape == (1, 4, 4, 4)
        np.testing.assert_allclose(weights[0, :, :3].sum(-1), 1.0, atol=1e-6)
        assert (weights[..., 3] == 0).all()
    draw(maps["decoder/block_0/cross_attention"], tmp_path / "map.png", keys=list("abcd"))
    assert (tmp_path / "map.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="must be a Keras model or layer, got int"):
        kformer.attention_maps(3, ids)
