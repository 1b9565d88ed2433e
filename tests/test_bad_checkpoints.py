"""What is no checkpoint is refused: one kind of error, in one line, fast, and nothing is left."""

import math
import os
import time
import tracemalloc

import bad_checkpoints
import bad_configs
import bad_places
import pytest
from bad_configs import FAMILIES, changed, checkpoint_of
from checkpoint_support import SECONDS, good, load, patience, sharded

import kformer
from kformer import backend
from kformer.interop.header import CheckpointError
from kformer.weights import path_in

MEMORY = 2**26  # bytes beyond the weights

TABLES = [
    *(getattr(bad_checkpoints, n) for n in "TRUNCATED LENGTHS TEXTS PLACES DTYPES ENTRIES".split()),
    *(getattr(bad_places, n) for n in "INDICES NAMES LINKS ADDRESSES JSONS OTHERS BOMBS".split()),
]
CONFIGS = {
    name: case
    for table in "SIZES KINDS RATES UNKNOWN TOGETHER".split()
    for name, case in getattr(bad_configs, table).items()
}
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
    assert caught.type is CheckpointError and len(text.splitlines()) == 1 and len(text) < 60_000
    assert seconds < SECONDS and peak < MEMORY, f"{seconds:.1f} s, {peak:,} bytes"
    assert tree(folder) == before


def test_the_good_one_loads(tmp_path):
    """Whole and in parts; as what `load` reads without making a model."""
    folder = good(tmp_path / "checkpoint")
    model = kformer.from_hf(folder)
    found = {path_in(model, v.path): backend.to_numpy(v.value) for v in model.weights}
    whole = load(folder)
    sharded(folder)
    parts = load(folder)
    assert set(whole) == set(parts) == set(found)
    assert all((whole[p] == parts[p]).all() and (whole[p] == found[p]).all() for p in whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_good_ones_load(family, tmp_path):
    model = kformer.from_hf(checkpoint_of(tmp_path / "checkpoint", family))
    assert model.count_params() == sum(map(math.prod, FAMILIES[family][1].values()))


@pytest.mark.parametrize("name", CONFIGS)
def test_refused_config(name, tmp_path):
    family, changes, message = CONFIGS[name]
    changed(tmp_path / "checkpoint", family, changes)
    refuse(tmp_path / "checkpoint", message, tmp_path)


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
