"""Decoding: cached = uncached, beam = exhaustive search, draws follow their probabilities."""

import itertools

import numpy as np
import pytest
from keras import ops
from support import CONFIGS, config, make_model

import kformer
from kformer import backend
from kformer.generation import search

EOS = 3
WRITERS = [
    ("CausalLM", "sinusoidal"), ("CausalLM", "gpt2"), ("CausalLM", "llama"), ("CausalLM", "qwen"),
    ("CausalLM", "alibi"), ("CausalLM", "sandwich"), ("CausalLM", "experts"),
    ("Seq2SeqLM", "t5"), ("Seq2SeqLM", "marian"),
]  # fmt: skip
PROMPTS = [[5, 6, 7], [4, 9, 8, 11, 12], [13]]


def make_writer(kind, name):
    settings = CONFIGS[name]
    bos = 1 if settings.bos_id is None else settings.bos_id
    return make_model(kind, settings.replace(bos_id=bos, eos_id=EOS))


def without_cache(model, prompt, limit):
    """Greedy decoding by a whole forward pass for every token."""
    out = []
    for _ in range(limit):
        if model.has_source:
            target = [[model.config.bos_id, *out]]
            inputs = {"source": np.array([prompt]), "target": np.array(target)}
        else:
            inputs = np.array([[*prompt, *out]])
        logits = np.array(backend.to_numpy(model(inputs))[0, -1])
        logits[model.config.pad_id] = -np.inf
        chosen = int(logits.argmax())
        if chosen == EOS:
            break
        out.append(chosen)
    return out


@pytest.mark.parametrize("kind, name", WRITERS)
def test_cached_is_uncached(kind, name):
    """Prompts of unequal length in one batch, each as if it were alone and without a cache."""
    model = make_writer(kind, name)
    assert model.generate(PROMPTS, 6) == [without_cache(model, p, 6) for p in PROMPTS]
    assert model.generate(PROMPTS, 6, batch_size=1) == model.generate(PROMPTS, 6)


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
    found = model.generate(padded, 4)
    longest = max(map(len, as_ids))
    assert found.shape == (3, longest)
    assert [[i for i in row if i] for row in found.tolist()] == as_ids


def test_what_is_compiled_follows_a_resize():
    model = make_writer("CausalLM", "llama")
    model.generate(PROMPTS, 2)
    model.resize_vocabulary(40)
    for weight in model.weights:
        weight.assign(-backend.to_numpy(weight))
    assert model.generate(PROMPTS, 5) == [without_cache(model, p, 5) for p in PROMPTS]


def test_training_is_seen_by_what_is_compiled():
    model = make_writer("CausalLM", "llama")
    before = model.generate(PROMPTS, 5)
    for weight in model.weights:
        weight.assign(-backend.to_numpy(weight))
    after = model.generate(PROMPTS, 5)
    assert after == [without_cache(model, p, 5) for p in PROMPTS] and after != before


class Toy:
    """A language model from a table: log p of the next id depends on the last one."""

    def __init__(self, table):
        self.table = np.log(np.asarray(table))

    def begin(self, rows, room):
        last = np.array([row[-1] for row in rows])
        return self.table[last], last

    def advance(self, state, ids, parents):
        return self.table[ids], ids


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
            found.append((score / ((5 + length) / 6) ** alpha, text, ended))
    return sorted(found, key=lambda f: -f[0])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_beam_is_exhaustive_search(alpha, seed):
    """With beams for all there is, the best that stops is found, in a batch as alone."""
    toy = Toy(np.random.default_rng(seed).dirichlet(np.ones(4), 4))
    for first in (1, 2):
        (found,) = search.beam(toy, [[first]], 4, [0], 256, alpha)
        expected = next(f for f in exhaustive(toy, first, 4, 0, alpha) if f[2])
        best = next(f for f in found if f.ids == expected[1])
        assert best.score == pytest.approx(expected[0], abs=1e-9)
        both = search.beam(toy, [[1], [2]], 4, [0], 3, alpha)
        assert both[first - 1] == search.beam(toy, [[first]], 4, [0], 3, alpha)[0]


def test_a_finished_beam_is_not_lost():
    """[stop] has log p −0.598 and [a, stop] −0.936: the first one wins, although beams go on."""
    stop, a = np.exp(-0.598), np.exp(-0.91)
    other = 1 - stop - a
    after = np.exp(-0.936) / a
    toy = Toy([[1 / 3] * 3, [stop, a, other], [after, (1 - after) / 2, (1 - after) / 2]])
    toy.table[1] = np.log([after, (1 - after) / 2, (1 - after) / 2])
    start = np.log([stop, a, other])
    toy.begin = lambda rows, room: (np.tile(start, (len(rows), 1)), None)
    (found,) = search.beam(toy, [[1]], 5, [0], 2, 0.0)
    assert found[0].ids == [] and found[0].score == pytest.approx(-0.598, abs=1e-6)


def test_one_beam_and_one_choice_are_greedy():
    model = make_writer("CausalLM", "gpt2")
    greedy = model.generate(PROMPTS, 6)
    for options in (dict(num_beams=1), dict(temperature=1.0, top_k=1), dict(temperature=1e-6)):
        assert model.generate(PROMPTS, 6, **options, seed=0) == greedy


def test_scores_of_beams_are_sums():
    model = make_writer("CausalLM", "llama")
    for prompt, beams in zip(PROMPTS, search.beam(model, PROMPTS, 4, [EOS], 3, 0.0), strict=True):
        for ids, score in beams:
            ended = [EOS] if len(ids) < 4 else []
            totals = model.score([[*prompt, *ids, *ended]]).log_probs[0, len(prompt) :]
            assert totals.sum() == pytest.approx(score, abs=1e-4)


def test_draws_follow_the_probabilities():
    """Chi-square against the softmax at a temperature; top-k and top-p keep what they should."""
    random = np.random.default_rng(0)
    log_probs = np.log([[0.5, 0.25, 0.15, 0.07, 0.03]]).repeat(20000, 0)

    def counts(**options):
        ids = search.draw(log_probs, random.random(20000), **options)
        return np.bincount(ids, minlength=5)

    for temperature in (0.7, 1.0, 2.0):
        chances = np.exp(log_probs[0] / temperature)
        expected = 20000 * chances / chances.sum()
        squares = ((counts(temperature=temperature) - expected) ** 2 / expected).sum()
        assert squares < 18.47  # p = 0.001 with 4 degrees of freedom
    assert (counts(temperature=1.0, top_k=2) > 0).tolist() == [True, True, False, False, False]
    assert (counts(temperature=1.0, top_p=0.8) > 0).tolist() == [True] * 3 + [False] * 2
    assert (counts(temperature=1.0, top_p=0.75) > 0).tolist() == [True] * 2 + [False] * 3
    last = search.draw(log_probs[:1], np.array([np.nextafter(1.0, 0.0)]), 1.0)
    assert last[0] == 4  # the end of the running sum is still an id


def test_seeds_reproduce():
    model = make_writer("CausalLM", "sinusoidal")
    one, two, three = (model.generate(PROMPTS, 8, temperature=1.5, seed=s) for s in (1, 1, 2))
    assert one == two != three


BAD = [
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, got 0"),
    (dict(temperature=-1.0), "temperature must be in .0, inf., got -1.0"),
    (dict(temperature=float("nan")), "temperature must be in .0, inf., got nan"),
    (dict(top_k=0), "top_k must be a whole number of at least 1, got 0"),
    (dict(top_p=1.5), "top_p must be in .0, 1., got 1.5"),
    (dict(num_beams=0), "num_beams must be a whole number of at least 1, got 0"),
    (dict(length_penalty=-1.0), "length_penalty must be in .0, inf., got -1.0"),
    (dict(num_beams=2, temperature=1.0), "beams need temperature=0, got 1.0"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        make_writer("CausalLM", "gpt2").generate(PROMPTS, **options)


def test_bad_prompts():
    model = make_writer("CausalLM", "gpt2")
    with pytest.raises(ValueError, match="at least one token, got none as prompt 1"):
        model.generate([[1], []], 2)
    with pytest.raises(ValueError, match=r"ids must be in \[0, 23\), got 23 in prompt 0"):
        model.generate([[23]], 2)
    with pytest.raises(ValueError, match="max_length=32 with learned positions, got 33"):
        model.generate([[4]], 32)
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
