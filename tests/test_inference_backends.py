"""KERAS_BACKEND=numpy and openvino: models of torch give the same numbers and tokens there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from support import BACKEND, CASES, Case, close, run

QUICK = [3, 5, 13, 14]  # experts, BERT, ALiBi with windows, T5; `--deep` takes all
SIZES = (3, 5), (2, 150)
# Greedy, drawn, beams, guesses: what changes with the way of decoding.
WAYS = [
    {}, {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.3},
    {"num_beams": 3, "no_repeat_ngram": 2}, {"draft": "lookup", "cache_dtype": "float16"},
]  # fmt: skip
PROMPTS = [[5, 6, 7], [8, 9]]


def inputs_of(case):
    """Batches with padding on the right of the first row and on the left of the last."""
    for rows, length in SIZES:
        longest = case.config.max_length if case.config.position == "learned" else length
        length = min(length, longest)
        given = {"ids": case.ids(rows, length)}
        if case.is_seq2seq:
            given = {"target": given["ids"], "source": case.source(rows, length + 2)}
        for ids in given.values():
            ids[0, max(1, length // 2) :] = case.config.pad_id
            ids[-1, : length // 3] = case.config.pad_id
        yield given if case.is_seq2seq else given["ids"]


def refusal(function, *args, **kwargs):
    try:
        return repr(function(*args, **kwargs))
    except ValueError as error:
        return str(error)


def child(folder):
    """Runs on the other backend: what the models in a folder give there, left beside them."""
    for path in sorted(Path(folder).glob("*.keras")):
        model = keras.saving.load_model(path)
        arrays = dict(np.load(path.with_suffix(".npz")))
        found, said = {}, {}
        for number in range(len(SIZES)):
            given = {k.split()[1]: v for k, v in arrays.items() if k.startswith(f"{number} ")}
            given = given if model.has_source else given["ids"]
            found[f"{number} predict"] = model.predict(given, verbose=0)
            found[f"{number} call"] = keras.ops.convert_to_numpy(model(given))
        weights = model.get_weights()
        model.set_weights([2 * weight for weight in weights])
        found["moved"] = model.predict(given, verbose=0)
        model.set_weights(weights)
        if hasattr(model, "generate"):
            said["texts"] = [model.generate(PROMPTS, 6, **way) for way in WAYS]
            said["bfloat16"] = refusal(model.generate, PROMPTS, 6, cache_dtype="bfloat16")
        said["fit"] = refusal(model.fit, given, given)
        said["train_on_batch"] = refusal(model.train_on_batch, given, given)
        np.savez(path.with_suffix(".found.npz"), **found)
        path.with_suffix(".json").write_text(json.dumps(said))


@pytest.mark.skipif(BACKEND != "torch", reason="the same on every backend: saved once, by torch")
@pytest.mark.parametrize("other", ["numpy", "openvino"])
def test_same_numbers(other, tmp_path, request):
    if other == "openvino":
        pytest.importorskip("openvino", reason="the extra export is not installed")
    numbers = range(len(CASES)) if request.config.option.deep else QUICK
    cases = {number: Case(*CASES[number]) for number in numbers}
    for number, case in cases.items():
        case.model.save(tmp_path / f"{number}.keras")
        flat = {}
        for i, given in enumerate(inputs_of(case)):
            given = given if case.is_seq2seq else {"ids": given}
            flat |= {f"{i} {name}": ids for name, ids in given.items()}
        np.savez(tmp_path / f"{number}.npz", **flat)
    there = {**os.environ, "KERAS_BACKEND": other}
    here = str(Path(__file__).parent)
    there["PYTHONPATH"] = os.pathsep.join([str(Path(here).parent), here])
    code = f"import test_inference_backends as tests; tests.child({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, case in cases.items():
        compare(case, other, tmp_path / str(number))


def compare(case, other, path):
    found = dict(np.load(path.with_suffix(".found.npz")))
    said = json.loads(path.with_suffix(".json").read_text())
    for number, given in enumerate(inputs_of(case)):
        expected = run(case.model, given)
        for way in "predict", "call":
            close(found[f"{number} {way}"], expected, 1e-5, f"{case.name} {way} {number}")
    assert np.abs(found["moved"] - expected).max() > 1e-3  # changed weights are seen
    for name in "fit", "train_on_batch":
        rule = "KERAS_BACKEND must be one of tensorflow, jax, torch"
        assert said[name] == f"{name} needs gradients: {rule}, got {other}"
    if "texts" in said:
        assert said["texts"] == [case.model.generate(PROMPTS, 6, **way) for way in WAYS]
        rule = "on openvino a cache and outputs must not be bfloat16, got bfloat16"
        expected = case.model.generate(PROMPTS, 6, cache_dtype="bfloat16")
        assert said["bfloat16"] == (rule if other == "openvino" else repr(expected))
