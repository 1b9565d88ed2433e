"""A sampled grid of attention settings: values and all gradients against the float64 reference.

Odd sizes, head groups, windows (in blocks too), rotary turns, norms, masks in all combinations,
three precisions. In float32 the error is bounded; in low precision it may be twice (gradients:
three times) that of a simple implementation in the same precision (GUARANTEES, section 6).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import reference
from keras import ops
from reference_gradients import multi_head_gradients
from support import directional, randomize, weights_of

from kformer import backend
from kformer.layers import MultiHeadAttention

PARTS = 8  # of the grid, so that the workers of a test run share it


def draw(random):
    """One setting of the grid."""
    choice = lambda *options: options[random.integers(len(options))]  # noqa: E731
    groups, share = int(random.integers(1, 4)), int(random.integers(1, 4))
    cross, width = choice(False, False, True), int(random.integers(1, 9))
    dtype, length = choice("float32", "float32", "bfloat16", "float16"), choice(1, 2, 5, 7, 11)
    length = choice(*[length] * 15, 130)  # so long that a window is computed in blocks
    many = -(-600 // length)  # the rule for low precision compares largest errors: of many numbers
    rotary = choice(None, None, dict(base=50.0, layout=choice("half", "interleaved")))
    if rotary:
        width = 2 * (width // 2) + 2
        rotary["rotary_dim"] = choice(2, width)
    return dict(
        batch=choice(1, 2, 3) if dtype == "float32" else many,
        length=length,
        keys=choice(1, 3, 6, 13) if cross else None,
        hidden=choice(4, 7, 12),
        layer=dict(
            num_heads=groups * share,
            num_key_value_heads=groups,
            head_dim=width,
            causal=choice(True, False) and not cross,
            window=None if cross else choice(None, 1, 2, 4),
            rotary=rotary,
            qk_norm=choice(False, False, True),
            softcap=choice(None, None, 3.0),
            sinks=choice(False, False, True),
            use_bias=choice(True, False),
            epsilon=1e-3,
        ),
        padding=choice(None, "left", "right", "all"),
        attention_mask=choice(None, 2, 3, 4),
        bias=choice(False, False, True),
        dtype=dtype,
        seed=int(random.integers(1 << 30)),
    )


def padded_rows(random, batch, length, kind):
    real = np.ones((batch, length), bool)
    for row in real:
        cut = int(random.integers(0, length))
        if kind == "right":
            row[length - cut :] = False
        if kind == "left":
            row[:cut] = False
    if kind == "all":
        real[0] = False
    return real


class Trial:
    """A layer and numbers for it, drawn by a setting."""

    def __init__(self, setting):
        random = np.random.default_rng(setting["seed"])
        batch, length, hidden = setting["batch"], setting["length"], setting["hidden"]
        self.dtype, arguments = setting["dtype"], setting["layer"]
        self.layer = MultiHeadAttention(hidden, dtype=self.dtype, name="it", **arguments)
        self.layer.build((batch, length, hidden))
        randomize(self.layer, setting["seed"], scale=0.5)
        self.own = setting["keys"] is None
        keys, heads = length if self.own else setting["keys"], arguments["num_heads"]

        def numbers(*shape):
            return random.normal(size=shape).astype(self.dtype)

        self.x = numbers(batch, length, hidden)
        self.context = None if self.own else numbers(batch, keys, hidden)
        self.real = padded_rows(random, batch, keys, setting["padding"])
        self.bias = self.mask = None
        if setting["attention_mask"]:
            shape = {2: (length, keys), 3: (batch, length, keys), 4: (batch, heads, length, keys)}
            self.mask = random.random(shape[setting["attention_mask"]]) < 0.7
        if setting["bias"]:
            self.bias = numbers(batch, heads, length, keys)
        self.direction = random.normal(size=(batch, length, hidden)).astype("float32")
        rule = dict(causal=arguments["causal"], window=arguments["window"])
        visible = reference.may_see(np.ones((batch, length), bool), self.real, **rule)
        if self.mask is not None:
            m = self.mask
            visible = visible & (m if m.ndim == 4 else m[:, None] if m.ndim == 3 else m[None, None])
        self.visible = np.broadcast_to(visible, (batch, heads, length, keys))
        self.key_positions = reference.positions_of(self.real)
        in_order = np.tile(np.arange(length), (batch, 1))
        self.positions = self.key_positions if self.own else in_order

    def of_layer(self):
        masks = {"mask" if self.own else "context_mask": ops.convert_to_tensor(self.real)}
        if self.mask is not None:
            masks["attention_mask"] = ops.convert_to_tensor(self.mask)

        def output(layer, x, context, bias):
            return layer(x, context=context, bias=bias, training=False, **masks)

        return self.gradients(output)

    def of_simple(self):
        """A simple implementation: how wrong is it in this precision?"""
        visible = ops.convert_to_tensor(self.visible)
        real = ops.convert_to_tensor(self.real)[..., None]

        def output(layer, x, context, bias):
            x = ops.where(real, x, ops.zeros_like(x)) if self.own else x
            context = x if self.own else ops.where(real, context, ops.zeros_like(context))
            return simple(layer, x, context, visible, bias, self.positions, self.key_positions)

        return self.gradients(output)

    def gradients(self, output):
        """{"values", "weights", "x", "context"}: arrays in float64.

        The gradient of Σ output · direction by the direction is the output itself.
        """
        inputs = [self.x, *([] if self.own else [self.context])]
        bias = None if self.bias is None else ops.convert_to_tensor(self.bias)

        def loss(layer, x, *rest):
            context = None if self.own else rest[0]
            return ops.sum(ops.cast(output(layer, x, context, bias), "float32") * rest[-1])

        _, by_weight, by_input = backend.gradients(loss, self.layer, *inputs, self.direction)
        variables = [v.path for v in self.layer.trainable_variables]
        found = dict(zip(variables, by_weight, strict=True))
        found |= dict(zip(("x",) if self.own else ("x", "context"), by_input, strict=False))
        return {"values": by_input[-1], **found}

    def truth(self, w=None):
        """The same by the reference, of the layer's weights and inputs, or of those in w."""
        layer, rotary = self.layer, self.layer.rotary
        c = SimpleNamespace(
            head_width=layer.head_dim,
            num_heads=layer.num_heads,
            key_value_heads=layer.num_key_value_heads,
            qk_norm=layer.query_norm is not None,
            norm_epsilon=1e-3,
            position="none" if rotary is None else "rotary",
            rotary_dim=rotary and rotary.rotary_dim,
            rotary_base=rotary and rotary.base,
            position_layout=rotary and rotary.layout,
            attention_scale=None,
            logit_softcap=layer.softcap,
        )
        w = weights_of(layer) if w is None else w
        x = w.get("x", self.x).astype("float64")
        context = np.where(self.real[..., None], (x if self.own else self.context), 0.0)
        context = context.astype("float64")
        x = context if self.own else x
        bias = None if self.bias is None else self.bias.astype("float64")
        given = x, context, c, w, "it", self.visible, self.positions, bias
        values, _ = reference.multi_head(*given, self.key_positions)
        found = multi_head_gradients(*given, self.key_positions, self.direction.astype("float64"))
        found["context"] *= self.real[..., None]
        if self.own:
            found["x"] = found["x"] * self.real[..., None] + found.pop("context")
        return {"values": values, **found}


def simple(layer, x, context, visible, bias, positions, key_positions):
    """The formulas of attention one after the other, each in the precision of its inputs."""
    heads, width, dtype = layer.num_heads, layer.head_dim, x.dtype

    def number(value):
        return ops.cast(value, dtype)

    def project(a, dense, count, norm=None, at=None):
        out = ops.matmul(a, dense.kernel)
        out = out if dense.bias is None else out + dense.bias
        out = ops.reshape(out, (*a.shape[:2], count, width))
        if norm is not None:
            mean = ops.mean(out * out, axis=-1, keepdims=True)
            out = out / ops.sqrt(mean + number(1e-3)) * ops.convert_to_tensor(norm.scale)
        if at is not None and layer.rotary is not None:
            out = turn(out, at)
        return ops.repeat(ops.transpose(out, (0, 2, 1, 3)), heads // count, axis=1)

    def turn(a, at):
        turning, half = layer.rotary.rotary_dim, layer.rotary.rotary_dim // 2
        phases = at[:, :, None, None] * 50.0 ** (-2.0 * np.arange(half) / turning)
        cosine, sine = (number(f(phases).astype("float32")) for f in (np.cos, np.sin))
        pairs = (slice(0, half), slice(half, turning))
        if layer.rotary.layout == "interleaved":
            pairs = (slice(0, turning, 2), slice(1, turning, 2))
        p, q = a[..., pairs[0]], a[..., pairs[1]]
        both = p * cosine - q * sine, q * cosine + p * sine
        if layer.rotary.layout == "half":
            turned = ops.concatenate(both, axis=-1)
        else:
            turned = ops.reshape(ops.stack(both, axis=-1), (*a.shape[:3], turning))
        return ops.concatenate([turned, a[..., turning:]], axis=-1)

    query = project(x, layer.query, heads, layer.query_norm, positions) * number(layer.scale)
    count = layer.num_key_value_heads
    key = project(context, layer.key, count, layer.key_norm, key_positions)
    value = project(context, layer.value, count)
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2)))
    if layer.softcap is not None:
        scores = number(layer.softcap) * ops.tanh(scores / number(layer.softcap))
    scores = scores if bias is None else scores + bias
    sink = None if layer.sink is None else ops.convert_to_tensor(layer.sink)[None, :, None, None]
    top = ops.max(ops.where(visible, scores, number(-1e4)), axis=-1, keepdims=True)
    top = ops.stop_gradient(top if sink is None else ops.maximum(top, sink))
    raised = ops.exp(ops.where(visible, scores - top, number(-1e4)))
    total = ops.sum(raised, axis=-1, keepdims=True)
    total = total if sink is None else total + ops.exp(sink - top)
    weights = raised / ops.where(total > 0, total, number(1))
    out = ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3))
    out = ops.matmul(
        ops.reshape(out, (*x.shape[:2], heads * width)), layer.output_projection.kernel
    )
    bias = layer.output_projection.bias
    return out if bias is None else out + bias


def worst(found, truth, names):
    """Largest error over some arrays, and the largest true number in them."""
    errors = [np.abs(found[n].astype("float64") - truth[n]).max(initial=0.0) for n in names]
    return max(errors), max(np.abs(truth[n]).max(initial=0.0) for n in names)


def check(setting, where):
    trial = Trial(setting)
    found, truth = trial.of_layer(), trial.truth()
    assert found.keys() == truth.keys()
    naive = None if trial.dtype == "float32" else trial.of_simple()
    inputs = {"values", "x", "context"}
    groups = [[n] for n in inputs & truth.keys()] + [[n for n in truth if n not in inputs]]
    for names in groups:
        error, size = worst(found, truth, names)
        if naive is None:
            allowed = 1e-5 * (1.0 + size)
        else:
            allowed = (2 if names == ["values"] else 3) * worst(naive, truth, names)[0] + 1e-5
        message = f"{where}, {'+'.join(names)}: {error:.3g} > {allowed:.3g}, {setting}"
        assert error <= allowed, message


@pytest.mark.parametrize("part", range(PARTS))
def test_grid(request, part):
    """200 settings, with --deep 2,000; the seed stands at the end of the run."""
    seed = request.config.getoption("--draw")
    number = 2000 if request.config.getoption("--deep") else 200
    random = np.random.default_rng([seed, part])
    for index in range(number // PARTS):
        check(draw(random), f"--draw {seed}, part {part}, setting {index}")


def test_the_reference_gradients():
    """Against differences of the reference itself."""
    random = np.random.default_rng(0)
    for _ in range(10):
        trial = Trial({**draw(random), "dtype": "float32", "batch": 2})
        numbers = {**weights_of(trial.layer), "x": trial.x.astype("float64")}
        gradients = {path: value for path, value in trial.truth().items() if path in numbers}
        value = lambda w, trial=trial: (trial.truth(w)["values"] * trial.direction).sum()  # noqa: E731
        directional(value, numbers, gradients, tolerance=1e-7)
