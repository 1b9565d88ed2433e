"""Weights that others trained and published, and what their own programs computed with them."""

import json
from pathlib import Path

import numpy as np
import pytest

import kformer
from kformer import backend

WEIGHTS = Path(__file__).parent.parent.parent / "shared" / "weights"
needs_weights = pytest.mark.skipif(
    not WEIGHTS.is_dir(), reason="needs ../shared/weights beside the project"
)


@needs_weights
def test_stories260k(tmp_path):
    """A Llama: its logits, and 200 greedy tokens, identical; exported and read again, the same."""
    model = kformer.from_hf(WEIGHTS / "stories260k")
    ids = json.loads((WEIGHTS / "stories260k" / "golden.json").read_text("utf-8"))["greedy_ids"]
    want = np.load(WEIGHTS / "stories260k" / "golden_logits.npy")
    found = backend.to_numpy(model(np.array([[1, *ids[:15]]])))[0]
    np.testing.assert_allclose(found, want, atol=2e-5, rtol=2e-5)
    assert model.generate([[1]], 200)[0] == ids and len(ids) == 200
    kformer.to_hf(model, tmp_path / "out")
    again = kformer.from_hf(tmp_path / "out")
    for mine, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(mine), backend.to_numpy(theirs))


@needs_weights
def test_gpt_nano_sort():
    """A GPT-2 that sorts letters: what comes out of every block."""
    model = kformer.from_hf(WEIGHTS / "gpt_nano_sort")
    golden = np.load(WEIGHTS / "gpt_nano_sort" / "golden.npz")
    logits, states = model(golden["ids"], return_hidden=True)
    states[3] = model.backbone.blocks[2](states[2])  # and not what the final norm makes of it
    for number in range(3):
        found = backend.to_numpy(states[number + 1])
        np.testing.assert_allclose(found, golden[f"block{number}"], atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(backend.to_numpy(logits), golden["logits"], atol=2e-5, rtol=2e-5)
