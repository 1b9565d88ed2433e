"""Files for other runtimes: the same numbers as the model, for any batch and length, or refused."""

import keras
import numpy as np
import pytest
from support import BACKEND, CASES, Case, case_ids, close, run

from kformer.models import exporting

FORMATS = [format for format, backend in exporting.WAYS if backend == BACKEND]
SIZES = (1, 1), (3, 5), (2, 12), (2, 150)  # none of them is the one that was traced
FIXED = 12  # a length for LiteRT
# Of every family of parts one, the quick way; `--deep` takes every case in every format.
QUICK = {
    "tensorflow": {
        "tf_saved_model": ["bert", "t5"], "openvino": ["experts"], "litert": ["gpt2", "marian"],
    },
    "jax": {"tf_saved_model": ["alibi", "t5", "llama"]},
    "torch": {"onnx": ["experts", "t5"], "openvino": ["bert", "qwen"], "torch": ["alibi"]},
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
def test_same_numbers(number, format, tmp_path, capsys):
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
