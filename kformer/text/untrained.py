"""The kinds of tokenizers, as the `tokenizers` library makes them before they have seen a text."""

KINDS = ("bpe", "wordpiece", "unigram", "char", "byte")
SPECIALS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}


def make_native(kind, size, special):
    """An untrained tokenizer of the library, and its trainer."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Native

    given = dict(vocab_size=size, special_tokens=special, show_progress=False)
    unk = SPECIALS["unk"]
    if kind in ("bpe", "byte"):
        native = Native(models.BPE())
        level = dict(add_prefix_space=False, use_regex=kind == "bpe")
        native.pre_tokenizer = pre_tokenizers.ByteLevel(**level)
        native.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if kind == "byte":
            given["vocab_size"] = len(special) + len(alphabet)
        return native, trainers.BpeTrainer(initial_alphabet=alphabet, **given)
    if kind == "wordpiece":
        native = Native(models.WordPiece(unk_token=unk))
        native.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        native.decoder = decoders.WordPiece()
        return native, trainers.WordPieceTrainer(**given)
    if kind == "unigram":
        native = Native(models.Unigram())
        # Pieces are whole words here: without the split a text could spell a special token.
        apart = pre_tokenizers.Split(Regex(r"[<\[]"), "isolated")
        native.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), apart])
        native.decoder = decoders.Metaspace()
        return native, trainers.UnigramTrainer(unk_token=unk, **given)
    native = Native(models.WordLevel(unk_token=unk))
    native.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    native.decoder = decoders.Fuse()
    return native, trainers.WordLevelTrainer(**given)


def digits_apart(pre_tokenizer):
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizer])


def make_normalizer(normalization, lowercase):
    from tokenizers import normalizers

    parts = {None: [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}[normalization]
    parts = [*parts, normalizers.Lowercase()] if lowercase else parts
    return normalizers.Sequence(parts) if parts else None
