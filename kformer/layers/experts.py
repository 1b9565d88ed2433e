"""Mixture of experts. Letters: B batch, T tokens, D width, E experts, C slots each, M = B·T."""

import math

import keras
from keras import layers, ops

from kformer.layers.feedforward import Project, activate
from kformer.serialization import Composite, register


@register
class MixtureOfExperts(Composite, layers.Layer):
    """Many feed-forward networks, of which a router picks k for each token.

        p = softmax(W_r · h)                    in float32
        out(h) = Σ over the k largest p_e:  g_e · FFN_e(h),        g = p / Σ of the chosen p

    While training with a `capacity`, an expert takes at most C = ⌈capacity · M·k/E⌉ of the M
    tokens, in their order, and drops the rest (their sum lacks that expert), which keeps all
    shapes fixed. Otherwise nothing is dropped: rows do not depend on their neighbours.

    Two auxiliary losses, of real tokens only: E · Σ_e f_e · P_e (f_e the share of choices that
    went to expert e, P_e its mean probability; 1 when all is even), and the mean square of
    log Σ exp(logits). With `balance_bias` a bias on the choice, not on the output, moves
    towards even load after every step instead.

    Args:
        hidden_dim, intermediate_dim, activation, gated: as in `FeedForward`, of each expert.
        num_experts: E.
        experts_per_token: k.
        capacity: None, or how many times its fair share an expert takes in training.
        balance, z: weights of the two losses.
        balance_bias: use the bias instead of the balance loss.
        balance_rate: step of the bias.
    Call: (B, T, D) → (B, T, D); real: (B, T), False = padding, which is not routed.
    """

    def __init__(
        self,
        hidden_dim,
        intermediate_dim,
        num_experts,
        experts_per_token=2,
        activation="silu",
        gated=True,
        capacity=None,
        balance=0.01,
        z=0.001,
        balance_bias=False,
        balance_rate=0.001,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not 1 <= experts_per_token <= num_experts:
            rule = "experts_per_token must be from 1 to num_experts"
            got = f"experts_per_token={experts_per_token}, num_experts={num_experts}"
            raise ValueError(f"{rule}, got {got}")
        self.hidden_dim, self.intermediate_dim = hidden_dim, intermediate_dim
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.activation, self.gated, self.capacity = activation, gated, capacity
        self.balance, self.z = balance, z
        self.balance_bias, self.balance_rate = balance_bias, balance_rate
        self.supports_masking = True
        self.router = Project(num_experts, use_bias=False, name="router", dtype="float32")
        self.router.shrinks = False  # a choice that rounding would change

    def compute_output_shape(self, x_shape, real_shape=None):
        return x_shape

    def build(self, x_shape, real_shape=None):
        experts, width, inner = self.num_experts, self.hidden_dim, self.intermediate_dim
        limit = math.sqrt(6.0 / (width + inner))

        def matrices(name, *shape):
            initializer = keras.initializers.RandomUniform(-limit, limit)
            return self.add_weight((experts, *shape), initializer, name=name)

        self.router.build((None, width))
        self.router.kernel._autocast = False  # or it is rounded where a block is recomputed
        self.up = matrices("up", width, inner)
        self.gate = matrices("gate", width, inner) if self.gated else None
        self.down = matrices("down", inner, width)
        still = dict(initializer="zeros", trainable=False, dtype="float32", autocast=False)
        self.choice_bias = None
        if self.balance_bias:
            self.choice_bias = self.add_weight((experts,), name="choice_bias", **still)
        # Of the last training step: share of choices dropped; busiest expert's load, 1 = even.
        self.statistics = self.add_weight((2,), name="statistics", **still)

    def call(self, x, real=None, training=None, mask=None, x_mask=None):
        for implicit in (mask, x_mask):
            real = implicit if real is None else real
        shape = ops.shape(x)
        flat = ops.reshape(x, (-1, self.hidden_dim))
        real = ops.ones_like(flat[:, 0], dtype="bool") if real is None else ops.reshape(real, (-1,))
        gates, chosen, logits, chances = self.route(flat, real)
        if training and self.capacity is not None:
            out, kept = self.dispatch(flat, gates, chosen, real)
        else:
            out, kept = self.dense(flat, gates, chosen), ops.cast(real, "float32")[:, None]
        if training:
            self.keep_balance(chosen, logits, chances, real, kept)
        return ops.reshape(out, shape)

    def route(self, x, real):
        """Gates and expert numbers (M, k), the router's logits and probabilities (M, E)."""
        logits = self.router(x)
        chances = ops.softmax(logits, axis=-1)
        wish = chances if self.choice_bias is None else chances + self.choice_bias
        _, chosen = ops.top_k(ops.stop_gradient(wish), self.experts_per_token)
        gates = ops.sum(ops.where(self.is_chosen(chosen), chances[:, None], 0.0), axis=-1)
        if self.experts_per_token > 1:  # alone, a gate of 1 would give the router no gradient
            gates = gates / ops.sum(gates, axis=-1, keepdims=True)
        return ops.where(real[:, None], gates, 0.0), chosen, logits, chances

    def is_chosen(self, chosen):
        """(M, k, E), True = the expert is the token's choice of that rank."""
        return chosen[..., None] == ops.arange(self.num_experts, dtype=chosen.dtype)

    def experts(self, x):
        """(E, C, D) → (E, C, D): each expert on its own tokens."""
        inner = ops.matmul(x, self.gate if self.gated else self.up)
        inner = activate(inner, self.activation)
        if self.gated:
            inner = inner * ops.matmul(x, self.up)
        return ops.matmul(inner, self.down)

    def dense(self, x, gates, chosen):
        """Every expert on every token: the sum is exact, nothing can be dropped."""
        shares = ops.where(self.is_chosen(chosen), gates[..., None], 0.0)
        combine = ops.cast(ops.sum(shares, axis=1), x.dtype)  # (M, E)
        out = self.experts(ops.broadcast_to(x, (self.num_experts, *ops.shape(x))))
        return ops.matmul(combine[:, None], ops.swapaxes(out, 0, 1))[:, 0]

    def dispatch(self, x, gates, chosen, real):
        """Each expert on at most C tokens. Also which choices (M, k) were kept.

        Choices are numbered in the order of the tokens, so a later token never takes the slot
        of an earlier one. Slot E·C is where dropped choices go: it holds zeros.
        """
        tokens, width = ops.shape(x)[0], self.hidden_dim
        picks, experts = self.experts_per_token, self.num_experts
        share = self.capacity * picks / experts
        if isinstance(tokens, int):
            slots = min(max(math.ceil(share * tokens), 1), tokens)
        else:  # TensorFlow, where tracing does not know the batch
            slots = ops.cast(ops.ceil(share * ops.cast(tokens, "float64")), "int32")
            slots = ops.minimum(ops.maximum(slots, 1), tokens)
        flat = ops.reshape(chosen, (-1,))
        counts = ops.one_hot(flat, experts, dtype="int32")
        counts = counts * ops.cast(ops.repeat(real, picks), "int32")[:, None]
        place = ops.sum((ops.cumsum(counts, axis=0) - 1) * counts, axis=-1)
        kept = ops.logical_and(place < slots, ops.any(counts > 0, axis=-1))
        nowhere = experts * slots
        slot = ops.where(kept, ops.cast(flat, "int32") * slots + place, nowhere)
        # For every slot, the row of x that it takes; row M is zeros.
        source = ops.repeat(ops.arange(tokens, dtype="int32"), picks) - tokens
        rows = tokens + ops.segment_sum(
            ops.where(kept, source, ops.zeros_like(source)), slot, num_segments=nowhere + 1
        )
        padded = ops.concatenate([x, ops.zeros((1, width), dtype=x.dtype)], axis=0)
        taken = ops.reshape(ops.take(padded, rows[:-1], axis=0), (experts, slots, width))
        out = ops.reshape(self.experts(taken), (-1, width))
        out = ops.concatenate([out, ops.zeros((1, width), dtype=out.dtype)], axis=0)
        parts = ops.reshape(ops.take(out, slot, axis=0), (tokens, picks, width))
        total = ops.sum(parts * ops.cast(gates, parts.dtype)[..., None], axis=1)
        return total, ops.cast(ops.reshape(kept, (tokens, picks)), "float32")

    def keep_balance(self, chosen, logits, chances, real, kept):
        """Adds the losses, moves the bias and notes the figures of this step."""
        weight = ops.cast(real, "float32")[:, None]
        number = ops.maximum(ops.sum(weight), 1.0)
        choices = ops.sum(ops.one_hot(chosen, self.num_experts, dtype="float32"), axis=1)
        load = ops.sum(choices * weight, axis=0) / (number * self.experts_per_token)  # sums to 1
        if self.choice_bias is not None:
            step = ops.sign(1.0 / self.num_experts - load)
            self.choice_bias.assign_add(self.balance_rate * step)
        elif self.balance:
            mean = ops.sum(chances * weight, axis=0) / number
            self.add_loss(self.balance * self.num_experts * ops.sum(load * mean))
        if self.z:
            peak = ops.logsumexp(logits, axis=-1)[:, None]
            self.add_loss(self.z * ops.sum(ops.square(peak) * weight) / number)
        dropped = 1.0 - ops.sum(ops.mean(kept, axis=-1)) / number
        self.statistics.assign(ops.stack([dropped, self.num_experts * ops.max(load)]))
