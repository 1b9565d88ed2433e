"""The rules that keep the library small, each of them a line."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "kformer").rglob("*.py"))
# The order in which data flows: a file imports only from what stands before it.
ORDER = [
    "config",
    "weights",
    "zoo",
    "serialization",
    "backend",
    "kernels",
    "files",
    "text",
    "data",
    "masks",
    "cache",
    "layers",
    "training",
    "generation",
    "models",
    "interop",
    "adapters",
    "explorer",
    "trial",
    "laws",
    "runs",
    "cli",
]
ORDER_IN_LAYERS = [
    "feedforward", "embedding", "positions", "add_norm", "attention", "heads", "experts", "blocks",
]  # fmt: skip


def imports(path):
    """Dotted names that a file imports at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "kformer":
                yield from (f"kformer.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file(path):
    text, name = path.read_text(), path.relative_to(ROOT / "kformer").as_posix()
    assert len(text.splitlines()) <= 350, "files stay short"
    assert "keras.src" not in re.sub(r'"keras\.src[^"]*"', "", text), "no import from keras.src"
    if name not in ("backend.py", "kernels.py"):
        assert not re.search(r"^\s*(import|from) (torch|jax|tensorflow)\b", text, re.M)
    if name not in ("layers/attention.py",):
        weights = re.search(r"(?<!log_)softmax\(", strip_strings(text))  # log_softmax: of a head
        assert not weights or name in ("layers/experts.py",)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = node.end_lineno - node.lineno + 1
            assert size <= 48, f"{node.name} has {size} lines"


def strip_strings(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def test_imports_follow_the_data():
    for path in FILES:
        parts = path.relative_to(ROOT / "kformer").with_suffix("").parts
        if parts[-1] == "__init__":
            continue
        for name in imports(path):
            if not name or not name.startswith("kformer."):
                continue
            other = name.split(".")[1:]
            if other[0] not in ORDER:
                continue
            assert ORDER.index(other[0]) <= ORDER.index(parts[0]), f"{path.name} imports {name}"
            if parts[0] == other[0] == "layers" and len(other) > 1:
                mine, theirs = (ORDER_IN_LAYERS.index(p) for p in (parts[1], other[1]))
                assert theirs < mine, f"{path.name} imports {name}"


def test_only_masks_builds_masks():
    for path in FILES:
        if path.name not in ("masks.py",):
            assert not re.search(r"\b(tril|triu|np\.tri)\(", path.read_text()), path


def test_import_is_light():
    """`import kformer` loads nothing but itself, and TensorFlow on no other backend."""
    code = (
        "import sys, keras; before = set(sys.modules); import kformer; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)), 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = f"['kformer'] {BACKEND == 'tensorflow'}"
    assert done.stdout.strip() == expected, done.stdout + done.stderr


def test_public_names():
    import kformer

    assert set(kformer.__all__) <= set(dir(kformer))
    for name in kformer.__all__:
        assert getattr(kformer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kformer.nonsense
    assert sorted(kformer.layers.__all__) == [
        "AddNorm", "AlibiBias", "DecoderBlock", "EncoderBlock", "FeedForward", "LearnedPositions",
        "MixtureOfExperts", "MultiHeadAttention", "RelativeBias", "RotaryPositions",
        "SinusoidalPositions", "TokenEmbedding",
    ]  # fmt: skip
