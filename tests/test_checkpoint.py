"""Files of weights: what is written is read again, as others read it, in little memory."""

import errno
import json
import os
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_support import SHAPES, B, H, good, packed, sharded

from kformer.interop.checkpoint import INDEX, WEIGHTS, Checkpoint, Lazy, write
from kformer.interop.header import CheckpointError

NAMES = ["a", "a.b", "b.weight", "ä", 'quo"te', "back\\slash", "tab\t", "😀", "x" * 200]


def made(seed):
    """name → float32 array, of many shapes: a single number, empty ones, odd sizes."""
    random = np.random.default_rng(seed)
    names = random.permutation(NAMES)[: random.integers(1, len(NAMES))]
    shapes = [random.integers(0, 6, random.integers(0, 4)) for _ in names]
    return {str(n): random.normal(size=s).astype("f4") for n, s in zip(names, shapes, strict=True)}


def read(folder):
    found = Checkpoint.open(folder)
    return {name: found.read(name) for name in found.tensors}


def same(a, b):
    assert set(a) == set(b)
    for name in a:
        assert a[name].shape == b[name].shape and a[name].dtype == b[name].dtype == np.float32
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("seed", range(10))
def test_what_is_written_is_read(seed, tmp_path):
    tensors, size = made(seed), [10**9, 400, 4, 100][seed % 4]
    lazy = {name: Lazy(a.shape, lambda a=a: a) for name, a in tensors.items()}
    write(tmp_path / "a", tensors, shard_bytes=size)
    write(tmp_path / "b", lazy, {"config.json": "{}"}, shard_bytes=size)
    same(read(tmp_path / "a"), tensors)
    same(read(tmp_path / "b"), tensors)
    for path in tmp_path.glob("a/*"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    found = Checkpoint.open(tmp_path / "a")
    assert found.total == sum(array.size for array in tensors.values())
    found.check({name: array.shape for name, array in tensors.items()})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    if len(files) > 1:
        shards = [name for name in files if name != INDEX]
        assert shards == [
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
        ]
        index = json.loads((tmp_path / "a" / INDEX).read_text())
        assert index["metadata"]["total_size"] == 4 * found.total
        assert sorted(index["weight_map"]) == sorted(tensors)


@pytest.mark.parametrize("seed", range(5))
def test_others_read_it(seed, tmp_path):
    tensors = made(seed)
    write(tmp_path / "a", tensors)
    same(safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS), tensors)
    raw = (tmp_path / "a" / WEIGHTS).read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0, "the numbers are aligned"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_it_reads_what_others_write(dtype, tmp_path):
    tensors = {name: array.astype(dtype) for name, array in made(3).items()}
    tensors["b"] = np.arange(2**16, dtype="<u2").view(np.float16)
    if dtype != np.float16:  # every half there is, infinities and NaN included
        tensors["b"] = np.arange(2**16, dtype="<u2").view(ml_dtypes.bfloat16).astype(dtype)
    (tmp_path / WEIGHTS).write_bytes(safetensors.numpy.save(tensors))
    found = Checkpoint.open(tmp_path, allow_nonfinite=True)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found.read(name), array.astype("f4"))
    with pytest.raises(CheckpointError, match="'b' must hold finite numbers, got (inf|nan) in"):
        Checkpoint.open(tmp_path).read("b")


def test_a_whole_checkpoint(tmp_path):
    """The tests' own good one, whole and in two files: the numbers of the format's library."""
    folder = good(tmp_path / "a")
    whole, theirs = read(folder), safetensors.numpy.load_file(folder / WEIGHTS)
    for name, array in whole.items():
        np.testing.assert_array_equal(array, theirs[name].astype("f4"))
    sharded(folder)
    same(read(folder), whole)


def test_check_lists_everything(tmp_path):
    folder = good(tmp_path / "a")
    found = Checkpoint.open(folder)
    found.check(SHAPES)
    shapes = {**SHAPES, "absent": (1,), B: (4, 2)}
    del shapes[H]
    listed = rf"1 missing: 'absent'; 1 unexpected: '{H}'; 1 of another shape: '{B}' \[8\] in place"
    with pytest.raises(CheckpointError, match=listed):
        found.check(shapes)
    del shapes["absent"], shapes[B]
    with pytest.raises(CheckpointError, match=f"got 1 unexpected: '{H}'$"):
        found.check({**shapes, B: (8,)}, ignore=["lm_head", "head.weight", ".*bias"])
    found.check({**shapes, B: (8,)}, ignore=[r"lm_head\..*"])


def test_a_file_that_shrinks(tmp_path):
    """Between the reading of its header and of its numbers."""
    folder = good(tmp_path / "a")
    found = Checkpoint.open(folder)
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=f"tensor '{H}' must be whole, got the end of"):
        found.read(H)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        found.read(H)


def test_a_dtype_is_refused_before_it_is_read(tmp_path):
    header = {"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    (tmp_path / WEIGHTS).write_bytes(packed(header, b"\0" * 8))
    found = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="'a' must be F32, F16, BF16, got I64 in"):
        found.read("a")


def peak_of(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_memory(dtype, tmp_path):
    """Writing holds a tensor at a time, reading the weights and a piece."""
    shape, count = (1024, 1024), 12
    lazy = {str(i): Lazy(shape, lambda: np.ones(shape, "f4")) for i in range(count)}
    tensor = 4 * 1024 * 1024
    assert peak_of(lambda: write(tmp_path / "a", lazy, shard_bytes=3 * tensor)) < 1.2 * tensor
    tensors = {str(i): np.ones(shape, dtype) for i in range(count)}
    (tmp_path / WEIGHTS).write_bytes(safetensors.numpy.save(tensors))
    del tensors
    assert peak_of(lambda: read(tmp_path)) < 1.2 * count * tensor


def test_a_header_costs_little(tmp_path):
    """Opening reads headers alone: not a byte of 1 GB of weights."""
    header = {"a": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}
    (tmp_path / WEIGHTS).write_bytes(packed(header))
    with open(tmp_path / WEIGHTS, "r+b") as file:
        file.truncate(file.seek(0, 2) + 2**30)
    assert peak_of(lambda: Checkpoint.open(tmp_path)) < 2**18


# Writing: whole or not at all, and never over what is somebody's.


def test_an_earlier_export_is_replaced(tmp_path):
    write(tmp_path / "a", made(0), {"config.json": "{}"}, shard_bytes=4)
    write(tmp_path / "a", made(1), {"config.json": "[]", "notes.txt": "x"})
    same(read(tmp_path / "a"), made(1))
    write(tmp_path / "a", made(2), {"notes.txt": "y"}, shard_bytes=100)
    same(read(tmp_path / "a"), made(2))
    assert (tmp_path / "a" / "notes.txt").read_text() == "y"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def with_files(**contents):
    def make(folder):
        folder.mkdir()
        for name, content in contents.items():
            (folder / name.replace("_", ".")).write_text(content)

    return make


SOMEBODYS = {
    "a file": (lambda folder: folder.write_text("x"), "written to a folder, got the file"),
    "notes": (with_files(notes_txt="x"), "be new, empty or an earlier export, got notes.txt in it"),
    "a config": (with_files(config_json="{}"), "earlier export, got config.json in it"),
    "weights": (with_files(my_safetensors="x"), "earlier export, got my.safetensors in it"),
    "a download": (good, "earlier export, got model.safetensors in it"),
    "a download in parts": (
        lambda folder: sharded(good(folder)), "got model-00001-of-00002.safetensors, model-00",
    ),
    "a folder": (lambda folder: (folder / WEIGHTS).mkdir(parents=True), "got model.safetensors in"),
    "an export and notes": (
        lambda folder: (write(folder, made(0)), (folder / "notes.txt").write_text("x")),
        "earlier export, got notes.txt in it",
    ),
    "an export and more weights": (
        lambda folder: (write(folder, made(0)), (folder / "x.safetensors").write_text("x")),
        "earlier export, got x.safetensors in it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOMEBODYS)
def test_nothing_of_others_is_written_over(name, tmp_path):
    make, message = SOMEBODYS[name]
    make(tmp_path / "a")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a", made(1), {"config.json": "{}"})
    assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}


def test_what_fails_leaves_the_earlier_one(tmp_path):
    """A full disk, a tensor of another shape: the earlier export stands, nothing is beside it."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path / "a", made(0))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", {**made(1), "last": Lazy((1,), full)})
    with pytest.raises(
        ValueError, match=r"'last' must have the shape .* \(3,\) in place of \(2,\)"
    ):
        write(tmp_path / "a", {"last": Lazy((2,), lambda: np.ones(3))}, shard_bytes=4)
    same(read(tmp_path / "a"), made(0))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLS = """
import os, sys
from pathlib import Path
import numpy as np
from kformer import files
from kformer.interop import checkpoint

folder = Path(sys.argv[1])
old, new = ({"a": np.full(9, x, "f4"), "b": np.ones(x)} for x in (1, 2))
calls = "open", "fsync", "replace", "unlink", "rmdir", "mkdir"

def die_at(step):
    left = [step]
    def dying(call):
        def called(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return call(*args, **kwargs)
        return called
    for name in calls:
        setattr(os, name, dying(getattr(os, name)))

step, code = 0, 9
while code == 9:
    checkpoint.write(folder, old, shard_bytes=40)
    child = os.fork()
    if child == 0:
        die_at(step)
        checkpoint.write(folder, new, shard_bytes=40)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    beside = folder.parent.glob(f".{folder.name}.*.old")
    whole = [path for path in [folder, *beside] if path.is_dir()]
    found = checkpoint.Checkpoint.open(whole[0])
    found.check({"a": (9,), "b": (int(found.read("a")[0]),)})
    print(step, code, int(found.read("a")[0]), whole[0] == folder)
    for path in folder.parent.glob(".*"):
        files.remove(path)
    files.remove(folder)
    step += 1
"""


def test_killed_at_any_step(tmp_path):
    """Ended at every call of the system by which it writes: there is a whole one, old or new. It
    has its name, but for one step in which the new one takes the place of the old one."""
    command = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path / "a")]
    env = {**os.environ, "KERAS_BACKEND": "numpy"}  # which starts fastest
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) > 12, done.stderr
    assert [code for _, code, _, _ in lines] == ["9"] * (len(lines) - 1) + ["0"]
    versions = [version for _, _, version, _ in lines]
    assert versions == sorted(versions) and set(versions) == {"1", "2"}, "old, then new"
    assert sum(named == "False" for *_, named in lines) == 1
