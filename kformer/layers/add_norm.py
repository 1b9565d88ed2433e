"""Residual connection and normalisation. Letters: B batch, T tokens, D width."""

import random

from keras import layers

from kformer.config import CHOICES
from kformer.serialization import Composite, child_policy, register


def make_dropout(rate, dtype, name="dropout"):
    """Dropout whose randomness is all in Keras' seed state, on every backend.

    Without a seed of its own, Keras' layer draws from torch's global generator on torch, which no
    checkpoint holds. `keras.utils.set_random_seed` decides the seeds that are drawn here.
    """
    return layers.Dropout(rate, seed=random.randint(1, 10**9), name=name, dtype=dtype)


def make_norm(kind, epsilon, use_bias=True, **kwargs):
    """A normalisation layer over the last axis; statistics are computed in float32.

    layer: g · (x − mean) / √(variance + ε) + b            rms: g · x / √(mean(x²) + ε)
    """
    if kind not in CHOICES["norm"]:
        raise ValueError(f"norm must be one of {', '.join(CHOICES['norm'])}, got {kind!r}")
    if kind == "layer":
        return layers.LayerNormalization(epsilon=epsilon, center=use_bias, **kwargs)
    norm = layers.RMSNormalization(epsilon=epsilon, **kwargs)
    norm.supports_masking = True  # Keras says so of the other one only
    return norm


@register
class AddNorm(Composite, layers.Layer):
    """The residual sum round a sublayer f, with its normalisation.

        pre:       x + dropout(f(norm(x)))
        post:      norm(x + dropout(f(x)))
        sandwich:  x + dropout(norm(f(norm(x))))

    It is called twice, before the sublayer and after it, so that any sublayer fits between:

        y = f(add_norm(x))           # what the sublayer sees
        x = add_norm(x, y)           # what goes on

    The sum happens in here because `x + y` outside of a layer drops Keras' implicit mask.

    Args:
        norm: "layer" or "rms".
        placement: "pre", "post" or "sandwich".
        epsilon: ε of the norm.
        dropout: rate of dropout on the sublayer's output.
        use_bias: the layer norm has a bias b.
    Call: (B, T, D) or twice (B, T, D) → (B, T, D).
    """

    def __init__(
        self, norm="layer", placement="pre", epsilon=1e-5, dropout=0.0, use_bias=True, **kwargs
    ):
        super().__init__(**kwargs)
        if placement not in CHOICES["norm_placement"]:
            rule = ", ".join(CHOICES["norm_placement"])
            raise ValueError(f"placement must be one of {rule}, got {placement!r}")
        self.supports_masking = True
        dtype = child_policy(self)

        def place(name, *where):
            if placement in where:
                return make_norm(norm, epsilon, use_bias, name=name, dtype=dtype)
            return layers.Identity(name=name, dtype=dtype)

        self.before = place("before", "pre", "sandwich")
        self.inside = place("inside", "sandwich")
        self.after = place("after", "post")
        self.drop = make_dropout(dropout, dtype)

    def compute_output_shape(self, x_shape, y_shape=None):
        return x_shape

    def build(self, x_shape, y_shape=None):
        for norm in (self.before, self.inside, self.after):
            norm.build(x_shape)

    def call(self, x, y=None, training=None):
        if y is None:
            return self.before(x)
        return self.after(x + self.drop(self.inside(y), training=training))
