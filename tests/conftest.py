"""One test run is one backend: KERAS_BACKEND=jax pytest. `--deep` runs the long versions."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import pytest


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="2,000 attention settings, not 200")
    parser.addoption("--draw", type=int, default=None, help="seed of the sampled settings")


def pytest_report_header(config):
    return f"backend: {keras.backend.backend()}"


@pytest.fixture(autouse=True)
def same_seed():
    """Every test starts from the same random state and with the default dtype policy."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
