"""Tokenizers: text ↔ ids, by the `tokenizers` library, which trains and runs them in parallel."""

import contextlib
import json

import numpy as np

from kformer import files
from kformer.serialization import register
from kformer.text.untrained import KINDS, SPECIALS, digits_apart, make_native, make_normalizer

# How files from elsewhere call them.
NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}
MASK = "[MASK]"
MAX_BYTES = 64 * 2**20


@register
class Tokenizer:
    """Text ↔ ids.

    Made by `Tokenizer.train` or `Tokenizer.load`; a model saved with it gives it back. A text
    that spells a special token, "<pad>" say, is text like any other.

    Attributes:
        vocabulary_size: how many ids there are.
        pad_id, bos_id, eos_id, unk_id, mask_id: special ids, None where there is none.
    """

    def __init__(self, json_text):
        import tokenizers

        content = files.parse_json(json_text, "a tokenizer file")
        check_limits(content)
        content.update(truncation=None, padding=None)  # batches are made elsewhere
        with native_errors():
            self.native = tokenizers.Tokenizer.from_str(json.dumps(content))
            self.native.encode_special_tokens = True
            self.native.encode_batch_fast(["Probe 1: ^ \u00e9\n"])
        check_vocabulary(self.native, content.get("added_tokens") or [])
        self.vocabulary_size = self.native.get_vocab_size()
        for name, spellings in NAMES.items():
            ids = (self.native.token_to_id(spelling) for spelling in spellings)
            setattr(self, f"{name}_id", next((i for i in ids if i is not None), None))

    @classmethod
    def train(
        cls,
        texts,
        vocabulary_size=8000,
        kind="bpe",
        *,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        mask=False,
        normalization=None,
        lowercase=False,
        split_digits=False,
    ):
        """A tokenizer for these texts.

        Args:
            texts: strings, in a list or any iterable, read once.
            vocabulary_size: at most so many ids, special ones included.
            kind: "bpe" (byte-level: any text comes back exactly), "byte" (likewise, no
                training), "char", "wordpiece" or "unigram".
            pad_id, bos_id, eos_id, unk_id: which of the ids 0 to 3 is which.
            mask: add a mask token (id 4), for masked language models.
            normalization: None, "nfc" or "nfkc", before anything else.
            lowercase: fold to lower case.
            split_digits: every digit is a token, so that numbers can be copied digit by digit.
        """
        special = ordered_specials(dict(pad=pad_id, bos=bos_id, eos=eos_id, unk=unk_id), mask)
        check_training(vocabulary_size, kind, normalization, len(special))
        if isinstance(texts, str):
            raise ValueError("texts must be an iterable of strings, got a string")
        native, trainer = make_native(kind, vocabulary_size, special)
        native.normalizer = make_normalizer(normalization, lowercase)
        if split_digits:
            native.pre_tokenizer = digits_apart(native.pre_tokenizer)
        with native_errors():
            native.train_from_iterator(checked_texts(texts), trainer)
        if kind != "byte" and native.get_vocab_size() <= len(special):
            raise ValueError("texts must hold something to learn from, got no text")
        return cls(native.to_str())

    @classmethod
    def load(cls, path):
        """From a `tokenizer.json`, kformer's or anyone's."""
        return cls(files.read_text(path, MAX_BYTES, "a tokenizer file"))

    def save(self, path):
        """As a standard `tokenizer.json`."""
        files.write_text(path, self.to_json())

    def to_json(self):
        return self.native.to_str()

    def get_config(self):
        return {"json_text": self.to_json()}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __reduce__(self):
        return type(self), (self.to_json(),)

    def __eq__(self, other):
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self):
        return hash(self.to_json())

    def __repr__(self):
        kind = type(self.native.model).__name__
        return f"<kformer.Tokenizer: {kind}, {self.vocabulary_size} ids>"

    def token_id(self, token):
        """The id of a token as the vocabulary spells it, or None."""
        return self.native.token_to_id(token)

    def tokens(self, ids):
        """The tokens of ids, as the vocabulary spells them; for looking at."""
        return [self.native.id_to_token(int(i)) for i in self.checked_ids(ids)]

    def joins(self):
        """{(id, id): id}: which two tokens of a BPE become which one, first those joined first."""
        model = json.loads(self.to_json())["model"]
        if model["type"] != "BPE":
            return {}
        ids, prefix, out = model["vocab"], model.get("continuing_subword_prefix") or "", {}
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            out[ids[left], ids[right]] = ids[left + right.removeprefix(prefix)]
        return out

    def encode(self, text, bos=False, eos=False):
        """A list of ids for a text, or a list of such lists for several, in parallel.

        Args:
            text: a string, or a list of strings.
            bos, eos: put that id before or after each.
        """
        single = isinstance(text, str)
        texts = list(checked_texts([text] if single else text))
        with native_errors():
            found = self.native.encode_batch_fast(texts, add_special_tokens=False)
        before, after = self.edges(bos, eos)
        out = [before + item.ids + after for item in found]
        return out[0] if single else out

    def edges(self, bos, eos):
        for name, asked in (("bos", bos), ("eos", eos)):
            if asked and getattr(self, f"{name}_id") is None:
                raise ValueError(f"{name}=True needs a tokenizer with a {name} token, got none")
        return [self.bos_id] * bool(bos), [self.eos_id] * bool(eos)

    def decode(self, ids):
        """The text of a list (or array) of ids, or the texts of several; special ids are left
        out. Bytes that are not UTF-8 become U+FFFD."""
        ids = ids if isinstance(ids, (list, tuple)) else np.asarray(ids)
        nested = np.ndim(ids) == 2 if hasattr(ids, "ndim") else any(np.ndim(i) for i in ids)
        rows = [self.checked_ids(row) for row in (ids if nested else [ids])]
        with native_errors():
            texts = self.native.decode_batch(rows, skip_special_tokens=True)
        return texts if nested else texts[0]

    def checked_ids(self, ids):
        array = np.asarray(ids)
        if array.shape == (0,):
            return []
        if array.ndim != 1 or array.dtype.kind not in "iu":
            got = f"shape {array.shape}, dtype {array.dtype}"
            raise ValueError(f"ids must be a list of whole numbers, or a list of those, got {got}")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self.vocabulary_size:
            got = low if low < 0 else high
            raise ValueError(f"ids must be in [0, {self.vocabulary_size}), got {got}")
        return array.tolist()


def ordered_specials(ids, mask):
    """The special tokens in the order of their ids, which are 0 to 3 in any order."""
    if sorted(ids.values(), key=repr) != [0, 1, 2, 3] or any(i is True for i in ids.values()):
        got = ", ".join(f"{name}_id={i!r}" for name, i in ids.items())
        raise ValueError(f"special ids must be 0, 1, 2 and 3 in some order, got {got}")
    return [SPECIALS[name] for name in sorted(ids, key=ids.get)] + [MASK] * bool(mask)


def check_training(size, kind, normalization, specials):
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if normalization not in (None, "nfc", "nfkc"):
        raise ValueError(f"normalization must be None, 'nfc' or 'nfkc', got {normalization!r}")
    least = specials + (256 if kind in ("bpe", "byte") else 1)
    if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= 10**6:
        if kind != "byte":  # a byte tokenizer has its own size
            rule = f"vocabulary_size must be a whole number from {least} to 1,000,000"
            raise ValueError(f"{rule} for kind={kind!r}, got {size!r}")


def checked_texts(texts):
    """Strings that are Unicode: a lone surrogate has no bytes, and so no ids."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            got = f"{type(text).__name__} as text {number}"
            raise ValueError(f"texts must be strings, got {got}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"{text[error.start]!r} at character {error.start} of text {number}"
            raise ValueError(f"texts must be Unicode without lone surrogates, got {got}") from None
        yield text


@contextlib.contextmanager
def native_errors():
    """Whatever the native library raises, panics included, as one ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # which is no Exception
        if not is_panic and not isinstance(error, Exception):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the tokenizer failed on this: {first[:300]}") from None


def check_limits(content):
    """Refuses lengths that cannot be, which make the native library panic."""
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ValueError(f"a tokenizer file must hold one JSON object, got {got}")
    cut, padding = content.get("truncation"), content.get("padding")
    if isinstance(cut, dict):
        length, stride = cut.get("max_length"), cut.get("stride", 0)
        if not (isinstance(length, int) and isinstance(stride, int) and 0 <= stride < length):
            rule = "truncation in a tokenizer file must have a stride below its max_length"
            raise ValueError(f"{rule}, got stride={stride!r}, max_length={length!r}")
    if isinstance(padding, dict) and padding.get("strategy") == {"Fixed": 0}:
        raise ValueError("padding in a tokenizer file must be to at least 1 token, got 0")


def check_vocabulary(native, added):
    """Ids must be 0, 1, 2, ... each once, and what stands for the unknown must be among them."""
    ids = sorted(native.get_vocab(with_added_tokens=True).values())
    if not ids:
        raise ValueError("a tokenizer file must have tokens, got none")
    wrong = next((place for place, i in enumerate(ids) if i != place), None)
    if wrong is not None or len(ids) != native.get_vocab_size():
        rule = f"ids in a tokenizer file must be 0 to {len(ids) - 1}, each once"
        got = "a token twice" if wrong is None else f"{ids[wrong]} in place of {wrong}"
        raise ValueError(f"{rule}, got {got}")
    for token in added:  # the native library would give it another id, and only log it
        if (found := native.token_to_id(token["content"])) != token["id"]:
            rule = f"the added token {token['content']!r} must have the id {found}"
            raise ValueError(f"{rule}, got {token['id']!r}")
    unk = getattr(native.model, "unk_token", None)
    if unk is not None and native.token_to_id(unk) is None:
        raise ValueError(f"unk_token must be in the vocabulary, got {unk!r}")
