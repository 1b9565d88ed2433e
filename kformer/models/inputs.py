"""What goes into a model: reading it, and refusing what is wrong with it while that is possible.

Inside a compiled step nothing can be raised any more, so batches are checked on the host, where
they enter. Letters: B batch, T tokens.
"""

import contextlib

import keras
import numpy as np

from kformer import backend, masks
from kformer.config import check_whole
from kformer.layers.embedding import inside_a_model

OPTIONAL = ("padding_mask", "positions", "segments", "prefix", "token_types")


@contextlib.contextmanager
def checked_before():
    """Inside, models take inputs as they are: somebody has looked at them. Looking once more would
    cost a device a stop, and Keras infers shapes from inputs that it makes up."""
    token = inside_a_model.set(True)
    try:
        yield
    finally:
        inside_a_model.reset(token)


def unpack(inputs):
    """ids and a dict of what came with them."""
    if not isinstance(inputs, dict):
        return inputs, {}
    if "ids" not in inputs:
        raise ValueError(f"inputs must have the key 'ids', got {sorted(inputs)}")
    if unknown := sorted(set(inputs) - {"ids", *OPTIONAL}):
        raise ValueError(f"inputs may have {', '.join(OPTIONAL)} beside 'ids', got {unknown}")
    extras = {key: value for key, value in inputs.items() if key != "ids" and value is not None}
    return inputs["ids"], extras


def real_tokens(inputs, config, is_target=False):
    """(B, T), True = not padding."""
    ids, extras = unpack(inputs)
    starts_with_pad = is_target and config.pad_id is not None and config.bos_id == config.pad_id
    known = {key: extras[key] for key in ("padding_mask", "segments") if key in extras}
    return masks.real_tokens(ids, config.pad_id, starts_with_pad=starts_with_pad, **known)


def describe(inputs, config, is_target=False):
    """The `masks.Tokens` of a model's inputs."""
    _, extras = unpack(inputs)
    known = {key: extras[key] for key in ("positions", "segments", "prefix") if key in extras}
    return masks.describe(real_tokens(inputs, config, is_target), **known)


def check(inputs, config, size, name="ids"):
    """ValueError for ids, masks and positions that break a rule, naming the rule and the value.

    Symbols and tracers pass: what they stand for was checked before, or gives NaN.
    """
    ids, extras = unpack(inputs)
    check_ids(name, ids, size)
    shape = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
    if config.token_types == 0 and "token_types" in extras:
        raise ValueError("token_types must be left out where config.token_types=0")
    limits = dict(
        positions=config.max_length if config.position == "learned" else 2**31,
        segments=2**31,
        prefix=2**31,
        token_types=config.token_types,
    )
    for key, value in extras.items():
        expected = shape[:1] if key == "prefix" else shape
        if key != "padding_mask":
            check_ids(key, value, limits[key], expected)
        else:
            check_padding_mask(value, expected)
    if config.position == "learned" and "positions" not in extras:
        check_length(inputs, config, shape)


def check_length(inputs, config, shape):
    """Rows must fit into the table of learned positions: padding and other documents do not
    count where they can be seen, else the length does."""
    length, limit = shape[1], config.max_length
    if length is None or length <= limit:
        return
    ids, extras = unpack(inputs)
    if all(backend.is_concrete(x) for x in (ids, *extras.values())):
        length = int(backend.to_numpy(describe(inputs, config).positions).max()) + 1
    elif {"segments", "padding_mask"} & set(extras):
        return
    elif config.pad_id is not None and not isinstance(ids, keras.KerasTensor):
        return  # inside of a compiled step: `fit` has looked at the batch, else it gives NaN
    if length > limit:
        rule = f"length must be at most max_length={limit} with learned positions"
        raise ValueError(f"{rule}, got length {length}")


def check_ids(name, ids, size, shape=None):
    """Integers in [0, size), of that shape, or of any (B, T) with something in it."""
    got = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
    if shape is None and len(got) != 2:
        raise ValueError(f"{name} must have shape (batch, length), got shape {got}")
    if not backend.is_concrete(ids):
        return
    if shape is None and 0 in got:
        raise ValueError(f"{name} must hold at least one row and one token, got shape {got}")
    if shape is not None and got != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got shape {got}")
    array = backend.to_numpy(ids)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}")
    low, high = array.min(), array.max()
    if low < 0 or high >= size:
        raise ValueError(f"{name} must be in [0, {size}), got {low if low < 0 else high}")


def check_padding_mask(mask, shape):
    got = tuple(mask.shape) if hasattr(mask, "shape") else np.shape(mask)
    if not backend.is_concrete(mask):
        return
    array = backend.to_numpy(mask)
    if array.dtype != bool:
        rule = "padding_mask must be boolean, True = a real token"
        raise ValueError(f"{rule}, got dtype {array.dtype}")
    if got != tuple(shape):
        raise ValueError(f"padding_mask must have the shape of ids, {tuple(shape)}, got {got}")
    if not array.any():
        raise ValueError(f"padding_mask must leave a real token, got all False, shape {got}")


def check_labels(labels, classes, shape=None):
    """Integer labels below the number of classes; negative ones never count and pass."""
    got = tuple(labels.shape) if hasattr(labels, "shape") else np.shape(labels)
    if shape is not None and got != tuple(shape):
        raise ValueError(f"labels must have shape {tuple(shape)}, one for each, got shape {got}")
    if not backend.is_concrete(labels):
        return
    array = backend.to_numpy(labels)
    if array.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers, got dtype {array.dtype}")
    if array.size and array.max() >= classes:
        raise ValueError(f"labels must be below {classes}, got {array.max()}")


def to_arrays(inputs):
    """Lists of rows as arrays, also inside of dicts."""
    if isinstance(inputs, dict):
        return {key: to_arrays(value) for key, value in inputs.items()}
    return np.asarray(inputs) if isinstance(inputs, (list, tuple)) else inputs


def to_inputs(given, tokenizer, config):
    """Texts or lists of ids as padded inputs; arrays and dicts as they are."""
    if not isinstance(given, (str, list, tuple)):
        return given
    rows = to_rows(given, tokenizer)
    ids, real = align(rows, max(map(len, rows), default=0), config.pad_id)
    return {"ids": ids, "padding_mask": real}


def to_rows(given, tokenizer, encode=None):
    """A text, texts, lists of ids or an array as lists of ids. encode: of texts, if not the
    tokenizer's."""
    given = [given] if isinstance(given, str) else list(given)
    if given and isinstance(given[0], str):
        if tokenizer is None:
            raise ValueError("texts need a model with a tokenizer, got tokenizer=None")
        return (encode or tokenizer.encode)(given)
    rows = [backend.to_numpy(row) if hasattr(row, "shape") else np.asarray(row) for row in given]
    for number, row in enumerate(rows):
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            got = f"shape {row.shape}, dtype {row.dtype} as row {number}"
            raise ValueError(f"rows must be lists of whole numbers, got {got}")
    return [row.tolist() for row in rows]


def align(rows, length, pad_id, right=False):
    """(B, length) ids and which of them are real; rows start, or (right) end together."""
    ids = np.full((len(rows), length), pad_id or 0, "int32")
    real = np.zeros(ids.shape, bool)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if right else slice(len(row))
        ids[i, place], real[i, place] = row, True
    return ids, real


def up_to_bucket(length):
    """A few lengths stand for all, so that few shapes are compiled."""
    return next(size for size in (2**i for i in range(3, 31)) if size >= length)


def in_batches(rows, size):
    """(numbers, rows) of batches of rows of similar length, all of the same size, a power of two
    or `size`: what the last one lacks is filled up with its first row."""
    check_whole(1, batch_size=size)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    size = min(size, 1 << max(0, len(rows) - 1).bit_length())
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
        batch = [rows[i] for i in numbers]
        yield numbers, batch + batch[:1] * (size - len(batch))


def with_special_ids(config, tokenizer, size_field="vocabulary_size"):
    """The config with ids that it leaves open taken from the tokenizer; they must agree."""
    if tokenizer is None:
        return config
    changes = {}
    for name, theirs in (
        *((name, getattr(tokenizer, name, None)) for name in ("pad_id", "bos_id", "eos_id")),
        (size_field, getattr(tokenizer, "vocabulary_size", None)),
    ):
        mine = getattr(config, name)
        if mine is None and name != "pad_id":
            changes[name] = theirs
        elif theirs is not None and mine != theirs:
            raise ValueError(f"{name} must be the tokenizer's, {theirs}, got config.{name}={mine}")
    return config.replace(**changes)
