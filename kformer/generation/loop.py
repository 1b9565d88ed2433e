"""The decoding loop as the host sees it: prompts in, continuations out, in compiled chunks.

Letters: R rows, P prompt slots, F places before it, L places of a text, S slots of the memory.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import tree

from kformer import backend
from kformer.generation.steps import (
    Fixed,
    State,
    choose_next,
    read,
    read_on,
    take_step,
    wider,
)

CHUNK = 32  # tokens that one compiled call makes at the most
LEAST_SLOTS = 64


class Kept(NamedTuple):
    """A text that was read, for others to go on from."""

    memory: Any  # of one row
    shared: Any
    ids: list  # what was read
    last: int  # slot of the last of them


def slots_for(number):
    """How many slots are made for `number` tokens: few sizes, each compiled once."""
    return max(LEAST_SLOTS, 1 << (number - 1).bit_length())


def positions_of(real, most=None):
    """Positions that count real tokens, at most `most` (R, 1): what is written behind the end
    matters to nobody, but must have a place in a table."""
    positions = np.maximum(np.cumsum(real, axis=1, dtype="int32") - 1, 0)
    return positions if most is None else np.minimum(positions, most)


def describe(real, most=None):
    """real, order and positions of tokens that stand in slots of the same number."""
    order = np.broadcast_to(np.arange(real.shape[1], dtype="int32"), real.shape)
    return real, order, positions_of(real, most)


class Decoding:
    """A batch that is being decoded, chunk by chunk; its first tokens are there from the start.

    Args:
        functions: `Functions`, the writer and what is compiled for it.
        prompt: arrays, see `read`; rows end together.
        rules: `choosing.Rules` of arrays, one number for each row and repeat.
        kind: `choosing.Kind`.
        limit: new tokens at the most.
        uniform: (R, limit) numbers for draws.
        repeats: continuations of each prompt; the prompt is read once for all.
        dtype: of the memory.
        kept: `Kept`, what all the prompts go on from.
    """

    step, first_choice = staticmethod(take_step), staticmethod(choose_next)
    by_place = "ids", "log_probs"  # what of the state has a column for every place
    unsure = 1  # so many of the last tokens the model may not have read

    def __init__(
        self, functions, prompt, rules, kind, limit, uniform, repeats=1, dtype=None, kept=None
    ):
        self.functions, self.rules, self.uniform, self.repeats = functions, rules, uniform, repeats
        self.kind, self.limit = dict(kind=kind), limit
        self.extra, self.room, self.ahead = {}, {}, 0
        self.prepare()
        ids, self.row_real = joined(kept, prompt)
        self.first = self.place = ids.shape[1]
        self.end = self.first + limit
        self.places = slots_for(min(self.end, self.first + CHUNK) + self.ahead)
        logits, memory, self.shared = self.read(prompt, dtype, kept)
        ids, self.real = (np.repeat(x, repeats, axis=0) for x in (ids, self.row_real))
        texts = np.zeros((len(ids), self.places), "int32")
        texts[:, : self.first] = ids
        place, going = np.asarray(self.first, "int32"), np.ones(len(ids), bool)
        state = State(texts, np.zeros(texts.shape, "float32"), memory, place, going)
        self.state = self.begun(state)
        self.choose(self.first_choice, logits, self.fixed(1), **self.kind)

    def choose(self, function, *inputs, **static):
        """The state after a function that leaves the memory alone, which is not handed to it: it
        would come back as a copy."""
        given = self.state._replace(memory=()), *inputs
        state = self.functions.choose(function, *given, **static)
        self.state = state._replace(memory=self.state.memory)
        self.look()

    def prepare(self):
        """What is special about a way of decoding."""

    def begun(self, state):
        """The state before the first choice."""
        return state

    @property
    def slots(self):
        """Slots of the memory for the places that there are."""
        return self.places

    @property
    def memory_repeats(self):
        return self.repeats

    def read(self, prompt, dtype, kept):
        static = dict(slots=self.slots, repeats=self.memory_repeats, room=tuple(self.room.items()))
        return read_prompts(self.functions, prompt, dtype, kept, **static)

    def advance(self, number=None):
        """At most `number` more tokens, or CHUNK; False if there is nothing more to do."""
        if not self.is_going:
            return False
        if self.place + self.ahead >= self.places:
            self.widen(slots_for(self.place + self.ahead + 1))
        number = min(number or CHUNK, CHUNK, self.places - self.ahead - self.place)
        until = min(self.place + number, self.end)
        given = self.state, self.fixed(until - self.place), until
        self.state = self.functions.decode(self.step, *given, **self.kind, **self.extra)
        self.look()
        return self.is_going

    def look(self):
        """Where the chunk has ended."""
        self.place = min(int(backend.to_numpy(self.state.place)), self.end)
        self.is_going = self.place < self.end and bool(backend.to_numpy(self.state.going).any())

    def widen(self, places):
        """More places, and more slots of the memory."""
        more, self.places = places - self.places, places
        static = dict(slots=self.slots, room=tuple(self.room.items()))
        given = self.state.memory, np.asarray(self.last_slot(), "int32")
        memory = self.functions.grow(wider, *given, **static)

        def padded(x):
            x = backend.to_numpy(x)
            return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])

        by_place = {name: padded(getattr(self.state, name)) for name in self.by_place}
        self.state = self.state._replace(**by_place, memory=memory)

    def last_slot(self):
        """The last one that was written."""
        return self.place - 2

    def fixed(self, number):
        """What the next `number` tokens need."""
        real = np.ones((len(self.real), self.places), bool)
        real[:, : self.first] = self.real
        done = self.place - self.first
        uniform = np.zeros((len(real), CHUNK + self.ahead), "float32")
        some = self.uniform[:, done : done + number + self.ahead]
        uniform[:, : some.shape[1]] = some
        first, begun = (np.asarray(n, "int32") for n in (self.first, self.place))
        return Fixed(real, self.tokens(), first, begun, uniform, self.rules, self.shared)

    def tokens(self):
        """The description of the memory's slots."""
        real = np.ones((len(self.real), self.slots), bool)
        real[:, : self.first] = self.real
        return describe(real, self.last_position(self.real))

    def last_position(self, real):
        return real.sum(axis=1, keepdims=True, dtype="int32") + self.end - self.first - 1

    def stop(self, rows):
        """End these rows: a boolean (R,)."""
        going = np.logical_and(backend.to_numpy(self.state.going), np.logical_not(rows))
        self.state = self.state._replace(going=going)
        self.is_going = self.is_going and bool(going.any())

    def texts(self):
        """(R, new tokens), what was chosen so far."""
        return backend.to_numpy(self.state.ids)[:, self.first : self.place]

    def results(self):
        """For every prompt its continuations: (ids, log-probabilities), stops and what stands
        behind them included."""
        log_probs = backend.to_numpy(self.state.log_probs)[:, self.first : self.place]
        pairs = list(zip(self.texts(), log_probs, strict=True))
        return [pairs[i : i + self.repeats] for i in range(0, len(pairs), self.repeats)]

    def kept(self, number):
        """The first `number` places of the one row, as far as the model has read them for sure;
        None if a window may have lost some of them."""
        place = int(backend.to_numpy(self.state.place))
        number = min(number, place - self.unsure)
        sizes = {x.shape[2] for x in tree.flatten(self.state.memory)}
        front = int(np.argmax(self.real[0]))
        if number <= front or (number < place - 2 and min(sizes) < self.slots):
            return None
        ids = backend.to_numpy(self.state.ids)[0, front:number]
        return Kept(self.state.memory, self.shared, ids.tolist(), number - 1)


def read_prompts(functions, prompt, dtype, kept, slots, repeats=1, room=()):
    """(logits, memory, shared) after prompts, which may go on from what is kept."""
    functions.look()
    static = dict(slots=slots, repeats=repeats, room=room)
    if kept is None:
        return functions.prefill(read, prompt, dtype=dtype, **static)
    lengths = np.sum(prompt["real"], axis=1, dtype="int32")
    pairs = zip(prompt["ids"], lengths, strict=True)
    ids = np.array([np.roll(row, length) for row, length in pairs])  # they ended together
    number, last = (np.asarray(n, "int32") for n in (len(kept.ids), kept.last))
    given = ids, lengths, (kept.memory, kept.shared), number, last
    return functions.prefill(read_on, *given, **static)


def keep(functions, prompt, dtype, kept=None):
    """`Kept` of one prompt, and what stands before it."""
    ids, real = joined(kept, prompt)
    _, *memory = read_prompts(functions, prompt, dtype, kept, slots_for(ids.shape[1]))
    return Kept(*memory, ids[0, real[0]].tolist(), ids.shape[1] - 1)


def joined(kept, prompt):
    """ids and real of the prompts behind what they go on from; what is missing is in front."""
    real = np.asarray(prompt["real"])
    if kept is None:
        return prompt["ids"], real
    rows = [[*kept.ids, *ids[some]] for ids, some in zip(prompt["ids"], real, strict=True)]
    length = len(kept.ids) + real.shape[1]
    ids = np.array([[0] * (length - len(row)) + row for row in rows], "int32")
    return ids, np.array([[False] * (length - len(row)) + [True] * len(row) for row in rows])


def cut(ids, stops):
    """A list of ids up to its stop, and how many were chosen, the stop included."""
    ids = [int(i) for i in ids]
    end = next((place for place, i in enumerate(ids) if i in stops), None)
    return (ids, len(ids)) if end is None else (ids[:end], end + 1)
