"""What is compiled for a writer: once for each size of batch and bucket of lengths, and counted."""

import functools

import numpy as np
from keras import ops

from kformer import backend
from kformer.cache import folded, unfolded


class Loop:
    """run(state, fixed, until) calls state = step(writer, state, fixed) up to the place `until`, as
    long as a row is going. Where loops are compiled it is one function for any number."""

    def __init__(self, step, writer, variables):
        def whole(writer, state, fixed, until):
            def more(state):
                return ops.logical_and(state.place < until, ops.any(state.going))

            def body(state):
                with backend.isolated(writer):
                    return (step(writer, state, fixed),)

            rows = fixed.tokens[0].shape[0]
            fixed = fixed._replace(shared=folded(fixed.shared))
            state = state._replace(memory=folded(state.memory))
            state = ops.while_loop(more, body, (state,))[0]
            return state._replace(memory=unfolded(state.memory, rows))

        self.inside = backend.compiles_loops()
        function = whole if self.inside else step
        self.compiled = backend.Compiled(function, writer, takes=0, variables=variables)

    def __call__(self, state, fixed, until):
        if self.inside:
            return self.compiled(state, fixed, np.asarray(until, "int32"))

        def more(state):
            return int(state.place) < until and bool(ops.any(state.going))

        return self.compiled.repeat(more, state, fixed)

    @property
    def count(self):
        return self.compiled.count


class Functions:
    """What is compiled for a writer: one function for each name and each set of constants."""

    def __init__(self, writer):
        self.writer, self.made, self.variables, self.known = writer, {}, None, None

    def look(self):
        """Once for every batch: other variables than before, as the layer was quantized or given
        adapters, make stale what was compiled."""
        self.variables = list(self.writer.variables)
        known = [(id(v), str(v.dtype)) for v in self.variables]
        if known != self.known:
            self.made, self.known = {}, known

    def get(self, name, make, function, static):
        key = (name, function, *sorted(static.items()))
        if key not in self.made:
            function = functools.partial(function, **static)
            self.made[key] = make(function, self.writer, variables=self.variables)
        return self.made[key]

    def prefill(self, function, *inputs, **static):
        return self.get("prefill", backend.Compiled, function, static)(*inputs)

    def grow(self, function, *inputs, **static):
        return self.get("grow", backend.Compiled, function, static)(*inputs)

    def choose(self, function, *inputs, **static):
        return self.get("choose", backend.Compiled, function, static)(*inputs)

    def decode(self, step, state, fixed, until, **static):
        return self.get("decode", Loop, step, static)(state, fixed, until)

    def counts(self):
        """{"prefill": n, "decode": n}, how often something was compiled; and "grow" and "choose",
        small functions without the model, for more slots and for the choice after the prompt."""
        out = dict.fromkeys(("prefill", "decode", "grow", "choose"), 0)
        for (name, *_), function in self.made.items():
            out[name] += function.count
        return out
