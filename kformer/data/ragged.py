"""Rows of ids of unequal length: kept, put into buckets, packed, padded."""

import bisect
import hashlib
import itertools
import tempfile

import numpy as np

CHUNK = 2048  # texts that are encoded at a time
IN_MEMORY = 2**26  # ids; more of them go to a file that is read as if it were memory
MOST_EDGES = 512  # lengths that `bucket_edges` chooses from


def chunks(items):
    """Lists of at most CHUNK of them."""
    items = iter(items)
    while chunk := list(itertools.islice(items, CHUNK)):
        yield chunk


class Ragged:
    """Rows of ids in one flat array; in a temporary file if there are very many."""

    def __init__(self, flat, lengths):
        self.flat, self.lengths = flat, np.asarray(lengths, "int64")
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])

    @classmethod
    def encode(cls, texts, tokenizer, bos=False, eos=False, special=False, cut=None):
        """Texts from any iterable, read once, a chunk at a time, each cut to `cut` tokens."""
        if isinstance(texts, str):
            raise ValueError("texts must be an iterable of strings, got a string")
        store = Store(tokenizer)
        for chunk in chunks(texts):
            given = dict(bos=bos, eos=eos, special=special, max_length=cut)
            store.add(tokenizer.encode(chunk, **given))
        return store.finish()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.flat[self.starts[index] : self.starts[index + 1]]

    def joined(self):
        """All rows as one."""
        return Ragged(self.flat, [len(self.flat)])

    def fingerprint(self):
        digest = hashlib.sha256(self.lengths.tobytes())
        for first in range(0, len(self.flat), 2**24):
            digest.update(np.ascontiguousarray(self.flat[first : first + 2**24]).tobytes())
        return digest.hexdigest()


class Store:
    """Takes rows; past IN_MEMORY ids it goes on in a temporary file."""

    def __init__(self, tokenizer):
        self.vocabulary_size = tokenizer.vocabulary_size or 2**31
        self.dtype = np.dtype("uint16" if self.vocabulary_size <= 2**16 else "int32")
        self.lengths, self.parts, self.size, self.file = [], [], 0, None

    def add(self, rows):
        rows = list(rows)
        self.lengths += [len(row) for row in rows]
        part = np.fromiter(itertools.chain.from_iterable(rows), "int64")
        if part.size and not 0 <= part.min() <= part.max() < self.vocabulary_size:
            got = part.min() if part.min() < 0 else part.max()
            rule = f"a tokenizer's ids must be in [0, {self.vocabulary_size})"
            raise ValueError(f"{rule}, as its vocabulary_size says, got {got}")
        self.parts.append(part.astype(self.dtype))
        self.size += len(part)
        if self.size > IN_MEMORY:
            self.file = self.file or tempfile.TemporaryFile(prefix="kformer-ids-")
            for waiting in self.parts:
                waiting.tofile(self.file)
            self.parts = []

    def finish(self):
        if self.file is None:
            return Ragged(np.concatenate([np.zeros(0, self.dtype), *self.parts]), self.lengths)
        with self.file:  # the map stays when the file is closed
            self.file.flush()
            return Ragged(np.memmap(self.file, self.dtype, "r"), self.lengths)


def pad_rows(rows, length, pad_id, number=None):
    """(number, length) int32, filled with pad_id on the right and below."""
    out = np.full((number or len(rows), length), pad_id, "int32")
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def bucket_edges(lengths, number, step=4):
    """At most `number` lengths, multiples of `step`, to which rows are padded: those with the
    fewest slots in all, by dynamic programming over the lengths that occur.

    cost(k, j) = min over i < j of cost(k − 1, i) + edge_j · (rows longer than edge_i, up to edge_j)

    Where there are very many lengths the step grows, as the work is the square of their number.
    """
    step *= -(-int(np.max(lengths)) // (step * MOST_EDGES))
    edges, counts = np.unique(-(-np.asarray(lengths) // step) * step, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    cost, choices = np.concatenate([[0.0], np.full(len(edges), np.inf)]), []
    allowed = np.arange(len(edges))[None] <= np.arange(len(edges))[:, None]
    for _ in range(min(number, len(edges))):
        # [j, i]: buckets up to edge j, the last of which starts after edge i − 1
        through = cost[None, :-1] + edges[:, None] * (below[1:, None] - below[None, :-1])
        through = np.where(allowed, through, np.inf)
        choices.append(through.argmin(axis=1))
        cost = np.concatenate([[0.0], through.min(axis=1)])
    out, last = [], len(edges)
    for choice in reversed(choices):
        if last:
            out.append(int(edges[last - 1]))
            last = choice[last - 1]
    return out[::-1]


def best_fit(lengths, capacity):
    """Which pieces share a row of `capacity` slots: longest first, each into the fullest row
    that still has room. → a list of lists of piece numbers."""
    rows, room, spaces = [], {}, []  # spaces: the sorted free sizes that some row has
    for piece in np.argsort(-np.asarray(lengths), kind="stable"):
        length = int(lengths[piece])
        if length == 0:  # what is empty needs no place
            break
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            rows.append([])
            row, free = len(rows) - 1, capacity
        else:
            free = spaces[at]
            row = room[free].pop()
            if not room[free]:
                del room[free], spaces[at]
        rows[row].append(int(piece))
        if free > length:
            if free - length not in room:
                bisect.insort(spaces, free - length)
                room[free - length] = []
            room[free - length].append(row)
    return rows
