"""The parts: each is a Keras layer that works by itself, documented with its formula."""

from kformer.layers.add_norm import AddNorm
from kformer.layers.attention import MultiHeadAttention
from kformer.layers.blocks import DecoderBlock, EncoderBlock
from kformer.layers.embedding import TokenEmbedding
from kformer.layers.experts import MixtureOfExperts
from kformer.layers.feedforward import FeedForward
from kformer.layers.positions import (
    AlibiBias,
    LearnedPositions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
)

__all__ = [
    "AddNorm",
    "AlibiBias",
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "LearnedPositions",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "RelativeBias",
    "RotaryPositions",
    "SinusoidalPositions",
    "TokenEmbedding",
]
