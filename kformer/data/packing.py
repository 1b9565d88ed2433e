"""Language-model batches: documents packed into rows, or one stream cut into windows.

Letters: B rows, T tokens.
"""

import numpy as np

from kformer.config import check_whole
from kformer.data.base import IGNORED, Data
from kformer.data.ragged import Ragged, best_fit
from kformer.text.foreign import adapt


class LanguageModelData(Data):
    """Texts → ids (B, T), labels (B, T): the next token of every token.

    Packed, rows of T tokens hold documents, or pieces of long ones; the inputs are {"ids",
    "segments"}, and documents see only themselves. Not packed, all texts are one stream that is
    cut into windows; the inputs are the ids alone. Cuts are at other places in every epoch, but
    there are always equally many batches: Keras counts them once.

    Args:
        texts: strings; documents.
        tokenizer: packed documents start with its bos and end with its eos, where it has them.
        length: T.
        batch_size: B.
        pack: documents apart (True), or one stream (False).
        seed, shuffle, prefetch, workers: see `Data`.
    """

    def __init__(self, texts, tokenizer, length=256, batch_size=16, pack=True, **kwargs):
        super().__init__(**kwargs)
        check_whole(1, length=length, batch_size=batch_size)
        self.tokenizer, self.length = adapt(tokenizer), length
        self.batch_size, self.pack = batch_size, pack
        texts = [texts] if isinstance(texts, str) else texts
        ids = self.tokenizer.bos_id, self.tokenizer.eos_id
        bos, eos = (pack and number is not None for number in ids)
        rows = Ragged.encode(texts, self.tokenizer, bos=bos, eos=eos)
        self.sides = [rows if pack else rows.joined()]
        if self.sides[0].lengths.max(initial=0) < 2:
            raise ValueError("texts must hold at least two tokens, got fewer")
        self.packed = best_fit(self.inputs() % length, length) if pack else None

    def settings(self):
        return self.length, self.batch_size, self.pack

    def inputs(self):
        """How many tokens of each document have a next one."""
        return np.maximum(self.sides[0].lengths - 1, 0)

    def plan(self, epoch):
        """Lists of B rows, each a list of pieces: (start, length) in the flat ids."""
        random = self.random(epoch)
        rows = self.packed_rows(random) if self.pack else self.windows(random)
        if self.shuffle:
            rows = [rows[i] for i in random.permutation(len(rows))]
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def packed_rows(self, random):
        """A document longer than T is cut into whole rows and a rest, which stands at another
        place in every epoch; the rests, and the short documents, share rows."""
        starts, (whole, rest) = self.sides[0].starts[:-1], np.divmod(self.inputs(), self.length)
        before = random.integers(whole + 1) if self.shuffle else whole  # whole rows ahead of it
        rests = np.stack([starts + before * self.length, rest], axis=1)
        number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
        late = np.where(number >= np.repeat(before, whole), np.repeat(rest, whole), 0)
        places = np.repeat(starts, whole) + number * self.length + late
        rows = [[(place, self.length)] for place in places.tolist()]
        return rows + [[tuple(rests[i].tolist()) for i in row] for row in self.packed]

    def windows(self, random):
        """Windows of the stream from a random place on; in evaluation from its start, and with
        the short one at its end."""
        total, length = int(self.inputs()[0]), self.length
        if not self.shuffle or total < length:
            starts = range(0, total, length)
            return [[(start, min(length, total - start))] for start in starts]
        number = max((total - length + 1) // length, 1)  # that many fit wherever they start
        offset = int(random.integers(min(length, total - number * length + 1)))
        return [[(offset + i * length, length)] for i in range(number)]

    def batch(self, item, random):
        ids = np.full((self.batch_size, self.length), self.tokenizer.pad_id or 0, "int32")
        labels, segments = np.full_like(ids, IGNORED), np.zeros_like(ids)
        flat = self.sides[0].flat
        for row, pieces in enumerate(item):
            at = 0
            for segment, (start, length) in enumerate(pieces, 1):
                place = slice(at, at + length)
                ids[row, place] = flat[start : start + length]
                labels[row, place] = flat[start + 1 : start + length + 1]
                segments[row, place] = segment
                at += length
        return ({"ids": ids, "segments": segments} if self.pack else ids), labels

    def shapes(self):
        return [(self.batch_size, self.length)]

    def fill_rate(self):
        """The share of slots that hold a token."""
        batches = self.planned(self.epoch)
        tokens = sum(length for batch in batches for row in batch for _, length in row)
        return tokens / (len(batches) * self.batch_size * self.length)
