"""Mixture of experts: routing, capacity, balance."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from support import close, config, exact, make_model, randomize, run, weights_of

from kformer import backend
from kformer.layers import MixtureOfExperts


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make(**changes):
    arguments = dict(hidden_dim=8, intermediate_dim=6, num_experts=4, experts_per_token=2)
    layer = MixtureOfExperts(**{**arguments, **changes})
    layer.build((None, None, 8))
    randomize(layer)
    return layer


def truth(layer, x, real):
    """Each token through its experts, one by one."""
    c = config(
        num_experts=layer.num_experts, experts_per_token=layer.experts_per_token,
        activation=layer.activation, gated=layer.gated,
    )  # fmt: skip
    w = {"m/" + path.split("/", 1)[1]: value for path, value in weights_of(layer).items()}
    return reference.feed_forward(x.astype("float64"), c, w, "m", real)


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_nothing_dropped_is_the_dense_sum(chosen, gated):
    """Every path gives Σ gate · expert where nothing is dropped, padding left out."""
    x = numbers(3, 5, 8)
    real = np.arange(5)[None] < np.array([[5], [3], [0]])
    for capacity, training in ((None, False), (None, True), (4.0, True), (0.5, False)):
        layer = make(experts_per_token=chosen, gated=gated, capacity=capacity)
        out = layer(x, real=ops.convert_to_tensor(real), training=training)
        close(backend.to_numpy(out), truth(layer, x, real), 1e-5, f"{capacity} {training}")


def test_capacity_drops_in_order():
    """All tokens want one expert; it takes the first ones. Shapes stay fixed."""
    layer = make(experts_per_token=1, capacity=1.0)  # 12 tokens, 4 experts: 3 each
    layer.router.kernel.assign(np.eye(8)[:, :4] * 10)
    x = np.zeros((2, 6, 8), "float32")
    x[..., 0], x[..., 5] = 1.0, numbers(2, 6)
    out = backend.to_numpy(layer(x, training=True)).reshape(12, 8)
    full = truth(layer, x, np.ones((2, 6), bool)).reshape(12, 8)
    close(out[:3], full[:3], 1e-5)
    assert (out[3:] == 0).all()
    dropped, busiest = backend.to_numpy(layer.statistics)
    assert dropped == pytest.approx(9 / 12) and busiest == pytest.approx(4.0)


def test_gradients_with_capacity():
    """The dispatch is differentiable: the same gradients as the dense sum if nothing drops."""
    x = numbers(2, 5, 8)
    found = []
    for capacity in (None, 4.0):
        layer = make(capacity=capacity, balance=0.0, z=0.0)
        loss = lambda m, x: ops.sum(ops.square(m(x, training=True)))  # noqa: E731
        _, by_weight, by_input = backend.gradients(loss, layer, x)
        found.append([*by_weight, *by_input])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-5)


def test_losses_leave_out_padding():
    x = numbers(2, 6, 8)
    real = np.ones((2, 6), bool)
    real[:, 4:] = False
    layer, junk = make(balance=0.3, z=0.2), x.copy()
    junk[:, 4:] = 50.0
    values = []
    for given, mask in ((x, real), (junk, real), (x[:, :4], real[:, :4])):
        layer = make(balance=0.3, z=0.2)
        layer(given, real=ops.convert_to_tensor(mask), training=True)
        values.append([float(backend.to_numpy(loss)) for loss in layer.losses])
    close(values[1], values[0], 1e-6)
    close(values[2], values[0], 1e-6)
    w = weights_of(layer)
    logits = x[:, :4].reshape(-1, 8).astype("float64") @ next(
        v for p, v in w.items() if "router" in p
    )
    raised = np.exp(logits)
    chances = raised / raised.sum(-1, keepdims=True)
    best = np.argsort(-chances, axis=-1)[:, :2]
    load = np.array([(best == e).sum() for e in range(4)]) / best.size
    assert values[0][0] == pytest.approx(0.3 * 4 * (load * chances.mean(0)).sum(), rel=1e-5)
    assert values[0][1] == pytest.approx(0.2 * (np.log(raised.sum(-1)) ** 2).mean(), rel=1e-5)
    layer = make(balance=0.3, z=0.2)
    layer(x, training=False)
    assert layer.losses == []


def test_bias_moves_towards_even_load():
    layer = make(balance_bias=True, balance_rate=0.05, experts_per_token=1, z=0.0)
    layer.router.kernel.assign(np.pad(np.eye(4), ((0, 4), (0, 0))) * 0.1)
    x = np.abs(numbers(4, 8, 8))
    x[..., 0] += 2.0  # everybody's favourite is expert 0
    loads = []
    for _ in range(40):
        layer(x, training=True)
        loads.append(float(backend.to_numpy(layer.statistics)[1]))
    assert loads[0] > 3.0 and min(loads[-5:]) < 2.0
    assert layer.losses == []
    before = backend.to_numpy(layer.choice_bias).copy()
    layer(x, training=False)
    exact(backend.to_numpy(layer.choice_bias), before)


@pytest.mark.parametrize("remat", [None, "block"])
def test_figures_in_the_logs(remat):
    model = make_model("CausalLM", config(num_experts=4, expert_capacity=1.0), remat=remat)
    model.compile()
    ids = np.random.default_rng(0).integers(1, 23, (8, 9))
    history = model.fit(ids[:, :-1], ids[:, 1:], verbose=0).history
    assert 0.0 < float(history["experts_dropped"][0]) < 1.0
    assert 1.0 <= float(history["experts_busiest"][0]) <= 4.0
    plain = make_model("CausalLM", config())
    plain.compile()
    assert "experts_dropped" not in plain.fit(ids[:, :-1], ids[:, 1:], verbose=0).history
    assert model.count_params() == model.config.parameter_count("causal_lm")


def test_auxiliary_losses_reach_fit():
    ids = np.random.default_rng(0).integers(1, 23, (8, 9))
    losses = []
    for weight in (0.0, 1.0):
        model = make_model("CausalLM", config(num_experts=4, expert_balance=weight, expert_z=0.0))
        model.compile(keras.optimizers.SGD(0.0))
        losses.append(float(model.fit(ids[:, :-1], ids[:, 1:], verbose=0).history["loss"][0]))
    assert losses[1] - losses[0] > 1.5  # two layers, each at least 1 where load is even


def test_experts_are_not_affected_by_neighbours():
    """At inference nothing is dropped, whatever else is in the batch (P13)."""
    model = make_model("CausalLM", config(num_experts=4, expert_capacity=0.25))
    ids = np.random.default_rng(0).integers(1, 23, (4, 8)).astype("int32")
    close(run(model, ids[:1]), run(model, ids)[:1], 1e-5)
