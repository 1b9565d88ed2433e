"""Folders that are no checkpoints: name → (how to make one, what the error must say).

`make(folder)` spoils a folder with a good checkpoint; it may give what to load in place of it.
Names begin with what they stand for: B1 truncated, B2 length of the header, ..., B25 no files.
"""

import numpy as np
from checkpoint_support import (
    SHAPES,
    B,
    H,
    W,
    arrays,
    file,
    file_of,
    header,
    index_text,
    numbers,
    packed,
    raw,
    tensors,
    weights,
    zipped,
)

GOOD = file_of(arrays())
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER = GOOD[8 : 8 + LENGTH]


def entry(name, **changes):
    return header(lambda h: h[name].update(changes))


def swapped(h):
    """Two neighbours: the first begins where the second one ends."""
    first, second = h[W], h[B]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


TRUNCATED = {
    f"B1 truncated to {k}/16": (
        weights(GOOD[: len(GOOD) * k // 16]),
        r"must begin with a header .* bytes inside of it, got (no )?length"
        if len(GOOD) * k // 16 < 8 + LENGTH
        else rf"must end with its last tensor, at {len(GOOD):,}, got {len(GOOD) * k // 16:,} bytes",
    )
    for k in range(1, 16)
}
LENGTHS = {
    f"B2 a header of {length:,}": (
        weights(packed(HEADER, GOOD[8 + LENGTH :], length)),
        rf"header of 2 to 4,194,304 bytes inside of it, got length {length:,} in {len(GOOD):,}",
    )
    for length in (0, 1, len(GOOD) - 7, 10**8 + 1, 2**31, 2**63, 2**64 - 1)
} | {
    "B2 a header of 7": (weights(packed(HEADER, GOOD, 7)), "must be JSON, got Unterminated"),
    "B2 a header one byte short": (
        weights(packed(HEADER, GOOD[8 + LENGTH :], LENGTH - 1)), "must be JSON, got Expecting",
    ),
    "B2 a header one byte long": (
        weights(packed(HEADER, GOOD[8 + LENGTH :], LENGTH + 1)), "must be (JSON|UTF-8), got",
    ),
    "B2 a header of 5 MB": (
        weights(packed(HEADER + b" " * 5_000_000)), "2 to 4,194,304 bytes inside of it, got length",
    ),
    "B2 seven bytes": (weights(b"\x07" * 7), "inside of it, got no length in 7 bytes"),
    "B2 eight bytes": (weights(b"\x02" + b"\0" * 7), "inside of it, got length 2 in 8 bytes"),
}  # fmt: skip
TEXTS = {
    "B3 not UTF-8": (raw(b'{"\xff":1,'), "the header of .* must be UTF-8, got byte 2 of it"),
    "B3 half a character": (raw(b"{", b',"\xe2\x82":1}'), "must be UTF-8, got byte"),
    "B3 a surrogate in UTF-8": (raw(b'{"\xed\xa0\x80":1,'), "must be UTF-8, got byte 2"),
    "B3 a lone surrogate": (raw(b'{"\\ud800":1,'), r"tensor '\\ud800' .*, got 1"),
    "B3 an array": (raw(b"[{", b"}]"), r"must begin with '\{', got b'\[\{"),
    "B3 a space first": (raw(b" {"), r"must begin with '\{', got b' \{"),
    "B3 a newline first": (raw(b"\n{"), r"must begin with '\{', got b'\\n\{"),
    "B3 a number": (weights(packed(b"12345678")), r"must begin with '\{', got b'12345678'"),
    "B3 a text": (weights(packed(b'"abc"')), r"must begin with '\{', got b'\"abc\"'"),
    "B3 null": (weights(packed(b"null")), r"must begin with '\{', got b'null'"),
    "B3 no JSON": (weights(packed(b"{abcdef}")), "must be JSON, got Expecting property name"),
    "B3 more after it": (raw(b"{", b"} {}"), "must be JSON, got Extra data"),
    "B3 zeros after it": (raw(b"{", b"}\0\0\0"), "must be JSON, got Extra data"),
    "B3 not closed": (raw(b"{", b""), "must be JSON, got Expecting ',' delimiter"),
    "B3 a comma too much": (raw(b"{", b",}"), "must be JSON, got (Expecting|Illegal trailing)"),
    "B3 a comment": (raw(b"{/**/"), "must be JSON, got Expecting property name"),
    "B3 single quotes": (raw(b"{'a':1,"), "must be JSON, got Expecting property name"),
    "B3 a control character": (raw(b'{"a\x01":1,'), "must be JSON, got Invalid control character"),
    "B3 an unknown escape": (raw(b'{"\\x41":1,'), r"must be JSON, got Invalid \\escape"),
    "B4 a tensor twice": (raw(b'{"%s":1,' % W.encode()), f"every key once, got '{W}' twice"),
    "B4 a dtype twice": (raw(b'{"a":{"dtype":1,"dtype":2},'), "every key once, got 'dtype' twice"),
    "B4 metadata twice": (raw(b'{"__metadata__":{},'), "every key once, got '__metadata__' twice"),
    "B4 a key twice by escape": (raw(b'{"a":1,"\\u0061":2,'), "every key once, got 'a' twice"),
    "B4 a key of 1 MB twice": (
        raw(b'{"%s":1,"%s":2,' % ((b"k" * 2**20,) * 2)), "every key once, got 'kkk.{,99}' twice",
    ),
    "B4 config.json": (file("config.json", '{"a": 1, "a": 1}'), "every key once, got 'a' twice"),
    "B4 the index": (index_text(b'{"weight_map": {"a": "b", "a": "c"}}'), "once, got 'a' twice"),
}  # fmt: skip
PLACES = {
    "B5 an overlap": (
        header(lambda h: h[B].update(data_offsets=[h[W]["data_offsets"][1] - 4] * 2, shape=[0])),
        "must lie one after another, got an overlap before 'model.norm.weight'",
    ),
    "B5 the same place twice": (
        header(lambda h: h["model.layers.0.mlp.up_proj.weight"].update(
            data_offsets=h["model.layers.0.mlp.gate_proj.weight"]["data_offsets"])),
        "must lie one after another, got an overlap before",
    ),
    "B5 a hole": (header(lambda h: h.pop(B)), "one after another, got a hole before 'lm_head.weig"),
    "B5 a hole at the begin": (
        header(lambda h: h.pop("model.embed_tokens.weight")), "got a hole before 'model.layers.0",
    ),
    "B5 neighbours swapped": (header(swapped), r"must have 384 bytes for F32 \[8, 12\], got \["),
    "B5 in reverse": (entry(B, data_offsets=[64, 32]), r"offsets in order, got \[64, 32\]"),
    "B5 negative": (entry(B, data_offsets=[-32, 0]), r"two offsets, whole numbers, got \[-32, 0\]"),
    "B5 one offset": (entry(B, data_offsets=[32]), r"two offsets, whole numbers, got \[32\]"),
    "B5 three offsets": (entry(B, data_offsets=[0, 1, 2]), r"two offsets, .* got \[0, 1, 2\]"),
    "B5 fractions": (entry(B, data_offsets=[0.0, 32.0]), r"whole numbers, got \[0.0, 32.0\]"),
    "B5 texts": (entry(B, data_offsets=["0", "32"]), r"whole numbers, got \['0', '32'\]"),
    "B5 booleans": (entry(B, data_offsets=[False, True]), r"whole numbers, got \[False, True\]"),
    "B5 null": (entry(B, data_offsets=None), "two offsets, whole numbers, got None"),
    "B5 an object": (entry(B, data_offsets={"0": 0}), "two offsets, whole numbers, got {'0': 0}"),
    "B5 2^63": (entry(B, data_offsets=[2**63, 2**63 + 32]), "two offsets, .* got .922337203685477"),
    "B5 beyond the end": (
        header(lambda h: h[H].update(shape=[12, 8], data_offsets=[h[H]["data_offsets"][0],
                                                                  h[H]["data_offsets"][1] + 16])),
        r"must end with its last tensor, at .*, got",
    ),
    "B6 2^62 × 4": (entry(W, shape=[2**62, 4]), r"less than 2\^63 bytes, got \[46116860184273"),
    "B6 2^32 × 2^32": (entry(W, shape=[2**32, 2**32]), r"less than 2\^63 bytes, got \[4294967296"),
    "B6 2^64 + 8 × 12": (entry(W, shape=[2**64 + 8, 12]), "at most 8 .* got .184467440737"),
    "B6 10^399": (entry(W, shape=[10**398]), r"at most 8 whole numbers, got \[10{10,60}\.\.\."),
    "B6 10^400": (entry(W, shape=[10**400]), "must hold numbers of 400 digits at most"),
    "B6 0 × 2^62": (
        entry(W, shape=[0, 2**62]), r"0 bytes for F32 \[0, 4611686018427387904\], got \[",
    ),
    "B6 negative": (entry(W, shape=[-8, -12]), r"at most 8 whole numbers, got \[-8, -12\]"),
    "B6 a fraction": (entry(W, shape=[8.0, 12]), r"at most 8 whole numbers, got \[8.0, 12\]"),
    "B6 a boolean": (entry(W, shape=[True, 96]), r"at most 8 whole numbers, got \[True, 96\]"),
    "B6 a text": (entry(W, shape="8x12"), "a shape of at most 8 whole numbers, got '8x12'"),
    "B6 null": (entry(W, shape=None), "a shape of at most 8 whole numbers, got None"),
    "B6 nested": (entry(W, shape=[[8, 12]]), r"at most 8 whole numbers, got \[\[8, 12\]\]"),
    "B6 nine dimensions": (entry(W, shape=[96] + [1] * 8), r"at most 8 whole numbers, got \[96, 1"),
    "B7 an extent too small": (entry(W, shape=[8, 13]), r"416 bytes for F32 \[8, 13\], got \["),
    "B7 an extent too large": (entry(W, shape=[8, 11]), r"352 bytes for F32 \[8, 11\], got \["),
    "B7 another width": (entry(W, dtype="F16"), r"192 bytes for F16 \[8, 12\], got \["),
}  # fmt: skip
DTYPES = {
    f"B8 dtype {dtype!r}": (
        entry(W, dtype=dtype), r"must have a dtype of BOOL, U8, .*, got " + shown,
    )
    for dtype, shown in {
        "F31": "'F31'", "f32": "'f32'", "F32 ": "'F32 '", "": "''", "float32": "'float32'",
        "<f4": "'<f4'", "O": "'O'", "F8_E4M4": "'F8_E4M4'", None: "None", 32: "32", True: "True",
        "F" * 10_000: "'F{20,60}...F{20,60}'",
    }.items()
} | {
    "B8 dtype a list": (entry(W, dtype=["F32"]), r"a dtype of .*, got \['F32'\]"),
    "B8 dtype an object": (entry(W, dtype={"F32": 1}), "a dtype of .*, got {'F32': 1}"),
} | {
    f"B8 {dtype} is no weight": (
        entry(W, dtype=dtype, shape=[8, 12, 4 // size] if size < 8 else [8, 6]),
        rf"1 of another dtype: '{W}' {dtype}",
    )
    for dtype, size in {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "I16": 2, "I32": 4, "U32": 4,
                        "I64": 8, "F64": 8, "C64": 8}.items()
}  # fmt: skip
ENTRIES = {
    "B9 one byte more": (weights(GOOD + b"\0"), "must end with its last tensor, at .*, got"),
    "B9 the file twice": (weights(GOOD + GOOD), "must end with its last tensor, at .*, got"),
    "B9 a zip behind it": (weights(GOOD + zipped(a="b")), "must end with its last tensor, at"),
    "B9 an entry without a shape": (header(lambda h: h[W].pop("shape")), "dtype, shape and data_"),
    "B9 an entry with more": (entry(W, code="x"), "must have dtype, shape and data_offsets, got"),
    "B9 an entry is a list": (header(lambda h: h.update({W: [1]})), r"data_offsets, got \[1\]"),
    "B9 an entry is null": (header(lambda h: h.update({W: None})), "data_offsets, got None"),
    "B9 metadata is a list": (
        header(lambda h: h.update(__metadata__=[1])), r"must map names to texts, got \[1\]",
    ),
    "B9 metadata of numbers": (
        header(lambda h: h.update(__metadata__={"a": 1})), "must map names to texts, got {'a': 1}",
    ),
    "B9 metadata is a text": (
        header(lambda h: h.update(__metadata__="x")), "must map names to texts, got 'x'",
    ),
    "B9 metadata nested": (
        header(lambda h: h.update(__metadata__={"a": {"b": "c"}})), "texts, got {'a': {'b': 'c'}}",
    ),
    "B9 metadata is null": (
        header(lambda h: h.update(__metadata__=None)), "must map names to texts, got None",
    ),
    "B10 NaN": (numbers(W, np.nan), f"tensor '{W}' must hold finite numbers, got nan"),
    "B10 infinity": (numbers(W, np.inf), f"tensor '{W}' must hold finite numbers, got inf"),
    "B10 minus infinity": (numbers(B, -np.inf), "must hold finite numbers, got -inf"),
    "B10 NaN in F16": (numbers("model.embed_tokens.weight", np.nan), "finite numbers, got nan"),
    "B10 infinity in BF16": (numbers(H, 0x7F80), f"tensor '{H}' must hold finite numbers, got inf"),
    "B10 NaN in BF16": (numbers(H, 0xFFC1), "must hold finite numbers, got nan"),
    "B11 a tensor missing": (
        tensors(lambda a: a.pop(B)), f"must be those of the model, got 1 missing: '{B}'$",
    ),
    "B11 three missing": (
        tensors(lambda a: [a.pop(n) for n in (W, B, H)]), f"3 missing: '{W}', '{B}', '{H}'$",
    ),
    "B11 all missing": (tensors(dict.clear), f"{len(SHAPES)} missing: 'embed_tokens.weight'"),
    "B11 none in the header": (weights(packed(b"{}")), f"got {len(SHAPES)} missing: 'emb"),
    "B11 under another name": (  # which ends in the one that is missing
        tensors(lambda a: a.update({"q_" + B: a.pop(B)})),
        f"1 missing: '{B}'; 1 unexpected: 'q_{B}'$",
    ),
    "B11 under a prefix": (
        tensors(lambda a: a.update({"base." + n: a.pop(n) for n in (W, B)})), "2 missing.*2 unexp",
    ),
    "B12 a tensor more": (
        tensors(lambda a: a.update(more=a[B])), "of the model, got 1 unexpected: 'more'$",
    ),
    "B12 a name with a newline": (
        tensors(lambda a: a.update({"a\nb": a[B]})), r"1 unexpected: 'a\\nb'$",
    ),
    "B12 a name of 10,000": (
        tensors(lambda a: a.update({"n" * 10_000: a[B]})), "1 unexpected: 'n{20,60}...n{20,60}'$",
    ),
    "B12 an empty name": (tensors(lambda a: a.update({"": a[B]})), "1 unexpected: ''$"),
    "B13 transposed": (
        tensors(lambda a: a.update({W: a[W].T})), rf"'{W}' \[12, 8\] in place of \[8, 12\]$",
    ),
    "B13 flat": (tensors(lambda a: a.update({W: a[W].ravel()})), r"\[96\] in place of \[8, 12\]$"),
    "B13 a row less": (tensors(lambda a: a.update({W: a[W][1:]})), r"\[7, 12\] in place of"),
    "B13 an axis more": (tensors(lambda a: a.update({B: a[B][None]})), r"\[1, 8\] in place of"),
    "B13 a single number": (tensors(lambda a: a.update({B: a[B][:1].reshape(())})), r"\[\] in pl"),
    "B13 empty": (tensors(lambda a: a.update({B: a[B][:0]})), r"\[0\] in place of \[8\]"),
}  # fmt: skip
