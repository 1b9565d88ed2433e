"""Recipes that go on from a checkpoint, on tiny ones: search, and --from of the others."""

import importlib.util
import json
import sys
from pathlib import Path

import foreign
import numpy as np
import pytest
from support import config, randomize

import kformer
from kformer.interop.tokenizers import read_tokenizer

RECIPES = Path(__file__).parent.parent / "recipes"


def load(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch, name, *flags):
    monkeypatch.setattr(sys, "argv", [f"recipes/{name}.py", *map(str, flags)])
    load(name).main()


def exported(folder, kind, task, **changes):
    """A checkpoint with a tokenizer."""
    tokenizer = read_tokenizer(foreign.save(kind, folder / kind))
    given = dict(vocabulary_size=tokenizer.vocabulary_size, pad_id=tokenizer.pad_id, max_length=64)
    model = task(config(**given, **changes), tokenizer=tokenizer)
    randomize(model)
    kformer.to_hf(model, folder / "checkpoint")
    return model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """BERT's folder and the model in it."""
    folder = tmp_path_factory.mktemp("encoder")
    parts = dict(norm_placement="post", position="learned", activation="gelu", token_types=2)
    model = exported(folder, "bert", kformer.Encoder, embedding_norm=True, pooler=True, **parts)
    return folder / "checkpoint", model


def test_search(encoder, tmp_path, monkeypatch, capsys):
    folder, model = encoder
    lines = ["the quick brown fox", "hello, world", "", "manzanas en el jardín", "  ", "a comment"]
    (tmp_path / "notes.txt").write_text("\n".join(lines), encoding="utf-8")
    flags = ["--from", folder, "--file", tmp_path / "notes.txt", "--cache", tmp_path / "cache"]
    run(monkeypatch, "search", "hello, world", "a fox", "--top", 2, *flags)
    first = capsys.readouterr().out
    assert "4 texts, read once and kept in" in first
    assert f"1.000  {tmp_path}/notes.txt:2  hello, world" in first and first.count("0.") >= 3
    run(monkeypatch, "search", "hello, world", "a fox", "--top", 2, *flags)
    assert capsys.readouterr().out in first, "from the cache"
    vectors = kformer.embed(model, [line for line in lines if line.strip()], max_length=64)
    (kept,) = (tmp_path / "cache").glob("*.npy")
    np.testing.assert_allclose(np.load(kept), vectors, atol=1e-6)
    run(monkeypatch, "search", "fox", "--by", "paragraph", *flags)
    assert ":1  the quick brown fox hello, world" in capsys.readouterr().out


def test_what_search_reads():
    search = load("search")
    texts = dict(search.read_documentation())
    assert {"csv.DictReader", "json", "sys.getsizeof", "len", "math.gcd"} & set(texts)
    assert len(texts) > 3000 and not any(name.startswith("_") for name in texts)
    assert search.shown("a\n b" * 50).startswith("a ba b") and len(search.shown("x" * 99)) == 72


def test_what_search_refuses(tmp_path, monkeypatch, capsys):
    search = load("search")
    monkeypatch.setattr(search, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install no-such-package, or --from PATH"):
        search.default_model()
    (tmp_path / "empty.txt").write_text(" \n\n")
    for flags, message in (
        (["x", "--top", 0], "--top must be a whole number of at least 1, got 0"),
        (["x", "--from", tmp_path, "--file", tmp_path / "empty.txt"], "must hold some text"),
        (["x", "--from", tmp_path, "--file", tmp_path / "none"], "--file must be a file, got no"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, "search", *flags)
        assert message in capsys.readouterr().err


def test_classify_from(encoder, tmp_path, monkeypatch, capsys):
    folder, model = encoder
    for name, number in (("train", 24), ("val", 6), ("test", 6)):
        rows = [
            f"{'fox' if i % 2 else 'dog'}\tthe {('dog', 'fox')[i % 2]} {i}" for i in range(number)
        ]
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    flags = ["--data", tmp_path, "--from", folder, "--epochs", 1, "--out", tmp_path / "run"]
    run(monkeypatch, "classify", *flags)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["parameters"] > model.count_params() and 0 <= metrics["test_accuracy"] <= 1
    import keras

    saved = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert saved.tokenizer == model.tokenizer and saved.class_names == ["dog", "fox"]
    row = saved.tokenizer.encode("the fox", special=True)
    np.testing.assert_allclose(saved.classify(["the fox"]), saved.classify([row]), atol=1e-6)
    with pytest.raises(SystemExit):
        run(monkeypatch, "classify", "--from", folder, "--pretrain", 1)
    assert "--from needs no pretraining, got --pretrain 1" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [[], ["--lora", 2]], ids=["whole", "lora"])
def test_language_model_from(tmp_path, monkeypatch, lora):
    if lora and not hasattr(kformer, "enable_lora"):
        pytest.skip("needs kformer.enable_lora")
    parts = dict(norm="rms", gated=True, activation="silu", use_bias=False, position="rotary")
    model = exported(tmp_path, "llama3", kformer.CausalLM, **parts)
    (tmp_path / "text.txt").write_text("\n\n".join(foreign.CORPUS))
    flags = ["--data", tmp_path / "text.txt", "--length", 32, "--batch-size", 4, "--steps", 2]
    flags += ["--from", tmp_path / "checkpoint", "--out", tmp_path / "run", *lora]
    run(monkeypatch, "language_model", *flags)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["parameters"] >= model.count_params() and metrics["validation_loss"] > 0
    assert (tmp_path / "run" / "model.keras").is_file()


def test_adapters_need_a_checkpoint(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "language_model", "--lora", 2)
    assert "--lora needs a model that has learned: --from PATH, got 2" in capsys.readouterr().err
