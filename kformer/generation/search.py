"""The decoding loop: which token comes next. Letters: B rows, K beams, V ids.

It drives any model with two methods, and imports none:

    log_probs, state = model.begin(rows, room)               # (B, V) of the first new token
    log_probs, state = model.advance(state, ids, parents)    # (B, V) of the one after ids (B,)

where row i goes on from row parents[i] of the old state (None: from its own). Log-probabilities
are NumPy arrays: the choice is made on the host.
"""

from typing import NamedTuple

import numpy as np

LOWEST = -1e9  # of a beam that does not exist: below every sum, and no NaN where it is subtracted


class Found(NamedTuple):
    """A continuation without its stop, and its score."""

    ids: list
    score: float


def sample(model, rows, limit, stops, temperature=0.0, top_k=None, top_p=None, random=None):
    """One continuation per row: greedy at temperature 0, else drawn from the softmax.

    Args:
        rows: lists of ids.
        limit: at most so many new tokens.
        stops: ids that end a row; they are left out, but count in the score.
        temperature: T in e^(x/T) / Σ e^(x/T).
        top_k, top_p: draw from the k likeliest, or from the likeliest that together reach p.
        random: a NumPy generator for the draws.
    """
    log_probs, state = model.begin(rows, limit)
    out, scores = [[] for _ in rows], np.zeros(len(rows))
    going = np.ones(len(rows), bool)
    for step in range(limit):
        if temperature:
            chosen = draw(log_probs, random.random(len(rows)), temperature, top_k, top_p)
        else:
            chosen = log_probs.argmax(axis=-1)
        scores += np.where(going, log_probs[np.arange(len(rows)), chosen], 0.0)
        going &= ~np.isin(chosen, stops)
        for row in np.nonzero(going)[0]:
            out[row].append(int(chosen[row]))
        if not going.any() or step + 1 == limit:
            break
        log_probs, state = model.advance(state, chosen, None)
    return [[Found(ids, float(score))] for ids, score in zip(out, scores, strict=True)]


def draw(log_probs, uniform, temperature, top_k=None, top_p=None):
    """An id per row: where the running sum of probabilities passes `uniform` · their total."""
    scaled = log_probs.astype("float64") / temperature
    order = np.argsort(-scaled, axis=-1, kind="stable")
    chances = np.exp(np.take_along_axis(scaled, order, axis=-1) - scaled.max(-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    before = np.cumsum(chances, axis=-1) - chances
    if top_p is not None:  # the one that reaches p is still in
        chances = np.where(before < top_p, chances, 0.0)
    if top_k is not None:
        chances[:, top_k:] = 0.0
    sums = np.cumsum(chances, axis=-1)
    place = (sums <= uniform[:, None] * sums[:, -1:]).sum(axis=-1)
    return np.take_along_axis(order, place[:, None], axis=-1)[:, 0]


def beam(model, rows, limit, stops, num_beams, length_penalty):
    """The best continuations of every row, best first.

    A row has K live ones and K finished ones. A finished one scores Σ log p / ((5 + n) / 6)^α for
    n new tokens, its stop included.
    """
    width = num_beams
    log_probs, state = model.begin([row for row in rows for _ in range(width)], limit)
    beams = [Beams(width, stops, length_penalty, limit) for _ in rows]
    for step in range(1, limit + 1):
        live = np.array([row.live for row in beams])
        totals = (live[:, :, None] + log_probs.reshape(len(rows), width, -1)).astype("float64")
        places, scores = best(totals.reshape(len(rows), -1), (1 + len(stops)) * width)
        parents, ids = np.divmod(places, totals.shape[-1])
        for row, *candidates in zip(beams, parents, ids, scores, strict=True):
            row.extend(step, *candidates)
        if step == limit or all(row.is_done() for row in beams):
            break
        first = width * np.arange(len(rows))[:, None]
        parents = (first + [row.parents for row in beams]).ravel()
        ids = np.array([[text[-1] for text in row.texts] for row in beams]).ravel()
        log_probs, state = model.advance(state, ids, parents)
    return [row.ranked(step) for row in beams]


class Beams:
    """The continuations of one row: K that go on, and the K best that have stopped."""

    def __init__(self, width, stops, alpha, limit):
        self.width, self.stops, self.alpha, self.limit = width, stops, alpha, limit
        self.live = [0.0] + [LOWEST] * (width - 1)
        self.texts, self.parents = [[] for _ in range(width)], [0] * width
        self.finished = []

    def extend(self, step, parents, ids, scores):
        """One more token, from candidates that come best first."""
        texts, live, old = [], [], self.texts
        self.parents = []
        for rank, (parent, i, score) in enumerate(zip(parents, ids, scores, strict=True)):
            if i in self.stops and rank < self.width and score > LOWEST / 2:
                self.finished.append(Found(old[parent], self.normalized(score, step)))
            elif i not in self.stops and len(live) < self.width:
                texts.append([*old[parent], int(i)])
                live.append(float(score))
                self.parents.append(int(parent))
        while len(live) < self.width:  # a vocabulary of few ids
            texts, live, self.parents = [*texts, [0]], [*live, LOWEST], [*self.parents, 0]
        self.texts, self.live = texts, live
        self.finished = ranked(self.finished)[: self.width]

    def is_done(self):
        """No live one, however it goes on, could pass the worst finished one."""
        hope = self.normalized(max(self.live), self.limit)
        return len(self.finished) == self.width and self.finished[-1].score >= hope

    def ranked(self, step):
        """Best first; what the limit cut off fills up the places that are left."""
        pairs = zip(self.texts, self.live, strict=True)
        left = [Found(text, self.normalized(score, step)) for text, score in pairs]
        return ranked([*self.finished, *left[: self.width - len(self.finished)]])

    def normalized(self, score, length):
        return float(score / ((5.0 + length) / 6.0) ** self.alpha)


def ranked(found):
    return sorted(found, key=lambda one: -one.score)


def best(scores, number):
    """Places and values of the largest entries of every row, largest first."""
    number = min(number, scores.shape[-1])
    places = np.argpartition(-scores, number - 1, axis=-1)[:, :number]
    values = np.take_along_axis(scores, places, axis=-1)
    order = np.lexsort((places, -values))
    return np.take_along_axis(places, order, -1), np.take_along_axis(values, order, -1)
