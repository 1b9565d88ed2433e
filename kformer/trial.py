"""Two runs of a model that must agree, and the first sub-layer in which they do not.

Letters: B batch, T tokens.
"""

import contextlib
import functools

import keras
import numpy as np
from keras import ops

from kformer import backend

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


class Trial:
    """A model, ids to try it on, and the comparison of two runs.

    Attributes:
        rounding: how much of its largest output a right model may differ by in two runs.
        moves: how far the outputs move when all tokens change. A law says nothing about a model
            whose outputs hardly depend on its tokens.
    """

    def __init__(self, model, vocabulary_size, causal, pad_id, length, inputs):
        self.model, self.length = model, length
        config = getattr(model, "config", None)
        self.config = config if hasattr(config, "pad_id") else None
        self.pad_id = pad_id
        if pad_id == "auto":
            self.pad_id = self.config.pad_id if self.config else 0
        self.size = vocabulary_size or self.guess_size()
        self.has_source = inputs is None and hasattr(model, "target_tokenizer")
        self.source = self.draw_source() if self.has_source else None
        self.inputs = inputs
        used = {self.pad_id} | ({self.config.bos_id} if self.config else set())
        self.pool = np.array([i for i in range(self.size) if i not in used])
        if len(self.pool) < 2:
            raise ValueError(f"vocabulary_size must leave two ids to try, got {self.size}")
        self.ids = self.draw(0, (3, length))
        self.out, self.calls = self.look_inside(self.ids, None, outputs_of_layers)
        self.per_token = self.out.ndim == 3
        self.causal = self.guess_causal() if causal is None else causal
        self.rounding = self.guess_rounding()
        other, _ = self.look_inside(self.draw(5, (3, length)), None, no_notes)
        self.moves = distance(self.out, other)
        self.noise = float(self.rounding * np.abs(np.nan_to_num(self.out)).max(initial=0.0))

    def draw(self, seed, shape):
        return np.random.default_rng(seed).choice(self.pool, shape).astype("int32")

    def draw_source(self):
        high = max(self.config.vocabulary_size, 2)
        ids = [i for i in range(high) if i != self.pad_id]
        return np.random.default_rng(1).choice(ids, (1, self.length)).astype("int32")

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

    def guess_rounding(self):
        """By the lowest precision in which any of the layers computes."""
        kinds = {layer.compute_dtype for layer in self.model._flatten_layers()}
        return max(1e-5, 8 * max(EPSILON.get(kind, 0.0) for kind in kinds))

    def wrap(self, ids, source=None):
        """ids as the model takes them."""
        if self.inputs is not None:
            return self.inputs(ids)
        if not self.has_source:
            return ids
        source = self.source if source is None else source
        return {"source": np.repeat(source, len(ids), 0), "target": ids}

    def look_inside(self, ids, source, notes):
        """The output, and what notes() collected about the sub-layers, as NumPy."""
        names = []

        def forward(model, inputs):
            with notes() as found:
                out = model(inputs, training=False)
            names[:] = [name for name, _ in found]
            return out, [tensor for _, tensor in found]

        out, tensors = backend.inference(forward, self.model, self.wrap(ids, source))
        found = [backend.to_numpy(tensor) for tensor in tensors]
        return backend.to_numpy(out), list(zip(names, found, strict=True))

    def compare(self, other, mine, theirs, source=None, tokens_only=False, exact=False):
        """The run of self.ids and that of other ids, or of another source:
        (do they agree, largest difference, path of the first sub-layer that differs).

        Args:
            other: ids of the other run.
            mine, theirs: (rows, columns) that must agree in the one and in the other; columns are
                cut where an output has one per token.
            source: of the other run; None = the same.
            tokens_only: outputs other than (B, T, ...) are not compared.
            exact: not even rounding may differ.
        """
        out, calls = self.look_inside(other, source, outputs_of_layers)
        pairs = [("", self.out), *self.calls], [("", out), *calls]
        difference, where = 0.0, ""
        for (path, x), (other_path, y) in zip(*pairs, strict=False):
            if path != other_path or (tokens_only and x.shape[1:2] != self.ids.shape[1:]):
                continue
            x, y = cut(x, self.ids, *mine), cut(y, other, *theirs)
            if x is None or y is None:
                continue
            if path and x.shape != y.shape:  # of another sequence, a source perhaps
                continue
            gap = distance(x, y)
            allowed = 0.0 if exact else self.rounding * np.abs(np.nan_to_num(x)).max(initial=0.0)
            if not path:
                difference = gap
                if gap <= allowed:
                    return True, gap, ""
            elif not gap <= allowed:
                where = path
                break
        return False, difference, where or "?"


def cut(x, ids, rows, columns):
    """Some rows of an output (B, ...), and their columns if it is (B, T, ...); None if neither."""
    if x.ndim < 2 or x.shape[0] != ids.shape[0]:
        return None
    x = x[rows]
    return x[:, columns] if x.ndim > 2 and x.shape[1] == ids.shape[1] else x


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
def no_notes():
    yield []


@contextlib.contextmanager
def outputs_of_layers():
    """Collects (path, output) of every layer that is called inside, innermost first."""
    calls = []

    def note_output(layer, call, args, kwargs):
        out = call(*args, **kwargs)
        if ops.is_tensor(out):
            calls.append((layer.path or layer.name, out))
        return out

    with instead_of_calling(note_output):
        yield calls


@contextlib.contextmanager
def indices_of_tables():
    """Collects (layer, indices) of every embedding that is asked for rows inside."""
    asked = []

    def note_indices(layer, call, args, kwargs):
        tables = getattr(layer, "input_dim", None) and args and not kwargs.get("reverse")
        if tables and ops.is_tensor(args[0]) and "int" in str(args[0].dtype):
            asked.append((layer, args[0]))
        return call(*args, **kwargs)

    with instead_of_calling(note_indices):
        yield asked
