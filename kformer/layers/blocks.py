"""Transformer blocks. Letters: B batch, T tokens, S source tokens, D width.

pre-norm encoder block            decoder block

x ──┬─ norm ─ self-attention ─┐   the same with causal self-attention,
    └────────── + ────────────┘   then, where there is an encoder,
    ┌─────────────────────────┐   norm ─ cross-attention ─ +
    ├─ norm ─ feed-forward ───┐   before the feed-forward
    └────────── + ────────────┘
"""

from keras import layers, ops

from kformer import masks
from kformer.cache import BlockCache
from kformer.layers.add_norm import AddNorm
from kformer.layers.attention import MultiHeadAttention, look, refuse_cache, without_padding
from kformer.layers.experts import MixtureOfExperts
from kformer.layers.feedforward import FeedForward
from kformer.layers.positions import AlibiBias, RelativeBias
from kformer.serialization import Configured, child_policy, register, traced_spec


def position_bias(config, causal, dtype):
    """The layer that adds to the scores in this configuration's position scheme, or None."""
    if config.position == "alibi":
        return AlibiBias(config.num_heads, name="alibi_bias", dtype=dtype)
    if config.position == "relative":
        return RelativeBias(
            config.num_heads,
            config.relative_buckets,
            config.relative_distance,
            bidirectional=not causal,
            name="relative_bias",
            dtype=dtype,
        )
    return None


class Block(Configured, layers.Layer):
    """Self-attention, cross-attention if asked for, and feed-forward, each in an `AddNorm`.

    Used alone it finds masks and positions by itself; inside a model they are made once and come
    in as `sight`. The body is the same for training and decoding: with a `cache` it also returns
    the new one.

    Args:
        config: a `kformer.Config`.
        layer: which layer this is, for a window that differs between layers.
        shared_bias: the position bias comes in with `sight`, so the block has none of its own.
    Call: x (B, T, D) → (B, T, D), or with cache= and start= → (x, cache).
    """

    causal = False

    def __init__(self, config, layer=0, cross_attention=False, shared_bias=False, **kwargs):
        super().__init__(**kwargs)
        self.remember(config, layer=layer, shared_bias=shared_bias)
        config, dtype = self.config, child_policy(self)
        self.window = config.window_of(layer)
        self.supports_masking = True
        self.autocast = False  # as in `MultiHeadAttention`
        self.bias = None if shared_bias else position_bias(config, self.causal, dtype)

        def add_norm(name):
            args = config.norm, config.norm_placement, config.norm_epsilon, config.dropout
            return AddNorm(*args, use_bias=config.use_bias, name=name, dtype=dtype)

        self.self_attention = make_attention(config, self.causal, self.window, dtype)
        self.self_attention_norm = add_norm("self_attention_norm")
        self.cross_attention = self.cross_attention_norm = None
        if cross_attention:
            self.cross_attention = make_attention(config, None, None, dtype)
            self.cross_attention_norm = add_norm("cross_attention_norm")
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_norm = add_norm("feed_forward_norm")

    def compute_output_shape(self, x_shape, memory_shape=None):
        return x_shape

    def compute_output_spec(self, *args, **kwargs):
        return traced_spec(self, *args, **kwargs)

    def build(self, x_shape, memory_shape=None):
        for part in (self.self_attention, self.cross_attention, self.feed_forward):
            if part is not None:
                part.build(x_shape)
        for norm in (self.self_attention_norm, self.cross_attention_norm, self.feed_forward_norm):
            if norm is not None:
                norm.build(x_shape)
        if self.bias is not None:
            self.bias.build((None, None))

    def call(
        self,
        x,
        memory=None,
        sight=None,
        memory_sight=None,
        cache=None,
        start=None,
        training=None,
        mask=None,
        x_mask=None,
        memory_mask=None,
    ):
        x = ops.cast(x, self.compute_dtype)
        if sight is None:
            refuse_cache(cache)
            mask = mask if x_mask is None else x_mask
            x, memory, sight, memory_sight = self.survey(x, memory, mask, memory_mask)
        y = self.self_attention_norm(x)
        y, cache = self.attend_to_self(y, sight, cache, start, training)
        x = self.self_attention_norm(x, y, training=training)
        if self.cross_attention is not None:
            y = self.cross_attention_norm(x)
            y = self.attend_to_memory(y, memory, memory_sight, cache, training)
            x = self.cross_attention_norm(x, y, training=training)
        y = self.feed_forward_norm(x)
        real = {"real": sight.real} if self.config.num_experts else {}
        y = self.feed_forward(y, **real, training=training)
        x = self.feed_forward_norm(x, y, training=training)
        return x if cache is None else (x, cache)

    def survey(self, x, memory, mask, memory_mask):
        """What a block used by itself must find out: see `MultiHeadAttention`."""
        tokens = masks.from_hidden(x, mask)
        sight = look(tokens, None, self.causal, self.window, self.bias)
        memory_sight = None
        if self.cross_attention is not None:
            if memory is None:
                raise ValueError("a block with cross_attention needs memory, got memory=None")
            memory_sight = look(tokens, masks.from_hidden(memory, memory_mask))
            memory = without_padding(memory, memory_mask)
        return without_padding(x, mask), memory, sight, memory_sight

    def attend_to_self(self, x, sight, cache, start, training):
        own = None if cache is None else cache.own
        out = self.self_attention(
            x,
            visible=sight.visible,
            bias=sight.bias,
            positions=sight.positions,
            cache=own,
            start=start,
            training=training,
        )
        return (out, None) if cache is None else (out[0], BlockCache(out[1], cache.cross))

    def attend_to_memory(self, x, memory, sight, cache, training):
        """Keys and values of the source come from the cache if it has them."""
        if cache is not None and cache.cross is not None:
            memory = cache.cross
        return self.cross_attention(x, context=memory, visible=sight.visible, training=training)


@register
class EncoderBlock(Block):
    __doc__ = "A block whose tokens all see each other.\n\n" + Block.__doc__

    def __init__(self, config, layer=0, shared_bias=False, **kwargs):
        super().__init__(config, layer=layer, shared_bias=shared_bias, **kwargs)


@register
class DecoderBlock(Block):
    __doc__ = (
        "A block whose tokens see only earlier ones, and the encoder's output if asked for.\n\n"
        + Block.__doc__
    )

    causal = True

    def __init__(self, config, cross_attention=False, layer=0, shared_bias=False, **kwargs):
        super().__init__(
            config, layer=layer, cross_attention=cross_attention, shared_bias=shared_bias, **kwargs
        )
        self._arguments["cross_attention"] = cross_attention


def make_attention(config, causal, window, dtype):
    """Self-attention of a configuration, or cross-attention (causal None), which has no position
    scheme: a source token has no place in the order of the target."""
    cross = causal is None
    rotary = None
    if config.position == "rotary" and not cross:
        rotary = dict(
            base=config.rotary_base,
            rotary_dim=config.rotary_dim,
            layout=config.position_layout or "half",
            scaling=config.rotary_scaling,
        )
    return MultiHeadAttention(
        config.hidden_dim,
        config.num_heads,
        config.key_value_heads,
        causal=bool(causal),
        window=window,
        head_dim=config.head_dim,
        rotary=rotary,
        qk_norm=config.qk_norm,
        softcap=config.logit_softcap,
        sinks=config.attention_sinks and not cross,
        scale=config.attention_scale,
        dropout=config.attention_dropout,
        use_bias=config.has_qkv_bias,
        output_bias=config.use_bias,
        epsilon=config.norm_epsilon,
        name="cross_attention" if cross else "self_attention",
        dtype=dtype,
    )


def make_feed_forward(config, dtype):
    """The feed-forward network of a configuration, or its experts."""
    sizes = config.hidden_dim, config.inner_dim
    kind = dict(activation=config.activation, gated=config.gated, name="feed_forward", dtype=dtype)
    if not config.num_experts:
        return FeedForward(*sizes, use_bias=config.use_bias, **kind)
    return MixtureOfExperts(
        *sizes,
        config.num_experts,
        config.experts_per_token,
        capacity=config.expert_capacity,
        balance=config.expert_balance,
        z=config.expert_z,
        balance_bias=config.expert_bias,
        **kind,
    )
