"""Metrics over the tokens that count, summed up over all batches before anything is divided."""

import keras
from keras import ops

from kformer.serialization import register
from kformer.training.losses import counted, token_losses


class TokenMean(keras.metrics.Metric):
    """Σ w · value / Σ w over the tokens that count: see `TokenCrossentropy`."""

    def __init__(self, ignore_id=None, name=None, dtype="float32"):
        super().__init__(name=name, dtype=dtype)
        self.ignore_id = ignore_id
        self.total = self.add_variable((), "zeros", name="total")
        self.weight = self.add_variable((), "zeros", name="weight")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = ops.cast(y_true, "int32")
        weights = counted(labels, self.ignore_id, sample_weight)
        values = ops.where(weights > 0, self.values(labels, y_pred), 0.0)
        self.total.assign_add(ops.sum(values * weights))
        self.weight.assign_add(ops.sum(weights))

    def result(self):
        return self.total / ops.maximum(self.weight, 1e-9)

    def get_config(self):
        return {**super().get_config(), "ignore_id": self.ignore_id}


@register
class TokenAccuracy(TokenMean):
    """How often the likeliest class is the label."""

    def __init__(self, ignore_id=None, name="accuracy", dtype="float32"):
        super().__init__(ignore_id, name, dtype)

    def values(self, labels, logits):
        return ops.cast(ops.equal(ops.argmax(logits, axis=-1), labels), "float32")


@register
class Perplexity(TokenMean):
    """exp of the mean −log p per token: exact over ragged batches, the exponent comes last."""

    def __init__(self, ignore_id=None, name="perplexity", dtype="float32"):
        super().__init__(ignore_id, name, dtype)

    def values(self, labels, logits):
        return token_losses(labels, logits)

    def result(self):
        return ops.exp(super().result())
