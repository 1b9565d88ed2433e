"""What stands on a stack: pooling and the output bias. Letters: B batch, T tokens, D width."""

from keras import layers, ops

from kformer.layers.attention import attention_weights, without_padding
from kformer.layers.feedforward import add_bias
from kformer.serialization import register

POOLINGS = ("mean", "first", "last", "attention")


@register
class Pooling(layers.Layer):
    """One vector for a row, from its real tokens only; zeros for a row that has none.

        mean: their average      first, last: one of them      attention: Σ softmax(x·q/√D) · x

    Args:
        mode: "mean", "first", "last" or "attention", with a learned query q.
    Call: x (B, T, D), real (B, T) → (B, D).
    """

    def __init__(self, mode="mean", **kwargs):
        super().__init__(**kwargs)
        if mode not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {mode!r}")
        self.mode = mode
        self.supports_masking = True

    def compute_mask(self, x, previous_mask=None):
        return None  # one vector per row: nothing is left to mask

    def compute_output_shape(self, x_shape, real_shape=None):
        return (x_shape[0], x_shape[-1])

    def build(self, x_shape, real_shape=None):
        self.query = None
        if self.mode == "attention":
            self.query = self.add_weight((x_shape[-1],), "random_normal", name="query")

    def call(self, x, real):
        weights = ops.cast(self.weights_of_tokens(x, real), x.dtype)
        return ops.matmul(weights[:, None, :], without_padding(x, real))[:, 0]

    def weights_of_tokens(self, x, real):
        """(B, T) in float32, adding up to 1 over the real tokens."""
        if self.mode == "attention":
            query = ops.broadcast_to(self.query, (ops.shape(x)[0], 1, 1, x.shape[-1]))
            seen = real[:, None, None, :]
            scale = x.shape[-1] ** -0.5
            return attention_weights(query, x[:, None], seen, scale=scale)[:, 0, 0]
        counted = ops.cast(real, "float32")
        number = ops.sum(counted, axis=1, keepdims=True)
        if self.mode == "mean":
            return counted / ops.maximum(number, 1.0)
        chosen = 1.0 if self.mode == "first" else number
        return ops.where(ops.cumsum(counted, axis=1) == chosen, counted, 0.0)


@register
class Bias(layers.Layer):
    """Adds one learned number per entry of the last axis.

    Args:
        units: V, size of that axis.
    Call: (..., V) → (..., V).
    """

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.supports_masking = True

    def compute_output_shape(self, x_shape):
        return (*x_shape[:-1], self.units)

    def build(self, x_shape):
        self.bias = self.add_weight((self.units,), "zeros", name="bias")

    def call(self, x):
        return add_bias(self.bias, x)
