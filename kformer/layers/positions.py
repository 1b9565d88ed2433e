"""Positions: how a token knows where it stands.

Absolute schemes (`SinusoidalPositions`, `LearnedPositions`) add a vector to the embedding;
`RotaryPositions` turns queries and keys; `AlibiBias` and `RelativeBias` add to the scores.
All take explicit positions (T,) or (B, T); without them they count real tokens along the row.

Letters: B batch, T queries, S keys, D width, N heads, H head width.
"""

import math

import numpy as np
from keras import layers, ops

from kformer import backend, masks
from kformer.layers.embedding import Table, refuse_outside
from kformer.serialization import Composite, child_policy, register


def default_positions(x, positions, mask=None):
    """Explicit positions, or 0, 1, 2, ... along the second axis of x, padding not counted."""
    if positions is not None:
        return positions
    return ops.arange(ops.shape(x)[1], dtype="int32") if mask is None else masks.count(mask)


def constant(array):
    """A NumPy array as a float32 tensor."""
    return ops.convert_to_tensor(np.asarray(array, dtype="float32"))


def check_layout(layout, *known):
    if layout not in known:
        raise ValueError(f"layout must be one of {', '.join(known)}, got {layout!r}")


@register
class SinusoidalPositions(layers.Layer):
    """Adds sines and cosines of the position, with wavelengths from 2π to 10000 · 2π.

        PE(pos, 2i) = sin(pos / 10000^(2i/D))        PE(pos, 2i+1) = cos(pos / 10000^(2i/D))

    Phases are float32 whatever the dtype policy: bfloat16 cannot tell position 257 from 256.

    Args:
        layout: "interleaved" as above, or "half": all sines first, then all cosines; "spread" is
            "half" with 10000^(i/(D/2 − 1)), so that the longest wave is exactly 10000 · 2π; the
            last column of an odd D is zero.
        base: 10000 above.
        offset: added to every position.
    Call: x (B, T, D), positions None, (T,) or (B, T) → x + PE, (B, T, D).
    """

    def __init__(self, layout="interleaved", base=10000.0, offset=0, **kwargs):
        super().__init__(**kwargs)
        check_layout(layout, "interleaved", "half", "spread")
        self.supports_masking = True
        self.layout, self.base, self.offset = layout, base, offset

    def build(self, x_shape, positions_shape=None):
        """No weights."""

    def compute_output_shape(self, x_shape, positions_shape=None):
        return x_shape

    def call(self, x, positions=None, mask=None):
        positions = default_positions(x, positions, mask) + self.offset
        return x + ops.cast(self.encode(positions, x.shape[-1]), x.dtype)

    def encode(self, positions, width):
        """The encodings of integer positions (..., T), float32 (..., T, width)."""
        sines, divisor = (width + 1) // 2, width / 2
        if self.layout == "spread":
            if width < 4:
                raise ValueError(f"layout 'spread' needs a width of at least 4, got {width}")
            sines, divisor = width // 2, width // 2 - 1
        column = np.arange(width)
        if self.layout == "interleaved":
            pair, is_cosine = column // 2, column % 2
        else:
            pair, is_cosine = column % sines, column >= sines
        frequency = self.base ** (-pair / divisor)
        if self.layout == "spread" and width % 2:
            frequency[-1], is_cosine[-1] = 0.0, False  # sin 0
        phases = ops.cast(positions, "float32")[..., None] * constant(frequency)
        return ops.where(constant(is_cosine) > 0, ops.cos(phases), ops.sin(phases))


@register
class LearnedPositions(Composite, layers.Layer):
    """Adds one learned vector per position. A position past the table is an error.

    Inside a function that the user compiles there is no way to raise: the result is NaN.

    Args:
        max_length: how many positions there are.
        hidden_dim: width D.
        offset: added to every position; the table has that many rows more.
    Call: x (B, T, D), positions None, (T,) or (B, T) → x + table[positions + offset].
    """

    def __init__(self, max_length, hidden_dim, offset=0, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.max_length, self.offset = max_length, offset
        dtype = child_policy(self)
        self.table = Table(max_length + offset, hidden_dim, name="table", dtype=dtype)

    def compute_output_shape(self, x_shape, positions_shape=None):
        if positions_shape is None:
            self.refuse_length(x_shape[1])
        return x_shape

    def refuse_length(self, length):
        if isinstance(length, int) and length > self.max_length:
            rule = f"length must be at most max_length={self.max_length}"
            raise ValueError(f"{rule} with learned positions, got length {length}")

    def build(self, x_shape, positions_shape=None):
        self.table.build()

    def call(self, x, positions=None, mask=None):
        given = positions is not None
        positions = default_positions(x, positions, mask)
        if not given and (mask is None or not backend.is_concrete(positions)):
            self.refuse_length(x.shape[1])  # where padding is known, a longer row may do
        refuse_outside("positions", positions, self.max_length)
        return x + self.table(ops.where(positions < 0, -1, positions + self.offset))


@register
class RotaryPositions(layers.Layer):
    """Turns each pair of a head's numbers by an angle proportional to the position.

        (a, b) → (a cos φ − b sin φ, a sin φ + b cos φ),      φ = position · base^(−2i/R)

    The product of a turned query and a turned key depends on their distance alone. Angles are
    float32 whatever the dtype policy.

    Args:
        base: longest wavelength is about 2π · base.
        rotary_dim: R, how many numbers of a head turn; None = all of them.
        layout: which numbers pair up: "half" (i, i + R/2) or "interleaved" (2i, 2i + 1).
        scaling: None, or a dict that stretches the angles for longer texts:
            {"type": "linear", "factor": f}                              φ / f
            {"type": "dynamic", "factor": f, "original_max_length": L}   grows the base past L
            {"type": "yarn", "factor": f, "original_max_length": L}      long waves only, by parts
            {"type": "llama3", "factor": f, "low_freq_factor": a, "high_freq_factor": b,
             "original_max_length": L}                                   long waves only, smoothly
    Call: x (B, T, N, H), positions None, (T,) or (B, T) → (B, T, N, H).
    """

    def __init__(self, base=10000.0, rotary_dim=None, layout="half", scaling=None, **kwargs):
        super().__init__(**kwargs)
        check_layout(layout, "interleaved", "half")
        self.base, self.rotary_dim, self.layout = base, rotary_dim, layout
        self.scaling = scaling

    def build(self, x_shape, positions_shape=None):
        """No weights."""

    def compute_output_shape(self, x_shape, positions_shape=None):
        return x_shape

    def call(self, x, positions=None):
        turning = self.rotary_dim or x.shape[-1]
        cosine, sine = self.tables(default_positions(x, positions), turning)
        y = ops.cast(x[..., :turning], "float32")
        if self.layout == "half":
            a, b = y[..., : turning // 2], y[..., turning // 2 :]
        else:
            a, b = y[..., 0::2], y[..., 1::2]
        turned = [a * cosine - b * sine, b * cosine + a * sine]
        if self.layout == "half":
            y = ops.concatenate(turned, axis=-1)
        else:
            y = ops.reshape(ops.stack(turned, axis=-1), ops.shape(y))
        y = ops.cast(y, x.dtype)
        if turning == x.shape[-1]:
            return y
        return ops.concatenate([y, x[..., turning:]], axis=-1)

    def tables(self, positions, turning):
        """cos φ and sin φ, float32, (1 or B, T, 1, R/2)."""
        positions = ops.cast(positions, "float32")
        positions = positions[None] if len(positions.shape) == 1 else positions
        frequency, factor = rotary_frequencies(self.base, turning, self.scaling)
        frequency = constant(frequency)
        if self.scaling and self.scaling["type"] == "dynamic":
            frequency = frequency * self.dynamic_factor(positions, turning)
        phases = (positions[..., None] * frequency)[:, :, None, :]
        return ops.cos(phases) * factor, ops.sin(phases) * factor

    def dynamic_factor(self, positions, turning):
        """What a base grown to b' does to the frequencies, (B, 1, R/2), for each row by itself.

        b' = base · (f · n / L − (f − 1))^(R / (R − 2)) for a row of n > L tokens.
        """
        stretch, limit = self.scaling["factor"], self.scaling["original_max_length"]
        tokens = ops.maximum(ops.max(positions, axis=-1, keepdims=True) + 1.0, limit)
        growth = stretch * tokens / limit - (stretch - 1.0)
        exponents = constant(np.arange(0, turning, 2) / max(turning - 2, 1))
        return ops.exp(-ops.log(growth)[..., None] * exponents)


def rotary_frequencies(base, turning, scaling=None):
    """The angle per position of each pair, float64 (R/2,), and the factor of cos and sin."""
    frequency = base ** (-np.arange(0, turning, 2, dtype="float64") / turning)
    kind = scaling["type"] if scaling else None
    if kind in (None, "dynamic"):  # dynamic: the rest depends on the length of the row
        return frequency, 1.0
    stretched = frequency / scaling["factor"]
    if kind == "linear":
        return stretched, 1.0
    limit = scaling["original_max_length"]
    if kind == "llama3":  # by the number of turns a pair makes within the original length
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = limit * frequency / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * frequency + (1 - keep) * stretched, 1.0

    def pair_that_turns(times):
        return turning * math.log(limit / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1.0))), turning - 1)
    pairs = np.arange(turning // 2, dtype="float64")
    keep = 1.0 - np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    factor = scaling.get("attention_factor") or 0.1 * math.log(scaling["factor"]) + 1.0
    return keep * frequency + (1 - keep) * stretched, factor


def distances(positions, key_positions):
    """key position − query position, int32 (1 or B, T, S)."""
    keys = positions if key_positions is None else key_positions
    query, key = (ops.cast(p[None] if len(p.shape) == 1 else p, "int32") for p in (positions, keys))
    return key[:, None, :] - query[:, :, None]


def bias_shape(heads, positions_shape, key_positions_shape):
    keys = positions_shape if key_positions_shape is None else key_positions_shape
    batch = positions_shape[0] if len(positions_shape) > 1 else 1
    return (batch, heads, positions_shape[-1], keys[-1])


@register
class AlibiBias(layers.Layer):
    """A penalty on the scores that grows with the distance, with a slope of its own per head.

        bias[n, i, j] = −m_n · |i − j|,       m_n = 2^(−8n/N) for n = 1 ... N

    Distances are float32; the finished bias b may be rounded: a relative error r of it changes a
    weight by r · b · e^(−b) ≤ 0.37 r, less than the rounding of the weights themselves.

    For N not a power of two: the slopes of the next lower power, then every other slope of the
    next higher one.

    Args:
        num_heads: N.
    Call: positions (T,) or (B, T), key_positions None or (S,) or (B, S) → (1 or B, N, T, S).
    """

    def __init__(self, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def build(self, positions_shape, key_positions_shape=None):
        """No weights."""

    def compute_output_shape(self, positions_shape, key_positions_shape=None):
        return bias_shape(self.num_heads, positions_shape, key_positions_shape)

    def slopes(self):
        """m_1 ... m_N as NumPy float32."""
        power = 2 ** int(math.log2(self.num_heads))
        slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
        finer = [2.0 ** (-4.0 * (n + 1) / power) for n in range(0, 2 * power, 2)]
        return np.array((slopes + finer)[: self.num_heads], dtype="float32")

    def call(self, positions, key_positions=None):
        distance = ops.cast(ops.abs(distances(positions, key_positions)), "float32")
        bias = -constant(self.slopes())[None, :, None, None] * distance[:, None]
        return ops.cast(bias, self.compute_dtype)


@register
class RelativeBias(Composite, layers.Layer):
    """A learned number per head and bucket of distance (T5), added to the scores.

    Near distances have a bucket each; farther ones share buckets that widen logarithmically up
    to `max_distance`. Bidirectional: half the buckets for keys after the query.

    Args:
        num_heads: N.
        num_buckets, max_distance: the table's size and reach.
        bidirectional: False for a decoder, where later keys are never seen.
    Call: positions (T,) or (B, T), key_positions None or (S,) or (B, S) → (1 or B, N, T, S).
    """

    def __init__(self, num_heads, num_buckets=32, max_distance=128, bidirectional=True, **kwargs):
        super().__init__(**kwargs)
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional
        self.table = Table(num_buckets, num_heads, name="table", dtype=child_policy(self))

    def compute_output_shape(self, positions_shape, key_positions_shape=None):
        return bias_shape(self.table.output_dim, positions_shape, key_positions_shape)

    def build(self, positions_shape, key_positions_shape=None):
        self.table.build()

    def buckets(self, distance):
        """The bucket of each distance (key position − query position)."""
        number = self.num_buckets
        offset = ops.zeros_like(distance)
        if self.bidirectional:
            number //= 2
            offset = ops.cast(distance > 0, "int32") * number
            distance = ops.abs(distance)
        else:
            distance = ops.maximum(-distance, 0)
        exact = number // 2
        far = ops.cast(ops.maximum(distance, exact), "float32") / exact
        log = ops.log(far) / math.log(self.max_distance / exact) * (number - exact)
        far = ops.minimum(exact + ops.cast(log, "int32"), number - 1)
        return offset + ops.where(distance < exact, distance, far)

    def call(self, positions, key_positions=None):
        bias = self.table(self.buckets(distances(positions, key_positions)))
        return ops.transpose(bias, (0, 3, 1, 2))
