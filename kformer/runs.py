"""A run: the folder that a recipe leaves behind, and what all recipes do alike.

    args = runs.parser(__doc__, model=dict(num_layers=2), epochs=10).parse_args()
    run = runs.Run("translate", args)
    run.fit(model, data, validation_data=validation)
    run.finish(model, {"bleu": 31.2}, samples=["..."])

The folder then holds model.keras, config.json, history.csv, metrics.json, curves.png, report.md
and the checkpoints from which `--resume` goes on.
"""

import argparse
import functools
import importlib
import itertools
import os
import platform
import shlex
import sys
import time
from pathlib import Path

import keras

from kformer import backend, files
from kformer.config import Config
from kformer.models import feeding, resuming
from kformer.models.base import Transformer
from kformer.text import Tokenizer
from kformer.training.callbacks import Checkpoint, HistoryFile, Limit, read_history
from kformer.zoo import PRESETS

DATA = (
    "a file, or a folder with train, val and test files, .tsv .csv .jsonl or .txt, also .gz; or "
    "hf:NAME, a data set of Hugging Face; by default a corpus that needs no download"
)
SIZES = {
    "num_layers": int,
    "hidden_dim": int,
    "num_heads": int,
    "intermediate_dim": int,
    "max_length": int,
    "dropout": float,
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The recipe's own header, then every flag with its default if it has one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def parser(description, model, **defaults):
    """The flags that all recipes have. model: the sizes that they change, as `Config` names them.

    defaults: epochs, learning_rate, ... of this recipe.
    """
    out = argparse.ArgumentParser(description=description, formatter_class=Help)
    add = out.add_argument
    add("--data", help=DATA)
    add("--preset", choices=sorted(PRESETS), help="take the model of the zoo instead")
    for name, kind in SIZES.items():
        known = f", {model[name]} unless a preset says otherwise" if name in model else ""
        add(f"--{name.replace('_', '-')}", type=kind, help=f"of the model{known}")
    add("--epochs", type=int, default=10, help="passes over the data")
    add("--steps", type=int, help="stop after so many steps")
    add("--minutes", type=float, help="stop after so many minutes, pretraining apart")
    add("--learning-rate", type=float, default=1e-3, help="its highest value")
    add("--out", help="folder of the run; by default runs/ and the recipe's name, numbered")
    add("--resume", action="store_true", help="go on where the run in --out stopped")
    add("--every", type=int, default=500, help="steps between two checkpoints")
    add("--seed", type=int, default=0, help="of weights, order and dropout")
    add("--mixed-precision", action="store_true", help="compute in bfloat16")
    out.set_defaults(model=model, **defaults)
    return out


def command(main):
    """A recipe's main: what is wrong with its input is one line, not a traceback."""

    @functools.wraps(main)
    def wrapped():
        try:
            main()
        except (ValueError, OSError) as error:
            if os.environ.get("KFORMER_TRACEBACK"):
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)

    return wrapped


class Run:
    """The folder of a run, and its training.

    Args:
        name: the recipe's.
        args: what `parser` parsed.
    """

    def __init__(self, name, args):
        self.name, self.args = name, args
        for limit in ("epochs", "steps", "minutes", "every"):
            value = getattr(args, limit)
            if value is not None and not value > 0:
                raise ValueError(f"--{limit} must be above 0, got {value}")
        pyplot()  # what is missing is missed now, not after training
        self.folder = find_folder(name, args.out, args.resume)
        backend.set_seed(args.seed)
        if args.mixed_precision:
            keras.config.set_dtype_policy("mixed_bfloat16")
        self.pictures, self.seconds = [], 0.0
        print(f"{name}: {keras.backend.backend()}, run in {self.folder}", flush=True)

    def config(self, **fields):
        """A Config from the preset, the recipe's sizes and the flags, later ones first."""
        args, flags = self.args, {}
        for name in SIZES:
            if getattr(args, name) is not None:
                flags[name] = getattr(args, name)
        if args.preset is not None:
            return Config.preset(args.preset, **{**fields, **flags})
        return Config(**{**args.model, **fields, **flags})

    def total_steps(self, data):
        """How many steps training takes, if no minutes end it before."""
        return min(self.args.epochs * data.num_batches, self.args.steps or sys.maxsize)

    def warmup(self, steps, share=0.1):
        """The first steps, in which a learning rate rises: fewer than there are."""
        return min(int(share * steps), steps - 1)

    def tokenizer(self, train, name="tokenizer"):
        """What train() gives, kept in the run's folder; a run that goes on has it already."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            train().save(path)
        return Tokenizer.load(path)

    def fit(self, model, data, stage="", callbacks=(), **kwargs):
        """Keras' fit with a progress bar, a history file, limits and checkpoints. The model is
        saved at once: nothing that comes after can lose it.

        stage: name of a training beside the main one, which has files of its own; with epochs of
            its own, too, it has no limits.
        """
        prefix = f"{stage}_" if stage else ""
        checkpoint = Checkpoint(self.folder / f"{prefix}checkpoints", self.args.every)

        def clock():
            return checkpoint.seconds

        limits = dict(steps=self.args.steps, minutes=self.args.minutes)
        limits = {} if "epochs" in kwargs else limits
        kept = [
            Limit(**limits, clock=clock),
            *callbacks,  # they may add to the logs
            HistoryFile(self.folder / f"{prefix}history.csv", clock),
            checkpoint,
        ]
        kwargs.setdefault("epochs", self.args.epochs)
        kwargs.setdefault("verbose", 1 if sys.stdout.isatty() else 2)
        try:
            if isinstance(model, Transformer):
                model.fit(data, callbacks=kept, **kwargs)
            else:  # any Keras model can go on, too
                x = feeding.feed(data, check=lambda x, y: None)
                resuming.fit(model.fit, model, dict(x=x, callbacks=kept, **kwargs), data)
        except KeyboardInterrupt:
            line = f"{shlex.join(without_out(sys.argv))} --resume --out {self.folder}"
            print(f"\nStopped and saved. To go on: python {line}", flush=True)
            sys.exit(130)
        self.seconds += checkpoint.seconds
        self.save(model, f"{stage or 'model'}.keras")

    def save(self, model, name):
        with files.written(self.folder / name) as beside:
            model.save(beside)

    def picture(self, name):
        """The path of a picture that the report shows."""
        self.pictures.append(name)
        return self.folder / name

    def finish(self, model, metrics, samples=()):
        """Write down what came out, and print it."""
        history = read_history(self.folder / "history.csv")
        draw_curves(history, self.picture("curves.png"))
        facts = dict(seconds=round(self.seconds, 1), parameters=model.count_params())
        metrics = {**metrics, **facts, "backend": keras.backend.backend()}
        config = model.config.to_dict() if isinstance(model, Transformer) else model.get_config()
        files.write_json(self.folder / "config.json", config)
        files.write_json(self.folder / "metrics.json", metrics)
        files.write_text(self.folder / "report.md", self.report(metrics, samples))
        print("\n".join(["", *(f"{k}: {shown(v)}" for k, v in metrics.items())]))
        print("\n".join(["", *samples, "", f"Run: {self.folder}"]), flush=True)

    def report(self, metrics, samples):
        """The run in Markdown."""
        names = "kformer", "keras", "numpy", keras.backend.backend()
        versions = ", ".join(f"{n} {importlib.import_module(n).__version__}" for n in names)
        lines = [f"# {self.name}", "", f"    {shlex.join(['python', *sys.argv])}", ""]
        lines += [f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}"]
        lines += ["", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {shown(value)} |" for name, value in metrics.items()]
        lines += ["", *(f"![{name}]({name})" for name in self.pictures), ""]
        return "\n".join([*lines, "## Samples", "", "```", *samples, "```", ""])


def described(data):
    """The batches of a data set in a line."""
    batches, shapes = data.num_batches, len(data.shapes())
    return f"{batches} batches an epoch, {shapes} shapes, {data.fill_rate():.1%} of slots filled"


def shown(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def without_out(words):
    """The words of a command without --resume and --out NAME."""
    words = [word for word in words if word != "--resume" and not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return words


def find_folder(name, given, resume):
    """A new folder, or with --resume the one that is there, by default the newest."""
    names = (f"runs/{name}", *(f"runs/{name}-{number}" for number in range(2, 10**6)))
    if resume:
        taken = itertools.takewhile(lambda path: not is_free(Path(path)), names)
        folder = Path(given or [f"runs/{name}", *taken][-1])
        if not any(folder.glob("*checkpoints")):
            raise ValueError(f"--resume needs a run that was begun in --out, got {folder}")
        return folder
    folder = Path(given or next(path for path in names if is_free(Path(path))))
    if not is_free(folder):
        raise ValueError(f"--out must be a new folder, or --resume given, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_free(folder):
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def draw_curves(history, path):
    """Loss and metrics by epoch; validation beside training. Needs matplotlib."""
    plt = pyplot()
    names = [n for n in history[0] if not n.startswith("val_") and n not in ("epoch", "seconds")]
    only = [n for n in history[0] if n.startswith("val_") and n[4:] not in names]
    figure, axes = plt.subplots(1, len(names + only), figsize=(4.5 * len(names + only), 3.6))
    axes = [axes] if len(names + only) == 1 else axes
    epochs = [int(row["epoch"]) + 1 for row in history]
    for axis, name in zip(axes, names + only, strict=True):
        for key, label in ((name, "training"), (f"val_{name}", "validation")):
            if key in history[0]:
                label = "validation" if key.startswith("val_") else label
                axis.plot(epochs, [float(row[key] or "nan") for row in history], ".-", label=label)
        axis.set(title=name.removeprefix("val_"), xlabel="epoch")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def pyplot():
    """matplotlib without a window."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
