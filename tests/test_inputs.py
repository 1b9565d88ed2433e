"""Bad ids, masks, shapes and labels: one clear ValueError on every way in, on every backend."""

import pickle

import keras
import numpy as np
import pytest
from support import BACKEND, case, config, make_model

import kformer
from kformer import backend
from kformer.models import feeding

GOOD = case(0).ids(4)
LABELS = np.random.default_rng(0).integers(1, 23, GOOD.shape)


def bad_ids():
    """B28: what is wrong with ids, and the message."""
    for value in (-1, 23, 2**31 - 1):
        ids = GOOD.copy()
        ids[1, 2] = value
        yield ids, rf"ids must be in \[0, 23\), got {value}"
    yield GOOD.astype("int64") + 2**40, r"ids must be in \[0, 23\), got 10995"
    yield GOOD.astype("float32"), "ids must be integers, got dtype float32"
    yield GOOD[0], r"ids must have shape \(batch, length\), got shape \(8,\)"
    yield GOOD[None], r"got shape \(1, 4, 8\)"
    yield np.zeros((2, 0), "int32"), r"at least one row and one token, got shape \(2, 0\)"


BAD_IDS = list(bad_ids())


@pytest.fixture(scope="module")
def model():
    model = make_model("CausalLM", config())
    model.compile()
    return model


@pytest.mark.parametrize("number", range(len(BAD_IDS)))
def test_b28_ids(model, number):
    ids, message = BAD_IDS[number]
    labels = np.zeros(np.shape(ids), int)
    for way_in in (
        lambda: model(ids),
        lambda: model.fit(ids, labels, verbose=0),
        lambda: model.fit(GOOD, LABELS, validation_data=(ids, labels), verbose=0),
        lambda: model.evaluate(ids, labels, verbose=0),
        lambda: model.predict(ids, verbose=0),
        lambda: model.train_on_batch(ids, labels),
        lambda: model.test_on_batch(ids, labels),
        lambda: model.predict_on_batch(ids),
        lambda: model.score(ids),
    ):
        with pytest.raises(ValueError, match=message):
            way_in()


class Rows(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    @property
    def num_batches(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def sources(batches):
    """The same batches as everything that fit takes."""
    yield Rows(batches)
    yield (batch for batch in batches)
    if BACKEND == "torch":
        import torch

        rows = [tuple(part[i] for part in batch) for batch in batches for i in range(4)]
        yield torch.utils.data.DataLoader(rows, batch_size=4)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        yield tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_b28_in_data_sets(model):
    wrong = GOOD.copy()
    wrong[3, 1] = 99
    for source in sources([(GOOD, LABELS), (wrong, LABELS)]):
        with pytest.raises(ValueError, match=r"ids must be in \[0, 23\), got 99"):
            model.fit(source, verbose=0, shuffle=False)
    for source in sources([(GOOD, LABELS), (GOOD, LABELS)]):
        history = model.fit(source, verbose=0, shuffle=False).history
        assert np.isfinite(float(history["loss"][0]))
    for source in sources([(GOOD, LABELS), (GOOD, LABELS)]):
        model.evaluate(source, verbose=0)
        model.fit(GOOD, LABELS, validation_data=Rows([(GOOD, LABELS)]), verbose=0)


def test_checked_data_can_go_to_other_processes(model):
    """What a worker process gets is pickled, and checks there too."""
    wrong = GOOD + 50
    there = pickle.loads(pickle.dumps(feeding.feed(Rows([(wrong, LABELS)]), positive)))
    with pytest.raises(ValueError, match="ids above 49"):
        there[0]
    if BACKEND == "torch":
        import torch

        rows = list(zip(wrong, LABELS, strict=True))
        loader = feeding.feed(torch.utils.data.DataLoader(rows, batch_size=4), positive)
        collate = pickle.loads(pickle.dumps(loader.collate_fn))
        with pytest.raises(ValueError, match="ids above 49"):
            collate(rows)


def positive(x, y):
    if np.asarray(x).min() > 49:
        raise ValueError("ids above 49")


def test_b28_in_lists_of_lists(model):
    out = model([[1, 2], [3, 4]])
    assert tuple(out.shape) == (2, 2, 23)
    with pytest.raises(ValueError, match="got 77"):
        model([[1, 77]])
    assert tuple(model({"ids": [[1, 2]], "segments": [[1, 2]]}).shape) == (1, 2, 23)
    translator = make_model("Seq2SeqLM", config())
    assert tuple(translator({"source": [[1, 2, 3]], "target": [[1, 2]]}).shape) == (1, 2, 23)


def test_headline_9_inside_a_compiled_function(model):
    """Where nothing can be raised a bad id gives NaN, never another token's row."""
    ids = GOOD.copy()
    ids[0, 3], ids[1, 2], ids[2, 1] = -1, 23, 10**6

    if BACKEND == "jax":
        import jax

        out = jax.jit(lambda x: model(x))(ids)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        out = tf.function(lambda x: model(x), jit_compile=True)(tf.constant(ids))
    else:  # torch runs eagerly: the check raises, so look behind it
        with pytest.raises(ValueError, match=r"ids must be in \[0, 23\), got -1"):
            model.call(backend.torch.as_tensor(ids))
        rows = backend.to_numpy(model.backbone.embedding.table(backend.torch.as_tensor(ids)))
        assert (np.isnan(rows).all(-1) == ((ids < 0) | (ids > 22))).all()
        return
    out = backend.to_numpy(out)
    for row, place in ((0, 3), (1, 2), (2, 1)):
        assert np.isnan(out[row, place]).all()
    assert np.isfinite(out[3]).all()  # other rows are not touched


def test_headline_9_positions():
    learned = make_model("CausalLM", config(position="learned", max_length=8, position_offset=2))
    with pytest.raises(ValueError, match="max_length=8 with learned positions, got length 9"):
        learned(np.ones((1, 9), "int32"))
    with pytest.raises(ValueError, match="max_length=8 with learned positions, got length 9"):
        learned(keras.Input((9,), dtype="int32"))
    for wrong in (-1, 8):
        given = {"ids": GOOD[:1], "positions": np.full((1, 8), wrong)}
        with pytest.raises(ValueError, match=rf"positions must be in \[0, 8\), got {wrong}"):
            learned(given)
        inside = learned.backbone.positions(
            np.zeros((1, 1, 16), "float32"), positions=as_symbol(np.array([[wrong]]))
        )
        assert inside is None or np.isnan(backend.to_numpy(inside)).all()
    assert tuple(learned({"ids": GOOD[:1], "positions": np.full((1, 8), 7)}).shape) == (1, 8, 23)


def as_symbol(positions):
    """Positions past the host's check, as a compiled function would see them."""
    from kformer.layers import positions as module

    module.refuse_outside = lambda *_: None
    return positions


@pytest.fixture(autouse=True)
def restore_check():
    from kformer.layers import positions as module

    original = module.refuse_outside
    yield
    module.refuse_outside = original


def bad_extras():
    """B29 and its like: what comes beside the ids."""
    ones = np.ones(GOOD.shape, bool)
    yield {"padding_mask": ones.astype("float32")}, "padding_mask must be boolean.*float32"
    yield {"padding_mask": ones.astype("int32")}, "padding_mask must be boolean.*int32"
    yield {"padding_mask": ones[:, :5]}, r"shape of ids, \(4, 8\), got \(4, 5\)"
    yield {"padding_mask": np.ones((4, 9), bool)}, r"shape of ids, \(4, 8\), got \(4, 9\)"
    yield {"padding_mask": ~ones}, "padding_mask must leave a real token, got all False"
    yield {"segments": np.full(GOOD.shape, -1)}, "segments must be in.*got -1"
    yield (
        {"segments": np.ones((4, 7), int)},
        r"segments must have shape \(4, 8\), got shape \(4, 7\)",
    )
    yield {"segments": np.ones(GOOD.shape)}, "segments must be integers, got dtype float64"
    yield {"positions": np.full(GOOD.shape, -2)}, "positions must be in.*got -2"
    yield {"prefix": np.ones((4, 8), int)}, r"prefix must have shape \(4,\)"
    yield {"token_types": np.zeros(GOOD.shape, int)}, "token_types must be left out"
    yield {"mask": ones}, r"beside 'ids', got \['mask'\]"


BAD_EXTRAS = list(bad_extras())


@pytest.mark.parametrize("number", range(len(BAD_EXTRAS)))
def test_b29_what_comes_with_ids(model, number):
    extra, message = BAD_EXTRAS[number]
    given = {"ids": GOOD, **extra}
    for way_in in (
        lambda: model(given),
        lambda: model.fit(given, LABELS, verbose=0),
        lambda: model.predict(given, verbose=0),
    ):
        with pytest.raises(ValueError, match=message):
            way_in()


def test_missing_keys(model):
    with pytest.raises(ValueError, match=r"key 'ids', got \['tokens'\]"):
        model({"tokens": GOOD})
    translator = make_model("Seq2SeqLM", config())
    with pytest.raises(ValueError, match=r"dict of 'source' and 'target', got \['source'\]"):
        translator({"source": GOOD})
    with pytest.raises(ValueError, match="dict of 'source' and 'target', got ndarray"):
        translator(GOOD)
    other = make_model("Seq2SeqLM", config(target_vocabulary_size=9))
    with pytest.raises(ValueError, match=r"target ids must be in \[0, 9\)"):
        other({"source": GOOD, "target": GOOD % 9 + 9})


def test_b31_labels(model):
    wrong = LABELS.copy()
    wrong[0, 0] = 23
    for way_in in (
        lambda: model.fit(GOOD, wrong, verbose=0),
        lambda: model.evaluate(GOOD, wrong, verbose=0),
        lambda: model.fit(Rows([(GOOD, wrong)]), verbose=0),
    ):
        with pytest.raises(ValueError, match="labels must be below 23, got 23"):
            way_in()
    with pytest.raises(ValueError, match="labels must be integers, got dtype float64"):
        model.fit(GOOD, wrong * 1.0, verbose=0)
    for shape in ((4, 1), (4, 7), (4, 8, 1), (4,)):
        labels = np.ones(shape, int)
        for way_in in (model.fit, model.evaluate, model.train_on_batch):
            with pytest.raises(ValueError, match=r"labels must have shape \(4, 8\).*got shape"):
                way_in(GOOD, labels)
    classifier = make_model("TextClassifier", config(), num_classes=3)
    classifier.compile()
    with pytest.raises(ValueError, match=r"shape \(4,\), one for each, got shape \(4, 1\)"):
        classifier.fit(GOOD, np.ones((4, 1), int))
    ignored = model.evaluate(GOOD, np.full(GOOD.shape, -100), verbose=0, return_dict=True)
    assert float(ignored["loss"]) == 0.0
    before = [backend.to_numpy(v).copy() for v in model.trainable_variables]
    model.compile(keras.optimizers.SGD(1.0))
    model.fit(GOOD, np.zeros_like(GOOD), verbose=0)
    assert all(
        np.array_equal(backend.to_numpy(v), b)
        for v, b in zip(model.trainable_variables, before, strict=True)
    )


def test_long_sequences_without_a_table():
    """Other position schemes run past max_length."""
    for position in ("sinusoidal", "rotary", "alibi", "relative", "none"):
        model = kformer.Encoder(config(position=position, max_length=4))
        assert tuple(model(GOOD).shape) == (4, 8, 16)
