"""Files: read without trust, written without loss.

What comes from elsewhere is bounded in size and strictly parsed, and never chooses code. What is
written appears whole under its name or not at all.
"""

import collections
import contextlib
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

MAX_DEPTH = 32
MAX_DIGITS = 400


def parse_json(text, what="JSON"):
    """Strict JSON: no key twice, no NaN, no depth without end; ValueError says which rule broke."""

    def no_duplicates(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            (twice, _), *_ = collections.Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"{what} must have every key once, got {twice[:100]!r} twice")
        return out

    def finite(spelling):
        if len(spelling) > MAX_DIGITS or not math.isfinite(float(spelling)):
            raise ValueError(f"{what} must hold finite numbers, got {spelling[:20]}")
        return float(spelling)

    def whole(spelling):
        if len(spelling) > MAX_DIGITS:
            raise ValueError(f"{what} must hold numbers of {MAX_DIGITS} digits at most, got more")
        return int(spelling)

    hooks = dict(object_pairs_hook=no_duplicates, parse_float=finite, parse_int=whole)
    try:
        value = json.loads(text, parse_constant=finite, **hooks)
    except RecursionError:
        raise ValueError(f"{what} must be at most {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} must be JSON, got {error}") from None
    if depth_of(value) > MAX_DEPTH:
        raise ValueError(f"{what} must be at most {MAX_DEPTH} levels deep")
    return value


def depth_of(value):
    """Levels of lists and dicts, without recursion; past MAX_DEPTH it stops counting."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [c for group in children if not isinstance(group, str | int | float | None)
                 for c in group if isinstance(c, dict | list)]  # fmt: skip
    return depth


def read_text(path, limit, what="file"):
    """The text of a regular file of at most `limit` bytes, in UTF-8."""
    path = Path(path)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "nothing" if not path.exists() else "no plain file"
        raise ValueError(f"{what} must be a file, got {kind} at {path}")
    size = path.stat().st_size
    if not 0 < size <= limit:
        raise ValueError(f"{what} must have 1 to {limit:,} bytes, got {size:,} in {path}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} must be UTF-8, got byte {error.start} of {path}") from None


@contextlib.contextmanager
def written(path):
    """A path beside `path` to write a file or a folder to; it takes the place of `path` when the
    block ends well, and vanishes if it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    remove(beside)
    try:
        yield beside
        for part in [*beside.rglob("*"), beside] if beside.is_dir() else [beside]:
            sync(part)
        put_in_place(beside, path)
        sync(path.parent)
    finally:
        remove(beside)


@contextlib.contextmanager
def written_together(path):
    """`written`, for a file that may need others beside it which it knows by their names: a path
    of the same name in a folder of its own, whose files all take their places, `path` last."""
    path = Path(path)
    with contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        remove(folder)
        stack.callback(remove, folder)
        folder.mkdir()
        yield folder / path.name
        for part in folder.rglob("*"):
            sync(part)
        for part in sorted(folder.iterdir(), key=lambda part: part.name == path.name):
            put_in_place(part, path.parent / part.name)
        sync(path.parent)


def put_in_place(beside, path):
    """Rename; a folder cannot take the place of another one at once, so that one steps aside."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.is_dir():
        os.replace(path, aside)
    os.replace(beside, path)
    remove(aside)


def write_text(path, text):
    with written(path) as beside:
        beside.write_text(text, "utf-8")


def write_json(path, value):
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def remove(path):
    """A file or a folder with its files, if it is there."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path):
    """Onto the disk: what was renamed before it was written would be lost with the power."""
    if os.name == "nt" and Path(path).is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
