"""`kformer.check(model)`: the laws that a transformer must keep, tried on any Keras model.

Each law compares two runs of the model that must agree. Where they do not, the outputs of all
sub-layers of both runs are compared in the order in which they were computed: the first that
differs is named.
"""

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
from keras import ops

from kformer import backend
from kformer.trial import Trial, distance, indices_of_tables

ALL = slice(None)


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
        held, untried = (sum(f.ok is v for f in self.findings) for v in (True, None))
        verdict = f"broken: {', '.join(broken)}; " if broken else ""
        return "\n".join([*lines, f"{verdict}{held} laws hold, {untried} not tried"])


def check(
    model, vocabulary_size=None, causal=None, pad_id="auto", length=11, inputs=None, verbose=True
) -> Report:
    """Tries the laws of a transformer on a model that maps ids (B, T) to logits.

    Differences count against the size of the outputs and the precision of the layers.

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
    report = Report([Finding(name, *law(trial)) for name, law in LAWS.items()])
    if verbose:
        print(report)
    return report


# A law gives (ok, difference, where, note), shortened from the end.


def forward(model, inputs):
    return model(inputs, training=False)


def untried(note):
    return None, 0.0, "", note


def needs_movement(law):
    """A law about outputs that hardly depend on the tokens would hold for any model."""

    def tried(trial):
        if trial.moves <= 4 * trial.noise:
            return untried("outputs hardly depend on the tokens: train, or give larger weights")
        return law(trial)

    return tried


def finite(trial):
    good = bool(np.isfinite(trial.out).all())
    return good, 0.0 if good else float("inf")


def deterministic(trial):
    return trial.compare(trial.ids, (ALL, ALL), (ALL, ALL), exact=True)


@needs_movement
def no_future_leak(trial):
    if not (trial.causal and trial.per_token):
        return untried("not causal" if trial.per_token else "one output for a row")
    middle, changed = trial.length // 2, trial.ids.copy()
    changed[:, middle:] = trial.draw(2, changed[:, middle:].shape)
    early = ALL, slice(0, middle)
    return trial.compare(changed, early, early, tokens_only=True)


def padded(trial, ids, before, after):
    return np.pad(ids, ((0, 0), (before, after)), constant_values=trial.pad_id)


def padding(before, after):
    @needs_movement
    def law(trial):
        if trial.pad_id is None:
            return untried("no padding id")
        if before and trial.config is not None and trial.config.bos_id == trial.pad_id:
            return untried("decoding starts from the padding id")
        inner = ALL, slice(before, before + trial.length)
        longer = padded(trial, trial.ids, before, after)
        return trial.compare(longer, (ALL, ALL), inner)

    return law


@needs_movement
def source_padding(trial):
    """Padding of the source, on either side, must not reach the target's outputs."""
    if not trial.has_source or trial.pad_id is None:
        return untried("no source" if trial.pad_id is not None else "no padding id")
    for before, after in ((0, 5), (5, 0)):
        longer = padded(trial, trial.source, before, after)
        found = trial.compare(trial.ids, (ALL, ALL), (ALL, ALL), source=longer)
        if not found[0]:
            break
    return found


@needs_movement
def batch(trial):
    return trial.compare(trial.ids[1:2], (slice(1, 2), ALL), (ALL, ALL))


@needs_movement
def packing(trial):
    """Documents in one row, told apart by segments, against each by itself."""
    if trial.config is None or not trial.per_token:
        return untried("takes no segments")
    if trial.has_source or trial.inputs is not None:
        return untried("more than one input")
    packed = {
        "ids": trial.ids[:2].reshape(1, -1),
        "segments": np.repeat([[1, 2]], trial.length, axis=1).astype("int32"),
    }
    out = backend.to_numpy(backend.inference(forward, trial.model, packed))
    alone = trial.out[:2]
    difference = distance(out.reshape(alone.shape), alone)
    return difference <= trial.noise, difference


def position_table(trial):
    """A row longer than a table of positions must be refused before the table is asked."""
    _, asked = trial.look_inside(trial.ids, None, indices_of_tables)
    tables = {layer for layer, index in asked if not np.array_equal(index, trial.ids)}
    rows = sorted({layer.input_dim for layer in tables if layer.input_dim <= 4096})
    if not rows:
        return untried("no table of up to 4096 positions found")
    for size in rows:
        with indices_of_tables() as asked, contextlib.suppress(Exception), backend.no_gradient():
            ids = trial.draw(3, (1, size + 1))  # eagerly: a backend may raise, another be silent
            trial.model(trial.wrap(ids), training=False)
        for layer, index in asked:
            index = backend.to_numpy(index)
            if layer in tables and index.max() >= layer.input_dim:
                note = f"index {index.max()} in a table of {layer.input_dim} rows"
                return False, float("inf"), layer.path or layer.name, note
    return True, 0.0


def gradients_finite(trial):
    """Gradients of the mean square of the outputs, on rows with padding."""
    ids = trial.ids.copy()
    if trial.pad_id is not None:
        ids[0, trial.length // 2 :] = trial.pad_id

    def loss(model, *_):
        out = ops.cast(model(trial.wrap(ids), training=False), "float32")
        return ops.mean(ops.square(out))

    _, found, _ = backend.gradients(loss, trial.model)
    for variable, gradient in zip(trial.model.trainable_variables, found, strict=True):
        if not np.isfinite(gradient).all():
            return False, float("inf"), variable.path
    return True, 0.0


def save_and_load(trial):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        try:
            trial.model.save(path)
            loaded = keras.saving.load_model(path, compile=False)
        except Exception as error:  # any failure to come back is what the law is about
            return False, float("inf"), "", str(error).strip().split("\n")[0][:80]
    after = backend.inference(forward, loaded, trial.wrap(trial.ids))
    difference = distance(trial.out, backend.to_numpy(after))
    return difference <= trial.noise, difference


LAWS = {
    "finite numbers": finite,
    "same twice, dropout off": deterministic,
    "no future leak": no_future_leak,
    "padding on the right": padding(0, 5),
    "padding on the left": padding(5, 0),
    "padding of the source": source_padding,
    "row alone = row in a batch": batch,
    "packed = separate": packing,
    "length past the table refused": position_table,
    "gradients finite": gradients_finite,
    "saved = loaded": save_and_load,
}
