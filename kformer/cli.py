"""The command `kformer`: what a run has learned, from the shell.

kformer translate runs/translate "<fr> Friday, March 27, 2026"
kformer classify runs/classify < texts
"""

import argparse
import itertools
import os
import sys
import zipfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import kformer
from kformer.config import check_whole
from kformer.models.base import Transformer


def main(words=None):
    """Errors are one line on standard error and exit code 2."""
    args = parser().parse_args(words)
    try:
        check_whole(1, **{"--top": getattr(args, "top", 1)})
        args.function(args)
    except ValueError as error:
        print(f"kformer: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def parser():
    out = argparse.ArgumentParser(prog="kformer", description="What a run has learned.")
    out.add_argument("--version", action="version", version=f"kformer {kformer.__version__}")
    commands = out.add_subparsers(required=True, metavar="COMMAND")

    def add(function, text, run=True, texts=True):
        command = commands.add_parser(function.__name__, help=text, description=text)
        command.set_defaults(function=function)
        if run:
            command.add_argument("run", metavar="RUN", help="folder of a run, or a .keras file")
        if texts:
            rule = "texts; without any, the lines of standard input"
            command.add_argument("texts", metavar="TEXT", nargs="*", help=rule)
        return command

    command = add(classify, "The likeliest classes of texts.")
    command.add_argument("--top", type=int, default=1, help="how many classes (default: 1)")
    command = add(generate, "Continue texts with a language model.")
    command.add_argument("--max-new-tokens", type=int, default=100, help="default: 100")
    command.add_argument("--temperature", type=float, default=0.8, help="0 = greedy (default: 0.8)")
    command.add_argument("--top-p", type=float, default=0.95, help="default: 0.95")
    command.add_argument("--seed", type=int, help="of the draws")
    command = add(translate, "Translate texts.")
    command.add_argument("--beams", type=int, default=4, help="default: 4")
    command.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    command = add(fill, "Guess what stands at [MASK].")
    command.add_argument("--top", type=int, default=3, help="how many guesses (default: 3)")
    add(presets, "List the zoo.", run=False, texts=False)
    add(check, "Try the laws of a transformer on a run's model.", texts=False)
    return out


def load(args, kind, file="model.keras"):
    """The model of a run, which must be of that kind."""
    import keras

    path = Path(args.run)
    path = path / file if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"RUN must hold {file}, got nothing at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"a model must be a .keras file that is whole, got {path}")
    try:
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:  # Keras raises many kinds; each means the same here
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"{path} must hold a model of kformer's, got: {reason}") from None
    if not isinstance(model, kind):
        raise ValueError(f"the model must be a {kind.__name__}, got a {type(model).__name__}")
    return model


def texts_of(args):
    """What was typed, or else what comes in, a line at a time."""
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin]
    if not any(text.strip() for text in texts):
        raise ValueError("TEXT must be given, or lines on standard input, got none")
    return texts


def classify(args):
    others = sorted(path.name for path in Path(args.run).glob("member*.keras"))
    models = [load(args, kformer.TextClassifier, name) for name in ("model.keras", *others)]
    model, texts = models[0], texts_of(args)
    names = model.class_names or [str(i) for i in range(model.num_classes)]
    chances = sum(one.classify(texts) for one in models) / len(models)
    for text, row in zip(texts, chances, strict=True):
        best = sorted(zip(row, names, strict=True), reverse=True)[: args.top]
        print("\t".join([*(f"{name} {chance:.3f}" for chance, name in best), text]), flush=True)


def generate(args):
    model = load(args, kformer.CausalLM)
    options = dict(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    for text in texts_of(args):
        pieces = model.stream(text, args.max_new_tokens, **options)
        for piece in itertools.chain([text], pieces, ["\n"]):
            print(piece, end="", flush=True)


def translate(args):
    model = load(args, kformer.Seq2SeqLM)
    texts = texts_of(args)
    for written in model.generate(texts, args.max_new_tokens, num_beams=args.beams):
        print(" ".join(written.split("\n")), flush=True)  # one line for each text


def fill(args):
    model = load(args, kformer.MaskedLM, "pretraining.keras")
    for text in texts_of(args):
        for guess, chance in model.fill(text, args.top):
            print(f"{chance:.3f}\t{guess}", flush=True)


def presets(args):
    for name in kformer.presets():
        config = kformer.Config.preset(name)
        print(f"{name:18} {config.num_layers:3} layers, width {config.hidden_dim}")


def check(args):
    report = kformer.check(load(args, Transformer))
    if not report.ok:
        raise ValueError("the model breaks a law: see the table above")


if __name__ == "__main__":
    sys.exit(main())
