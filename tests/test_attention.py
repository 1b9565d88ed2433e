"""Attention: what the kernel must not do, windows in blocks, scores, the cache."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from support import BACKEND, close, config, exact, make_model, randomize, run, weights_of

from kformer import backend, kernels, masks
from kformer.cache import BlockCache, KeysValues, empty
from kformer.layers import DecoderBlock, MultiHeadAttention
from kformer.layers.attention import Sight, attention_weights


def heads(random, *shape):
    return random.normal(size=shape).astype("float32")


@pytest.mark.parametrize("biased", [False, True])
def test_p6_and_headline_1_fully_masked_rows(biased):
    """A query that may see nothing gives exactly zero, and gradients are right beside it.

    Values and gradients come from whatever kernel the layer chooses here, against differences.
    """
    random = np.random.default_rng(0)
    layer = MultiHeadAttention(8, 2, use_bias=False)
    x = heads(random, 2, 6, 8) * 3.0
    layer.build(x.shape)
    randomize(layer, 1, 0.8)
    seen = random.random((2, 6, 6)) < 0.6
    seen[:, 2] = seen[1, 5] = False
    bias = heads(random, 2, 2, 6, 6) if biased else None

    def output(layer, x):
        given = {} if bias is None else {"bias": ops.convert_to_tensor(bias)}
        return layer(x, attention_mask=ops.convert_to_tensor(seen), training=True, **given)

    direction = heads(random, 2, 6, 8)
    out = backend.to_numpy(output(layer, ops.convert_to_tensor(x)))
    assert (out[:, 2] == 0).all() and (out[1, 5] == 0).all()

    def loss(layer, x):
        return ops.sum(output(layer, x) * ops.convert_to_tensor(direction))

    _, by_weight, by_input = backend.gradients(loss, layer, x)
    w64 = weights_of(layer)
    visible = np.broadcast_to(seen[:, None], (2, 2, 6, 6))

    def truth(w, x):
        w = {path.split("/", 1)[1]: value for path, value in w.items()}
        q, k, v = (reference.dense(x, w, n).reshape(2, 6, 2, 4) for n in ("query", "key", "value"))
        out, _ = reference.attention(q, k, v, visible, bias, layer.scale)
        return (reference.dense(out.reshape(2, 6, 8), w, "output") * direction).sum()

    x64 = x.astype("float64")
    for path, found in [*zip(w64, by_weight, strict=True), ("x", by_input[0])]:
        assert np.isfinite(found).all()
        step = 1e-6 * random.choice([-1.0, 1.0], found.shape)
        ends = []
        for sign in (1, -1):
            w, moved = dict(w64), x64
            if path == "x":
                moved = x64 + sign * step
            else:
                w[path] = w64[path] + sign * step
            ends.append(truth(w, moved))
        slope = (ends[0] - ends[1]) / 2e-6
        assert abs(slope - (found * step * 1e6).sum()) <= 1e-5 * np.linalg.norm(found) + 1e-6, path


def test_headline_3_masked_values_do_not_leak():
    """Where nothing may be seen, hidden values must not shine through as their mean."""
    random = np.random.default_rng(0)
    layer = MultiHeadAttention(8, 2)
    x, other = heads(random, 1, 4, 8), heads(random, 1, 4, 8)
    other[:, 0] = x[:, 0]
    mask = np.zeros((4, 4), bool)
    first, second = (backend.to_numpy(layer(a, attention_mask=mask)) for a in (x, other))
    exact(first, second)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"])
def test_p8_low_precision_is_finite(dtype):
    """Scores up to 6e4, two masks together and a row of padding: no NaN, no infinity."""
    layer = MultiHeadAttention(4, 1, causal=True, use_bias=False, dtype=dtype)
    layer.build((2, 5, 4))
    for projection in (layer.query, layer.key):
        projection.kernel.assign(np.eye(4))
    x = np.full((2, 5, 4), 172.0, "float32")  # 4 · 172² / √4 ≈ 59,000
    x[:, ::2] *= -1
    mask = np.ones((2, 5), bool)
    mask[1] = mask[0, 3:] = False

    def loss(layer, x):
        out = layer(
            x,
            attention_mask=ops.convert_to_tensor(np.tri(5, dtype=bool)),
            mask=ops.convert_to_tensor(mask),
        )
        return ops.sum(ops.cast(out, "float32"))

    value, by_weight, by_input = backend.gradients(loss, layer, x)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in by_weight + by_input)


@pytest.mark.parametrize("biased", [False, True])
def test_p23_implementations_agree(biased):
    """The backend's kernel, the plain products, and repeated heads for grouped ones: values to
    1e-6 and gradients to 1e-5, with a row that sees nothing."""
    random = np.random.default_rng(0)
    query, key, value = (heads(random, 2, n, 7, 5) for n in (6, 2, 2))
    seen = random.random((2, 1, 7, 7)) < 0.7
    seen[0, 0, 3] = False
    seen = ops.convert_to_tensor(seen)
    bias = ops.convert_to_tensor(heads(random, 2, 6, 7, 7)) if biased else None

    def plain(query, key, value, repeats=1):
        weights = attention_weights(query, key, seen, bias, scale=0.4)
        return ops.matmul(weights, ops.repeat(value, 3 // repeats, axis=1))

    def repeated(query, key, value):
        return plain(query, *(ops.repeat(x, 3, axis=1) for x in (key, value)), repeats=3)

    def fused(query, key, value):
        return kernels.fused_attention(query, key, value, seen, bias, 0.4)

    layer = MultiHeadAttention(8, 2)  # the product of weights and values that the layer uses
    layer.build((None, None, 8))
    layer.scale = 0.4

    def own(query, key, value):
        memory = KeysValues(key, value)
        return layer._attend(query, memory, seen, bias, training=False, scores_wanted=True)[0]

    ways = [plain, repeated, own]
    if BACKEND == "torch":
        ways.append(fused)
    else:
        tensors = (ops.convert_to_tensor(x) for x in (query, key, value))
        assert fused(*tensors) is None, "a kernel that this test must try"
    direction, results = heads(random, 2, 6, 7, 5), []
    for way in ways:

        def loss(_, query, key, value, direction, way=way):
            return ops.sum(way(query, key, value) * direction)

        *_, found = backend.gradients(loss, layer, query, key, value, direction)
        results.append(found)
    for found in results[1:]:
        close(found[3], results[0][3], 1e-6)  # by the direction: the values
        for a, b in zip(found[:3], results[0][:3], strict=True):
            close(a, b, 1e-5)


def test_fused_kernel_is_used(monkeypatch):
    """A dropout rate rules the kernel out only while training."""
    calls = []
    original = kernels.fused_attention
    counted = lambda *args: calls.append(1) or original(*args)  # noqa: E731
    monkeypatch.setattr(kernels, "fused_attention", counted)
    x = heads(np.random.default_rng(0), 1, 4, 8)
    layer = MultiHeadAttention(8, 2, dropout=0.5)
    layer(x, training=False)
    assert len(calls) == 1
    layer(x, training=True)
    assert len(calls) == 1
    MultiHeadAttention(8, 2)(x, training=True)
    assert len(calls) == 2
    for ruled_out in (dict(softcap=1.0), dict(sinks=True)):
        MultiHeadAttention(8, 2, **ruled_out)(x)
    layer(x, return_attention_scores=True)
    assert len(calls) == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [129, 192, 200, 331])
def test_p32_windows_in_blocks(length, causal):
    """Long rows are cut into blocks: same numbers as the explicit mask, zero outside of it."""
    window = 9
    random = np.random.default_rng(0)
    x = heads(random, 2, length, 8)
    mask = np.ones((2, length), bool)
    mask[0, -40:] = mask[1, :13] = False
    layer = MultiHeadAttention(8, 2, causal=causal, window=window)
    plain = MultiHeadAttention(8, 2)
    plain.build(x.shape)
    layer.build(x.shape)
    plain.set_weights(layer.get_weights())
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    explicit = np.abs(distance) < window
    explicit = explicit & (distance >= 0) if causal else explicit
    mask = ops.convert_to_tensor(mask)
    blocks = backend.to_numpy(layer(x, mask=mask))
    expected = backend.to_numpy(plain(x, mask=mask, attention_mask=explicit))
    close(blocks, expected, 1e-6)
    _, scores = layer(x, mask=mask, return_attention_scores=True)
    scores = backend.to_numpy(scores)
    assert (scores[:, :, ~explicit] == 0).all()

    far = x.copy()
    far[:, 0] += 5.0
    moved = backend.to_numpy(layer(far, mask=mask))
    exact(moved[:, window:], blocks[:, window:])


@pytest.mark.parametrize("position", ["alibi", "rotary", "relative", "none"])
def test_windowed_model(position):
    """A model with windows of its own per layer: blocks inside, the same as without blocks."""
    c = config(position=position, window=(8, None, 20), num_layers=3, max_length=512)
    model = make_model("CausalLM", c)
    ids = np.random.default_rng(0).integers(1, 23, (2, 150)).astype("int32")
    ids[0, 120:] = ids[1, :11] = 0
    segments = np.where(ids > 0, 1 + (np.arange(150) > 70), 0).astype("int32")
    prefix = np.array([5, 70], "int32")
    for inputs in (ids, {"ids": ids, "segments": segments}, {"ids": ids, "prefix": prefix}):
        blocks = run(model, inputs)
        original, masks.block_size = masks.block_size, lambda *_: None
        try:
            dense = backend.to_numpy(model(inputs))
        finally:
            masks.block_size = original
        close(blocks, dense, 2e-6)


def test_window_memory_is_not_quadratic():
    """The arrays of the blocks grow with T · C: nothing of T × T is made for 40,000 tokens."""
    tokens = masks.describe(ops.ones((1, 40_000), dtype="bool"))
    seen, _, _ = masks.windowed(tokens, True, 64, 64)
    assert int(np.prod(seen.shape)) == 40_000 * 2 * 64
    layer = MultiHeadAttention(4, 1, causal=True, window=64)
    out = layer(np.ones((1, 40_000, 4), "float32"))  # 6.4 GB if it were quadratic
    assert tuple(out.shape) == (1, 40_000, 4)


def test_p5_content_of_hidden_padding():
    """Used alone behind an implicit mask, padding may hold NaN."""
    random = np.random.default_rng(0)
    layer = MultiHeadAttention(8, 2)
    x, context = heads(random, 2, 5, 8), heads(random, 2, 6, 8)
    mask, context_mask = np.arange(5) < 3, np.arange(6) < 4
    mask, context_mask = (np.repeat(m[None], 2, 0) for m in (mask, context_mask))
    bad, bad_context = x.copy(), context.copy()
    bad[:, 3:], bad_context[:, 4:] = np.nan, np.inf
    good, same = (backend.to_numpy(layer(a, mask=mask)) for a in (x, bad))
    exact(good[:, :3], same[:, :3])
    good, same = (
        backend.to_numpy(layer(x, context=c, context_mask=context_mask))
        for c in (context, bad_context)
    )
    exact(good, same)


def test_scores_and_their_shapes():
    layer = MultiHeadAttention(8, 2)
    x, context = np.ones((3, 5, 8), "float32"), np.ones((3, 7, 8), "float32")
    out, scores = layer(x, context=context, return_attention_scores=True)
    assert tuple(scores.shape) == (3, 2, 5, 7)
    close(backend.to_numpy(scores).sum(-1), np.ones((3, 2, 5)), 1e-6)
    symbolic = layer(keras.Input((5, 8)), context=keras.Input((7, 8)), return_attention_scores=True)
    assert tuple(symbolic[0].shape) == (None, 5, 8) and tuple(symbolic[1].shape) == (None, 2, 5, 7)
    unknown = layer(keras.Input((None, 8)), context=keras.Input((None, 8)))
    assert tuple(unknown.shape) == (None, None, 8)
    assert layer.compute_output_shape((2, 5, 8)) == (2, 5, 8)


def test_errors():
    with pytest.raises(ValueError, match="hidden_dim=10, num_heads=3"):
        MultiHeadAttention(10, 3)
    with pytest.raises(ValueError, match="num_heads=4, num_key_value_heads=3"):
        MultiHeadAttention(8, 4, 3)
    layer = MultiHeadAttention(8, 2)
    with pytest.raises(ValueError, match=r"attention_mask must be.*\(5,\)"):
        layer(np.ones((1, 5, 8), "float32"), attention_mask=np.ones(5, bool))
    with pytest.raises(ValueError, match="visible=None"):
        layer(np.ones((1, 1, 8), "float32"), cache=empty(1, 4, 2, 4), start=0)


@pytest.mark.parametrize("position", ["rotary", "alibi", "none"])
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1, 1), (4, 2), (3, 1, 2)])
def test_one_forward_for_training_and_decoding(position, chunks):
    """A block fed piece by piece through its cache gives what it gives on the whole row."""
    c = config(position=position, num_key_value_heads=2)
    block = DecoderBlock(c, cross_attention=True)
    random = np.random.default_rng(0)
    x, memory = heads(random, 2, 6, 16), heads(random, 2, 5, 16)
    whole = backend.to_numpy(block(x, memory))
    tokens = masks.describe(ops.ones((2, 6), dtype="bool"))
    sources = masks.describe(ops.ones((2, 5), dtype="bool"))
    cross = block.cross_attention.keys_values(ops.convert_to_tensor(memory))
    cache, start, parts = BlockCache(empty(2, 6, 2, 4), cross), 0, []
    with backend.no_gradient():
        for size in chunks:
            new = masks.Tokens(*(None if t is None else t[:, start : start + size] for t in tokens))
            seen = masks.visible(new, tokens, causal=True)
            bias = None if block.bias is None else block.bias(new.positions, tokens.positions)
            sight = Sight(seen, new.positions, new.real, bias)
            across = Sight(masks.across(new, sources), None, None)
            y, cache = block(
                x[:, start : start + size], sight=sight, memory_sight=across, cache=cache,
                start=ops.convert_to_tensor(start, dtype="int32"),
            )  # fmt: skip
            parts.append(backend.to_numpy(y))
            start += size
    close(np.concatenate(parts, axis=1), whole, 1e-5)
