"""Checkpoints: an interrupted run ends as an uninterrupted one, and nothing good is ever lost."""

import os
import signal
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import kformer
from kformer import backend
from kformer.training import checkpoints
from kformer.training.callbacks import HistoryFile, Limit, read_history, translation_scores

TEXTS = [f"the number {i} and {i * i}" for i in range(120)]
TOKENIZER = kformer.Tokenizer.train(TEXTS, 300)


def make_model(**changes):
    keras.utils.set_random_seed(0)
    small = dict(num_layers=1, hidden_dim=16, num_heads=2, dropout=0.1)
    config = kformer.Config(vocabulary_size=TOKENIZER.vocabulary_size, **{**small, **changes})
    model = kformer.CausalLM(config, tokenizer=TOKENIZER)
    model.compile(keras.optimizers.AdamW(1e-3, use_ema=True, ema_momentum=0.9))
    return model


def make_data(seed=0):
    return kformer.data.LanguageModelData(TEXTS, TOKENIZER, length=32, batch_size=8, seed=seed)


class Signal(keras.callbacks.Callback):
    """Sends a signal to this process at a certain step."""

    def __init__(self, step, number=signal.SIGINT):
        super().__init__()
        self.left, self.number = step, number

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


def values(model):
    return [backend.to_numpy(variable.value) for variable in model.variables]


def fit(directory, *callbacks, epochs=3, **kwargs):
    model, checkpoint = make_model(), kformer.callbacks.Checkpoint(directory, every=4, **kwargs)
    history = model.fit(make_data(), epochs=epochs, verbose=0, callbacks=[*callbacks, checkpoint])
    return model, history.history


def test_interrupted_is_uninterrupted(tmp_path):
    """Ctrl-C three times, in the middle of epochs: the same weights, averages and logs, exactly."""
    assert make_data().num_batches >= 4
    model = make_model()
    history = model.fit(make_data(), epochs=3, verbose=0).history
    for step in (2, 3, 4):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, Signal(step))
    again, rest = fit(tmp_path)
    for mine, other in zip(values(model), values(again), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert history["loss"][-1] == rest["loss"][-1]


def test_it_stops_in_the_middle_by_a_limit_and_goes_on(tmp_path):
    model = make_model()
    model.fit(make_data(), epochs=2, verbose=0, callbacks=[Limit(steps=7)])
    fit(tmp_path, Limit(steps=2))
    for _ in range(2):  # the second time there is nothing left to do
        again, _ = fit(tmp_path, Limit(steps=7), epochs=2)
        for mine, other in zip(values(model), values(again), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_batches_that_are_added_up_stay_together(tmp_path):
    def train(*callbacks):
        model = make_model()
        model.compile(keras.optimizers.SGD(0.1), accumulate=2)
        model.fit(make_data(), epochs=2, verbose=0, callbacks=list(callbacks))
        return model

    model = train()
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            train(Signal(step), kformer.callbacks.Checkpoint(tmp_path))
        assert int(checkpoints.folders(tmp_path)[0].name[5:]) % 2 == 0
    again = train(kformer.callbacks.Checkpoint(tmp_path))
    for mine, other in zip(values(model), values(again), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_an_epoch_of_so_many_steps_is_refused():
    with pytest.raises(ValueError, match="steps_per_epoch must be left out .* got 2"):
        make_model().fit(make_data(), steps_per_epoch=2, verbose=0)


def test_what_a_killed_process_left_is_swept(tmp_path):
    left = tmp_path / ".step-00000001.123.tmp"
    left.mkdir()
    fit(tmp_path, epochs=1)
    assert not left.exists()


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
import keras
from test_checkpoints import fit

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.steps_done = getattr(self.model, "steps_done", 0) + 1
        if self.model.steps_done == 6:
            os.kill(os.getpid(), 9)

fit({folder!r}, Kill())
"""


def test_killed_process_loses_only_the_steps_since(tmp_path):
    code = KILLED.format(tests=os.path.dirname(__file__), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-1000:]
    assert [f.name for f in checkpoints.folders(tmp_path)][0] in ("step-00000004", "step-00000005")
    model = make_model()
    model.fit(make_data(), epochs=3, verbose=0)
    again, _ = fit(tmp_path)
    for mine, other in zip(values(model), values(again), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_sigterm_saves_and_exits(tmp_path):
    with pytest.raises(SystemExit, match="143"):
        fit(tmp_path, Signal(3, signal.SIGTERM))
    assert checkpoints.folders(tmp_path)[0].name == "step-00000003"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest", "list", "keys", "missing"])
def test_a_damaged_one_is_passed_over(tmp_path, damage):
    fit(tmp_path)
    newest, older = checkpoints.folders(tmp_path)
    state, manifest = newest / "state.safetensors", newest / "manifest.json"
    content = bytearray(state.read_bytes())
    if damage == "truncate":
        state.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-100] ^= 1
        state.write_bytes(content)
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage in ("list", "keys"):
        manifest.write_text("[]" if damage == "list" else '{"format": 1}')
    else:
        state.unlink()
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged and was passed over"):
        folder, *_ = checkpoints.load_newest(tmp_path)
    assert folder == older


def test_what_is_not_finite_is_not_saved(tmp_path):
    model = make_model()
    model.fit(make_data(), epochs=1, verbose=0)
    checkpoints.save(tmp_path, model, None, dict(epoch=1, batch=0, step=1, seconds=0.0))
    model.weights[0].assign(np.full(model.weights[0].shape, np.nan))
    with pytest.raises(ValueError, match="must be finite to be saved, got NaN .* at step 2"):
        checkpoints.save(tmp_path, model, None, dict(epoch=1, batch=0, step=2, seconds=0.0))
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]


def test_another_model_or_other_data_are_refused(tmp_path):
    fit(tmp_path, epochs=1)
    checkpoint = kformer.callbacks.Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"must be of this model, got .* \[\d+, 32\] here"):
        make_model(hidden_dim=32).fit(make_data(), verbose=0, callbacks=[checkpoint])
    with pytest.raises(ValueError, match="must be of the same data and batches"):
        make_model().fit(make_data(seed=1), verbose=0, callbacks=[checkpoint])
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        kformer.callbacks.Checkpoint(tmp_path, every=0)
    with pytest.raises(ValueError, match="no checkpoint with resume=False, got .*step-0"):
        fit(tmp_path, resume=False)


def test_other_data_go_on_from_the_end_of_an_epoch(tmp_path):
    x = np.random.default_rng(0).integers(1, 200, (24, 9))

    def train(*callbacks, epochs=3):
        checkpoint = kformer.callbacks.Checkpoint(tmp_path)
        model = make_model()
        given = dict(batch_size=8, shuffle=False, epochs=epochs, verbose=0)
        model.fit(x[:, :-1], x[:, 1:], callbacks=[*callbacks, checkpoint], **given)
        return model

    with pytest.raises(KeyboardInterrupt):
        train(Signal(5))
    assert checkpoints.folders(tmp_path)[0].name == "step-00000003"
    assert int(train().optimizer.iterations) == 9


def test_limits_and_history(tmp_path):
    path = tmp_path / "history.csv"
    model = make_model()
    model.fit(make_data(), epochs=2, verbose=0, callbacks=[HistoryFile(path)])
    rows = read_history(path)
    assert [row["epoch"] for row in rows] == ["0", "1"]
    model.fit(make_data(), initial_epoch=1, epochs=3, verbose=0, callbacks=[HistoryFile(path)])
    again = read_history(path)
    assert [row["epoch"] for row in again] == ["0", "1", "2"] and again[0] == rows[0]
    model = make_model()
    model.fit(make_data(), epochs=2, verbose=0, callbacks=[Limit(minutes=1e-9)])
    assert int(model.optimizer.iterations) == 1
    with pytest.raises(ValueError, match="minutes must be above 0, got -1"):
        Limit(minutes=-1)


def test_translation_scores():
    """Several references for a text, fewer for another; a perfect translation has 100."""
    written = ["the cat sat on the mat", "a dog"]
    bleu, chrf = translation_scores(written, [["the cat sat on a mat", "the cat sat"], "a dog"])
    assert 0 < bleu.score < 100 and 0 < chrf.score <= 100
    perfect, _ = translation_scores(written, [[written[0], "x"], [written[1]]])
    assert perfect.score == pytest.approx(100.0)
    assert bleu.signature.startswith("nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    with pytest.raises(ValueError, match="got 1 sources and 2 references"):
        kformer.callbacks.TranslationScore(["a"], ["b", "c"])


def test_no_warnings_from_a_clean_directory(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.load_newest(tmp_path / "nothing") is None
