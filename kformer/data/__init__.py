"""Data: texts → batches of ids for `fit`, in an order that seed and epoch decide."""

from kformer.data.base import Data
from kformer.data.batches import ClassificationData, MaskedLMData, TranslationData
from kformer.data.packing import LanguageModelData
from kformer.data.sources import load_splits, read_labelled, read_pairs, read_texts

__all__ = [
    "ClassificationData",
    "Data",
    "LanguageModelData",
    "MaskedLMData",
    "TranslationData",
    "load_splits",
    "read_labelled",
    "read_pairs",
    "read_texts",
]
