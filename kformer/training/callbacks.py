"""Callbacks: checkpoints that lose nothing, and scores of what a model writes."""

import csv
import io
import math
import signal
import sys
import threading
import time
from pathlib import Path

import keras

from kformer import files
from kformer.config import check_whole
from kformer.training.checkpoints import folders, load_newest, restore, save

# What a process says of itself when a signal ended it.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Checkpoint(keras.callbacks.Callback):
    """Saves all that training needs to go on, and goes on from it.

        model.fit(data, epochs=10, callbacks=[kformer.callbacks.Checkpoint("run/checkpoints")])

    Run once more after an interruption, that line goes on where it stopped, in the middle of an
    epoch if need be: weights, optimizer, random streams, metrics so far and the order of the data
    are those of a run that was never interrupted. Within an epoch that needs a data set of
    `kformer.data`; with any other it goes on from the end of the last epoch.

    A checkpoint appears whole or not at all; the newest `keep` of them stay, each with the
    checksum of its contents, and the newest that is sound is used. Ctrl-C (or SIGTERM) ends the
    step, saves, and raises KeyboardInterrupt (or exits with 143); a second one ends at once.

    Args:
        directory: where checkpoints go; made if need be.
        every: steps between two checkpoints; there is one at the end of every epoch as well.
        keep: how many checkpoints stay.
        resume: False = start anew, in a directory without checkpoints.
    """

    def __init__(self, directory, every=500, keep=2, resume=True):
        super().__init__()
        check_whole(1, every=every, keep=keep)
        self.directory, self.every, self.keep, self.resume = directory, every, keep, resume
        self.data, self.signal, self.metrics_so_far = None, None, None
        self.epoch = self.first = self.steps = self.at = 0
        self.earlier, self.start, self.written = 0.0, None, None

    def begin(self, model, data):
        """The epoch to start with; called by `fit` of kformer's models before anything else."""
        self.data, self.signal, self.metrics_so_far = data, None, None
        self.epoch = self.first = self.steps = 0
        self.earlier, self.start, self.written = 0.0, time.monotonic(), None
        if not self.resume and (old := folders(self.directory)):
            raise ValueError(f"directory must hold no checkpoint with resume=False, got {old[0]}")
        found = load_newest(self.directory)
        if found is not None:
            state = restore(model, data, found)
            self.epoch, self.first, self.steps = state["epoch"], state["batch"], state["step"]
            self.metrics_so_far = state["metrics"] if self.first else None
            self.earlier = state["seconds"]
        if data is not None:
            data.seek(self.epoch, self.first)
        return self.epoch

    @property
    def seconds(self):
        """Training time, that of earlier processes included."""
        return self.earlier + (0.0 if self.start is None else time.monotonic() - self.start)

    def __enter__(self):
        """While training, signals are remembered until the step has ended."""
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                self.previous[number] = signal.signal(number, self.note_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def note_signal(self, number, frame):
        if self.signal is not None:
            sys.exit(EXIT_CODES[number])
        self.signal = number

    def on_epoch_begin(self, epoch, logs=None):
        self.at = self.first if epoch == self.epoch else 0
        self.epoch = epoch
        if self.data is not None and (self.data.epoch, self.data.first) != (epoch, self.at):
            self.data.seek(epoch, self.at)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.at += 1
        self.add_metrics_so_far()
        if self.data is None:  # nobody could go on from here: the last epoch's end must do
            self.obey_signal()
        if self.in_the_middle() and (self.signal is not None or self.steps % self.every == 0):
            self.write(self.epoch, self.at)
            self.obey_signal()

    def on_epoch_end(self, epoch, logs=None):
        """The next epoch comes next, unless something stopped this one in its middle."""
        self.first = 0
        self.write(*((epoch, self.at) if self.in_the_middle() else (epoch + 1, 0)))
        self.obey_signal()

    def in_the_middle(self):
        """After the last batch of an epoch, its end comes first, with validation and logs. And
        batches whose gradients are added up stay together."""
        whole = self.at % getattr(self._model, "accumulate", 1) == 0
        return whole and self.data is not None and self.at < len(self.data.planned(self.epoch))

    def obey_signal(self):
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            sys.exit(EXIT_CODES[self.signal])

    def add_metrics_so_far(self):
        """Metrics are sums. Before its first step Keras resets them, or has not made them yet."""
        if self.metrics_so_far is not None:
            variables = self.model.metrics_variables
            for variable, value in zip(variables, self.metrics_so_far, strict=True):
                variable.assign_add(value)
            self.metrics_so_far = None

    def write(self, epoch, batch):
        position = {"epoch": epoch, "batch": batch, "step": self.steps}
        if position != self.written:
            seconds = {"seconds": self.seconds}
            save(self.directory, self.model, self.data, position | seconds, self.keep)
            self.written = position


class Limit(keras.callbacks.Callback):
    """Ends training after so many steps or minutes, at the end of a step.

    Args:
        steps: batches in all, earlier runs included.
        minutes: from the start of training on, or by `clock`.
        clock: a function that tells the seconds of training so far.
    """

    def __init__(self, steps=None, minutes=None, clock=None):
        super().__init__()
        for name, value in (("steps", steps), ("minutes", minutes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        self.steps, self.minutes, self.clock = steps or math.inf, minutes or math.inf, clock
        self.done, self.group = 0, 1

    def is_reached(self, model):
        """Whether there is nothing left to do. `iterations` counts updates, not batches."""
        self.group = getattr(model, "accumulate", 1)
        self.done = int(model.optimizer.iterations) * self.group
        if self.clock is None:
            start = time.monotonic()
            self.clock = lambda: time.monotonic() - start
            return self.done >= self.steps
        return self.done >= self.steps or self.clock() > 60 * self.minutes

    def on_train_begin(self, logs=None):
        self.is_reached(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        over = self.done >= self.steps or self.clock() > 60 * self.minutes
        if over and self.done % self.group == 0:
            self._model.stop_training = True  # not self.model, which would stop JAX to look at it


class HistoryFile(keras.callbacks.Callback):
    """Writes the logs of every epoch into a CSV file, which is whole at any moment.

    A run that goes on adds to it; an epoch that is trained again takes the place of its row.

    Args:
        path: of the file.
        clock: a function for the column `seconds`.
    """

    def __init__(self, path, clock=time.monotonic):
        super().__init__()
        self.path, self.clock = Path(path), clock

    def on_epoch_end(self, epoch, logs=None):
        row = {"epoch": epoch, **{k: float(v) for k, v in logs.items()}}
        row["seconds"] = round(self.clock(), 2)
        earlier = (r for r in read_history(self.path) if int(r["epoch"]) < epoch)
        rows = [*earlier, row]
        text = io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write_text(self.path, text.getvalue())


def read_history(path):
    """The rows of a history file, as dicts of strings; none if there is no file."""
    if not Path(path).is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class TranslationScore(keras.callbacks.Callback):
    """sacreBLEU and chrF of a model's translations, in the logs after every epoch as `val_bleu`
    and `val_chrf`. Needs the package sacrebleu.

    Args:
        sources: texts (with a model that has a tokenizer).
        references: one text for each source, or a list of several.
        every: epochs between two scores.
        options: arguments of `generate`; greedy by default.
    """

    def __init__(self, sources, references, every=1, **options):
        super().__init__()
        if len(sources) != len(references):
            got = f"{len(sources)} sources and {len(references)} references"
            raise ValueError(f"sources and references must be equally many, got {got}")
        translation_scores(["text"], ["text"])  # what is missing is missed now, not after an epoch
        self.sources, self.references = list(sources), list(references)
        self.every, self.options = every, options

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        written = self.model.generate(self.sources, **self.options)
        bleu, chrf = translation_scores(written, self.references)
        logs = {} if logs is None else logs
        logs["val_bleu"], logs["val_chrf"] = bleu.score, chrf.score


def translation_scores(written, references):
    """sacreBLEU's scores of texts against one or more references each, as its own objects, whose
    `signature` says how they were computed.

    A text with fewer references than another is scored against those it has.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ValueError("BLEU needs the package sacrebleu: pip install sacrebleu") from None
    several = [[one] if isinstance(one, str) else list(one) for one in references]
    longest = max(map(len, several))
    columns = [[row[i] if i < len(row) else None for row in several] for i in range(longest)]
    metrics = BLEU(), CHRF()
    scores = [metric.corpus_score(list(written), columns) for metric in metrics]
    for score, metric in zip(scores, metrics, strict=True):
        score.signature = str(metric.get_signature())
    return scores
