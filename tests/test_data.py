"""Batches: every row once, in an order that seed and epoch decide, with few shapes."""

import collections
import pickle
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
from support import config

import kformer
from kformer.data import (
    ClassificationData,
    LanguageModelData,
    MaskedLMData,
    TranslationData,
)
from kformer.data.batches import label_ids
from kformer.data.ragged import CHUNK, Ragged, best_fit, bucket_edges, pad_rows
from kformer.data.spelling import Spellings
from kformer.models import feeding
from kformer.text.foreign import adapt

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """One id per letter, a = 5; special ids as kformer's own tokenizers have them."""

    vocabulary_size, pad_id, bos_id, eos_id, unk_id, mask_id = 31, 0, 1, 2, 3, 4

    def encode(self, text):
        return [LETTERS.index(c) + 5 for c in text]

    def decode(self, ids):
        return "".join(LETTERS[i - 5] for i in ids)


class Numbers(Letters):
    """Texts that are numbers in words: "12 7 5" → [12, 7, 5], for telling every token apart."""

    vocabulary_size = None

    def encode(self, text):
        return [int(word) for word in text.split()]


def texts(number=200, seed=0, longest=40):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, number)
    return ["".join(random.choice(list(LETTERS), length)) for length in lengths]


def documents(lengths):
    """Documents of numbered tokens, none of which is there twice."""
    ends = 10 + np.cumsum(lengths)
    return [" ".join(map(str, range(end - n, end))) for n, end in zip(lengths, ends, strict=True)]


def classification(**kwargs):
    words = texts()
    labels = [sum(map(ord, word)) % 7 for word in words]
    return ClassificationData(words, labels, Letters(), **{"batch_tokens": 256, **kwargs})


def masked(**kwargs):
    return MaskedLMData(texts(), Letters(), **{"batch_tokens": 256, **kwargs})


def translation(**kwargs):
    pairs = [(text, text[::-1] * 2) for text in texts(longest=20)]
    return TranslationData(pairs, Letters(), **{"batch_tokens": 256, **kwargs})


def packed(**kwargs):
    return LanguageModelData(texts(), Letters(), **{"length": 24, "batch_size": 4, **kwargs})


def stream(**kwargs):
    return packed(pack=False, **kwargs)


MAKERS = [classification, masked, translation, packed, stream]


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def maker(request):
    return request.param


def batches(data):
    """Those of an epoch, as flat tuples of arrays."""
    return [tuple(keras.tree.flatten(data[i])) for i in range(data.num_batches)]


def same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype == np.int32 and np.array_equal(x, y)


def differ(a, b):
    with pytest.raises(AssertionError):
        same(a, b)


# Order


def test_order_is_a_function_of_seed_and_epoch(maker):
    data = maker(seed=3)
    epochs = []
    for epoch in range(3):
        assert data.epoch == epoch
        epochs.append(batches(data))
        data.on_epoch_end()
    again = maker(seed=3)
    for epoch in (2, 0, 1):
        again.seek(epoch)
        same(batches(again), epochs[epoch])
    differ(epochs[0], epochs[1])
    differ(epochs[0], batches(maker(seed=4)))
    assert len({len(epoch) for epoch in epochs}) == 1, "Keras counts the batches once"


def test_an_epoch_goes_on_from_any_batch(maker):
    data = maker()
    data.seek(1)
    whole = batches(data)
    data.on_epoch_end()
    following = batches(data)
    for start in (0, 1, len(whole) - 1):
        data.seek(1, start)
        assert data.num_batches == len(whole) - start
        same(batches(data), whole[start:])
        data.on_epoch_end()
        same(batches(data), following)
    data.seek(1, len(whole))
    assert data.num_batches == 0
    with pytest.raises(ValueError, match=rf"batch must be in \[0, {len(whole)}\], got -1"):
        data.seek(0, -1)
    with pytest.raises(ValueError, match=rf"got {len(whole) + 1}$"):
        data.seek(0, len(whole) + 1)
    with pytest.raises(ValueError, match="epoch must be a whole number of at least 0, got -1"):
        data.seek(-1)
    data.seek(0, 2)
    for index in (-1, len(whole) - 2):
        with pytest.raises(IndexError, match=rf"\[0, {len(whole) - 2}\), got {index}"):
            data[index]


def test_evaluation_is_the_same_in_every_epoch(maker):
    data = maker(shuffle=False)
    first = batches(data)
    data.on_epoch_end()
    assert data.epoch == 1
    same(batches(data), first)
    if maker is not masked:  # its choice of tokens depends on the seed
        same(batches(maker(shuffle=False, seed=5)), first)


def test_background_work_changes_nothing(maker):
    plain = maker(prefetch=0)
    for data in (maker(), maker(prefetch=5, workers=3), pickle.loads(pickle.dumps(maker()))):
        for epoch in range(2):
            plain.seek(epoch)
            same(batches(data), batches(plain))
            data.on_epoch_end()
    data, order = maker(prefetch=3), np.random.default_rng(0).permutation(plain.num_batches)
    plain.seek(0)
    found = {i: tuple(keras.tree.flatten(data[int(i)])) for i in order}  # as Keras may ask for them
    same([found[i] for i in range(len(order))], batches(plain))
    data.on_epoch_end()
    assert data.epoch == 1 and len(data.waiting) <= 3


def test_asking_from_many_threads(maker):
    data, found = maker(workers=2), {}

    def ask(numbers):
        for number in numbers:
            found[number] = tuple(keras.tree.flatten(data[number]))

    numbers = range(data.num_batches)
    threads = [threading.Thread(target=ask, args=(numbers[k::3],)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[i] for i in numbers], batches(maker()))
    data.on_epoch_end()
    assert data.epoch == 1


def test_a_look_at_a_batch_is_no_epoch(maker):
    """Keras looks at a batch before `fit`, and says that an epoch ended."""
    data = maker()
    data.on_epoch_end()
    data[0], data[1]
    data.on_epoch_end()
    assert data.epoch == 0


def test_fingerprint(maker):
    data = maker()
    data.seek(2, 1)
    assert data.fingerprint() == maker().fingerprint()
    assert maker(seed=1).fingerprint() != data.fingerprint()
    assert maker(shuffle=False).fingerprint() != data.fingerprint()
    assert len({m().fingerprint() for m in MAKERS}) == len(MAKERS)
    swapped = ClassificationData(["a", "b"], [0, 1], Letters())
    assert ClassificationData(["a", "b"], [1, 0], Letters()).fingerprint() != swapped.fingerprint()


def test_errors_of_the_background_come_out():
    class Broken(ClassificationData):
        def batch(self, item, random):
            raise OSError("disk gone")

    data = Broken(texts(), [0] * 200, Letters(), 64)
    data.waiting = {0: data.threads.submit(data.make, data.planned(0), 0, 0)}
    with pytest.raises(OSError, match="disk gone"):
        data[0]


def test_the_interpreter_exits_and_forks_do_not_hang():
    code = (
        "import os, kformer; tokenizer = kformer.Tokenizer.train(['ab'], kind='byte');"
        "data = kformer.data.LanguageModelData(['abcd' * 500], tokenizer, 8, 2, prefetch=50);"
        "data[0]; child = os.fork(); data[1]; data[2];"
        "done = os.waitpid(child, 0)[1] if child else os._exit(7); print(done >> 8)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "7" and done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (dict(seed=None), "seed must be a whole number of at least 0, got None"),
        (dict(prefetch=0.5), "prefetch must be a whole number of at least 0, got 0.5"),
        (dict(workers=0), "workers must be a whole number of at least 1, got 0"),
        (dict(batch_tokens=0), "batch_tokens must be a whole number of at least 1, got 0"),
        (dict(buckets=True), "buckets must be a whole number of at least 1, got True"),
        (dict(max_length=0), "max_length must be a whole number of at least 1, got 0"),
        (dict(batch_tokens=39), r"batch_tokens must hold the longest row, 4\d tokens, got 39"),
    ],
)
def test_wrong_arguments(arguments, message):
    for maker in (classification, masked, translation):
        with pytest.raises(ValueError, match=message):
            maker(**arguments)


# Shapes


@pytest.mark.parametrize("maker", [classification, masked, translation], ids=lambda m: m.__name__)
def test_few_shapes(maker):
    data = maker()
    shapes = {tuple(a.shape for a in batch) for batch in batches(data)}
    assert len(shapes) == len(data.shapes()) <= 8
    for batch in batches(data):
        widths = [a.shape[1] for a in batch if a.ndim == 2]
        assert len(batch[0]) * max(widths) <= 256 and all(w % 4 == 0 for w in widths)
    assert len(maker(buckets=2).shapes()) <= 2 and len(maker(buckets=1).shapes()) == 1
    assert 0.8 < data.fill_rate() <= 1.0
    held = sum((batch[0] != 0).sum() for batch in batches(data))
    slots = sum(batch[0].size for batch in batches(data))
    if maker is not translation:
        assert data.fill_rate() == pytest.approx(held / slots)


def test_buckets_waste_the_least():
    """Against every way to choose three edges."""
    lengths = np.random.default_rng(1).lognormal(2.5, 0.7, 300).astype(int) + 1
    edges = bucket_edges(lengths, 3)
    possible = sorted(set((-(-lengths // 4) * 4).tolist()))

    def slots(edges):
        return sum(min(e for e in edges if e >= n) for n in lengths)

    ways = [(a, b, possible[-1]) for a in possible for b in possible if a < b < possible[-1]]
    assert slots(edges) == min(map(slots, ways))
    assert bucket_edges([3, 3, 3], 8) == [4] and bucket_edges([1, 5, 9], 8) == [4, 8, 12]
    many = np.arange(1, 200_000)  # the step grows: this would take 20 GB otherwise
    found = bucket_edges(many, 8)
    assert len(found) == 8 and found[-1] >= 199_999 and all(e % 4 == 0 for e in found)


def test_small_data_make_small_batches():
    data = ClassificationData(["a", "bc", "abcde"], [0, 1, 1], Letters(), buckets=1)
    assert data.num_batches == 1 and data[0][0].shape == (3, 8)
    with pytest.raises(ValueError, match="data must have at least one row, got none"):
        ClassificationData([], [], Letters())
    assert pad_rows([[1, 2], [3]], 3, 9, 4).tolist() == [[1, 2, 9], [3, 9, 9], [9] * 3, [9] * 3]


# Classification


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_text_once_with_its_label(epoch):
    data = classification(bos=True)
    data.seek(epoch)
    found = collections.Counter()
    for ids, labels in (data[i] for i in range(data.num_batches)):
        assert ids.shape == (len(labels), ids.shape[1])
        for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
            real = [i for i in row if i]
            assert row == real + [0] * (len(row) - len(real)), "padding is on the right"
            assert (label == -1) == (not real), "empty rows have no label"
            if real:
                assert real[0] == 1
                found[Letters().decode(real[1:]), label] += 1
    words = texts()
    assert found == collections.Counter((w, sum(map(ord, w)) % 7) for w in words)


def test_class_names():
    named = ClassificationData(["a", "b", "a"], ["yes", "no", "yes"], Letters())
    assert named.class_names == ["no", "yes"] and named.labels.tolist() == [1, 0, 1]
    other = ClassificationData(["a"], ["yes"], Letters(), class_names=["yes", "no"])
    assert other.labels.tolist() == [0]
    numbers = ClassificationData(["a", "b"], np.array([4, 1]), Letters())
    assert numbers.labels.tolist() == [4, 1] and numbers.class_names == [0, 1, 2, 3, 4]
    assert label_ids([1, 0], ["x", "y"]).tolist() == [1, 0]
    assert label_ids([10, 20], [20, 10]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="one of the 2 classes, got 'maybe' in row 1"):
        ClassificationData(["a", "b"], ["no", "maybe"], Letters(), class_names=["no", "yes"])
    with pytest.raises(ValueError, match="one of the 2 classes, got 2 in row 0"):
        label_ids([2], ["x", "y"])
    with pytest.raises(ValueError, match="one of the 1 classes, got -1 in row 1"):
        ClassificationData(["a", "b"], [0, -1], Letters())
    with pytest.raises(ValueError, match=r"class_names must be different, got \['x', 'x'\]"):
        label_ids(["x"], ["x", "x"])
    with pytest.raises(ValueError, match="equally many, got 2 texts and 1 labels"):
        ClassificationData(["a", "b"], [0], Letters())
    with pytest.raises(ValueError, match="iterable of strings, got a string"):
        ClassificationData("ab", [0, 1], Letters())


def test_long_texts_are_cut():
    data = classification(max_length=8)
    assert max(batch[0].shape[1] for batch in batches(data)) == 8
    cut = ClassificationData(["abcdefgh"], [0], Letters(), max_length=3)
    assert cut[0][0].tolist() == [[5, 6, 7, 0]]


# Translation


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_pair_once_with_shifted_labels(epoch):
    data, found = translation(), collections.Counter()
    data.seek(epoch)
    for inputs, labels in (data[i] for i in range(data.num_batches)):
        assert set(inputs) == {"source", "target"}
        assert inputs["target"].shape == labels.shape and len(inputs["source"]) == len(labels)
        rows = (inputs["source"].tolist(), inputs["target"].tolist(), labels.tolist())
        for source, target, label in zip(*rows, strict=True):
            source, target, label = ([i for i in row if i] for row in (source, target, label))
            if not source:
                assert not target and not label
                continue
            assert source[-1] == 2 and target[0] == 1 and 2 not in target
            assert label == [*target[1:], 2], "the next token, and eos at the end"
            found[Letters().decode(source[:-1]), Letters().decode(target[1:])] += 1
    assert found == collections.Counter((t, t[::-1] * 2) for t in texts(longest=20))


def test_pairs_that_do_not_fit():
    pairs = [("abc", "ab"), ("ab", "abcdefgh"), ("abcdefgh", "a"), ("a", "b")]
    with pytest.warns(UserWarning, match="2 of 4 pairs are longer than max_length=5: left out"):
        data = TranslationData(pairs, Letters(), Letters(), max_length=5, shuffle=False)
    assert data[0][0]["source"].tolist() == [[5, 6, 7, 2], [5, 2, 0, 0]]
    assert data[0][1].tolist() == [[5, 6, 2, 0], [6, 2, 0, 0]]
    with (
        pytest.warns(UserWarning, match="1 of 1 pairs"),
        pytest.raises(ValueError, match="one row"),
    ):
        TranslationData([("a" * 9, "b")], Letters(), max_length=5)
    for wrong in ("ab", ("a",), ("a", "b", "c")):
        with pytest.raises(ValueError, match="a source and a target, got .* in row 1"):
            TranslationData([("a", "b"), wrong], Letters())


def test_two_tokenizers_with_ids_of_their_own():
    class Other(Letters):
        pad_id, bos_id, eos_id = 3, 2, 1

    data = TranslationData([("ab", "c"), ("a", "bcd")], Letters(), Other(), shuffle=False)
    inputs, labels = data[0]
    assert inputs["source"].tolist() == [[5, 6, 2, 0], [5, 2, 0, 0]]
    assert inputs["target"].tolist() == [[2, 7, 3, 3], [2, 6, 7, 8]]
    assert labels.tolist() == [[7, 1, 3, 3], [6, 7, 8, 1]]

    class Endless(Letters):
        eos_id = None

    with pytest.raises(ValueError, match="target tokenizer with an eos token, got none"):
        TranslationData([("a", "b")], Letters(), Endless())
    with pytest.raises(ValueError, match="eos=True needs a tokenizer with a eos_id, got <Endless"):
        TranslationData([("a", "b")], Endless(), Letters())

    class Padless(Letters):
        pad_id = None

    data = TranslationData([("a", "b"), ("a", "bcd")], Letters(), Padless(), shuffle=False)
    assert data[0][1].tolist() == [[6, 2, -1, -1], [6, 7, 8, 2]], "no id is padding: −1 is"


# Hidden tokens


def test_masked_tokens():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list(LETTERS), 100)) for _ in range(800)]
    data = MaskedLMData(words, Letters(), bos=True)
    plain = ClassificationData(words, [0] * 800, Letters(), bos=True)
    fates = collections.Counter()
    real = 0
    for (ids, labels), (truth, _) in zip(
        (data[i] for i in range(data.num_batches)),
        (plain[i] for i in range(plain.num_batches)),
        strict=True,
    ):
        chosen = labels >= 0
        assert np.array_equal(labels[chosen], truth[chosen]), "the label is what stood there"
        assert np.array_equal(ids[~chosen], truth[~chosen]), "the rest stays"
        assert (truth[chosen] >= 5).all(), "special tokens are never chosen"
        assert set(np.unique(labels[~chosen])) <= {-1}
        fates["mask"] += int((ids[chosen] == 4).sum())
        fates["same"] += int((ids[chosen] == truth[chosen]).sum())
        other = chosen & (ids != 4) & (ids != truth)
        assert (ids[other] >= 5).all(), "no special token comes in"
        fates["other"] += int(other.sum())
        real += int((truth >= 5).sum())
    total = sum(fates.values())
    assert real == 80_000 and total / real == pytest.approx(0.15, abs=0.005)
    assert fates["mask"] / total == pytest.approx(0.8, abs=0.02)
    # A random letter is the one that stood there once in 26.
    assert fates["same"] / total == pytest.approx(0.1 + 0.1 / 26, abs=0.015)
    assert fates["other"] / total == pytest.approx(0.1 - 0.1 / 26, abs=0.015)


def test_masked_choice_changes_with_the_epoch():
    data, validation = masked(), masked(shuffle=False)
    first, fixed = batches(data), batches(validation)
    data.seek(1)
    differ(first, batches(data))
    validation.seek(9)
    same(fixed, batches(validation))
    alone = MaskedLMData(["abcdefgh" * 10], Letters())
    once = batches(alone)
    alone.seek(1)
    differ(once, batches(alone))
    everything = masked(rate=1.0)[0]
    assert ((everything[1] >= 0) == (everything[0] != 0)).all()


def test_masked_without_a_pad_token():
    class Padless(Letters):
        pad_id = None

    ids, labels = MaskedLMData(["a", "abcdefgh"], Padless(), rate=1.0, buckets=1)[0]
    assert (labels >= 0).sum() == 9, "what fills a row is not hidden"
    for rate in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"rate must be in \(0, 1\], got {rate}"):
            masked(rate=rate)
    for missing in ("mask_id", "vocabulary_size"):
        tokenizer = Letters()
        setattr(tokenizer, missing, None)
        with pytest.raises(ValueError, match=f"a {missing}, got none"):
            MaskedLMData(["a"], tokenizer)


# Language models


def token_pairs(data):
    """{token: next token} of all labels, each of which must be there once."""
    out = {}
    for inputs, labels in (data[i] for i in range(data.num_batches)):
        ids = inputs["ids"] if isinstance(inputs, dict) else inputs
        for token, label in zip(
            ids[labels >= 0].tolist(), labels[labels >= 0].tolist(), strict=True
        ):
            assert token not in out, "every token once"
            out[token] = label
    return out


LENGTHS = [3, 40, 1, 8, 100, 9, 17, 2, 24, 7]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_packed_documents(shuffle, epoch):
    """Every token of a document predicts the next one; its last predicts eos, in any cutting."""
    numbers = documents(LENGTHS)
    data = LanguageModelData(numbers, Numbers(), 8, 3, shuffle=shuffle)
    data.seek(epoch)
    expected = {}
    for words in (list(map(int, text.split())) for text in numbers):
        expected.update(zip(words, [*words[1:], 2], strict=True))
    found = collections.Counter()
    for inputs, labels in (data[i] for i in range(data.num_batches)):
        ids, segments = inputs["ids"], inputs["segments"]
        assert ids.shape == segments.shape == labels.shape == (3, 8)
        assert ((segments == 0) == (labels == -1)).all() and (ids[segments == 0] == 0).all()
        for row in range(3):
            for segment in range(1, segments[row].max() + 1):
                at = np.nonzero(segments[row] == segment)[0]
                assert len(at) and (np.diff(at) == 1).all(), "segments are in one piece, from 1 on"
                assert np.array_equal(ids[row, at[1:]], labels[row, at[:-1]])
        found.update(zip(ids[segments > 0].tolist(), labels[segments > 0].tolist(), strict=True))
    starts = collections.Counter((1, int(text.split()[0])) for text in numbers)
    assert found == collections.Counter(expected.items()) + starts


def test_long_documents_are_cut_elsewhere_in_every_epoch():
    data = LanguageModelData(documents([100, 3]), Numbers(), 8, 1)
    firsts = []
    for epoch in range(4):
        data.seek(epoch)
        firsts.append(sorted(int(data[i][0]["ids"][0, 0]) for i in range(data.num_batches)))
    assert len({tuple(first) for first in firsts}) > 1 and len({len(f) for f in firsts}) == 1


@pytest.mark.parametrize("total", [2, 7, 8, 9, 15, 16, 17, 50, 100])
def test_a_stream_in_windows(total):
    evaluation = LanguageModelData(documents([total]), Numbers(), 8, 2, pack=False, shuffle=False)
    first = 10
    expected = {i: i + 1 for i in range(first, first + total - 1)}
    assert token_pairs(evaluation) == expected
    data, starts, numbers = (
        LanguageModelData(documents([total]), Numbers(), 8, 2, pack=False),
        [],
        [],
    )
    for epoch in range(6):
        data.seek(epoch)
        found = token_pairs(data)
        assert found.items() <= expected.items() and len(found) >= min(total - 1, total - 16)
        starts.append(min(found))
        numbers.append(data.num_batches)
    assert len(set(numbers)) == 1 and (len(set(starts)) > 1) == (total > 9)


def test_streams_join_texts():
    data = LanguageModelData(["abc", "def"], Letters(), 5, 1, pack=False, shuffle=False)
    ids, labels = data[0]
    assert ids.tolist() == [[5, 6, 7, 8, 9]] and labels.tolist() == [[6, 7, 8, 9, 10]]
    assert data.shapes() == [(1, 5)] and data.fill_rate() == 1.0
    one = LanguageModelData("abcdef", Letters(), 5, 1, pack=False, shuffle=False)
    same(batches(one), batches(data))
    for nothing in ([], ["a"]):
        with pytest.raises(ValueError, match="texts must hold at least two tokens, got fewer"):
            LanguageModelData(nothing, Letters(), pack=False)
    with pytest.raises(ValueError, match="length must be a whole number of at least 1, got 0"):
        packed(length=0)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got -1"):
        stream(batch_size=-1)


def test_packing_fills_the_slots():
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 4000).astype(int) + 1
    words = ["a" * length for length in lengths]
    data = LanguageModelData(words, Letters(), length=256, batch_size=16)
    slots = sum(data[i][1].size for i in range(data.num_batches))
    held = sum(int((data[i][1] >= 0).sum()) for i in range(data.num_batches))
    assert held == lengths.sum() + 4000, "nothing is left out: every token, and bos for eos"
    assert data.fill_rate() == pytest.approx(held / slots) and held / slots >= 0.97


def test_best_fit():
    lengths = [5, 0, 3, 8, 5, 2, 3, 1]
    rows = best_fit(lengths, 8)
    assert sorted(sum(rows, [])) == [0, 2, 3, 4, 5, 6, 7], "all but the empty one, once"
    assert all(sum(lengths[i] for i in row) <= 8 for row in rows)
    assert len(rows) == 4  # 27 slots cannot do with 3 rows of 8
    assert best_fit([], 8) == [] and best_fit([0], 8) == []


# Rows of ids


def test_generators_are_read_once():
    words = texts(CHUNK + 10, longest=6)
    pulled = []
    once = (pulled.append(1) or word for word in words)
    rows = Ragged.encode(once, adapt(Letters()))
    assert len(pulled) == len(rows) == CHUNK + 10 and next(once, None) is None
    assert [Letters().decode(rows[i]) for i in (0, CHUNK, CHUNK + 9)] == [
        words[0], words[CHUNK], words[CHUNK + 9],
    ]  # fmt: skip


def test_data_sets_take_generators():
    words = texts()
    labels = [sum(map(ord, word)) % 7 for word in words]
    data = ClassificationData((w for w in words), (n for n in labels), Letters(), 256)
    same(batches(data), batches(classification()))
    same(batches(MaskedLMData((w for w in words), Letters(), 256)), batches(masked()))
    pairs = ((t, t[::-1] * 2) for t in texts(longest=20))
    same(batches(TranslationData(pairs, Letters(), None, 256)), batches(translation()))
    same(batches(LanguageModelData((w for w in words), Letters(), 24, 4)), batches(packed()))


def test_in_a_file_as_in_memory(monkeypatch, maker):
    truth, name = batches(maker()), maker().fingerprint()
    monkeypatch.setattr("kformer.data.ragged.IN_MEMORY", 10)
    data = maker()
    assert all(isinstance(side.flat, np.memmap) for side in data.sides)
    same(batches(data), truth)
    assert data.fingerprint() == name


def test_ids_must_be_what_the_tokenizer_says():
    class Lying(Letters):
        vocabulary_size = 10

    tokenizer = adapt(Lying())
    with pytest.raises(
        ValueError, match=r"ids must be in \[0, 10\), as its vocabulary_size .*got 30"
    ):
        Ragged.encode(["az"], tokenizer)
    with pytest.raises(ValueError, match="got -5"):
        Ragged.encode(["70000 -5"], adapt(Numbers()))
    rows = Ragged.encode(["70000 5"], adapt(Numbers()))
    assert rows[0].tolist() == [70000, 5] and rows.flat.dtype == np.int32
    assert Ragged.encode(["a"], adapt(Letters())).flat.dtype == np.uint16


# Training


def model_for(maker):
    small = config(vocabulary_size=31, num_layers=1, max_length=64)
    if maker is classification:
        return kformer.TextClassifier(small, 7)
    kinds = {masked: kformer.MaskedLM, translation: kformer.Seq2SeqLM}
    return kinds.get(maker, kformer.CausalLM)(small)


def test_fit_and_evaluate(maker):
    model = model_for(maker)
    model.compile()
    one_shape = dict(buckets=1) if maker not in (packed, stream) else {}
    data, validation = maker(**one_shape), maker(shuffle=False, **one_shape)
    history = model.fit(data, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    first = model.evaluate(validation, verbose=0, return_dict=True)
    second = model.evaluate(validation, verbose=0, return_dict=True)
    assert first == second and np.isfinite(first["loss"])


def test_fit_keeps_the_order():
    """kformer's `fit` takes the batches as they come, epoch after epoch."""
    model, made = model_for(classification), []

    class Noted(ClassificationData):
        def batch(self, item, random):
            made.append(item[1].tolist())
            return super().batch(item, random)

    data = Noted(texts(), [0, 1] * 100, Letters(), 256, buckets=1, prefetch=0)
    expected = [[rows.tolist() for _, rows in data.plan(epoch)] for epoch in range(2)]
    model.compile()
    model.fit(data, epochs=2, verbose=0)
    made = made[-2 * data.num_batches :]  # Keras looks at the first ones before
    assert made == expected[0] + expected[1]


def test_plain_keras_models_see_every_batch_once():
    """Keras' `fit` shuffles the batches of a data set, looks at the first, and ends epochs."""
    asked = collections.Counter()

    class Counted(ClassificationData):
        def batch(self, item, random):
            asked[self.epoch] += len(item[1])
            ids, labels = super().batch(item, random)
            return ids, np.maximum(labels, 0)

    data = Counted(texts(), [0, 1] * 100, Letters(), 256, buckets=1, prefetch=0)
    model = keras.Sequential([keras.layers.Embedding(31, 2), keras.layers.Flatten()])
    model.add(keras.layers.Dense(2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.fit(data, epochs=3, verbose=0)
    assert data.epoch == 3, "epochs advance"
    assert all(200 <= asked[epoch] for epoch in range(3))
    assert asked[1] == asked[2] == 200


def test_hidden_tokens():
    """About that share of the ordinary tokens, others in every epoch; none in evaluation."""
    texts = ["one two three four five six seven eight"] * 40
    tokenizer = kformer.Tokenizer.train(texts, 300, mask=True)
    data = kformer.data.ClassificationData(texts, [0, 1] * 20, tokenizer, bos=True, hide=0.25)
    plain = kformer.data.ClassificationData(texts, [0, 1] * 20, tokenizer, bos=True)
    ids, other = data[0][0], plain[0][0]
    hidden = ids == tokenizer.mask_id
    assert 0.15 < hidden.sum() / (other > 4).sum() < 0.35
    assert (ids[~hidden] == other[~hidden]).all() and (other[hidden] > 4).all()
    data.seek(1)
    assert (data[0][0] != ids).any()
    with pytest.raises(ValueError, match=r"hide must be in \[0, 1\), got 1.0"):
        kformer.data.ClassificationData(texts, [0, 1] * 20, tokenizer, hide=1.0)


def sentences(number=60):
    words = "when the train leaves the station nobody waits for another one".split()
    random = np.random.default_rng(3)
    return [" ".join(random.choice(words, random.integers(2, 9))) for _ in range(number)]


@pytest.mark.parametrize("kind", ["classes", "masked", "pairs"])
def test_split_tokens_spell_the_same_text(kind):
    """Tokens come apart, differently in every epoch; the text, and the labels, stay theirs."""
    given = sentences()
    tokenizer = kformer.Tokenizer.train(given, 300, mask=True)
    joins = tokenizer.joins()
    assert list(joins.values()) == list(range(5 + 256, 300))  # in the order of the ids
    assert all(tokenizer.decode([new]) == tokenizer.decode(pair) for pair, new in joins.items())

    def make(split):
        kwargs = dict(batch_tokens=256, split=split, seed=5)
        if kind == "classes":
            return ClassificationData(given, list(range(60)), tokenizer, **kwargs)
        if kind == "masked":
            return MaskedLMData(given, tokenizer, rate=0.5, **kwargs)
        return TranslationData([(text, text) for text in given], tokenizer, **kwargs)

    def spelled(data, epoch):
        """The texts of an epoch, and how many tokens they have."""
        data.seek(epoch)
        out, tokens = {}, 0
        for number, (_, rows) in enumerate(data.planned(epoch)):
            x, y = data[number]
            if kind == "pairs":
                follows = x["target"][:, 1:]
                assert np.array_equal(y[:, :-1] * (follows > 0), follows)
            ids = y if kind == "pairs" else np.where(y >= 0, y, x) if kind == "masked" else x
            tokens += int((ids > 4).sum())
            out.update(zip(rows.tolist(), tokenizer.decode(ids[: len(rows)]), strict=True))
        return [out[i] for i in range(60)], tokens

    _, plain = spelled(make(0.0), 0)
    data = make(0.1)
    (first, some), (second, other) = spelled(data, 0), spelled(data, 1)
    assert first == second == given
    assert 1.05 * plain < some < 1.4 * plain and some != other
    assert spelled(data, 0) == (first, some)
    assert len(data.shapes()) <= 8


def test_split_needs_a_bpe():
    with pytest.raises(ValueError, match=r"split must be in \[0, 1\), got 1.0"):
        classification(split=1.0)
    with pytest.raises(ValueError, match=r"split=0.1 needs a tokenizer that joins tokens \(bpe\)"):
        classification(split=0.1)
    words = kformer.Tokenizer.train(sentences(), 300, "wordpiece")
    assert words.joins() == {}


def test_spellings():
    """Without dropout a token is spelled by itself, with full dropout by its letters."""
    tokenizer = kformer.Tokenizer.train(sentences(), 300)
    for text in sentences(5):
        row = np.array(tokenizer.encode(text))
        for rate, expected in ((0.0, len(row)), (1.0, len(text))):
            spelled = Spellings(tokenizer, rate, seed=0).spell(row, 99, np.random.default_rng(0))
            assert len(spelled) == expected and tokenizer.decode(spelled) == text
        spelled = Spellings(tokenizer, 0.5, seed=0).spell(row, 2, np.random.default_rng(0))
        assert len(row) <= len(spelled) <= len(row) + 2 and tokenizer.decode(spelled) == text


def uneven_pairs(number=60):
    """Many short pairs and a few long ones: neighbours in the plan are mostly alike."""
    random = np.random.default_rng(0)
    lengths = np.where(random.random(number) < 0.9, 2, 12)
    return [(" ".join(["ab"] * n), " ".join(["ba"] * n)) for n in lengths]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_first_two_batches_show_which_sizes_vary(shuffle):
    """Keras on TensorFlow takes what they have in common for a law of all batches."""
    pairs = uneven_pairs()
    tokenizer = kformer.Tokenizer.train([text for pair in pairs for text in pair], 270)
    data = TranslationData(pairs, tokenizer, batch_tokens=64, shuffle=shuffle)
    widths = [data[i][0]["source"].shape[1] for i in range(data.num_batches)]
    assert len(set(widths)) > 1 and set(widths[:2]) == {min(widths), max(widths)}
    assert sum(len(rows) for _, rows in data.planned(0)) == len(pairs)


def test_fit_from_any_batch_whatever_its_neighbours():
    pairs = uneven_pairs()
    tokenizer = kformer.Tokenizer.train([text for pair in pairs for text in pair], 270)
    data = TranslationData(pairs, tokenizer, batch_tokens=64, seed=1)
    size = dict(num_layers=1, hidden_dim=8, num_heads=2)
    settings = kformer.Config(vocabulary_size=tokenizer.vocabulary_size, bos_id=1, eos_id=2, **size)
    model = kformer.Seq2SeqLM(settings, tokenizer=tokenizer)
    model.compile()
    data.seek(0, 2)
    fed = feeding.feed(data, model.check_batch)
    history = keras.Model.fit(model, fed, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"][0])
    assert int(model.optimizer.iterations) == len(data.planned(0)) - 2
    model.fit(data, epochs=2, verbose=0, validation_data=data)
