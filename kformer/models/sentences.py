"""Sentence vectors. Letters: B batch, T tokens, N texts, D width."""

import sys

import keras
import numpy as np
from keras import ops

from kformer import backend
from kformer.config import check_whole
from kformer.data.ragged import Ragged, bucket_edges
from kformer.models.inputs import align, checked_before
from kformer.models.stack import Stack

POOLINGS = ("mean", "first", "last")
BUCKETS = 8  # lengths that rows are padded to
LONG = 8  # batches of which a bar shows the progress


def embed(model, texts, pooling="mean", normalize=True, batch_tokens=4096, max_length=None):
    """A vector for each text: (N, D) float32.

        mean: Σ hidden of its tokens / their number      first, last: the hidden state of one token

    Args:
        model: an `Encoder` or `Decoder` with a tokenizer. Around a text stands what the
            tokenizer's file says, "[CLS]" and "[SEP]" say.
        texts: strings in any iterable, read once.
        pooling: how hidden states become one vector: "mean", "first" or "last".
        normalize: to length 1, so that products are cosines. A text of no token stays zero.
        batch_tokens: slots in a batch.
        max_length: tokens that are read of a text; `config.max_length` by default.
    """
    check(model, pooling, max_length)
    check_whole(1, batch_tokens=batch_tokens)
    limit = model.config.max_length if max_length is None else max_length
    check_whole(1, max_length=limit)
    rows = Ragged.encode(texts, model.tokenizer, special=True, cut=limit)
    out = np.zeros((len(rows), model.config.hidden_dim), "float32")
    batches = list(plan(rows.lengths, batch_tokens))
    shown = len(batches) > LONG and sys.stdout.isatty()
    bar = keras.utils.Progbar(len(batches), verbose=int(shown), unit_name="batch")
    for numbers, size, length in batches:
        batch = [rows[i] for i in numbers] + [[]] * (size - len(numbers))
        ids, real = align(batch, length, model.config.pad_id)
        vectors = model.run_compiled(pooled, ids, real, shares(real, pooling))
        out[numbers] = backend.to_numpy(vectors)[: len(numbers)]
        bar.add(1)
    if normalize:
        out /= np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
    return out


def check(model, pooling, max_length):
    if not isinstance(model, Stack):
        raise ValueError(f"embed needs an Encoder or a Decoder, got a {type(model).__name__}")
    if model.tokenizer is None:
        raise ValueError("embed needs a model with a tokenizer, got tokenizer=None")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    most = model.config.max_length
    if max_length is not None and max_length > most and model.config.position == "learned":
        rule = f"max_length must be at most the {most} positions that were learned"
        raise ValueError(f"{rule}, got {max_length}")


def plan(lengths, batch_tokens):
    """(row numbers, rows, length) of every batch, longest first: of few shapes, and the last one
    no larger than it must be."""
    if len(lengths) == 0:
        return
    edges = np.array(bucket_edges(np.maximum(lengths, 1), BUCKETS))
    order, first = np.argsort(-lengths, kind="stable"), 0
    while first < len(order):
        length = int(edges[np.searchsorted(edges, lengths[order[first]])])
        size = max(1, batch_tokens // length)
        numbers = order[first : first + size]
        yield numbers, min(size, 1 << (len(numbers) - 1).bit_length()), length
        first += size


def shares(real, pooling):
    """(B, T) float32: how much of each token is in the vector."""
    if pooling == "last":
        return shares(real[:, ::-1], "first")[:, ::-1]
    if pooling == "first":
        real = real & (np.cumsum(real, axis=1) == 1)
    return (real / np.maximum(real.sum(axis=1, keepdims=True), 1)).astype("float32")


def pooled(model, ids, real, weights):
    with checked_before():  # a row of no token is no mistake here
        hidden = model({"ids": ids, "padding_mask": real}, training=False)
    return ops.einsum("bt,btd->bd", weights, ops.cast(hidden, "float32"))
