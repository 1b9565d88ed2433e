"""Speculative decoding: whoever guesses, the outcome is the same."""

import keras
import numpy as np
import pytest
from support import CONFIGS, make_model
from writers import PROMPTS, WRITERS, make_writer, talker, writer

import kformer
from kformer.generation import asking, loop


def drafts(kind, name):
    """Who guesses: the text itself, a small model that knows nothing, the model itself."""
    model = writer(kind, name)
    small = model.config.replace(num_layers=1, num_encoder_layers=1 if model.has_source else None)
    return model, ("lookup", make_model(kind, small, seed=1), model)


@pytest.mark.parametrize("kind, name", WRITERS)
def test_p15_guesses_change_nothing(kind, name):
    """Rows of unequal length, with scores, as without guesses."""
    model, guessing = drafts(kind, name)
    ids, log_probs, scores = model.generate(PROMPTS, 14, return_scores=True)
    for draft in guessing if name in ("alibi", "marian") else guessing[1:2]:
        found = model.generate(PROMPTS, 14, return_scores=True, draft=draft, guesses=3)
        assert found[0] == ids
        np.testing.assert_allclose(found[2], scores, atol=1e-4)
        for one, other in zip(found[1], log_probs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_p15_p17_guesses_do_not_change_draws():
    """Not only the distribution is the same: every draw is."""
    model, guessing = drafts("CausalLM", "alibi")
    several = dict(num_return_sequences=2, repetition_penalty=1.3)
    order = guessing[0], guessing[2], guessing[1]
    for draft, options in zip(order, (
        dict(temperature=1.3, top_p=0.9, seed=5, **several), dict(temperature=2.0, seed=1),
        dict(no_repeat_ngram=2, stop=[7, 9], min_new_tokens=4),
    ), strict=True):  # fmt: skip
        expected = model.generate(PROMPTS, 12, **options)
        assert model.generate(PROMPTS, 12, **options, draft=draft, guesses=2) == expected, options


@pytest.mark.parametrize("name", ["alibi"])
def test_guesses_across_chunks_and_slots_that_grow(name, monkeypatch):
    model, guessing = drafts("CausalLM", name)
    options = dict(temperature=1.2, seed=4)
    expected = model.generate(PROMPTS, 24, **options)
    monkeypatch.setattr(loop, "LEAST_SLOTS", 8)
    monkeypatch.setattr(loop, "CHUNK", 3)
    for draft in guessing[1:]:
        assert model.generate(PROMPTS, 24, **options, draft=draft, guesses=2) == expected


def test_right_guesses_come_at_once():
    """A draft that is always right gives guesses + 1 tokens at a time; the lookup does where a
    text repeats; nothing is compiled anew for other prompts or settings."""
    model = make_writer("CausalLM", "llama")
    request = asking.Request(model, 30, draft=model, guesses=3, stop=None)
    request.stop_ids = []
    decoding = request.begin(model.prepared(PROMPTS), range(4), 4)
    assert decoding.place - decoding.first == 1
    decoding.advance(1)
    assert decoding.place - decoding.first == 5
    assert kformer.compilations(model) == {"prefill": 1, "decode": 1}
    for seed in range(3):
        model.generate(PROMPTS, 5 + seed, draft=model, guesses=3, stop=[seed + 4])
    assert kformer.compilations(model) == {"prefill": 1, "decode": 1}
    alphabet = talker()
    ids = alphabet.tokenizer.encode("abcdefghijabcde")
    request = asking.Request(alphabet, 20, draft="lookup", guesses=4)
    decoding = request.begin(alphabet.prepared([ids]), [0], 1)
    decoding.advance(1)
    assert decoding.place - decoding.first == 6
    assert alphabet.tokenizer.decode(decoding.texts()[0]) == "fghijk"


def test_bad_drafts():
    model = writer("CausalLM", "llama")
    other = make_model("CausalLM", CONFIGS["llama"].replace(vocabulary_size=30))
    for draft, message in [
        ("guess", 'draft must be "lookup" or a model, got .guess.'),
        (other, r"draft must have the vocabulary of the model, 23 ids, got \(30, 30\)"),
        (writer("Seq2SeqLM", "t5"), "draft must be a model that writes as a CausalLM does"),
        (keras.layers.Dense(3), "draft must be a model that writes as a CausalLM does"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(PROMPTS, 4, draft=draft)
    with pytest.raises(ValueError, match="draft needs num_beams=1, got 2"):
        model.generate(PROMPTS, 4, draft="lookup", num_beams=2)
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_length": 8}
    stretched = make_model("CausalLM", CONFIGS["llama"].replace(rotary_scaling=scaling))
    with pytest.raises(ValueError, match="rotary scaling that knows no length, got 'dynamic'"):
        stretched.generate(PROMPTS, 4, draft="lookup")
    with pytest.raises(ValueError, match="guesses must be a whole number of at least 1, got 0"):
        model.generate(PROMPTS, 4, draft="lookup", guesses=0)
