"""The laws of every model (GUARANTEES, section 6); a new model joins by a line in support.CASES."""

import json

import keras
import numpy as np
import pytest
import reference
from support import CASES, CONFIGS, Case, case, case_ids, close, config, exact, make_model, run

import kformer
from kformer import backend, masks

every_case = pytest.mark.parametrize("number", range(len(CASES)), ids=case_ids)


@every_case
def test_p1_config_round_trip(number):
    model = case(number).model
    written = json.dumps(model.get_config())
    again = type(model).from_config(json.loads(written))
    assert json.dumps(again.get_config()) == written
    assert again.config == model.config
    public = lambda m: {n for n in dir(m) if not n.startswith("_")}  # noqa: E731
    assert public(again) == public(model)
    revived = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    assert json.dumps(revived.get_config()) == written


@every_case
def test_built_when_the_constructor_returns(number):
    """Down to the last part: for one that is not, Keras runs the whole model eagerly on JAX."""
    kind, name, arguments = CASES[number]
    model = getattr(kformer, kind)(CONFIGS[name], **arguments)
    assert not [part.name for part in model._flatten_layers() if not part.built]


@every_case
def test_p2_eval_is_deterministic(number):
    c = case(number)
    exact(c.run(c.ids()), c.run(c.ids()))


@every_case
def test_p2_dropout_is_on_in_training(number):
    kind, name, arguments = CASES[number]
    both = CONFIGS[name].replace(dropout=0.3, attention_dropout=0.3)
    c, model = case(number), make_model(kind, both, **arguments)
    inputs = c.wrap(c.ids())
    assert np.abs(run(model, inputs, training=True) - run(model, inputs)).max() > 1e-4


@pytest.mark.parametrize("kind", ["CausalLM", "Seq2SeqLM", "MaskedLM"])
def test_p2_dropout_differs_in_training_only(kind):
    model = make_model(kind, config(dropout=0.3, attention_dropout=0.3))
    ids = case(0).ids()
    inputs = {"source": ids, "target": ids} if kind == "Seq2SeqLM" else ids
    first, second = (backend.to_numpy(model(inputs, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    exact(run(model, inputs), run(model, inputs))


@every_case
def test_p3_right_padding(number):
    c = case(number)
    ids = c.ids()
    padded = c.run(c.pad(ids, right=4))
    padded = padded[:, : ids.shape[1]] if c.per_token else padded
    close(padded, c.run(ids), 1e-6)


@every_case
def test_p4_no_future_leak(number):
    c = case(number)
    if not c.is_causal:
        pytest.skip("bidirectional by design")
    ids, other = c.ids(), c.ids(seed=5)
    other[:, :4] = ids[:, :4]
    exact(c.run(ids)[:, :4], c.run(other)[:, :4])
    assert np.abs(c.run(ids)[:, 4:] - c.run(other)[:, 4:]).max() > 1e-3


@every_case
def test_p5_content_of_padding(number):
    """Whatever stands behind the padding id, NaN and infinity included, changes nothing."""
    kind, name, arguments = CASES[number]
    c = Case(kind, name, arguments)
    ids = c.ids()
    ids[0, 5:], ids[1, :2] = c.config.pad_id, c.config.pad_id
    if c.config.bos_id == c.config.pad_id:
        ids[1, :2] = 5
    before = run(c.model, c.wrap(ids))
    tables = [v for v in c.model.weights if v.path.endswith("embedding/table/embeddings")]
    for bad in (np.nan, np.inf):
        for table in tables:
            value = backend.to_numpy(table).copy()
            value[c.config.pad_id] = bad
            table.assign(value)
        after = run(c.model, c.wrap(ids))
        real = ids != c.config.pad_id
        tied = c.kind in ("CausalLM", "MaskedLM", "Seq2SeqLM") and c.config.tie_embeddings
        keep = np.arange(before.shape[-1]) != c.config.pad_id if tied else slice(None)
        if c.per_token:
            exact(before[real][:, keep], after[real][:, keep], str(bad))
        else:
            exact(before, after, str(bad))


@every_case
def test_p9_left_padding(number):
    c = case(number)
    if c.is_seq2seq and c.config.bos_id == c.config.pad_id:
        pytest.skip("decoding starts from the padding id: the first column is never padding")
    ids = c.ids()
    padded = c.run(c.pad(ids, left=4))
    close(padded[:, 4:] if c.per_token else padded, c.run(ids), 1e-5)


@every_case
def test_p12_packed_is_separate(number):
    c = case(number)
    if not c.per_token or c.is_seq2seq:
        pytest.skip("a row is one text by design" if not c.per_token else "see test_p12_seq2seq")
    ids = c.ids(rows=1)
    packed = {"ids": ids, "segments": np.array([[1] * 3 + [2] * 5], "int32")}
    together = run(c.model, packed)
    close(together[:, :3], run(c.model, ids[:, :3]), 1e-5)
    close(together[:, 3:], run(c.model, ids[:, 3:]), 1e-5)
    other = {**packed, "ids": np.concatenate([c.ids(1, seed=3)[:, :3], ids[:, 3:]], 1)}
    exact(run(c.model, other)[:, 3:], together[:, 3:])


def test_p12_seq2seq():
    """Source and target packed alike: each target document sees its own source only."""
    c = case(next(i for i, x in enumerate(CASES) if x[:2] == ("Seq2Seq", "m2m")))
    ids, source = c.ids(1), c.source(1)
    cut = {"source": (source, 2), "target": (ids, 3)}
    packed, first, second = {}, {}, {}
    for key, (row, at) in cut.items():
        length = row.shape[1]
        segments = np.array([[1] * at + [2] * (length - at)], "int32")
        packed[key] = {"ids": row, "segments": segments}
        first[key], second[key] = row[:, :at], row[:, at:]
    together = run(c.model, packed)
    close(together[:, :3], run(c.model, first), 1e-5)
    close(together[:, 3:], run(c.model, second), 1e-5)


@every_case
def test_p13_row_alone(number):
    c = case(number)
    ids, source = c.ids(), c.source()
    close(c.run(ids[1:2], source[1:2]), c.run(ids, source)[1:2], 1e-5)


@every_case
def test_p21_tied_is_one_variable(number, tmp_path):
    c = case(number)
    if not c.kind.endswith("LM"):
        pytest.skip("no vocabulary head")
    model = make_model(c.kind, c.config)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for m in (model, loaded, loaded.resize_vocabulary(c.size + 3)):
        size = m.num_labels
        square = [v for v in m.trainable_variables if size in v.shape and len(v.shape) == 2]
        sources = 0 if c.config.target_vocabulary_size is None else 1
        expected = 1 if c.config.tie_embeddings else 2
        if sources:
            square = [v for v in square if "encoder" not in v.path]
        assert len(square) == expected, [v.path for v in square]
        assert len({id(v) for v in m.weights}) == len(m.weights)


@every_case
def test_p34_shapes(number):
    """Symbolic shapes are the eager ones, for known and unknown batch and length."""
    c = case(number)
    for length in (8, 1):
        ids = c.ids(length=length)
        eager = c.run(ids).shape
        for static in (length, None):
            one = lambda n: keras.Input((n,), dtype="int32")  # noqa: E731
            symbol = one(static)
            inputs = {"source": one(static and 6), "target": symbol} if c.is_seq2seq else symbol
            out = c.model(inputs)
            symbolic = tuple(out.shape)
            assert len(symbolic) == len(eager)
            assert all(s in (None, e) for s, e in zip(symbolic, eager, strict=True))
            assert symbolic[0] is None and symbolic[-1] == eager[-1]
            assert keras.backend.standardize_dtype(out.dtype) == "float32"


@every_case
def test_p34_empty_batch(number):
    c = case(number)
    with pytest.raises(ValueError, match=r"at least one row.*\(0, 8\)"):
        c.model(c.wrap(np.zeros((0, 8), "int32"), source=c.source()))


def test_functional_use():
    """A model as a layer of somebody's Functional model, trained by fit."""
    encoder = kformer.Encoder(config())
    inputs = keras.Input((None,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(encoder(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    ids = case(0).ids(4)
    model.fit(ids, np.array([0, 1, 0, 1]), verbose=0)
    padded = np.pad(ids, ((0, 0), (0, 3)))
    close(model.predict(padded, verbose=0), model.predict(ids, verbose=0), 1e-5)


@pytest.mark.parametrize("kind", ["Encoder", "TextClassifier"])
def test_p38_permutation(kind):
    """Without positions, an encoder does not know the order of its tokens."""
    arguments = {} if kind == "Encoder" else {"num_classes": 3}
    model = make_model(kind, config(position="none"), **arguments)
    ids = case(0).ids()
    order = np.random.default_rng(0).permutation(ids.shape[1])
    out, permuted = run(model, ids), run(model, ids[:, order])
    close(permuted, out[:, order] if kind == "Encoder" else out, 1e-5)


@pytest.mark.parametrize("name", ["sinusoidal", "t5", "marian"])
def test_p40_source_padding(name):
    """Cross-attention ignores the padding of the source, however much there is."""
    c = Case("Seq2SeqLM", name, {})
    model, ids, source = c.model, c.ids(), c.source()
    short = run(model, {"source": source, "target": ids})
    long = run(model, {"source": c.pad(source, right=3), "target": ids})
    left = run(model, {"source": c.pad(source, left=3), "target": ids})
    close(long, short, 1e-6)
    close(left, short, 1e-5)
    mask = np.arange(9)[None] < np.array([[6], [6], [6]])
    junk = np.concatenate([source, c.source(length=3, seed=9)], 1)
    given = {"source": {"ids": junk, "padding_mask": mask}, "target": ids}
    exact(run(model, given), long)


def test_prefix_sees_itself():
    """Prefix-LM: tokens of the prefix see each other, the rest stays causal."""
    model = make_model("CausalLM", config())
    ids, prefix = case(0).ids(2), np.array([4, 0], "int32")
    plain, with_prefix = run(model, ids), run(model, {"ids": ids, "prefix": prefix})
    exact(plain[1], with_prefix[1])
    explicit = {"ids": ids, "prefix": prefix, "positions": np.tile(np.arange(8), (2, 1))}
    close(run(model, explicit), with_prefix, 1e-6)
    assert np.abs(plain[0, :3] - with_prefix[0, :3]).max() > 1e-3
    later = ids.copy()
    later[:, 6] = later[:, 6] % 20 + 1
    again = run(model, {"ids": later, "prefix": prefix})
    exact(again[:, :6], with_prefix[:, :6])


def test_score_and_perplexity():
    model = make_model("CausalLM", config())
    rows = [[3, 5, 7, 2], [4, 4]]
    score = model.score(rows)
    logits = run(model, np.array([rows[0]], "int32")).astype("float64")[0]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [logs[t, rows[0][t + 1]] for t in range(3)]
    close(score.log_probs[0, 1:], expected, 1e-5)
    close(score.totals[0], sum(expected), 1e-5)
    assert np.isnan(score.log_probs[:, 0]).all() and np.isnan(score.log_probs[1, 2:]).all()
    mean = np.nanmean(score.log_probs)
    assert score.perplexity == pytest.approx(np.exp(-mean), rel=1e-6)
    translator = make_model("Seq2SeqLM", config(bos_id=1))
    scored = translator.score({"source": [[5, 6]], "target": [[1, 7, 8]]})
    assert np.isfinite(scored.log_probs[0, 1:]).all()
    with pytest.raises(ValueError, match="tokenizer=None"):
        model.score(["text"])
    with pytest.raises(ValueError, match="got a MaskedLM"):
        make_model("MaskedLM", config()).score(rows)
    packed = {"ids": [[3, 5, 7, 2]], "segments": [[1, 1, 2, 2]]}
    packed = model.score({key: np.array(value) for key, value in packed.items()})
    assert (np.isnan(packed.log_probs) == [[True, False, True, False]]).all()


def test_score_of_texts():
    class Letters:
        pad_id, bos_id, eos_id, vocabulary_size = 0, 1, 2, 23

        def encode(self, text):
            return [3 + ord(c) % 20 for c in text]

        def decode(self, ids):
            return "".join(chr(97 + i) for i in ids)

    model = kformer.CausalLM(config(), tokenizer=Letters())
    assert (model.config.bos_id, model.config.eos_id) == (1, 2)
    assert model.score("hello").log_probs.shape == (1, 5)
    with pytest.raises(ValueError, match=r"tokenizer's, 23, got config.vocabulary_size=30"):
        kformer.CausalLM(config(vocabulary_size=30), tokenizer=Letters())


@pytest.mark.parametrize("tied", [True, False])
def test_resize_vocabulary(tied):
    model = make_model("CausalLM", config(tie_embeddings=tied, output_bias=True))
    ids = case(0).ids()
    before = run(model, ids)
    model.compile()
    assert model.resize_vocabulary(30) is model
    after = backend.to_numpy(model(ids))
    close(after[..., :23], before, 1e-6)
    assert model.config.vocabulary_size == 30 and after.shape[-1] == 30
    assert model.count_params() == model.config.parameter_count("causal_lm")
    model.fit(np.full((2, 4), 29), np.full((2, 4), 28), verbose=0)
    model.predict(ids, verbose=0)
    model.resize_vocabulary(10)
    assert model.predict(ids % 10, verbose=0).shape[-1] == 10
    assert backend.to_numpy(model(ids % 10)).shape[-1] == 10
    with pytest.raises(ValueError, match="vocabulary_size must be from 1.*got 0"):
        model.resize_vocabulary(0)


def test_the_target_has_its_own_tokenizer():
    """Its special ids and size rule what is generated; a disagreement is an error."""

    class Words:
        pad_id = 0

        def __init__(self, size, bos, eos):
            self.vocabulary_size, self.bos_id, self.eos_id = size, bos, eos

        def encode(self, text):
            return [3] * len(text)

        def decode(self, ids):
            return "x" * len(ids)

    mine, theirs = Words(23, None, None), Words(19, 5, 6)
    model = kformer.Seq2SeqLM(config(), tokenizer=mine, target_tokenizer=theirs)
    assert model.config.target_vocabulary_size == 19
    assert (model.config.bos_id, model.config.eos_id) == (5, 6)
    with pytest.raises(ValueError, match="tokenizer's, 19, got config.target_vocabulary_size=30"):
        kformer.Seq2SeqLM(config(target_vocabulary_size=30), mine, theirs)


def test_resize_of_other_models():
    classifier = make_model("TextClassifier", config(target_vocabulary_size=19), num_classes=2)
    classifier.resize_vocabulary(40)
    assert classifier.config.vocabulary_size == 40
    assert np.isfinite(backend.to_numpy(classifier(np.array([[39]])))).all()
    with pytest.raises(ValueError, match="side must be 'source' or 'target', got 'both'"):
        classifier.resize_vocabulary(50, side="both")
    both = make_model("Seq2SeqLM", config(target_vocabulary_size=19))
    both.resize_vocabulary(40, side="source")
    both.resize_vocabulary(30)
    ids = np.array([[5, 6]])
    assert backend.to_numpy(both({"source": ids + 30, "target": ids + 20})).shape[-1] == 30
    for kind, arguments in (("Encoder", {}), ("TextClassifier", {"num_classes": 2})):
        model = make_model(kind, config(), **arguments)
        model.resize_vocabulary(40)
        assert np.isfinite(backend.to_numpy(model(ids + 30))).all()


def test_packed_rows_longer_than_the_table():
    """What counts is the longest document, not the row."""
    model = make_model("CausalLM", config(position="learned", max_length=4))
    ids = case(0).ids(1)
    packed = {"ids": ids, "segments": np.array([[1] * 4 + [2] * 4])}
    assert tuple(model(packed).shape) == (1, 8, 23)
    padded = np.concatenate([np.zeros((1, 6), "int32"), ids[:, :3]], 1)
    assert tuple(model(padded).shape) == (1, 9, 23)
    model.compile()
    for inputs in (packed, padded):  # and so it is inside of a compiled step
        labels = np.ones_like(inputs["ids"] if isinstance(inputs, dict) else inputs)
        assert np.isfinite(model.fit(inputs, labels, verbose=0).history["loss"][0])
    with pytest.raises(ValueError, match="max_length=4 with learned positions, got length 8"):
        model.fit(ids, ids, verbose=0)


def test_positions_of_packed_rows():
    real = np.array([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1]], bool)
    segments = np.array([[1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 2]], "int32")
    to_tensor = keras.ops.convert_to_tensor
    found = backend.to_numpy(masks.count(to_tensor(real), to_tensor(segments)))
    assert (found == reference.positions_of(real, segments))[real].all()


def test_names_and_summary(capsys):
    model = kformer.CausalLM(config())
    paths = [v.path for v in model.weights]
    assert "decoder/block_0/self_attention/query/kernel" in paths
    assert len(set(paths)) == len(paths)
    model.summary()
    printed = capsys.readouterr().out
    assert "block_0" in printed and f"{model.count_params():,}" in printed


def test_class_names_are_kept(tmp_path):
    model = kformer.TextClassifier(config(), 2, class_names=["ham", "spam"])
    model.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").class_names == ["ham", "spam"]
    with pytest.raises(ValueError, match="3 names for num_classes=2"):
        kformer.TokenClassifier(config(), 2, class_names=["a", "b", "c"])
    with pytest.raises(ValueError, match="num_classes must be.*got 1"):
        kformer.TextClassifier(config(), 1)


def test_pooler():
    encoder = make_model("Encoder", config(pooler=True))
    ids = case(0).ids()
    _, pooled = run(encoder, ids, return_pooled=True)
    padded = np.pad(ids, ((0, 0), (3, 0)))
    close(run(encoder, padded, return_pooled=True)[1], pooled, 1e-5)
    assert pooled.shape == (3, 16) and np.abs(pooled).max() <= 1.0
    assert len(run(encoder, ids, return_pooled=True, return_hidden=True)) == 3
    with pytest.raises(ValueError, match="pooler=False"):
        kformer.Encoder(config())(ids, return_pooled=True)


def test_arguments_of_models():
    with pytest.raises(ValueError, match="remat must be None or 'block', got 'all'"):
        kformer.CausalLM(config(), remat="all")
    with pytest.raises(ValueError, match="config must be a kformer.Config, got int"):
        kformer.CausalLM(3)
    with pytest.raises(ValueError, match="pooling must be one of mean.*got 'max'"):
        kformer.TextClassifier(config(), 2, pooling="max")
    with pytest.raises(ValueError, match="Encoder has no head"):
        kformer.Encoder(config()).compile()
