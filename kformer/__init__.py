"""kformer: the parts kit and model zoo for transformers in Keras 3.

Names are imported when they are first used, so `import kformer` costs next to nothing.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "presets": "zoo",
    "Encoder": "models",
    "Decoder": "models",
    "Seq2Seq": "models",
    "TextClassifier": "models",
    "TokenClassifier": "models",
    "MaskedLM": "models",
    "CausalLM": "models",
    "Seq2SeqLM": "models",
    "attention_maps": "explore",
    "check": "check",
}
_MODULES = {
    "layers": "layers",
    "losses": "training.losses",
    "metrics": "training.metrics",
    "schedules": "training.schedules",
}

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name):
    if name in _MODULES:
        value = importlib.import_module(f"kformer.{_MODULES[name]}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"kformer.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'kformer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
