"""Thousands of random changes of headers, indices and configs: refused, or they change nothing."""

import json
import random as randoms
import time
from unittest import mock

import numpy as np
import pytest
import safetensors
from bad_configs import FAMILIES, NUMBERS, REALS, checkpoint_of
from checkpoint_support import SECONDS, good, load, packed, patience, sharded
from mutations import mutated, of_bytes

import kformer
from kformer.interop import loading
from kformer.interop.checkpoint import INDEX, WEIGHTS, Checkpoint
from kformer.interop.families import FAMILIES as FAMILIES_OF_HF
from kformer.interop.header import CheckpointError

PARTS = 10
FILES = [("llama", WEIGHTS)] * 4 + [("llama", INDEX)] * 3
FILES += [(family, "config.json") for family in FAMILIES]
# Key of a config.json → field of a Config that is the same.
SAID = {
    family: {key: field for key, (field, *_) in NUMBERS[family].items()} | REALS[family]
    for family in FAMILIES
}
SAID["llama"] |= {"tie_word_embeddings": "tie_embeddings", "attention_bias": "use_bias"}


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


class Good:
    """A good checkpoint, and what is in it."""

    def __init__(self, folder, family, name):
        self.folder = good(folder) if family == "llama" else checkpoint_of(folder, family)
        if name == INDEX:
            sharded(folder)
        self.family, self.numbers, self.tensors = family, load(folder), self.read()

    def read(self):
        """name → (dtype, shape, bytes), as the format's own library reads them."""
        paths = {tensor.path for tensor in Checkpoint.open(self.folder).tensors.values()}
        parts = [safetensors.deserialize(path.read_bytes()) for path in paths]
        return {n: (i["dtype"], i["shape"], bytes(i["data"])) for part in parts for n, i in part}

    def accepts(self):
        """Whether it is a checkpoint now; then it is the same one as before."""
        began = time.process_time()
        try:
            with patience():
                numbers = load(self.folder)
        except CheckpointError as error:
            assert type(error) is CheckpointError and len(str(error).splitlines()) == 1, error
            numbers = None
        assert time.process_time() - began < SECONDS
        if numbers is not None:
            self.check(numbers)
        return numbers is not None

    def check(self, numbers):
        """The same names, shapes and bytes, so the same numbers; but the bytes of F16 may be said
        to be BF16. What config.json says is what its Config is."""
        tensors = self.read()
        assert {n: t[1:] for n, t in tensors.items()} == {n: t[1:] for n, t in self.tensors.items()}
        assert list(numbers) == list(self.numbers)
        if tensors == self.tensors:
            for path, array in numbers.items():
                np.testing.assert_array_equal(array, self.numbers[path])
        hf = json.loads((self.folder / "config.json").read_text("utf-8"))
        family = loading.family_of(hf)
        config = family.read_config(hf, loading.check_task(family, hf, None))
        for key, field in SAID[self.family].items():
            if hf.get(key) is not None:
                value = getattr(config, field)
                assert (type(value) is bool) == (type(hf[key]) is bool) and value == hf[key], key


class Nothing:
    """In place of a checkpoint: there is no tensor in it."""

    tensors = {}

    def check(self, shapes, ignore):
        raise CheckpointError("a config that means a model")


def plain_config(family):
    """A config.json of a family with all the keys it knows."""
    small = {"head": 16, "layer": 2}
    said = {
        key: default[0] if default else next((n for k, n in small.items() if k in key), 32)
        for key, *default in family.fields.values()
    }
    must = {key: allowed[0] for key, allowed in family.must.items()}
    names = list(family.architectures)[:1]
    return {**said, **must, "model_type": family.model_type, "architectures": names}


@pytest.mark.parametrize("kind", FAMILIES_OF_HF)
def test_configs(request, kind, tmp_path):
    """A changed config.json of any family means a model, or it is refused in one line."""
    raw, means = json.dumps(plain_config(FAMILIES_OF_HF[kind])).encode(), 0
    seed = request.config.getoption("--draw")
    for index in range(5000 if request.config.getoption("--deep") else 200):
        (tmp_path / "config.json").unlink(missing_ok=True)
        (tmp_path / "config.json").write_bytes(mutated(raw, f"{seed} {kind} {index}"))
        try:
            with patience(), pytest.raises(CheckpointError) as caught:
                with mock.patch.object(loading.Checkpoint, "open", lambda *args: Nothing()):
                    kformer.from_hf(tmp_path)
        except Exception as error:
            error.add_note(f"{kind} by --draw {seed}, change {index}")
            raise
        assert len(str(caught.value).splitlines()) == 1
        means += "means a model" in str(caught.value)
    assert means > 10


@pytest.mark.parametrize("part", range(PARTS))
def test_changes(request, part, tmp_path):
    """10,000 changes in all parts, with --deep 100,000; the seed stands at the end of the run."""
    seed = request.config.getoption("--draw")
    number = (100_000 if request.config.getoption("--deep") else 10_000) // PARTS
    family, name = FILES[part]
    folder = tmp_path / "checkpoint"
    whole = Good(folder, family, name)
    raw, before = (folder / name).read_bytes(), {path.name for path in folder.iterdir()}
    change, accepted = changed_weights if name == WEIGHTS else mutated, 0
    for index in range(number):
        (folder / name).unlink()  # a file that is written over waits for the disk
        (folder / name).write_bytes(change(raw, f"{seed} {part} {index}"))
        try:
            accepted += whole.accepts()
        except Exception as error:
            error.add_note(f"{name} by --draw {seed}, part {part}, change {index}")
            raise
    assert {path.name for path in folder.iterdir()} == before
    assert 0 < accepted < 0.7 * number, "most changes are damage, some change nothing"
