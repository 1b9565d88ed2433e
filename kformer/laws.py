"""`kformer.check(model)`: the laws that a transformer must keep, tried on any Keras model.

Each law compares two runs of the model that must agree. Where they do not, the outputs of all
sub-layers of both runs are compared in the order in which they were computed: the first that
differs is named.
"""

import contextlib
import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
from keras import ops

from kformer import backend


@dataclass
class Finding:
    """One law and how the model fared; `ok` is None where the law could not be tried."""

    law: str
    ok: bool | None
    difference: float = 0.0
    where: str = ""
    note: str = ""


@dataclass
class Report:
    """All findings; `.ok` if no law was broken, printed as a table."""

    findings: list = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(finding.ok is False for finding in self.findings)

    def __getitem__(self, law) -> Finding:
        return next(finding for finding in self.findings if finding.law == law)

    def __str__(self):
        rows = [("law", "", "difference", "first sub-layer that breaks it", "")]
        for f in self.findings:
            shown = f"{f.difference:.2g}" if not f.note or f.difference else ""
            verdict = {True: "ok", False: "BROKEN", None: "not tried"}[f.ok]
            rows.append((f.law, verdict, shown, f.where, f.note))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        ]
        broken = [f.law for f in self.findings if f.ok is False]
        verdict = f"broken: {', '.join(broken)}" if broken else "all laws hold"
        return "\n".join([*lines, verdict])


def check(
    model, vocabulary_size=None, causal=None, pad_id="auto", length=11, inputs=None, verbose=True
) -> Report:
    """Tries the laws of a transformer on a model that maps ids (B, T) to logits.

    Args:
        model: any Keras model. kformer's models need no further argument.
        vocabulary_size: ids are drawn below it; None = ask the model, or its first embedding.
        causal: whether later tokens must not matter; None = ask the model; for a foreign model,
            yes if it gives an output per token.
        pad_id: the id of padding, None if the model knows no padding.
        length: tokens of the trial rows.
        inputs: ids → what the model takes, if that is more than ids.
        verbose: print the table.
    Returns:
        a `Report`: `.ok`, and a finding for each law, also by name: report["no future leak"].
    """
    trial = Trial(model, vocabulary_size, causal, pad_id, length, inputs)
    report = Report([law(trial) for law in LAWS])
    if verbose:
        print(report)
    return report


class Trial:
    """A model, ids to try it on, and the comparison of two runs."""

    def __init__(self, model, vocabulary_size, causal, pad_id, length, inputs):
        self.model, self.length = model, length
        config = getattr(model, "config", None)
        self.config = config if hasattr(config, "pad_id") else None
        self.pad_id = pad_id
        if pad_id == "auto":
            self.pad_id = self.config.pad_id if self.config else 0
        self.size = vocabulary_size or self.guess_size()
        self.wrap = inputs or self.default_inputs()
        used = {self.pad_id} | ({self.config.bos_id} if self.config else set())
        self.pool = np.array([i for i in range(self.size) if i not in used])
        if len(self.pool) < 2:
            raise ValueError(f"vocabulary_size must leave two ids to try, got {self.size}")
        self.ids = self.draw(np.random.default_rng(0), (3, length))
        self.per_token = len(self.run(self.ids).shape) == 3
        self.causal = self.guess_causal() if causal is None else causal

    def draw(self, random, shape):
        return random.choice(self.pool, shape).astype("int32")

    def guess_size(self):
        if self.config is not None:
            return self.config.target_size
        for layer in self.model._flatten_layers():
            if getattr(layer, "input_dim", None):
                return layer.input_dim
        raise ValueError("vocabulary_size must be given: the model has no embedding, got None")

    def guess_causal(self):
        """kformer's models know; else whatever gives an output for every token."""
        if self.config is not None:
            return any(getattr(part, "causal", False) for part in self.model._flatten_layers())
        return self.per_token

    def default_inputs(self):
        if self.config is not None and hasattr(self.model, "target_tokenizer"):
            random = np.random.default_rng(1)
            low, high = 1, max(self.config.vocabulary_size, 2)
            source = random.integers(low, high, (1, self.length)).astype("int32")
            return lambda ids: {"source": np.repeat(source, len(ids), 0), "target": ids}
        return lambda ids: ids

    def run(self, ids):
        with backend.no_gradient():
            return backend.to_numpy(self.model(self.wrap(ids), training=False))

    def record(self, ids):
        """The output of the model, and the path and output of each sub-layer, in order."""
        with recording() as calls:
            out = self.run(ids)
        return out, calls

    def compare(self, law, first, second, pick_first, pick_second, tolerance):
        """Both runs must agree in the picked parts of their outputs, (B, T, ...) each."""
        a, calls = self.record(first)
        b, other_calls = self.record(second)
        difference = distance(pick_first(a), pick_second(b))
        if difference <= tolerance:
            return Finding(law, True, difference)
        where = "?"
        for (path, x), (other_path, y) in zip(calls, other_calls, strict=False):
            if path != other_path or not (self.fits(x, first) and self.fits(y, second)):
                continue
            if not distance(pick_first(x), pick_second(y)) <= tolerance:
                where = path
                break
        return Finding(law, False, difference, where)

    def fits(self, x, ids):
        return x.ndim >= 2 and x.shape[:2] == ids.shape if self.per_token else x.ndim >= 2


def distance(a, b):
    """Largest difference; infinite where one has a NaN that the other has not."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.astype("float64"), b.astype("float64")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, 0.0, np.abs(a - b))
    return float("inf") if np.isnan(gap).any() else float(gap.max(initial=0.0))


@contextlib.contextmanager
def instead_of_calling(function):
    """Every layer's call inside becomes function(layer, call, args, kwargs)."""
    original = keras.layers.Layer.__call__

    def called(layer, *args, **kwargs):
        return function(layer, functools.partial(original, layer), args, kwargs)

    keras.layers.Layer.__call__ = called
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = original


@contextlib.contextmanager
def recording():
    """Collects (path, output as NumPy) of every layer that is called inside, innermost first."""
    calls = []

    def note_output(layer, call, args, kwargs):
        out = call(*args, **kwargs)
        if ops.is_tensor(out) and backend.is_concrete(out):
            calls.append((layer.path or layer.name, backend.to_numpy(out)))
        return out

    with instead_of_calling(note_output):
        yield calls


def whole(x):
    return x


def deterministic(trial):
    return trial.compare("same twice, dropout off", trial.ids, trial.ids, whole, whole, 0.0)


def finite(trial):
    good = np.isfinite(trial.run(trial.ids)).all()
    return Finding("finite numbers", bool(good), 0.0 if good else float("inf"))


def no_future_leak(trial):
    law = "no future leak"
    if not trial.causal:
        return Finding(law, None, note="not causal")
    middle = trial.length // 2
    changed = trial.ids.copy()
    changed[:, middle:] = trial.draw(np.random.default_rng(2), changed[:, middle:].shape)
    early = lambda x: x[:, :middle]  # noqa: E731
    return trial.compare(law, trial.ids, changed, early, early, 1e-6)


def padding(trial, law, before, after):
    if trial.pad_id is None:
        return Finding(law, None, note="no padding id")
    if before and trial.config is not None and trial.config.bos_id == trial.pad_id:
        return Finding(law, None, note="decoding starts from the padding id")
    padded = np.pad(trial.ids, ((0, 0), (before, after)), constant_values=trial.pad_id)

    def inner(x):
        return x[:, before : before + trial.length] if trial.per_token else x

    return trial.compare(law, trial.ids, padded, whole, inner, 1e-5)


def right_padding(trial):
    return padding(trial, "padding on the right", 0, 5)


def left_padding(trial):
    return padding(trial, "padding on the left", 5, 0)


def batch(trial):
    law = "row alone = row in a batch"
    return trial.compare(law, trial.ids[1:2], trial.ids, whole, lambda x: x[1:2], 1e-5)


def packing(trial):
    """Two documents in one row, told apart by segments, against each by itself."""
    law = "packed = separate"
    if trial.config is None or not trial.per_token:
        return Finding(law, None, note="takes no segments")
    if isinstance(trial.wrap(trial.ids), dict):
        return Finding(law, None, note="more than one input")
    packed = {
        "ids": trial.ids.reshape(1, -1),
        "segments": np.repeat([[1, 2, 3]], trial.length, axis=1).astype("int32"),
    }
    with backend.no_gradient():
        out = backend.to_numpy(trial.model(packed, training=False))
    difference = distance(out.reshape(trial.run(trial.ids).shape), trial.run(trial.ids))
    return Finding(law, difference <= 1e-5, difference)


def position_table(trial):
    """A row longer than a table of positions must be refused before the table is asked."""
    law = "length past the table refused"
    tables = {
        layer.input_dim
        for layer in trial.model._flatten_layers()
        if getattr(layer, "input_dim", None) and layer.input_dim != trial.size
    }
    for rows in sorted(rows for rows in tables if rows <= 4096):
        ids = trial.draw(np.random.default_rng(3), (1, rows + 1))
        with watching_tables() as overruns:
            with contextlib.suppress(Exception):  # a backend may raise, another would be silent
                trial.run(ids)
        if overruns:
            note = f"index {overruns[0][1]} in a table of {rows} rows"
            return Finding(law, False, float("inf"), overruns[0][0], note)
    return Finding(law, True)


@contextlib.contextmanager
def watching_tables():
    """Collects (path, index) of embeddings that are asked for a row they do not have."""
    overruns = []

    def note_overrun(layer, call, args, kwargs):
        size = getattr(layer, "input_dim", None)
        if size and args and not kwargs.get("reverse") and backend.is_concrete(args[0]):
            index = backend.to_numpy(args[0])
            if index.dtype.kind in "iu" and index.size and index.max() >= size:
                overruns.append((layer.path or layer.name, int(index.max())))
        return call(*args, **kwargs)

    with instead_of_calling(note_overrun):
        yield overruns


def gradients_finite(trial):
    """Gradients of the mean square of the outputs, on rows with padding."""
    law = "gradients finite"
    ids = trial.ids.copy()
    if trial.pad_id is not None:
        ids[0, trial.length // 2 :] = trial.pad_id

    def loss(model, *_):
        out = ops.cast(model(trial.wrap(ids), training=False), "float32")
        return ops.mean(ops.square(out))

    _, found, _ = backend.gradients(loss, trial.model)
    for variable, gradient in zip(trial.model.trainable_variables, found, strict=True):
        if not np.isfinite(gradient).all():
            return Finding(law, False, float("inf"), variable.path)
    return Finding(law, True)


def save_and_load(trial):
    law = "saved = loaded"
    before = trial.run(trial.ids)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            trial.model.save(path)
            loaded = keras.saving.load_model(path, compile=False)
        except Exception as error:  # any failure to come back is what the law is about
            return Finding(law, False, float("inf"), note=str(error).strip().split("\n")[0][:80])
    with backend.no_gradient():
        after = backend.to_numpy(loaded(trial.wrap(trial.ids), training=False))
    difference = distance(before, after)
    return Finding(law, difference <= 1e-6, difference)


LAWS = (
    finite,
    deterministic,
    no_future_leak,
    right_padding,
    left_padding,
    batch,
    packing,
    position_table,
    gradients_finite,
    save_and_load,
)
