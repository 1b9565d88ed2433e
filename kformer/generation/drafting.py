"""Speculative decoding: a cheap guess of the next few tokens, which the model reads all at once.

    guess d1 … dk   →   the model reads them together   →   what it would have chosen, c1 … ck+1
    the tokens stay up to the first c that is not its d

What is kept is always the model's own choice, made by the same rules and, if tokens are drawn, from
the same uniform numbers as without a guess. So the outcome is the same, token by token, draws
included, as far as the logits of several tokens at once agree with those of one at a time; a good
guess only makes it come sooner. The guess is drawn from those numbers as well.

In a batch all rows keep as many tokens as the row whose guess was worst.

Letters: R rows, L places of a text, K guessed tokens, V ids.
"""

from keras import ops

from kformer import masks
from kformer.generation import choosing
from kformer.generation.functions import Functions
from kformer.generation.loop import Decoding
from kformer.generation.steps import State, choose_next, last_ids


def take_round(writer, state, fixed, kind, guesses):
    """From one to guesses + 1 more tokens for every row."""
    guess, memory = writer.guess(state, fixed, kind, guesses)
    block = ops.concatenate([last_ids(state, 1), guess], axis=1)
    given = masks.Tokens(*fixed.tokens), memory, fixed.shared
    logits, memory = writer.advance(block, state.place - 1, *given, last=guesses + 1)
    place, state = state.place, state._replace(memory=memory)
    fits, after = [], []  # of each token: do all rows agree, and which are still going
    for i in range(guesses + 1):
        state = choose_next(writer, state, logits[:, i], fixed, kind)
        after.append(state.going)
        if i < guesses:
            right = last_ids(state, 1)[:, 0] == guess[:, i]
            fits.append(ops.all(ops.logical_or(right, ops.logical_not(state.going))))
    agreed = ops.cumprod(ops.cast(ops.stack(fits), "int32"))
    number = ops.cast(ops.sum(agreed), "int32")
    going = ops.take(ops.stack(after), number, axis=0)
    return State(state.ids, state.log_probs, state.memory, place + 1 + number, going)


class Drafted:
    """A writer with somebody who guesses. `guess` gives ids (R, K) and the memory."""

    def __init__(self, target, draft):
        self.target, self.draft, self.functions = target, draft, Functions(self)

    @property
    def variables(self):
        return self.target.variables

    def begin(self, prompt, dtype):
        return self.target.begin(prompt, dtype)

    def advance(self, ids, start, tokens, memory, shared, **which):
        return self.target.advance(ids, start, tokens, memory, shared, **which)

    def grow(self, memory, slots, last, **room):
        return self.target.grow(memory, slots, last, **room)


class Lookup(Drafted):
    """Guesses that the text goes on as it did the last time when the same one to three tokens
    stood there: for texts that repeat what is in their prompt."""

    def guess(self, state, fixed, kind, number):
        place, length = state.place, state.ids.shape[1]
        index = ops.arange(length, dtype="int32")
        before = ops.logical_and(fixed.real, index < place)
        alike = [
            ops.cast(choosing.after_the_same(state.ids, before, place, n), "int32")
            for n in (1, 2, 3)
        ]
        best = ops.where(before, sum(alike) * length + index, -1)  # the longest, then the latest
        first = ops.cast(ops.argmax(best, axis=1), "int32")[:, None]
        found = first + ops.arange(number, dtype="int32") % (place - first)  # round and round
        return ops.take_along_axis(state.ids, found, axis=1), state.memory


class Pair(Drafted):
    """Guesses of a smaller model with the same vocabulary, which has a memory of its own."""

    @property
    def variables(self):
        return [*self.target.variables, *self.draft.variables]

    def begin(self, prompt, dtype):
        logits, memory, shared = self.target.begin(prompt, dtype)
        _, own, own_shared = self.draft.begin(prompt, dtype)
        return logits, (memory, own), (shared, own_shared)

    def advance(self, ids, start, tokens, memory, shared, **which):
        """The draft reads along where it does not guess."""
        logits, target = self.target.advance(ids, start, tokens, memory[0], shared[0], **which)
        draft = memory[1]
        if which.get("at") is not None:
            _, draft = self.draft.advance(ids, start, tokens, draft, shared[1], **which)
        return logits, (target, draft)

    def grow(self, memory, slots, last, **room):
        pairs = zip((self.target, self.draft), memory, strict=True)
        return tuple(writer.grow(one, slots, last, **room) for writer, one in pairs)

    def guess(self, state, fixed, kind, number):
        """Its first step reads two tokens: it may not have seen the last guess that was right."""
        memory, tokens, (_, shared) = state.memory[1], masks.Tokens(*fixed.tokens), fixed.shared
        ids, start, found = last_ids(state, 2), state.place - 2, []
        for _ in range(number):
            logits, memory = self.draft.advance(ids, start, tokens, memory, shared)
            state = choose_next(self, state, logits[:, 0], fixed, kind)
            ids, start = last_ids(state, 1), state.place - 1
            found.append(ids)
        return ops.concatenate(found, axis=1), (state.memory[0], memory)


class Speculation(Decoding):
    """`loop.Decoding` with guesses.

    Args:
        guesses: how many tokens are guessed at a time.
    """

    step = staticmethod(take_round)
    unsure = 2  # a draft has not read its own last guess

    def __init__(self, guesses, *args, **kwargs):
        self.guesses = guesses
        super().__init__(*args, **kwargs)

    def prepare(self):
        self.room, self.ahead = dict(ahead=self.guesses), self.guesses
        self.extra = dict(guesses=self.guesses)
