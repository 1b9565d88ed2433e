"""Tokenizers of others: anything with `encode` and `decode`, or with keras-nlp's `tokenize`."""

import inspect

import numpy as np

from kformer.text.tokenizer import Tokenizer, checked_texts

# Where others keep what kformer calls vocabulary_size, pad_id, ...
SPELLINGS = {
    "vocabulary_size": ("vocabulary_size", "vocab_size", "n_vocab", "get_vocab_size"),
    "pad_id": ("pad_id", "pad_token_id"),
    "bos_id": ("bos_id", "bos_token_id", "start_token_id", "cls_token_id"),
    "eos_id": ("eos_id", "eos_token_id", "end_token_id", "sep_token_id", "eot_token"),
    "unk_id": ("unk_id", "unk_token_id"),
    "mask_id": ("mask_id", "mask_token_id"),
}


class ForeignTokenizer:
    """Another library's tokenizer with the methods of `kformer.Tokenizer`."""

    template = None  # what its library puts around a text stays there

    def __init__(self, inner):
        self.inner = inner
        for name, spellings in SPELLINGS.items():
            found = (getattr(inner, spelling, None) for spelling in spellings)
            value = next((v for v in found if v is not None), None)
            value = value() if callable(value) else value
            # sentencepiece says −1 where there is none
            setattr(self, name, None if value is None or int(value) < 0 else int(value))
        if self.vocabulary_size is not None and hasattr(inner, "__len__"):
            # transformers' vocab_size leaves out what was added later, its len() does not
            self.vocabulary_size = max(self.vocabulary_size, len(inner))

    def __repr__(self):
        return f"<{type(self.inner).__name__} for kformer>"

    def encode(self, text, bos=False, eos=False, special=False, max_length=None):
        """As `kformer.Tokenizer.encode`; nothing is known that would be special."""
        before, after = self.edge("bos", bos), self.edge("eos", eos)
        texts = checked_texts([text] if isinstance(text, str) else text)
        room = None if max_length is None else max(0, max_length - len(before) - len(after))
        out = [[*before, *self.plain(one)[:room], *after] for one in texts]
        return out[0] if isinstance(text, str) else out

    def edge(self, name, asked):
        value = getattr(self, f"{name}_id")
        if asked and value is None:
            raise ValueError(f"{name}=True needs a tokenizer with a {name}_id, got {self!r}")
        return [value] if asked else []

    def plain(self, text):
        if not hasattr(self.inner, "encode"):
            ids = self.inner.tokenize(text)
        elif takes(self.inner.encode, "add_special_tokens"):
            ids = self.inner.encode(text, add_special_tokens=False)
        else:
            ids = self.inner.encode(text)
        ids = np.asarray(getattr(ids, "ids", ids))
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            got = f"shape {ids.shape}, dtype {ids.dtype}"
            raise ValueError(f"a tokenizer must give a list of ids for a text, got {got}")
        return ids.tolist()

    def decode(self, ids):
        if any(np.ndim(i) for i in ids):
            return [self.decode(row) for row in ids]
        special = {self.pad_id, self.bos_id, self.eos_id, self.mask_id}
        ids = [int(i) for i in ids if int(i) not in special]
        decode = getattr(self.inner, "decode", None) or self.inner.detokenize
        text = decode(ids)
        # keras-nlp gives a string, or a tensor or an array of one
        text = text if isinstance(text, (str, bytes)) else np.asarray(text).item()
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def takes(function, name):
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def adapt(tokenizer):
    """The tokenizer itself if it is kformer's, else one that behaves like it."""
    if tokenizer is None or isinstance(tokenizer, (Tokenizer, ForeignTokenizer)):
        return tokenizer
    for pair in (("encode", "decode"), ("tokenize", "detokenize")):
        if all(callable(getattr(tokenizer, name, None)) for name in pair):
            return ForeignTokenizer(tokenizer)
    rule = "tokenizer must have encode and decode (or tokenize and detokenize)"
    raise ValueError(f"{rule}, got {type(tokenizer).__name__}")
