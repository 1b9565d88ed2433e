"""What the tests share: the models and configurations under test, and ways to run them.

A new model joins the whole suite by one line in `CASES`.
"""

import functools

import keras
import numpy as np
from keras import ops

import kformer
from kformer import backend

BACKEND = keras.backend.backend()
V, T, S = 23, 8, 6  # vocabulary, target and source length; the same shapes everywhere compile once


def config(**changes):
    """A small configuration with two layers."""
    small = dict(vocabulary_size=V, num_layers=2, hidden_dim=16, num_heads=4, max_length=32)
    return kformer.Config(**{**small, **changes})


CONFIGS = {
    "sinusoidal": config(activation="relu", scale_embeddings=True),
    "bert": config(
        norm_placement="post", position="learned", activation="gelu", embedding_norm=True,
        token_types=2, pooler=True, norm_epsilon=1e-3,
    ),
    "gpt2": config(position="learned", activation="gelu_tanh", position_offset=2),
    "llama": config(
        norm="rms", position="rotary", gated=True, activation="silu", num_key_value_heads=2,
        use_bias=False, tie_embeddings=False,
    ),
    "qwen": config(
        norm="rms", position="rotary", gated=True, activation="silu", num_key_value_heads=1,
        use_bias=False, qkv_bias=True, qk_norm=True, head_dim=6, rotary_dim=4,
        position_layout="interleaved",
    ),
    "t5": config(
        norm="rms", position="relative", relative_buckets=8, relative_distance=6, use_bias=False,
        attention_scale=1.0, output_scale=0.25, bos_id=0,
    ),
    "alibi": config(position="alibi", num_heads=4, window=(3, None), pad_id=2),
    "sandwich": config(
        norm_placement="sandwich", position="none", logit_softcap=2.0, attention_sinks=True,
        output_bias=True,
    ),
    "experts": config(
        position="rotary", num_experts=4, experts_per_token=2, activation="silu", gated=True,
        expert_z=0.0, expert_balance=0.0,
    ),
    "marian": config(
        norm_placement="post", position_layout="half", activation="silu", hidden_dim=12,
        output_bias=True, target_vocabulary_size=19,
    ),
    "m2m": config(
        position_layout="spread", position_offset=2, hidden_dim=15, num_heads=3,
        scale_embeddings=True, pad_id=1, bos_id=2,
    ),
}  # fmt: skip

# (model, configuration, further arguments)
CASES = [
    ("Encoder", "bert", {}),
    ("Encoder", "alibi", {}),
    ("Decoder", "gpt2", {}),
    ("Decoder", "experts", {}),
    ("Seq2Seq", "m2m", {}),
    ("TextClassifier", "bert", {"num_classes": 3, "pooling": "first"}),
    ("TextClassifier", "llama", {"num_classes": 3, "pooling": "attention"}),
    ("TextClassifier", "qwen", {"num_classes": 3, "pooling": "last", "causal": True}),
    ("TokenClassifier", "sandwich", {"num_classes": 5}),
    ("MaskedLM", "bert", {}),
    ("CausalLM", "sinusoidal", {}),
    ("CausalLM", "llama", {}),
    ("CausalLM", "qwen", {}),
    ("CausalLM", "sandwich", {}),
    ("CausalLM", "alibi", {}),
    ("Seq2SeqLM", "t5", {}),
    ("Seq2SeqLM", "marian", {}),
]


class Case:
    """A model with random weights, and inputs for it."""

    def __init__(self, kind, config_name, arguments, **more):
        self.kind, self.arguments = kind, {**arguments, **more}
        self.config = CONFIGS[config_name]
        self.model = make_model(kind, self.config, **self.arguments)
        self.name = f"{kind}-{config_name}"
        self.is_seq2seq = kind.startswith("Seq2Seq")
        self.is_causal = kind in ("Decoder", "CausalLM") or self.is_seq2seq
        self.per_token = kind != "TextClassifier"
        self.size = self.config.target_size

    def ids(self, rows=3, length=T, seed=0):
        """Random ids without padding (nor the id that decoding starts from)."""
        pool = [i for i in range(self.size) if i != self.config.pad_id]
        return np.random.default_rng(seed).choice(pool, (rows, length)).astype("int32")

    def source(self, rows=3, length=S, seed=7):
        pool = [i for i in range(self.config.vocabulary_size) if i != self.config.pad_id]
        return np.random.default_rng(seed).choice(pool, (rows, length)).astype("int32")

    def wrap(self, ids, source=None):
        """ids (or a dict) as the model takes them."""
        if not self.is_seq2seq:
            return ids
        rows = len(ids["ids"] if isinstance(ids, dict) else ids)
        return {"source": self.source(rows) if source is None else source, "target": ids}

    def pad(self, ids, left=0, right=0):
        return np.pad(ids, ((0, 0), (left, right)), constant_values=self.config.pad_id)

    def run(self, ids, source=None, **kwargs):
        return run(self.model, self.wrap(ids, source), **kwargs)

    def reference(self, inputs, weights=None):
        known = {key: v for key, v in self.arguments.items() if key in ("pooling", "causal")}
        weights = weights_of(self.model) if weights is None else weights
        return reference.model_output(self.kind, self.config, weights, inputs, **known)


def make_model(kind, config, seed=0, **arguments):
    """A model whose weights are all random and different, the same on every backend."""
    model = getattr(kformer, kind)(config, **arguments)
    randomize(model, seed)
    return model


def randomize(layer, seed=0, scale=0.2):
    """Random weights, biases and gains included, so that nothing hides behind a zero."""
    random = np.random.default_rng(seed)
    for weight in layer.weights:
        value = random.normal(size=weight.shape) * scale
        if weight.path.endswith(("gamma", "scale")):
            value += 1.0
        if not weight.path.endswith(("statistics", "choice_bias")):
            weight.assign(value.astype("float32"))


@functools.cache
def case(number):
    return Case(*CASES[number])


def case_ids(number):
    kind, name, _ = CASES[number]
    return f"{kind}-{name}"


def weights_of(layer):
    """{path: float64 array}."""
    return {weight.path: backend.to_numpy(weight).astype("float64") for weight in layer.weights}


_compiled = {}


def run(layer, *inputs, training=False, **kwargs):
    """The output as NumPy; on JAX compiled as a whole, which is faster than op by op."""
    if BACKEND != "jax":
        with backend.no_gradient():
            out = layer(*inputs, training=training, **kwargs)
        return keras.tree.map_structure(backend.to_numpy, out)
    import jax

    key = (layer, training, tuple(sorted(kwargs.items())))
    if key not in _compiled:

        def pure(weights, states, inputs):
            mapping = list(zip(layer.trainable_variables, weights, strict=True))
            mapping += list(zip(layer.non_trainable_variables, states, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return layer(*inputs, training=training, **kwargs)

        _compiled[key] = jax.jit(pure)
    inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
    weights = [v.value for v in layer.trainable_variables]
    states = [v.value for v in layer.non_trainable_variables]
    return keras.tree.map_structure(backend.to_numpy, _compiled[key](weights, states, inputs))


def called(layer, *inputs):
    """What a built layer gives, as a tensor; on JAX compiled as a whole."""
    return backend.inference(lambda layer, *x: layer(*x), layer, *inputs)


def close(a, b, tolerance, what=""):
    """|a − b| ≤ tolerance · (1 + |b|), everywhere, NaN nowhere."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    assert a.shape == b.shape, f"{what} shapes {a.shape} and {b.shape}"
    assert np.isfinite(a).all() and np.isfinite(b).all(), f"{what} not finite"
    worst = (np.abs(a - b) / (1.0 + np.abs(b))).max(initial=0.0)
    assert worst <= tolerance, f"{what} differ by {worst:.3g}, allowed {tolerance:.3g}"


def exact(a, b, what=""):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and np.array_equal(a, b), f"{what} differ by {np.abs(a - b).max()}"


def directional(function, weights, gradients, seed=0, step=1e-6, tolerance=1e-5):
    """Gradients against central differences of a float64 function, one random direction each.

    function({path: array}) → number; gradients {path: array}.
    """
    random = np.random.default_rng(seed)
    # A gradient that is zero by nature (the bias of keys) is rounding noise of the others: a few
    # units of 1.2e-7 for each number that was added up.
    noise = 1e-6 * max(np.linalg.norm(gradient) for gradient in gradients.values())
    for path, gradient in gradients.items():
        direction = random.choice([-1.0, 1.0], gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = dict(weights)
            moved[path] = weights[path] + sign * step * direction
            ends.append(function(moved))
        expected = (ends[0] - ends[1]) / (2 * step)
        found = float((gradient.astype("float64") * direction).sum())
        allowed = tolerance * np.linalg.norm(gradient) + noise
        assert abs(found - expected) <= allowed, f"{path}: {found} and {expected}, ± {allowed:.2g}"


import reference  # noqa: E402  (last: it is data for the functions above)
