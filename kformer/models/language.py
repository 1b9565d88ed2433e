"""Language models. Letters: B batch, T tokens, D width, V vocabulary."""

from typing import NamedTuple

import numpy as np
from keras import ops, tree

from kformer import backend, masks
from kformer.layers.add_norm import make_norm
from kformer.layers.feedforward import Project, activate
from kformer.layers.heads import Bias
from kformer.models.decoding import Generates
from kformer.models.inputs import (
    align,
    checked_before,
    real_tokens,
    to_inputs,
    unpack,
    up_to_bucket,
)
from kformer.models.seq2seq import Seq2Seq, with_target_ids
from kformer.models.stack import Decoder, Encoder
from kformer.models.tasks import Task
from kformer.serialization import child_policy, register
from kformer.text import Tokenizer
from kformer.text.foreign import adapt
from kformer.training.metrics import Perplexity


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


@register
class CausalLM(Generates, LanguageModel):
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

    @property
    def decoder(self):
        return self.backbone

    def encode_prompts(self, texts):
        """A text goes on from what it began with in training: what the tokenizer's file puts
        before it, or bos, where there is one."""
        if self.tokenizer.template is None:
            return self.tokenizer.encode(texts, bos=self.tokenizer.bos_id is not None)
        before, _ = self.tokenizer.template
        return [[*before, *row] for row in self.tokenizer.encode(texts)]

    def chat(self, messages, max_new_tokens=256, **options):
        """The assistant's next message, a text, by the chat template of the tokenizer.

        It ends at `config.eos_id`, or where the template ends an answer. What is said in messages
        spells no special token. It needs the extra `chat`.

        Args:
            messages: [{"role": "user", "content": "..."}, ...]: what was said so far.
            max_new_tokens, options: as in `generate`, `batch_size` and `after` apart.
        """
        if not isinstance(self.tokenizer, Tokenizer):
            raise ValueError(f"chat needs a kformer.Tokenizer, got tokenizer={self.tokenizer}")
        stop = options.pop("stop", None)
        stops = [stop] if isinstance(stop, str | int | np.integer) else [*(stop or [])]
        ids = self.tokenizer.encode_chat(messages)
        stops += self.tokenizer.chat.stops
        request, _ = self.asked(max_new_tokens, {**options, "stop": stops})
        return self.answers(request, "", [ids])


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

    def fill(self, text, top=3):
        """The best guesses for the token at every "[MASK]" of a text: [(text, probability), ...].

        The k-th of the list has the k-th best guess at each place, and their joint probability.
        """
        tokenizer = self.tokenizer
        if getattr(tokenizer, "mask_id", None) is None:
            raise ValueError("fill needs a model whose tokenizer has a mask token, got none")
        parts = text.split("[MASK]")
        if len(parts) < 2:
            raise ValueError(f"text must have a [MASK], got {text!r}")
        before, after = tokenizer.template or ([], [])
        ids, places = [*before], []
        for part in parts:  # the space before a word is part of its token
            ids += [*tokenizer.encode(part.rstrip() if part is not parts[-1] else part), 0]
            places.append(len(ids) - 1)
        ids, places = np.array([[*ids[:-1], *after]]), places[:-1]
        ids[0, places] = tokenizer.mask_id
        logits = self.predict_on_batch(ids)[0, places].astype("float64")
        chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        out = []
        for best in np.argsort(-chances, axis=-1)[:, :top].T:
            ids[0, places] = best
            out.append((tokenizer.decode(ids[0]), float(np.prod(chances[range(len(best)), best]))))
        return out

    def score(self, texts_or_ids, batch_size=8):
        raise ValueError("score needs a model that predicts the next token, got a MaskedLM")

    def head_logits(self, hidden, inputs, training):
        hidden = activate(self.transform(hidden), self.config.activation)
        return super().head_logits(self.transform_norm(hidden), inputs, training)


@register
class Seq2SeqLM(Generates, LanguageModel):
    """Translation and the like: {"source": (B, S), "target": (B, T)} → logits (B, T, V).

    The target starts with bos; logits at t are for target token t + 1.

    Args:
        config: a `kformer.Config`.
        tokenizer, target_tokenizer, remat: as in `Seq2Seq`.
    """

    has_source = True
    tokenizer_names = Seq2Seq.tokenizer_names

    def __init__(self, config, tokenizer=None, target_tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "seq2seq_lm")
        config = with_target_ids(config, tokenizer, target_tokenizer)
        super().__init__(config, tokenizer, remat, **kwargs)
        self.target_tokenizer = adapt(target_tokenizer) or self.tokenizer
        self.backbone = Seq2Seq(self.config, remat=remat, dtype=child_policy(self))
        self.make_head(self.config.output_bias)
        self.build()

    @property
    def decoder(self):
        return self.backbone.decoder

    @property
    def embedding(self):
        return self.decoder.embedding

    def encode_prompts(self, texts):
        """A source ends as it did in training: as the tokenizer's file says, or with eos, where
        there is one."""
        if self.tokenizer.template is not None:
            return self.tokenizer.encode(texts, special=True)
        return self.tokenizer.encode(texts, eos=self.tokenizer.eos_id is not None)

    def prepared(self, rows, begins=()):
        """Sources as arrays; what is written starts with bos, and with what it begins with."""
        if self.config.bos_id is None:
            raise ValueError("generate needs config.bos_id, which a translation starts with")
        source, real = align(rows, up_to_bucket(max(map(len, rows))), self.config.pad_id)
        start = super().prepared([[self.config.bos_id, *begins]] * len(rows))
        return {**start, "source": source, "source_real": real}

    def begin(self, prompt, dtype):
        """The encoder's output as keys and values of every block of the decoder: made once."""
        source, real = prompt["source"], prompt["source_real"]
        with checked_before():
            memory = self.backbone.encoder({"ids": source, "padding_mask": real})
            cross = [block.cross_attention.keys_values(memory) for block in self.decoder.blocks]
        logits, own, _ = super().begin(prompt, dtype, cross, masks.describe(real))
        return logits, own, (cross, real)

    def score_inputs(self, given):
        """Sources and targets, each as `to_inputs` takes them."""
        return {
            "source": to_inputs(given["source"], self.tokenizer, self.config),
            "target": to_inputs(given["target"], self.target_tokenizer, self.config),
        }

    def scored(self, inputs):
        return continuations(inputs["target"], self.config, is_target=True)
