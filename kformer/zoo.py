"""The zoo: one table of known models."""

BERT = dict(
    vocabulary_size=30522, num_layers=12, hidden_dim=768, num_heads=12, activation="gelu",
    norm_placement="post", norm_epsilon=1e-12, position="learned", max_length=512, dropout=0.1,
    attention_dropout=0.1, token_types=2, embedding_norm=True, pooler=True, output_bias=True,
    pad_id=0,
)  # fmt: skip
GPT2 = dict(
    vocabulary_size=50257, num_layers=12, hidden_dim=768, num_heads=12, activation="gelu_tanh",
    position="learned", max_length=1024, dropout=0.1, attention_dropout=0.1, pad_id=None,
    bos_id=50256, eos_id=50256,
)  # fmt: skip
LLAMA = dict(
    activation="silu", gated=True, norm="rms", norm_epsilon=1e-5, position="rotary",
    use_bias=False, pad_id=None,
)  # fmt: skip
NANOGPT = dict(
    vocabulary_size=65, activation="gelu", position="learned", use_bias=False, pad_id=None,
)  # fmt: skip
ORIGINAL = dict(
    vocabulary_size=37000, num_layers=6, hidden_dim=512, num_heads=8, norm_placement="post",
    position="sinusoidal", dropout=0.1, scale_embeddings=True, pad_id=0, bos_id=1, eos_id=2,
)  # fmt: skip
MISTRAL = LLAMA | dict(
    vocabulary_size=32000, num_layers=32, hidden_dim=4096, num_heads=32, num_key_value_heads=8,
    intermediate_dim=14336, tie_embeddings=False, max_length=32768, bos_id=1, eos_id=2,
)  # fmt: skip

PRESETS = {
    "transformer_base": ORIGINAL,
    "transformer_big": ORIGINAL | dict(hidden_dim=1024, num_heads=16, dropout=0.3),
    "bert_base": BERT,
    "distilbert": BERT | dict(num_layers=6, token_types=0, pooler=False),
    "roberta_base": BERT | dict(
        vocabulary_size=50265, norm_epsilon=1e-5, token_types=1, position_offset=2, pad_id=1,
        bos_id=0, eos_id=2,
    ),
    "minilm_l6": BERT | dict(num_layers=6, hidden_dim=384),
    "gpt2": GPT2,
    "gpt2_medium": GPT2 | dict(num_layers=24, hidden_dim=1024, num_heads=16),
    "gpt2_large": GPT2 | dict(num_layers=36, hidden_dim=1280, num_heads=20),
    "gpt2_xl": GPT2 | dict(num_layers=48, hidden_dim=1600, num_heads=25),
    "nanogpt": NANOGPT | dict(
        num_layers=6, hidden_dim=384, num_heads=6, max_length=256, dropout=0.2,
        attention_dropout=0.2,
    ),
    "nanogpt-cpu": NANOGPT | dict(num_layers=4, hidden_dim=128, num_heads=4, max_length=64),
    "llama3.2_1b": LLAMA | dict(
        vocabulary_size=128256, num_layers=16, hidden_dim=2048, num_heads=32,
        num_key_value_heads=8, intermediate_dim=8192, rotary_base=500000.0, max_length=131072,
        rotary_scaling=dict(type="llama3", factor=32.0, low_freq_factor=1.0,
                            high_freq_factor=4.0, original_max_length=8192),
        bos_id=128000, eos_id=128001,
    ),
    "smollm2_135m": LLAMA | dict(
        vocabulary_size=49152, num_layers=30, hidden_dim=576, num_heads=9, num_key_value_heads=3,
        intermediate_dim=1536, rotary_base=100000.0, max_length=8192, bos_id=0, eos_id=0,
    ),
    "mistral_7b": MISTRAL | dict(window=4096),
    "qwen2.5_0.5b": LLAMA | dict(
        vocabulary_size=151936, num_layers=24, hidden_dim=896, num_heads=14,
        num_key_value_heads=2, intermediate_dim=4864, rotary_base=1000000.0, norm_epsilon=1e-6,
        qkv_bias=True, max_length=32768, bos_id=151643, eos_id=151643,
    ),
    "qwen3_0.6b": LLAMA | dict(
        vocabulary_size=151936, num_layers=28, hidden_dim=1024, num_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_dim=3072, rotary_base=1000000.0,
        norm_epsilon=1e-6, qk_norm=True, max_length=40960, bos_id=151643, eos_id=151645,
    ),
    "gemma_2b": LLAMA | dict(
        vocabulary_size=256000, num_layers=18, hidden_dim=2048, num_heads=8,
        num_key_value_heads=1, head_dim=256, intermediate_dim=16384, activation="gelu_tanh",
        norm_epsilon=1e-6, scale_embeddings=True, max_length=8192, pad_id=0, bos_id=2, eos_id=1,
    ),
    "mixtral_8x7b": MISTRAL | dict(
        num_experts=8, experts_per_token=2, rotary_base=1000000.0, expert_balance=0.02,
        expert_z=0.0,
    ),
    "t5_small": dict(
        vocabulary_size=32128, num_layers=6, hidden_dim=512, num_heads=8, head_dim=64,
        intermediate_dim=2048, norm="rms", norm_epsilon=1e-6, position="relative",
        attention_scale=1.0, dropout=0.1, use_bias=False, output_scale=512**-0.5, pad_id=0,
        bos_id=0, eos_id=1,
    ),
    "bart_base": dict(
        vocabulary_size=50265, num_layers=6, hidden_dim=768, num_heads=12, activation="gelu",
        norm_placement="post", position="learned", max_length=1024, position_offset=2,
        embedding_norm=True, dropout=0.1, pad_id=1, bos_id=2, eos_id=2,
    ),
    "marian": dict(
        vocabulary_size=58101, num_layers=6, hidden_dim=512, num_heads=8, activation="silu",
        norm_placement="post", position="sinusoidal", position_layout="half",
        scale_embeddings=True, dropout=0.1, output_bias=True, pad_id=58100, bos_id=58100,
        eos_id=0,
    ),
    "m2m100_418m": dict(
        vocabulary_size=128112, num_layers=12, hidden_dim=1024, num_heads=16,
        position="sinusoidal", position_layout="spread", position_offset=2, max_length=1024,
        scale_embeddings=True, dropout=0.1, attention_dropout=0.1, pad_id=1, bos_id=2, eos_id=2,
    ),
}  # fmt: skip


def presets() -> tuple[str, ...]:
    """The names that `Config.preset` knows."""
    return tuple(PRESETS)
