"""Thousands of random changes of headers, indices and configs: refused, or they change nothing."""

import random as randoms
import time

import numpy as np
import pytest
import safetensors
from checkpoint_support import SECONDS, good, load, packed, patience, sharded
from mutations import mutated, of_bytes

from kformer.interop.checkpoint import INDEX, WEIGHTS, Checkpoint
from kformer.interop.header import CheckpointError

PARTS = 10
FILES = [WEIGHTS] * 4 + [INDEX] * 3 + ["config.json"] * 3


def changed_weights(raw, seed):
    """A file whose header is changed; its length is right in most of them."""
    random = randoms.Random(seed)
    length = int.from_bytes(raw[:8], "little")
    header = mutated(raw[8 : 8 + length], seed)
    kind = random.randrange(8)
    if kind == 0:  # the length as it was
        return packed(header, raw[8 + length :], length)
    if kind == 1:  # the numbers may be damaged in length, not in value
        return packed(header, raw[8 + length : random.randrange(8 + length, len(raw) + 1)])
    if kind == 2:
        return of_bytes(raw[:8], random) + raw[8:]
    return packed(header, raw[8 + length :])


def check(folder, expected):
    """Whether it was accepted: then its tensors are those it had, and every reader takes it."""
    began = time.process_time()
    try:
        with patience():
            found = load(folder)
    except CheckpointError as error:
        assert type(error) is CheckpointError and len(str(error).splitlines()) == 1, error
        accepted = False
    else:
        same_tensors(folder, found, expected)
        accepted = True
    assert time.process_time() - began < SECONDS
    return accepted


def same_tensors(folder, found, expected):
    """The same names, shapes and bytes; of a dtype with bytes of another meaning, that meaning."""
    assert list(found) == list(expected)
    places = Checkpoint.open(folder).tensors
    for path in {tensor.path for tensor in places.values()}:
        theirs = dict(safetensors.deserialize(path.read_bytes()))
        for name, info in theirs.items():
            raw, dtype = np.frombuffer(info["data"], np.uint8), places[name].dtype
            assert dtype == info["dtype"] and list(places[name].shape) == info["shape"]
            bits, shape = expected[name]
            assert found[name].shape == shape and raw.tobytes() == bits
            if dtype == "BF16":
                again = raw.view("<u2").astype("<u4") << 16
                again = again.view("<f4")
            else:
                again = raw.view({"F32": "<f4", "F16": "<f2"}[dtype])
            np.testing.assert_array_equal(found[name].ravel(), again.astype("<f4"))


def bits_of(folder):
    """name → (bytes, shape) of a good checkpoint."""
    found = {}
    for name, tensor in Checkpoint.open(folder).tensors.items():
        found[name] = tensor.path.read_bytes()[tensor.start : tensor.end], tensor.shape
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_changes(request, part, tmp_path):
    """10,000 changes in all parts, with --deep 100,000; the seed stands at the end of the run."""
    seed = request.config.getoption("--draw")
    number = (100_000 if request.config.getoption("--deep") else 10_000) // PARTS
    folder, name = good(tmp_path / "checkpoint"), FILES[part]
    if name == INDEX:
        sharded(folder)
    expected = bits_of(folder)
    expected = {key: expected[key] for key in load(folder)}
    raw = (folder / name).read_bytes()
    before = {path.name for path in folder.iterdir()}
    change = changed_weights if name == WEIGHTS else mutated
    accepted = 0
    for index in range(number):
        (folder / name).unlink()  # a file that is written over waits for the disk
        (folder / name).write_bytes(change(raw, f"{seed} {part} {index}"))
        try:
            accepted += check(folder, expected)
        except Exception as error:
            error.add_note(f"{name} by --draw {seed}, part {part}, change {index}")
            raise
    assert {path.name for path in folder.iterdir()} == before
    assert 0 < accepted < 0.7 * number, "most changes are damage, some change nothing"
