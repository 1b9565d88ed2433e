"""Saving: the same numbers after loading, on any backend, and training goes on (P19, P37)."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from support import BACKEND, CASES, Case, case_ids, close, config, exact, make_model

import kformer
from kformer import backend

BACKENDS = ["tensorflow", "jax", "torch"]
PAIRS = [("CausalLM", "llama"), ("Seq2SeqLM", "marian"), ("TextClassifier", "bert")]

# What another backend does with the files of this one, in a process of its own.
OTHER = """
import json, os, sys
import numpy as np, keras, kformer
folder = sys.argv[1]
report = {}
for name in json.load(open(os.path.join(folder, "names.json"))):
    data = np.load(os.path.join(folder, name + ".npz"))
    x = {k[2:]: data[k] for k in data if k.startswith("x_")}
    x = x["ids"] if set(x) == {"ids"} else x
    model = keras.saving.load_model(os.path.join(folder, name + ".keras"))
    out = {"predicted": model.predict(x, verbose=0)}
    to_numpy = keras.ops.convert_to_numpy
    slots = [np.array(to_numpy(v)) for v in model.optimizer.variables]
    out["slots"] = np.concatenate([s.astype("float64").ravel() for s in slots])
    model.fit(x, data["y"], batch_size=4, verbose=0, shuffle=False)
    out["trained"] = model.predict(x, verbose=0)
    model.compile(keras.optimizers.SGD(0.05))
    losses = [model.train_on_batch(x, data["y"], return_dict=True)["loss"] for _ in range(50)]
    out["losses"] = np.array([float(v) for v in losses])
    np.savez(os.path.join(folder, name + "_" + keras.backend.backend() + ".npz"), **out)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models trained for two steps and saved here, what they give, and their going on."""
    folder = tmp_path_factory.mktemp("models")
    expected = {}
    for kind, name in PAIRS:
        arguments = next(a for k, n, a in CASES if (k, n) == (kind, name))
        c = Case(kind, name, arguments)
        c.config = c.config.replace(num_layers=1)
        x = c.wrap(c.ids(4))
        y = c.ids(4, seed=2) % 3 if c.per_token else np.arange(4) % 3
        model = getattr(kformer, kind)(c.config, **arguments)
        model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-4))
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        model.save(folder / f"{name}.keras")
        flat = {f"x_{k}": v for k, v in (x if isinstance(x, dict) else {"ids": x}).items()}
        np.savez(folder / f"{name}.npz", y=y, **flat)
        predicted = model.predict(x, verbose=0)
        slots = [backend.to_numpy(v).astype("float64").ravel() for v in model.optimizer.variables]
        slots = np.concatenate(slots)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        trained = model.predict(x, verbose=0)
        model.compile(keras.optimizers.SGD(0.05))
        steps = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(50)]
        losses = np.array([float(v) for v in steps])
        expected[name] = dict(predicted=predicted, slots=slots, trained=trained, losses=losses)
    (folder / "names.json").write_text(json.dumps([name for _, name in PAIRS]))
    return folder, expected


@pytest.mark.parametrize("other", BACKENDS)
def test_p19_p37_headline_7_any_backend_goes_on(files, other):
    """Saved here, loaded there: outputs, optimizer slots, one more epoch, 50 steps of SGD.

    Each backend's run does this for all three, so all nine pairs are tried.
    """
    folder, expected = files
    env = {**os.environ, "KERAS_BACKEND": other, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", OTHER, str(folder)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for _, name in PAIRS:
        found = np.load(folder / f"{name}_{other}.npz")
        mine = expected[name]
        if other == BACKEND:
            exact(found["predicted"], mine["predicted"])
        scale = np.abs(mine["predicted"]).max()
        close(found["predicted"] / scale, mine["predicted"] / scale, 1e-6)
        exact(found["slots"], mine["slots"])
        close(found["trained"], mine["trained"], 1e-4)
        close(found["losses"], mine["losses"], 1e-4)
        assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("number", range(len(CASES)), ids=case_ids)
def test_p19_same_backend(number, tmp_path):
    c = Case(*CASES[number])
    c.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    inputs = c.wrap(c.ids())
    exact(backend.to_numpy(loaded(inputs)), backend.to_numpy(c.model(inputs)))
    c.model.save_weights(tmp_path / "model.weights.h5")
    fresh = make_model(c.kind, c.config, seed=9, **c.arguments)
    assert (backend.to_numpy(fresh(inputs)) != backend.to_numpy(loaded(inputs))).any()
    fresh.load_weights(tmp_path / "model.weights.h5")
    exact(backend.to_numpy(fresh(inputs)), backend.to_numpy(loaded(inputs)))


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
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 2
    for m in (model, loaded):
        m.fit(ids[:, :-1], ids[:, 1:], batch_size=2, verbose=0, shuffle=False)
    for a, b in zip(model.trainable_variables, loaded.trainable_variables, strict=True):
        close(backend.to_numpy(a), backend.to_numpy(b), 1e-6)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("kind", ["CausalLM", "Seq2SeqLM", "TextClassifier"])
def test_quantized_models_come_back(kind, tmp_path):
    arguments = {"num_classes": 3} if kind == "TextClassifier" else {}
    model = make_model(kind, config(), **arguments)
    ids = np.random.default_rng(0).integers(1, 23, (3, 8)).astype("int32")
    inputs = {"source": ids, "target": ids} if kind == "Seq2SeqLM" else ids
    model.quantize("int8")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    exact(backend.to_numpy(loaded(inputs)), backend.to_numpy(model(inputs)))


def test_mixed_precision_comes_back(tmp_path):
    model = make_model("CausalLM", config(), dtype="mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    children = loaded._flatten_layers(include_self=False)
    assert all(c.compute_dtype == "bfloat16" for c in children)
    ids = np.ones((1, 4), "int32")
    exact(backend.to_numpy(loaded(ids)), backend.to_numpy(model(ids)))
