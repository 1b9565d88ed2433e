"""Values and gradients of every layer and model against the float64 reference, on rows with
padding, with a row of nothing but padding, and with packed documents (P7)."""

import numpy as np
import pytest
import reference
from keras import ops
from support import (
    CASES,
    case,
    case_ids,
    close,
    config,
    directional,
    randomize,
    run,
    weights_of,
)  # fmt: skip

from kformer import backend, layers
from kformer.layers.feedforward import Project
from kformer.layers.heads import Bias, Pooling

NUMBERS = range(len(CASES))


def batches(c):
    """Inputs by name: what a row can look like."""
    ids = c.ids()
    ragged = ids.copy()
    pad = c.config.pad_id
    ragged[0, 5:], ragged[1, :3] = pad, pad
    empty = ragged.copy()
    empty[2] = pad
    yield "full", c.wrap(ids)
    yield "ragged", c.wrap(ragged, source=c.pad(c.source()[:, 2:], right=2))
    yield "empty row", c.wrap(empty)
    if c.per_token:
        segments = np.array([[1] * 3 + [2] * 5, [1] * 4 + [2] * 2 + [0] * 2, [1] * 8], "int32")
        packed = {"ids": ids, "segments": segments}
        yield "packed", c.wrap(packed)
    if c.kind == "CausalLM":
        yield "prefix", {"ids": ragged, "prefix": np.array([3, 2, 0], "int32")}
    if c.config.token_types:
        types = (np.arange(ids.size).reshape(ids.shape) % 2).astype("int32")
        yield "types", {"ids": ids, "token_types": types}


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_values(number):
    c = case(number)
    for name, inputs in batches(c):
        close(run(c.model, inputs), c.reference(inputs), 1e-5, name)


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_hidden_states(number):
    c = case(number)
    out, states = run(c.model, c.wrap(c.ids()), return_hidden=True)
    close(out, c.run(c.ids()), 1e-6)
    groups = states.values() if isinstance(states, dict) else [states]
    for group in groups:
        layers = c.config.num_layers
        assert len(group) == layers + 1 and all(s.shape[-1] == c.config.hidden_dim for s in group)


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_gradients(number):
    c = case(number)
    ids = c.ids()
    ids[0, 5:], ids[2] = c.config.pad_id, c.config.pad_id
    inputs = c.wrap(ids)
    shape = c.reference(inputs).shape
    direction = np.random.default_rng(1).normal(size=shape)

    def loss(model, *_):
        out = model(inputs, training=False)
        return ops.sum(out * ops.convert_to_tensor(direction.astype("float32")))

    _, found, _ = backend.gradients(loss, c.model)
    variables = c.model.trainable_variables
    gradients = {v.path: g for v, g in zip(variables, found, strict=True)}
    assert all(np.isfinite(g).all() for g in gradients.values())
    directional(
        lambda w: (c.reference(inputs, w) * direction).sum(), weights_of(c.model), gradients
    )


# Layers by themselves: each is named "it", so that the reference finds its weights.

REAL = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
PLACES = reference.positions_of(REAL)
SMALL = config(hidden_dim=8, num_heads=2)
GATED = config(hidden_dim=8, num_heads=2, gated=True, activation="silu", intermediate_dim=6)
ROUTED = GATED.replace(num_experts=3, experts_per_token=2)
MODERN = config(
    hidden_dim=8, num_heads=4, num_key_value_heads=2, head_dim=6, norm="rms", qk_norm=True,
    norm_placement="sandwich", position="rotary", position_layout="interleaved", rotary_dim=4,
    logit_softcap=5.0, attention_sinks=True, use_bias=False, norm_epsilon=1e-3, window=3,
    gated=True, activation="silu", rotary_base=100.0,
)  # fmt: skip
ROTARY = dict(base=100.0, rotary_dim=4, layout="interleaved")
ATTENTION = dict(num_key_value_heads=2, head_dim=6, qk_norm=True, epsilon=1e-3, rotary=ROTARY,
                 softcap=5.0, sinks=True, use_bias=False)  # fmt: skip


def real_only(x):
    return np.where(REAL[..., None], x, 0.0)


def attention_truth(c, causal):
    def truth(w, x):
        x = real_only(x)
        seen = reference.may_see(REAL, REAL, causal=causal, window=c.window)
        return reference.multi_head(x, x, c, w, "it", seen, PLACES)[0]

    return truth


def block_truth(c, causal):
    def truth(w, x):
        seen = reference.may_see(REAL, REAL, causal=causal, window=c.window_of(0))
        bias = reference.score_bias(c, w, "it", PLACES, causal)
        return reference.block(real_only(x), c, w, "it", REAL, seen, PLACES, bias)

    return truth


MEMORY = np.random.default_rng(5).normal(size=(4, 3, 8)).astype("float32")
MEMORY_REAL = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]], bool)


def cross_truth(w, x):
    seen, across = reference.may_see(REAL, REAL, causal=True), reference.may_see(REAL, MEMORY_REAL)
    memory = np.where(MEMORY_REAL[..., None], MEMORY, 0.0).astype("float64")
    given = REAL, seen, PLACES, None, memory, across
    return reference.block(real_only(x), SMALL, w, "it", *given)


def twice(layer):
    """AddNorm round the sublayer h → 2·h."""
    return lambda x: layer(x, 2.0 * layer(x))


def add_norm_truth(c):
    return lambda w, x: reference.residual(x, lambda h: 2.0 * h, c, w, "it")


def relative(w, x):
    w = {"it/relative_bias/table/embeddings": w["it/table/embeddings"]}
    c = config(num_heads=2, position="relative", relative_buckets=8, relative_distance=6)
    return reference.score_bias(c, w, "it", PLACES, causal=False)


def feed_forward(c):
    return lambda w, x: reference.feed_forward(x, c, w, "it", REAL)


# name → (layer, how it is called on x (4, 5, 8), the same by the reference from weights and x)
MASK = dict(mask=REAL)
LAYERS = {
    "project": (Project(8), {}, lambda w, x: reference.dense(x, w, "it")),
    "feed_forward": (layers.FeedForward(8, 32), {}, feed_forward(SMALL)),
    "gated": (layers.FeedForward(8, 6, "silu", gated=True), {}, feed_forward(GATED)),
    "experts": (layers.MixtureOfExperts(8, 6, 3), dict(real=REAL), feed_forward(ROUTED)),
    "capacity": (
        layers.MixtureOfExperts(8, 6, 3, capacity=3.0, balance=0.0, z=0.0),
        dict(real=REAL, training=True),
        feed_forward(ROUTED),
    ),
    "attention": (
        layers.MultiHeadAttention(8, 4, window=3, causal=True, **ATTENTION),
        MASK,
        attention_truth(MODERN, causal=True),
    ),
    "plain_attention": (layers.MultiHeadAttention(8, 2), MASK, attention_truth(SMALL, False)),
    "encoder_block": (layers.EncoderBlock(SMALL), MASK, block_truth(SMALL, False)),
    "modern_block": (layers.DecoderBlock(MODERN), MASK, block_truth(MODERN, True)),
    "cross_block": (layers.DecoderBlock(SMALL, cross_attention=True), "memory", cross_truth),
    "expert_block": (layers.DecoderBlock(ROUTED), MASK, block_truth(ROUTED, True)),
    **{
        f"{position}_block": (layers.EncoderBlock(c), MASK, block_truth(c, False))
        for position in ("alibi", "relative")
        for c in [SMALL.replace(position=position, norm_placement="post")]
    },
    **{
        f"{placement}_{norm}": (
            layers.AddNorm(norm, placement), "twice",
            add_norm_truth(config(hidden_dim=8, norm=norm, norm_placement=placement)),
        )
        for placement in ("pre", "post", "sandwich") for norm in ("layer", "rms")
    },
    "sinusoidal": (
        layers.SinusoidalPositions("half", offset=2), MASK,
        lambda w, x: x + reference.sinusoid(PLACES + 2, 8, "half"),
    ),
    "learned": (
        layers.LearnedPositions(6, 8, offset=1), MASK,
        lambda w, x: x + w["it/table/embeddings"][PLACES + 1],
    ),
    "rotary": (
        layers.RotaryPositions(100.0, layout="interleaved"), "heads",
        lambda w, x: reference.rotate(
            x.reshape(4, 5, 2, 4), PLACES, 100.0, 4, "interleaved").reshape(4, 5, 8),
    ),
    "relative_bias": (layers.RelativeBias(2, 8, 6), "positions", relative),
    "alibi_bias": (
        layers.AlibiBias(3), "positions",
        lambda w, x: reference.score_bias(
            config(hidden_dim=9, num_heads=3, position="alibi"), w, "it", PLACES, False),
    ),
    "embedding": (
        layers.TokenEmbedding(7, 8, scale=True), "ids",
        lambda w, x: w["it/table/embeddings"][PLACES] * 8**0.5,
    ),
    "output_projection": (
        layers.TokenEmbedding(7, 8), dict(reverse=True),
        lambda w, x: x @ w["it/table/embeddings"].T,
    ),
    **{
        f"pooling_{mode}": (
            Pooling(mode), dict(real=REAL),
            lambda w, x, mode=mode: reference.pool(x, REAL, mode, w.get("it/query")),
        )
        for mode in ("mean", "first", "last", "attention")
    },
    "bias": (Bias(8), {}, lambda w, x: x + w["it/bias"]),
}  # fmt: skip


def caller(layer, how):
    """x → the layer's output."""
    if how == "twice":
        return twice(layer)
    if how == "heads":
        return lambda x: ops.reshape(layer(ops.reshape(x, (4, 5, 2, 4)), PLACES), (4, 5, 8))
    if how == "memory":
        to_tensor = ops.convert_to_tensor
        masks = dict(x_mask=to_tensor(REAL), memory_mask=to_tensor(MEMORY_REAL))
        return lambda x: layer(x, memory=to_tensor(MEMORY), **masks)
    if how in ("positions", "ids"):
        return lambda x: layer(ops.convert_to_tensor(PLACES))
    how = {k: ops.convert_to_tensor(v) if k in ("real", "mask") else v for k, v in how.items()}
    return lambda x: layer(x, **how)


# What a layer is built for, where that is not (4, 5, 8).
SHAPES = dict(twice=(4, 5, 8), memory=(4, 5, 8), heads=(4, 5, 2, 4), positions=(4, 5), ids=(4, 5))


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """Values, and gradients by every weight and by the input."""
    original, how, truth = LAYERS[name]
    layer = type(original).from_config({**original.get_config(), "name": "it"})
    x = np.random.default_rng(0).normal(size=(4, 5, 8)).astype("float32")
    call = caller(layer, how)
    layer.build(SHAPES.get(how) if isinstance(how, str) else x.shape)
    randomize(layer, 3, scale=0.4)
    numbers = {**weights_of(layer), "x": x.astype("float64")}
    expected = truth(numbers, numbers["x"])
    direction = np.random.default_rng(1).normal(size=expected.shape)

    def loss(layer, x, direction):
        return ops.sum(call(x) * direction)

    given = layer, x, direction.astype("float32")
    _, by_weight, (by_x, found) = backend.gradients(loss, *given)  # by the direction: the output
    close(found, expected, 1e-5)
    paths = [v.path for v in layer.trainable_variables]
    gradients = {"x": by_x, **dict(zip(paths, by_weight, strict=True))}
    assert all(np.isfinite(g).all() for g in gradients.values())
    directional(lambda w: (truth(w, w["x"]) * direction).sum(), numbers, gradients)
