"""Losses. Letters: B batch, T tokens, V classes (ids of the vocabulary, or labels)."""

import keras
from keras import ops

from kformer.serialization import register


def counted(labels, ignore_id, sample_weight=None):
    """The weight of every label in float32: 0 for negative ones and for `ignore_id`."""
    counts = labels >= 0
    if ignore_id is not None:
        counts = ops.logical_and(counts, ops.not_equal(labels, ignore_id))
    weights = ops.cast(counts, "float32")
    if sample_weight is None:
        return weights
    sample_weight = ops.cast(sample_weight, "float32")
    while len(sample_weight.shape) < len(weights.shape):
        sample_weight = sample_weight[..., None]
    return weights * sample_weight


def token_losses(labels, logits, label_smoothing=0.0):
    """−log p(label) of every token in float32, NaN for a label that is no class.

    With smoothing ε the target is 1 − ε for the label and ε/V for every class:
        (1 − ε) · −log p(label) + ε · mean over classes of −log p
    """
    logits = ops.cast(logits, "float32")
    total = ops.logsumexp(logits, axis=-1)
    classes = logits.shape[-1]
    safe = ops.where(ops.logical_and(labels >= 0, labels < classes), labels, 0)
    chosen = ops.take_along_axis(logits, safe[..., None], axis=-1)[..., 0]
    losses = total - chosen
    if label_smoothing:
        even = total - ops.mean(logits, axis=-1)
        losses = (1.0 - label_smoothing) * losses + label_smoothing * even
    return ops.where(labels < classes, losses, float("nan"))


@register
class TokenCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels and logits: the mean over the tokens that count.

        loss = Σ w · −log softmax(logits)[label] / Σ w

    A token counts (w = 1, or its sample weight) if its label is neither negative nor
    `ignore_id`, so padding changes nothing. If none counts, the loss is 0.

    Args:
        label_smoothing: ε in [0, 1): that much of the target is spread over all classes.
        ignore_id: a label that never counts, usually the padding id.
    Call: labels (B, T) or (B,), logits (B, T, V) or (B, V) → a number.
    """

    def __init__(self, label_smoothing=0.0, ignore_id=None, name="token_crossentropy"):
        super().__init__(name=name, reduction=None)
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing!r}")
        self.label_smoothing, self.ignore_id = label_smoothing, ignore_id

    def __call__(self, y_true, y_pred, sample_weight=None):
        labels = ops.cast(y_true, "int32")
        weights = counted(labels, self.ignore_id, sample_weight)
        losses = token_losses(labels, y_pred, self.label_smoothing)
        # A token that does not count may hold anything, NaN included.
        total = ops.sum(ops.where(weights > 0, losses, 0.0) * weights)
        return total / ops.maximum(ops.sum(weights), 1e-9)

    def get_config(self):
        return {
            "label_smoothing": self.label_smoothing,
            "ignore_id": self.ignore_id,
            "name": self.name,
        }
