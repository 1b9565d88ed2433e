"""Random damage to JSON, of its bytes and of its structure."""

import copy
import json
import random as randoms

TOKENS = (
    b"0", b"-1", b"1e400", b"-0", b"1.5", b"NaN", b"Infinity", b"null", b"true", b"false", b'"',
    b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b"\xef\xbb\xbf", b"\\u0000", b" ",
    b"\\ud800", b"\n", b'"a":1,', b"../", b"9" * 20, b"9" * 500, b"[" * 40, b"[[]],", b"{}", b'""',
    b"\xf0\x9f\x98\x80",
)  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e308, 10**12, 2**31, 2**53, 2**63 - 1, 2**63,
    2**64, 10**399, "", "a", "F32", "F16", "BF16", "F64", "I64", "../a", "/a", "~", "a\0b",
    "x" * 999,
    "\ud800", "http://host/a", [], [0], [0, 0], [-1, 0], [2**62, 4], [[]], {}, {"a": 1}, [None],
    "model.safetensors", "model-00001-of-00002.safetensors", "con.safetensors",
)  # fmt: skip
KEYS = (
    "a", "", "dtype", "shape", "auto_map", "__metadata__", "weight_map", "x" * 300, "\u202e", "0",
)  # fmt: skip


def of_bytes(raw, random):
    """One change of bytes somewhere."""
    raw = bytearray(raw)
    at = random.randrange(len(raw) + 1)
    size = min(random.choice((1, 1, 1, 2, 4, 16, 64)), len(raw) - at)
    kind = random.randrange(8)
    if kind == 0 and at < len(raw):
        raw[at] ^= 1 << random.randrange(8)
    elif kind == 1 and at < len(raw):
        raw[at] = random.randrange(256)
    elif kind == 2:
        del raw[at : at + size]
    elif kind == 3:
        raw[at:at] = raw[at : at + size]
    elif kind == 4:
        other = random.randrange(len(raw) + 1)
        raw[at : at + size] = raw[other : other + size]
    elif kind == 5:
        raw[at:at] = random.choice(TOKENS)
    elif kind == 6:
        raw[at : at + size] = random.choice(TOKENS)
    else:
        raw[at:at] = random.randbytes(size)
    return bytes(raw)


def places(value):
    """(container, key) of everything in a value, at every depth."""
    found, left = [], [value]
    while left:
        item = left.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        found += [(item, key) for key in keys]
        left += [item[key] for key in keys if isinstance(item[key], dict | list)]
    return found


def of_structure(value, random):
    """A copy with one change of a value, of a key, or of where they stand."""
    value = copy.deepcopy(value)
    where = places(value)
    if not where:
        return {"a": value}
    item, key = random.choice(where)
    kind = random.randrange(8)
    if kind == 0:
        item[key] = random.choice(VALUES)
    elif kind == 1 and isinstance(item[key], int):
        item[key] += random.choice((-8, -4, -1, 1, 4, 8, 2**32, 2**63, 2**64))
    elif kind == 2:
        del item[key]
    elif kind == 3 and isinstance(item, dict):
        item[random.choice((*KEYS, str(key) + "x", str(key)[:-1]))] = item.pop(key)
    elif kind == 4 and isinstance(item, list):
        item.append(copy.deepcopy(item[key]))
    elif kind == 5:
        item[key] = random.choice(([item[key]], {"a": item[key]}, str(item[key])))
    elif kind == 6 and isinstance(item, list):
        random.shuffle(item)
    else:
        other, place = random.choice(where)
        if not isinstance(item[key], dict | list) and not isinstance(other[place], dict | list):
            item[key], other[place] = other[place], item[key]
    return value


def equivalent(value, random):
    """The bytes of the same value in another spelling: keys in another order, other spaces."""
    if isinstance(value, dict):
        pairs = list(value.items())
        random.shuffle(pairs)
        value = dict(pairs)
    return spelled(value, random)


def spelled(value, random):
    text = json.dumps(
        value,
        indent=random.choice((None, None, 0, 3)),
        separators=random.choice(((",", ":"), (", ", " :  "))),
        ensure_ascii=random.random() < 0.5,
    )
    return text.encode("utf-8", "surrogatepass")


def mutated(raw, seed):
    """Bytes of JSON with one to three changes, or none but of spelling; the same by the seed."""
    random = randoms.Random(seed)
    value = json.loads(raw)
    if random.random() < 0.03:
        return equivalent(value, random)
    times = random.choice((1, 1, 2, 3))
    if random.random() < 0.5:
        for _ in range(times):
            value = of_structure(value, random)
        return spelled(value, random)
    for _ in range(times):
        raw = of_bytes(raw, random)
    return raw
