"""Quantized: near the float model, the same after loading, refused by name where it cannot work."""

import keras
import numpy as np
import pytest
from support import BACKEND, V, close, config, exact, make_model

import kformer
from kformer import backend, layers

pytestmark = pytest.mark.usefixtures("quick_collection")
IDS = np.random.default_rng(0).integers(1, V, (3, 8)).astype("int32")
LLAMA = dict(norm="rms", position="rotary", gated=True, use_bias=False, attention_sinks=True)
CASES = {
    "tied": ("CausalLM", config(position="learned", num_layers=1)),
    "untied": ("CausalLM", config(**LLAMA, tie_embeddings=False, num_layers=1)),
    "experts": ("CausalLM", config(num_experts=3, experts_per_token=3, num_layers=1)),
    "t5": ("Seq2SeqLM", config(position="relative", norm="rms", bos_id=0, num_layers=1)),
    "bert": ("TextClassifier", config(norm_placement="post", pooler=True, num_layers=1)),
}
NEAR = {"int8": 0.06, "int4": 0.6, "float8": 0.5}  # of outputs up to about 2


def made(name):
    kind, settings = CASES[name]
    more = dict(num_classes=3, pooling="first") if kind == "TextClassifier" else {}
    return make_model(kind, settings, **more)


def out(model, x):
    return backend.to_numpy(model(x))


def inputs(model):
    return {"source": IDS, "target": IDS} if model.has_source else IDS


def modes_of(model):
    """{end of the path: mode} of all that can be quantized."""
    parts = [p for p in model._flatten_layers() if hasattr(p, "shrinks")]
    return {p.path.split("/", 1)[-1]: p.quantization_mode for p in parts}


@pytest.mark.parametrize(
    "name, mode",
    [(name, "int8") for name in CASES] + [("tied", "int4"), ("t5", "int4"), ("untied", "float8")],
)
def test_quantized_models_come_back(name, mode, tmp_path):
    """Near the original, exactly itself after loading, twice; it trains and generates."""
    model = made(name)
    x = inputs(model)
    before = out(model, x)
    model.compile()
    model.quantize(mode)
    after = out(model, x)
    close(after, before, NEAR[mode])
    assert not np.array_equal(after, before)
    path = tmp_path / "model.keras"
    model.save(path)
    for _ in range(2):
        loaded = keras.saving.load_model(path)
        exact(out(loaded, x), after)
        assert modes_of(loaded) == modes_of(model)
        loaded.save(path)
    if (name, mode) in (("untied", "int8"), ("tied", "int4")):
        assert loaded.generate([[3, 4, 5]], 4) == model.generate([[3, 4, 5]], 4)
    if (name, mode) in (("untied", "float8"), ("tied", "int8")):
        kernel = np.array(backend.to_numpy(model.backbone.blocks[0].feed_forward.up._kernel))
        model.fit(x, IDS, verbose=0)
        same = np.array_equal(model.backbone.blocks[0].feed_forward.up._kernel, kernel)
        assert same is (mode != "float8")  # of int8, norms and biases train


def test_what_is_quantized():
    """Projections and the tied table; small tables, norms, experts and their router are not."""
    model = make_model("CausalLM", config(position="learned", num_experts=2, num_layers=1))
    model.quantize("int4")
    attention = {f"block_0/self_attention/{p}": "int4" for p in ("query", "key", "value", "output")}
    assert modes_of(model) == {
        **attention,
        "embedding/table": "int4",
        "positions/table": None,
        "block_0/feed_forward/router": None,
    }
    model = made("untied")
    model.quantize("int8", filters="query")
    assert {k.rsplit("/", 1)[-1] for k, mode in modes_of(model).items() if mode} == {"query"}


@pytest.mark.filterwarnings("ignore:The use of .x.T. on tensors:UserWarning")  # Keras, of scales
def test_settings_come_back(tmp_path):
    """Weights alone in int8, and blocks of int4: what they were made with is kept."""
    for settings in (
        keras.quantizers.Int8QuantizationConfig(activation_quantizer=None),
        keras.quantizers.Int4QuantizationConfig(block_size=8),
        keras.quantizers.Int4QuantizationConfig(block_size=None),
    ):
        model = made("tied")
        model.quantize(config=settings)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        exact(out(loaded, IDS), out(model, IDS))


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_blocks_in_a_functional_model_come_back(mode, tmp_path):
    """kformer's layers in somebody's model, quantized, saved, loaded: exactly the same."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.TokenEmbedding(V, 16)(tokens)
    x = layers.EncoderBlock(config(position="rotary"))(x)
    x = layers.FeedForward(16, 32)(layers.MultiHeadAttention(16, 2)(x))
    model = keras.Model(tokens, keras.layers.Dense(2)(x))
    ids = np.random.default_rng(0).integers(0, V, (4, 6))
    before = model.predict(ids, verbose=0)
    model.quantize(mode)
    quantized = model.predict(ids, verbose=0)
    close(quantized, before, 0.5)
    assert {p.quantization_mode for p in model._flatten_layers() if hasattr(p, "shrinks")} == {mode}
    path = tmp_path / "model.keras"
    model.save(path)
    for _ in range(2):
        loaded = keras.saving.load_model(path)
        exact(loaded.predict(ids, verbose=0), quantized)
        loaded.save(path)


def test_a_wrong_id_is_still_nan():
    table = layers.TokenEmbedding(V, 16).table
    table.build()
    table.quantize("int8")
    rows = backend.to_numpy(table(np.array([0, V, -1])))
    assert np.isnan(rows[1:]).all() and np.isfinite(rows[0]).all()


class Tokens:
    """A tokenizer, as Keras' calibration asks for one, of what are ids already."""

    def tokenize(self, ids):
        return np.asarray(ids)

    __call__ = tokenize


def calibrated(model, mode):
    ids = np.random.default_rng(1).integers(1, V, (1, 600)).astype("int32")
    given = dict(dataset=[ids], tokenizer=Tokens(), num_samples=16, sequence_length=32)
    makers = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}
    model.quantize(mode, config=makers[mode](**given, group_size=-1))


@pytest.mark.parametrize("mode", ["gptq"] if BACKEND == "tensorflow" else ["gptq", "awq"])
def test_calibrated_models_come_back(mode, tmp_path):
    """As near as what is rounded without looking at texts, at least; itself after loading."""
    wide = config(hidden_dim=32, num_layers=1, tie_embeddings=False, position="learned")
    original, rounded, model = (make_model("CausalLM", wide) for _ in range(3))
    before = out(original, IDS)
    settings = keras.quantizers.Int4QuantizationConfig(block_size=None)
    rounded.quantize(config=settings, filters=lambda layer: "block_" in layer.path)
    calibrated(model, mode)
    after = out(model, IDS)
    errors = [np.square(out(m, IDS) - before).mean() for m in (model, rounded)]
    assert 0 < errors[0] < 1.2 * errors[1]
    assert model.head.quantization_mode is None
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    close(out(loaded, IDS), after, 1e-6)


def test_refused_before_anything_changes():
    model = made("tied")
    model.backbone.blocks[0].feed_forward.up.quantize("int8")
    with pytest.raises(ValueError, match="find weights in float, got quantized .*feed_forward/up"):
        model.quantize("int8")
    assert sum(mode is not None for mode in modes_of(model).values()) == 1
    with pytest.raises(ValueError, match="leave a layer to quantize, got 'nowhere'"):
        made("tied").quantize("int8", filters="nowhere")
    with pytest.raises(ValueError, match="gptq needs a model of one stack of blocks, got"):
        calibrated(made("t5"), "gptq")
    with pytest.raises(ValueError, match="got position='alibi', a bias they share"):
        calibrated(make_model("CausalLM", config(position="alibi")), "gptq")
    positive = make_model("CausalLM", config(num_layers=1))
    positive.backbone.blocks[0].feed_forward.up._kernel.assign(np.ones((16, 64)))
    with pytest.raises(ValueError, match="both signs in every group: .*, got .*feed_forward/up"):
        calibrated(positive, "gptq")
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="awq needs JAX or torch, .* got tensorflow"):
            calibrated(made("tied"), "awq")
    kformer.enable_lora(model, 1, target="value")
    with pytest.raises(ValueError, match="quantize comes before enable_lora, .* got .*value"):
        model.quantize("int8", filters="value")
