"""The families that kformer reads and writes, one table each."""

from kformer.interop.families import decoders, encoder_decoders, encoders

FAMILIES = {
    family.model_type: family
    for family in (
        encoders.BERT,
        encoders.ROBERTA,
        encoders.DISTILBERT,
        decoders.GPT2,
        decoders.LLAMA,
        decoders.MISTRAL,
        decoders.QWEN2,
        decoders.QWEN3,
        decoders.GEMMA,
        decoders.MIXTRAL,
        encoder_decoders.T5,
        encoder_decoders.BART,
        encoder_decoders.MARIAN,
        encoder_decoders.M2M100,
    )
}
