"""The header of a safetensors file: what lies where, by every rule of the format.

    length of the header (8 bytes, little endian) | header (JSON) | tensors, one after another

A file that breaks a rule is a `CheckpointError` that names the rule, the file and the value.
"""

import contextlib
import math
import reprlib
from pathlib import Path
from typing import NamedTuple

from kformer import files

# Real ones have some 100 bytes for each tensor. Parsing more, or denser JSON, would take memory
# beyond what reading a small model may take.
MAX_HEADER = 2**22
MAX_VALUES = 400_000
# What the format knows, in bytes.
BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 100


def brief(value):
    """`repr` of a value from elsewhere, which may be long, for an error."""
    return _brief.repr(value)


class CheckpointError(ValueError):
    """Files from elsewhere that are not what they must be. The one error for all of them."""


@contextlib.contextmanager
def refusing():
    """What a file makes other parts raise (no JSON, no number of a `Config`, no right to read),
    as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from None


class Tensor(NamedTuple):
    """What a header says: `start` and `end` are places in the file."""

    name: str
    dtype: str
    shape: tuple
    path: Path
    start: int
    end: int


def read_header(path, most=MAX_VALUES):
    """name → Tensor of one file, by the rules of the format."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            rule = f"{path} must begin with a header of 2 to {MAX_HEADER:,} bytes inside of it"
            raise CheckpointError(f"{rule}, got {what_begins(start, length)} in {size:,} bytes")
        raw = file.read(length)
    if len(raw) != length or raw[:1] != b"{":
        raise CheckpointError(f"the header of {path} must begin with '{{', got {brief(raw[:8])}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {error.start} of it"
        raise CheckpointError(f"the header of {path} must be UTF-8, got {got}") from None
    del raw
    header = parse_object(text, f"the header of {path}", most)
    check_metadata(header.pop("__metadata__", {}), path)
    base = 8 + length
    tensors = [checked_tensor(name, info, path, base) for name, info in header.items()]
    check_places(sorted(tensors, key=lambda t: (t.start, t.end)), base, size, path)
    return {tensor.name: tensor for tensor in tensors}


def what_begins(start, length):
    """What a file is that does not begin with a plausible length."""
    if start.startswith(b"version "):
        return "a pointer of git-lfs in place of weights"
    if start.lstrip()[:1] == b"<":
        return "a web page in place of weights"
    if start.startswith((b"PK", *(bytes([0x80, protocol]) for protocol in range(2, 6)))):
        return "a pickle in place of weights"
    return f"length {length:,}" if len(start) == 8 else "no length"


def check_metadata(metadata, path):
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        rule = f"__metadata__ of {path} must map names to texts"
        raise CheckpointError(f"{rule}, got {brief(metadata)}")


def checked_tensor(name, info, path, base):
    """The Tensor of one entry of a header whose bytes begin at `base`."""

    def need(holds, rule, got):
        if not holds:
            at = f"tensor {brief(name)} of {path}"
            raise CheckpointError(f"{at} must have {rule}, got {brief(got)}")

    keys = {"dtype", "shape", "data_offsets"}
    need(isinstance(info, dict) and set(info) == keys, "dtype, shape and data_offsets", info)
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    need(isinstance(dtype, str) and dtype in BYTES, f"a dtype of {', '.join(BYTES)}", dtype)
    need(are_sizes(shape) and len(shape) <= 8, "a shape of at most 8 whole numbers", shape)
    need(are_sizes(offsets) and len(offsets) == 2, "two offsets, whole numbers", offsets)
    need(offsets[0] <= offsets[1], "offsets in order", offsets)
    extent = math.prod(shape) * BYTES[dtype]
    need(extent < 2**63, "less than 2^63 bytes", shape)
    need(extent == offsets[1] - offsets[0], f"{extent:,} bytes for {dtype} {shape}", offsets)
    return Tensor(name, dtype, tuple(shape), path, base + offsets[0], base + offsets[1])


def are_sizes(values):
    """Whether this is a list of whole numbers of a size that a file can have."""
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def check_places(tensors, base, size, path):
    """Tensors in the order of their places: each begins where the one before ends, the last one
    ends with the file."""
    end = base
    for tensor in tensors:
        if tensor.start != end:
            kind = "a hole" if tensor.start > end else "an overlap"
            rule = f"tensors of {path} must lie one after another"
            got = f"{kind} before {brief(tensor.name)}: {tensor.start:,} after {end:,}"
            raise CheckpointError(f"{rule}, got {got}")
        end = tensor.end
    if end != size:
        rule = f"{path} must end with its last tensor, at {end:,}"
        raise CheckpointError(f"{rule}, got {size:,} bytes")


def parse_object(text, what, most=MAX_VALUES):
    """A JSON object of bounded size: `parse_json` bounds the depth, this the number of values."""
    values = sum(text.count(mark) for mark in "{[,:")
    if values > most:
        raise CheckpointError(f"{what} must have at most {most:,} values, got {values:,}")
    found = files.parse_json(text, what)
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} must be a JSON object, got {type(found).__name__}")
    return found
