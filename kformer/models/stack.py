"""A stack of blocks on embeddings: encoder and decoder. Letters: B batch, T tokens, D width."""

from keras import ops, tree

from kformer import kernels, masks
from kformer.layers.add_norm import make_dropout, make_norm
from kformer.layers.attention import look, without_padding
from kformer.layers.blocks import DecoderBlock, EncoderBlock, position_bias
from kformer.layers.embedding import Table, TokenEmbedding
from kformer.layers.feedforward import Project
from kformer.layers.heads import Pooling
from kformer.layers.positions import LearnedPositions, SinusoidalPositions
from kformer.models.base import Transformer
from kformer.models.inputs import check, describe, real_tokens, unpack
from kformer.serialization import child_policy, register


class Stack(Transformer):
    """Embeddings, positions, blocks, final norm: ids (B, T) → hidden states (B, T, D)."""

    causal = False

    def __init__(self, config, num_layers=None, embedding=None, cross_attention=False, **kwargs):
        super().__init__(config, **kwargs)
        self.supports_masking = True
        config, dtype = self.config, child_policy(self)
        self.is_target = cross_attention
        size = config.target_size if cross_attention else config.vocabulary_size
        self.embedding = embedding or TokenEmbedding(
            size, config.hidden_dim, config.scale_embeddings, name="embedding", dtype=dtype
        )
        self.positions = make_positions(config, dtype)
        self.token_types = None
        if config.token_types and not cross_attention:
            types = config.token_types, config.hidden_dim
            self.token_types = Table(*types, name="token_types", dtype=dtype)
        norm = config.norm, config.norm_epsilon, config.use_bias
        self.embedding_norm = self.final_norm = None
        if config.embedding_norm:
            self.embedding_norm = make_norm(*norm, name="embedding_norm", dtype=dtype)
        self.drop = make_dropout(config.dropout, dtype)
        self.bias = position_bias(config, self.causal, dtype)
        make_block = EncoderBlock if not self.causal else DecoderBlock
        cross = dict(cross_attention=True) if cross_attention else {}
        self.blocks = [
            make_block(config, layer=i, shared_bias=True, **cross, name=f"block_{i}", dtype=dtype)
            for i in range(num_layers or config.num_layers)
        ]
        if config.has_final_norm:
            self.final_norm = make_norm(*norm, name="final_norm", dtype=dtype)

    def call(
        self,
        inputs,
        memory=None,
        memory_tokens=None,
        cache=None,
        start=None,
        slots=None,
        return_hidden=False,
        training=None,
    ):
        """With `cache`, a list of one per block, also gives the new caches. Without `start` they
        are those of the inputs; else the inputs are ids for the places from `start` on among
        `slots`, the description of all places there are."""
        if start is None:
            tokens = describe(inputs, self.config, self.is_target)
        else:
            tokens, last = masks.at(slots, start, inputs.shape[1]), start + inputs.shape[1] - 1
        x = self.embed(inputs, tokens, training=training)
        sights = {}
        for number, block in enumerate(self.blocks):
            if block.window not in sights:  # those of one window see, and keep, the same
                seen = None if start is None else kept_slots(cache[number], slots, last)
                sights[block.window] = look(tokens, seen, self.causal, block.window, self.bias)
        across = None if memory_tokens is None else look(tokens, memory_tokens)
        hidden, caches = [x], []
        for number, block in enumerate(self.blocks):
            given = dict(memory=memory, sight=sights[block.window], memory_sight=across)
            if cache is not None:
                x, own = block(x, **given, cache=cache[number], start=start)
                caches.append(own)
            elif self.remat == "block" and training:
                x = self.run_recomputed(block, x, **given)
            else:
                x = block(x, **given, training=training)
            hidden.append(x)
        x = x if self.final_norm is None else self.final_norm(x)
        if cache is not None:
            return x, caches
        return (x, [*hidden[:-1], x]) if return_hidden else x

    def embed(self, inputs, tokens, training=None):
        """Token, position and type vectors together; zeros for padding, whatever its id."""
        ids, extras = unpack(inputs)
        x = self.embedding(ids)
        if self.token_types is not None:
            types = extras.get("token_types")
            types = ops.zeros_like(ids) if types is None else types
            x = x + self.token_types(types)
        if self.positions is not None:
            x = self.positions(x, positions=tokens.positions)
        x = without_padding(x, tokens.real)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return self.drop(x, training=training)

    def run_recomputed(self, block, x, **inputs):
        """The block as a pure function, whose inner values are computed again for the gradient.

        Weights go in as arguments; random seeds and other state go in as values and come out as
        new ones, so that dropout is the same in both computations and nothing leaks.
        """
        weights = [v.value for v in block.trainable_variables]
        states = [ops.copy(v.value) for v in block.non_trainable_variables]  # as they are now
        leaves = tree.flatten(inputs)
        floating = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

        def pure(x, *tensors):
            full = list(leaves)
            for i, tensor in zip(floating, tensors[len(weights) :], strict=True):
                full[i] = tensor
            given = tree.pack_sequence_as(inputs, full)
            y, new, losses = block.stateless_call(
                list(tensors[: len(weights)]), states, x, training=True, return_losses=True, **given
            )
            return (y, *new, *losses)

        y, *rest = kernels.recomputed(pure, x, *weights, *(leaves[i] for i in floating))
        for variable, value in zip(block.non_trainable_variables, rest, strict=False):
            variable.assign(value)
        for loss in rest[len(states) :]:
            self.add_loss(loss)
        return y

    def compute_mask(self, inputs, previous_mask=None):
        return real_tokens(inputs, self.config, self.is_target)

    def vocabulary_layers(self, side):
        return [self.embedding]

    def check_inputs(self, inputs, name="ids"):
        size = self.config.target_size if self.is_target else self.config.vocabulary_size
        check(inputs, self.config, size, name)


def kept_slots(cache, slots, last):
    """The description of the slots that a block's cache keeps, after token number `last`."""
    size = cache.own.keys.shape[-2]
    return slots if size == slots.real.shape[1] else masks.ring(slots, last, size)


def is_floating(leaf):
    return ops.is_tensor(leaf) and "float" in str(leaf.dtype)


def make_positions(config, dtype):
    """The layer that adds positions to embeddings, or None where the scores know them."""
    if config.position == "sinusoidal":
        layout = config.position_layout or "interleaved"
        return SinusoidalPositions(
            layout, offset=config.position_offset, name="positions", dtype=dtype
        )
    if config.position == "learned":
        size = config.max_length, config.hidden_dim
        return LearnedPositions(*size, config.position_offset, name="positions", dtype=dtype)
    return None


@register
class Encoder(Stack):
    """Every token sees every token: ids (B, T) → hidden states (B, T, D).

    Args:
        config: a `kformer.Config`.
        tokenizer: kept beside the model, for text in and out.
        remat: "block" computes activations again in the backward pass instead of keeping them.
    Call: ids, or {"ids", and optionally "padding_mask", "positions", "segments", "token_types"}.
        return_hidden: also the hidden states of every layer, embeddings first.
        return_pooled (config.pooler): also act(W · first real token + b), (B, D); act is
            config.pooler_activation, tanh unless said.
    """

    def __init__(self, config, tokenizer=None, remat=None, num_layers=None, **kwargs):
        kwargs.setdefault("name", "encoder")
        super().__init__(config, num_layers, tokenizer=tokenizer, remat=remat, **kwargs)
        self.pooler = None
        if self.config.pooler:
            width, dtype = self.config.hidden_dim, child_policy(self)
            act = self.config.pooler_activation
            self.first = Pooling("first", name="first", dtype=dtype)
            self.pooler = Project(width, activation=act, name="pooler", dtype=dtype)
        if num_layers is not None:
            self._arguments["num_layers"] = num_layers
        self.build()

    def call(self, inputs, return_hidden=False, return_pooled=False, training=None):
        out = super().call(inputs, return_hidden=return_hidden, training=training)
        if not return_pooled:
            return out
        if self.pooler is None:
            raise ValueError("return_pooled needs a Config with pooler=True, got pooler=False")
        hidden = out[0] if return_hidden else out
        pooled = self.pooler(self.first(hidden, real_tokens(inputs, self.config)))
        return (*out, pooled) if return_hidden else (out, pooled)


@register
class Decoder(Stack):
    """Every token sees the earlier ones, and the encoder's output if there is one:
    ids (B, T) → hidden states (B, T, D).

    Args:
        config: a `kformer.Config`.
        tokenizer, remat: as in `Encoder`.
    Call: ids, or {"ids", and optionally "padding_mask", "positions", "segments", "prefix"}; the
        first `prefix` (B,) tokens of a row are visible to all of its tokens (prefix-LM).
    """

    causal = True

    def __init__(
        self, config, tokenizer=None, remat=None, embedding=None, cross_attention=False, **kwargs
    ):
        kwargs.setdefault("name", "decoder")
        kwargs.update(tokenizer=tokenizer, remat=remat)
        super().__init__(config, None, embedding, cross_attention, **kwargs)
        if cross_attention:
            self._arguments["cross_attention"] = True
        self.build()
