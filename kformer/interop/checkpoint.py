"""Checkpoints: weights in safetensors files, read without trust and written as a stream.

`Checkpoint.open` reads headers alone and checks every rule of the format before a byte of a weight
is read; whatever is wrong is a `CheckpointError`.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kformer import files
from kformer.interop.header import (
    CheckpointError,
    brief,
    parse_object,
    read_header,
    refusing,
)

WEIGHTS = "model.safetensors"
INDEX = WEIGHTS + ".index.json"
# What stands beside them in an export.
TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip
MAX_CONFIG = 2**20
MAX_INDEX = 2**22
MAX_SHARDS = 1000
MAX_TENSORS = 40_000
MAX_LISTED = 1000  # names of one kind in an error
# What is ever taken as a weight; BF16 is the upper half of a float32.
READABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)\.", re.I)  # names that Windows never lends
FOREIGN_CODE = ("auto_map", "trust_remote_code", "_attn_implementation_internal")
ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
METADATA = {
    "format": "pt",
    "writer": "kformer",
}  # others ask for the format, `write` for the writer
MARK = json.dumps({"__metadata__": METADATA}, separators=(",", ":"))[:-1].encode()
PIECE = 2**20  # numbers that are read, checked and converted at a time


class Checkpoint:
    """The tensors of a folder with `model.safetensors`, or with the shards that
    `model.safetensors.index.json` names.

        checkpoint = Checkpoint.open(folder)        # reads and checks headers, nothing else
        checkpoint.tensors["a.weight"].shape        # name → Tensor
        checkpoint.check({"a.weight": (3, 4)})      # these and no others, or an error lists all
        checkpoint.read("a.weight")                 # float32 array; reads these bytes alone
    """

    def __init__(self, tensors, allow_nonfinite=False):
        self.tensors = tensors
        self.allow_nonfinite = allow_nonfinite

    @classmethod
    def open(cls, folder, allow_nonfinite=False, file=WEIGHTS):
        with refusing():
            folder = Path(folder)
            if not folder.is_dir():
                raise CheckpointError(f"a checkpoint must be a folder, got {brief(str(folder))}")
            tensors = {}
            for path, names in parts_of(folder, file):
                few = {} if names is None else {"most": 1000 + 20 * len(names)}
                found = read_header(path, **few)
                if names is not None and set(found) != names:
                    lost, more = sorted(names - set(found)), sorted(set(found) - names)
                    rule = f"{path} must have the tensors that {INDEX} names for it"
                    raise CheckpointError(f"{rule}; missing {brief(lost)}, more {brief(more)}")
                tensors |= found
            return cls(tensors, allow_nonfinite)

    @property
    def total(self):
        """Numbers in all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def check(self, shapes, ignore=()):
        """CheckpointError that lists every tensor that is missing, not expected, of another shape
        than in `shapes` (name → shape) or of no readable dtype; names that match one of the
        regular expressions `ignore` may be there and mean nothing."""
        ignored = [re.compile(pattern) for pattern in ignore]
        wrong = {"missing": [], "unexpected": [], "of another shape": [], "of another dtype": []}
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                wrong["missing"].append(brief(name))
                continue
            if tensor.shape != tuple(shape):
                found = f"{brief(name)} {list(tensor.shape)} in place of {list(shape)}"
                wrong["of another shape"].append(found)
            if tensor.dtype not in READABLE:
                wrong["of another dtype"].append(f"{brief(name)} {tensor.dtype}")
        for name in self.tensors:
            if name not in shapes and not any(pattern.fullmatch(name) for pattern in ignored):
                wrong["unexpected"].append(brief(name))
        if any(wrong.values()):
            listed = [
                f"{len(w)} {kind}: {', '.join(w[:MAX_LISTED])}" for kind, w in wrong.items() if w
            ]
            rule = "the tensors of a checkpoint must be those of the model"
            raise CheckpointError(f"{rule}, got {'; '.join(listed)}")

    def read(self, name):
        """One tensor in float32. Not finite is an error, unless `allow_nonfinite`."""
        tensor = self.tensors[name]
        with refusing():
            if tensor.dtype not in READABLE:
                rule = f"tensor {brief(name)} must be {', '.join(READABLE)}"
                raise CheckpointError(f"{rule}, got {tensor.dtype} in {tensor.path}")
            out = np.empty(tensor.shape, np.float32)
            flat = out.reshape(-1)
            with open(tensor.path, "rb") as file:
                file.seek(tensor.start)
                for at in range(0, flat.size, PIECE):
                    piece = flat[at : at + PIECE]
                    self.read_piece(file, tensor, piece)
        return out

    def read_piece(self, file, tensor, piece):
        """The next numbers of a tensor, into `piece`."""
        raw = np.empty(piece.size, READABLE[tensor.dtype])
        if file.readinto(raw.view(np.uint8)) != raw.nbytes:
            rule = f"tensor {brief(tensor.name)} must be whole"
            raise CheckpointError(f"{rule}, got the end of {tensor.path} before {tensor.end}")
        if tensor.dtype == "BF16":  # the upper half of a float32
            bits = piece.view(np.uint32)
            bits[:] = raw
            bits <<= 16
        else:
            piece[:] = raw
        if not self.allow_nonfinite and not np.isfinite(piece).all():
            got = piece[~np.isfinite(piece)][0]
            rule = f"tensor {brief(tensor.name)} must hold finite numbers"
            raise CheckpointError(f"{rule}, got {got} in {tensor.path}")


def parts_of(folder, file=WEIGHTS):
    """(file, names of its tensors or None for whatever it holds) for every file of weights."""
    if (folder / file).exists():
        return [(contained(folder, file), None)]
    if file != WEIGHTS or not (folder / INDEX).exists():
        found = sorted(path.name for path in folder.iterdir())
        rule = f"{folder} must hold {file}"
        rule += f" or {INDEX} (pickles are never read)" if file == WEIGHTS else ""
        raise CheckpointError(f"{rule}, got {brief(found)}")
    shards = shards_of(contained(folder, INDEX))
    return [(contained(folder, shard), names) for shard, names in sorted(shards.items())]


def shards_of(path):
    """File → names of its tensors, as an index says."""
    index = small_json(path, MAX_INDEX, "an index of shards")
    weight_map = index.get("weight_map")
    more = set(index) - {"metadata", "weight_map"}
    if more or not isinstance(weight_map, dict) or not weight_map:
        rule = f"{path} must hold 'weight_map' and at most 'metadata' beside it"
        raise CheckpointError(f"{rule}, got {brief(sorted(index))}")
    if len(weight_map) > MAX_TENSORS:
        rule = f"{path} must name at most {MAX_TENSORS:,} tensors"
        raise CheckpointError(f"{rule}, got {len(weight_map):,}")
    shards = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard) or DEVICES.match(shard):
            rule = f"{path} must name shards by plain file names ending in .safetensors"
            raise CheckpointError(f"{rule}, got {brief(shard)} for {brief(name)}")
        shards.setdefault(shard, set()).add(name)
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{path} must name at most {MAX_SHARDS} shards, got {len(shards)}")
    return shards


def contained(folder, name):
    """The path of a file of a folder; a link that leads out of the folder is an error. (In the
    cache of huggingface_hub, snapshots/x/name is a link to a file in blobs, beside snapshots.)"""
    path, folder = folder / name, folder.resolve()
    if not path.exists():
        raise CheckpointError(f"{name} must be there, got nothing at {path}")
    target = path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.parent not in (folder, blobs):
        raise CheckpointError(f"{path} must lie in its folder, got a link to {target}")
    if not target.is_file():
        kind = "a folder" if target.is_dir() else "no plain file"
        raise CheckpointError(f"{path} must be a file, got {kind}")
    return path


def small_json(path, limit, what):
    text = files.read_text(path, limit, what)
    return parse_object(text, f"{what}, {path},")


def read_config(folder, file="config.json"):
    """The object in a JSON file of a checkpoint. What would choose code or fetch from elsewhere is
    refused wherever it stands in it."""
    with refusing():
        path = contained(Path(folder), file)
        found = small_json(path, MAX_CONFIG, file)
        nested = [found]
        while nested:
            item = nested.pop()
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, value in pairs:
                if key in FOREIGN_CODE:
                    raise CheckpointError(f"{path} must not choose code, got {key!r}")
                if isinstance(value, str) and ADDRESS.match(value):
                    rule = f"{path} must not name addresses"
                    raise CheckpointError(f"{rule}, got {brief(value)} for {brief(key)}")
                if isinstance(value, dict | list):
                    nested.append(value)
        return found


class Lazy(NamedTuple):
    """A tensor to write: `read()` gives its array when its turn comes."""

    shape: tuple
    read: object


def write(folder, tensors, texts=None, shard_bytes=5 * 10**9, file=WEIGHTS):
    """A new folder with `tensors` (name → array or Lazy) in float32 and files of text (name →
    text). It takes its name when all of it is on the disk. Only what goes to the usual `file` is
    ever cut into shards."""
    folder = Path(folder)
    texts = dict(texts or {})
    check_replaceable(folder, texts)
    shards = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = 4 * math.prod(tensor.shape)
        if size > room and shards[-1] and file == WEIGHTS:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
    with files.written(folder) as beside:
        beside.mkdir()
        names = [file]
        if len(shards) > 1:
            count = len(shards)
            names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            total = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
            weight_map = {t: n for n, s in zip(names, shards, strict=True) for t in s}
            files.write_json(
                beside / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        for name, shard in zip(names, shards, strict=True):
            write_file(beside / name, shard)
        for name, text in texts.items():
            (beside / name).write_text(text, "utf-8")


def check_replaceable(folder, texts):
    """An earlier export may be written over, and nothing else that somebody keeps in a folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"a checkpoint must be written to a folder, got the file {folder}")
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = {INDEX, *TEXTS, *texts}
    more = [path.name for path in there if path.name not in ours and not is_export(path)]
    if more or there and not any(is_export(path) for path in there):
        got = more or [path.name for path in there]
        rule = f"{folder} must be new, empty or an earlier export"
        raise ValueError(f"{rule}, got {', '.join(got[:5])} in it")


def is_export(path):
    """Whether this is a file of weights that `write_file` wrote."""
    if not SHARD.fullmatch(path.name) or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(8 + len(MARK))[8:] == MARK


def write_file(path, tensors):
    """One safetensors file, a tensor at a time."""
    header, end = {"__metadata__": METADATA}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * math.prod(tensor.shape)
        shape = [int(size) for size in tensor.shape]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that the numbers lie where a processor likes them
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, tensor in tensors.items():
            write_tensor(file, name, tensor)
        file.flush()
        os.fsync(file.fileno())


def write_tensor(file, name, tensor):
    array = tensor.read() if isinstance(tensor, Lazy) else tensor
    array = np.asarray(array, "<f4", order="C")
    if array.shape != tuple(tensor.shape):
        got = f"{array.shape} in place of {tuple(tensor.shape)}"
        raise ValueError(f"tensor {name!r} must have the shape it was said to have, got {got}")
    file.write(array.reshape(-1).view(np.uint8))
