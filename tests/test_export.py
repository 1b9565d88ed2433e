"""Files for other runtimes: the same numbers as the model, for any batch and length, or refused."""

import importlib.util

import keras
import numpy as np
import pytest
from support import BACKEND, CASES, CONFIGS, Case, case_ids, close, config, make_model, run

import kformer
from kformer.models import exporting

FORMATS = [format for format, backend in exporting.WAYS if backend == BACKEND]
SIZES = (1, 1), (3, 5), (2, 12), (2, 150)  # none of them is the one that was traced
FIXED = 12  # a length for LiteRT
# Of every family of parts one, the quick way; `--deep` takes every case in every format.
QUICK = {
    "tensorflow": {
        "tf_saved_model": ["bert", "t5"], "openvino": ["experts"], "litert": ["marian"],
    },
    "jax": {"tf_saved_model": ["t5", "llama"]},
    "torch": {"onnx": ["marian"], "openvino": ["experts"], "torch": ["alibi"]},
}[BACKEND]  # fmt: skip


def pytest_generate_tests(metafunc):
    if "format" not in metafunc.fixturenames:
        return
    pairs, seen = [], set()
    for number, (_, name, _) in enumerate(CASES):
        quick = [format for format in FORMATS if name in QUICK[format] and name not in seen]
        seen.add(name)
        pairs += [(number, f) for f in (FORMATS if metafunc.config.option.deep else quick)]
    names = [f"{case_ids(number)}-{format}" for number, format in pairs]
    metafunc.parametrize("number, format", pairs, ids=names)


def arrays(case, rows, length):
    """Ids by the names of the inputs, with padding on the right of one row and the left of one."""
    limit = case.config.max_length if case.config.position == "learned" else length
    length = min(length, limit)
    found = {"ids": case.ids(rows, length)}
    if case.is_seq2seq:
        longer = length if length == FIXED else length + 2
        found = {"target": found["ids"], "source": case.source(rows, longer)}
    for ids in found.values():
        ids[0, max(1, length // 2) :] = case.config.pad_id
        ids[-1, : length // 3] = case.config.pad_id
    return found


def runner(path, format):
    """A function of {name: array} that runs a file."""
    if format == "tf_saved_model":
        import tensorflow as tf

        loaded = tf.saved_model.load(path)
        return lambda x: np.asarray(loaded.serve(x if len(x) > 1 else x["ids"]))
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return lambda x: session.run(None, x)[0]
    if format == "openvino":
        import openvino

        exact = {"INFERENCE_PRECISION_HINT": "f32"}
        model = openvino.Core().compile_model(path, "CPU", exact)
        return lambda x: model(x)[0]
    if format == "litert":
        import tensorflow as tf

        signature = tf.lite.Interpreter(path).get_signature_runner()
        return lambda x: next(iter(signature(**x).values()))
    import torch

    module = torch.export.load(path).module()
    return lambda x: module(*(torch.from_numpy(x[name]) for name in sorted(x))).detach().numpy()


@pytest.mark.filterwarnings("ignore")  # of the other runtimes
def test_same_numbers(number, format, tmp_path, capsys, request, monkeypatch):
    name = CASES[number][1]
    if not request.config.option.deep:  # one layer is written as two are
        monkeypatch.setitem(CONFIGS, name, CONFIGS[name].replace(num_layers=1))
    case = Case(*CASES[number])
    path = tmp_path / f"model{exporting.ENDINGS[format]}"
    if (format, BACKEND) == ("tf_saved_model", "jax") and case.config.num_experts:
        with pytest.raises(ValueError, match="num_experts must be 0 .* got num_experts=4"):
            case.model.export(path, format)
        return
    signature = None
    if format == "litert":
        names = ("source", "target") if case.is_seq2seq else ("ids",)
        signature = {name: keras.InputSpec("int32", (None, FIXED), name=name) for name in names}
        signature = [signature if case.is_seq2seq else signature["ids"]]
    before = case.run(case.ids())
    case.model.export(path, format, input_signature=signature)
    assert f"Saved {format} at {path}" in capsys.readouterr().out
    beside = [path.name, "model.bin"] if format == "openvino" else [path.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(beside)  # and nothing else
    call = runner(str(path), format)
    for rows, length in SIZES if format != "litert" else [(1, FIXED), (3, FIXED)]:
        given = arrays(case, rows, length)
        expected = run(case.model, given if case.is_seq2seq else given["ids"])
        close(call(given), expected, 1e-5, f"{rows} rows of {length}")
    close(case.run(case.ids()), before, 0)  # the model is as it was


@pytest.mark.filterwarnings("ignore")
def test_signature_with_a_mask(tmp_path):
    """Whatever the model takes can be the file's inputs: here a mask and types beside the ids."""
    model = make_model("Encoder", config(num_layers=1, hidden_dim=8, num_heads=2, token_types=2))
    kinds = dict(ids="int32", padding_mask="bool", token_types="int32")
    signature = {
        name: keras.InputSpec(kind, (None, None), name=name) for name, kind in kinds.items()
    }
    format = {"torch": "torch"}.get(BACKEND, "tf_saved_model")
    path = tmp_path / f"model{exporting.ENDINGS[format]}"
    model.export(path, format, verbose=False, input_signature=signature)
    random = np.random.default_rng(0)
    given = {name: random.integers(0, 2, (3, 7)).astype(kind) for name, kind in kinds.items()}
    given["padding_mask"][:, 0] = True
    close(runner(str(path), format)(given), run(model, given), 1e-5)


@pytest.fixture(scope="module")
def small():
    return make_model("CausalLM", config(num_layers=1, hidden_dim=8, num_heads=2))


def test_refusals(small, tmp_path, monkeypatch):
    """One line that names the rule, and nothing is written."""

    def refused(match, model, name, format, **arguments):
        with pytest.raises(ValueError, match=match) as error:
            model.export(tmp_path / name, format, **arguments)
        assert "\n" not in str(error.value) and not list(tmp_path.iterdir())

    refused("format must be one of tf_saved_model, onnx, .* got 'gguf'", small, "m", "gguf")
    refused("filepath must end in '.onnx' for 'onnx', got .*m.bin'", small, "m.bin", "onnx")
    for format, ending in exporting.ENDINGS.items():
        if format not in FORMATS:
            rule = f"'{format}' must be written with KERAS_BACKEND=.*, got {BACKEND}"
            refused(rule, small, f"m{ending}", format)
    format = FORMATS[0]
    name = f"m{exporting.ENDINGS[format]}"
    wrong = dict(input_signature={"source": keras.InputSpec("int32", (None, None))})
    refused("inputs must have the key 'ids', got \\['source'\\]", small, name, format, **wrong)
    wrong = dict(input_signature=[keras.InputSpec("int32", (None,))])
    refused("ids must have shape \\(batch, length\\), got shape", small, name, format, **wrong)
    if BACKEND == "tensorflow":
        any_length = dict(input_signature=keras.InputSpec("int32", (None, None)))
        rule = "lengths must be fixed for 'litert', got shape \\(None, None\\)"
        refused(rule, small, "m.tflite", "litert", **any_length)
    if BACKEND == "jax":
        experts = kformer.CausalLM(config(num_layers=1, num_experts=2, experts_per_token=1))
        refused("num_experts must be 0 .*, got num_experts=2", experts, "m", "tf_saved_model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for format in FORMATS:
        libraries, extra = exporting.WAYS[format, BACKEND]
        for library in libraries[:1]:
            rule = f"'{format}' on {BACKEND} takes {library}: pip install 'kformer\\[{extra}\\]'"
            refused(rule, small, f"m{exporting.ENDINGS[format]}", format)


@pytest.mark.filterwarnings("ignore")
def test_old_file_stays(small, tmp_path, monkeypatch):
    """A failure while a file is written leaves the one that was there, and nothing else."""
    format = FORMATS[0]
    path = tmp_path / f"m{exporting.ENDINGS[format]}"
    path.write_text("old")

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(exporting.files, "put_in_place", broken)
    with pytest.raises(OSError, match="disk full"):
        small.export(path, format)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and path.read_text() == "old"


def test_default_signature(small):
    """Any batch and length, where the format has such axes."""
    assert exporting.default_signature(small, "onnx").shape == (None, None)
    assert exporting.default_signature(small, "litert").shape == (None, 32)
    pair = make_model("Seq2Seq", config(num_layers=1))
    shapes = {name: spec.shape for name, spec in exporting.default_signature(pair, "onnx").items()}
    assert shapes == {"source": (None, None), "target": (None, None)}
