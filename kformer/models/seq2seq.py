"""The encoder-decoder. Letters: B batch, S source tokens, T target tokens, D width."""

from kformer.config import Config
from kformer.models.base import Transformer
from kformer.models.inputs import describe, with_special_ids
from kformer.models.stack import Decoder, Encoder
from kformer.serialization import child_policy, register
from kformer.text.foreign import adapt


def with_target_ids(config, tokenizer, target_tokenizer):
    """What is generated comes from the target's tokenizer: its special ids go first."""
    if target_tokenizer is None or not isinstance(config, Config):
        return config
    own = tokenizer is not None and target_tokenizer is not tokenizer
    own = own or config.target_vocabulary_size is not None
    size_field = "target_vocabulary_size" if own else "vocabulary_size"
    return with_special_ids(config, target_tokenizer, size_field)


@register
class Seq2Seq(Transformer):
    """decode(target, encode(source)): {"source": (B, S), "target": (B, T)} → hidden (B, T, D).

    Source and target share one embedding unless the Config has a `target_vocabulary_size`.

    Args:
        config: a `kformer.Config`; `num_layers` counts the decoder's, `num_encoder_layers` the
            encoder's.
        tokenizer, target_tokenizer: kept beside the model; without the second, the first is both.
        remat: as in `Encoder`.
    Call: a dict of "source" and "target", each ids or a dict as `Encoder` and `Decoder` take it.
        return_hidden: also {"encoder": [...], "decoder": [...]}, the states of every layer.
    """

    has_source = True
    tokenizer_names = ("tokenizer", "target_tokenizer")

    def __init__(self, config, tokenizer=None, target_tokenizer=None, remat=None, **kwargs):
        kwargs.setdefault("name", "seq2seq")
        config = with_target_ids(config, tokenizer, target_tokenizer)
        super().__init__(config, tokenizer=tokenizer, remat=remat, **kwargs)
        self.target_tokenizer = adapt(target_tokenizer) or self.tokenizer
        part = dict(remat=remat, dtype=child_policy(self))
        config = self.config.replace(pooler=False)
        self.encoder = Encoder(config, num_layers=config.encoder_layers, **part)
        shared = self.encoder.embedding if config.target_vocabulary_size is None else None
        self.decoder = Decoder(config, embedding=shared, cross_attention=True, **part)
        self.supports_masking = True
        self.build()

    def call(self, inputs, return_hidden=False, training=None):
        source, target = inputs["source"], inputs["target"]
        memory = self.encoder(source, return_hidden=return_hidden, training=training)
        memory, encoder_states = memory if return_hidden else (memory, None)
        out = self.decoder(
            target,
            memory=memory,
            memory_tokens=describe(source, self.config),
            return_hidden=return_hidden,
            training=training,
        )
        if not return_hidden:
            return out
        return out[0], {"encoder": encoder_states, "decoder": out[1]}

    def vocabulary_layers(self, side):
        return [self.decoder.embedding if side == "target" else self.encoder.embedding]

    def compute_mask(self, inputs, previous_mask=None):
        return self.decoder.compute_mask(inputs["target"])

    def check_inputs(self, inputs):
        if not isinstance(inputs, dict) or set(inputs) != {"source", "target"}:
            got = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(f"inputs must be a dict of 'source' and 'target', got {got}")
        self.encoder.check_inputs(inputs["source"], "source ids")
        self.decoder.check_inputs(inputs["target"], "target ids")
