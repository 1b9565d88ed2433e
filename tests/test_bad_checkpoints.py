"""What is no checkpoint is refused: one kind of error, in one line, fast, and nothing is left."""

import os
import time
import tracemalloc

import bad_checkpoints
import bad_places
import pytest
from checkpoint_support import SECONDS, SHAPES, good, load, patience, sharded

from kformer.interop.header import CheckpointError

MEMORY = 2**26  # bytes beyond the weights

TABLES = [
    *(getattr(bad_checkpoints, n) for n in "TRUNCATED LENGTHS TEXTS PLACES DTYPES ENTRIES".split()),
    *(getattr(bad_places, n) for n in "INDICES NAMES LINKS ADDRESSES JSONS OTHERS BOMBS".split()),
]
BAD = {name: case for table in TABLES for name, case in table.items()}


def tree(folder):
    """What lies in a folder and below: nothing may be written there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def refuse(source, message, folder):
    before = tree(folder)
    began = time.process_time()
    with patience(), pytest.raises(CheckpointError, match=message) as caught:
        load(source)
    seconds = time.process_time() - began
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert caught.type is CheckpointError and len(text.splitlines()) == 1 and len(text) < 20_000
    assert seconds < SECONDS and peak < MEMORY, f"{seconds:.1f} s, {peak:,} bytes"
    assert tree(folder) == before


def test_the_good_one_loads(tmp_path):
    folder = good(tmp_path / "checkpoint")
    whole = load(folder)
    sharded(folder)
    parts = load(folder)
    assert list(whole) == list(parts) == list(SHAPES)
    assert all((whole[name] == parts[name]).all() for name in SHAPES)


@pytest.mark.parametrize("name", BAD)
def test_refused(name, tmp_path):
    make, message = BAD[name]
    folder = good(tmp_path / "checkpoint")
    make(folder)
    refuse(folder, message, tmp_path)


@pytest.mark.parametrize("name", bad_places.IDS)
def test_no_id(name, tmp_path):
    rule = "a checkpoint must be a folder, or an id such as .* of at most 96 .*, got"
    refuse(bad_places.IDS[name], rule, tmp_path)


def test_no_folder(tmp_path):
    folder = good(tmp_path / "checkpoint")
    for source in (folder / "config.json", str(folder / "config.json"), folder / "none"):
        refuse(source, "must be a folder, or an id such as .*, got .*(json|none)", tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", bad_places.FORBIDDEN)
def test_forbidden(name, tmp_path):
    make, message = bad_places.FORBIDDEN[name]
    folder = good(tmp_path / "checkpoint")
    make(folder)
    refuse(folder, message, tmp_path)
