"""What the README says is so: its snippets run, its file tree is the real one."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import BACKEND

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()
]
SMALL = {
    "find_ones": ["--rows", "64", "--length", "12", "--epochs", "2", "--trials", "2"],
    "translate": ["--steps", "2", "--score-texts", "2", "--beams", "1", "--hidden-dim", "16"],
    "classify": ["--steps", "2", "--hidden-dim", "16"],
    "language_model": ["--steps", "2", "--hidden-dim", "48", "--num-layers", "1"],
}


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), names)
    assert len(names) > 2


def test_there_are_snippets():
    assert len(SNIPPETS) == 6 and len(COMMANDS) == 5


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path):
    """Each as it stands, on this run's backend, made small by later flags."""
    words = command.split()
    script = next(word for word in words if word.endswith(".py"))
    flags = words[words.index(script) + 1 :]
    env = {**os.environ, "KERAS_BACKEND": BACKEND}
    name = Path(script).stem
    line = [sys.executable, str(ROOT / script), *flags, *SMALL[name], "--out", str(tmp_path)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "find_ones":
        assert "0.999: there is a 1" in done.stdout and "distance" in done.stdout
        assert (tmp_path / f"find_ones_{BACKEND}.png").stat().st_size > 5000
    else:
        assert f"Run: {tmp_path}" in done.stdout and (tmp_path / "report.md").is_file()


def test_recipe_refuses_nonsense():
    line = [sys.executable, str(ROOT / "recipes" / "find_ones.py"), "--rows", "0"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and "--rows must be at least 2, got 0" in done.stderr


def test_file_tree():
    tree = README.split("## Files")[1].split("```")[1]
    named, folder = set(), []
    for line in filter(str.strip, tree.splitlines()):
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folder = folder[:depth] + ([name.rstrip("/")] if name.endswith("/") else [])
        if not name.endswith("/"):
            named.add("/".join([*folder, name]))
    real = {
        p.relative_to(ROOT).as_posix()
        for top in ("kformer", "recipes", "benchmarks", "tests")
        for p in (ROOT / top).rglob("*.py")
        if p.name != "__init__.py"
    }
    assert real <= named, real - named
    assert all((ROOT / name).exists() for name in named), named


@pytest.mark.skipif(BACKEND != "torch", reason="the same on every backend: built once, with torch")
def test_wheel_holds_the_package_only(tmp_path):
    shutil.copytree(ROOT / "kformer", tmp_path / "kformer")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    line = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("kformer-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kformer"}
    assert {"kformer/py.typed", "kformer/layers/attention.py"} <= set(files)
