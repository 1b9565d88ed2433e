"""Values and gradients of every model against the float64 reference, on rows with padding,
with a row of nothing but padding, and with packed documents (P7)."""

import numpy as np
import pytest
from keras import ops
from support import CASES, case, case_ids, close, directional, run, weights_of

from kformer import backend

NUMBERS = range(len(CASES))


def batches(c):
    """Inputs by name: what a row can look like."""
    ids = c.ids()
    ragged = ids.copy()
    pad = c.config.pad_id
    ragged[0, 5:], ragged[1, :3] = pad, pad
    empty = ragged.copy()
    empty[2] = pad
    yield "full", c.wrap(ids)
    yield "ragged", c.wrap(ragged, source=c.pad(c.source()[:, 2:], right=2))
    yield "empty row", c.wrap(empty)
    if c.per_token:
        segments = np.array([[1] * 3 + [2] * 5, [1] * 4 + [2] * 2 + [0] * 2, [1] * 8], "int32")
        packed = {"ids": ids, "segments": segments}
        yield "packed", c.wrap(packed)
    if c.kind == "CausalLM":
        yield "prefix", {"ids": ragged, "prefix": np.array([3, 2, 0], "int32")}
    if c.config.token_types:
        types = (np.arange(ids.size).reshape(ids.shape) % 2).astype("int32")
        yield "types", {"ids": ids, "token_types": types}


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_values(number):
    c = case(number)
    for name, inputs in batches(c):
        close(run(c.model, inputs), c.reference(inputs), 1e-5, name)


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_hidden_states(number):
    c = case(number)
    out, states = run(c.model, c.wrap(c.ids()), return_hidden=True)
    close(out, c.run(c.ids()), 1e-6)
    groups = states.values() if isinstance(states, dict) else [states]
    for group in groups:
        layers = c.config.num_layers
        assert len(group) == layers + 1 and all(s.shape[-1] == c.config.hidden_dim for s in group)


@pytest.mark.parametrize("number", NUMBERS, ids=case_ids)
def test_gradients(number):
    c = case(number)
    ids = c.ids()
    ids[0, 5:], ids[2] = c.config.pad_id, c.config.pad_id
    inputs = c.wrap(ids)
    shape = c.reference(inputs).shape
    direction = np.random.default_rng(1).normal(size=shape)

    def loss(model, *_):
        out = model(inputs, training=False)
        return ops.sum(out * ops.convert_to_tensor(direction.astype("float32")))

    _, found, _ = backend.gradients(loss, c.model)
    variables = c.model.trainable_variables
    gradients = {v.path: g for v, g in zip(variables, found, strict=True)}
    assert all(np.isfinite(g).all() for g in gradients.values())
    directional(
        lambda w: (c.reference(inputs, w) * direction).sum(), weights_of(c.model), gradients
    )
