"""The models: configurations of the parts. Each is built when its constructor returns."""

from kformer.models.composed import Writer
from kformer.models.language import CausalLM, MaskedLM, Seq2SeqLM
from kformer.models.seq2seq import Seq2Seq
from kformer.models.stack import Decoder, Encoder
from kformer.models.tasks import TextClassifier, TokenClassifier

__all__ = [
    "CausalLM",
    "Decoder",
    "Encoder",
    "MaskedLM",
    "Seq2Seq",
    "Seq2SeqLM",
    "TextClassifier",
    "TokenClassifier",
    "Writer",
]
