"""Tokenizers of Hugging Face checkpoints: the same ids as `transformers`, in and out."""

import json
import pickle

import foreign
import keras
import pytest
from support import config

import kformer
from kformer.interop.header import CheckpointError
from kformer.interop.tokenizers import read_tokenizer, tokenizer_texts

transformers = pytest.importorskip("transformers", reason="compares with transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("tokenizers")
    return {name: foreign.save(name, top / name) for name in foreign.MAKERS}


def theirs(folder, **options):
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


def same_ids(mine, other):
    for text in foreign.NASTY:
        assert mine.encode(text) == other.encode(text, add_special_tokens=False), repr(text)
        assert mine.encode(text, special=True) == other.encode(text), repr(text)
        ids = mine.encode(text)
        plain = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert mine.decode(ids) == other.decode(ids, **plain), repr(text)
    assert mine.encode(foreign.NASTY, special=True) == other(foreign.NASTY)["input_ids"]


@pytest.mark.parametrize("name", foreign.MAKERS)
def test_the_same_ids(folders, name):
    mine, other = read_tokenizer(folders[name]), theirs(folders[name])
    same_ids(mine, other)
    assert mine.vocabulary_size == len(other)
    for here, there in (("pad", "pad"), ("unk", "unk"), ("mask", "mask")):
        assert getattr(mine, f"{here}_id") == getattr(other, f"{there}_token_id")
    first, last = ("cls", "sep") if name == "bert" else ("bos", "eos")
    assert mine.bos_id == getattr(other, f"{first}_token_id")
    assert mine.eos_id == getattr(other, f"{last}_token_id")


@pytest.mark.parametrize("name", foreign.MAKERS)
def test_special_tokens_in_a_text_are_text(folders, name):
    """Even where the model itself has them as whole words, as the unigrams of T5."""
    mine, other = read_tokenizer(folders[name]), theirs(folders[name], split_special_tokens=True)
    special = [token.content for token in other.added_tokens_decoder.values() if token.special]
    ids = {mine.token_id(text) for text in special}
    assert ids - {mine.unk_id} <= mine.reserved <= ids and mine.reserved
    assert mine.eos_id in mine.reserved
    for text in [*special, "".join(special), f"a{special[-1]}b", f"a {special[0]} b "]:
        found = mine.encode(text)
        assert mine.reserved.isdisjoint(found), text
        if mine.reserved.isdisjoint(other.encode(text, add_special_tokens=False)):
            assert found == other.encode(text, add_special_tokens=False), text
    before, after = mine.template
    around = mine.encode(special[0], special=True)
    assert around == [*before, *mine.encode(special[0]), *after]


@pytest.mark.parametrize("name", foreign.MAKERS)
def test_written_for_transformers(folders, tmp_path, name):
    """Beside the config of a model, which makes AutoTokenizer look for a class of its own."""
    mine = read_tokenizer(folders[name])
    kind = dict(llama3="llama", llama2="llama", qwen="qwen2").get(name, name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for file, text in tokenizer_texts(mine).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    other = theirs(tmp_path)
    same_ids(mine, other)
    assert read_tokenizer(tmp_path) == mine
    if mine.template == ([mine.bos_id], [mine.eos_id]):
        assert (other.cls_token_id, other.sep_token_id) == (mine.bos_id, mine.eos_id)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "byte"])
def test_trained_here_used_there(tmp_path, kind):
    mine = kformer.Tokenizer.train(foreign.CORPUS, 400, kind, mask=True)
    texts = tokenizer_texts(mine)
    assert set(texts) == {"tokenizer.json", "tokenizer_config.json"}
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    same_ids(mine, theirs(tmp_path))
    back = read_tokenizer(tmp_path)
    assert back.to_json() == mine.to_json() and back.template is None
    assert (back.pad_id, back.bos_id, back.eos_id, back.unk_id, back.mask_id) == (0, 1, 2, 3, 4)


def test_what_stands_around_a_text(folders):
    bert = read_tokenizer(folders["bert"])
    ids = bert.encode("the quick brown fox")
    assert bert.template == ([2], [3])
    assert bert.encode("the quick brown fox", special=True) == [2, *ids, 3]
    assert bert.encode(["the quick brown fox"], special=True, max_length=4) == [[2, *ids[:2], 3]]
    assert bert.encode("the quick", max_length=1) == ids[:1]
    assert bert.encode("the", special=True, max_length=2) == [2, 3]
    assert bert.encode("the quick", bos=True, max_length=2) == [2, ids[0]]
    with pytest.raises(ValueError, match="max_length must be at least the 2 ids around .*, got 1"):
        bert.encode("the", special=True, max_length=1)
    with pytest.raises(ValueError, match="special=True leaves no room for bos=True, eos=False"):
        bert.encode("the", special=True, bos=True)
    plain = kformer.Tokenizer.train(foreign.CORPUS, 300)
    assert plain.template is None and plain.encode("the", special=True) == plain.encode("the")


def test_more_ids_than_tokens(folders, tmp_path):
    """Tables are padded; ids that no token has decode to nothing."""
    tokens = read_tokenizer(folders["llama3"]).vocabulary_size
    mine = read_tokenizer(folders["llama3"], tokens + 10, bos_id=5, pad_id=tokens + 3)
    assert mine.vocabulary_size == tokens + 10
    assert (mine.bos_id, mine.pad_id) == (5, tokens + 3)
    ids = mine.encode("Hello fox")
    assert mine.decode([*ids, tokens, tokens + 9, mine.pad_id]) == "Hello fox"
    assert mine.tokens([tokens + 9]) == [""]
    with pytest.raises(ValueError, match=rf"in \[0, {tokens + 10}\), got {tokens + 10}"):
        mine.decode([tokens + 10])
    with pytest.raises(CheckpointError, match=f"whole number of at least {tokens}, got 300"):
        read_tokenizer(folders["llama3"], 300)
    with pytest.raises(CheckpointError, match=r"bos_id must be an id in \[0, 406\).*, got 406"):
        read_tokenizer(folders["llama3"], 406, bos_id=406)
    content = json.loads((folders["bert"] / "tokenizer.json").read_text("utf-8"))
    content["model"]["vocab"]["apart"] = 500
    gap = kformer.Tokenizer(json.dumps(content), vocabulary_size=512)
    assert gap.encode("apart fox")[0] == 500 and gap.decode([500, 400, 500]) == "apart apart"
    with pytest.raises(ValueError, match="each once, got 500 in place of 182"):
        kformer.Tokenizer(json.dumps(content))
    content["model"]["vocab"]["twice"] = 500
    with pytest.raises(ValueError, match="each once, got 500 in place of"):
        kformer.Tokenizer(json.dumps(content), vocabulary_size=512)


def test_it_survives(folders, tmp_path):
    mine = read_tokenizer(folders["gemma"], 512, eos_id=5)
    mine = kformer.Tokenizer(**{**mine.get_config(), "chat_template": "{{ messages }}"})
    model = kformer.CausalLM(config(vocabulary_size=512, num_layers=1), tokenizer=mine)
    assert (model.config.bos_id, model.config.eos_id) == (2, 5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").tokenizer
    for again in (loaded, pickle.loads(pickle.dumps(mine)), kformer.Tokenizer.from_config(
        mine.get_config()
    )):  # fmt: skip
        assert again == mine and hash(again) == hash(mine)
        assert again.chat_template == "{{ messages }}" and again.vocabulary_size == 512
        assert again.eos_id == 5 and again.template == ([2], []) and again.reserved == mine.reserved
    assert mine != read_tokenizer(folders["gemma"], 512)


def test_prompts_begin_as_the_file_says(folders):
    """GPT-2 reads a prompt as it is, Llama after bos; T5 and BART end or enclose a source."""
    for name, before in (("gpt2", []), ("llama2", [1]), ("bert", [2])):
        tokenizer = read_tokenizer(folders[name])
        small = config(vocabulary_size=tokenizer.vocabulary_size, num_layers=1)
        model = kformer.CausalLM(small, tokenizer=tokenizer)
        assert model.prompt_rows(["fox"]) == [[*before, *tokenizer.encode("fox")]]
        assert model.prompt_rows(["fox"], begins=False) == [tokenizer.encode("fox")]
    tokenizer = read_tokenizer(folders["t5"], bos_id=0)
    small = config(vocabulary_size=tokenizer.vocabulary_size, num_layers=1)
    model = kformer.Seq2SeqLM(small, tokenizer=tokenizer)
    assert model.prompt_rows(["fox"]) == [[*tokenizer.encode("fox"), 1]]
    tokenizer = read_tokenizer(folders["roberta"])
    small = config(vocabulary_size=tokenizer.vocabulary_size, num_layers=1, pad_id=1)
    model = kformer.Seq2SeqLM(small, tokenizer=tokenizer)
    assert model.prompt_rows(["fox"]) == [tokenizer.encode("fox", special=True)]


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_hidden_words_stand_between_what_the_file_says(folders, monkeypatch, name):
    mine, other = read_tokenizer(folders[name]), theirs(folders[name])
    given = dict(vocabulary_size=mine.vocabulary_size, pad_id=mine.pad_id, num_layers=1)
    model, seen = kformer.MaskedLM(config(**given), tokenizer=mine), []
    predict = model.predict_on_batch
    monkeypatch.setattr(model, "predict_on_batch", lambda x: (seen.append(x.copy()), predict(x))[1])
    filled = model.fill("the [MASK] jumps over [MASK]", top=2)
    text = "the [MASK] jumps over [MASK]".replace("[MASK]", other.mask_token)
    assert seen[0].tolist() == [other(text)["input_ids"]] and len(filled) == 2


def test_models_bring_their_tokenizer(folders, tmp_path):
    """Out with the model and in again, with a table that is larger than the tokenizer."""
    for name, arguments in (("llama3", dict(norm="rms", gated=True)), ("gpt2", {})):
        position = "rotary" if name == "llama3" else "learned"
        given = dict(position=position, use_bias=name == "gpt2", vocabulary_size=416, pad_id=None)
        given |= dict(activation="silu" if arguments else "gelu_tanh", tie_embeddings=True)
        tokenizer = read_tokenizer(changed(folders[name], tmp_path, pad_token=None), 416)
        model = kformer.CausalLM(config(**given, **arguments), tokenizer=tokenizer)
        kformer.to_hf(model, tmp_path / "out")
        again = kformer.from_hf(tmp_path / "out")
        assert again.tokenizer == tokenizer and again.config.eos_id == tokenizer.eos_id
        assert again.generate("the fox", 5) == model.generate("the fox", 5)
        same_ids(tokenizer, theirs(tmp_path / "out"))
        settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
        settings["pad_token"] = "Hello" if name == "llama3" else "<|endoftext|>"
        (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(settings))
        expected = tokenizer.token_id("Hello") if name == "llama3" else None
        again = kformer.from_hf(tmp_path / "out")
        assert again.config.pad_id == again.tokenizer.pad_id == expected


# What stands beside tokenizer.json


def changed(folder, into, **settings):
    """A copy of the files with other settings; None takes a key out."""
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    known = json.loads((folder / "tokenizer_config.json").read_text("utf-8")) | settings
    (into / "tokenizer_config.json").write_text(json.dumps(known))
    return into


def test_tokens_that_only_the_settings_know(folders, tmp_path):
    token = dict(content="<tool>", lstrip=False, normalized=False, rstrip=False, single_word=False)
    decoder = {"404": {**token, "special": True}, "405": {**token, "content": "<x>"}}
    more = dict(additional_special_tokens=["<think>"], mask_token={"__type": "AddedToken", **token})
    folder = changed(folders["qwen"], tmp_path, added_tokens_decoder=decoder, **more)
    mine = read_tokenizer(folder)
    assert (mine.token_id("<tool>"), mine.token_id("<x>"), mine.vocabulary_size) == (404, 405, 406)
    assert mine.mask_id == 404 and {403, 404} <= mine.reserved and 405 not in mine.reserved
    assert mine.encode("a<x>b") == theirs(folder).encode("a<x>b")


def test_names_of_special_tokens(folders, tmp_path):
    """What the settings leave out does not exist, unless they name nothing at all."""
    qwen = read_tokenizer(folders["qwen"])
    assert (qwen.bos_id, qwen.eos_id, qwen.pad_id) == (None, 402, 400)
    ends = read_tokenizer(changed(folders["qwen"], tmp_path, pad_token="<|im_end|>"))
    assert (ends.eos_id, ends.pad_id) == (402, None)
    assert read_tokenizer(tmp_path, pad_id=402).pad_id == 402
    folder = changed(folders["qwen"], tmp_path, eos_token=None)
    (folder / "tokenizer_config.json").unlink()
    bare = read_tokenizer(folder)
    assert (bare.bos_id, bare.eos_id, bare.chat_template) == (400, 400, None)
    assert read_tokenizer(tmp_path / "nowhere") is None
    content = dict(pad_token=None, bos_token={"content": "<|im_start|>"}, eos_token="not there")
    named = read_tokenizer(changed(folders["qwen"], tmp_path, **content))
    assert (named.pad_id, named.bos_id, named.eos_id) == (None, 401, None)


def test_chat_templates_are_found(folders, tmp_path):
    folder = changed(folders["gpt2"], tmp_path, chat_template="one")
    assert read_tokenizer(folder).chat_template == "one"
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "two"}]
    folder = changed(folders["gpt2"], tmp_path, chat_template=several)
    assert read_tokenizer(folder).chat_template == "two"
    assert (
        read_tokenizer(changed(folders["gpt2"], tmp_path, chat_template=[5])).chat_template is None
    )
    (folder / "chat_template.jinja").write_text("three")
    mine = read_tokenizer(folder)
    assert mine.chat_template == tokenizer_texts(mine)["chat_template.jinja"] == "three"


BAD = {
    "no object": ("[]", "tokenizer_config.json must hold one JSON object, got list"),
    "no JSON": ("<html>", "tokenizer_config.json must be JSON, got Expecting value"),
    "key twice": ('{"a": 1, "a": 2}', "every key once, got 'a' twice"),
    "token a number": ('{"bos_token": 5}', "bos_token of a .* or null, got 5"),
    "token a list": ('{"eos_token": ["a"]}', r"eos_token of a .* or null, got \['a'\]"),
    "content a list": ('{"pad_token": {"content": [1]}}', "pad_token of a .* a token or null"),
    "special a number": ('{"additional_special_tokens": [1]}', "special_tokens of a .*, got 1"),
    "decoder a list": ('{"added_tokens_decoder": [1]}', r"hold tokens by id, got \[1\]"),
    "decoder of none": ('{"added_tokens_decoder": {"a": {"content": "x"}}}', "base 10: 'a'"),
    "decoder without": ('{"added_tokens_decoder": {"1": {}}}', "the tokenizer failed on this"),
    "decoder elsewhere": ('{"added_tokens_decoder": {"9": {"content": "<x>"}}}', "id 400, got 9"),
    "template a number": ('{"chat_template": 5}', "1 to 262,144 characters, got int"),
    "template long": ('{"chat_template": "%s"}' % ("a" * 300_000), "characters, got 300,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_b26_settings(folders, tmp_path, name):
    text, message = BAD[name]
    folder = changed(folders["gpt2"], tmp_path)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(folder)


def test_b26_files(folders, tmp_path):
    folder = changed(folders["gpt2"], tmp_path)
    for text, message in (
        ("3", "tokenizer.json must hold one JSON object, got int"),
        ('{"added_tokens": 5}', "the tokenizer failed on this"),
        ('{"added_tokens": [5]}', "the tokenizer failed on this"),
        ("", "tokenizer.json must have 1 to 67,108,864 bytes, got 0"),
    ):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_tokenizer(folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(special_ids={"start": 1}), "by pad, bos, eos, unk, mask, got {'start': 1}"),
        (dict(special_ids=[1]), r"special_ids must be a dict .*, got \[1\]"),
        (dict(special_ids={"bos": -1}), r"bos_id must be an id in \[0, 400\) or a token, got -1"),
        (dict(special_ids={"bos": True}), r"bos_id must be .*, got True"),
        (dict(vocabulary_size=399), "vocabulary_size must be a whole number of at least 400"),
        (dict(vocabulary_size=4e2), "vocabulary_size must be a whole number .*, got 400.0"),
        (dict(chat_template=""), "chat_template must be a text of 1 to 262,144 .*, got 0"),
    ],
)
def test_wrong_arguments(folders, given, message):
    json_text = (folders["gpt2"] / "tokenizer.json").read_text("utf-8")
    with pytest.raises(ValueError, match=message):
        kformer.Tokenizer(json_text, **given)


def test_b26_templates(folders):
    content = json.loads((folders["bert"] / "tokenizer.json").read_text("utf-8"))
    special = content["post_processor"]["special_tokens"]["[CLS]"]
    special["ids"] = [10**6]
    with pytest.raises(ValueError, match=r"put ids below 182 around a text, got \[1000000, text"):
        kformer.Tokenizer(json.dumps(content))
    special["ids"] = [2]
    content["post_processor"]["single"] *= 2
    with pytest.raises(ValueError, match=r"around a text, got \[2, text, 3, 2, text, 3\]"):
        kformer.Tokenizer(json.dumps(content))
