"""Batches of rows that are padded to few lengths: classes, translations, hidden tokens.

Letters: B rows, T tokens, S source tokens.
"""

import itertools
import warnings

import numpy as np

from kformer.config import check_whole
from kformer.data.base import IGNORED, Data
from kformer.data.ragged import Ragged, Store, bucket_edges, chunks, pad_rows
from kformer.data.spelling import Spellings
from kformer.text.foreign import adapt


class BucketedData(Data):
    """Rows of similar length share a batch; there are few shapes, so compilers compile seldom.

    A batch has about `batch_tokens` slots. What does not fill a batch of its bucket goes up
    into the next one, so that one batch in an epoch is not full: it gets empty rows, which
    count nothing.

    Args:
        sides: Ragged rows, one per side of a model.
        tokenizers: one per side.
        batch_tokens: slots in a batch, B · T of its longer side.
        buckets: at most so many shapes.
        batch_size: rows in a batch at the most. Where every row counts the same, short ones would
            have little weight if very many of them shared a batch.
        max_length: no row is longer than that, nor does it become so.
        split: BPE dropout: the chance that a join of the BPE is left out, others in every epoch.
            A model then sees a word in many spellings, and learns what it shares with others.
    """

    def __init__(self, sides, tokenizers, batch_tokens, buckets, split, max_length,
                 batch_size=None, **kwargs):  # fmt: skip
        super().__init__(**kwargs)
        check_whole(1, batch_tokens=batch_tokens, buckets=buckets)
        check_whole(1, batch_size=batch_tokens if batch_size is None else batch_size)
        if len(sides[0]) == 0:
            raise ValueError("data must have at least one row, got none")
        self.sides, self.batch_tokens = sides, batch_tokens
        if not 0.0 <= split < 1.0:
            raise ValueError(f"split must be in [0, 1), got {split!r}")
        self.split = split
        self.spellings = [Spellings(one, split, self.seed) for one in tokenizers if split]
        # At a rate of 0.1 rows grow by a quarter or so; what has no room is not split.
        grown = [np.ceil((1.0 + 3.0 * split) * side.lengths).astype("int64") for side in sides]
        lengths = [np.minimum(side, max_length) for side in grown]
        longest = np.maximum(np.max(lengths, axis=0), 1)
        edges = bucket_edges(longest, buckets)
        if batch_tokens < edges[-1]:
            rule = f"batch_tokens must hold the longest row, {edges[-1]} tokens"
            raise ValueError(f"{rule}, got {batch_tokens}")
        self.bucket_of = np.searchsorted(edges, longest)
        # Rows move up, so a bucket is as wide as all the rows that are not longer than its edge.
        widths = [[side[longest <= edge].max() for side in lengths] for edge in edges]
        self.widths = [[max(4, -(-int(w) // 4) * 4) for w in pair] for pair in widths]
        sizes = [batch_tokens // max(widths) for widths in self.widths]
        sizes = [size // 8 * 8 if size > 8 else size for size in sizes]
        sizes = [min(size, batch_size or size) for size in sizes]
        # No batch is larger than the number of rows that could be in it.
        counts = np.searchsorted(np.sort(longest), edges, side="right").tolist()
        self.sizes = [min(pair) for pair in zip(sizes, counts, strict=True)]

    def settings(self):
        return self.batch_tokens, self.widths, self.sizes, self.split

    def plan(self, epoch):
        """(bucket, row numbers) of every batch."""
        random, order = self.random(epoch), np.arange(len(self.bucket_of))
        if self.shuffle:
            order = random.permutation(order)
        batches, left = [], np.zeros(0, "int64")
        for bucket, size in enumerate(self.sizes):
            rows = np.concatenate([left, order[self.bucket_of[order] == bucket]])
            full = len(rows) // size * size
            batches += [(bucket, part) for part in rows[:full].reshape(-1, size)]
            left = rows[full:]
        if len(left):
            batches.append((len(self.sizes) - 1, left))
        if self.shuffle:
            batches = [batches[i] for i in random.permutation(len(batches))]
        # On TensorFlow Keras takes what two first batches have in common for a law of all.
        ends = [end(range(len(batches)), key=lambda i: batches[i][0]) for end in (min, max)]
        first = list(dict.fromkeys(ends))
        return [batches[i] for i in (*first, *(i for i in range(len(batches)) if i not in first))]

    def examples(self):
        """Two batches that show which sizes vary, whatever batch comes next."""
        plan = self.planned(self.epoch)
        return [self.make(plan, self.epoch, number) for number in range(min(2, len(plan)))]

    def shapes(self):
        """The distinct (B, T) or (B, S, T) of an epoch."""
        used = sorted({bucket for bucket, _ in self.planned(self.epoch)})
        return [(self.sizes[k], *self.widths[k]) for k in used]

    def fill_rate(self):
        """The share of slots that hold a token, before any is split."""
        slots = sum(self.sizes[k] * sum(self.widths[k]) for k, _ in self.planned(self.epoch))
        return float(sum(side.lengths.sum() for side in self.sides) / slots)

    def padded(self, side, item, tokenizer, random):
        """(B, T) ids and the lengths (B,) of their rows; empty places hold the padding id, or 0
        where there is none."""
        bucket, rows = item
        found, width = [self.sides[side][i] for i in rows], self.widths[bucket][side]
        if self.split:
            spell = self.spellings[side].spell
            found = [spell(row, width - len(row), random) for row in found]
        lengths = np.zeros(self.sizes[bucket], "int64")
        lengths[: len(rows)] = [len(row) for row in found]
        return pad_rows(found, width, tokenizer.pad_id or 0, len(lengths)), lengths


def model_inputs(ids, lengths, tokenizer):
    """What a model takes: without a padding id it must be told what is padding."""
    if tokenizer.pad_id is not None:
        return ids
    return {"ids": ids, "padding_mask": np.arange(ids.shape[1]) < lengths[:, None]}


class ClassificationData(BucketedData):
    """Texts and their labels → ids (B, T), labels (B,).

    Args:
        texts, labels: equally many; labels are names, or whole numbers from 0.
        tokenizer: kformer's, or any with encode and decode.
        class_names: the names in the order of their ids; by default the sorted labels. Give
            those of the training data to the validation data.
        batch_tokens, buckets: see `BucketedData`.
        max_length: longer texts are cut.
        bos: start every text with bos, for models that pool the first token; else around it
            stands what the tokenizer's file says, if it says something.
        hide: that share of the tokens is hidden, others in every epoch: the mask token, or where
            there is none the unknown one, takes their place. A model then learns not to rely on
            any single word.
        split, batch_size: see `BucketedData`.
        seed, shuffle, prefetch, workers: see `Data`.
    """

    def __init__(self, texts, labels, tokenizer, batch_tokens=4096, *, class_names=None,
                 max_length=512, buckets=8, bos=False, hide=0.0, split=0.0, **kwargs):  # fmt: skip
        check_whole(1, max_length=max_length)
        labels, self.tokenizer = list(labels), adapt(tokenizer)
        self.hide, self.hidden_id = hide, hidden_id(self.tokenizer, hide)
        self.ordinary = ordinary_ids(self.tokenizer)
        self.class_names = names_of(labels) if class_names is None else list(class_names)
        self.labels = label_ids(labels, self.class_names)
        rows = Ragged.encode(texts, self.tokenizer, bos=bos, special=not bos, cut=max_length)
        if len(rows) != len(labels):
            got = f"{len(rows)} texts and {len(labels)} labels"
            raise ValueError(f"texts and labels must be equally many, got {got}")
        super().__init__(
            [rows], [self.tokenizer], batch_tokens, buckets, split, max_length, **kwargs
        )

    def settings(self):
        return *super().settings(), self.labels.tolist(), self.hide

    def batch(self, item, random):
        bucket, rows = item
        labels = np.full(self.sizes[bucket], IGNORED, "int32")
        labels[: len(rows)] = self.labels[rows]
        ids, lengths = self.padded(0, item, self.tokenizer, random)
        if self.hide:
            chosen = np.isin(ids, self.ordinary) & (random.random(ids.shape) < self.hide)
            ids = np.where(chosen, self.hidden_id, ids).astype("int32")
        return model_inputs(ids, lengths, self.tokenizer), labels


def ordinary_ids(tokenizer):
    """All ids but the special ones; what a row without a pad id is filled up with is one too."""
    names = ("bos_id", "eos_id", "unk_id", "mask_id")
    special = {tokenizer.pad_id or 0, *(getattr(tokenizer, name) for name in names)} - {None}
    return np.setdiff1d(np.arange(tokenizer.vocabulary_size or 0), list(special))


def hidden_id(tokenizer, share):
    """What stands in the place of hidden tokens."""
    if not 0.0 <= share < 1.0:
        raise ValueError(f"hide must be in [0, 1), got {share!r}")
    found = [i for i in (tokenizer.mask_id, tokenizer.unk_id) if i is not None]
    if share and not found:
        raise ValueError(f"hide={share} needs a tokenizer with a mask or unknown token, got none")
    return found[0] if found else None


def are_numbers(values):
    return all(isinstance(value, int | np.integer) for value in values)


def names_of(labels):
    """Names in their order; of numbers all up to the largest, so that a part of the data in which
    one is missing has the same classes."""
    return list(range(max(labels, default=0) + 1)) if are_numbers(labels) else sorted(set(labels))


def label_ids(labels, names):
    """Numbers of labels: the place of a name, or a number itself where the names are none."""
    if len(set(names)) != len(names):
        raise ValueError(f"class_names must be different, got {names}")
    numbers = {name: i for i, name in enumerate(names)}
    if are_numbers(labels) and not are_numbers(names):
        numbers = {i: i for i in range(len(names))}
    for row, label in enumerate(labels):
        if label not in numbers:
            rule = f"a label must be one of the {len(names)} classes"
            raise ValueError(f"{rule}, got {label!r} in row {row}")
    return np.array([numbers[label] for label in labels], "int32")


class TranslationData(BucketedData):
    """Pairs of texts → {"source": (B, S), "target": (B, T)}, labels (B, T).

    The target starts with bos and its labels end with eos; the source ends with eos. Labels are
    shifted here and nowhere else.

    Args:
        pairs: (source, target) texts.
        source_tokenizer, target_tokenizer: the second defaults to the first.
        batch_tokens, buckets: see `BucketedData`.
        max_length: pairs with a longer side are left out, and counted in a warning.
        split: see `BucketedData`.
        seed, shuffle, prefetch, workers: see `Data`.
    """

    def __init__(self, pairs, source_tokenizer, target_tokenizer=None, batch_tokens=4096, *,
                 max_length=256, buckets=8, split=0.0, **kwargs):  # fmt: skip
        check_whole(1, max_length=max_length)
        self.source_tokenizer = adapt(source_tokenizer)
        self.target_tokenizer = adapt(target_tokenizer) or self.source_tokenizer
        if self.target_tokenizer.eos_id is None:
            raise ValueError("TranslationData needs a target tokenizer with an eos token, got none")
        sides = self.encoded(pairs, max_length)
        tokenizers = self.source_tokenizer, self.target_tokenizer
        super().__init__(sides, tokenizers, batch_tokens, buckets, split, max_length, **kwargs)

    def encoded(self, pairs, max_length):
        """Source and target rows of the pairs that are short enough, read once."""
        source, target = Store(self.source_tokenizer), Store(self.target_tokenizer)
        number = 0
        for chunk in chunks(pairs):
            for row, pair in enumerate(chunk, number):
                check_pair(pair, row)
            sources = self.source_tokenizer.encode([pair[0] for pair in chunk], eos=True)
            targets = self.target_tokenizer.encode([pair[1] for pair in chunk], bos=True)
            lengths = zip(map(len, sources), map(len, targets), strict=True)
            fits = [max(pair) <= max_length for pair in lengths]
            source.add(itertools.compress(sources, fits))
            target.add(itertools.compress(targets, fits))
            number += len(chunk)
        sides = [source.finish(), target.finish()]
        if left := number - len(sides[0]):
            got = f"{left:,} of {number:,} pairs are longer than max_length={max_length}"
            warnings.warn(f"{got}: left out", stacklevel=3)
        return sides

    def batch(self, item, random):
        pad, eos = self.target_tokenizer.pad_id, self.target_tokenizer.eos_id
        source = self.padded(0, item, self.source_tokenizer, random)
        source = model_inputs(*source, self.source_tokenizer)
        target, lengths = self.padded(1, item, self.target_tokenizer, random)
        labels = np.full_like(target, IGNORED if pad is None else pad)
        for row, length in enumerate(lengths[: len(item[1])]):
            labels[row, : length - 1] = target[row, 1:length]
            labels[row, length - 1] = eos
        target = model_inputs(target, lengths, self.target_tokenizer)
        return {"source": source, "target": target}, labels


def check_pair(pair, row):
    if isinstance(pair, str) or len(pair) != 2:
        raise ValueError(f"pairs must be of a source and a target, got {pair!r} in row {row}")


class MaskedLMData(BucketedData):
    """Texts with hidden tokens → ids (B, T), labels (B, T): what stood there, else −1.

    Of the tokens that are chosen, 80 % become the mask token, 10 % a random one, 10 % stay.

    Args:
        texts: strings.
        tokenizer: one with a mask token: `Tokenizer.train(..., mask=True)`.
        rate: the share of tokens that is chosen.
        batch_tokens, max_length, buckets, bos, split: as in `ClassificationData`.
        seed, shuffle, prefetch, workers: see `Data`; without shuffle the choice is always the same.
    """

    def __init__(self, texts, tokenizer, batch_tokens=4096, *, rate=0.15, max_length=512,
                 buckets=8, bos=False, split=0.0, **kwargs):  # fmt: skip
        check_whole(1, max_length=max_length)
        self.tokenizer, self.rate = adapt(tokenizer), rate
        for name in ("mask_id", "vocabulary_size"):
            if getattr(self.tokenizer, name) is None:
                raise ValueError(f"MaskedLMData needs a tokenizer with a {name}, got none")
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must be in (0, 1], got {rate!r}")
        self.ordinary = ordinary_ids(self.tokenizer)
        rows = Ragged.encode(texts, self.tokenizer, bos=bos, special=not bos, cut=max_length)
        super().__init__(
            [rows], [self.tokenizer], batch_tokens, buckets, split, max_length, **kwargs
        )

    def settings(self):
        return *super().settings(), self.rate

    def batch(self, item, random):
        ids, lengths = self.padded(0, item, self.tokenizer, random)
        chosen = np.isin(ids, self.ordinary) & (random.random(ids.shape) < self.rate)
        fate, other = random.random(ids.shape), random.choice(self.ordinary, ids.shape)
        hidden = np.where(fate < 0.8, self.tokenizer.mask_id, np.where(fate < 0.9, other, ids))
        labels = np.where(chosen, ids, IGNORED)
        ids = np.where(chosen, hidden, ids).astype("int32")
        return model_inputs(ids, lengths, self.tokenizer), labels
