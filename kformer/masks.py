"""The mask rules, all of them: who may see whom.

A mask is a boolean array, True = may see. Every rule works on `Tokens`, a description of the
tokens of a batch, never on the tokens themselves, so it is made once and passed down.

Letters: B batch, T queries, S keys, C tokens in a block of a windowed row.
"""

from typing import Any, NamedTuple

from keras import ops


class Tokens(NamedTuple):
    """What the mask rules know of the tokens of a batch, each (B, T)."""

    real: Any  # True = a token, False = padding
    order: Any  # place in the row: causality and windows count in it
    positions: Any  # number of the token in its document: what position schemes see
    segments: Any = None  # document number in a packed row, 0 = padding
    in_prefix: Any = None  # True = visible to all tokens of its document (prefix-LM)
    # In decoding, of keys that a ring holds: which token stands in each of its slots, (S,).
    numbers: Any = None
    # Of queries in a tree of texts: True = the token (B, T, S) is on the query's branch.
    branch: Any = None


def describe(real, positions=None, segments=None, prefix=None):
    """Tokens from a boolean (B, T) array and what else is known.

    prefix: (B,), so many first tokens of a row, or of each document in it, are visible to all.
    """
    if segments is not None:
        segments = ops.cast(segments, "int32")
    if positions is None:
        positions = count(real, segments)
    order = ops.broadcast_to(ops.arange(ops.shape(real)[1], dtype="int32"), ops.shape(real))
    in_prefix = None
    if prefix is not None:
        in_prefix = count(real, segments) < ops.reshape(ops.cast(prefix, "int32"), (-1, 1))
    return Tokens(real, order, ops.cast(positions, "int32"), segments, in_prefix)


def real_tokens(ids, pad_id=None, padding_mask=None, segments=None, starts_with_pad=False):
    """(B, T), True = not padding: where `padding_mask` says so, else where the id is not
    `pad_id`; and in a packed row where there is a document.

    starts_with_pad: the first column is real whatever its id, for families that start decoding
    from their padding id (T5, Marian).
    """
    if padding_mask is not None:
        real = ops.cast(padding_mask, "bool")
    elif pad_id is None:
        real = ops.ones_like(ids, dtype="bool")
    else:
        real = ops.not_equal(ids, pad_id)
        if starts_with_pad:
            first = ops.ones_like(real[:, :1])
            real = ops.concatenate([first, real[:, 1:]], axis=1)
    return real if segments is None else ops.logical_and(real, segments > 0)


def from_hidden(x, mask=None, positions=None):
    """Tokens of hidden states (B, T, D), real where Keras' implicit mask says so."""
    if mask is None:
        mask = ops.ones_like(x[:, :, 0], dtype="bool")
    if positions is not None:
        positions = ops.broadcast_to(positions, ops.shape(mask))
    return describe(ops.cast(mask, "bool"), positions)


def count(real, segments=None):
    """Positions that count real tokens: the first one of a row or segment has position 0."""
    running = ops.cumsum(ops.cast(real, "int32"), axis=1) - 1
    if segments is not None:
        before = ops.concatenate([ops.zeros_like(segments[:, :1]), segments[:, :-1]], axis=1)
        earlier = running + 1 - ops.cast(real, "int32")  # real tokens before this place
        starts = ops.where(ops.not_equal(segments, before), earlier, ops.zeros_like(running))
        starts = ops.associative_scan(ops.maximum, starts, axis=1)
        running = running - ops.reshape(starts, ops.shape(running))  # TensorFlow forgot its rank
    return ops.maximum(running, 0)


def at(tokens, start, length):
    """The description of `length` tokens from place `start` on, which may be a tensor."""
    places = start + ops.arange(length, dtype="int32")
    known = tokens.real, tokens.order, tokens.positions
    return Tokens(*(ops.take(x, places, axis=1) for x in known), branch=tokens.branch)


def ring(tokens, last, size):
    """The description of what stands in the slots of a ring, token n in slot n modulo `size`,
    after token number `last`, which may be a tensor, has been written."""
    numbers = last - ops.mod(last - ops.arange(size, dtype="int32"), size)
    there, numbers = numbers >= 0, ops.maximum(numbers, 0)
    known = tokens.real, tokens.order, tokens.positions
    real, *rest = (ops.take(x, numbers, axis=1) for x in known)
    return Tokens(ops.logical_and(real, there), *rest, numbers=numbers)


def visible(query, key, causal=False, window=None):
    """(B, 1, T, S): True where a query may see a key.

    The key is real; not later than the query, or in the prefix (causal); less than `window`
    places away; on the query's branch, where texts are a tree; and in the same document
    (segments).
    """
    seen = key.real[:, None, :]
    if not causal and window is None:
        return across(query, key, seen)
    distance = query.order[:, :, None] - key.order[:, None, :]
    if causal:
        earlier = distance >= 0
        if key.in_prefix is not None:
            earlier = ops.logical_or(earlier, key.in_prefix[:, None, :])
        seen = ops.logical_and(seen, earlier)
    if window is not None:
        seen = ops.logical_and(seen, ops.abs(distance) < window)
    if query.branch is not None:
        branch = query.branch
        branch = branch if key.numbers is None else ops.take(branch, key.numbers, axis=2)
        seen = ops.logical_and(seen, branch)
    return across(query, key, seen)


def across(query, key, seen=None):
    """(B, 1, T or 1, S): what a query may see of another sequence, or the last step of any mask."""
    seen = key.real[:, None, :] if seen is None else seen
    if query.segments is not None and key.segments is not None:
        same = ops.equal(query.segments[:, :, None], key.segments[:, None, :])
        seen = ops.logical_and(seen, same)
    return seen[:, None]


def combine(seen, attention_mask):
    """A finished mask and a user's own one, (T, S), (B, T, S) or (B, N, T, S): both must allow."""
    if attention_mask is None:
        return seen
    rank = len(attention_mask.shape)
    if rank not in (2, 3, 4):
        rule = "attention_mask must be (T, S), (B, T, S) or (B, N, T, S)"
        raise ValueError(f"{rule}, got shape {tuple(attention_mask.shape)}")
    allowed = ops.cast(attention_mask, "bool")
    allowed = allowed if rank == 4 else allowed[:, None] if rank == 3 else allowed[None, None]
    return ops.logical_and(seen, allowed)


# Windows. A row is cut into blocks of C ≥ window tokens; a block of queries sees only its own
# block of keys and the ones beside it, so time and memory grow with T · C, not with T².


def block_size(length, window):
    """C for rows of `length` tokens, or None where there is no window or one block would do."""
    if window is None:
        return None
    size = max(window, 64)
    if isinstance(length, int):
        return size if length > 2 * size else None
    # TensorFlow traces with a tensor as length. JAX's shape inference has a symbol, and no cost.
    return ops.minimum(length, size) if ops.is_tensor(length) else None


def windowed(tokens, causal, window, size):
    """`visible` block by block: (B · blocks, 1, C, neighbours, C), and the folded tokens.

    A query sees the block before its own and its own; where it may look ahead, also the next.
    """
    neighbours = 2 if causal and tokens.in_prefix is None else 3
    query, key = fold(tokens, size), fold(tokens, size, neighbours)
    seen = visible(query, key, causal, window)
    shape = ops.shape(seen)
    return ops.reshape(seen, (shape[0], 1, shape[2], neighbours, shape[2])), query, key


def fold(tokens, size, neighbours=1):
    """The description of folded tokens: of queries, or of keys with their neighbours."""
    return Tokens(*(None if x is None else fold_rows(x, size, neighbours) for x in tokens))


def fold_rows(x, size, neighbours=1):
    """(B, T, ...) → (B · blocks, neighbours · C, ...); what is missing at the ends is zero."""
    shape, rest = ops.shape(x), ops.shape(x)[2:]
    before = size if neighbours > 1 else 0
    after = -(-shape[1] // size) * size - shape[1] + (size if neighbours > 2 else 0)
    ends = [ops.zeros((shape[0], end, *rest), dtype=x.dtype) for end in (before, after)]
    blocks = ops.reshape(
        ops.concatenate([ends[0], x, ends[1]], axis=1), (shape[0], -1, size, *rest)
    )
    count = ops.shape(blocks)[1] - neighbours + 1
    beside = [blocks[:, i : count + i] for i in range(neighbours)]
    return ops.reshape(ops.concatenate(beside, axis=2), (-1, neighbours * size, *rest))


def unfold_rows(x, length):
    """The inverse of `fold_rows` for queries."""
    size, rest = ops.shape(x)[1], ops.shape(x)[2:]
    return ops.reshape(x, (-1, -(-length // size) * size, *rest))[:, :length]
