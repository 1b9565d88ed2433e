"""kformer: the parts kit and model zoo for transformers in Keras 3.

Layers and models are imported at once, because a class must be known before `load_model` can
find it, and Keras is loaded anyway. The rest is imported when its name is first used.
"""

import importlib

from kformer import data, layers
from kformer.config import Config
from kformer.models import (
    CausalLM,
    Decoder,
    Encoder,
    MaskedLM,
    Seq2Seq,
    Seq2SeqLM,
    TextClassifier,
    TokenClassifier,
    Writer,
)
from kformer.text import Tokenizer
from kformer.training import callbacks, losses, metrics, schedules
from kformer.zoo import presets

__version__ = "0.1.0"

# Modules are named apart from these functions: importing a module puts its name in here.
_LATER = {
    "Conversation": "generation.conversation",
    "attention_maps": "explorer",
    "check": "laws",
    "compilations": "models.decoding",
    "embed": "models.sentences",
    "enable_lora": "adapters.lora",
    "from_gguf": "interop.gguf_files",
    "from_hf": "interop.loading",
    "from_keras_hub": "interop.backbones",
    "load_adapters": "adapters.files",
    "merge_lora": "adapters.lora",
    "save_adapters": "adapters.files",
    "to_hf": "interop.saving",
}

__all__ = [
    "CausalLM",
    "Config",
    "Decoder",
    "Encoder",
    "MaskedLM",
    "Seq2Seq",
    "Seq2SeqLM",
    "TextClassifier",
    "TokenClassifier",
    "Tokenizer",
    "Writer",
    "callbacks",
    "data",
    "layers",
    "losses",
    "metrics",
    "presets",
    "schedules",
    *_LATER,
]


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module 'kformer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kformer.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
