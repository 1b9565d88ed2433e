"""Models with a head. Letters: B batch, T tokens, D width, V vocabulary, C classes."""

from typing import NamedTuple

import numpy as np
from keras import ops, tree

from kformer import backend
from kformer.layers.add_norm import make_norm
from kformer.layers.feedforward import Project, activate
from kformer.layers.heads import Bias, Pooling
from kformer.models.base import Transformer
from kformer.models.inputs import pad, real_tokens, unpack
from kformer.models.seq2seq import Seq2Seq, with_target_ids
from kformer.models.stack import Decoder, Encoder
from kformer.serialization import child_policy, register
from kformer.training.losses import TokenCrossentropy
from kformer.training.metrics import Perplexity, TokenAccuracy


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

    def __init__(self, config, num_classes, class_names, tokenizer, remat, **kwargs):
        super().__init__(config, tokenizer=tokenizer, remat=remat, **kwargs)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ValueError(f"num_classes must be a whole number above 1, got {num_classes!r}")
        if class_names is not None and len(class_names) != num_classes:
            got = f"{len(class_names)} names for num_classes={num_classes}"
            raise ValueError(f"class_names must have one name per class, got {got}")
        class_names = None if class_names is None else [str(name) for name in class_names]
        self.num_classes = self.num_labels = num_classes
        self.class_names = class_names
        self._arguments.update({"num_classes": num_classes, "class_names": class_names})
        dtype = child_policy(self)
        self.classifier = Project(num_classes, name="classifier", dtype=dtype)


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
        **kwargs,
    ):
        kwargs.setdefault("name", "text_classifier")
        super().__init__(config, num_classes, class_names, tokenizer, remat, **kwargs)
        self._arguments["pooling"] = pooling
        dtype = child_policy(self)
        self.pooling = Pooling(pooling, name="pooling", dtype=dtype)
        config = self.config.replace(pooler=self.config.pooler and pooling == "first")
        self.backbone = Encoder(config, remat=remat, dtype=dtype)
        self.build()

    def head_logits(self, hidden, inputs, training):
        x = self.pooling(hidden, real_tokens(inputs, self.config))
        if self.backbone.pooler is not None:
            x = self.backbone.pooler(x)
        return self.classifier(x)


@register
class TokenClassifier(Classifier):
    """A label for every token: ids (B, T) → logits (B, T, C). Padding counts in no loss.

    Args:
        config, num_classes, class_names, tokenizer, remat: as in `TextClassifier`.
    """

    def __init__(self, config, num_classes, class_names=None, tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "token_classifier")
        super().__init__(config, num_classes, class_names, tokenizer, remat, **kwargs)
        config = self.config.replace(pooler=False)
        self.backbone = Encoder(config, remat=remat, dtype=child_policy(self))
        self.build()

    def head_logits(self, hidden, inputs, training):
        return self.classifier(hidden)


class Score(NamedTuple):
    """What `score` gives: NumPy arrays, NaN where there is no token to score."""

    log_probs: np.ndarray  # (B, T) of each token given those before it
    totals: np.ndarray  # (B,) their sums
    perplexity: float  # exp(−mean) over all tokens together


class LanguageModel(Task):
    """A head that gives the logits of the vocabulary, tied with the embedding or not."""

    def __init__(self, config, tokenizer, remat, **kwargs):
        super().__init__(config, tokenizer=tokenizer, remat=remat, **kwargs)
        self.head = self.output_bias = None

    def make_head(self, bias):
        """After the backbone: a projection of its own, or the embedding and perhaps a bias."""
        dtype = child_policy(self)
        if not self.config.tie_embeddings:
            self.head = Project(self.num_labels, use_bias=bias, name="head", dtype=dtype)
        elif bias:
            self.output_bias = Bias(self.num_labels, name="output_bias", dtype=dtype)

    @property
    def embedding(self):
        """The embedding that the output is tied to."""
        return self.backbone.embedding

    @property
    def num_labels(self):
        return self.embedding.vocabulary_size

    @property
    def ignored_label(self):
        return self.config.pad_id

    def default_metrics(self):
        return [*super().default_metrics(), Perplexity(ignore_id=self.ignored_label)]

    def head_logits(self, hidden, inputs, training):
        if self.config.output_scale is not None:
            hidden = hidden * ops.cast(self.config.output_scale, hidden.dtype)
        if self.head is not None:
            return self.head(hidden)
        logits = self.embedding(hidden, reverse=True)
        return logits if self.output_bias is None else self.output_bias(logits)

    def vocabulary_layers(self, side):
        table, *_ = self.backbone.vocabulary_layers(side)
        heads = [self.head, self.output_bias] if table is self.embedding or side == "target" else []
        return [table, *(head for head in heads if head is not None)]

    def score(self, texts_or_ids, batch_size=8):
        """Log-probabilities of texts, lists of ids, or what the model takes as inputs.

        A token is scored given those before it in its document; the first one has no score.
        """
        inputs = self.score_inputs(texts_or_ids)
        self.check_inputs(inputs)
        ids, follows = self.scored(inputs)
        log_probs = np.full(ids.shape, np.nan)
        for first in range(0, len(ids), batch_size):  # never all logits at once
            rows = slice(first, first + batch_size)
            batch = tree.map_structure(lambda a, rows=rows: np.asarray(a)[rows], inputs)
            logits = self.predict_on_batch(batch).astype("float64")
            logits -= logits.max(axis=-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            chosen = np.take_along_axis(logits[:, :-1], ids[rows, 1:, None], axis=-1)[..., 0]
            log_probs[rows, 1:] = np.where(follows[rows], chosen, np.nan)
        mean = np.nanmean(log_probs) if np.isfinite(log_probs).any() else np.nan
        return Score(log_probs, np.nansum(log_probs, axis=1), float(np.exp(-mean)))

    def score_inputs(self, texts_or_ids):
        return to_inputs(texts_or_ids, self.tokenizer, self.config)

    def scored(self, inputs):
        """The ids that are scored, and which of them follow a token of their document."""
        return continuations(inputs, self.config)


def continuations(inputs, config, is_target=False):
    ids, extras = unpack(inputs)
    real = backend.to_numpy(real_tokens(inputs, config, is_target))
    follows = real[:, 1:] & real[:, :-1]
    if "segments" in extras:
        segments = np.asarray(extras["segments"])
        follows &= segments[:, 1:] == segments[:, :-1]
    return np.asarray(ids), follows


def to_inputs(given, tokenizer, config):
    """Texts or lists of ids as padded inputs; arrays and dicts as they are."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], str):
        if tokenizer is None:
            raise ValueError("texts need a model with a tokenizer, got tokenizer=None")
        given = tokenizer.encode(list(given))
    if isinstance(given, (list, tuple)):
        return pad(given, config.pad_id)
    return given


@register
class CausalLM(LanguageModel):
    """Next-token prediction: ids (B, T) → logits (B, T, V); logits at t are for token t + 1.

    Args:
        config: a `kformer.Config`.
        tokenizer, remat: as in `Encoder`.
    """

    def __init__(self, config, tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "causal_lm")
        super().__init__(config, tokenizer, remat, **kwargs)
        self.backbone = Decoder(self.config, remat=remat, dtype=child_policy(self))
        self.make_head(self.config.output_bias)
        self.build()


@register
class MaskedLM(LanguageModel):
    """Prediction of hidden tokens from both sides: ids (B, T) → logits (B, T, V).

        logits = norm(act(W·h + b)) · Eᵀ + c

    Labels of tokens that were not hidden must be negative (or pad_id): they count in no loss.

    Args:
        config: a `kformer.Config`.
        tokenizer, remat: as in `Encoder`.
    """

    def __init__(self, config, tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "masked_lm")
        super().__init__(config, tokenizer, remat, **kwargs)
        config, dtype = self.config.replace(pooler=False), child_policy(self)
        self.backbone = Encoder(config, remat=remat, dtype=dtype)
        transform = dict(use_bias=config.use_bias, name="transform", dtype=dtype)
        self.transform = Project(config.hidden_dim, **transform)
        norm = config.norm, config.norm_epsilon, config.use_bias
        self.transform_norm = make_norm(*norm, name="transform_norm", dtype=dtype)
        self.make_head(bias=True)
        self.build()

    def score(self, texts_or_ids, batch_size=8):
        raise ValueError("score needs a model that predicts the next token, got a MaskedLM")

    def head_logits(self, hidden, inputs, training):
        hidden = activate(self.transform(hidden), self.config.activation)
        return super().head_logits(self.transform_norm(hidden), inputs, training)


@register
class Seq2SeqLM(LanguageModel):
    """Translation and the like: {"source": (B, S), "target": (B, T)} → logits (B, T, V).

    The target starts with bos; logits at t are for target token t + 1.

    Args:
        config: a `kformer.Config`.
        tokenizer, target_tokenizer, remat: as in `Seq2Seq`.
    """

    has_source = True

    def __init__(self, config, tokenizer=None, target_tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "seq2seq_lm")
        config = with_target_ids(config, tokenizer, target_tokenizer)
        super().__init__(config, tokenizer, remat, **kwargs)
        self.target_tokenizer = target_tokenizer or tokenizer
        self.backbone = Seq2Seq(self.config, remat=remat, dtype=child_policy(self))
        self.make_head(self.config.output_bias)
        self.build()

    @property
    def embedding(self):
        return self.backbone.decoder.embedding

    def score_inputs(self, given):
        """Sources and targets, each as `to_inputs` takes them."""
        return {
            "source": to_inputs(given["source"], self.tokenizer, self.config),
            "target": to_inputs(given["target"], self.target_tokenizer, self.config),
        }

    def scored(self, inputs):
        return continuations(inputs["target"], self.config, is_target=True)
