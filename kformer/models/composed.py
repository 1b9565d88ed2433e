"""A decoder that somebody composed of blocks, as something that writes."""

from kformer import masks
from kformer.layers.attention import look, without_padding
from kformer.models.decoding import Generates
from kformer.models.inputs import describe, unpack, with_special_ids
from kformer.models.stack import kept_slots
from kformer.text.foreign import adapt


class Writer(Generates):
    """`generate` and `stream` for a model that is none of kformer's: any stack of `DecoderBlock`s.

        ids → embed → blocks → head → logits

    Args:
        model: the Keras model, or any layer, that holds the weights; training it is seen.
        config: a `kformer.Config` with its vocabulary_size and special ids; the rest is not read.
        embed: function of ids (B, T) and positions (B, T) → (B, T, D).
        blocks: the `DecoderBlock`s, in order, without cross-attention.
        head: function of hidden states (B, T, D) → logits (B, T, V); a final norm belongs to it.
        tokenizer: for texts in and out.
    """

    has_source = False

    def __init__(self, model, config, embed, blocks, head, tokenizer=None):
        self.model, self.embed, self.blocks, self.head = model, embed, list(blocks), head
        self.tokenizer = adapt(tokenizer)
        self.config = with_special_ids(config, self.tokenizer)
        self._functions = {}

    @property
    def variables(self):
        return self.model.variables

    @property
    def compute_dtype(self):
        return self.blocks[0].compute_dtype

    @property
    def decoder(self):
        return self

    def __call__(self, inputs, cache, start=None, slots=None, memory_tokens=None):
        """As `Decoder` with a cache."""
        if start is None:
            tokens = describe(inputs, self.config)
        else:
            tokens, last = masks.at(slots, start, inputs.shape[1]), start + inputs.shape[1] - 1
        x = without_padding(self.embed(unpack(inputs)[0], tokens.positions), tokens.real)
        caches = []
        for block, old in zip(self.blocks, cache, strict=True):
            seen = None if start is None else kept_slots(old, slots, last)
            sight = look(tokens, seen, True, block.window, block.bias)
            x, new = block(x, sight=sight, cache=old, start=start)
            caches.append(new)
        return x, caches

    def head_logits(self, hidden, inputs, training):
        return self.head(hidden)

    def encode_prompts(self, texts):
        return self.tokenizer.encode(texts)
