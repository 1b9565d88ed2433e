"""One contract for every layer: config, shapes, masks, precision, gradients, saving, fit."""

import json

import keras
import numpy as np
import pytest
from keras import ops
from support import called, close, config, exact

from kformer import backend, layers
from kformer.layers.feedforward import Project
from kformer.layers.heads import Bias, Pooling

D = 8
SMALL = config(hidden_dim=D, num_heads=2).to_dict()
ROTARY = dict(base=100.0, layout="interleaved", scaling={"type": "linear", "factor": 2.0})

# name → (class, arguments other than the defaults). All map (B, T, D) to (B, T, D).
LAYERS = {
    "project": (Project, dict(units=D, use_bias=False)),
    "feed_forward": (layers.FeedForward, dict(hidden_dim=D, intermediate_dim=9, activation="gelu")),
    "gated": (
        layers.FeedForward,
        dict(hidden_dim=D, intermediate_dim=6, activation="silu", gated=True, use_bias=False),
    ),
    "experts": (
        layers.MixtureOfExperts,
        dict(hidden_dim=D, intermediate_dim=6, num_experts=3, experts_per_token=1, gated=False),
    ),
    "add_norm": (layers.AddNorm, dict(norm="rms", placement="pre", epsilon=1e-3)),
    "sinusoidal": (layers.SinusoidalPositions, dict(layout="half", offset=2)),
    "learned": (layers.LearnedPositions, dict(max_length=9, hidden_dim=D, offset=1)),
    "attention": (
        layers.MultiHeadAttention,
        dict(hidden_dim=D, num_heads=4, num_key_value_heads=2, causal=True, window=3, rotary=ROTARY,
             head_dim=6, qk_norm=True, softcap=5.0, sinks=True, output_bias=False),
    ),
    "encoder_block": (layers.EncoderBlock, dict(config=SMALL, layer=1)),
    "decoder_block": (layers.DecoderBlock, dict(config={**SMALL, "position": "relative"})),
    "alibi_block": (layers.EncoderBlock, dict(config={**SMALL, "position": "alibi"})),
    "bias": (Bias, dict(units=D)),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(which, **more):
    kind, arguments = LAYERS[which]
    return kind(**arguments, **more)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@every_layer
def test_p1_config(name):
    layer = make(name, name="mine", dtype="mixed_bfloat16", trainable=False)
    written = layer.get_config()
    again = type(layer).from_config(json.loads(json.dumps(written)))
    assert json.dumps(again.get_config()) == json.dumps(written)
    assert again.name == "mine" and again.compute_dtype == "bfloat16" and not again.trainable
    for key, value in LAYERS[name][1].items():
        if key != "config":
            assert written[key] == value
    public = lambda x: {n for n in dir(x) if not n.startswith("_")}  # noqa: E731
    assert public(again) == public(layer)


@every_layer
def test_p34_shapes(name):
    """Built by an eager call, a symbolic call or build(): the same weights and shapes."""
    x = numbers(2, 5, D)
    eager, symbolic, built = make(name), make(name), make(name)
    shape = tuple(eager(x).shape)
    built.build((None, None, D))
    for static in ((5, D), (None, D)):
        out = symbolic(keras.Input(static))
        assert len(out.shape) == 3 and out.shape[-1] == shape[-1]
        assert out.shape[1] in (static[0], None)
    sizes = [
        [(w.path.split("/", 1)[1], tuple(w.shape)) for w in m.weights]
        for m in (eager, symbolic, built)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert tuple(eager.compute_output_shape((2, 5, D))) == shape
    assert tuple(called(eager, numbers(1, 1, D)).shape) == (1, 1, D)


@every_layer
def test_p35_mask_goes_through(name):
    """The implicit mask comes out as it went in, without a warning, eagerly and symbolically."""
    ids = np.array([[1, 2, 0, 0], [3, 4, 5, 0]])
    embed = keras.layers.Embedding(9, D, mask_zero=True)
    x = embed(ids)
    out = make(name)(x)
    exact(backend.to_numpy(keras_mask(out)), ids != 0)
    symbol = make(name)(embed(keras.Input((4,), dtype="int32")))
    assert keras_mask(symbol) is not None


def keras_mask(x):
    """What the next layer would see."""

    class Look(keras.layers.Layer):
        def call(self, x, mask=None):
            self.seen = mask
            return x

        def compute_mask(self, x, mask=None):
            return mask

    look = Look()
    look(x)
    return look.seen


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"])
@every_layer
def test_dtype_policies(name, dtype):
    """The policy reaches every child; mixed precision keeps its variables in float32."""
    layer = make(name, dtype=dtype)
    x, compute = numbers(2, 5, D), dtype.replace("mixed_", "")
    symbolic = layer(keras.Input((5, D), dtype=compute))
    assert keras.backend.standardize_dtype(symbolic.dtype) == compute
    out = called(layer, x)
    assert keras.backend.standardize_dtype(out.dtype) == compute
    own_precision = ("router", "statistics", "choice_bias", "seed_generator")
    for weight in layer.weights:
        expected = "float32" if dtype.startswith("mixed") else compute
        if not any(part in weight.path for part in own_precision):
            assert keras.backend.standardize_dtype(weight.dtype) == expected, weight.path
    for child in layer._flatten_layers(include_self=False):
        assert child.compute_dtype == compute or child.name == "router", child.path
    exact_layer = make(name)
    exact_layer.build((None, None, D))
    exact_layer.set_weights([backend.to_numpy(w).astype("float32") for w in layer.weights])
    tolerance = 0.1 if compute == "bfloat16" else 0.02
    close(
        backend.to_numpy(out).astype("float32"), backend.to_numpy(called(exact_layer, x)), tolerance
    )


@every_layer
def test_in_a_functional_model(name, tmp_path):
    """Trained by fit behind an embedding, saved and loaded: the same numbers."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.TokenEmbedding(11, D, pad_id=0)(inputs)
    x = make(name)(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile("sgd", "mse")
    ids = np.random.default_rng(0).integers(0, 11, (4, 6))
    before = [backend.to_numpy(v).copy() for v in model.trainable_variables]
    model.fit(ids, numbers(4, 6, 2), verbose=0)
    still = {
        v.path
        for v, b in zip(model.trainable_variables, before, strict=True)
        if np.array_equal(backend.to_numpy(v), b)
    }
    assert not {p for p in still if "key/bias" not in p and "positions" not in p}, still
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    exact(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", [Project, Bias])
def test_gradients_of_biases_do_not_saturate(kind, dtype):
    """They are sums over all tokens: added up in bfloat16, 4096 ones would give 256."""
    layer = kind(4, dtype=dtype)
    layer.build((None, None, 4))

    def loss(layer, x):
        return ops.sum(ops.cast(layer(x), "float32"))

    _, by_weight, _ = backend.gradients(loss, layer, np.ones((8, 512, 4), "float32"))
    assert (by_weight[-1].astype("float32") == 4096).all()


def test_cross_attention_masks():
    """Both implicit masks are honoured: the context's for keys, the query's handed on."""
    embed = keras.layers.Embedding(9, D, mask_zero=True)
    x, context = embed(np.array([[1, 2, 0]])), embed(np.array([[3, 4, 0, 0]]))
    short = embed(np.array([[3, 4]]))
    for layer in (
        layers.MultiHeadAttention(D, 2),
        layers.DecoderBlock(config(hidden_dim=D, num_heads=2), cross_attention=True),
    ):
        long, cut = layer(x, context), layer(x, short)
        close(backend.to_numpy(long), backend.to_numpy(cut), 1e-6)
        exact(backend.to_numpy(keras_mask(long)), [[True, True, False]])
    with pytest.raises(ValueError, match="memory=None"):
        layer(x)


def test_headline_2_residuals_keep_the_mask():
    x = keras.layers.Embedding(9, D, mask_zero=True)(np.array([[1, 2, 0]]))
    assert keras_mask(x + x) is None  # what Keras does outside of a layer
    exact(backend.to_numpy(keras_mask(layers.AddNorm()(x, x))), [[True, True, False]])


def test_add_norm_formulas():
    x, y = numbers(2, 3, D), numbers(2, 3, D, seed=1)

    def norm(a, epsilon=1e-5):
        centred = a - a.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)

    pre, post, both = (layers.AddNorm(placement=p) for p in ("pre", "post", "sandwich"))
    close(backend.to_numpy(pre(x)), norm(x), 1e-5)
    close(backend.to_numpy(pre(x, y)), x + y, 1e-6)
    close(backend.to_numpy(post(x)), x, 0)
    close(backend.to_numpy(post(x, y)), norm(x + y), 1e-5)
    close(backend.to_numpy(both(x, y)), x + norm(y), 1e-5)
    assert [len(layer.weights) for layer in (pre, post, both)] == [2, 2, 4]


def test_token_embedding():
    layer = layers.TokenEmbedding(7, 4, scale=True, pad_id=0)
    ids = np.array([[1, 0], [6, 2]])
    out = layer(ids)
    table = backend.to_numpy(layer.table.embeddings)
    close(backend.to_numpy(out), 2.0 * table[ids], 1e-6)
    exact(backend.to_numpy(keras_mask(out)), ids != 0)
    hidden = numbers(2, 3, 4)
    close(backend.to_numpy(layer(hidden, reverse=True)), hidden @ table.T, 1e-5)
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match=rf"\[0, 7\), got {wrong}"):
            layer(np.array([[wrong]]))


@pytest.mark.parametrize("mode", ["mean", "first", "last", "attention"])
def test_pooling(mode):
    import reference

    layer = Pooling(mode)
    x = numbers(3, 5, D)
    real = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
    out = backend.to_numpy(layer(x, real))
    query = backend.to_numpy(layer.query) if mode == "attention" else None
    close(out, reference.pool(x.astype("float64"), real, mode, query), 1e-5)
    assert Pooling.from_config(layer.get_config()).mode == mode
    assert layer.compute_output_shape((3, 5, D)) == (3, D)


def test_arguments():
    with pytest.raises(ValueError, match="activation must be one of relu.*got 'swish'"):
        layers.FeedForward(4, 8, activation="swish")
    with pytest.raises(ValueError, match="placement must be one of pre.*got 'mid'"):
        layers.AddNorm(placement="mid")
    with pytest.raises(ValueError, match="norm must be one of layer.*got 'batch'"):
        layers.AddNorm(norm="batch")
    with pytest.raises(ValueError, match="layout must be.*got 'odd'"):
        layers.SinusoidalPositions(layout="odd")
    with pytest.raises(ValueError, match="experts_per_token=3, num_experts=2"):
        layers.MixtureOfExperts(4, 8, 2, 3)


def test_muon_and_lora_reach_the_projections():
    layer = layers.MultiHeadAttention(D, 2)
    layer.build((None, None, D))
    assert all(len(w.shape) == 2 for w in layer.weights if w.path.endswith("kernel"))
    layer.query.enable_lora(2)
    assert any("lora" in w.path for w in layer.trainable_weights)
    assert tuple(layer(numbers(1, 3, D)).shape) == (1, 3, D)


def test_positions_count_real_tokens():
    """Behind an implicit mask, left padding moves nothing."""
    embed = keras.layers.Embedding(9, D, mask_zero=True)
    for layer in (layers.SinusoidalPositions(), layers.LearnedPositions(4, D)):
        plain = backend.to_numpy(layer(embed(np.array([[3, 4, 5]]))))
        padded = backend.to_numpy(layer(embed(np.array([[0, 0, 3, 4, 5]]))))
        close(padded[:, 2:], plain, 1e-6)


def test_rotary_positions_are_never_forgotten():
    """Keys that were made before are turned as they are inside; a finished mask needs positions."""
    layer = layers.MultiHeadAttention(D, 2, rotary=ROTARY)
    x, memory = numbers(2, 3, D), numbers(2, 4, D, seed=1)
    before = layer.build(x.shape) or layer.keys_values(ops.convert_to_tensor(memory))
    close(
        backend.to_numpy(layer(x, context=before)), backend.to_numpy(layer(x, context=memory)), 1e-6
    )
    seen = ops.ones((2, 1, 3, 3), dtype="bool")
    given = layer(x, visible=seen, positions=np.array([[0, 1, 2]] * 2))
    close(backend.to_numpy(given), backend.to_numpy(layer(x)), 1e-6)
    with pytest.raises(ValueError, match="positions= beside visible=, got None"):
        layer(x, visible=seen)


def test_context_of_another_width():
    layer = layers.MultiHeadAttention(D, 2)
    out = layer(numbers(2, 3, D), context=numbers(2, 4, 5))
    assert tuple(out.shape) == (2, 3, D)
    memory = layer.keys_values(ops.convert_to_tensor(numbers(2, 4, 5)))
    close(backend.to_numpy(layer(numbers(2, 3, D), context=memory)), backend.to_numpy(out), 1e-6)
    with pytest.raises(ValueError, match="num_heads=0"):
        layers.MultiHeadAttention(8, 0)
    with pytest.raises(ValueError, match="window=-1"):
        layers.MultiHeadAttention(8, 2, window=-1)
