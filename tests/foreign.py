"""Small tokenizers as other models have them, made by the libraries that theirs were made with."""

import json

from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors, trainers
from tokenizers import Tokenizer as Native
from tokenizers import pre_tokenizers as pre

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "Hello, world! It's 12:30 on March 4, 2025; isn't it?",
    "El niño comió ¡dos! manzanas en el jardín.",
    "def f(x):\n    return x ** 2  # a comment\n",
    "user assistant system\nYou are a helpful assistant.\n\nWhat is 2 + 2?\n",
] * 20
# No special token is spelled in here: transformers would take it for one.
NASTY = [
    "", " ", "\n", "  two  spaces ", "\t\ttabs\r\n", "a\u0301e\u0301 é", "\u202eשלום", "日本語。",
    "👩‍👩‍👧‍👦🏳️‍🌈", "\ufeffbom", "\0nul", "\u2028\u0085", "'s 'LL don't", "1234567.89",
    "ＡＢＣ １２", "<0x41>", "▁already ▁there", "Ġ Ċ", "x" * 300, "\n\n\n a", "<|im_st", "#s ##s",
    "https://a.b/c?d=e&f",
    *CORPUS[:5],
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def train(native, trainer, special, size=400, **options):
    made = trainer(vocab_size=size, special_tokens=special, show_progress=False, **options)
    native.train_from_iterator(CORPUS, made)
    return native


def template(native, *parts):
    names = [part for part in parts if part != "$A"]
    pairs = [(name, native.token_to_id(name)) for name in dict.fromkeys(names)]
    native.post_processor = processors.TemplateProcessing(
        single=list(parts), pair=[*parts, "$B:1"], special_tokens=pairs
    )
    return native


def bert():
    native = Native(models.WordPiece(unk_token="[UNK]"))
    native.normalizer = normalizers.BertNormalizer(lowercase=True)
    native.pre_tokenizer, native.decoder = pre.BertPreTokenizer(), decoders.WordPiece()
    train(native, trainers.WordPieceTrainer, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    names = dict(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
    return template(native, "[CLS]", "$A", "[SEP]"), names


def byte_level(special, splitter=None, **model):
    native = Native(models.BPE(**model))
    level = pre.ByteLevel(add_prefix_space=False, use_regex=splitter is None)
    native.pre_tokenizer = pre.Sequence([splitter, level]) if splitter else level
    native.decoder = decoders.ByteLevel()
    return train(native, trainers.BpeTrainer, special, initial_alphabet=pre.ByteLevel.alphabet())


def gpt2():
    native = byte_level(["<|endoftext|>"])
    native.post_processor = processors.ByteLevel(trim_offsets=False)
    return native, dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")


def roberta():
    native = byte_level(["<s>", "<pad>", "</s>", "<unk>"])
    native.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    native.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(bos="<s>", eos="</s>", cls="<s>", sep="</s>", unk="<unk>", pad="<pad>")
    return native, {**names, "mask": "<mask>"}


def llama3():
    splitter = pre.Split(Regex(LLAMA3), "isolated")
    native = byte_level([], splitter, ignore_merges=True)
    heads = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]
    native.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *heads])
    names = dict(bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|pad|>")
    return template(native, "<|begin_of_text|>", "$A"), names


def qwen():
    native = byte_level([], pre.Split(Regex(QWEN), "isolated"))
    native.normalizer = normalizers.NFC()
    native.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    native.add_tokens([AddedToken("<think>", normalized=False)])
    native.post_processor = processors.ByteLevel(trim_offsets=False)
    return native, dict(eos="<|im_end|>", pad="<|endoftext|>")


def pieces(special, metaspace):
    """BPE on whole sentences with bytes for what it does not know, as sentencepiece has it."""
    native = Native(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    native.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=True)
    special = [*special, *BYTES]
    train(native, trainers.BpeTrainer, special, size=700, limit_alphabet=80)
    content = json.loads(native.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in BYTES]
    native = Native.from_str(json.dumps(content))
    strip = []
    if metaspace:
        native.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        native.normalizer, native.pre_tokenizer = normalizers.Sequence(list(steps)), None
        strip = [decoders.Strip(" ", 1, 0)]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    native.decoder = decoders.Sequence(back)
    return native


def llama2():
    native = pieces(["<unk>", "<s>", "</s>"], metaspace=False)
    return template(native, "<s>", "$A"), dict(bos="<s>", eos="</s>", unk="<unk>")


def mistral():
    native = pieces(["<unk>", "<s>", "</s>"], metaspace=True)
    native.add_special_tokens(["[INST]", "[/INST]"])
    return template(native, "<s>", "$A"), dict(bos="<s>", eos="</s>", unk="<unk>")


def gemma():
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    native = pieces(special, metaspace=False)
    native.normalizer = normalizers.Replace(" ", "▁")
    native.add_tokens([AddedToken("\n\n", normalized=False)])
    names = dict(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>")
    return template(native, "<bos>", "$A"), names


def t5():
    native = Native(models.Unigram())
    native.normalizer = normalizers.Sequence([normalizers.NFKC()])
    native.pre_tokenizer, native.decoder = pre.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    train(native, trainers.UnigramTrainer, special, size=200, unk_token="<unk>")
    native.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    return template(native, "$A", "</s>"), dict(eos="</s>", unk="<unk>", pad="<pad>")


MAKERS = dict(bert=bert, gpt2=gpt2, roberta=roberta, llama3=llama3, qwen=qwen, llama2=llama2,
              mistral=mistral, gemma=gemma, t5=t5)  # fmt: skip


def save(name, folder, **settings):
    """As `transformers` saves it."""
    from transformers import PreTrainedTokenizerFast

    native, names = MAKERS[name]()
    named = {f"{key}_token": value for key, value in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=native, **named, **settings).save_pretrained(folder)
    return folder
