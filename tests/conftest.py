"""One test run is one backend: KERAS_BACKEND=jax pytest. `--deep` runs the long versions."""

import gc
import os
import random
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import pytest


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="ten times more settings and changes")
    parser.addoption("--draw", type=int, help="seed of settings and changes; --deep draws one")


def pytest_configure(config):
    if config.option.draw is None:  # before the workers start: all draw from the same seed
        config.option.draw = random.SystemRandom().getrandbits(32) if config.option.deep else 0


def pytest_terminal_summary(terminalreporter, config):
    draw = config.option.draw
    terminalreporter.write_line(f"{keras.backend.backend()}, settings and changes by --draw {draw}")


@pytest.fixture(autouse=True)
def few_mappings():
    """What JAX compiled lies in mapped memory, of which Linux grants a process 65,530 pieces: past
    them it ends without a word. Before that, all is let go; the cache on disk has it still."""
    yield
    maps = Path("/proc/self/maps")
    if keras.backend.backend() == "jax" and maps.exists():
        if maps.read_bytes().count(b"\n") > 20_000:
            import jax

            jax.clear_caches()
            gc.collect()


@pytest.fixture(scope="module")
def quick_collection():
    """Keras collects garbage for every kernel that it quantizes: what is there already is not
    looked at again, until the module ends."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def same_seed():
    """Every test starts from the same random state and with the default dtype policy."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
