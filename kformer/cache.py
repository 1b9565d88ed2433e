"""The key/value cache: a value that goes into a block and comes out of it, never state.

    x, cache = block(x, cache=cache, start=start, ...)

Slots are shared by the rows of a batch: the T new tokens of every row go to slots start,
start + 1, ...; rows of different lengths differ in their positions and in what the mask lets
them see. `start` is a tensor, so that one compiled function serves every step. A cache with fewer
slots than tokens is a ring: token n stands in slot n modulo S, in the place of an older one.
What stands in slots that were not written yet is arbitrary, but finite: no mask lets it be seen.

Letters: B batch, T new tokens, S slots, K key/value heads, H head width.
"""

from typing import Any, NamedTuple

from keras import ops

from kformer import kernels


class KeysValues(NamedTuple):
    """Projected keys and values, each (B, K, S, H): a head's keys lie together, which is how
    decoding reads them. Inside of a compiled loop they are `folded`."""

    keys: Any
    values: Any

    def write(self, keys, values, start):
        """The cache with T new keys and values from slot `start` on; where there is none yet,
        they are it."""
        if self.keys is None:
            return KeysValues(keys, values)
        return KeysValues(
            kernels.write(self.keys, keys, start), kernels.write(self.values, values, start)
        )

    def resize(self, slots, last, shift=None):
        """The cache with so many slots, after token number `last`, which may be a tensor, has
        been written. Of a ring, or for one, the last tokens stay, n in slot n modulo `slots`.

        shift: (B,), the tokens of a row get numbers that are higher by so much.
        """
        size = self.keys.shape[2]
        if slots == size and shift is None:
            return self
        if slots > size and shift is None:  # a ring is made in its full size at once
            more = ((0, 0), (0, 0), (0, slots - size), (0, 0))
            return KeysValues(*(ops.pad(x, more) for x in self))
        if shift is None:
            numbers = last - ops.mod(last - ops.arange(slots, dtype="int32"), slots)
            return KeysValues(*(ops.take(x, ops.mod(numbers, size), axis=2) for x in self))
        last, shift = (last + shift)[:, None], shift[:, None]
        numbers = last - ops.mod(last - ops.arange(slots, dtype="int32"), slots) - shift
        index = ops.mod(numbers, size)[:, None, :, None]
        return KeysValues(*(ops.take_along_axis(x, index, axis=2) for x in self))

    def cast(self, dtype):
        return KeysValues(*(ops.cast(x, dtype) for x in self))


NOTHING = KeysValues(None, None)  # a cache before the first token


def empty(batch, slots, heads, width, dtype="float32") -> KeysValues:
    """A cache of zeros."""
    shape = (batch, heads, slots, width)
    return KeysValues(ops.zeros(shape, dtype=dtype), ops.zeros(shape, dtype=dtype))


def folded(nest):
    """Every KeysValues in a nest with its leading axes as one, (B · K, S, H).

    XLA writes a token into such a cache in place. With two leading axes it folds them itself
    where the cache is read, computes what is written once more there, and then copies the cache
    for every token.
    """

    def fold(cache):
        return KeysValues(*(ops.reshape(x, (-1, *x.shape[2:])) for x in cache))

    return over_caches(fold, nest)


def unfolded(nest, rows):
    """The inverse of `folded`, for so many rows."""

    def unfold(cache):
        return KeysValues(*(ops.reshape(x, (rows, -1, *x.shape[1:])) for x in cache))

    return over_caches(unfold, nest)


def over_caches(function, nest):
    """The nest with function(cache) in the place of every cache."""
    if isinstance(nest, KeysValues):
        return function(nest)
    if isinstance(nest, (list, tuple)):
        return type(nest)(over_caches(function, one) for one in nest)
    return nest


class BlockCache(NamedTuple):
    """What one decoder block keeps: its own keys and values, and those of the encoder's output."""

    own: KeysValues
    cross: KeysValues | None = None
