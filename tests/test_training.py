"""Losses, metrics, schedules, dropout, accumulation, precision, remat: what fit does."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from support import BACKEND, CASES, Case, case, case_ids, close, config, exact, make_model, run

import kformer
from kformer import backend

IDS = np.random.default_rng(0).integers(1, 23, (8, 9)).astype("int32")
X, Y = IDS[:, :-1], IDS[:, 1:]


WITH_HEAD = [n for n, c in enumerate(CASES) if c[0] not in ("Encoder", "Decoder", "Seq2Seq")]
KINDS = {CASES[n][0]: n for n in reversed(WITH_HEAD)}  # the first case of each of them
every_head = pytest.mark.parametrize("number", KINDS.values(), ids=case_ids)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# Losses and metrics


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_p26_loss_by_hand(smoothing):
    logits, labels = numbers(3, 5, 7) * 3, np.random.default_rng(1).integers(0, 7, (3, 5))
    labels[0, 3:], labels[1, 0], labels[2, 2] = 4, -1, -100
    loss = kformer.losses.TokenCrossentropy(smoothing, ignore_id=4)
    counts = (labels >= 0) & (labels != 4)
    truth = reference.crossentropy(logits.astype("float64"), labels, counts, smoothing)
    assert float(loss(labels, logits)) == pytest.approx(truth, rel=1e-6)
    weights = np.random.default_rng(2).random((3, 5)).astype("float32")

    def one(b, t):
        return reference.crossentropy(
            logits[b : b + 1, t : t + 1].astype("float64"),
            labels[b : b + 1, t : t + 1],
            np.ones((1, 1), bool),
            smoothing,
        )  # noqa: E731, E501

    pairs = list(zip(*np.nonzero(counts), strict=True))
    weighted = sum(weights[p] * one(*p) for p in pairs) / sum(weights[p] for p in pairs)
    assert float(loss(labels, logits, weights)) == pytest.approx(weighted, rel=1e-5)
    by_row = float(loss(labels, logits, np.array([1.0, 0.0, 0.0], "float32")))
    alone = float(loss(labels[:1], logits[:1]))
    assert by_row == pytest.approx(alone, rel=1e-6)


def test_p26_gradient_oracle():
    """Logits at t move for the label at t, and for no other; ignored ones move nothing."""
    logits, labels = numbers(1, 4, 5), np.array([[2, 0, 3, -1]])

    class Logits(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight((1, 4, 5), name="table")

        def call(self, x):
            return self.table + x

    layer = Logits()
    layer(logits)
    layer.table.assign(np.zeros((1, 4, 5)))
    loss = kformer.losses.TokenCrossentropy()
    _, (gradient,), _ = backend.gradients(lambda m, x: loss(labels, m(x)), layer, logits)
    raised = np.exp(logits)
    expected = raised / raised.sum(-1, keepdims=True)
    for t, label in enumerate(labels[0, :3]):
        expected[0, t, label] -= 1.0
    expected[0, 3] = 0.0
    close(gradient, expected / 3.0, 1e-6)
    assert np.abs(gradient[0, :3]).max() > 0.1  # the oracle is not vacuous


def test_b31_labels():
    loss = kformer.losses.TokenCrossentropy(ignore_id=0)
    logits = numbers(2, 3, 5)
    assert float(loss(np.zeros((2, 3), int), logits)) == 0.0  # nothing counts: 0, not NaN
    assert float(loss(np.full((2, 3), -100), logits)) == 0.0
    assert np.isnan(float(loss(np.full((2, 3), 5), logits)))
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), got 1.0"):
        kformer.losses.TokenCrossentropy(label_smoothing=1.0)
    config = loss.get_config()
    assert kformer.losses.TokenCrossentropy.from_config(config).ignore_id == 0


def test_masked_nan_does_not_reach_the_loss():
    logits = numbers(1, 3, 5)
    logits[0, 2] = np.nan
    loss = kformer.losses.TokenCrossentropy()
    assert np.isfinite(float(loss(np.array([[1, 2, -1]]), logits)))


def test_metrics():
    accuracy, perplexity = kformer.metrics.TokenAccuracy(0), kformer.metrics.Perplexity(0)
    logits, labels = numbers(4, 6, 5), np.random.default_rng(1).integers(0, 5, (4, 6))
    for rows in (slice(0, 1), slice(1, 4)):  # ragged batches: summed up before dividing
        accuracy.update_state(labels[rows], logits[rows])
        perplexity.update_state(labels[rows], logits[rows])
    counts = labels != 0
    right = (logits.argmax(-1) == labels)[counts].mean()
    assert float(accuracy.result()) == pytest.approx(right, rel=1e-6)
    mean = reference.crossentropy(logits.astype("float64"), labels, counts)
    assert float(perplexity.result()) == pytest.approx(np.exp(mean), rel=1e-5)
    again = kformer.metrics.Perplexity.from_config(perplexity.get_config())
    assert again.ignore_id == 0
    perplexity.reset_state()
    assert float(perplexity.result()) == 1.0


def test_own_metrics_count_what_the_loss_counts():
    """As the contract writes it: Perplexity() among metrics, and padding changes nothing."""
    model = make_model("CausalLM", config())
    found = []
    for extra in (0, 5):
        model.compile(metrics=[kformer.metrics.Perplexity(), "sparse_categorical_accuracy"])
        x, y = (np.pad(a, ((0, 0), (0, extra))) for a in (X, Y))
        logs = model.evaluate(x, y, verbose=0, return_dict=True)
        found.append(float(logs["perplexity"]))
        assert found[-1] == pytest.approx(np.exp(float(logs["loss"])), rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_schedules():
    s = kformer.schedules
    root = s.InverseSquareRoot(2.0, 10)
    at = lambda schedule, step: float(schedule(ops.convert_to_tensor(step)))  # noqa: E731
    assert at(root, 0) == pytest.approx(0.2) and at(root, 9) == pytest.approx(2.0)
    assert at(root, 39) == pytest.approx(1.0)
    cosine = s.WarmupCosine(1.0, 10, 110, floor=0.1)
    assert at(cosine, 4) == pytest.approx(0.5)
    assert at(cosine, 60) == pytest.approx(0.55) and at(cosine, 500) == pytest.approx(0.1)
    stable = s.WarmupStableDecay(1.0, 10, 100, decay=20)
    assert at(stable, 50) == 1.0 and at(stable, 90) == pytest.approx(0.5) and at(stable, 100) == 0.0
    for schedule in (root, cosine, stable):
        again = type(schedule).from_config(schedule.get_config())
        assert at(again, 37) == at(schedule, 37)
        optimizer = keras.optimizers.SGD(schedule)
        assert keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    for call, message in (
        (lambda: s.InverseSquareRoot(0.0), "peak must be above 0, got 0.0"),
        (lambda: s.WarmupCosine(1.0, -1, 5), "warmup must not be negative, got -1"),
        (lambda: s.WarmupCosine(1.0, 5, 5), "total=5, warmup=5"),
        (lambda: s.WarmupStableDecay(1.0, 5, 10, 6), "warmup=5, decay=6, total=10"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Padding and accumulation


@pytest.mark.parametrize("number", WITH_HEAD, ids=case_ids)
def test_p27_padding_changes_no_gradient(number):
    c = case(number)
    model = make_model(c.kind, c.config, **c.arguments)
    model.compile()
    ids, source, labels = c.ids(), c.source(), c.ids(seed=2) % model.num_labels
    results = []
    for extra in (0, 4):
        x = c.wrap(c.pad(ids, right=extra), c.pad(source, right=extra))
        y = np.pad(labels, ((0, 0), (0, extra))) if c.per_token else labels[:, 0]

        def loss(model, *_, x=x, y=y):
            return model.compute_loss(x, ops.convert_to_tensor(y), model(x, training=False), None)

        results.append(backend.gradients(loss, model))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("how", ["padding_mask", "segments"])
def test_p27_padding_by_mask_counts_nothing(how):
    """Where no id is padding, labels under a mask or outside of documents are not looked at."""
    model = make_model("CausalLM", config(pad_id=None))
    model.compile()
    real = np.arange(8)[None] < np.array([[8], [5], [3], [1]] * 2)
    x = {"ids": X, how: real if how == "padding_mask" else real.astype("int32")}
    other = np.where(real, Y, Y[::-1] % 22)
    losses = [model.evaluate(x, y, verbose=0, return_dict=True)["loss"] for y in (Y, other)]
    assert (Y != other).any() and float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)


class Batches(keras.utils.PyDataset):
    """Ragged batches: the third has almost nothing but padding."""

    def __init__(self):
        super().__init__()
        x, y = X.copy(), Y.copy()
        for row, real in enumerate((8, 2, 5, 8, 1, 1, 1, 3)):
            x[row, real:], y[row, real:] = 0, 0
        self.batches = [(x[a:b], y[a:b]) for a, b in ((0, 3), (3, 4), (4, 7), (7, 8))]

    @property
    def num_batches(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def adamw():
    """With a wide epsilon: it would blow rounding noise up to whole steps where gradients are 0."""
    return keras.optimizers.AdamW(0.01, weight_decay=0.01, epsilon=1e-3)


def updated(data, accumulate, epochs=1, **kwargs):
    model = make_model("CausalLM", config())
    loss = kformer.losses.TokenCrossentropy(0.1, ignore_id=0)
    optimizer = adamw()
    model.compile(optimizer, loss, accumulate=accumulate)
    model.fit(*data, epochs=epochs, verbose=0, **kwargs)
    return [backend.to_numpy(v) for v in model.trainable_variables]


def test_p28_and_headline_13_accumulation_is_exact():
    """Four small ragged batches of unequal size move the weights exactly as one large one does."""
    batches = Batches().batches
    whole = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    expected = updated(whole, 1, batch_size=8, shuffle=False)
    for a, b in zip(updated((Batches(),), 4), expected, strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("number", WITH_HEAD, ids=case_ids)
def test_p28_of_every_model(number):
    """Arrays in batches of two, ragged, with label smoothing, against all rows in one batch."""
    c = case(number)
    ids = c.ids(8)
    for row, real in enumerate((8, 2, 5, 8, 1, 1, 1, 3)):
        ids[row, real:] = c.config.pad_id
    x, results = c.wrap(ids), []
    y = c.ids(8, seed=2) % 3 + 3 if c.config.pad_id == 2 else c.ids(8, seed=2) % 3
    y = y if c.per_token else np.arange(8) % 3
    for accumulate, size in ((1, 8), (4, 2)):
        model = make_model(c.kind, c.config, **c.arguments)
        loss = kformer.losses.TokenCrossentropy(0.1, ignore_id=model.ignored_label)
        model.compile(keras.optimizers.SGD(0.1), loss, accumulate=accumulate)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        results.append([backend.to_numpy(v) for v in model.trainable_variables])
    for a, b in zip(*results, strict=True):
        close(a, b, 1e-5)


def test_accumulation_fills_up_a_short_group():
    """Three batches in groups of two: the last update is of the third batch alone."""
    batches = Batches().batches[:3]
    data = Batches()
    data.batches = batches
    found = updated((data,), 2)
    model = make_model("CausalLM", config())
    loss = kformer.losses.TokenCrossentropy(0.1, ignore_id=0)
    model.compile(adamw(), loss)
    first = tuple(np.concatenate(parts) for parts in zip(*batches[:2], strict=True))
    model.train_on_batch(*first)
    model.train_on_batch(*batches[2])
    for a, b in zip(found, model.trainable_variables, strict=True):
        close(a, backend.to_numpy(b), 1e-5)


def test_accumulation_errors():
    model = kformer.CausalLM(config())
    model.compile(accumulate=3)
    with pytest.raises(ValueError, match="train_on_batch needs accumulate=1, got 3"):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="accumulate must be a whole number.*got 0"):
        model.compile(accumulate=0)
    with pytest.raises(ValueError, match="accumulate needs a kformer TokenCrossentropy.*got mse"):
        model.compile(loss="mse", accumulate=2)
    with pytest.raises(ValueError, match="must be left out beside accumulate, got 3"):
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=3), accumulate=2)
    model.compile(accumulate=2)
    with pytest.raises(ValueError, match="accumulate needs arrays or a PyDataset, got Odd"):

        class Odd:
            def __iter__(self):
                return iter(())

        model.fit(Odd())
    model.fit(X, Y, batch_size=4, epochs=2, sample_weight=np.ones(8), verbose=0)
    assert np.isfinite(float(model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]))


# Dropout


@pytest.mark.parametrize("kind", ["CausalLM", "Seq2SeqLM", "TextClassifier"])
def test_dropout_is_on_in_fit_and_off_in_evaluate(kind):
    """At learning rate 0 the loss of fit differs from evaluate's only through dropout."""
    arguments = {"num_classes": 3} if kind == "TextClassifier" else {}
    x, y = X, Y
    if kind == "Seq2SeqLM":
        x = {"source": X, "target": X}
    if kind == "TextClassifier":
        y = np.arange(8) % 3
    for rate in (0.0, 0.4):
        model = make_model(kind, config(dropout=rate), **arguments)
        model.compile(keras.optimizers.SGD(0.0))
        fitted = [float(v) for v in model.fit(x, y, epochs=2, verbose=0).history["loss"]]
        evaluated = [model.evaluate(x, y, verbose=0, return_dict=True)["loss"] for _ in range(2)]
        exact(*[np.asarray(float(v)) for v in evaluated])
        if rate:
            assert abs(fitted[0] - evaluated[0]) > 1e-3 and fitted[0] != fitted[1]
        else:
            close(fitted, [evaluated[0]] * 2, 1e-5)


def test_p24_dropout_rate_and_seeds():
    """The rate is right, the mask differs each step, and the same seed gives the same masks."""

    def masks():
        keras.utils.set_random_seed(7)
        layer = kformer.layers.AddNorm(placement="pre", dropout=0.3)
        x, y = np.zeros((20, 50, 100), "float32"), np.ones((20, 50, 100), "float32")
        return [backend.to_numpy(layer(x, y, training=True)) for _ in range(2)]

    first, second = masks()
    assert np.mean(first == 0) == pytest.approx(0.3, abs=0.01)
    close(first[first != 0], np.full((first != 0).sum(), 1 / 0.7), 1e-6)
    assert (first != second).mean() > 0.3
    again = masks()
    exact(again[0], first)
    exact(again[1], second)


def test_p24_dropout_of_attention():
    """With even weights and one-hot values, the output is the dropped weights themselves."""
    layer = kformer.layers.MultiHeadAttention(100, 1, dropout=0.3, use_bias=False)
    layer.build((None, None, 100))
    zero, one = np.zeros((100, 100)), np.eye(100)
    layer.set_weights([zero, zero, one, one, *layer.get_weights()[4:]])
    x = np.tile(np.eye(100, dtype="float32"), (8, 1, 1))
    first, second = (backend.to_numpy(layer(x, training=True)) for _ in range(2))
    assert np.mean(first == 0) == pytest.approx(0.3, abs=0.01)
    close(first[first != 0], np.full((first != 0).sum(), 0.01 / 0.7), 1e-6)
    assert (first != second).mean() > 0.3
    close(backend.to_numpy(layer(x, training=False)), np.full((8, 100, 100), 0.01), 1e-6)


def test_headline_8_randomness_is_keras_state():
    """Dropout advances Keras' seed state on torch too, so a checkpoint can hold it."""
    model = make_model("CausalLM", config(dropout=0.3))
    states = [v for v in model.non_trainable_variables if "seed" in v.path]
    before = [backend.to_numpy(v).copy() for v in states]
    first = backend.to_numpy(model(X, training=True))
    after = [backend.to_numpy(v).copy() for v in states]
    assert states and any((a != b).any() for a, b in zip(before, after, strict=True))
    for variable, value in zip(states, before, strict=True):
        variable.assign(value)
    exact(backend.to_numpy(model(X, training=True)), first)


# Precision, rematerialisation, freezing


@every_head
def test_p29_mixed_precision_trains(number):
    """Overfitting one batch ends within 5 % of float32's loss; variables stay float32."""
    kind, _, arguments = CASES[number]
    x = {"source": X, "target": X} if kind == "Seq2SeqLM" else X
    arguments = {**arguments, "num_classes": 23} if kind == "TokenClassifier" else arguments
    y = np.arange(8) % 3 if kind == "TextClassifier" else Y

    def train(dtype):
        model = make_model(kind, config(num_layers=1), dtype=dtype, **arguments)
        model.compile(keras.optimizers.Adam(0.01))
        history = model.fit(x, y, epochs=25, verbose=0).history["loss"]
        assert all(v.dtype == "float32" for v in model.trainable_variables)
        return float(history[0]), float(history[-1]), model

    first, plain, _ = train("float32")
    for policy in ("mixed_bfloat16", "mixed_float16"):
        _, mixed, model = train(policy)
        assert plain < 0.7 * first
        assert abs(mixed - plain) <= 0.05 * plain + 0.001
        assert keras.backend.standardize_dtype(model(x).dtype) == policy.removeprefix("mixed_")


def test_p29_overflow_is_skipped():
    """A step whose scaled gradients are not finite changes no weight and halves the scale."""
    model = kformer.CausalLM(config(num_layers=1), dtype="mixed_float16")
    model.compile(keras.optimizers.SGD(0.1))
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    model.fit(X, Y, verbose=0)
    optimizer.dynamic_scale.assign(2.0**60)
    before = [backend.to_numpy(v).copy() for v in model.trainable_variables]
    model.fit(X, Y, verbose=0)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        exact(backend.to_numpy(variable), value)
    assert float(backend.to_numpy(optimizer.dynamic_scale)) == 2.0**59
    optimizer.dynamic_scale.assign(2.0**10)
    model.fit(X, Y, verbose=0)
    assert any(
        (backend.to_numpy(v) != b).any()
        for v, b in zip(model.trainable_variables, before, strict=True)
    )


@pytest.mark.parametrize("number", range(len(CASES)), ids=case_ids)
def test_p30_remat(number):
    """Recomputed blocks: the same loss and gradients, dropout on."""
    kind, name, arguments = CASES[number]
    results = []
    for remat in (None, "block"):
        keras.utils.set_random_seed(3)
        c = Case(kind, name, {**arguments, "remat": remat})
        c.config = c.config.replace(dropout=0.2, attention_dropout=0.1)
        model = make_model(kind, c.config, **c.arguments)
        inputs = c.wrap(c.ids())
        direction = numbers(*run(model, inputs).shape)

        def loss(model, *_, inputs=inputs, direction=direction):
            out = model(inputs, training=True)
            return ops.sum(out * ops.convert_to_tensor(direction))

        steps = 1 if BACKEND == "jax" else 2  # there gradients() is pure: the same masks again
        results.append([backend.gradients(loss, model)[:2] for _ in range(steps)])
    for (value, plain), (other, recomputed) in zip(*results, strict=True):
        # The value is a sum of many numbers, and compiled anew it is rounded in another order.
        assert other == pytest.approx(value, rel=1e-6, abs=1e-6 * float(np.abs(direction).sum()))
        size = 1.0 + max(np.abs(a).max() for a in plain)
        for a, b in zip(plain, recomputed, strict=True):
            close(b / size, a / size, 1e-6)
    if BACKEND != "jax":
        assert results[0][0][0] != results[0][1][0]


def test_p30_remat_keeps_the_router_exact():
    """In mixed precision routers stay float32, recomputed or not: here the two experts differ in
    what bfloat16 would round away, and which one is chosen decides the output."""
    found = []
    for remat in (None, "block"):
        c = config(num_experts=2, experts_per_token=1, num_layers=1)
        model = make_model("CausalLM", c, remat=remat, dtype="mixed_bfloat16")
        router = model.experts()[0].router.kernel
        kernel = backend.to_numpy(router).copy()
        kernel[:, 1] = kernel[:, 0] * 1.001
        router.assign(kernel)
        found.append(run(model, X, training=True))
    close(found[1], found[0], 1e-3)


@pytest.mark.parametrize("experts", [0, 4])
def test_p30_remat_in_fit(experts):
    """Several steps with dropout: the same weights at the end, and other masks every step."""
    weights, losses = [], []
    for remat in (None, "block"):
        keras.utils.set_random_seed(3)
        c = config(dropout=0.2, num_experts=experts, expert_capacity=1.0 if experts else None)
        model = make_model("CausalLM", c, remat=remat)
        keras.utils.set_random_seed(5)
        model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(X, Y, epochs=3, verbose=0, shuffle=False).history
        losses.append([float(v) for v in history["loss"]])
        weights.append([backend.to_numpy(v) for v in model.trainable_variables])
    close(losses[0], losses[1], 1e-5)
    for a, b in zip(*weights, strict=True):
        close(a, b, 1e-5)


@every_head
def test_p36_frozen_weights_stay(number):
    c = case(number)
    model = make_model(c.kind, c.config, **c.arguments)
    stack = model.backbone.decoder if c.is_seq2seq else model.backbone
    frozen, free = stack.blocks[0], stack.blocks[1].feed_forward.up.kernel
    frozen.trainable = False
    model.compile()
    before, moving = ([backend.to_numpy(v).copy() for v in w] for w in (frozen.weights, [free]))
    y = c.ids(seed=2) % model.num_labels if c.per_token else np.arange(3)
    model.fit(c.wrap(c.ids()), y, epochs=2, verbose=0)
    for variable, value in zip(frozen.weights, before, strict=True):
        exact(backend.to_numpy(variable), value)
    assert (backend.to_numpy(free) != moving[0]).any()


# compile() and fit


@pytest.mark.parametrize("kind", ["Encoder", "Decoder", "Seq2Seq"])
def test_headless_models_need_a_loss(kind):
    with pytest.raises(ValueError, match=f"{kind} has no head"):
        getattr(kformer, kind)(config()).compile()


@every_head
def test_compile_without_arguments(number):
    """Every model with a head trains after compile(); its loss is the reference's."""
    c = case(number)
    model = make_model(c.kind, c.config, **c.arguments)
    model.compile()
    ids = c.ids()
    ids[0, 5:] = c.config.pad_id
    inputs = c.wrap(ids)
    random = np.random.default_rng(3)
    classes = model.num_labels
    labels = random.integers(0, classes, ids.shape if c.per_token else len(ids))
    weights = {v.path: backend.to_numpy(v).astype("float64") for v in model.weights}
    truth = c.reference(inputs, weights)
    counts = ids != c.config.pad_id if c.per_token else np.ones(len(ids), bool)
    if c.kind.endswith("LM"):
        counts &= labels != c.config.pad_id
    expected = reference.crossentropy(truth, labels, counts)
    logs = model.evaluate(inputs, labels, verbose=0, return_dict=True)
    assert float(logs["loss"]) == pytest.approx(expected, rel=1e-4)
    right = (truth.argmax(-1) == labels)[counts].mean()
    assert float(logs["accuracy"]) == pytest.approx(right, abs=1e-6)
    if c.kind.endswith("LM"):
        assert float(logs["perplexity"]) == pytest.approx(np.exp(expected), rel=1e-3)
    before = float(logs["loss"])
    model.fit(inputs, labels, epochs=8, verbose=0)
    assert float(model.evaluate(inputs, labels, verbose=0, return_dict=True)["loss"]) < before


def test_arguments_of_fit_by_position():
    """As Keras has them: x, y, batch_size, epochs, verbose."""
    model = make_model("CausalLM", config())
    model.compile()
    assert len(model.fit(X, Y, 4, 2, 0).history["loss"]) == 2
    assert len(model.evaluate(X, Y, 4, 0)) == 3
    assert model.predict(X, 4, 0).shape == (8, 8, 23)
