"""BPE dropout: a word in many spellings, so that rare words show what they share with others.

A BPE joins neighbours, the most frequent pair first, until a word is as few tokens as can be. With
dropout every join is left out with some chance, and what comes out is longer: "un|related",
"unrel|ated", ... The spellings of a token are drawn once, from the seed, and then chosen among.
"""

import itertools

import numpy as np

SPELLINGS = 32  # of each token


class Spellings:
    """The ways to spell the tokens of a tokenizer.

    Args:
        tokenizer: one that joins tokens, see `Tokenizer.joins`.
        rate: the chance that a join is left out.
        seed: of the spellings.
    """

    def __init__(self, tokenizer, rate, seed):
        joins = tokenizer.joins() if hasattr(tokenizer, "joins") else {}
        if not joins:
            raise ValueError(f"split={rate} needs a tokenizer that joins tokens (bpe), got another")
        self.rate, self.seed = rate, seed
        self.joins = {pair: (rank, new) for rank, (pair, new) in enumerate(joins.items())}
        self.halves = {}
        for pair, new in joins.items():
            self.halves.setdefault(new, pair)
        self.known = {}

    def of(self, token):
        """SPELLINGS lists of ids that all spell this token."""
        if token not in self.known:
            random = np.random.default_rng([self.seed, token])
            letters = self.letters(token)
            self.known[token] = [self.joined(letters, random) for _ in range(SPELLINGS)]
        return self.known[token]

    def letters(self, token):
        """The ids that a token was joined from in the beginning."""
        if token not in self.halves:
            return [token]
        return [*itertools.chain.from_iterable(map(self.letters, self.halves[token]))]

    def joined(self, ids, random):
        """Joins neighbours, the first join first, until all that are left were left out."""
        ids = list(ids)
        while True:
            pairs = enumerate(zip(ids, ids[1:], strict=False))
            found = [(*self.joins[pair], place) for place, pair in pairs if pair in self.joins]
            chances = random.random(len(found))
            found = [one for one, chance in zip(found, chances, strict=True) if chance >= self.rate]
            if not found:
                return ids
            _, new, place = min(found)
            ids[place : place + 2] = [new]

    def spell(self, row, room, random):
        """The row with every token in one of its spellings; it grows by at most `room` tokens."""
        out = []
        for token, number in zip(
            row.tolist(), random.integers(SPELLINGS, size=len(row)), strict=True
        ):
            ids = self.of(token)[number]
            room -= len(ids) - 1
            if room < 0:
                room += len(ids) - 1
                ids = [token]
            out += ids
        return out
