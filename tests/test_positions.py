"""Position schemes against the published formulas."""

import math

import keras
import numpy as np
import pytest
import reference
from support import close, exact

from kformer import backend
from kformer.layers import (
    AlibiBias,
    LearnedPositions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
)
from kformer.layers.positions import rotary_frequencies


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize("layout", ["interleaved", "half", "spread"])
@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_sinusoids(width, layout):
    if layout == "spread" and width < 4:
        with pytest.raises(ValueError, match=f"width of at least 4, got {width}"):
            SinusoidalPositions(layout=layout)(np.zeros((1, 3, width), "float32"))
        return
    x = np.zeros((1, 700, width), "float32")
    out = backend.to_numpy(SinusoidalPositions(layout=layout)(x))
    close(out[0], reference.sinusoid(np.arange(700), width, layout), 1e-4)
    rows = np.array([[5, 0, 9000], [1, 1, 2]])
    explicit = backend.to_numpy(SinusoidalPositions(layout=layout)(x[:, :3], positions=rows))
    close(explicit, reference.sinusoid(rows, width, layout), 1e-3)


def test_sinusoids_are_exact_in_bfloat16():
    """Position 600 is no bfloat16 number: only phases in float32 get this right."""
    x = np.zeros((1, 601, 8), "float32")
    out = backend.to_numpy(SinusoidalPositions(dtype="bfloat16")(x)).astype("float64")
    truth = reference.sinusoid(np.arange(601), 8, "interleaved")
    assert np.abs(out[0] - truth).max() <= 2**-8  # half a step of bfloat16 near 1


def test_learned_positions():
    layer = LearnedPositions(4, 3, offset=2)
    x = numbers(2, 4, 3)
    table = backend.to_numpy
    out = backend.to_numpy(layer(x))
    rows = table(layer.table.embeddings)
    close(out, x + rows[2:6], 1e-6)
    given = np.array([[3, 0], [1, 1]])
    close(backend.to_numpy(layer(x[:, :2], positions=given)), x[:, :2] + rows[given + 2], 1e-6)
    with pytest.raises(ValueError, match=r"max_length=4.*got length 5"):
        layer(numbers(1, 5, 3))
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"positions must be in \[0, 4\), got {wrong}"):
            layer(x[:, :1], positions=np.array([[wrong], [0]]))
    symbolic = layer(keras.Input((None, 3)))
    assert tuple(symbolic.shape) == (None, None, 3)
    embed = keras.layers.Embedding(9, 3, mask_zero=True)  # behind a mask, padding does not count
    assert tuple(layer(embed(np.array([[0, 0, 1, 2, 3, 4]]))).shape) == (1, 6, 3)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 4\), got 4"):
        layer(embed(np.array([[1, 2, 3, 4, 5]])))
    with pytest.raises(ValueError, match=r"max_length=4.*got length 5"):
        layer(embed(keras.Input((5,), dtype="int32")))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("turning", [None, 4])
def test_rotary(layout, turning):
    x = numbers(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [9, 3, 3, 100, 7]])
    layer = RotaryPositions(base=500.0, rotary_dim=turning, layout=layout)
    out = backend.to_numpy(layer(x, positions=positions))
    truth = reference.rotate(x.astype("float64"), positions, 500.0, turning or 8, layout)
    close(out, truth, 1e-5)
    counted = backend.to_numpy(layer(x))
    row = np.repeat(np.arange(5)[None], 2, 0)
    close(counted, reference.rotate(x.astype("float64"), row, 500.0, turning or 8, layout), 1e-5)


def test_p33_only_distances_matter():
    layer = RotaryPositions()
    query, key = numbers(1, 1, 1, 16), numbers(1, 1, 1, 16, seed=1)
    products = []
    for shift in (0, 17, 1000):
        turned = [layer(x, positions=np.array([[p + shift]])) for x, p in ((query, 5), (key, 2))]
        a, b = (backend.to_numpy(t).ravel().astype("float64") for t in turned)
        products.append(a @ b)
    close(products[1:], [products[0]] * 2, 1e-5)


def test_p33_far_positions_in_float32():
    """At position 131,072 the angles are still right to float32, in bfloat16 as well."""
    position = np.array([[131072]])
    x = np.ones((1, 1, 1, 8), "float32")
    truth = reference.rotate(x.astype("float64"), position, 10000.0, 8, "half")
    out = backend.to_numpy(RotaryPositions()(x, positions=position))
    assert np.abs(out - truth).max() < 0.02  # 131072 · 2^-24 of rounding in the angle
    low = backend.to_numpy(RotaryPositions(dtype="bfloat16")(x, positions=position))
    assert np.abs(low - truth).max() < 0.03


def published(kind, base, dim, **s):
    """The scalings as their authors wrote them, one pair at a time, in plain Python."""
    out = []
    for i in range(dim // 2):
        freq = base ** (-2 * i / dim)
        if kind == "linear":
            out.append(freq / s["factor"])
        if kind == "llama3":
            wave = 2 * math.pi / freq
            long, short = s["limit"] / s["low"], s["limit"] / s["high"]
            if wave < short:
                out.append(freq)
            elif wave > long:
                out.append(freq / s["factor"])
            else:
                smooth = (s["limit"] / wave - s["low"]) / (s["high"] - s["low"])
                out.append((1 - smooth) * freq / s["factor"] + smooth * freq)
        if kind == "yarn":

            def edge(turns):
                return dim * math.log(s["limit"] / (turns * 2 * math.pi)) / (2 * math.log(base))

            low, high = max(math.floor(edge(32)), 0), min(math.ceil(edge(1)), dim - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            out.append(freq / s["factor"] * ramp + freq * (1 - ramp))
    return np.array(out)


def test_p33_scalings():
    linear = {"type": "linear", "factor": 4.0}
    close(
        rotary_frequencies(10000.0, 64, linear)[0],
        published("linear", 10000.0, 64, factor=4.0),
        1e-12,
    )
    llama = dict(
        type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_length=8192,
    )  # fmt: skip
    truth = published("llama3", 5e5, 64, factor=32.0, low=1.0, high=4.0, limit=8192)
    found, factor = rotary_frequencies(5e5, 64, llama)
    close(found, truth, 1e-12)
    assert factor == 1.0
    yarn = {"type": "yarn", "factor": 8.0, "original_max_length": 4096}
    found, factor = rotary_frequencies(10000.0, 128, yarn)
    close(found, published("yarn", 10000.0, 128, factor=8.0, limit=4096), 1e-12)
    assert factor == pytest.approx(0.1 * math.log(8.0) + 1.0)


def test_p33_dynamic_scaling():
    """Up to the original length nothing changes; past it the base grows, row by row."""
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_length": 6}
    layer, plain = RotaryPositions(scaling=scaling), RotaryPositions()
    x = numbers(2, 9, 1, 8)
    rows = np.stack([np.arange(9), np.minimum(np.arange(9), 5)])
    out = backend.to_numpy(layer(x, positions=rows))
    close(out[1], backend.to_numpy(plain(x, positions=rows))[1], 1e-6)
    base = 10000.0 * (2.0 * 9 / 6 - 1.0) ** (8 / 6)
    close(out[:1], reference.rotate(x[:1].astype("float64"), rows[:1], base, 8, "half"), 1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi(heads):
    layer = AlibiBias(heads)
    close(layer.slopes(), reference.alibi_slopes(heads), 1e-6)
    bias = backend.to_numpy(layer(np.arange(4), np.arange(6)))
    assert bias.shape == (1, heads, 4, 6)
    distance = np.abs(np.arange(4)[:, None] - np.arange(6)[None])
    close(bias[0, 0], -layer.slopes()[0] * distance, 1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 6), (16, 1000)])
def test_relative_buckets(buckets, reach, bidirectional):
    layer = RelativeBias(2, buckets, reach, bidirectional)
    distance = np.arange(-300, 301, dtype="int32")
    found = backend.to_numpy(layer.buckets(distance))
    truth = [reference.relative_bucket(int(d), buckets, reach, bidirectional) for d in distance]
    assert (np.abs(found - truth) > 0).mean() < 0.01  # a logarithm on the edge of two buckets
    near = np.abs(distance) < 100
    assert np.abs(found - truth)[near].max() <= 1
    bias = backend.to_numpy(layer(np.array([[0, 1, 2]]), np.array([[0, 1, 2, 3]])))
    assert bias.shape == (1, 2, 3, 4)
    exact(bias[0, :, 0, 0], bias[0, :, 1, 1])
    assert layer.compute_output_shape((1, 3), (1, 4)) == (1, 2, 3, 4)
