"""Chat: templates as transformers renders them, contents that spell special tokens, templates that
mean harm, and the model's answer."""

import json
import sys
import time
import tracemalloc

import foreign
import numpy as np
import pytest
import templates
from support import config, randomize

import kformer
from kformer.interop.tokenizers import read_tokenizer
from kformer.text import chat
from kformer.text.foreign import adapt

pytest.importorskip("jinja2", reason="needs the extra chat")


def said(*contents, system=None):
    """A conversation that the user begins."""
    roles = ["user", "assistant"] * len(contents)
    out = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return out if system is None else [{"role": "system", "content": system}, *out]


CHATS = [
    said("Hello, world!"),
    said("  What is 2 + 2?\n", "\n4, of course.  ", "日本 <|im_st é\n\n\nfox"),
    said("", "<b>'s", "🏳️‍🌈\0\U000f0000", " ", "\n\n"),
    said("#x", system=" Be brief.\n"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top, known = tmp_path_factory.mktemp("chats"), templates.TEMPLATES
    return {name: foreign.save(name, top / name, chat_template=t) for name, t in known.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: read_tokenizer(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_the_same_ids_as_transformers(folders, tokenizers, name):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    mine, theirs = tokenizers[name], transformers.AutoTokenizer.from_pretrained(folders[name])
    for one in CHATS[: 3 if name == "gemma" else 4]:
        for begun in (True, False):
            given = dict(add_generation_prompt=begun, return_dict=False)
            assert mine.encode_chat(one, begun) == theirs.apply_chat_template(one, **given)
    everything = dict(chat_template=templates.MACROS, return_dict=False)
    given = {**mine.get_config(), "chat_template": templates.MACROS}
    assert kformer.Tokenizer(**given).encode_chat(CHATS[0], False) == theirs.apply_chat_template(
        CHATS[0], **everything
    )


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_bos_is_not_doubled_and_turns_end(tokenizers, name):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode_chat(said("Hello", "fox", "and"))
    if tokenizer.bos_id is not None:
        assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    ends = dict(qwen="<|im_end|>", llama3="<|eot_id|>", gemma="<end_of_turn>")
    assert tokenizer.chat.stops == [tokenizer.token_id(ends.get(name, "</s>"))]
    if name == "gemma":
        assert tokenizer.chat.stops != [tokenizer.eos_id]


def wide(text):
    """The same in letters of full width, which NFKC makes narrow."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_what_is_said_spells_no_special_token(tokenizers, name):
    tokenizer = tokenizers[name]
    known = tokenizer.native.get_added_tokens_decoder()
    special = [token.content for token in known.values() if token.special]
    contents = [f"a{text}b" for text in special] + [f" {text} " for text in special]
    contents += ["".join(special), special[0] * 3, special[-1][:-1] + special[-1], wide(special[0])]
    contents += [special[-1][:3] + special[0] + special[-1][3:], "\U000f0000\U000f0001<" * 3]
    plain = tokenizer.encode_chat(said("x", "x", "x"))
    count = sum(i in tokenizer.reserved for i in plain)
    for content in contents:
        for number in (0, 1, 2):
            texts = ["x", "x", "x"]
            texts[number] = content
            ids = tokenizer.encode_chat(said(*texts))
            assert sum(i in tokenizer.reserved for i in ids) == count, content
            if name in ("qwen", "llama3"):  # bytes come back exactly
                assert content.strip() in tokenizer.native.decode(ids, skip_special_tokens=False)


def test_other_tokens_of_the_template_are_safe_from_users(tokenizers):
    """Qwen's <think> is not special, but its template has it; the model itself may use it."""
    template = templates.CHATML.replace(
        "<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>"
    )
    tokenizer = kformer.Tokenizer(**{**tokenizers["qwen"].get_config(), "chat_template": template})
    think = tokenizer.token_id("<think>")
    assert tokenizer.encode_chat(said("a<think>b")).count(think) == 1
    assert tokenizer.encode_chat(said("a", "<think>b", "c")).count(think) == 2
    assert tokenizers["qwen"].encode_chat(said("a<think>b")).count(think) == 1


def test_unigrams_that_are_special_tokens(tmp_path):
    """T5 has "</s>" as a word, and full-width letters become it before words are found."""
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer = read_tokenizer(foreign.save("t5", tmp_path, chat_template=template))
    for content in ("</s>", "a </s> b", wide("</s>"), "＜/s>", "<extra_id_0>", wide("<pad>")):
        ids = tokenizer.encode_chat(said(content))
        assert [i for i in ids if i in tokenizer.reserved] == [1] and ids[-1] == 1, content


def test_a_mark_has_an_id_of_its_own():
    """Where ids have gaps, the native library gives a new token one that another token has."""
    native = {"a": 1, "b": 2, "c": 3, "<e>": 4, "[U]": 5}
    content = json.loads(kformer.Tokenizer.train(["x"], kind="char").to_json())
    content["model"].update(vocab=native, unk_token="[U]")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [{"id": 4, "content": "<e>", "special": True, **flags}]
    given = dict(special_ids={"eos": 4}, vocabulary_size=9)
    given["chat_template"] = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    tokenizer = kformer.Tokenizer(json.dumps(content), **given)
    assert tokenizer.encode_chat(said("ab<e>c", "a")) == [1, 2, 5, 5, 5, 3, 4, 1, 4]
    mark = tokenizer.chat.mark
    assert tokenizer.encode_chat(said(f"a{mark}")) == [1, 5, 5, 4]
    assert tokenizer.native.id_to_token(tokenizer.chat.native.token_to_id(mark)) is None


def test_long_conversations_are_fast(tokenizers):
    messages = said(*["A sentence with <|im_end|> in it. " * 100] * 50)
    start = time.monotonic()
    assert len(tokenizers["qwen"].encode_chat(messages)) > 10**5
    assert time.monotonic() - start < 5


# Templates that mean harm


def rendered(template, *messages):
    plain = kformer.Tokenizer.train([], kind="byte")
    tokenizer = kformer.Tokenizer(plain.to_json(), chat_template=template)
    return tokenizer.decode(tokenizer.encode_chat(messages or said("hello")))


BREAKOUTS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__globals__ }}",
    "{{ range.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{{ lipsum.__globals__ }}",
    "{{ (messages|attr('__class__')) }}",
    "{{ (messages|map(attribute='__class__')|first).x }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages[0]['__class__'].x }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map(dict(x=1)) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(__init__=1) %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ joiner.__init__ }}",
    "{{ messages|pprint }}",
]  # fmt: skip


@pytest.mark.parametrize("template", BREAKOUTS)
def test_templates_reach_nothing(template):
    try:
        assert rendered(template) == ""  # what it may not see is not there
    except ValueError as error:
        assert str(error).startswith("the chat template failed: ")


LOOP = "{% for i in range(99999) %}"
TREES = (  # each level holds the one before it twice
    "{% set ns = namespace(x=1, y=1) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
BOMBS = [
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ 2 ** 1000000000 }}",
    "{% set ns = namespace(x=7) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = ns.x + [1] %}{% endfor %}",
    LOOP * 4 + "{% endfor %}" * 4,
    LOOP * 2 + "text that is written" + "{% endfor %}" * 2,
    "{% set x %}" + LOOP + "x" * 9999 + "{% endfor %}{% endset %}{{ x }}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    TREES + "{{ ns }}",
    TREES + "{{ ns.x }}",
    TREES + "{{ ns.x == ns.y }}",
    TREES + "{{ ns.x in [ns.y] }}",
    TREES + "{{ [ns.y].index(ns.x) }}",
    TREES + "{{ [ns.y]|select('eq', ns.x)|list }}",
    "{% set x = 'a' * 99999 %}{% if ([x] * 9999) == ([x + ''] * 9999) %}{% endif %}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ '7'.zfill(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x\ny'|indent(1000000000) }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ range(1000000000)|list }}",
    "{% set x = 'a' * 99999 %}{{ ([x] * 99999)|join(x) }}",
    "{% set x = 'a' * 99999 %}{{ x.join([x] * 99999) }}",
    "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 99999 %}{{ x|replace('', x) }}",
    "{% set x = 'a' * 99999 %}{{ [x] * 99999 }}",
    "{% set x = 'a' * 99999 %}{{ ([x] * 99999)|tojson }}",
    "{% set x = 'a' * 99999 %}{{ ([x] * 99999)|upper }}",
    "{% set x = 'a' * 99999 %}{% set y = [x] * 99999 %}{{ y ~ '' }}",
    "{% set x = 'a' * 999999 %}{% set ns = namespace(y=[]) %}" + LOOP
    + "{% set ns.y = ns.y + [x[1:]] %}{% endfor %}",
    "{% set x = 'a' * 999999 %}" + LOOP + "{% if 'b' in x %}{% endif %}{% endfor %}" * 1,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 50000 + "1 }}",
    "{% if 1 %}" * 200,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_templates_are_bounded(number, monkeypatch):
    from kformer.text import sandbox

    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the chat template failed: "):
            rendered(BOMBS[number])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 2**20 and time.monotonic() - start < 8


def test_what_templates_say_is_passed_on(tokenizers):
    with pytest.raises(ValueError, match="failed: System role not supported$"):
        tokenizers["gemma"].encode_chat(said("x", system="y"))
    with pytest.raises(ValueError, match="failed: Encountered unknown tag 'nonsense'"):
        rendered("{% nonsense %}")
    with pytest.raises(ValueError, match="failed: 'dict object' has no attribute 'tools'"):
        rendered("{{ messages[0].tools.x }}")
    assert rendered("{{ messages[0]|tojson(indent=2) }}") == json.dumps(said("hello")[0], indent=2)
    assert rendered("{{ namespace({'a': 1}, b=2).b }}{{ ' a '|trim }}{{ 7 % 4 }}") == "2a3"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages must be a list of at least one dict, got \[\]"),
        ("hello", "messages must be a list of at least one dict, got 'hello'"),
        (["hello"], "must have role and content, got str as message 0"),
        ([{"role": "user"}], r"must have role and content, got \['role'\] as message 0"),
        ([*said("a"), {"role": "user", "content": "x", "name": "y"}], "'role'\\] as message 1"),
        ([{"role": "im_end", "content": "x"}], "system, developer, .*, got 'im_end' as message 0"),
        ([{"role": ["user"], "content": "x"}], r"role must be one of .*, got \['user'\]"),
        ([{"role": "user", "content": None}], "must be a string, got NoneType as message 0"),
        ([{"role": "user", "content": [{}]}], "must be a string, got list as message 0"),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogates, got one in message 0"),
    ],
)
def test_wrong_messages(tokenizers, messages, message):
    with pytest.raises(ValueError, match=message):
        tokenizers["qwen"].encode_chat(messages)


def test_without_a_template_or_jinja(monkeypatch, tokenizers):
    plain = kformer.Tokenizer.train([], kind="byte")
    with pytest.raises(ValueError, match="needs a tokenizer with a chat_template, got none"):
        plain.encode_chat(said("a"))
    monkeypatch.setitem(sys.modules, "kformer.text.sandbox", None)
    monkeypatch.delattr(kformer.text, "sandbox", raising=False)
    with pytest.raises(ValueError, match=r"package jinja2: pip install 'kformer\[chat\]'"):
        chat.Chat(tokenizers["qwen"])


def test_old_versions_of_jinja_are_refused(monkeypatch):
    import jinja2

    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(ValueError, match="need jinja2 3.1.6 or newer, got 3.1.5: pip install -U"):
        rendered("x")


# The model's answer


def chatting(tokenizer, **changes):
    small = dict(num_layers=1, position="rotary", vocabulary_size=tokenizer.vocabulary_size)
    model = kformer.CausalLM(config(**small, **changes), tokenizer=tokenizer)
    randomize(model)
    return model


def test_a_model_answers(tokenizers):
    tokenizer = tokenizers["gemma"]
    model = chatting(tokenizer)
    messages = CHATS[1]
    ids = tokenizer.encode_chat(messages)
    answer = model.chat(messages, 12)
    stops = [model.config.eos_id, *tokenizer.chat.stops]
    assert answer == tokenizer.decode(model.generate([ids], 12, stop=stops)[0])
    assert isinstance(answer, str) and model.chat(messages, 12) == answer
    drawn = dict(temperature=1.0, seed=3, num_return_sequences=2)
    several = model.generate([ids], 12, stop=stops, **drawn)[0]
    assert model.chat(messages, 12, **drawn) == tokenizer.decode(several)
    assert model.chat(messages, 12, stop=answer[2]) == answer[: answer.index(answer[2])]
    first = np.int64(model.generate([ids], 12)[0][0])
    assert model.chat(messages, 12, stop=first) == "" == model.chat(messages, 12, stop=[first])
    with pytest.raises(TypeError, match="generate takes .*, got after"):
        model.chat(messages, 12, after=None)


def test_an_answer_ends_where_the_template_ends_it(tokenizers):
    tokenizer = tokenizers["gemma"]
    model = chatting(tokenizer, tie_embeddings=False, output_bias=True)
    (end,) = tokenizer.chat.stops
    bias = next(w for w in model.weights if w.path.endswith("head/bias"))
    favour = np.zeros(tokenizer.vocabulary_size, "float32")
    favour[end] = 100.0
    bias.assign(favour)
    assert end != model.config.eos_id and model.chat(CHATS[0], 8) == ""


def test_models_that_cannot_chat(tokenizers):
    plain = kformer.Tokenizer.train([], kind="byte")
    with pytest.raises(ValueError, match="needs a tokenizer with a chat_template, got none"):
        chatting(plain).chat(said("a"))
    with pytest.raises(ValueError, match="chat needs a kformer.Tokenizer, got tokenizer=None"):
        kformer.CausalLM(config()).chat(said("a"))

    class Other:
        encode = decode = staticmethod(lambda text: [1])

    model = kformer.CausalLM(config(), tokenizer=adapt(Other()))
    with pytest.raises(ValueError, match="got tokenizer=<Other for kformer>"):
        model.chat(said("a"))
    with pytest.raises(ValueError, match="max_new_tokens must be a whole number of at least 1"):
        chatting(tokenizers["gemma"]).chat(said("a"), 0)
