"""The key/value cache: a value that goes into a block and comes out of it, never state.

    x, cache = block(x, cache=cache, start=start, ...)

Slots are shared by the rows of a batch: the T new tokens of every row go to slots start,
start + 1, ...; rows of different lengths differ in their positions and in what the mask lets
them see. `start` is a tensor, so that one compiled function serves every step.

Letters: B batch, T new tokens, S slots, K key/value heads, H head width.
"""

from typing import Any, NamedTuple

from keras import ops

from kformer import backend


class KeysValues(NamedTuple):
    """Projected keys and values, each (B, K, S, H): a head's keys lie together, which is how
    decoding reads them."""

    keys: Any
    values: Any

    def write(self, keys, values, start):
        """The cache with T new keys and values from slot `start` on."""
        return KeysValues(
            backend.write(self.keys, keys, start), backend.write(self.values, values, start)
        )


def empty(batch, slots, heads, width, dtype="float32") -> KeysValues:
    """A cache of zeros."""
    shape = (batch, heads, slots, width)
    return KeysValues(ops.zeros(shape, dtype=dtype), ops.zeros(shape, dtype=dtype))


class BlockCache(NamedTuple):
    """What one decoder block keeps: its own keys and values, and those of the encoder's output."""

    own: KeysValues
    cross: KeysValues | None = None

    def take(self, rows):
        """The cache whose row i goes on from row rows[i]. Rows that change places are beams of
        one source: what they keep of it stays where it is."""
        own = KeysValues(*(ops.take(part, rows, axis=0) for part in self.own))
        return BlockCache(own, self.cross)
