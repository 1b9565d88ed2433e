"""Beam search: K continuations of every prompt are followed at a time, and the K best that have
stopped are kept apart, so that none is lost while others go on.

    score = Σ log p / ((5 + n) / 6)^α            n new tokens, the stop included

Letters: B prompts, K beams, R = B · K rows, C candidates, S slots, V ids.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops, tree

from kformer import backend
from kformer.generation import choosing
from kformer.generation.loop import Decoding, describe

LOWEST = -1e9  # of a beam that does not exist: below every sum, and no NaN where it is subtracted


class BeamState(NamedTuple):
    """As `loop.State`, with K rows for each prompt, and what has stopped."""

    BY_SLOT = "ids", "log_probs", "done_ids", "done_log_probs"

    ids: Any  # (R, S)
    log_probs: Any  # (R, S)
    logits: Any  # (R, V)
    memory: Any
    place: Any  # ()
    going: Any  # (B,), False = no live beam can pass one that has stopped
    live: Any  # (B, K), Σ log p
    done: Any  # (B, K), scores
    done_ids: Any  # (B, K, S), with their stops
    done_log_probs: Any  # (B, K, S)


class BeamRules(NamedTuple):
    """`choosing.Rules` and the numbers of the search."""

    rules: choosing.Rules
    alpha: Any  # (), length penalty
    limit: Any  # (), new tokens at the most


def begin(writer, state, width):
    """Beams from the state after the prompts, whose rows were repeated: only the first one of
    each prompt is there, as they are all alike."""
    rows = state.ids.shape[0] // width
    live = ops.where(ops.arange(width) == 0, 0.0, LOWEST)
    live = ops.broadcast_to(ops.cast(live, "float32"), (rows, width))
    shape = rows, width, state.ids.shape[1]
    kept = ops.full((rows, width), LOWEST, dtype="float32")
    done_ids, done_log_probs = ops.zeros(shape, dtype="int32"), ops.zeros(shape, dtype="float32")
    going = ops.ones((rows,), dtype="bool")
    return BeamState(*state[:5], going, ops.copy(live), kept, done_ids, done_log_probs)


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
    rules, alpha, limit = fixed.rules
    made, slots = state.place - fixed.first, state.ids.shape[1]
    log_probs = ops.log_softmax(ops.cast(state.logits, "float32"), axis=-1)
    allowed = choosing.adjusted(log_probs, rules, kind, state.ids, fixed.real, state.place, made)
    scores, parents, chosen = candidates(allowed, state.live, rules.stops.shape[0])
    found = ops.take_along_axis(
        ops.reshape(log_probs, (len(parents), -1)), parents * log_probs.shape[1] + chosen, axis=1
    )

    def extended(texts, new):
        (texts,) = pick(parents, ops.reshape(texts, (-1, width, slots)))
        here = ops.arange(slots, dtype="int32") == state.place
        return ops.where(here, new[..., None], texts)

    texts = extended(state.ids, chosen), extended(state.log_probs, found)
    stops = ops.any(chosen[..., None] == rules.stops, axis=-1)
    ends = ops.logical_and(stops, ops.arange(scores.shape[1]) < width)
    ends = ops.logical_and(ends, scores > LOWEST / 2)
    ended = ops.where(ends, normalized(scores, made + 1, alpha), LOWEST)
    done = [ops.concatenate(pair, axis=1) for pair in zip(state[7:], (ended, *texts), strict=True)]
    best, places = ops.top_k(done[0], width)
    done = best, *pick(places, *done[1:])
    live, places = ops.top_k(ops.where(stops, LOWEST, scores), width)
    parents, chosen, *texts = pick(places, parents, chosen, *texts)
    rows = ops.reshape(parents + width * ops.arange(len(parents), dtype="int32")[:, None], (-1,))
    memory = tree.map_structure(lambda x: ops.take(x, rows, axis=0), state.memory)
    chosen = ops.reshape(chosen, (-1, 1))
    given = describe(fixed), memory, fixed.shared
    logits, memory = writer.advance(chosen, state.place, *given)
    hope = normalized(live[:, 0], limit, alpha)
    going = ops.logical_or(done[0][:, -1] < LOWEST / 2, hope > done[0][:, -1])
    texts = [ops.reshape(text, (-1, slots)) for text in texts]
    return BeamState(*texts, logits, memory, state.place + 1, going, live, *done)


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

    step = staticmethod(take_step)

    def __init__(self, functions, prompt, rules, kind, limit, uniform, repeats, dtype, alpha):
        super().__init__(functions, prompt, rules, kind, limit, uniform, repeats, dtype)
        self.static.update(width=repeats)
        self.state = functions.grow(begin, self.state, width=repeats)
        alpha, limit = np.asarray(alpha, "float32"), np.asarray(limit, "int32")
        self.rules = BeamRules(rules, alpha, limit)

    def results(self):
        """Best first: what has stopped, and what the limit cut off."""
        state, new = self.state, slice(self.first, self.place)
        length = float(self.place - self.first)
        live = backend.to_numpy(state.live) / ((5.0 + length) / 6.0) ** self.rules.alpha
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
