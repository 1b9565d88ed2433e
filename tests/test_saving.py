"""Saving: the same numbers after loading, on any backend, and training goes on (P19, P37)."""

import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    CASES,
    Case,
    case_ids,
    close,
    config,
    exact,
    make_model,
    randomize,
    run,
)

import kformer
from kformer import backend

BACKENDS = ["tensorflow", "jax", "torch"]
LONG = ["CausalLM-qwen", "Seq2SeqLM-marian", "TextClassifier-bert"]  # 50 more steps, by SGD

# What another backend does with the files of this one, in a process of its own.
OTHER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_saving import NAMES, go_on
for name in NAMES:
    go_on(sys.argv[2], name)
"""
FIRST = {kind: f"{kind}-{name}" for kind, name, _ in reversed(CASES)}  # one case of every model
NAMES = sorted({*FIRST.values(), *LONG})
NUMBERS = {case_ids(number): number for number in range(len(CASES))}


def go_on(folder, name):
    """Load a model, note what it gives, train on, and write all that down."""
    data = np.load(f"{folder}/{name}.npz")
    x = {key[2:]: data[key] for key in data if key.startswith("x_")}
    x = x["ids"] if set(x) == {"ids"} else x
    model = keras.saving.load_model(f"{folder}/{name}.keras")
    out = {"predicted": model.predict(x, verbose=0)}
    slots = [backend.to_numpy(v).astype("float64").ravel() for v in model.optimizer.variables]
    out["slots"] = np.concatenate(slots)

    def loss(model, *_):
        y = keras.ops.convert_to_tensor(data["y"])
        return model.compute_loss(x, y, model(x, training=False), None)

    _, gradients, _ = backend.gradients(loss, model)
    out["gradients"] = np.concatenate([g.ravel() for g in gradients])
    model.run_eagerly = BACKEND == "tensorflow" and name not in LONG  # tracing takes long there
    model.fit(x, data["y"], batch_size=4, verbose=0, shuffle=False)
    out["trained"] = model.predict(x, verbose=0)
    if name in LONG:
        model.compile(keras.optimizers.SGD(0.01))
        steps = [model.train_on_batch(x, data["y"], return_dict=True) for _ in range(50)]
        out["losses"] = np.array([float(logs["loss"]) for logs in steps])
    np.savez(f"{folder}/{name}_{BACKEND}.npz", **out)


def save_all(folder):
    """Every model, trained for two steps and saved here, with its inputs and outputs.

    Weights are half as large as elsewhere in the tests. The hidden states of a model are then not
    much larger than its outputs; where they are, their rounding alone is more than 1e-6 of an
    output: up to 1.4e-6 between any backend and the float64 reference, with gated layers.
    """
    for name in NAMES:
        c = Case(*CASES[NUMBERS[name]])
        randomize(c.model, scale=0.1)
        x = c.wrap(c.ids(4))
        y = c.ids(4, seed=2) % 3 if c.per_token else np.arange(4) % 3
        model, loss = c.model, None
        if c.kind in ("Encoder", "Decoder", "Seq2Seq"):
            loss, y = "mse", np.random.default_rng(0).normal(size=model(x).shape).astype("float32")
        model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-4), loss)
        with warnings.catch_warnings():  # an encoder's pooler is part of no loss on hidden states
            warnings.filterwarnings("ignore", "Gradients do not exist for variables .*pooler")
            model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        model.save(folder / f"{name}.keras")
        flat = {f"x_{k}": v for k, v in (x if isinstance(x, dict) else {"ids": x}).items()}
        np.savez(folder / f"{name}.npz", y=y, **flat)
        np.savez(folder / f"{name}_saved.npz", predicted=model.predict(x, verbose=0))


def test_p19_p37_headline_7_any_backend_goes_on(tmp_path):
    """Saved here, loaded there: outputs, gradients, optimizer slots, one more epoch, 50 steps.

    Each backend's run does this for all three, so all nine pairs are tried.
    """
    save_all(tmp_path)
    for other in BACKENDS:
        env = {**os.environ, "KERAS_BACKEND": other, "TF_CPP_MIN_LOG_LEVEL": "3"}
        line = [sys.executable, "-c", OTHER, os.path.dirname(__file__), str(tmp_path)]
        done = subprocess.run(line, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{other}: {done.stderr[-2000:]}"
    for name in NAMES:
        for other in BACKENDS:
            compare(tmp_path, name, other)


def compare(folder, name, other):
    what = f"{name} on {other}"
    saved = np.load(folder / f"{name}_saved.npz")["predicted"]
    mine, found = (np.load(folder / f"{name}_{b}.npz") for b in (BACKEND, other))
    exact(mine["predicted"], saved, what)
    close(found["predicted"], saved, 1e-6, what)
    exact(found["slots"], mine["slots"], what)
    scale = np.abs(mine["gradients"]).max()
    close(found["gradients"] / scale, mine["gradients"] / scale, 1e-6, what)
    close(found["trained"], mine["trained"], 1e-4, what)
    if name in LONG:
        close(found["losses"], mine["losses"], 1e-4, what)
        assert found["losses"][-1] < found["losses"][0], what


@pytest.mark.parametrize("number", range(len(CASES)), ids=case_ids)
def test_p19_same_backend(number, tmp_path):
    c = Case(*CASES[number])
    c.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    inputs = c.wrap(c.ids())
    exact(run(loaded, inputs), run(c.model, inputs))
    c.model.save_weights(tmp_path / "model.weights.h5")
    fresh = make_model(c.kind, c.config, seed=9, **c.arguments)
    assert (run(fresh, inputs) != run(loaded, inputs)).any()
    fresh.load_weights(tmp_path / "model.weights.h5")
    exact(run(fresh, inputs), run(loaded, inputs))


def test_p21_b14_weights_of_another_configuration(tmp_path):
    """Tied into untied, untied into tied, more layers into fewer: all are errors."""
    tied, untied = (make_model("CausalLM", config(tie_embeddings=t)) for t in (True, False))
    deep = make_model("CausalLM", config(num_layers=3))
    path = tmp_path / "model.weights.h5"
    tied.save_weights(path)
    before = backend.to_numpy(untied.head.kernel).copy()
    with pytest.raises(ValueError, match="head' expected 1 variables, but received 0"):
        untied.load_weights(path)
    exact(backend.to_numpy(untied.head.kernel), before)
    size = len(tied.weights)
    untied.save_weights(path)
    with pytest.raises(ValueError, match=rf"has {size} weights, the file {size + 1}; .*\['head'\]"):
        tied.load_weights(path)
    tied.load_weights(path, skip_mismatch=True)
    deep.compile()
    deep.fit(np.ones((2, 4), int), np.ones((2, 4), int), verbose=0)
    deep.save_weights(path)
    with pytest.raises(ValueError, match=f"has {size} weights, the file {len(deep.weights)}"):
        tied.load_weights(str(path))
    deep.load_weights(path)


def test_compile_survives(tmp_path):
    """Loss, metrics, schedule and accumulation come back, with the optimizer's public name."""
    model = make_model("CausalLM", config())
    schedule = kformer.schedules.WarmupCosine(1e-3, 2, 10)
    loss = kformer.losses.TokenCrossentropy(0.1, ignore_id=0)
    model.compile(keras.optimizers.AdamW(schedule), loss, accumulate=2)
    written = model.get_compile_config()
    assert written["optimizer"]["module"] == "keras.optimizers"
    ids = np.random.default_rng(0).integers(1, 23, (8, 9))
    model.fit(ids[:, :-1], ids[:, 1:], batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.accumulate == 2 and loaded.loss.label_smoothing == 0.1
    assert written["jit_compile"] == "auto" and loaded.jit_compile == model.jit_compile
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 2
    for m in (model, loaded):
        m.fit(ids[:, :-1], ids[:, 1:], batch_size=2, verbose=0, shuffle=False)
    for a, b in zip(model.trainable_variables, loaded.trainable_variables, strict=True):
        close(backend.to_numpy(a), backend.to_numpy(b), 1e-6)


def test_mixed_precision_comes_back(tmp_path):
    model = make_model("CausalLM", config(), dtype="mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    children = loaded._flatten_layers(include_self=False)
    assert all(c.compute_dtype == "bfloat16" for c in children)
    ids = np.ones((1, 4), "int32")
    exact(backend.to_numpy(loaded(ids)), backend.to_numpy(model(ids)))
