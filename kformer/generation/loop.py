"""The decoding loop: prompts in, continuations out, in compiled chunks of tokens.

It drives anything that can write, a `Writer`, and imports no model. Slots are shared by the rows
of a batch: prompts end together, so that the next token of every row goes to the same slot; rows
of different lengths differ in their positions and in what the mask lets them see.

Letters: R rows, P prompt slots, S slots in all, V ids, N tokens in a chunk.
"""

import functools
from typing import Any, NamedTuple, Protocol

import numpy as np
from keras import ops, tree

from kformer import backend, masks
from kformer.generation import choosing

CHUNK = 32  # tokens that one compiled call makes at the most
LEAST_SLOTS = 64


class Writer(Protocol):
    """What the loop asks for. `memory` is any nest of tensors with the rows first; `shared` is
    what stays as it is, and may have fewer rows: those of the sources that beams share."""

    variables: Any  # a Keras layer has them: weights that training changes are seen

    def begin(self, prompt, slots, dtype):
        """(logits (R, V) of the first new token, memory, shared) for `prompt`, the tensors that
        `prepare` made; memory has `slots` slots, kept as `dtype`."""

    def advance(self, ids, start, tokens, memory, shared):
        """(logits (R, V), memory) after ids (R, 1) have gone to slot `start`, a tensor; `tokens`
        (`masks.Tokens`) describes all slots."""

    def grow(self, memory, slots):
        """The same memory with more slots."""


class State(NamedTuple):
    """Where decoding stands; every chunk makes a new one."""

    BY_SLOT = "ids", "log_probs"

    ids: Any  # (R, S), what stands in the slots
    log_probs: Any  # (R, S), of what was chosen
    logits: Any  # (R, V), of the token that comes next
    memory: Any
    place: Any  # (), slot of the token that comes next
    going: Any  # (R,), False = has stopped


class Fixed(NamedTuple):
    """What a chunk does not change."""

    real: Any  # (R, S), False = padding in front of the prompt
    positions: Any  # (R, S)
    first: Any  # (), slot of the first new token
    begun: Any  # (), slot in which this chunk began
    uniform: Any  # (R, N), for draws
    rules: choosing.Rules
    shared: Any


def describe(fixed):
    order = ops.broadcast_to(ops.arange(fixed.real.shape[1], dtype="int32"), fixed.real.shape)
    return masks.Tokens(fixed.real, order, fixed.positions)


def take_step(writer, state, fixed, kind):
    """One more token for every row."""
    made = state.place - fixed.first
    logits = choosing.adjusted(
        state.logits, fixed.rules, kind, state.ids, fixed.real, state.place, made
    )
    uniform = ops.take(fixed.uniform, state.place - fixed.begun, axis=1)
    chosen = choosing.choose(logits, fixed.rules, kind, uniform)
    log_probs = state.log_probs
    if kind.scores:
        found = ops.log_softmax(ops.cast(state.logits, "float32"), axis=-1)
        found = ops.take_along_axis(found, chosen[:, None], axis=1)
        log_probs = backend.put(log_probs, ops.where(state.going[:, None], found, 0.0), state.place)
    chosen = ops.where(state.going, chosen, fixed.rules.filler)
    stops = ops.any(chosen[:, None] == fixed.rules.stops, axis=1)
    ids = backend.put(state.ids, chosen[:, None], state.place)
    given = describe(fixed), state.memory, fixed.shared
    logits, memory = writer.advance(chosen[:, None], state.place, *given)
    going = ops.logical_and(state.going, ops.logical_not(stops))
    return State(ids, log_probs, logits, memory, state.place + 1, going)


def start(writer, prompt, slots, dtype, repeats=1):
    """State and shared parts after the prompt, whose rows are repeated so many times.

    prompt: a dict with "ids" (R, P) and "real" (R, P), and what else the writer needs.
    """
    logits, memory, shared = writer.begin(prompt, slots, dtype)
    ids = ops.pad(prompt["ids"], ((0, 0), (0, slots - prompt["ids"].shape[1])))

    if repeats > 1:
        rows = ops.arange(repeats * ids.shape[0], dtype="int32") // repeats
        repeated = functools.partial(ops.take, indices=rows, axis=0)
        ids, logits, memory = tree.map_structure(repeated, (ids, logits, memory))
    going = ops.ones((ids.shape[0],), dtype="bool")
    place = ops.convert_to_tensor(prompt["ids"].shape[1], dtype="int32")
    zeros = ops.zeros(ids.shape, dtype="float32")
    return State(ids, zeros, logits, memory, place, going), shared


def wider(writer, state, slots):
    """The state with more slots: they are the last axis of all but the memory."""

    def padded(x):
        more = slots - state.ids.shape[1]
        return ops.pad(x, [(0, 0)] * (len(x.shape) - 1) + [(0, more)])

    found = {name: padded(getattr(state, name)) for name in state.BY_SLOT}
    return state._replace(**found, memory=writer.grow(state.memory, slots))


def slots_for(number):
    """How many slots are made for `number` tokens: few sizes, each compiled once."""
    return max(LEAST_SLOTS, 1 << (number - 1).bit_length())


class Decoding:
    """A batch that is being decoded, chunk by chunk.

    Args:
        functions: `Functions`, the writer and what is compiled for it.
        prompt: arrays, see `start`; rows end together.
        rules: `choosing.Rules` of arrays, one number for each row and repeat.
        kind: `choosing.Kind`.
        limit: new tokens at the most.
        uniform: (R, limit) numbers for draws.
        repeats: continuations of each prompt; the prompt is read once for all.
        dtype: of the cache.
    """

    step = staticmethod(take_step)

    def __init__(self, functions, prompt, rules, kind, limit, uniform, repeats=1, dtype=None):
        self.functions, self.rules, self.uniform = functions, rules, uniform
        self.repeats, self.static = repeats, dict(kind=kind)
        self.first = self.place = prompt["ids"].shape[1]
        self.end = self.first + limit
        slots = slots_for(min(self.end, self.first + CHUNK))
        static = dict(slots=slots, dtype=dtype, repeats=repeats)
        self.state, self.shared = functions.prefill(start, prompt, **static)
        self.real = np.repeat(prompt["real"], repeats, axis=0)

    def advance(self, number=None):
        """At most `number` more tokens, or CHUNK; False if there is nothing more to do."""
        slots = self.state.ids.shape[1]
        if self.place == slots:
            slots = slots_for(self.place + 1)
            self.state = self.functions.grow(wider, self.state, slots=slots)
        number = min(number or CHUNK, CHUNK, slots - self.place, self.end - self.place)
        given = self.state, self.fixed(slots, number), number
        self.state = self.functions.decode(self.step, *given, **self.static)
        self.place = int(backend.to_numpy(self.state.place))
        return self.place < self.end and bool(backend.to_numpy(self.state.going).any())

    def fixed(self, slots, number):
        real = np.ones((len(self.real), slots), bool)
        real[:, : self.first] = self.real
        positions = np.maximum(np.cumsum(real, axis=1, dtype="int32") - 1, 0)
        uniform, done = np.zeros((len(real), CHUNK), "float32"), self.place - self.first
        uniform[:, :number] = self.uniform[:, done : done + number]
        first, begun = (np.asarray(n, "int32") for n in (self.first, self.place))
        return Fixed(real, positions, first, begun, uniform, self.rules, self.shared)

    def stop(self, rows):
        """End these rows: a boolean (R,)."""
        going = np.logical_and(backend.to_numpy(self.state.going), np.logical_not(rows))
        self.state = self.state._replace(going=ops.convert_to_tensor(going))

    def texts(self):
        """(R, new tokens), what was chosen so far."""
        return backend.to_numpy(self.state.ids)[:, self.first : self.place]

    def results(self):
        """For every prompt its continuations: (ids, log-probabilities), stops and what stands
        behind them included."""
        log_probs = backend.to_numpy(self.state.log_probs)[:, self.first : self.place]
        pairs = list(zip(self.texts(), log_probs, strict=True))
        return [pairs[i : i + self.repeats] for i in range(0, len(pairs), self.repeats)]


def cut(ids, stops):
    """A list of ids up to its stop, and how many were chosen, the stop included."""
    ids = [int(i) for i in ids]
    end = next((place for place, i in enumerate(ids) if i in stops), None)
    return (ids, len(ids)) if end is None else (ids[:end], end + 1)


class Loop:
    """run(state, fixed, number) calls state = step(writer, state, fixed) up to `number` times, as
    long as a row is going. Where loops are compiled it is one function for any number."""

    def __init__(self, step, writer):
        def whole(writer, state, fixed, number):
            def more(done, state):
                return ops.logical_and(done < number, ops.any(state.going))

            def body(done, state):
                with backend.isolated(writer):
                    return done + 1, step(writer, state, fixed)

            return ops.while_loop(more, body, (ops.zeros_like(number), state))[1]

        self.inside = backend.compiles_loops()
        self.compiled = backend.Compiled(whole if self.inside else step, writer, takes=0)

    def __call__(self, state, fixed, number):
        if self.inside:
            return self.compiled(state, fixed, np.asarray(number, "int32"))
        fixed = tree.map_structure(ops.convert_to_tensor, fixed)
        for done in range(number):
            state = self.compiled(state, fixed)
            if done % 4 == 3 and not ops.any(state.going):
                break
        return state

    @property
    def count(self):
        return self.compiled.count


class Functions:
    """What is compiled for a writer: one function for each name and each set of constants."""

    def __init__(self, writer):
        self.writer, self.made, self.known = writer, {}, None

    def get(self, name, make, function, static):
        known = [(id(v), str(v.dtype)) for v in self.writer.variables]
        if known != self.known:  # quantized, or given adapters: what was compiled is stale
            self.made, self.known = {}, known
        key = (name, function, *sorted(static.items()))
        if key not in self.made:
            self.made[key] = make(functools.partial(function, **static), self.writer)
        return self.made[key]

    def prefill(self, function, *inputs, **static):
        return self.get("prefill", backend.Compiled, function, static)(*inputs)

    def grow(self, function, *inputs, **static):
        return self.get("grow", backend.Compiled, function, static)(*inputs)

    def decode(self, step, state, fixed, number, **static):
        return self.get("decode", Loop, step, static)(state, fixed, number)

    def counts(self):
        """{"prefill": n, "decode": n}, how often something was compiled."""
        out = {"prefill": 0, "decode": 0}
        for (name, *_), function in self.made.items():
            if name in out:
                out[name] += function.count
        return out
