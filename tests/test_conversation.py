"""Conversations: texts that grow in turns, and prompts that go on from one text."""

import pytest
from support import config, make_model
from writers import EOS, PROMPTS, WRITERS, make_writer, talker, writer

import kformer
from kformer import backend


@pytest.mark.parametrize("kind, name", [pair for pair in WRITERS if pair[0] == "CausalLM"])
def test_p11_a_conversation_is_one_text(kind, name):
    """Turn by turn, with what was read kept: as if all were one prompt."""
    model = writer(kind, name)
    talk, text = kformer.Conversation(model), []
    turns = [([5, 6, 7], {}), ([8, 9], {}), ([11], {}), ([10], dict(num_beams=2)), ([13], {})]
    for number, (turn, options) in enumerate(turns):
        limit = 3 if number == 1 else 4
        expected = model.generate([text + turn], limit, **options)[0]
        if number == 2:
            found = [i for piece in talk.stream(turn, limit, **options) for i in piece]
        else:
            found = talk.generate(turn, limit, **options)
        assert found == expected
        text = text + turn + found
        if len(found) < limit:  # it has ended by eos, which is part of the text
            assert talk.ids == [*text, EOS]
            text = text + [EOS]
        assert talk.ids == text
    assert len(talk.unread()) <= 2, "what stands there is read but for the last tokens"


@pytest.mark.parametrize("name", ["gpt2", "alibi", "llama"])
def test_many_prompts_after_one_text(name):
    """A shared beginning is read once; prompts of unequal length go on from it, in every way."""
    model = writer("CausalLM", name)
    talk = kformer.Conversation(model)
    assert model.generate(PROMPTS, 4, after=talk) == model.generate(PROMPTS, 4), "an empty one"
    talk.read([4, 9, 8, 11])
    talk.read([6])
    whole = [[4, 9, 8, 11, 6, *prompt] for prompt in PROMPTS]
    for options in ({}, dict(temperature=1.0, seed=2, num_return_sequences=2), dict(num_beams=3)):
        found = model.generate(PROMPTS, 6, after=talk, **options)
        assert found == model.generate(whole, 6, **options), options
        assert len(talk.unread()) == 0 and talk.ids == [4, 9, 8, 11, 6], "it stays as it is"
    talk.generate([5], 3)
    longer = [[*talk.ids, *prompt] for prompt in PROMPTS]
    assert model.generate(PROMPTS, 4, after=talk) == model.generate(longer, 4)
    pieces = model.stream(PROMPTS[0], 4, after=talk)
    assert [i for piece in pieces for i in piece] == model.generate(longer[:1], 4)[0]


@pytest.mark.parametrize("draft", [None, "lookup", "model"])
def test_turns_that_end_by_a_stop(draft):
    """A stop among the guessed tokens: what was guessed in its place is not kept."""
    model = writer("CausalLM", "llama")
    draft = make_model("CausalLM", model.config, seed=1) if draft == "model" else draft
    talk, text, ended = kformer.Conversation(model, draft=draft, guesses=3), [], 0
    for turn in ([5, 6, 7], [8, 9], [4, 4, 4], [13, 5]):
        plain = model.generate([text + turn], 9)[0]
        stop = plain[2] if len(plain) > 2 else 22
        found = talk.generate(turn, 9, stop=stop)
        assert found == model.generate([text + turn], 9, stop=stop)[0]
        text += turn + found
        ended += talk.ids != text
        text = list(talk.ids)
        assert talk.kept is not None and len(talk.unread()) <= 3
    assert ended > 1, "or nothing was tried"


def test_a_turn_that_ends_inside_of_a_token():
    """The shown part of a token whose end began a stop string belongs to the text."""
    tokenizer = kformer.Tokenizer.train(["left." * 9, "left"], 300)
    model = make_model("CausalLM", config(vocabulary_size=tokenizer.vocabulary_size))
    model.tokenizer = tokenizer
    talk = kformer.Conversation(model)
    for turn in "left", "a", "left.":
        shown = talk.generate(turn, 5, stop=["f", "t.", " "])
        assert tokenizer.decode(talk.ids).endswith(turn + shown)


def test_beams_after_texts_of_any_length_compile_once():
    model = make_writer("CausalLM", "llama")
    counts = []
    for length in (9, 10, 11, 12):
        talk = kformer.Conversation(model)
        talk.read([4] * length)
        model.generate([[5, 6]], 6, after=talk, num_beams=2)
        counts.append(model.functions.counts())
    assert counts[0] == counts[-1]


def test_weights_that_changed():
    model = make_writer("CausalLM", "llama")
    talk = kformer.Conversation(model)
    talk.generate([5, 6, 7], 3)
    for weight in model.weights:
        weight.assign(-backend.to_numpy(weight))
    talk.forget()
    expected = model.generate([[*talk.ids, 8]], 5)[0]
    assert talk.generate([8], 5) == expected


def test_conversations_with_guesses_and_texts():
    model = writer("CausalLM", "alibi")
    for draft in ("lookup", make_model("CausalLM", model.config, seed=1)):
        talk, text = kformer.Conversation(model, draft=draft, guesses=2), []
        for turn in ([5, 6, 7], [8], [4, 4, 4]):
            expected = model.generate([text + turn], 6)[0]
            assert talk.generate(turn, 6) == expected
            text = list(talk.ids)
    alphabet = talker()
    talk = kformer.Conversation(alphabet)
    assert talk.generate("a", 12, stop="ef") == "bcd"
    assert alphabet.tokenizer.decode(talk.ids) == "abcd", "without its stop string"
    assert talk.generate("m", 3) == "nop" and "".join(talk.stream("s", 3)) == "tuv"
    assert alphabet.tokenizer.decode(talk.ids) == "abcdmnopstuv"
    out, log_probs, score = talk.generate("a", 2, return_scores=True)
    assert out == "bc" and len(log_probs) == 2 and score == pytest.approx(sum(log_probs))


def test_bad_conversations():
    model = writer("CausalLM", "gpt2")
    with pytest.raises(ValueError, match="got a Seq2SeqLM, which has a source"):
        kformer.Conversation(writer("Seq2SeqLM", "t5"))
    talk = kformer.Conversation(model)
    with pytest.raises(ValueError, match="num_return_sequences=2"):
        talk.generate([5], 3, num_return_sequences=2, temperature=1.0)
    with pytest.raises(TypeError, match="draft belong to the Conversation"):
        talk.generate([5], 3, draft="lookup")
    with pytest.raises(ValueError, match="after must be a conversation of this model"):
        writer("CausalLM", "llama").generate([[5]], 3, after=talk)
    with pytest.raises(ValueError, match="cache_dtype must be that of the conversation, None, got"):
        model.generate([[5]], 3, after=talk, cache_dtype="float16")
    talk.read([5] * 20)
    with pytest.raises(ValueError, match="max_length=32 with learned positions, got 33 for"):
        talk.generate([5], 12)
    assert len(talk.ids) == 20, "a refused turn leaves no trace"
