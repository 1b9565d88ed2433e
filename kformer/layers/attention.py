"""Attention: the only place where it is computed.

Letters: B batch, T queries, S keys, D width, N query heads, K key/value heads, H head width.
"""

import contextlib
import contextvars
from typing import Any, NamedTuple

from keras import layers, ops

from kformer import backend, kernels, masks
from kformer.cache import KeysValues
from kformer.layers.add_norm import make_dropout
from kformer.layers.feedforward import Project
from kformer.layers.positions import RotaryPositions
from kformer.serialization import Composite, child_policy, register, traced_spec

_captured = contextvars.ContextVar("kformer_captured", default=None)


@contextlib.contextmanager
def capture():
    """Collects {layer path: weights (B, N, T, S)} of every attention called inside, eagerly."""
    token = _captured.set({})
    try:
        yield _captured.get()
    finally:
        _captured.reset(token)


def capturing() -> bool:
    return _captured.get() is not None


def attention_weights(query, key, visible=None, bias=None, scale=1.0, softcap=None, sink=None):
    """softmax(Q·Kᵀ·scale) in float32, (B, N, T, S); a row that may see nothing is all zeros.

    Args:
        query: (B, N, T, H).
        key: (B, K, S, H), or folded to (B · K, S, H); head n of the queries uses head n // (N/K)
            of the keys.
        visible: boolean, broadcastable to (B, N, T, S), True = may see.
        bias: added to the scores, broadcastable to (B, N, T, S).
        softcap: c; scores s become c · tanh(s / c).
        sink: (N,); one more score per head that takes part in the softmax and gives nothing.
    """
    key = ops.swapaxes(key, -1, -2)
    scores = ops.cast(_grouped(query * ops.cast(scale, query.dtype), key), "float32")
    if softcap is not None:
        scores = softcap * ops.tanh(scores / softcap)
    if bias is not None:
        scores = scores + ops.cast(bias, "float32")
    if visible is not None:
        scores = ops.where(visible, scores, -float("inf"))
    peak = ops.max(scores, axis=-1, keepdims=True)
    if sink is not None:
        sink = ops.cast(sink, "float32")[None, :, None, None]
        peak = ops.maximum(peak, sink)
    peak = ops.stop_gradient(ops.where(peak > -float("inf"), peak, 0.0))
    weights = ops.exp(scores - peak)
    total = ops.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + ops.exp(sink - peak)
    return weights / ops.where(total > 0, total, 1.0)


def _grouped(left, right):
    """left (B, N, T, I) · right (B, K, I, O) → (B, N, T, O), per head, without repeating the K
    heads of `right` N/K times. `right` may be folded to (B · K, I, O)."""
    batch, heads, length, inner = ops.shape(left)
    outer = ops.shape(right)[-1]
    if len(right.shape) == 3:
        folded = ops.reshape(left, (right.shape[0], -1, inner))
    else:
        groups = right.shape[1]
        folded = ops.reshape(left, (batch, groups, (heads // groups) * length, inner))
    return ops.reshape(ops.matmul(folded, right), (batch, heads, length, outer))


def swapped(x):
    """(B, T, N, H) ↔ (B, N, T, H)."""
    return ops.transpose(x, (0, 2, 1, 3))


class Sight(NamedTuple):
    """All that attention needs to know of where its queries stand and what they may see."""

    visible: Any  # finished mask, (B, 1, T, S), or block by block: see masks.windowed
    positions: Any  # (B, T)
    real: Any  # (B, T), True = not padding
    bias: Any = None  # added to the scores, (B, N, T, S), or block by block


def look(query, key=None, causal=False, window=None, bias_layer=None, dense=False):
    """The Sight of tokens on themselves, or on the tokens `key` of another sequence.

    dense: no blocks, although there is a window, because somebody wants all T × S weights.
    """
    size = (
        None
        if dense or key is not None or capturing()
        else masks.block_size(ops.shape(query.real)[1], window)
    )
    if size is None:
        sees, seen = query, query if key is None else key
        visible = masks.visible(sees, seen, causal, window)
    else:
        visible, sees, seen = masks.windowed(query, causal, window, size)
    bias = None if bias_layer is None else bias_layer(sees.positions, seen.positions)
    return Sight(visible, query.positions, query.real, bias)


def without_padding(x, mask):
    """Zeros where the mask is False: the numbers there (NaN perhaps) must not matter."""
    return x if mask is None else ops.where(mask[..., None], x, ops.zeros_like(x))


def refuse_cache(cache):
    if cache is not None:
        raise ValueError("a cache needs visible=, the mask over its slots, got visible=None")


@register
class MultiHeadAttention(Composite, layers.Layer):
    """Scaled dot-product attention in N heads, to itself or to another sequence.

        head_n = softmax(Q_n K_nᵀ / √H + bias) V_n            Q = x W_Q, K = c W_K, V = c W_V
        out    = [head_1 ... head_N] W_O

    where c is x itself (self-attention), or `context` (cross-attention), or both x and what a
    cache holds (decoding). The heads together cost as much as one head of width D.

    Args:
        hidden_dim: D, width of input and output.
        num_heads: N.
        num_key_value_heads: K; fewer than N is grouped-query, 1 multi-query attention.
        causal: a query sees no later key.
        window: a query sees keys less than `window` places away. Long rows are cut into blocks,
            so that time and memory grow with T · window.
        head_dim: H; None = D / N.
        rotary: None, or the arguments of `RotaryPositions` as a dict.
        qk_norm: RMS-normalise queries and keys per head.
        softcap: c; scores s become c · tanh(s / c).
        sinks: one learned score per head that takes weight and gives nothing.
        scale: factor of the scores; None = 1/√H.
        dropout: rate of dropout on the attention weights.
        use_bias, output_bias: biases of W_Q, W_K, W_V, and of W_O (None = the same).
        epsilon: ε of the norms of qk_norm.
    Call: x (B, T, D) → (B, T, D). With `return_attention_scores`, also the weights (B, N, T, S).
        With `cache` (a KeysValues) and `start` (slot of the first new key), also the new cache.
        context: (B, S, D), or KeysValues made by `keys_values`.
        attention_mask: boolean, True = may see, on top of causality, window and padding.
        bias: added to the scores, (N, T, S), (B, N, T, S) or broadcastable.
        positions, context_positions: (B, T), (B, S) for rotary; None = count real tokens.
        visible: a finished mask from `masks`; nothing is added to it.
    """

    def __init__(
        self,
        hidden_dim,
        num_heads,
        num_key_value_heads=None,
        causal=False,
        window=None,
        head_dim=None,
        rotary=None,
        qk_norm=False,
        softcap=None,
        sinks=False,
        scale=None,
        dropout=0.0,
        use_bias=True,
        output_bias=None,
        epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads or num_heads
        check_numbers(hidden_dim, num_heads, self.num_key_value_heads, head_dim, window)
        self.head_dim = head_dim or hidden_dim // num_heads
        self.causal, self.window, self.softcap, self.sinks = causal, window, softcap, sinks
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.rate, self.supports_masking = dropout, True
        self.autocast = False  # a cache keeps its precision; what is computed with is cast below
        dtype = child_policy(self)
        keys_width = self.num_key_value_heads * self.head_dim

        def project(width, name, bias=use_bias):
            return Project(width, use_bias=bias, name=name, dtype=dtype)

        self.query = project(num_heads * self.head_dim, "query")
        self.key = project(keys_width, "key")
        self.value = project(keys_width, "value")
        self.output_projection = project(
            hidden_dim, "output", use_bias if output_bias is None else output_bias
        )
        self.rotary = (
            None if rotary is None else RotaryPositions(**rotary, name="rotary", dtype=dtype)
        )
        norm = dict(epsilon=epsilon, dtype=dtype)
        self.query_norm = layers.RMSNormalization(name="query_norm", **norm) if qk_norm else None
        self.key_norm = layers.RMSNormalization(name="key_norm", **norm) if qk_norm else None
        self.drop = make_dropout(dropout, dtype)
        self.sink = None

    def compute_output_shape(self, x_shape, context_shape=None):
        return x_shape

    def compute_output_spec(self, *args, **kwargs):
        return traced_spec(self, *args, **kwargs)

    def build(self, x_shape, context_shape=None):
        source = x_shape[-1] if context_shape is None else context_shape[-1]
        self.query.build((None, None, x_shape[-1]))
        self.key.build((None, None, source))
        self.value.build((None, None, source))
        self.output_projection.build((None, None, self.num_heads * self.head_dim))
        for part in (self.query_norm, self.key_norm, self.rotary):
            if part is not None:
                part.build((None, None, None, self.head_dim))
        if self.sinks:
            self.sink = self.add_weight((self.num_heads,), initializer="zeros", name="sink")

    def call(
        self,
        x,
        context=None,
        attention_mask=None,
        bias=None,
        positions=None,
        context_positions=None,
        visible=None,
        cache=None,
        start=None,
        return_attention_scores=False,
        training=None,
        mask=None,
        x_mask=None,
        context_mask=None,
    ):
        x = ops.cast(x, self.compute_dtype)
        if context is not None and not isinstance(context, KeysValues):
            context = ops.cast(context, self.compute_dtype)
        if visible is None:
            refuse_cache(cache)
            dense = return_attention_scores or bias is not None or attention_mask is not None
            mask = mask if x_mask is None else x_mask
            query, key = masks.from_hidden(x, mask, positions), None
            x = without_padding(x, mask)
            if context is not None:
                context, key = self._survey(context, context_mask, context_positions)
            visible = look(query, key, self.causal, self.window, dense=dense).visible
            visible = masks.combine(visible, attention_mask)
            positions, context_positions = query.positions, key and key.positions
        elif positions is None and self.rotary is not None:
            raise ValueError("rotary attention needs positions= beside visible=, got None")
        query = self._heads(self.query(x), self.num_heads, self.query_norm, positions)
        if isinstance(context, KeysValues):
            memory = context
        elif context is None:
            memory = self.keys_values(x, positions)
        else:
            memory = self.keys_values(context, context_positions)
        if cache is not None:
            memory = cache = cache.write(*memory, start)
        given = query, memory, visible, bias, training
        out, scores = self._attend(*given, return_attention_scores or capturing())
        out = ops.reshape(swapped(out), (*ops.shape(x)[:2], self.num_heads * self.head_dim))
        out = self.output_projection(out)
        extra = ([scores] if return_attention_scores else []) + ([] if cache is None else [cache])
        return (out, *extra) if extra else out

    def _survey(self, context, mask, positions):
        """A context without its padding, and what the mask rules know of its tokens."""
        if isinstance(context, KeysValues):  # Keras fills in a mask for each of its parts
            return context, masks.from_hidden(context.keys[:, 0])
        return without_padding(context, mask), masks.from_hidden(context, mask, positions)

    def keys_values(self, x, positions=None):
        """Projected keys and values of x, (B, K, S, H) each: of a source, they are made once.

        positions: (S,) or (B, S) for rotary; None = 0, 1, 2, ...
        """
        heads = self.num_key_value_heads
        keys = self._heads(self.key(x), heads, self.key_norm, positions)
        values = ops.reshape(self.value(x), (*ops.shape(x)[:2], heads, self.head_dim))
        return KeysValues(keys, swapped(values))

    def _heads(self, x, heads, norm=None, positions=None):
        """(B, T, heads · H) → (B, heads, T, H), normalised and turned where that is asked for."""
        x = ops.reshape(x, (*ops.shape(x)[:2], heads, self.head_dim))
        x = x if norm is None else norm(x)
        return swapped(x if self.rotary is None else self.rotary(x, positions))

    def _attend(self, query, memory, visible, bias, training, scores_wanted):
        """(B, N, T, H), and the weights (B, N, T, S) if they are wanted."""
        if len(visible.shape) == 5:  # block by block
            return self._attend_blocks(query, memory, visible, bias, training), None
        keys, values = (ops.cast(x, query.dtype) for x in memory)
        plain = scores_wanted or self.softcap is not None or self.sinks
        if not (plain or (training and self.rate > 0)):
            out = kernels.fused_attention(query, keys, values, visible, bias, self.scale)
            if out is not None:
                return out, None
        sink = self.sink if self.sinks else None
        weights = attention_weights(query, keys, visible, bias, self.scale, self.softcap, sink)
        if capturing():
            _captured.get()[self.path] = backend.to_numpy(weights)
        weights = ops.cast(weights, query.dtype)
        dropped = self.drop(weights, training=training)
        return _grouped(dropped, values), weights

    def _attend_blocks(self, query, memory, visible, bias, training):
        """The same, for a window: fold the row's blocks into the batch, attend, unfold."""
        length, size, neighbours = ops.shape(query)[2], ops.shape(visible)[2], visible.shape[3]
        visible = ops.reshape(visible, (-1, 1, size, neighbours * size))

        def fold(x, beside=1):
            return swapped(masks.fold_rows(swapped(x), size, beside))

        memory = KeysValues(*(fold(x, neighbours) for x in memory))
        out, _ = self._attend(fold(query), memory, visible, bias, training, scores_wanted=False)
        return swapped(masks.unfold_rows(swapped(out), length))


def check_numbers(hidden_dim, num_heads, num_key_value_heads, head_dim, window):
    if num_heads < 1 or num_key_value_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got num_heads={num_heads}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got window={window}")
    if head_dim is None and hidden_dim % num_heads:
        rule = "hidden_dim must be a multiple of num_heads"
        raise ValueError(f"{rule}, got hidden_dim={hidden_dim}, num_heads={num_heads}")
    if num_heads % num_key_value_heads:
        rule = "num_heads must be a multiple of num_key_value_heads"
        got = f"num_heads={num_heads}, num_key_value_heads={num_key_value_heads}"
        raise ValueError(f"{rule}, got {got}")
