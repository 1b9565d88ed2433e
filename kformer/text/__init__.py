"""Text: tokenizers, and corpora that need no download."""

from kformer.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
