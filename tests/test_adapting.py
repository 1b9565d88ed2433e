"""LoRA: what trains, what stays, folding in, and what is refused."""

import keras
import numpy as np
import pytest
from support import V, close, config, exact, make_model

import kformer
from kformer import backend, layers
from kformer.adapters.lora import adapted

pytestmark = pytest.mark.usefixtures("quick_collection")

LLAMA = dict(
    norm="rms", position="rotary", gated=True, activation="silu", num_key_value_heads=2,
    use_bias=False, attention_sinks=True,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(1, V, (4, 8)).astype("int32")


def lm(adapters=True, quantized=None, **changes):
    model = make_model("CausalLM", config(**{**LLAMA, **changes}))
    if quantized:
        model.quantize(quantized)
    if adapters:
        kformer.enable_lora(model, 2, alpha=3)
        stir(model)
    return model


def stir(model, seed=1):
    """Adapters that make a difference, as if they were trained."""
    random = np.random.default_rng(seed)
    for layer in adapted(model):
        for weight in (layer.lora_kernel_a, layer.lora_kernel_b):
            weight.assign(0.5 * random.normal(size=weight.shape))


def out(model):
    return backend.to_numpy(model(IDS))


def values(weights):
    return {w.path: np.array(backend.to_numpy(w)) for w in weights}


def train(model, x=IDS, y=IDS):
    model.compile(keras.optimizers.AdamW(0.05))
    return model.fit(x, y, verbose=0, batch_size=2, shuffle=False).history["loss"]


def test_only_adapters_train_and_the_rest_stays_bit_by_bit():
    model = lm(adapters=False, use_bias=True)
    before = values(model.weights)
    plain = out(model)
    assert kformer.enable_lora(model, 2) is model
    exact(out(model), plain)  # B is zero at first
    names = {weight.path.rsplit("/", 2)[1] for weight in model.trainable_weights}
    assert names == {"query", "value"} and len(model.trainable_weights) == 2 * 2 * 2
    first = values(model.trainable_weights)
    train(model)
    for path, value in values(model.weights).items():
        if path in first:
            assert not np.array_equal(value, first[path]), path
        else:
            exact(value, before[path], path)
    assert len(before) == len(model.weights) - len(first)


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_saved_with_the_model(quantized, tmp_path):
    """Adapters, ranks, what is frozen and the optimizer come back, on a quantized base, too."""
    model = lm(quantized=quantized)
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    exact(out(loaded), out(model))
    paths = [w.path for w in model.trainable_weights]
    assert [w.path for w in loaded.trainable_weights] == paths and "lora" in paths[0]
    assert {(p.lora_rank, p.lora_alpha) for p in adapted(loaded)} == {(2, 3)}
    assert int(loaded.optimizer.iterations) == 2
    one, two = (m.train_on_batch(IDS, IDS) for m in (model, loaded))
    close(one, two, 1e-6)
    if quantized != "int8":  # whose settings Keras spells in two ways
        assert loaded.get_config() == model.get_config()


@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_gradients_go_through_a_quantized_base(quantized):
    """Down from the tied table, which is quantized, too: much like those on a base in float."""

    def loss(model, *_):
        y = keras.ops.convert_to_tensor(IDS)
        return model.compute_loss(IDS, y, model(IDS), None)

    found = []
    for model in (lm(), lm(quantized=quantized)):
        model.compile()
        _, gradients, _ = backend.gradients(loss, model)
        found.append(np.concatenate([g.ravel() for g in gradients]))
    angle = found[0] @ found[1] / np.linalg.norm(found[0]) / np.linalg.norm(found[1])
    assert angle > (0.99 if quantized == "int8" else 0.8), angle


@pytest.mark.parametrize("quantized", [None, "int4"])
def test_merged_gives_the_same(quantized, tmp_path):
    model = lm(quantized=quantized, use_bias=True)
    model.compile()
    before, weights = out(model), len(lm(adapters=False, use_bias=True).weights)
    assert kformer.merge_lora(model) is model
    close(out(model), before, 1e-5)
    assert not adapted(model) and all(not w.path.count("lora") for w in model.weights)
    if quantized is None:
        assert len(model.weights) == len(model.trainable_weights) == weights
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    exact(out(loaded), out(model))
    train(model)
    kformer.enable_lora(model, 1)  # once more


def test_a_merged_int8_kernel_is_the_float_of_it():
    model = lm(quantized="int8")
    layer = adapted(model)[0]
    rows = np.eye(16, dtype="float32")  # which int8 holds exactly
    before = backend.to_numpy(layer(rows))
    kformer.merge_lora(model)
    close(backend.to_numpy(layer(rows)), before, 1e-5)
    assert layer.quantization_mode is None
    assert model.backbone.blocks[0].feed_forward.up.quantization_mode == "int8"


def test_generate_knows_the_new_weights():
    model = lm(adapters=False, num_layers=1)
    plain = model.generate([[3, 4, 5]], 8)
    kformer.enable_lora(model, 2)
    assert model.generate([[3, 4, 5]], 8) == plain
    stir(model)
    tuned = model.generate([[3, 4, 5]], 8)
    assert tuned != plain
    kformer.merge_lora(model)
    assert model.generate([[3, 4, 5]], 8) == tuned


def test_a_block_in_a_functional_model(tmp_path):
    """kformer's layers are frozen, the head beside them is not; all of it comes back."""
    inputs = keras.Input((8,), dtype="int32")
    x = layers.TokenEmbedding(V, 16, name="embedding")(inputs)
    x = layers.LearnedPositions(8, 16, name="positions")(x)
    x = layers.EncoderBlock(config(), name="block")(x)
    x = layers.MultiHeadAttention(16, 2, name="attention")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
    model.compile("adam", "mse")
    kformer.enable_lora(model, 2)
    stir(model)
    paths = {w.path.rsplit("/", 1)[0] for w in model.trainable_weights}
    projections = {f"{place}/{name}" for place in ("block/self_attention", "attention")
                   for name in ("query", "value")}  # fmt: skip
    assert paths == {*projections, "head"}
    frozen = values(model.non_trainable_weights)
    model.fit(IDS, np.ones((4, 8, 2)), verbose=0)
    for path, value in values(model.non_trainable_weights).items():
        exact(value, frozen[path], path)
    before = model.predict(IDS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    exact(loaded.predict(IDS, verbose=0), before)
    assert len(loaded.trainable_weights) == len(model.trainable_weights)
    kformer.merge_lora(loaded)
    close(loaded.predict(IDS, verbose=0), before, 1e-5)


def test_heads_stay_trainable():
    model = make_model("TextClassifier", config(), num_classes=3, pooling="attention")
    kformer.enable_lora(model, 1, target=r"block_1/feed_forward/")
    names = {w.path.split("text_classifier/")[-1] for w in model.trainable_weights}
    own = {
        f"encoder/block_1/feed_forward/{p}/lora_kernel_{m}" for p in ("up", "down") for m in "ab"
    }
    assert names == {*own, "classifier/kernel", "classifier/bias", "pooling/query"}, names
    model = lm(adapters=False)
    kformer.enable_lora(model, 1, trainable=lambda path: "final_norm" in path)
    assert sum("lora" not in w.path for w in model.trainable_weights) == 1


def test_remat_trains_the_same():
    models = [lm(), make_model("CausalLM", config(**LLAMA), remat="block")]
    kformer.enable_lora(models[1], 2, alpha=3)
    stir(models[1])
    close(train(models[0]), train(models[1]), 1e-5)
    for a, b in zip(*(values(m.trainable_weights).values() for m in models), strict=True):
        close(a, b, 1e-4)


def test_weights_of_the_base_go_below_adapters(tmp_path):
    base, model = lm(adapters=False), lm()
    base.save_weights(tmp_path / "base.weights.h5")
    model.load_weights(tmp_path / "base.weights.h5")
    exact(out(model), out(base))
    assert all(np.any(backend.to_numpy(p.lora_kernel_a)) for p in adapted(model))  # they can train
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="has 22 weights, the file 30"):
        base.load_weights(tmp_path / "model.weights.h5", skip_mismatch=False)


def test_frozen_stays_frozen(tmp_path):
    """What somebody froze does not train again after loading."""
    model = make_model("TextClassifier", config(), num_classes=3)
    model.backbone.trainable = False
    train(model, y=np.arange(4) % 3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [w.path for w in loaded.trainable_weights] == [w.path for w in model.trainable_weights]
    assert len(loaded.trainable_weights) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(rank=0), "rank must be a whole number above 0, got 0"),
        (dict(rank=True), "rank must be a whole number above 0, got True"),
        (dict(rank=1, alpha=-1), "alpha must be a number above 0, got -1"),
        (dict(rank=1, alpha="4"), "alpha must be a number above 0, got '4'"),
        (dict(rank=1, target="["), r"chosen by a regular expression or a function, got '\['"),
        (dict(rank=1, target=["query"]), "chosen by a regular expression or a function"),
        (dict(rank=1, target="nowhere"), "of .*query/kernel and 10 more, got 'nowhere'"),
        (dict(rank=1, trainable="nowhere"), "must match a weight of .*, got 'nowhere'"),
        (dict(rank=1, target="feed_forward"), r"2-D, got .*/up, .*/gate, .*/down.* \(experts"),
    ],
)
def test_refused_before_anything_changes(arguments, message):
    model = make_model("CausalLM", config(num_experts=3, gated=True, num_layers=3))
    before = [w.path for w in model.trainable_weights]
    with pytest.raises(ValueError, match=message):
        kformer.enable_lora(model, **arguments)
    assert [w.path for w in model.trainable_weights] == before


def test_refused_models():
    model = lm()
    with pytest.raises(ValueError, match="once: merge_lora first, got adapters on .*query/kernel"):
        kformer.enable_lora(model, 2, target="query")
    with pytest.raises(ValueError, match="before enable_lora, .* got adapters on .*query"):
        model.quantize("int8")
    float8 = make_model("CausalLM", config())
    with pytest.raises(ValueError, match="merge_lora needs adapters, got causal_lm without any"):
        kformer.merge_lora(float8)
    float8.quantize("float8")
    with pytest.raises(ValueError, match="float, int8 or int4, got float8"):
        kformer.enable_lora(float8, 2)
    with pytest.raises(ValueError, match="needs a built model with projections, got sequential"):
        kformer.enable_lora(keras.Sequential([keras.layers.Dense(2)]), 2)


def test_adapters_are_given_once():
    """A second time would freeze the first ones, and their file has one rank and one alpha."""
    model = kformer.CausalLM(config())
    kformer.enable_lora(model, 2, "query")
    with pytest.raises(ValueError, match="adapters are given once: merge_lora first"):
        kformer.enable_lora(model, 2, "value")
