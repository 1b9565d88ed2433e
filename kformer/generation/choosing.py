"""Which token comes next: a choice among V logits for each of B rows, inside the compiled loop.

All numbers are tensors, so that another temperature or stop id compiles nothing; only `Kind`
decides what is compiled. Draws come from uniform numbers that the host made, so that a seed gives
the same tokens on every backend, as far as the logits agree.
"""

from typing import Any, NamedTuple

from keras import ops

from kformer import backend

NEVER = -float("inf")


class Kind(NamedTuple):
    """What a choice consists of: other values compile another function."""

    draws: bool = False  # False = always the likeliest token
    penalizes: bool = False  # has a repetition penalty
    ngram: int = 0  # no n tokens in a row twice; 0 = they may
    scores: bool = False  # also keep the log-probabilities of what was chosen


class Rules(NamedTuple):
    """The numbers of a choice, one per row (B,) unless it says otherwise."""

    temperature: Any  # T in e^(x/T) / Σ e^(x/T); 0 = the likeliest token
    top_k: Any  # draw from the k likeliest
    top_p: Any  # draw from the likeliest that together reach p
    min_p: Any  # draw from those that are at least p times as likely as the likeliest
    penalty: Any  # logits of what has occurred are divided by it, or multiplied if negative
    least: Any  # (), so many tokens come before a stop may come
    stops: Any  # (K,), ids that end a row, −1 = none
    banned: Any  # (), the padding id, which is nothing to write unless it is a stop; −1 = none
    filler: Any  # (), what stands behind a stop


def adjusted(logits, rules, kind, ids, real, place, made):
    """The logits (B, V) in float32, with what must not come at −∞.

    Args:
        ids, real: (B, S), what stands in the slots, and where it is a token.
        place: slot of the token that is being chosen.
        made: how many were chosen before it.
    """
    logits = ops.cast(logits, "float32")
    number = ops.arange(logits.shape[-1], dtype="int32")
    before = ops.logical_and(real, ops.arange(ids.shape[1], dtype="int32") < place)
    if kind.penalizes:
        penalty = rules.penalty[:, None]
        lower = ops.where(logits > 0, logits / penalty, logits * penalty)
        logits = ops.where(occurs(ids, before, logits.shape[-1]), lower, logits)
    if kind.ngram:
        follows = after_the_same(ids, before, place, kind.ngram - 1)
        logits = ops.where(occurs(ids, follows, logits.shape[-1]), NEVER, logits)
    is_stop = ops.any(number[:, None] == rules.stops, axis=1)
    too_early = ops.logical_and(is_stop, made < rules.least)
    return ops.where(ops.logical_or(too_early, number == rules.banned), NEVER, logits)


def occurs(ids, where, size):
    """(B, V): True for the ids that stand somewhere in `where` (B, S)."""
    places = ids + size * ops.arange(ids.shape[0], dtype="int32")[:, None]
    ones = ops.cast(ops.reshape(where, (-1,)), "int32")
    counts = ops.segment_sum(ones, ops.reshape(places, (-1,)), num_segments=ids.shape[0] * size)
    return ops.reshape(counts, (ids.shape[0], size)) > 0


def after_the_same(ids, before, place, length):
    """(B, S): True for tokens in front of which stand the `length` tokens that end the row."""
    found = before
    for back in range(1, length + 1):
        last = ops.take(ids, ops.reshape(ops.maximum(place - back, 0), (1,)), axis=1)
        same = ops.logical_and(ops.roll(ids, back, axis=1) == last, ops.roll(before, back, axis=1))
        reaches = ops.logical_and(ops.arange(ids.shape[1]) >= back, place >= back)
        found = ops.logical_and(found, ops.logical_and(same, reaches))
    return found


def choose(logits, rules, kind, uniform):
    """(B,) ids from adjusted logits; uniform: (B,) numbers in [0, 1), one for each draw."""
    likeliest = ops.cast(ops.argmax(logits, axis=-1), "int32")
    if not kind.draws:
        return likeliest
    drawn = draw(logits, rules, uniform)
    return ops.where(rules.temperature > 0, drawn, likeliest)


def draw(logits, rules, uniform):
    """An id per row: where the running sum of the chances passes `uniform` · their total."""
    temperature = ops.where(rules.temperature > 0, rules.temperature, 1.0)[:, None]
    chances = ops.exp((logits - ops.max(logits, axis=-1, keepdims=True)) / temperature)
    top = at_least(logits, ops.ones_like(logits), ops.cast(rules.top_k, "float32"))
    chances = ops.where(first_of_equals(logits, top, rules.top_k), chances, 0.0)
    together = at_least(logits, chances, rules.top_p * ops.sum(chances, axis=-1))
    chances = ops.where(together, chances, 0.0)
    chances = ops.where(chances >= rules.min_p[:, None], chances, 0.0)
    sums = ops.cumsum(chances, axis=-1)
    # Compiled sums are rounded on their way, so that they may rise where a chance is 0.
    passed = ops.logical_and(sums > uniform[:, None] * sums[:, -1:], chances > 0)
    place = ops.argmax(ops.cast(passed, "int32"), axis=-1)
    place = ops.where(ops.any(passed, axis=-1), place, ops.argmax(logits, axis=-1))
    return ops.cast(place, "int32")


def at_least(logits, weights, needed):
    """(B, V): True for the fewest largest logits whose weights add up to `needed` (B,).

    Compiled, it is found without sorting, which costs more there: by halving the interval in
    which the smallest of them must lie. Logits are compared as they came: what a compiler computes
    twice it may round in two ways.
    """
    if not backend.compiles_loops():
        order = ops.flip(ops.argsort(logits, axis=-1), axis=-1)
        sums = ops.cumsum(ops.take_along_axis(weights, order, axis=-1), axis=-1)
        number = ops.sum(ops.cast(sums < needed[:, None], "int32"), axis=-1, keepdims=True)
        last = ops.minimum(number, logits.shape[-1] - 1)
        place = ops.take_along_axis(order, last, axis=-1)
        return logits >= ops.take_along_axis(logits, place, axis=-1)
    highest = ops.max(logits, axis=-1)
    lowest = ops.min(ops.where(logits > NEVER, logits, highest[:, None]), axis=-1)

    def halve(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        total = ops.sum(ops.where(logits >= middle[:, None], weights, 0.0), axis=-1)
        enough = total >= needed
        return ops.where(enough, middle, low), ops.where(enough, high, middle)

    low, high = ops.fori_loop(0, 32, halve, (lowest, highest))
    whole = ops.sum(ops.where(logits >= high[:, None], weights, 0.0), axis=-1) >= needed
    return logits >= ops.where(whole, high, low)[:, None]


def first_of_equals(logits, kept, number):
    """`kept` without the last ones of equal logits, so that exactly `number` (B,) are left."""
    smallest = ops.min(ops.where(kept, logits, float("inf")), axis=-1, keepdims=True)
    larger, equal = logits > smallest, logits == smallest
    room = number - ops.sum(ops.cast(larger, "int32"), axis=-1)
    place = ops.cumsum(ops.cast(equal, "int32"), axis=-1)
    return ops.logical_or(larger, ops.logical_and(equal, place <= room[:, None]))
