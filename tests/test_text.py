"""Tokenizers: round trips, standard files, those of others, and files that mean harm (B26, B27)."""

import copy
import json
import pickle
import random
import time
import unicodedata

import keras
import numpy as np
import pytest
from keras import ops
from support import config

import kformer
from kformer import files
from kformer.text.foreign import ForeignTokenizer, adapt
from kformer.text.tokenizer import KINDS, MAX_BYTES, native_errors

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! It's 12:30; isn't it?",
    "El niño comió ¡dos! manzanas en el jardín.",
    "She sells <s>sea shells</s> [MASK] by the sea shore <pad>.",
] * 20


@pytest.fixture(scope="module")
def trained():
    """One tokenizer of each kind."""
    return {kind: kformer.Tokenizer.train(TEXTS, 340, kind, mask=True) for kind in KINDS}


@pytest.fixture
def content(trained):
    """The files of some, parsed, for changing."""
    kinds = ("bpe", "wordpiece", "unigram")
    return {kind: json.loads(trained[kind].to_json()) for kind in kinds}


def any_text(source):
    """A string of up to 40 characters from all over Unicode, surrogates excepted."""
    pools = [
        (0, 0x20), (0x20, 0x7F), (0x7F, 0x250), (0x300, 0x370), (0x590, 0x700), (0x2000, 0x2070),
        (0x3000, 0xA000), (0xE000, 0x10000), (0x1F300, 0x1FAFF), (0x10000, 0x110000),
    ]  # fmt: skip
    return "".join(
        chr(source.randrange(*source.choice(pools))) for _ in range(source.randrange(40))
    )


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_round_trip_is_exact(trained, kind):
    """Control characters, NUL, right-to-left, combining marks, emoji, private and unused ones."""
    source = random.Random(7)
    texts = [any_text(source) for _ in range(400)]
    texts += [
        "",
        "\0",
        " ",
        "  a  ",
        "\r\n\t",
        "e\u0301",
        "\u202eשלום",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "\ufeffa",
        "\uffff",
        "\U0010ffff",
    ]
    texts += ["<pad>", "<s></s><unk>[MASK]", "'s 'LL", "Ġ", "Ċ<s>", "\u2028\u0085"]
    tokenizer = trained[kind]
    encoded = tokenizer.encode(texts)
    assert tokenizer.decode(encoded) == texts
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    specials = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id}
    assert not specials & set(sum(encoded, [])), "no text can spell a special token"
    if kind == "byte":
        assert [len(ids) for ids in encoded] == [len(text.encode()) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(trained, kind):
    tokenizer = trained[kind]
    ids = tokenizer.encode(TEXTS[0])
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocabulary_size <= 340 for i in ids)
    assert tokenizer.encode(TEXTS[:3]) == [tokenizer.encode(text) for text in TEXTS[:3]]
    assert tokenizer.encode([]) == [] and tokenizer.encode("") == []
    assert tokenizer.encode("fox", bos=True, eos=True) == [1, *tokenizer.encode("fox"), 2]
    assert tokenizer.encode(["fox"], eos=True) == [[*tokenizer.encode("fox"), 2]]
    plain = tokenizer.decode(ids).replace(" .", ".")
    assert plain == TEXTS[0]
    assert tokenizer.decode([1, *ids, 2, 0, 0, 4]).replace(" .", ".") == plain
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id}
    assert special == {0, 1, 2, 4}
    for spelled in TEXTS[3], "<s>", "a</s>", "<pad> [MASK]":
        assert not special & set(tokenizer.encode(spelled)), "text spells no special token"
    assert tokenizer.token_id("<unk>") == tokenizer.unk_id == 3 and tokenizer.token_id("№№") is None
    assert "".join(tokenizer.tokens(ids)[:2]).lstrip("▁").startswith("T")
    assert kind == "byte" or len(tokenizer.encode("Zażółć " * 3)) > 0
    assert repr(
        tokenizer
    ) == f"<kformer.Tokenizer: {tokenizer.native.model.__class__.__name__}, " + (
        f"{tokenizer.vocabulary_size} ids>"
    )


def test_decode_takes_arrays_and_tensors(trained):
    tokenizer = trained["bpe"]
    ids = np.array([tokenizer.encode("abc def")] * 2)
    for given in (ids, ids.astype("uint16"), ops.convert_to_tensor(ids), list(ids), ids.tolist()):
        assert tokenizer.decode(given) == ["abc def"] * 2
        assert tokenizer.decode(given[0]) == "abc def"
    assert tokenizer.decode([]) == "" and tokenizer.decode([[], [1]]) == ["", ""]
    assert tokenizer.decode(np.zeros((0, 3), "int32")) == []
    euro = trained["byte"].encode("€")
    assert trained["byte"].decode(euro[:2]) == "\ufffd"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 340], r"ids must be in \[0, 340\), got 340"),
        ([[0], [-1]], r"ids must be in \[0, 340\), got -1"),
        ([1.0], r"whole numbers, .*got shape \(1,\), dtype float64"),
        ([[[1]]], r"whole numbers, .*got shape \(1, 1\), dtype int64"),
        ([True], r"whole numbers, .*got shape \(1,\), dtype bool"),
        (3, r"whole numbers, .*got shape \(\), dtype int64"),
        ([2**63 - 1], r"ids must be in \[0, 340\), got 9223372036854775807"),
        ([10**30], r"whole numbers, .*dtype object"),
    ],
)
def test_wrong_ids(trained, ids, message):
    with pytest.raises(ValueError, match=message):
        trained["bpe"].decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_text(trained, kind):
    with pytest.raises(
        ValueError, match=r"lone surrogates, got '\\ud800' at character 1 of text 1"
    ):
        trained[kind].encode(["fine", "a\ud800"])
    with pytest.raises(ValueError, match="texts must be strings, got NoneType as text 0"):
        trained[kind].encode([None])
    with pytest.raises(ValueError, match="texts must be strings, got int as text 0"):
        trained[kind].encode(b"bytes")


def test_special_ids_can_be_chosen():
    ids = dict(pad_id=3, bos_id=0, eos_id=1, unk_id=2)
    for kind in KINDS:
        tokenizer = kformer.Tokenizer.train(TEXTS, 300, kind, **ids)
        assert {name: getattr(tokenizer, name) for name in ids} == ids
        assert tokenizer.mask_id is None
        assert tokenizer.encode("", bos=True, eos=True) == [0, 1]
    with pytest.raises(ValueError, match=r"0, 1, 2 and 3 in some order, got pad_id=0, bos_id=0"):
        kformer.Tokenizer.train(TEXTS, bos_id=0)
    with pytest.raises(ValueError, match=r"got pad_id=0, bos_id=True"):
        kformer.Tokenizer.train(TEXTS, bos_id=True)
    with pytest.raises(ValueError, match=r"got pad_id='0', bos_id=1"):
        kformer.Tokenizer.train(TEXTS, pad_id="0")


def test_digits_can_stand_apart():
    numbers = [f"in {year} and {year}" for year in range(1900, 2000)]
    joined = kformer.Tokenizer.train(numbers, 300)
    apart = kformer.Tokenizer.train(numbers, 300, split_digits=True)
    assert len(joined.encode("1984")) < len(apart.encode("1984")) == 4
    assert apart.decode(apart.encode("in 1984, ٣")) == "in 1984, ٣"


def test_normalization():
    decomposed, wide = "Cafe\u0301", "ＡＢＣ"
    nfc = kformer.Tokenizer.train(TEXTS, 300, normalization="nfc")
    assert nfc.decode(nfc.encode(decomposed)) == unicodedata.normalize("NFC", decomposed)
    assert nfc.decode(nfc.encode(wide)) == wide
    nfkc = kformer.Tokenizer.train(TEXTS, 300, normalization="nfkc", lowercase=True)
    assert nfkc.decode(nfkc.encode(wide + decomposed)) == "abccafé"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(kind="words"), "one of bpe, wordpiece, unigram, char, byte, got 'words'"),
        (dict(normalization="nfd"), "None, 'nfc' or 'nfkc', got 'nfd'"),
        (dict(vocabulary_size=259), "from 260 to 1,000,000 for kind='bpe', got 259"),
        (dict(vocabulary_size=260, mask=True), "from 261 to 1,000,000 for kind='bpe', got 260"),
        (dict(vocabulary_size=4, kind="char"), "from 5 to 1,000,000 for kind='char', got 4"),
        (dict(vocabulary_size=10**7), "to 1,000,000 for kind='bpe', got 10000000"),
        (dict(vocabulary_size=True, kind="char"), "for kind='char', got True"),
        (dict(texts="one string"), "texts must be an iterable of strings, got a string"),
        (dict(texts=[], kind="char"), "texts must hold something to learn from, got no text"),
        (dict(texts=["a", 5]), "texts must be strings, got int as text 1"),
        (dict(texts=["\udfff"]), r"lone surrogates, got '\\udfff' at character 0 of text 0"),
    ],
)
def test_wrong_training(arguments, message):
    with pytest.raises(ValueError, match=message):
        kformer.Tokenizer.train(**{"texts": TEXTS, **arguments})


def test_training_reads_a_generator_once():
    once = (text for text in TEXTS)
    tokenizer = kformer.Tokenizer.train(once, 300)
    assert tokenizer == kformer.Tokenizer.train(TEXTS, 300) and next(once, None) is None
    assert kformer.Tokenizer.train([], kind="byte").vocabulary_size == 260


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_the_standard_ones(trained, kind, tmp_path):
    import tokenizers

    mine, path = trained[kind], tmp_path / "deep" / "tokenizer.json"
    mine.save(path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    text = "Hello, quick fox! ñ"
    assert theirs.encode(text, add_special_tokens=False).ids == mine.encode(text)
    theirs.save(str(tmp_path / "back.json"))
    for again in (kformer.Tokenizer.load(path), kformer.Tokenizer.load(tmp_path / "back.json")):
        assert (
            again == mine and hash(again) == hash(mine) and again.encode(text) == mine.encode(text)
        )
        assert again.mask_id == mine.mask_id == 4
    for copied in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert copied == mine
    assert mine != trained["byte" if kind != "byte" else "bpe"] and mine != text


def test_files_of_others(tmp_path):
    """BERT's names of special tokens, an added token past the vocabulary, limits for batches."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Native

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    native = Native(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.add_special_tokens(names[:5])
    native.add_tokens([AddedToken("newtoken")])
    native.enable_truncation(2)
    native.enable_padding(length=8)
    native.save(str(tmp_path / "tokenizer.json"))
    tokenizer = kformer.Tokenizer.load(tmp_path / "tokenizer.json")
    found = [getattr(tokenizer, f"{n}_id") for n in ("pad", "unk", "bos", "eos", "mask")]
    assert found == [0, 1, 2, 3, 4] and tokenizer.vocabulary_size == 8
    assert tokenizer.encode("a b newtoken a x") == [5, 6, 7, 5, 1]  # neither cut nor padded
    plain = kformer.Tokenizer(Native(models.BPE({"a": 0, "b": 1}, [])).to_str())
    assert plain.pad_id is plain.bos_id is plain.eos_id is None
    with pytest.raises(ValueError, match="bos=True needs a tokenizer with a bos token, got none"):
        plain.encode("a", bos=True)
    with pytest.raises(ValueError, match="eos=True needs a tokenizer with a eos token, got none"):
        plain.encode(["a"], eos=True)


# Files that mean harm


def changed(content, **changes):
    """A file with some entries replaced; a__b is b inside of a."""
    content = copy.deepcopy(content)
    for key, value in changes.items():
        *path, last = key.split("__")
        at = content
        for part in path:
            at = at[part]
        at[last] = value(at[last]) if callable(value) else value
    return json.dumps(content)


def added(**token):
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    new = {"id": 0, "content": "new", **dict.fromkeys(flags, False), **token}
    return lambda tokens: [*tokens, new]


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
FIXED = dict(direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0, pad_token="x")
CUT = dict(direction="Right", strategy="LongestFirst")
BAD = {
    "merge of unknown": ("bpe", dict(model__merges=[["zz", "yy"]]), "`zz` out of vocabulary"),
    "merge into unknown": ("bpe", dict(model__merges=[["a", "Z"]]), "`aZ` out of vocabulary"),
    "merge longer than vocab": (
        "bpe",
        dict(model__continuing_subword_prefix="x" * 50),
        "the tokenizer failed on this: range ",
    ),
    "merges no list": ("bpe", dict(model__merges=5), "MergeType"),
    "merge of three": ("bpe", dict(model__merges=[["a", "b", "c"]]), "MergeType"),
    "stride": ("bpe", dict(truncation={**CUT, "max_length": 2, "stride": 5}), "got stride=5, max_"),
    "no stride": ("bpe", dict(truncation={"stride": "a"}), "got stride='a', max_length=None"),
    "padding to 0": ("bpe", dict(padding={**FIXED, "strategy": {"Fixed": 0}}), "1 token, got 0"),
    "charsmap": (
        "bpe",
        dict(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9hYmM="}),
        "index out of bounds",
    ),
    "charsmap cut": (
        "bpe",
        dict(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "precompiled_charsmap",
    ),
    "id twice": (
        "bpe",
        dict(model__vocab=lambda v: {**v, "☃": 5}),
        "each once, got 5 in place of 6",
    ),
    "id 2^32-1": ("bpe", dict(model__vocab=lambda v: {**v, "☃": 2**32 - 1}), "got 4294967295 in"),
    "id 10^30": ("bpe", dict(model__vocab=lambda v: {**v, "☃": 10**30}), "expected u32"),
    "id gap": (
        "bpe",
        dict(model__vocab=lambda v: {**v, "☃": len(v) + 1}),
        "got 341 in place of 340",
    ),
    "id negative": ("bpe", dict(model__vocab=lambda v: {**v, "☃": -1}), "`-1`, expected u32"),
    "id of text": ("bpe", dict(model__vocab=lambda v: {**v, "☃": "1"}), "expected u32"),
    "vocab list": ("bpe", dict(model__vocab=[1, 2]), "expected a map"),
    "no vocab": ("bpe", dict(model__vocab=None), "expected a map"),
    "empty": ("bpe", dict(model__vocab={}, model__merges=[], added_tokens=[]), "tokens, got none"),
    "no model": ("bpe", dict(model=None), "ModelUntagged"),
    "missing unk": ("bpe", dict(model__unk_token="[x]"), r"in the vocabulary, got '\[x\]'"),
    "missing unk, words": ("wordpiece", dict(model__unk_token="[x]"), r"Missing \[UNK\]|'\[x\]'"),
    "unk_id": ("unigram", dict(model__unk_id=10**6), "UnkIdNotInVocabulary"),
    "piece twice": ("unigram", dict(model__vocab=lambda v: [*v, ["a", 0.0]]), "each once, got"),
    "piece short": ("unigram", dict(model__vocab=[["a"]]), "tuple of size 2"),
    "added no list": ("bpe", dict(added_tokens=5), "expected a sequence"),
    "added no dict": ("bpe", dict(added_tokens=[5]), "AddedTokenWithId"),
    "added id": (
        "bpe",
        dict(added_tokens=added(id=2**32 - 1)),
        "'new' must have the id 340, got 42",
    ),
    "added other id": ("bpe", dict(added_tokens=added(content="<s>", id=9)), "the id 1, got 9"),
    "template": (
        "bpe",
        dict(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "the tokenizer failed on this",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_b26_crafted_files(content, name):
    kind, changes, message = BAD[name]
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        kformer.Tokenizer(changed(content[kind], **changes))
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+$"])
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_b26_patterns_that_never_end(content, pattern, place):
    """In time, the text comes back as it was or the pattern is refused."""
    part = {"pattern": {"Regex": pattern}}
    part |= SPLIT if place == "pre_tokenizer" else {"type": "Replace", "content": "x"}
    behind = [part, content["bpe"]["pre_tokenizer"]]
    if place == "pre_tokenizer":
        part = {"type": "Sequence", "pretokenizers": behind}
    tokenizer = kformer.Tokenizer(changed(content["bpe"], **{place: part}))
    text, start = "a" * 60 + "!", time.monotonic()
    try:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    except ValueError as error:
        assert "the tokenizer failed on this: Onig: Regex search error: retry-limit" in str(error)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "a tokenizer file must have 1 to .* bytes, got 0 in .*tokenizer.json"),
        (b"<html>", "must be JSON, got Expecting value: line 1 column 1"),
        (b"\xff\xfe{", "must be UTF-8, got byte 0 of .*tokenizer.json"),
        (b"\xef\xbb\xbf{}", "must be JSON, got Unexpected UTF-8 BOM"),
        (b"[" * 10**5, "at most 32 levels deep"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "at most 32 levels deep"),
        (b'{"model": 1, "model": 2}', "every key once, got 'model' twice"),
        (b'{"model": NaN}', "finite numbers, got NaN"),
        (b'{"model": -Infinity}', "finite numbers, got -Infinity"),
        (b'{"model": 1e400}', "finite numbers, got 1e400"),
        (b'{"model": ' + b"9" * 10**6 + b"}", "numbers of 400 digits at most, got more"),
        (b"[]", "one JSON object, got list"),
        (b"3", "one JSON object, got int"),
        (b"{}", "the tokenizer failed on this: .*"),
    ],
)
def test_b26_files_that_are_none(tmp_path, written, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=message):
        kformer.Tokenizer.load(path)


def test_b26_places_without_a_file(tmp_path):
    with pytest.raises(ValueError, match=f"must be a file, got a folder at {tmp_path}"):
        kformer.Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="must be a file, got nothing at .*nowhere"):
        kformer.Tokenizer.load(tmp_path / "nowhere")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match="bytes, got 67,108,865 in .*large"):
        kformer.Tokenizer.load(tmp_path / "large")


def test_many_equal_keys_are_found_at_once():
    keys = [f'"{i}": 0' for i in range(200_000)] + ['"last": 0', '"last": 0']
    start = time.monotonic()
    with pytest.raises(ValueError, match="got 'last' twice"):
        files.parse_json("{" + ",".join(keys) + "}")
    assert time.monotonic() - start < 2


def test_a_large_vocabulary_loads_in_time(content):
    vocab = {f"token{i}": i for i in range(5, 150_000)}
    first = dict(list(content["wordpiece"]["model"]["vocab"].items())[:5])
    text = changed(content["wordpiece"], model__vocab={**first, **vocab})
    start = time.monotonic()
    assert kformer.Tokenizer(text).vocabulary_size == 150_000
    assert time.monotonic() - start < 3


def test_only_errors_of_the_library_are_turned():
    class PanicException(BaseException):
        pass

    for error, expected in [
        (PanicException("index\nmore"), "the tokenizer failed on this: index$"),
        (TypeError(), "the tokenizer failed on this: TypeError"),
        (ValueError("as it is"), "^as it is$"),
    ]:
        with pytest.raises(ValueError, match=expected), native_errors():
            raise error
    for error in (KeyboardInterrupt, SystemExit, MemoryError):
        with pytest.raises(error), native_errors():
            raise error


@pytest.mark.parametrize("kind", KINDS)
def test_b27_texts(trained, kind):
    tokenizer = trained[kind]
    texts = ["^" * 10**6, "\0" * 10**5, " " * 10**5, "\n" * 10**5, "\u202eא\u0301" * 10**4, ""]
    start = time.monotonic()
    for text in texts:
        back = tokenizer.decode(tokenizer.encode(text))
        assert back == text or kind not in ("bpe", "byte")
    assert time.monotonic() - start < 60  # it does not hang


def test_b27_ten_megabytes_in_a_line(trained):
    text = "word " * 1000 + "x" * 10**7
    ids = trained["bpe"].encode(text)
    assert len(ids) < len(text) and trained["bpe"].decode(ids[-1000:]) == text[-1000:]


# Tokenizers of others


class Plain:
    """The least there can be: letters by their number."""

    def encode(self, text):
        return np.array([ord(c) - 96 for c in text], "int32")

    def decode(self, ids):
        return "".join(chr(i + 96) for i in ids)


class LikeKeras:
    """The shape of keras-nlp's tokenizers."""

    pad_token_id, start_token_id, end_token_id = 0, 27, 28
    give = staticmethod(lambda text: text)

    def vocabulary_size(self):
        return 29

    def tokenize(self, text):
        return ops.convert_to_tensor([ord(c) - 96 for c in text], dtype="int32")

    def detokenize(self, ids):
        return self.give("".join(chr(int(i) + 96) for i in ids))


class LikeHuggingFace(Plain):
    vocab_size, pad_token_id, cls_token_id, sep_token_id, mask_token_id = 31, 0, 28, 29, 30

    def encode(self, text, add_special_tokens=True):
        ids = super().encode(text).tolist()
        return [28, *ids, 29] if add_special_tokens else ids


def test_foreign_tokenizers():
    plain = adapt(Plain())
    assert isinstance(plain, ForeignTokenizer) and adapt(plain) is plain and adapt(None) is None
    assert plain.encode("abc") == [1, 2, 3] and plain.encode(["a", ""]) == [[1], []]
    assert plain.decode([1, 2]) == "ab" and plain.decode(np.array([[1], [2]])) == ["a", "b"]
    assert plain.vocabulary_size is None and plain.pad_id is None
    assert repr(plain) == "<Plain for kformer>"
    with pytest.raises(
        ValueError, match="bos=True needs a tokenizer with a bos_id, got <Plain for"
    ):
        plain.encode("a", bos=True)
    with pytest.raises(ValueError, match="texts must be strings, got int as text 1"):
        plain.encode(["a", 1])
    face = adapt(LikeHuggingFace())
    assert face.encode("ab", bos=True, eos=True) == [28, 1, 2, 29] and face.encode("ab") == [1, 2]
    assert face.decode([28, 1, 30, 2, 29, 0]) == "ab"
    assert (face.vocabulary_size, face.mask_id, face.unk_id) == (31, 30, None)


def test_keras_nlp_tokenizers():
    for give in (str, str.encode, np.array, lambda text: np.array([text.encode()], object)):
        inner = LikeKeras()
        inner.give = give
        tokenizer = adapt(inner)
        assert tokenizer.vocabulary_size == 29 and tokenizer.bos_id == 27 and tokenizer.eos_id == 28
        assert tokenizer.encode(["ab", "c"], bos=True, eos=True) == [[27, 1, 2, 28], [27, 3, 28]]
        assert tokenizer.decode(ops.convert_to_tensor([27, 1, 2, 28, 0])) == "ab"
        assert tokenizer.decode([[1], [2]]) == ["a", "b"]


def test_foreign_tokenizers_that_do_not_fit():
    class Wrong(Plain):
        pad_id = staticmethod(lambda: -1)  # sentencepiece's way to say that there is none

        def encode(self, text):
            return list(text)

    assert adapt(Wrong()).pad_id is None
    with pytest.raises(ValueError, match=r"a list of ids for a text, got shape \(1,\), dtype <U1"):
        adapt(Wrong()).encode("a")
    with pytest.raises(ValueError, match="must have encode and decode .*, got dict"):
        adapt({})
    with pytest.raises(ValueError, match="must have encode and decode .*, got int"):
        kformer.CausalLM(config(), tokenizer=3)


def test_the_library_itself_is_a_foreign_tokenizer(trained):
    mine = trained["bpe"]
    theirs = adapt(mine.native)
    assert theirs.encode(TEXTS[:2]) == mine.encode(TEXTS[:2])
    assert theirs.decode(mine.encode(TEXTS[:2])) == TEXTS[:2]
    assert theirs.vocabulary_size == mine.vocabulary_size


# Models with tokenizers


def test_models_keep_their_tokenizer(trained, tmp_path):
    tokenizer, path = trained["bpe"], tmp_path / "model.keras"
    model = kformer.CausalLM(config(vocabulary_size=340), tokenizer=tokenizer)
    assert (model.config.bos_id, model.config.eos_id) == (1, 2)
    model.save(path)
    again = keras.saving.load_model(path)
    assert again.tokenizer == tokenizer and again.tokenizer is not tokenizer
    with pytest.raises(ValueError, match="vocabulary_size must be the tokenizer's, 340, got .*=23"):
        kformer.CausalLM(config(), tokenizer=tokenizer)


def test_two_tokenizers(trained, tmp_path):
    source, target, path = trained["bpe"], trained["char"], tmp_path / "model.keras"
    sizes = dict(vocabulary_size=340, target_vocabulary_size=target.vocabulary_size)
    both = dict(tokenizer=source, target_tokenizer=target)
    model = kformer.Seq2SeqLM(config(**sizes, num_layers=1), **both)
    model.save(path)
    again = keras.saving.load_model(path)
    assert again.tokenizer == source and again.target_tokenizer == target
    shared = kformer.Seq2SeqLM(config(vocabulary_size=340, num_layers=1), tokenizer=source)
    shared.save(path)
    again = keras.saving.load_model(path)
    assert again.tokenizer == again.target_tokenizer == source


def test_foreign_tokenizers_are_not_stored(tmp_path):
    path = tmp_path / "model.keras"
    model = kformer.CausalLM(config(vocabulary_size=29), tokenizer=LikeKeras())
    assert (model.config.bos_id, model.config.eos_id) == (27, 28)
    message = "tokenizer: only a kformer.Tokenizer is stored .*, got <LikeKeras for kformer>"
    with pytest.warns(UserWarning, match=message):
        model.save(path)
    assert keras.saving.load_model(path).tokenizer is None


# Writing files


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.write_text(path, "one ñ")
    with pytest.raises(RuntimeError, match="in the middle"), files.written(path) as beside:
        beside.write_text("two")
        raise RuntimeError("in the middle")
    assert path.read_text("utf-8") == "one ñ" and [p.name for p in path.parent.iterdir()] == [
        "a.txt"
    ]
    files.write_json(path, {"b": [1, "ñ"]})
    assert files.parse_json(path.read_text("utf-8")) == {"b": [1, "ñ"]}
    assert len(files.sha256(path)) == 64 and files.sha256(path) != files.sha256(__file__)


def test_folders_take_the_place_of_folders(tmp_path):
    folder = tmp_path / "folder"
    for name in ("one", "two"):
        with files.written(folder) as beside:
            (beside / "inner").mkdir(parents=True)
            (beside / "inner" / name).write_text(name)
        assert [p.name for p in folder.rglob("*")] == ["inner", name]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    files.remove(folder)
    files.remove(folder)
    assert not folder.exists()


def test_links_are_removed_and_not_what_they_point_to(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    files.write_text(folder / "a", "x")
    link.symlink_to(folder)
    files.remove(link)
    assert (folder / "a").is_file() and not link.exists()


def test_tokenizers_of_keras_nlp():
    """Its WordPiece tokenizer, in the same data pipeline as kformer's own."""
    reason = "needs the extra keras-nlp, which brings TensorFlow"
    keras_nlp = pytest.importorskip("keras_nlp", reason=reason)
    vocabulary = ["[PAD]", "[UNK]", "[START]", "[END]", "the", "cat", "sat", "##s", "mat"]
    tokenizer = keras_nlp.tokenizers.WordPieceTokenizer(vocabulary, lowercase=True)
    adapted = adapt(tokenizer)
    assert adapted.vocabulary_size == len(vocabulary)
    assert adapted.encode(["the cat sat", "the mats"]) == [[4, 5, 6], [4, 8, 7]]
    assert adapted.decode([[4, 5, 6], [4, 8, 7]]) == ["the cat sat", "the mats"]
    texts = ["the cat sat", "the mats", "the cats sat", "mat"]
    data = kformer.data.ClassificationData(texts, [0, 1, 0, 1], tokenizer)
    small = dict(num_layers=1, hidden_dim=8, num_heads=2)
    config = kformer.Config(vocabulary_size=len(vocabulary), **small)
    model = kformer.TextClassifier(config, 2, tokenizer=tokenizer)
    model.compile()
    assert np.isfinite(model.fit(data, verbose=0).history["loss"][0])
    assert model.classify(texts).shape == (4, 2)
