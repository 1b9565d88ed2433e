"""Token embedding, tied with the output projection. Letters: B batch, T tokens, D width, V ids."""

import contextvars
import math

import keras
import numpy as np
from keras import initializers, layers, ops

from kformer import backend, kernels
from kformer.serialization import Composite, child_policy, register

inside_a_model = contextvars.ContextVar("kformer_inside_a_model", default=False)


def refuse_outside(name, ids, size):
    """ValueError if ids hold numbers now and one of them is not in [0, size).

    A model has checked its inputs where they came in: looking again would cost a device a stop.
    """
    if inside_a_model.get() or not backend.is_concrete(ids):
        return
    ids = backend.to_numpy(ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {ids.dtype}")
    if ids.size and not (0 <= ids.min() and ids.max() < size):
        wrong = ids[(ids < 0) | (ids >= size)].flat[0]
        raise ValueError(f"{name} must be in [0, {size}), got {wrong}")


@register
class Table(layers.ReversibleEmbedding):
    """One learned vector per index, and the way back. An index without a row gives NaN.

    Backends disagree on such an index: one clamps, one wraps, one reads NaN. Here it is NaN on
    all, because a compiled function cannot raise and a wrong row would pass unseen.

    Args:
        input_dim: how many rows.
        output_dim: width D.
        deviation: standard deviation of the first values.
    Call: integers (...) → (..., D); with reverse=True, (..., D) → (..., input_dim).
    """

    def __init__(self, input_dim, output_dim, deviation=0.02, **kwargs):
        # A new initializer for every table: one shared instance would give them equal numbers.
        kwargs.setdefault("embeddings_initializer", initializers.RandomNormal(stddev=deviation))
        super().__init__(input_dim, output_dim, **kwargs)
        self.reverse_dtype = self.reverse_dtype or self.compute_dtype  # Keras: that of the rows
        self.supports_masking = True

    shrinks = False  # small tables stay what they are: `quantize` has no say

    def call(self, inputs, reverse=False):
        if reverse:
            return super().call(inputs, reverse=True)
        return self.rows(self.take, inputs)

    def quantized_call(self, inputs, reverse=False):
        if not reverse:
            return self.rows(super().quantized_call, inputs)
        if self.quantization_mode == "int8" and self.inputs_quantizer is not None:
            scale = ops.convert_to_tensor(self.embeddings_scale)
            return self.rounded_scores(inputs, ops.convert_to_tensor(self._embeddings), scale)
        return super().quantized_call(inputs, reverse=True)

    def rounded_scores(self, inputs, table, scale):
        """Keras' product of int8 with int8, with a gradient: rounding by itself has none, and what
        stands below a quantized table would not learn."""

        @ops.custom_gradient
        def product(inputs, table, scale):
            def gradient(*given, upstream=None):
                upstream = given[0] if upstream is None else upstream
                rows = ops.cast(table, upstream.dtype) / scale[:, None]
                return ops.matmul(upstream, rows), None, None

            rounded, factor = self.inputs_quantizer(inputs)
            scores = ops.cast(ops.matmul(rounded, ops.transpose(table)), self.compute_dtype)
            return scores / (factor * scale), gradient

        return product(inputs, table, scale)

    def rows(self, take, inputs):
        """take(index), and NaN where there is no such row."""
        valid = ops.logical_and(inputs >= 0, inputs < self.input_dim)
        rows = take(ops.where(valid, inputs, ops.zeros_like(inputs)))
        return ops.where(valid[..., None], rows, ops.cast(np.nan, rows.dtype))

    def take(self, index):
        rows = ops.take(kernels.with_dense_gradient(self.embeddings), index, axis=0)
        return ops.cast(rows, self.compute_dtype)

    def quantize(self, mode=None, type_check=True, config=None):
        """Keras' quantize, which leaves subclasses alone unless they say that they know."""
        super().quantize(mode, type_check=not self.shrinks, config=config)


@register
class TokenEmbedding(Composite, layers.Layer):
    """One vector per id, and the way back: scores of all ids from a vector.

        embed(id) = E[id]   or   √D · E[id]                 project(h) = h · Eᵀ

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        scale: multiply by √D, as the original transformer does.
        pad_id: ids equal to it are marked in Keras' implicit mask; None = no mask.
    Call: ids (B, T) → (B, T, D); with reverse=True, hidden (B, T, D) → logits (B, T, V).
    """

    def __init__(self, vocabulary_size, hidden_dim, scale=False, pad_id=None, **kwargs):
        super().__init__(**kwargs)
        self.vocabulary_size, self.hidden_dim = vocabulary_size, hidden_dim
        self.factor = math.sqrt(hidden_dim) if scale else None
        self.pad_id = pad_id
        self.supports_masking = True
        deviation = 1 / self.factor if scale else 0.02
        self.table = Table(
            vocabulary_size, hidden_dim, deviation, name="table", dtype=child_policy(self)
        )
        self.table.shrinks = True

    def compute_output_shape(self, ids_shape):
        return (*ids_shape, self.hidden_dim)

    def compute_output_spec(self, ids, reverse=False):
        shape = (
            (*ids.shape[:-1], self.vocabulary_size) if reverse else (*ids.shape, self.hidden_dim)
        )
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def build(self, ids_shape):
        self.table.build()

    def call(self, ids, reverse=False):
        if reverse:
            shape = ops.shape(ids)
            logits = self.table(ops.reshape(ids, (-1, self.hidden_dim)), reverse=True)
            return ops.reshape(logits, (*shape[:-1], self.vocabulary_size))
        refuse_outside("ids", ids, self.vocabulary_size)
        x = self.table(ids)
        return x if self.factor is None else x * ops.cast(self.factor, x.dtype)

    def compute_mask(self, inputs, previous_mask=None):
        is_ids = inputs.dtype is not None and "int" in str(inputs.dtype)
        if self.pad_id is None or not is_ids:
            return previous_mask
        return ops.not_equal(inputs, self.pad_id)

    def resize(self, vocabulary_size):
        """Keep the rows of the first ids; new ones start at the mean of the old."""
        self.vocabulary_size = vocabulary_size
        resize_layer(self.table, "input_dim", vocabulary_size, axis=0)


def resize_layer(layer, attribute, size, axis=-1):
    """Give a layer weights of another size along an axis: cut, or filled up with their mean."""
    old = [(weight, backend.to_numpy(weight)) for weight in layer.weights]
    for weight, _ in old:
        layer._untrack_variable(weight)
    layer._tracker.unlock()
    setattr(layer, attribute, size)
    layer.built = False
    layer.build((None, None, old[0][1].shape[0]))
    for weight, (_, array) in zip(layer.weights, old, strict=True):
        kept = np.take(array, range(min(size, array.shape[axis])), axis=axis)
        mean = array.mean(axis=axis, keepdims=True)
        new = [mean] * (size - kept.shape[axis])
        weight.assign(np.concatenate([kept, *new], axis=axis))
