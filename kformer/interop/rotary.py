"""How config.json spells rotary positions, in the present form and in the earlier one."""

from kformer.interop.header import CheckpointError, brief

# kformer's name of a number of a scaling → the one in config.json
NUMBERS = {
    "factor": "factor",
    "original_max_length": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
TAKES = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_length"),
    "yarn": ("factor", "original_max_length", "beta_fast", "beta_slow", "attention_factor"),
}


def read_rotary(hf, head_dim, base=10000.0):
    """Fields of a Config from what config.json, `hf`, says of rotary positions.

    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    """
    scaling = hf.pop("rope_scaling", None)
    given = first(hf.pop("rope_parameters", None), scaling, {})
    if not isinstance(given, dict):
        raise CheckpointError(f"rope_parameters must be an object, got {brief(given)}")
    given = dict(given)
    base = first(given.pop("rope_theta", None), hf.pop("rope_theta", None), base)
    part = given.pop("partial_rotary_factor", hf.pop("partial_rotary_factor", None))
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    kind = kinds[0] if kinds else "default"
    if kind not in ("default", *TAKES) or any(other != kind for other in kinds):
        rule = f"rope_type must be one of default, {', '.join(TAKES)}"
        raise CheckpointError(f"{rule}, got {brief(kinds)}")
    fields = {"rotary_base": base}
    if part is not None and part != 1:
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part < 1:
            rule = "partial_rotary_factor must be a number above 0, at most 1"
            raise CheckpointError(f"{rule}, got {brief(part)}")
        fields["rotary_dim"] = int(head_dim * part)
    rest = given
    if kind != "default":
        fields["rotary_scaling"], rest = read_scaling(kind, given, hf)
    if rest := {key: value for key, value in rest.items() if value is not None}:
        rule = f"rope_type {kind!r} must come without {brief(sorted(rest))}"
        raise CheckpointError(f"{rule}, got {brief(rest)}")
    return fields


def first(*values):
    """The first one that is not None."""
    return next(value for value in values if value is not None)


def read_scaling(kind, given, hf):
    """kformer's rotary_scaling, and what is left of `given`."""
    scaling = {"type": kind}
    for name in TAKES[kind]:
        value = given.pop(NUMBERS[name], None)
        if value is not None:
            scaling[name] = value
    if kind in ("dynamic", "llama3", "yarn"):
        if kind == "dynamic":  # its own length is said twice, if at all
            given.pop("original_max_position_embeddings", None)
        scaling.setdefault("original_max_length", hf.get("max_position_embeddings"))
    if given.get("truncate") is True:  # as the paper has it
        del given["truncate"]
    return scaling, given


def write_rotary(config):
    """The inverse: "rope_parameters" and what goes with it."""
    out = {"rope_type": "default", "rope_theta": config.rotary_base}
    scaling = config.rotary_scaling
    if scaling:
        out["rope_type"] = scaling["type"]
        names = TAKES[scaling["type"]]
        out |= {NUMBERS[name]: scaling[name] for name in names if name in scaling}
    if config.rotary_dim and config.rotary_dim != config.head_width:
        out["partial_rotary_factor"] = config.rotary_dim / config.head_width
    length = scaling["original_max_length"] if out["rope_type"] == "dynamic" else config.max_length
    earlier = {key: value for key, value in out.items() if key != "rope_theta"}
    return {
        "rope_parameters": out,
        "rope_theta": config.rotary_base,  # once more, as transformers 4 reads it
        "rope_scaling": earlier if scaling else None,
        "max_position_embeddings": length,
    }
