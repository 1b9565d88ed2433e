"""Tokenizers: text ↔ ids, by the `tokenizers` library, which trains and runs them in parallel."""

import functools
import json

import numpy as np

from kformer import files
from kformer.serialization import register
from kformer.text.native import (
    checked_size,
    load_native,
    make_special,
    native_errors,
    read_content,
    read_template,
    reserved_ids,
)
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
MAX_TEMPLATE = 2**18


@register
class Tokenizer:
    """Text ↔ ids.

    Made by `Tokenizer.train` or `Tokenizer.load`; a model saved with it gives it back. A text
    that spells a special token, "<pad>" say, is text like any other.

    Args:
        json_text: a `tokenizer.json`.
        special_ids: {"pad", "bos", "eos", "unk" or "mask": an id or a token, or None where there
            is none}; those that are left out are found by their usual names.
        vocabulary_size: how many ids the model has, if more than the file: ids that no token has
            decode to nothing.
        chat_template: the Jinja text that `encode_chat` renders.
    Attributes:
        vocabulary_size: how many ids there are.
        pad_id, bos_id, eos_id, unk_id, mask_id: special ids, None where there is none.
        template: (ids before, ids after) that the file puts around a text; None if it says nothing.
    """

    def __init__(self, json_text, special_ids=None, vocabulary_size=None, chat_template=None):
        content = read_content(json_text)
        self.native = load_native(json_text)
        added = content.get("added_tokens") or []
        self.vocabulary_size = checked_size(self.native, added, vocabulary_size)
        check_specials(special_ids or {}, self.vocabulary_size)
        check_chat_template(chat_template)
        self.chat_template = chat_template
        for name, given in (NAMES | (special_ids or {})).items():
            setattr(self, f"{name}_id", self.first_id(given))
        named = {self.pad_id, self.bos_id, self.eos_id, self.mask_id} - {None}
        make_special(self.native, named)
        self.reserved = reserved_ids(self.native, content, named)
        self.template = read_template(self.native, self.vocabulary_size)

    def first_id(self, given):
        """An id as it is; of a token, or of several the first one that there is, its id."""
        if given is None or isinstance(given, int):
            return given
        ids = (self.token_id(token) for token in ([given] if isinstance(given, str) else given))
        return next((i for i in ids if i is not None), None)

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
        """As a standard `tokenizer.json`, which says nothing of the other arguments."""
        files.write_text(path, self.to_json())

    def to_json(self):
        return self.native.to_str()

    def get_config(self):
        return {
            "json_text": self.to_json(),
            "special_ids": {name: getattr(self, f"{name}_id") for name in NAMES},
            "vocabulary_size": self.vocabulary_size,
            "chat_template": self.chat_template,
        }

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __reduce__(self):
        return type(self), (*self.get_config().values(),)

    def __eq__(self, other):
        return isinstance(other, Tokenizer) and self.get_config() == other.get_config()

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
        return [self.native.id_to_token(i) or "" for i in self.checked_ids(ids)]

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

    def encode(self, text, bos=False, eos=False, special=False, max_length=None):
        """A list of ids for a text, or a list of such lists for several, in parallel.

        Args:
            text: a string, or a list of strings.
            bos, eos: put that id before or after each.
            special: put around each what the tokenizer's file says, "[CLS]" and "[SEP]" say.
            max_length: cut each to so many ids, those before and after it included.
        """
        single = isinstance(text, str)
        texts = list(checked_texts([text] if single else text))
        before, after = self.edges(bos, eos, special)
        room = None if max_length is None else max_length - len(before) - len(after)
        if room is not None and room < 0:
            rule = f"max_length must be at least the {len(before + after)} ids around a text"
            raise ValueError(f"{rule}, got {max_length!r}")
        with native_errors():
            found = self.native.encode_batch_fast(texts, add_special_tokens=False)
            out = [before + self.as_text(item.ids)[:room] + after for item in found]
        return out[0] if single else out

    def edges(self, bos, eos, special):
        if special and (bos or eos):
            raise ValueError(f"special=True leaves no room for bos={bos!r}, eos={eos!r}")
        for name, asked in (("bos", bos), ("eos", eos)):
            if asked and getattr(self, f"{name}_id") is None:
                raise ValueError(f"{name}=True needs a tokenizer with a {name} token, got none")
        if special:
            return self.template or ([], [])
        return [self.bos_id] * bool(bos), [self.eos_id] * bool(eos)

    def as_text(self, ids):
        """The ids of a text, in which a special token may have been found as a whole word: its
        letters take its place."""
        if self.reserved.isdisjoint(ids):
            return ids
        spelled = {i: self.letters(i) for i in self.reserved.intersection(ids)}
        return [j for i in ids for j in spelled.get(i, (i,))]

    def letters(self, number):
        found = [self.native.model.tokenize(letter) for letter in self.native.id_to_token(number)]
        return [one.id for some in found for one in some if one.id not in self.reserved]

    def encode_chat(self, messages, add_generation_prompt=True):
        """The ids of a conversation as the chat template writes it. What is said in it spells no
        special token. It needs the extra `chat`.

        Args:
            messages: [{"role": "user", "content": "..."}, ...]; roles are "system", "developer",
                "user", "assistant" and "tool".
            add_generation_prompt: end with the beginning of the assistant's answer.
        """
        return self.chat.ids(messages, add_generation_prompt)

    @functools.cached_property
    def chat(self):
        from kformer.text.chat import Chat

        return Chat(self)

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


def check_specials(ids, size):
    """ValueError unless these are ids of special tokens, by their names."""
    if not isinstance(ids, dict) or not set(ids) <= set(NAMES):
        raise ValueError(f"special_ids must be a dict by {', '.join(NAMES)}, got {ids!r}")
    for name, number in ids.items():
        is_id = type(number) is int and 0 <= number < size
        if not (is_id or number is None or isinstance(number, str)):
            raise ValueError(f"{name}_id must be an id in [0, {size}) or a token, got {number!r}")


def check_chat_template(text):
    if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_TEMPLATE):
        got = f"{len(text):,}" if isinstance(text, str) else type(text).__name__
        rule = f"chat_template must be a text of 1 to {MAX_TEMPLATE:,} characters"
        raise ValueError(f"{rule}, got {got}")


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
