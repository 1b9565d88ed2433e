"""Beam search: K continuations of every prompt are followed at a time, and the K best that have
stopped are kept apart, so that none is lost while others go on.

    score = Σ log p / ((5 + n) / 6)^α            n new tokens, the stop included

The beams of a prompt share one row of the memory: a place of the text has K slots in it, one for
each beam, behind the prompt, which stands there once. When beams are chosen anew, nothing is
copied but `paths`, which says for every beam in whose slots its past stands; the mask follows it.

Letters: B prompts, K beams, R = B · K, C candidates, P places of the prompt, L of a text, S slots
of the memory, V ids.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kformer import backend, masks
from kformer.generation import choosing
from kformer.generation.loop import Decoding, positions_of
from kformer.generation.steps import last_ids

LOWEST = -1e9  # of a beam that does not exist: below every sum, and no NaN where it is subtracted


class BeamState(NamedTuple):
    """As `steps.State`, with K texts for each prompt, and what has stopped."""

    ids: Any  # (R, L)
    log_probs: Any  # (R, L)
    memory: Any  # of B rows
    place: Any  # ()
    going: Any  # (B,), False = no live beam can pass one that has stopped
    paths: Any  # (B, K, L), the beam in whose slot the token of that place stands
    live: Any  # (B, K), Σ log p
    done: Any  # (B, K), scores
    done_ids: Any  # (B, K, L), with their stops
    done_log_probs: Any  # (B, K, L)


class BeamRules(NamedTuple):
    """`choosing.Rules` and the numbers of the search."""

    rules: choosing.Rules
    alpha: Any  # (), length penalty
    limit: Any  # (), new tokens at the most


def normalized(scores, length, alpha):
    return scores / ops.power((5.0 + ops.cast(length, "float32")) / 6.0, alpha)


def pick(places, *arrays):
    """Of arrays (B, C, ...) the entries at places (B, K)."""
    out = []
    for array in arrays:
        index = ops.reshape(places, (*places.shape, *(1 for _ in array.shape[2:])))
        out.append(ops.take_along_axis(array, index, axis=1))
    return out


def take_step(writer, state, fixed, kind, width):
    """One more token for every beam."""
    tokens = masks.Tokens(*fixed.tokens)
    tokens = tokens._replace(branch=branches(state.paths, fixed.first, tokens.real.shape[1]))
    ids = ops.reshape(last_ids(state, 1), (-1, width))
    start = fixed.first + (state.place - 1 - fixed.first) * width
    given = ids, start, tokens, state.memory, fixed.shared
    logits, memory = writer.advance(*given, last=width)
    return choose_next(writer, state._replace(memory=memory), logits, fixed, kind, width)


def branches(paths, first, slots):
    """(B, K, S): True for the slots in which the past of a beam stands."""
    width, places = paths.shape[1:]
    behind = ops.arange(slots, dtype="int32") - first  # the prompt: below 0
    place = ops.clip(first + behind // width, 0, places - 1)
    own = ops.take(paths, place, axis=2) == behind % width
    return ops.logical_or(own, behind < 0)


def choose_next(writer, state, logits, fixed, kind, width):
    """The next token of every beam, from logits (B, K, V), or (B, V) where all are alike."""
    rules, alpha, limit = fixed.rules
    if len(logits.shape) == 2:
        logits = ops.repeat(logits[:, None], width, axis=1)
    made, places = state.place - fixed.first, state.ids.shape[1]
    logits = ops.reshape(ops.cast(logits, "float32"), (-1, logits.shape[-1]))
    log_probs = ops.log_softmax(logits, axis=-1)
    allowed = choosing.adjusted(log_probs, rules, kind, state.ids, fixed.real, state.place, made)
    scores, parents, chosen = candidates(allowed, state.live, rules.stops.shape[0])
    found = ops.take_along_axis(
        ops.reshape(log_probs, (len(parents), -1)), parents * log_probs.shape[1] + chosen, axis=1
    )
    here = ops.arange(places, dtype="int32") == state.place

    def extended(texts, new):
        (texts,) = pick(parents, ops.reshape(texts, (-1, width, places)))
        return ops.where(here, new[..., None], texts)

    texts = extended(state.ids, chosen), extended(state.log_probs, found)
    stops = ops.any(chosen[..., None] == rules.stops, axis=-1)
    ends = ops.logical_and(stops, ops.arange(scores.shape[1]) < width)
    ends = ops.logical_and(ends, scores > LOWEST / 2)
    ended = ops.where(ends, normalized(scores, made + 1, alpha), LOWEST)
    done = best_of(state[7:], (ended, *texts))
    live, order = ops.top_k(ops.where(stops, LOWEST, scores), width)
    parents, *texts = pick(order, parents, *texts)
    (paths,) = pick(parents, state.paths)
    paths = ops.where(here, ops.arange(width, dtype="int32")[:, None], paths)
    hope = normalized(live[:, 0], limit, alpha)
    going = ops.logical_and(live[:, 0] > LOWEST / 2, hope > done[0][:, -1])
    texts = [ops.reshape(text, (-1, places)) for text in texts]
    return BeamState(*texts, state.memory, state.place + 1, going, paths, live, *done)


def best_of(old, new):
    """Of what has stopped, (scores, ids, log_probs) each, the K best."""
    both = [ops.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]
    best, order = ops.top_k(both[0], old[0].shape[1])
    return best, *pick(order, *both[1:])


def retire(writer, state, fixed, ended, width):
    """Live beams (B, K) that have spelled a stop string have stopped."""
    _, alpha, limit = fixed.rules
    ended = ops.logical_and(ended, state.live > LOWEST / 2)
    scores = normalized(state.live, state.place - fixed.first, alpha)
    shape = (-1, width, state.ids.shape[1])
    texts = [ops.reshape(text, shape) for text in (state.ids, state.log_probs)]
    done = best_of(state[7:], (ops.where(ended, scores, LOWEST), *texts))
    live = ops.where(ended, LOWEST, state.live)
    best = ops.max(live, axis=1)
    hope = normalized(best, limit, alpha)
    going = ops.logical_and(best > LOWEST / 2, hope > done[0][:, -1])
    return BeamState(*state[:4], going, state.paths, live, *done)


def candidates(log_probs, live, stops):
    """The best next tokens of all beams of a prompt, best first: enough of them that K go on even
    if some stop. → scores, parents, ids, each (B, C)."""
    rows, width = live.shape
    size = log_probs.shape[1]
    totals = ops.maximum(log_probs, LOWEST) + ops.reshape(live, (-1, 1))
    scores, places = ops.top_k(
        ops.reshape(totals, (rows, width * size)), min((1 + stops) * width, width * size)
    )
    places = ops.cast(places, "int32")
    return scores, places // size, places % size


class Search(Decoding):
    """`loop.Decoding` with beams: `repeats` of them for each prompt.

    Args:
        alpha: the length penalty.
    """

    step, first_choice = staticmethod(take_step), staticmethod(choose_next)
    by_place = "ids", "log_probs", "paths", "done_ids", "done_log_probs"
    memory_repeats = 1

    def __init__(self, alpha, *args, **kwargs):
        self.alpha = alpha
        super().__init__(*args, **kwargs)

    def prepare(self):
        self.room, self.kind["width"] = dict(width=self.repeats), self.repeats
        alpha, limit = np.asarray(self.alpha, "float32"), np.asarray(self.limit, "int32")
        self.rules = BeamRules(self.rules, alpha, limit)

    def begun(self, state):
        """Only the first beam of each prompt is there, as they are all alike."""
        rows, width = len(self.row_real), self.repeats
        live = np.full((rows, width), LOWEST, "float32")
        live[:, 0] = 0.0
        done, shape = np.full((rows, width), LOWEST, "float32"), (rows, width, self.places)
        ids, log_probs = np.zeros(shape, "int32"), np.zeros(shape, "float32")
        going = np.ones(rows, bool)
        return BeamState(*state[:4], going, ids.copy(), live, done, ids, log_probs)

    @property
    def slots(self):
        """At least P + (L − P) · K, with P down to a power of two, so that few sizes compile."""
        low = 1 << (self.first.bit_length() - 1)
        return low + (self.places - low) * self.repeats

    def last_slot(self):
        return self.first + (self.place - 1 - self.first) * self.repeats - 1

    def tokens(self):
        """K slots for every place behind the prompt."""
        order = np.arange(self.slots, dtype="int32") - self.first
        order = self.first + np.where(order < 0, order, order // self.repeats)
        order = np.minimum(order, self.places - 1)  # more slots than places: never written
        real = np.ones((len(self.row_real), self.places), bool)
        real[:, : self.first] = self.row_real
        positions = positions_of(real, self.last_position(self.row_real))
        order = np.broadcast_to(order.astype("int32"), (len(real), self.slots))
        return real[:, order[0]], order, positions[:, order[0]]

    def stop(self, rows):
        """These beams, a boolean (R,), have stopped."""
        if rows.any():
            ended = rows.reshape(-1, self.repeats)
            self.choose(retire, self.fixed(0), ended, width=self.repeats)

    def kept(self, number):
        """Nothing: the memory is that of all beams."""

    def results(self):
        """Best first: what has stopped, and what the limit cut off."""
        state, new = self.state, slice(self.first, self.place)
        length = float(self.place - self.first)
        live = backend.to_numpy(state.live) / ((5.0 + length) / 6.0) ** self.alpha
        shape = *live.shape, -1
        parts = [
            (live, *(backend.to_numpy(x).reshape(shape) for x in (state.ids, state.log_probs))),
            tuple(backend.to_numpy(x) for x in state[7:]),
        ]
        scores, ids, log_probs = (np.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))
        out = []
        for row, order in enumerate(np.argsort(-scores, axis=1, kind="stable")):
            best = [i for i in order if scores[row, i] > LOWEST / 2]
            out.append([(ids[row, i, new], log_probs[row, i, new], scores[row, i]) for i in best])
        return out
