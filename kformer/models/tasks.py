"""Classifiers, and what all models with a head share. Letters: B batch, T tokens, C classes."""

import numpy as np
from keras import ops

from kformer import backend
from kformer.layers.feedforward import Project
from kformer.layers.heads import Pooling
from kformer.models.base import Transformer
from kformer.models.inputs import align, in_batches, real_tokens, to_rows, unpack, up_to_bucket
from kformer.models.stack import Decoder, Encoder
from kformer.serialization import child_policy, register
from kformer.training.losses import TokenCrossentropy
from kformer.training.metrics import TokenAccuracy


class Task(Transformer):
    """A backbone and a head on its hidden states."""

    def check_inputs(self, inputs):
        self.backbone.check_inputs(inputs)

    def default_loss(self):
        return TokenCrossentropy(ignore_id=self.ignored_label)

    def default_metrics(self):
        return [TokenAccuracy(ignore_id=self.ignored_label)]

    ignored_label = None

    def vocabulary_layers(self, side):
        return self.backbone.vocabulary_layers(side)

    def label_weights(self, x, y, sample_weight):
        """Where there is a label per token, those of padding count nothing, whatever they are."""
        if not self.per_token:
            return sample_weight
        weights = ops.cast(self.backbone.compute_mask(x), "float32")
        if sample_weight is None:
            return weights
        given = ops.cast(sample_weight, "float32")
        return weights * (given[:, None] if len(given.shape) == 1 else given)

    def label_shape(self, x):
        """A label per token of the (target) ids, or one per row."""
        ids, _ = unpack(x["target"] if self.has_source else x)
        shape = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
        return shape if self.per_token else shape[:1]

    per_token = True

    def call(self, inputs, return_hidden=False, training=None):
        out = self.backbone(inputs, return_hidden=return_hidden, training=training)
        hidden, states = out if return_hidden else (out, None)
        logits = self.head_logits(hidden, inputs, training)
        return (logits, states) if return_hidden else logits


class Classifier(Task):
    """What the two classifiers share."""

    def __init__(
        self, config, num_classes, class_names, causal, use_bias, tokenizer, remat, **kwargs
    ):
        super().__init__(config, tokenizer=tokenizer, remat=remat, **kwargs)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ValueError(f"num_classes must be a whole number above 1, got {num_classes!r}")
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, got {causal!r}")
        if class_names is not None and len(class_names) != num_classes:
            got = f"{len(class_names)} names for num_classes={num_classes}"
            raise ValueError(f"class_names must have one name per class, got {got}")
        class_names = None if class_names is None else [str(name) for name in class_names]
        self.num_classes = self.num_labels = num_classes
        self.class_names, self.causal = class_names, causal
        given = {"num_classes": num_classes, "class_names": class_names, "causal": causal}
        self._arguments.update(given)
        named = dict(name="classifier", dtype=child_policy(self))
        self.classifier = Project(num_classes, use_bias=use_bias, **named)

    def make_backbone(self, pooler, remat):
        """An encoder, or a decoder: then a token sees the earlier ones only."""
        config = self.config.replace(pooler=pooler)
        self.backbone = (Decoder if self.causal else Encoder)(
            config, remat=remat, dtype=child_policy(self)
        )


@register
class TextClassifier(Classifier):
    """One label for a text: ids (B, T) → logits (B, C).

    Args:
        config: a `kformer.Config`.
        num_classes: C.
        pooling: how hidden states become one vector: "mean", "first" (through the pooler, if
            the config has one), "last" or "attention".
        class_names: kept with the model.
        tokenizer, remat: as in `Encoder`.
        causal: tokens see only earlier ones, as in a language model that became a classifier, and
            the logits have no bias; "last" is the pooling for it.
    """

    per_token = False

    def __init__(
        self,
        config,
        num_classes,
        pooling="mean",
        class_names=None,
        tokenizer=None,
        remat=None,
        causal=False,
        **kwargs,
    ):
        kwargs.setdefault("name", "text_classifier")
        given = config, num_classes, class_names, causal, not causal, tokenizer, remat
        super().__init__(*given, **kwargs)
        self._arguments["pooling"] = pooling
        self.pooling = Pooling(pooling, name="pooling", dtype=child_policy(self))
        self.make_backbone(self.config.pooler and pooling == "first" and not causal, remat)
        self.build()

    def head_logits(self, hidden, inputs, training):
        x = self.pooling(hidden, real_tokens(inputs, self.config))
        if self.backbone.config.pooler:
            x = self.backbone.pooler(x)
        return self.classifier(x)

    def classify(self, texts, batch_size=64):
        """The probability of every class for texts or lists of ids: NumPy, (texts, C).

        What is longer than `config.max_length` tokens is cut. Around a text stands what the
        tokenizer's file says, if it says something.
        """
        limit = self.config.max_length

        def encode(texts):
            return self.tokenizer.encode(texts, special=True, max_length=limit)

        rows = [row[:limit] for row in to_rows(texts, self.tokenizer, encode)]
        out = np.zeros((len(rows), self.num_classes))
        for number, row in enumerate(rows):
            if not row:
                raise ValueError(f"a text must have at least one token, got none as text {number}")
        for numbers, batch in in_batches(rows, batch_size):
            length = up_to_bucket(max(map(len, batch)))
            ids, real = align(batch, length, self.config.pad_id)
            self.check_inputs({"ids": ids, "padding_mask": real})
            chances = self.run_compiled(class_chances, ids, real)
            out[numbers] = backend.to_numpy(chances)[: len(numbers)]
        return out


def class_chances(model, ids, real):
    logits = model({"ids": ids, "padding_mask": real}, training=False)
    return ops.exp(ops.log_softmax(ops.cast(logits, "float32")))


@register
class TokenClassifier(Classifier):
    """A label for every token: ids (B, T) → logits (B, T, C). Padding counts in no loss.

    Args:
        config, num_classes, class_names, tokenizer, remat: as in `TextClassifier`.
        causal: tokens see only earlier ones.
    """

    def __init__(
        self,
        config,
        num_classes,
        class_names=None,
        tokenizer=None,
        remat=None,
        causal=False,
        **kwargs,
    ):
        kwargs.setdefault("name", "token_classifier")
        given = config, num_classes, class_names, causal, True, tokenizer, remat
        super().__init__(*given, **kwargs)
        self.make_backbone(False, remat)
        self.build()

    def head_logits(self, hidden, inputs, training):
        return self.classifier(hidden)
