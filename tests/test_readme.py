"""What the README says is so: its snippets run, its file tree is the real one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()
]
SMALL = ["--rows", "64", "--length", "12", "--epochs", "2", "--trials", "2"]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), names)
    assert len(names) > 2


def test_there_are_snippets():
    assert len(SNIPPETS) == 3 and len(COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, tmp_path):
    """Each as it stands, on this run's backend, made small by later flags."""
    words = command.split()
    script = next(word for word in words if word.endswith(".py"))
    flags = words[words.index(script) + 1 :]
    env = {**os.environ, "KERAS_BACKEND": BACKEND}
    line = [sys.executable, str(ROOT / script), *flags, *SMALL, "--out", str(tmp_path)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "0.999: there is a 1" in done.stdout and "distance" in done.stdout
    assert (tmp_path / f"find_ones_{BACKEND}.png").stat().st_size > 5000


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
        for top in ("kformer", "recipes", "tests")
        for p in (ROOT / top).rglob("*.py")
        if p.name != "__init__.py"
    }
    assert real <= named, real - named
    assert all((ROOT / name).exists() for name in named), named


def test_wheel_holds_the_package_only():
    """The files that setuptools would pack, without building in the sandbox of pip."""
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=["kformer*"])
    assert found and all(name.split(".")[0] == "kformer" for name in found)
    assert (ROOT / "kformer" / "py.typed").exists()
