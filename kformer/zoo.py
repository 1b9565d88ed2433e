"""The zoo: one table of known models, and the arithmetic that counts their parameters."""

from kformer.config import Config

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


TASKS = (
    "encoder", "decoder", "seq2seq", "text_classifier", "token_classifier", "masked_lm",
    "causal_lm", "seq2seq_lm",
)  # fmt: skip


def parameter_count(config: Config, task: str, num_classes=2, pooling="mean") -> int:
    """The exact number of parameters of a model, by adding up its parts.

    Args:
        task: "encoder", "decoder", "seq2seq", "text_classifier", "token_classifier",
            "masked_lm", "causal_lm" or "seq2seq_lm".
        num_classes, pooling: as the classifiers take them.
    """
    c, width = config, config.hidden_dim
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if task in ("seq2seq", "seq2seq_lm"):
        total = _stack(c, c.encoder_layers, c.vocabulary_size)
        total += _stack(c, c.num_layers, c.target_vocabulary_size or 0, cross=True)
        total += _head(c, c.target_size) if task == "seq2seq_lm" else 0
        return total
    total = _stack(c, c.num_layers, c.vocabulary_size)
    pooler = width * (width + 1)
    if task == "encoder":
        return total + (pooler if c.pooler else 0)
    if task == "text_classifier":
        total += pooler if c.pooler and pooling == "first" else 0
        total += width if pooling == "attention" else 0
    if task in ("text_classifier", "token_classifier"):
        return total + (width + 1) * num_classes
    if task == "masked_lm":
        transform = width * (width + c.use_bias) + _norm(c)
        return total + transform + _head(c.replace(output_bias=True), c.vocabulary_size)
    return total + (_head(c, c.vocabulary_size) if task == "causal_lm" else 0)


def _norm(c):
    return c.hidden_dim * (2 if c.norm == "layer" and c.use_bias else 1)


def _attention(c):
    queries, keys = c.num_heads * c.head_width, c.key_value_heads * c.head_width
    kernels = c.hidden_dim * (2 * queries + 2 * keys)
    biases = (queries + 2 * keys) * c.has_qkv_bias + c.hidden_dim * c.use_bias
    return kernels + biases


def _feed_forward(c):
    """One feed-forward network, or the router and all experts."""
    if c.num_experts:
        expert = (2 + c.gated) * c.hidden_dim * c.inner_dim
        balance = c.num_experts if c.expert_bias else 0
        return c.num_experts * (expert + c.hidden_dim) + balance
    ups = (1 + c.gated) * c.inner_dim * (c.hidden_dim + c.use_bias)
    return ups + (c.inner_dim + c.use_bias) * c.hidden_dim


def _stack(c, layers, vocabulary, cross=False):
    """Embeddings, blocks and final norm; vocabulary 0 = the embedding is another stack's."""
    norms_each = 2 if c.norm_placement == "sandwich" else 1
    extras = (2 * c.head_width if c.qk_norm else 0) + (c.num_heads if c.attention_sinks else 0)
    block = _attention(c) + extras + _feed_forward(c) + 2 * norms_each * _norm(c)
    if cross:
        block += _attention(c) + (2 * c.head_width if c.qk_norm else 0) + norms_each * _norm(c)
    positions = (c.max_length + c.position_offset) if c.position == "learned" else 0
    rows = vocabulary + positions + (0 if cross else c.token_types)
    relative = c.relative_buckets * c.num_heads if c.position == "relative" else 0
    norms = (c.embedding_norm + c.has_final_norm) * _norm(c)
    return rows * c.hidden_dim + layers * block + relative + norms


def _head(c, vocabulary):
    kernel = 0 if c.tie_embeddings else c.hidden_dim * vocabulary
    return kernel + (vocabulary if c.output_bias else 0)
