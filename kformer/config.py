"""Config: everything that shapes a model, in one frozen dataclass that checks itself.

`PRESETS` in `zoo.py` is the table of known models.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from numbers import Integral, Real

CHOICES = {
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "norm": ("layer", "rms"),
    "norm_placement": ("pre", "post", "sandwich"),
    "position": ("sinusoidal", "learned", "rotary", "alibi", "relative", "none"),
    "position_layout": (None, "interleaved", "half", "spread"),
    "pooler_activation": ("tanh", "relu"),
}

# (lowest, highest) of every whole number. The upper ends refuse what no machine could allocate.
INTEGERS = {
    "vocabulary_size": (1, 2**24),
    "target_vocabulary_size": (1, 2**24),
    "num_layers": (1, 1024),
    "num_encoder_layers": (1, 1024),
    "hidden_dim": (1, 2**16),
    "num_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (1, 2**13),
    "intermediate_dim": (1, 2**18),
    "max_length": (1, 2**24),
    "position_offset": (0, 1024),
    "rotary_dim": (2, 2**13),
    "relative_buckets": (4, 2**12),
    "relative_distance": (2, 2**24),
    "token_types": (0, 1024),
    "num_experts": (0, 4096),
    "experts_per_token": (1, 4096),
}

# (lowest, highest, is the lowest allowed, is the highest allowed) of every real number.
REALS = {
    "norm_epsilon": (0.0, 1.0, False, True),
    "rotary_base": (1.0, math.inf, False, False),
    "attention_scale": (0.0, math.inf, False, False),
    "logit_softcap": (0.0, math.inf, False, False),
    "output_scale": (0.0, math.inf, False, False),
    "expert_capacity": (0.0, math.inf, False, False),
    "expert_balance": (0.0, math.inf, True, False),
    "expert_z": (0.0, math.inf, True, False),
    "dropout": (0.0, 1.0, True, False),
    "attention_dropout": (0.0, 1.0, True, False),
}

# What each kind of rotary scaling needs; every value is a number of at least 1, or as noted.
SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_length"),
    "yarn": ("factor", "original_max_length"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_length"),
}
OPTIONAL_SCALING = {"yarn": ("beta_fast", "beta_slow", "attention_factor")}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a transformer. A wrong value is a `ValueError` naming field, rule and value.

    Besides the fields everybody knows:
        num_layers: layers of the decoder in an encoder-decoder, else of the only stack.
        num_encoder_layers: layers of the encoder in an encoder-decoder; None = `num_layers`.
        target_vocabulary_size: None = source and target share one vocabulary and one embedding.
        intermediate_dim: inner width of the feed-forward; None = 4 × hidden_dim.
        window: a query sees keys less than `window` positions away; a tuple repeats over layers.
        use_bias: biases in projections and norms; `qkv_bias` decides for query, key, value alone.
        position_offset: first row of the position table that is used (2 in BART and RoBERTa).
        position_layout: "interleaved" (sin, cos, sin, ...) or "half" (all sin, then all cos); None
            = interleaved for sinusoids, half for rotary positions. "spread" is "half" with the
            longest wave exactly 10000 · 2π (M2M-100); for sinusoids only.
        rotary_dim: how many numbers of each head turn; None = all.
        rotary_scaling: {"type": "linear" | "dynamic" | "yarn" | "llama3", "factor": ..., ...}.
        relative_buckets, relative_distance: the table of `position="relative"` (T5).
        attention_scale: factor of the scores; None = 1 / √head_dim. T5 has 1.
        attention_sinks: one learned score per head that takes weight and gives nothing.
        token_types: size of the token-type (sentence A or B) table; 0 = none.
        embedding_norm: normalise the sum of embeddings (BERT, BART).
        final_norm: normalise after the last block; None = as the placement needs (not for post).
        pooler: `Encoder` has BERT's pooler, a dense layer with tanh on the first token.
        output_bias, output_scale: bias of the vocabulary logits; factor of the hidden states
            before them (T5: 1/√d).
        expert_capacity: how many times its fair share of tokens an expert takes in training
            before it drops some; None = it never drops.
        expert_balance, expert_z: weights of the two auxiliary losses of the router.
        expert_bias: balance by a bias on the router's choice instead of by a loss.
        pad_id: id of padding; None = no id is padding.
    """

    vocabulary_size: int
    target_vocabulary_size: int | None = None
    num_layers: int = 6
    num_encoder_layers: int | None = None
    hidden_dim: int = 512
    num_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_dim: int | None = None
    activation: str = "relu"
    gated: bool = False
    norm: str = "layer"
    norm_placement: str = "pre"
    norm_epsilon: float = 1e-5
    position: str = "sinusoidal"
    max_length: int = 512
    position_offset: int = 0
    position_layout: str | None = None
    rotary_base: float = 10000.0
    rotary_scaling: dict | None = None
    rotary_dim: int | None = None
    relative_buckets: int = 32
    relative_distance: int = 128
    window: int | tuple | None = None
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 2
    expert_capacity: float | None = None
    expert_balance: float = 0.01
    expert_z: float = 0.001
    expert_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    use_bias: bool = True
    qkv_bias: bool | None = None
    tie_embeddings: bool = True
    scale_embeddings: bool = False
    token_types: int = 0
    embedding_norm: bool = False
    final_norm: bool | None = None
    pooler: bool = False
    pooler_activation: str = "tanh"
    output_bias: bool = False
    output_scale: float | None = None
    pad_id: int | None = 0
    bos_id: int | None = None
    eos_id: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field.name, getattr(self, field.name)))
        _check_combinations(self)

    def __hash__(self):
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @classmethod
    def preset(cls, name: str, **changes) -> "Config":
        """The configuration of a known model, with `changes`; `kformer.presets()` lists them.

        A changed `vocabulary_size` is another vocabulary: the preset's special ids are dropped.
        """
        from kformer.zoo import PRESETS

        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        fields = dict(PRESETS[name])
        if "vocabulary_size" in changes:
            fields = {k: v for k, v in fields.items() if k not in ("pad_id", "bos_id", "eos_id")}
        return cls(**{**fields, **changes})

    def replace(self, **changes) -> "Config":
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """Plain values only, for JSON."""
        fields = dataclasses.asdict(self)
        if isinstance(self.window, tuple):
            fields["window"] = list(self.window)
        return fields

    @classmethod
    def from_dict(cls, fields: dict) -> "Config":
        """The inverse of `to_dict`; an unknown key is an error."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"Config has no field named {', '.join(unknown)}")
        return cls(**fields)

    def parameter_count(self, task: str, **arguments) -> int:
        """How many numbers the built model has, computed without building it: see `weights.py`."""
        from kformer.weights import parameter_count

        return parameter_count(self, task, **arguments)

    # What follows from the fields, so that every reader of a None asks in one place.

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_dim // self.num_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def inner_dim(self) -> int:
        return self.intermediate_dim or 4 * self.hidden_dim

    @property
    def encoder_layers(self) -> int:
        return self.num_encoder_layers or self.num_layers

    @property
    def target_size(self) -> int:
        return self.target_vocabulary_size or self.vocabulary_size

    @property
    def has_qkv_bias(self) -> bool:
        return self.use_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_final_norm(self) -> bool:
        return self.norm_placement != "post" if self.final_norm is None else self.final_norm

    def window_of(self, layer: int) -> int | None:
        """The window of one layer: a tuple repeats over the layers."""
        if isinstance(self.window, tuple):
            return self.window[layer % len(self.window)]
        return self.window


def check_whole(least, **values):
    """ValueError unless every value is a whole number of at least so much."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def checked(name, value):
    """One field's value in its plain Python type, or a ValueError with the field's rule."""
    if value is None and "None" in str(Config.__dataclass_fields__[name].type):
        return None
    if name in CHOICES:
        if value not in CHOICES[name]:
            rule = ", ".join(repr(choice) for choice in CHOICES[name] if choice)
            raise ValueError(f"{name} must be one of {rule}, got {value!r}")
        return value
    if name == "window":
        if not isinstance(value, (tuple, list)):
            return _whole("window", 1, 2**24, value)
        if not value:
            raise ValueError(f"window must not be empty, got {value!r}")
        return tuple(None if item is None else _whole("window", 1, 2**24, item) for item in value)
    if name == "rotary_scaling":
        return _scaling(value)
    if name in ("pad_id", "bos_id", "eos_id"):
        return _whole(name, 0, 2**24, value)
    if name in INTEGERS:
        return _whole(name, *INTEGERS[name], value)
    if name in REALS:
        return _real(name, *REALS[name], value)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _whole(name, lowest, highest, value):
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, got {value!r}")
    return int(value)


def _real(name, lowest, highest, low_ok, high_ok, value):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    above = value >= lowest if low_ok else value > lowest
    below = value <= highest if high_ok else value < highest
    if not (above and below):
        ends = f"{'[' if low_ok else '('}{lowest}, {highest}{']' if high_ok else ')'}"
        raise ValueError(f"{name} must be in {ends}, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        raise ValueError(f"{name} must be a number up to 1e308, got {value!r:.20}...") from None


def _scaling(value):
    if not isinstance(value, dict) or value.get("type") not in list(SCALINGS):
        rule = f"a dict with 'type' one of {', '.join(SCALINGS)}"
        raise ValueError(f"rotary_scaling must be {rule}, got {value!r}")
    kind = value["type"]
    needed, optional = SCALINGS[kind], OPTIONAL_SCALING.get(kind, ())
    missing = [key for key in needed if key not in value]
    unknown = sorted(set(value) - {"type", *needed, *optional})
    if missing or unknown:
        rule = f"{kind!r} takes {', '.join(needed + optional)}"
        raise ValueError(f"rotary_scaling: {rule}; missing {missing}, unknown {unknown}")
    for key in set(value) - {"type"}:
        lowest = 1.0 if key in ("factor", "original_max_length") else 0.0
        _real(f"rotary_scaling[{key!r}]", lowest, math.inf, lowest > 0, False, value[key])
    if kind == "llama3" and not value["low_freq_factor"] < value["high_freq_factor"]:
        raise ValueError(f"rotary_scaling: low_freq_factor must be below high, got {value!r}")
    return dict(value)


def _check_combinations(c: Config):
    """Rules about two fields at a time."""

    def need(holds, rule, *names):
        if not holds:
            shown = ", ".join(f"{name}={getattr(c, name)!r}" for name in names)
            raise ValueError(f"{rule}, got {shown}")

    whole_heads = c.head_dim is not None or c.hidden_dim % c.num_heads == 0
    rule = "hidden_dim must be a multiple of num_heads where head_dim is None"
    need(whole_heads, rule, "hidden_dim", "num_heads")
    rule = "num_heads must be a multiple of num_key_value_heads"
    need(c.num_heads % c.key_value_heads == 0, rule, "num_heads", "num_key_value_heads")
    if c.position == "rotary":
        turning = c.rotary_dim or c.head_width
        rule = "rotary positions turn an even number of dimensions, at most head_dim"
        need(turning % 2 == 0 and turning <= c.head_width, rule, "rotary_dim", "head_width")
    else:
        rule = "rotary_scaling and rotary_dim need position='rotary'"
        need(c.rotary_scaling is None and c.rotary_dim is None, rule, "position")
    wide = c.position == "sinusoidal" and c.hidden_dim > 3
    rule = "position_layout 'spread' needs position 'sinusoidal' and hidden_dim above 3"
    need(c.position_layout != "spread" or wide, rule, "position", "hidden_dim")
    rule = "position_offset needs position 'learned' or 'sinusoidal'"
    need(not c.position_offset or c.position in ("learned", "sinusoidal"), rule, "position")
    rule = "experts_per_token must be at most num_experts"
    few = c.experts_per_token <= c.num_experts
    need(not c.num_experts or few, rule, "experts_per_token", "num_experts")
    rule = "relative_buckets must be even, and half of it below relative_distance"
    fits = c.relative_buckets % 2 == 0 and c.relative_buckets // 2 < c.relative_distance
    need(c.position != "relative" or fits, rule, "relative_buckets", "relative_distance")
    for name in ("pad_id", "bos_id", "eos_id"):
        size = min(c.target_size, c.vocabulary_size) if name == "pad_id" else c.target_size
        value = getattr(c, name)
        need(
            value is None or value < size, f"{name} must be below the vocabulary size {size}", name
        )
