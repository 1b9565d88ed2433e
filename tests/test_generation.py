"""Decoding: cached = uncached, beam = exhaustive search, draws follow their probabilities."""

import functools
import itertools
import re

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, CONFIGS, config, make_model, randomize, run
from writers import (
    EOS,
    PROMPTS,
    WRITERS,
    make_writer,
    talker,
    uncached,
    without_cache,
    writer,
)  # fmt: skip

import kformer
from kformer import backend
from kformer.generation import asking, choosing, loop
from kformer.generation.functions import Functions, Loop


@pytest.mark.parametrize("kind, name", WRITERS)
def test_p9_p10_p11_p13_cached_is_uncached(kind, name):
    """Prompts of unequal length in one batch, each as if it were alone and without a cache, in
    tokens and in the log-probability of every one; windows smaller than the prompt."""
    model = writer(kind, name)
    found, log_probs, scores = model.generate(PROMPTS, 9, return_scores=True)
    for row, prompt in enumerate(PROMPTS):
        expected = uncached(model, prompt, found[row])  # of all steps in one forward pass
        chosen = [*found[row], EOS][:9]
        likeliest = np.where(
            np.arange(23)[: expected.shape[1]] == model.config.pad_id, -9e9, expected
        )
        assert likeliest.argmax(axis=1).tolist()[: len(chosen)] == chosen
        expected = expected[range(len(chosen)), chosen]
        np.testing.assert_allclose(log_probs[row], expected, atol=1e-5, rtol=1e-5)
        assert scores[row] == pytest.approx(sum(expected), abs=1e-4)


@pytest.mark.parametrize("kind, name", [("CausalLM", "gpt2"), ("Seq2SeqLM", "marian")])
def test_p13_a_row_alone_is_the_row_in_a_batch(kind, name):
    model = writer(kind, name)
    assert [model.generate([p], 6)[0] for p in PROMPTS[:2]] == model.generate(PROMPTS, 6)[:2]


@pytest.mark.parametrize("kind, name", WRITERS)
def test_p10_p14_every_chunking_is_the_same(kind, name, monkeypatch):
    """Chunks of any size and slots that grow on the way change nothing, for every model."""
    model, limit = writer(kind, name), 20
    expected = model.generate(PROMPTS, limit, return_scores=True)
    for slots, chunk in [(8, 3), (16, 1)][: 2 if name == "llama" else 1]:
        monkeypatch.setattr(loop, "LEAST_SLOTS", slots)
        monkeypatch.setattr(loop, "CHUNK", chunk)
        ids, log_probs, scores = model.generate(PROMPTS, limit, return_scores=True)
        assert ids == expected[0]
        np.testing.assert_allclose(scores, expected[2], atol=1e-5, rtol=1e-5)
        for one, other in zip(log_probs, expected[1], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name, slots, chunk", [("alibi", 8, 3), ("llama", 16, 8)])
def test_p10_p14_chunks_of_beams_and_draws(name, slots, chunk, monkeypatch):
    model = writer("CausalLM", name)
    expected = [without_cache(model, prompt, 20)[0] for prompt in PROMPTS]
    ways = dict(num_beams=2, return_scores=True), dict(temperature=1.0, seed=3, return_scores=True)
    before = [model.generate(PROMPTS, 20, **options) for options in ways]
    monkeypatch.setattr(loop, "LEAST_SLOTS", slots)
    monkeypatch.setattr(loop, "CHUNK", chunk)
    assert model.generate(PROMPTS, 20) == expected
    for options, (ids, log_probs, scores) in zip(ways, before, strict=True):
        found = model.generate(PROMPTS, 20, **options)
        assert found[0] == ids
        np.testing.assert_allclose(found[2], scores, atol=1e-4)
        np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(log_probs), atol=1e-4)


def test_windows_keep_a_ring():
    """A windowed block keeps as many places as its window is wide, the others all; beams share
    the row of their prompt, with a slot for each of them at every place behind it."""
    model = writer("CausalLM", "alibi")
    prompt = model.prepared(PROMPTS)

    def shapes(**options):
        decoding = asking.Request(model, 30, **options).begin(prompt, range(4), 4)
        return [cache.keys.shape[:3:2] for cache in decoding.state.memory]

    assert shapes() == [(4, 3), (4, 64)]
    assert shapes(num_beams=5) == [(4, 15), (4, 8 + 5 * (64 - 8))]
    assert shapes(draft="lookup") == [(4, 7), (4, 64)]


WAYS = dict(greedy={}, draws=dict(temperature=1.0), beams=dict(num_beams=3),
            guesses=dict(draft="lookup", guesses=2))  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, name", [("CausalLM", "alibi"), ("Seq2SeqLM", "t5")])
def test_a_token_copies_no_cache(kind, name, way):
    """On torch the memory stays where it is; elsewhere nothing of its size is copied or turned
    inside of the compiled loop. "alibi" has a ring."""
    model = writer(kind, name)
    request = asking.Request(model, 30, **WAYS[way])
    decoding = request.begin(model.prepared(PROMPTS), range(4), 4)
    kept = [cache.keys for cache in decoding.state.memory]
    if BACKEND == "torch":
        decoding.advance(8)
        after = [cache.keys for cache in decoding.state.memory]
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in after]
        return
    text = compiled_text(decoding)
    names = re.findall(r"body=(%?[\w.\-]+)", text)
    body = max((part for part in text.split("\n\n") if part.split(" ")[0] in names), key=len)
    for keys in kept:
        rows, heads, *rest = keys.shape
        shape = f"f32[{rows * heads},{','.join(map(str, rest))}]"
        assert shape in body
        wrong = re.findall(rf"= {re.escape(shape)}\S* (?:copy|transpose)\(.*", body)
        assert not wrong, wrong


def compiled_text(decoding):
    """What XLA made of a chunk."""
    given = decoding.state, decoding.fixed(8), np.asarray(decoding.place + 8, "int32")
    static = {**decoding.kind, **decoding.extra}
    function = decoding.functions.get("decode", Loop, decoding.step, static).compiled
    if BACKEND == "jax":
        values = [v.value for v in function.layer.variables]
        return function.function.lower(values, *given).compile().as_text()
    given = keras.tree.map_structure(ops.convert_to_tensor, given)
    return function.function.experimental_get_compiler_ir(*given)(stage="optimized_hlo")


def test_compiled_once():
    """Other prompts, temperatures, seeds, stops, and rows that finish compile nothing."""
    model = make_writer("CausalLM", "llama")
    random = np.random.default_rng(0)

    def prompts():
        return [random.integers(4, 23, random.integers(2, 9)).tolist() for _ in range(3)]

    for _ in range(3):
        model.generate(prompts(), int(random.integers(2, 30)))
    assert kformer.compilations(model) == {"prefill": 1, "decode": 1}
    for number in range(8):
        options = dict(temperature=0.5 + number, top_p=0.9 - 0.1 * number, seed=number)
        model.generate(prompts(), 5, stop=4 + number, min_p=0.01 * number, **options)
        model.generate(prompts(), 5, top_k=number + 1, **options)
    # Draws are another function than the likeliest.
    assert kformer.compilations(model) == {"prefill": 1, "decode": 2}
    assert model.functions.counts() == {"prefill": 1, "decode": 2, "grow": 0, "choose": 2}
    for weight in model.weights:
        weight.assign(-backend.to_numpy(weight))
    expected = [without_cache(model, prompt, 5)[0] for prompt in PROMPTS[:3]]
    assert model.generate(PROMPTS[:3], 5, stop=[20, 21, 22]) == expected, "training is seen"
    assert kformer.compilations(model) == {"prefill": 1, "decode": 2}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_what_is_compiled_follows_a_resize_and_quantize():
    model = make_writer("CausalLM", "llama")
    model.generate(PROMPTS, 2)
    model.resize_vocabulary(40)
    for weight in model.weights:
        weight.assign(-backend.to_numpy(weight))
    assert model.generate(PROMPTS, 5) == [without_cache(model, p, 5)[0] for p in PROMPTS]
    model.quantize("int8")
    assert kformer.compilations(model) == {"prefill": 0, "decode": 0}
    assert model.generate(PROMPTS, 5) == [without_cache(model, p, 5)[0] for p in PROMPTS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_cache(dtype):
    model = writer("CausalLM", "llama")
    request = asking.Request(model, 6, cache_dtype=dtype, return_scores=True)
    decoding = request.begin(model.prepared(PROMPTS), range(4), 4)
    kept = decoding.state.memory[0].keys
    assert keras.backend.standardize_dtype(kept.dtype) == dtype
    decoding.advance()
    kept = decoding.state.memory[0].keys
    assert keras.backend.standardize_dtype(kept.dtype) == dtype, "after the first chunk, too"
    found, after, _ = model.generate(PROMPTS, 6, cache_dtype=dtype, return_scores=True)
    expected, before, _ = model.generate(PROMPTS, 6, return_scores=True)
    assert found[1:] == expected[1:] and after != before
    np.testing.assert_allclose(after[1], before[1], atol=0.05)


def test_kinds_of_prompts():
    texts = ["one two three", "two three four", "three"]
    tokenizer = kformer.Tokenizer.train(texts, 270)
    size = tokenizer.vocabulary_size
    model = make_model("CausalLM", config(vocabulary_size=size), tokenizer=tokenizer)
    rows = tokenizer.encode(texts, bos=True)
    as_ids = model.generate(rows, 4)
    assert model.generate(texts, 4) == tokenizer.decode(as_ids)
    assert model.generate(texts[0], 4) == tokenizer.decode(as_ids[0])
    padded = np.zeros((3, 12), "int32")
    for row, ids in zip(padded, rows, strict=True):
        row[-len(ids) :] = ids  # on the left
    assert (model.generate(ops.convert_to_tensor(padded), 4) == model.generate(padded, 4)).all()
    found, log_probs, scores = model.generate(padded, 4, return_scores=True)
    longest = max(map(len, as_ids))
    assert found.shape == (3, longest) and log_probs.shape[0] == len(scores) == 3
    assert [[i for i in row if i] for row in found.tolist()] == as_ids
    several = model.generate(padded, 4, num_return_sequences=2, temperature=1.0, seed=0)
    assert several.shape[:2] == (3, 2)
    pair = model.generate(texts[0], 4, num_return_sequences=2, temperature=1.0, seed=0)
    assert len(pair) == 2 and all(isinstance(text, str) for text in pair)


# Choosing


def test_p15_one_beam_and_one_choice_are_greedy():
    model = writer("CausalLM", "gpt2")
    greedy = model.generate(PROMPTS, 6)
    ways = dict(num_beams=1), dict(temperature=1.0, top_k=1), dict(temperature=1e-6)
    for options in (*ways, dict(temperature=1.0, top_p=1e-6), dict(temperature=[0, 0, 1e-6, 0])):
        assert model.generate(PROMPTS, 6, **options, seed=0) == greedy


def rules(rows, **changes):
    given = dict(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, penalty=1.0)
    given = {k: np.full(rows, v, "float32") for k, v in {**given, **changes}.items()}
    given["top_k"] = given["top_k"].astype("int32")
    none = np.array(-1, "int32")
    return choosing.Rules(
        **given, least=np.array(0, "int32"), stops=none[None], banned=none, filler=none
    )


def draw(log_probs, uniform, **changes):
    """`choosing.draw`, compiled."""

    def function(_, *inputs):
        return choosing.draw(*inputs)

    arrays = np.asarray(log_probs, "float32"), rules(len(log_probs), **changes)
    nothing = keras.layers.Identity()
    return backend.to_numpy(
        backend.Compiled(function, nothing)(*arrays, np.asarray(uniform, "float32"))
    )


def test_p17_draws_follow_the_probabilities():
    """Chi-square against the softmax at a temperature; top-k, top-p and min-p keep exactly what
    they should, of equal ones the first."""
    random = np.random.default_rng(0)
    log_probs = np.log([[0.5, 0.25, 0.15, 0.07, 0.03]]).repeat(20000, 0)

    def counts(log_probs=log_probs, **options):
        return np.bincount(draw(log_probs, random.random(20000), **options), minlength=5)

    for temperature in (0.7, 1.0, 2.0):
        chances = np.exp(log_probs[0] / temperature)
        expected = 20000 * chances / chances.sum()
        squares = ((counts(temperature=temperature) - expected) ** 2 / expected).sum()
        assert squares < 18.47  # p = 0.001 with 4 degrees of freedom
    for options, kept in [
        (dict(top_k=2), 2), (dict(top_p=0.8), 3), (dict(top_p=0.75), 2), (dict(top_p=0.76), 3),
        (dict(min_p=0.29), 3), (dict(min_p=0.31), 2), (dict(top_k=4, top_p=0.92), 3),
        (dict(top_p=1.0), 5), (dict(top_k=1), 1),
    ]:  # fmt: skip
        found = counts(**options)
        assert (found > 0).tolist() == [True] * kept + [False] * (5 - kept), options
        chances = np.exp(log_probs[0]) * (np.arange(5) < kept)
        expected = 20000 * chances[:kept] / chances.sum()
        assert ((found[:kept] - expected) ** 2 / expected).sum() < 18.47
    equal = np.zeros((20000, 5))
    assert (counts(equal, top_k=2) > 0).tolist() == [True, True, False, False, False]
    many = np.where(np.arange(8000) % 160 == 7, 0.0, -np.inf) + random.normal(size=(2000, 8000))
    ids = draw(many, random.random(2000), top_k=8000, temperature=3.0)
    assert (ids % 160 == 7).all(), "nothing that has no chance"
    last = draw(log_probs[:1], [1 - 2.0**-23])
    assert last[0] == 4  # the end of the running sum is still an id
    hidden = np.where(np.arange(5) == 1, -np.inf, log_probs)
    assert counts(hidden)[1] == 0


def test_p17_seeds_reproduce():
    """The same seed gives the same tokens, in a batch as alone; another one does not."""
    model = writer("CausalLM", "sinusoidal")
    options = dict(temperature=1.5, top_p=0.9, top_k=20)
    one, two, three = (model.generate(PROMPTS, 8, **options, seed=s) for s in (1, 1, 2))
    assert one == two != three
    assert model.generate(PROMPTS[:1], 8, **options, seed=1) == one[:1]
    many = model.generate(PROMPTS, 8, **options, seed=1, num_return_sequences=3)
    assert [row[0] for row in many] == one and many[0][0] != many[0][1]
    assert model.generate(PROMPTS, 8, **options) != model.generate(PROMPTS, 8, **options)


def test_several_translations():
    """Sequences of one source share what was read of it, and are drawn apart."""
    model = writer("Seq2SeqLM", "marian")
    options = dict(temperature=1.5, seed=1)
    options.update(return_scores=True)
    several, log_probs, _ = model.generate(PROMPTS, 6, num_return_sequences=3, **options)
    assert [row[0] for row in several] == model.generate(PROMPTS, 6, **options)[0]
    assert several[0][0] != several[0][1]
    for prompt, group, values in zip(PROMPTS, several, log_probs, strict=True):
        for row, found in zip(group, values, strict=True):
            chosen = [*row, EOS][:6]
            expected = uncached(model, prompt, row)[range(len(chosen)), chosen]
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_a_translation_begins_with_what_is_asked_for(width):
    """It goes on as if the model had written that itself; what cannot be is refused."""
    model = writer("Seq2SeqLM", "marian")
    (whole,) = model.generate(PROMPTS[:1], 6)
    begun = dict(num_beams=width, return_scores=True, length_penalty=0.0)
    (rest,), (log_probs,), _ = model.generate(PROMPTS[:1], 4, begins=whole[:2], **begun)
    if width == 1:
        assert rest == whole[2:] == model.generate(PROMPTS[:1], 4, begins=whole[:2])[0]
    chosen = [*rest, EOS][: len(log_probs)]
    expected = uncached(model, PROMPTS[0], whole[:2] + rest)[2:]
    np.testing.assert_allclose(log_probs, expected[range(len(chosen)), chosen], atol=1e-5)
    assert model.generate([PROMPTS[0]], 4, begins=7) == model.generate([PROMPTS[0]], 4, begins=[7])
    with pytest.raises(ValueError, match=r"begins must be an id in \[0, 19\).*got \[3, 19\]"):
        model.generate(PROMPTS, 4, begins=[3, 19])
    with pytest.raises(ValueError, match="begins must be an id.*got 'de'"):
        model.generate(PROMPTS, 4, begins="de")
    with pytest.raises(ValueError, match="begins needs an encoder-decoder, got 3"):
        writer("CausalLM", "gpt2").generate(PROMPTS, 4, begins=3)


def test_repetition_penalty_and_ngrams():
    model = writer("CausalLM", "sinusoidal")

    def penalize(logits, out, prompt=()):
        seen = sorted({*prompt, *out})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)

    def no_pairs(logits, out, prompt=()):
        text = [*prompt, *out]
        pairs = [b for a, b in itertools.pairwise(text) if a == text[-1]]
        logits[pairs] = -np.inf

    for option, change in [
        (dict(repetition_penalty=1.7), penalize), (dict(no_repeat_ngram=2), no_pairs),
    ]:  # fmt: skip
        found = model.generate(PROMPTS, 9, **option)
        for prompt, row in zip(PROMPTS, found, strict=True):
            given = functools.partial(change, prompt=prompt)
            assert row == without_cache(model, prompt, 9, given)[0], option
    (once,) = model.generate(PROMPTS[:1], 9, no_repeat_ngram=1)
    assert len({*PROMPTS[0], *once}) == 3 + len(once)


# Stops and streams


def test_stops_and_streams():
    model = talker()
    assert model.generate("a", 12) == "bcdefghijklm"
    assert model.generate("a", 12, stop="gh") == "bcdef"
    assert model.generate("a", 12, stop=["xx", "f", "jk"]) == "bcde"
    (stop,) = model.tokenizer.encode("e")
    assert model.generate("a", 12, stop=stop) == "bcd"
    assert model.generate("a", 12, stop=stop, min_new_tokens=3) == "bcd"
    assert len(model.generate("a", 12, stop=stop, min_new_tokens=6)) >= 6
    out, log_probs, score = model.generate("a", 12, stop="gh", return_scores=True)
    assert out == "bcdef" and len(log_probs) == 7 and score == pytest.approx(sum(log_probs))
    assert model.generate("a", 12, stop="c", min_new_tokens=3) == "bcdefghijklm"
    assert model.generate("a", 12, stop=["de", "c"], min_new_tokens=3) == "bc"
    assert model.generate("t", 11, stop="z") == model.generate("t", 11, stop=["zé", "z"]) == "uvwxy"
    for options in ({}, dict(stop="gh"), dict(stop=stop), dict(temperature=0.01, seed=1),
                    dict(stop=["fX", "efgh"])):  # fmt: skip
        pieces = list(model.stream("a", 12, **options))
        assert "".join(pieces) == model.generate("a", 12, **options)
        assert len(pieces) > 1 or len(pieces[0]) < 5
    pieces = list(model.stream("t", 11))
    assert "".join(pieces) == model.generate("t", 11) == "uvwxyzé–"
    assert not any("\ufffd" in piece for piece in pieces), "no broken characters"
    ids = model.tokenizer.encode("a", bos=True)
    pieces = list(model.stream(ids, 12))
    assert [i for piece in pieces for i in piece] == model.generate([ids], 12)[0]
    pieces = list(model.stream(np.array([0, *ids]), 12, stop="ef"))
    assert [i for piece in pieces for i in piece] == model.tokenizer.encode("bcd")
    for wrong in (dict(num_beams=2), dict(num_return_sequences=2), dict(return_scores=True)):
        with pytest.raises(ValueError, match="stream needs num_beams=1"):
            model.stream("a", 4, **wrong)
    with pytest.raises(TypeError, match="got nonsense"):
        model.stream("a", 4, nonsense=1)


def test_stop_strings_end_beams():
    """A beam that has spelled one is kept, and the others go on without it."""
    model = talker()
    for stop in ("gh", ["xx", "f"], "c"):
        found = model.generate(["a", "c"], 12, stop=stop, num_beams=3, length_penalty=0.0)
        assert found == model.generate(["a", "c"], 12, stop=stop)
    several = model.generate(
        "a", 5, stop="c", num_beams=3, num_return_sequences=3, return_scores=True
    )
    assert several[0][0] == "b" and several[2] == sorted(several[2], reverse=True)
    assert len(several[1][0]) == 2, "the stop counts in the score"


def test_a_stop_inside_of_a_token():
    """A text ends right before the stop string, in the middle of a token if need be."""
    tokenizer = kformer.Tokenizer.train(["left." * 9, "left"], 300)
    model = make_model("CausalLM", config(vocabulary_size=tokenizer.vocabulary_size))
    model.tokenizer = tokenizer
    request = asking.Request(model, 8, stop=".", return_scores=True)
    ids = [*tokenizer.encode("left"), *tokenizer.encode("left.")]
    result = request.result(ids, np.zeros(len(ids)))
    assert result.text == "leftleft" and tokenizer.decode(result.ids) in ("left", "leftleft")


def test_padding_that_is_the_stop():
    model = make_model("CausalLM", CONFIGS["llama"].replace(pad_id=EOS, eos_id=EOS))
    found = [without_cache(model, [5, 6, 7], 9, lambda logits, out: None, banned=None)[0]]
    assert model.generate([[5, 6, 7]], 9) == found and len(found[0]) < 9


# Decoders of one's own


@pytest.mark.parametrize("position", ["sinusoidal", "relative"])
def test_a_composed_decoder_writes(position):
    """A Functional model of kformer's blocks: what `Writer` writes is what the model says."""
    settings = config(position=position, window=(None, 4), eos_id=EOS, num_key_value_heads=2)
    embedding, head = kformer.layers.TokenEmbedding(23, 16), keras.layers.Dense(23)
    blocks = [kformer.layers.DecoderBlock(settings, layer=i) for i in range(2)]
    places = kformer.layers.SinusoidalPositions()
    x = given = keras.Input((None,), dtype="int32")
    x = places(embedding(x))
    for block in blocks:
        x = block(x)
    model = keras.Model(given, head(x))
    randomize(model)
    parts = dict(
        embed=lambda ids, at: places(embedding(ids), positions=at), blocks=blocks, head=head
    )
    composed = kformer.Writer(model, settings, **parts)
    found = composed.generate(PROMPTS, 8)
    assert any(map(len, found))
    for prompt, row in zip(PROMPTS, found, strict=True):
        logits = run(model, np.array([[*prompt, *row]]))[0, len(prompt) - 1 :]
        logits[:, 0] = -np.inf  # padding
        assert logits.argmax(axis=-1)[: len(row)].tolist() == row
        assert len(row) == 8 or logits[len(row)].argmax() == EOS
    same = composed.generate(PROMPTS, 8, num_beams=2, num_return_sequences=2, return_scores=True)
    assert all(scores[0] >= scores[1] for scores in same[2])


# Beams


class Toy:
    """A language model from a table: log p of the next id depends on the last one."""

    has_source, writer, variables, takes_branches = False, None, (), True

    def __init__(self, table):
        self.table = np.log(np.asarray(table, "float64"))
        size = len(self.table)
        self.config = kformer.Config(vocabulary_size=size, hidden_dim=8, pad_id=None, eos_id=0)
        self.functions = Functions(self)

    def logits(self, ids):
        return ops.take(ops.convert_to_tensor(self.table.astype("float32")), ids, axis=0)

    def begin(self, prompt, dtype):
        return self.logits(prompt["ids"][:, -1]), prompt["ids"][:, -1:], ()

    def advance(self, ids, start, tokens, memory, shared, last=1, at=None):
        return self.logits(ids[:, -last:]), memory

    def grow(self, memory, slots, last, **room):
        return memory

    def beams(self, firsts, limit, width, alpha):
        request = asking.Request(self, limit, num_beams=width, length_penalty=alpha)
        ids = np.array(firsts, "int32")[:, None]
        found = request.run({"ids": ids, "real": ids >= 0}, range(len(ids)), len(ids))
        return [[(one.ids, one.score) for one in group] for group in found]


def exhaustive(toy, first, limit, stop, alpha):
    """Every continuation, scored: those that stop, and those that the limit cuts off."""
    ids, found = range(len(toy.table)), []
    for length in range(1, limit + 1):
        for path in itertools.product(ids, repeat=length):
            ended = path[-1] == stop
            if stop in path[:-1] or not (ended or length == limit):
                continue
            score = sum(toy.table[a, b] for a, b in zip((first, *path), path, strict=False))
            text = list(path[:-1]) if ended else list(path)
            found.append((text, score / ((5 + length) / 6) ** alpha))
    return sorted(found, key=lambda f: -f[1])


def test_p16_a_finished_beam_is_not_lost():
    """The empty text has log p −0.598, "a" −0.936, stops included. Who goes on behind the stop of
    the first would end with −1.677 for it, and prefer the second."""
    toy = Toy([[0.34, 0.33, 0.33], [0.8913, 0.1, 0.0087], [0.55, 0.44, 0.01]])
    for width in (2, 3):
        ((best, second, *_),) = toy.beams([2], 5, width, 0.0)
        assert best[0] == [] and best[1] == pytest.approx(-0.598, abs=1e-3)
        assert second[0] == [1] and second[1] == pytest.approx(-0.936, abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_p16_beam_is_exhaustive_search(seed):
    """With beams for all there is, the best is found, for every penalty, in a batch as alone."""
    toy = Toy(np.random.default_rng(seed).dirichlet(np.ones(4), 4))
    toy.config = toy.config.replace(vocabulary_size=400)  # allows as many beams as there are texts
    for alpha in (0.0, 0.6, 1.0):
        found = toy.beams([1, 2], 4, 256, alpha)
        for first, group in zip((1, 2), found, strict=True):
            expected = exhaustive(toy, first, 4, 0, alpha)
            for (text, score), (best, value) in zip(group[:4], expected[:4], strict=True):
                assert text == best and score == pytest.approx(value, abs=1e-5)
        both = toy.beams([1, 2], 4, 3, alpha)
        for first, group in zip((1, 2), both, strict=True):
            (alone,) = toy.beams([first], 4, 3, alpha)
            assert group == alone
            scores = dict((tuple(t), s) for t, s in exhaustive(toy, first, 4, 0, alpha))
            assert all(s == pytest.approx(scores[tuple(t)], abs=1e-5) for t, s in group)


def test_a_finished_beam_is_not_lost():
    """[stop] has log p −0.598 and [a, stop] −0.936: the first one wins, although beams go on."""
    stop, a = np.exp(-0.598), np.exp(-0.91)
    after = np.exp(-0.936) / a
    rows = [[stop, a, 1 - stop - a], [after, (1 - after) / 2, (1 - after) / 2]]
    toy = Toy([[1 / 3] * 3, rows[1], rows[0]])
    (found,) = toy.beams([2], 5, 2, 0.0)
    assert found[0][0] == [] and found[0][1] == pytest.approx(-0.598, abs=1e-5)


@pytest.mark.parametrize("kind, name", [("CausalLM", "llama"), ("Seq2SeqLM", "marian")])
def test_p16_scores_of_beams_are_sums(kind, name):
    """The score is the sum of the tokens' log-probabilities, which are the uncached model's; a
    batch gives what a prompt alone gives."""
    model = writer(kind, name)
    options = dict(num_beams=3, length_penalty=0.0, num_return_sequences=3, return_scores=True)
    found, log_probs, scores = model.generate(PROMPTS, 4, **options)
    for prompt, *groups in zip(PROMPTS, found, log_probs, scores, strict=True):
        for ids, parts, score in zip(*groups, strict=True):
            chosen, found_log_probs = [*ids, EOS][: len(parts)], uncached(model, prompt, ids)
            assert score == pytest.approx(sum(parts), abs=1e-5)
            for place, (i, part) in enumerate(zip(chosen, parts, strict=True)):
                assert part == pytest.approx(found_log_probs[place, i], abs=1e-5)
        assert groups[2] == sorted(groups[2], reverse=True)
    alone, _, value = model.generate(PROMPTS[1:2], 4, **options)
    assert alone[0] == found[1] and value[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("kind, name", WRITERS)
def test_p31_overfits_and_writes_it_again(kind, name):
    model = make_writer(kind, name)
    text = np.array([[1, 5, 9, 4, 5, 5, 12, 7, EOS]])
    x = (
        {"source": text[:, ::-1].copy(), "target": text[:, :-1]}
        if model.has_source
        else text[:, :-1]
    )
    model.compile(keras.optimizers.Adam(0.01), jit_compile=BACKEND == "jax")  # XLA: longer in all
    losses = model.fit(x, text[:, 1:], epochs=120, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]
    prompt = text[:, ::-1] if model.has_source else text[:, :1]
    assert model.generate(prompt.tolist(), 12) == [text[0, 1:-1].tolist()]
    if name in ("llama", "marian"):
        assert model.generate(prompt.tolist(), 12, num_beams=3) == [text[0, 1:-1].tolist()]


# Bad input

BAD = [
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, got 0"),
    (dict(max_new_tokens=-1), "max_new_tokens must be a whole number of at least 1, got -1"),
    (dict(temperature=-1.0), "temperature must be in .0, inf., got -1.0"),
    (dict(temperature=float("nan")), "temperature must be in .0, inf., got nan"),
    (dict(temperature=float("inf")), "temperature must be in .0, inf., got inf"),
    (dict(temperature=[0.5, 1.0]), r"one for each of the 4 prompts, got shape \(2,\)"),
    (dict(top_k=0), "top_k must be a whole number from 1 to the 23 ids there are, got 0"),
    (dict(top_k=24), "top_k must be a whole number from 1 to the 23 ids there are, got 24"),
    (dict(top_p=1.5), "top_p must be in .0, 1., got 1.5"),
    (dict(top_p=0.0), "top_p must be in .0, 1., got 0.0"),
    (dict(min_p=1.0), "min_p must be in .0, 1., got 1.0"),
    (dict(repetition_penalty=0.0), "repetition_penalty must be in .0, inf., got 0.0"),
    (dict(num_beams=0), "num_beams must be a whole number of at least 1, got 0"),
    (dict(num_beams=24), "num_beams must be at most 23, got 24"),
    (dict(num_beams=2, num_return_sequences=3), "at most num_beams=2, got 3"),
    (dict(num_return_sequences=0), "num_return_sequences must be a whole number of at least 1"),
    (dict(length_penalty=-1.0), "length_penalty must be in .0, inf., got -1.0"),
    (dict(num_beams=2, temperature=1.0), "beams need temperature=0, got 1.0"),
    (dict(min_new_tokens=-1), "min_new_tokens must be a whole number of at least 0, got -1"),
    (dict(max_new_tokens=2, min_new_tokens=3), "at most max_new_tokens=2, got 3"),
    (dict(no_repeat_ngram=-1), "no_repeat_ngram must be a whole number of at least 0, got -1"),
    (dict(stop=23), r"stop must be strings, or ids in \[0, 23\), got 23"),
    (dict(stop=[1.5]), r"stop must be strings, or ids in \[0, 23\), got 1.5"),
    (dict(stop="end"), "a stop string needs a model with a tokenizer"),
    (dict(stop=[""]), "a stop string must have at least one character"),
    (dict(prompts={"ids": [[1]]}), "prompts must be texts or rows of ids, got a dict of ..ids"),
    (dict(cache_dtype="int8"), "cache_dtype must be one of .*, got 'int8'"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_b30_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        given = {"prompts": PROMPTS, "max_new_tokens": 4, **options}
        writer("CausalLM", "gpt2").generate(**given)


def test_b30_bad_prompts():
    model = writer("CausalLM", "gpt2")
    with pytest.raises(ValueError, match="at least one token, got none as prompt 1"):
        model.generate([[1], []], 2)
    with pytest.raises(ValueError, match=r"ids must be in \[0, 23\), got 23 in prompt 0"):
        model.generate([[23]], 2)
    with pytest.raises(ValueError, match="max_length=32 with learned positions, got 33"):
        model.generate([[4]], 32)
    assert len(model.generate([[4]], 31)[0]) <= 31, "a prompt at the limit"
    with pytest.raises(ValueError, match="texts need a model with a tokenizer"):
        model.generate("text", 2)
    with pytest.raises(ValueError, match=r"lists of whole numbers, got shape \(\), dtype int64"):
        model.generate([5, 6], 2)
    with pytest.raises(ValueError, match="dtype float64 as row 1"):
        model.generate([[4], [1.7]], 2)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        model.generate([[4]], 2, batch_size=0)
    with pytest.raises(ValueError, match="generate needs config.bos_id"):
        make_model("Seq2SeqLM", CONFIGS["marian"]).generate([[4]], 2)
