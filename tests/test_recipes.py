"""The recipes, small: what they leave behind, how they stop and go on, and the command kformer."""

import contextlib
import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from support import BACKEND

from kformer import cli, runs

ROOT = Path(__file__).parent.parent
SMALL = ["--num-layers", "1", "--hidden-dim", "16", "--num-heads", "2", "--intermediate-dim", "32"]
COLOURS = ["red", "green", "blue", "black", "white"]


def write_data(folder, kind):
    """A little data set in three files."""
    random = np.random.default_rng(0)
    for name, number in (("train", 60), ("val", 12), ("test", 12)):
        rows = []
        for _ in range(number):
            words = [COLOURS[i] for i in random.integers(0, 5, random.integers(2, 6))]
            text = " ".join(words)
            extra = {"pairs": " ".join(reversed(words)), "labels": words[0]}
            rows.append(f"{extra['labels']}\t{text}" if kind == "labels" else
                        f"{text}\t{extra['pairs']}")  # fmt: skip
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def command(name, *flags):
    return [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *map(str, flags)]


def run_recipe(name, *flags, code=0):
    done = subprocess.run(
        command(name, *flags), capture_output=True, text=True, env=environment(), timeout=600
    )
    assert done.returncode == code, done.stdout[-1500:] + done.stderr[-1500:]
    return done


def environment():
    return {**os.environ, "KERAS_BACKEND": BACKEND, "COVERAGE_PROCESS_START": ""}


FILES = {"model.keras", "config.json", "history.csv", "metrics.json", "curves.png", "report.md"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run of each recipe."""
    folder = tmp_path_factory.mktemp("runs")
    labels, pairs = folder / "labels", folder / "pairs"
    for path, kind in ((labels, "labels"), (pairs, "pairs")):
        path.mkdir()
        write_data(path, kind)
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 60)
    few = ["--epochs", 2, *SMALL]
    made = {
        "classify": ["--data", labels, "--vocabulary-size", 300, "--pretrain", 1, "--members", 2],
        "translate": ["--data", pairs, "--vocabulary-size", 300, "--beams", 2],
        "language_model": ["--data", folder / "text.txt", "--kind", "char", "--no-pack",
                           "--length", 32, "--batch-size", 4],
    }  # fmt: skip
    out = {}
    for name, flags in made.items():
        out[name] = folder / name
        out[f"{name} printed"] = run_recipe(name, *flags, *few, "--out", out[name]).stdout
    return out


def test_what_a_run_leaves_behind(finished):
    numbers = {
        "classify": {"test_accuracy", "macro_f1", "bag_of_words_accuracy"},
        "translate": {"bleu", "chrf", "exact_match", "bleu_signature", "chrf_signature"},
        "language_model": {"validation_loss", "perplexity", "bits_per_character"},
    }
    pictures = {"classify": ["confusion.png"], "translate": ["attention.png"], "language_model": []}
    for name, wanted in numbers.items():
        folder = finished[name]
        assert {p.name for p in folder.iterdir()} >= {*FILES, *pictures[name]}
        metrics = json.loads((folder / "metrics.json").read_text())
        assert set(metrics) >= {*wanted, "seconds", "parameters", "backend"}
        with open(folder / "history.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["epoch"] for row in rows] == ["0", "1"]
        assert all(np.isfinite(float(row["val_loss"])) for row in rows)
        report = (folder / "report.md").read_text()
        assert f"recipes/{name}.py --data" in report and "| seconds |" in report
        for picture in ["curves.png", *pictures[name]]:
            assert (folder / picture).stat().st_size > 5000 and f"({picture})" in report
        model = keras.saving.load_model(folder / "model.keras")
        assert model.tokenizer.vocabulary_size == model.config.vocabulary_size
        assert metrics["parameters"] == model.count_params()


def say(capsys, *words):
    code = cli.main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(finished, capsys, monkeypatch):
    code, out, _ = say(capsys, "classify", finished["classify"], "red blue", "--top", 2)
    names = [cell.split()[0] for cell in out.strip().split("\t")[:2]]
    assert code == 0 and set(names) <= set(COLOURS) and out.endswith("\tred blue\n")
    code, out, _ = say(capsys, "translate", finished["translate"], "red blue", "black")
    assert code == 0 and out.count("\n") == 2
    code, out, _ = say(capsys, "generate", finished["language_model"], "To be",
                       "--max-new-tokens", 5, "--seed", 0)  # fmt: skip
    assert code == 0 and out.startswith("To be") and len(out) > 6
    code, out, _ = say(capsys, "fill", finished["classify"], "red [MASK] blue", "--top", 2)
    assert code == 0 and len(out.splitlines()) == 2 and "[MASK]" not in out
    monkeypatch.setattr("sys.stdin", iter(["red blue\n", "green\n"]))
    code, out, _ = say(capsys, "classify", finished["classify"])
    assert code == 0 and [line.split("\t")[1] for line in out.splitlines()] == ["red blue", "green"]


def test_the_command_lists_and_checks(finished, capsys):
    code, out, _ = say(capsys, "presets")
    assert code == 0 and "nanogpt-cpu" in out and "gpt2" in out
    code, out, _ = say(capsys, "check", finished["language_model"])
    assert code == 0 and "no future leak" in out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("kformer 0.")


def test_errors_of_the_command_are_one_line(finished, tmp_path, capsys, monkeypatch):
    code, _, err = say(capsys, "classify", tmp_path, "text")
    assert code == 2 and err == f"kformer: RUN must hold model.keras, got nothing at {tmp_path}/model.keras\n"  # fmt: skip # noqa: E501
    code, _, err = say(capsys, "translate", finished["classify"], "text")
    assert code == 2 and err == "kformer: the model must be a Seq2SeqLM, got a TextClassifier\n"
    monkeypatch.setattr("sys.stdin", iter([]))
    code, _, err = say(capsys, "classify", finished["classify"])
    assert code == 2 and "TEXT must be given" in err
    (tmp_path / "model.keras").write_text("garbage")
    code, _, err = say(capsys, "classify", tmp_path, "text")
    assert code == 2 and "a model must be a .keras file that is whole, got" in err
    code, _, err = say(capsys, "classify", finished["classify"], "red", "--top", 0)
    assert code == 2 and "--top must be a whole number of at least 1, got 0" in err
    code, _, err = say(capsys, "fill", finished["classify"], "no gap")
    assert code == 2 and "text must have a [MASK], got 'no gap'" in err


def test_interrupted_and_resumed(tmp_path):
    """Ctrl-C in the middle, then --resume: the metrics of a run that was never stopped."""
    write_data(tmp_path, "pairs")
    flags = ["--data", tmp_path, "--vocabulary-size", 300, "--epochs", 40, "--batch-tokens", 64,
             "--score-texts", 2, "--beams", 1, *SMALL]  # fmt: skip
    whole = tmp_path / "whole"
    run_recipe("translate", *flags, "--out", whole)
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        command("translate", *flags, "--out", stopped),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while len(list(stopped.glob("checkpoints/step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and f"--resume --out {stopped}" in printed, printed[-1500:]
    assert not (stopped / "metrics.json").exists()
    run_recipe("translate", *flags, "--resume", "--out", stopped)
    mine, other = (json.loads((f / "metrics.json").read_text()) for f in (whole, stopped))
    for name in ("bleu", "chrf", "exact_match", "parameters"):
        assert mine[name] == other[name]
    losses = [
        [row["loss"] for row in runs.read_history(folder / "history.csv")]
        for folder in (whole, stopped)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 40


def refused(name, *flags):
    """The one line with which a recipe refuses its flags, in this process."""
    module = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    recipe = importlib.util.module_from_spec(module)
    module.loader.exec_module(recipe)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
        patch.setattr("sys.argv", [f"{name}.py", *map(str, flags)])
        with pytest.raises(SystemExit, match="2"):
            recipe.main()
    (line,) = err.getvalue().splitlines()
    return line


def test_errors_of_recipes_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused("classify", "--data", tmp_path / "nothing")
    assert line.startswith("error: data must be a file or a folder, got")
    (tmp_path / "bad.tsv").write_text("a label\ta text\nno tab\n")
    line = refused("classify", "--data", tmp_path / "bad.tsv", "--out", tmp_path / "out")
    assert "bad.tsv, line 2: a line must have 2 columns" in line
    line = refused("language_model", "--epochs", 0)
    assert line == "error: --epochs must be above 0, got 0"
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").write_text("")
    line = refused("translate", "--out", taken)
    assert line == f"error: --out must be a new folder, or --resume given, got {taken}"
    line = refused("translate", "--resume", "--out", taken)
    assert line == f"error: --resume needs a run that was begun in --out, got {taken}"


def test_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [runs.find_folder("translate", None, False).as_posix() for _ in range(2)]
    assert names == ["runs/translate", "runs/translate"]  # an empty one is free
    for number in ("", "-2"):
        (tmp_path / f"runs/translate{number}/checkpoints").mkdir(parents=True)
    assert runs.find_folder("translate", None, False).as_posix() == "runs/translate-3"
    assert runs.find_folder("translate", None, True).as_posix() == "runs/translate-2"


@pytest.mark.parametrize("kind", ["lstm", "lstm-attention"])
def test_recurrent_baselines(kind, tmp_path):
    write_data(tmp_path, "pairs")
    flags = ["--data", tmp_path, "--vocabulary-size", 300, "--steps", 3, "--beams", 2, *SMALL]
    run_recipe("translate", *flags, "--model", kind, "--out", tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["bleu"] >= 0 and (tmp_path / "run" / "tokenizer.json").is_file()


@pytest.mark.skipif(BACKEND == "tensorflow", reason="there it is the backend itself")
def test_recipes_do_without_tensorflow(tmp_path):
    code = (
        "import sys; from kformer import runs; "
        f"args = runs.parser('', model={{}}).parse_args(['--out', {str(tmp_path / 'run')!r}]); "
        "runs.Run('translate', args); print('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
