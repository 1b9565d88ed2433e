"""The steps of decoding, all of them functions of tensors that are compiled.

    prompt → read → logits → choose_next ─┐      a chosen token goes through the model when the
                      ↑                   ↓      next one is asked for: the last one of a text
                   advance ←──────────── ids     never does

They drive anything that can write, a `Writer`, and import no model. Slots are shared by the rows
of a batch: prompts end together, so that the next token of every row goes to the same slot; rows
of different lengths differ in their positions and in what the mask lets them see.

Letters: R rows, P prompt slots, L places of a text, S slots of the memory, V ids, N tokens in a
chunk.
"""

from typing import Any, NamedTuple, Protocol

from keras import ops, tree

from kformer import kernels, masks
from kformer.generation import choosing


class Writer(Protocol):
    """What the loop asks for. `memory` is any nest of tensors with the rows first, `shared` what
    stays as it is."""

    variables: Any  # a Keras layer has them: weights that training changes are seen
    takes_branches: bool  # `advance` minds `tokens.branch`, so that beams can be followed

    def begin(self, prompt, dtype):
        """(logits (R, V) of the first new token, memory, shared) for `prompt`, the tensors that
        `prepare` made; memory, kept as `dtype`, has a slot for every place of the prompt."""

    def advance(self, ids, start, tokens, memory, shared, last=1, at=None):
        """(logits (R, last, V), memory) after ids (R, T) have gone to the slots from `start` on,
        a tensor; `tokens` (`masks.Tokens`) describes all slots. The logits are those of the last
        tokens, or of the ones at `at` (R,). With beams the T tokens are one for each beam, all at
        the same place of the text, and `tokens.branch` (R, T, S) says which slots each may see."""

    def grow(self, memory, slots, last, width=1, ahead=0, shift=None):
        """The same memory with `slots` slots, after slot number `last`, a tensor () or (R,), has
        been written. Where only a window of it is kept, it has `width` slots for each place, and
        `ahead` more. What was in slot n is in slot n + shift then: a tensor (R,), or None = 0."""


class State(NamedTuple):
    """Where decoding stands; every chunk makes a new one. The token before `place` was chosen,
    and has not gone through the model yet."""

    ids: Any  # (R, L), what stands in the places
    log_probs: Any  # (R, L), of what was chosen
    memory: Any
    place: Any  # (), of the token that comes next
    going: Any  # (R,), False = has stopped


class Fixed(NamedTuple):
    """What a chunk does not change."""

    real: Any  # (R, L), False = padding in front of the prompt
    tokens: Any  # the first three of `masks.Tokens`, of the memory's slots (R, S)
    first: Any  # (), place of the first new token
    begun: Any  # (), place at which this chunk began
    uniform: Any  # (R, N), for draws
    rules: Any  # choosing.Rules
    shared: Any


def take_step(writer, state, fixed, kind):
    """One more token for every row."""
    given = masks.Tokens(*fixed.tokens), state.memory, fixed.shared
    logits, memory = writer.advance(last_ids(state, 1), state.place - 1, *given)
    return choose_next(writer, state._replace(memory=memory), logits[:, 0], fixed, kind)


def last_ids(state, number):
    """(R, number), the last ids that were chosen."""
    places = state.place - number + ops.arange(number, dtype="int32")
    return ops.take(state.ids, places, axis=1)


def choose_next(writer, state, logits, fixed, kind):
    """The next token of every row, from its logits (R, V), goes to its place."""
    made, rules = state.place - fixed.first, fixed.rules
    allowed = choosing.adjusted(logits, rules, kind, state.ids, fixed.real, state.place, made)
    uniform = ops.take(fixed.uniform, state.place - fixed.begun, axis=1)
    chosen = choosing.choose(allowed, rules, kind, uniform)
    log_probs = state.log_probs
    if kind.scores:
        found = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
        found = ops.take_along_axis(found, chosen[:, None], axis=1)
        log_probs = kernels.put(log_probs, ops.where(state.going[:, None], found, 0.0), state.place)
    chosen = ops.where(state.going, chosen, rules.filler)
    stops = ops.any(chosen[:, None] == rules.stops, axis=1)
    ids = kernels.put(state.ids, chosen[:, None], state.place)
    going = ops.logical_and(state.going, ops.logical_not(stops))
    return State(ids, log_probs, state.memory, state.place + 1, going)


def repeated(nest, repeats):
    """Every row of every tensor so many times, as a copy."""

    def one(x):
        return ops.take(x, ops.arange(repeats * x.shape[0], dtype="int32") // repeats, axis=0)

    return tree.map_structure(one, nest)


def read(writer, prompt, slots, dtype, repeats, room):
    """(logits (R, V), memory, shared) after the prompts, whose rows are repeated so many times.

    prompt: a dict with "ids" (R, P) and "real" (R, P), and what else the writer needs.
    """
    logits, memory, shared = writer.begin(prompt, dtype)
    last = ops.convert_to_tensor(prompt["ids"].shape[1] - 1, dtype="int32")
    out = logits, writer.grow(memory, slots, last, **dict(room)), shared
    return out if repeats == 1 else repeated(out, repeats)


def read_on(writer, ids, lengths, kept, number, last, slots, repeats, room):
    """The same for prompts that go on from one text of `number` tokens, whose last one stands in
    slot `last`. The ids (R, P) start together, and have `lengths` (R,); then they are moved so
    that they end together, and the text before each of them with it."""
    rows, length = ids.shape
    memory, shared = repeated(kept, rows)
    shift = ops.zeros_like(lengths) + number - 1 - last
    memory = writer.grow(memory, slots, last, ahead=length, shift=shift)
    ends = number + lengths - 1
    order = ops.broadcast_to(ops.arange(slots, dtype="int32"), (rows, slots))
    tokens = masks.Tokens(ops.ones_like(order, "bool"), order, ops.minimum(order, ends[:, None]))
    logits, memory = writer.advance(ids, number, tokens, memory, shared, at=lengths - 1)
    memory = writer.grow(memory, slots, ends, **dict(room), shift=length - lengths)
    out = logits[:, 0], memory, shared
    return out if repeats == 1 else repeated(out, repeats)


def wider(writer, memory, last, slots, room):
    """The memory with more slots, after token number `last`."""
    return writer.grow(memory, slots, last, **dict(room))
