"""What a family of checkpoints is: one table that says how another library names the fields of a
Config and the parts of a model, read in both directions.

A *part* is the path of a layer as `kformer.weights` writes it, with {i} for the number of a block;
a *module* is what the other library calls it. Weights have suffixes of their own:

    kernel, embeddings, gamma, scale → weight        beta, bias → bias
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kformer.config import Config, checked
from kformer.interop.header import CheckpointError, brief

SUFFIXES = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "scale": "weight",
    "beta": "bias",
    "bias": "bias",
}
# The first of each is the one that is written.
ACTIVATIONS = {
    "relu": ("relu",),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "silu": ("silu", "swish"),
}
# Keys of config.json that say nothing about the numbers of a model: bookkeeping, initial values,
# rates of dropout that only some heads have, habits of generation, which kformer asks for by call.
SILENT = set(
    """
    _name_or_path _num_labels architectures attn_implementation bad_words_ids
    begin_suppress_tokens classif_dropout classifier_dropout cls_token_id decoder_layerdrop
    diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_layerdrop
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label init_std
    initializer_factor initializer_range is_gated_act is_llama_config label2id layerdrop
    length_penalty mask_token_id max_length max_new_tokens min_length model_type n_ctx
    name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past
    output_router_logits output_scores prefix pretraining_tp problem_type qa_dropout
    remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict
    return_dict_in_generate router_jitter_noise sep_token_id seq_classif_dropout
    summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tokenizer_class top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id use_bfloat16 use_cache
    """.split()
)
# What would make another model of it, wherever it is said.
NEUTRAL = {
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({},),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The table of a family.

    Args:
        model_type: its name in config.json.
        architectures: name of a class → the task it is for; the first of a task is written.
        fields: field of a Config → (key of config.json, value where the key is missing); a key
            without such a value must be there.
        always: fields of a Config that are the same for the whole family.
        must: key → the values that kformer's parts express; the first is written.
        silent: more keys without a say in the numbers.
        parts: part → module of the backbone. Several parts in one key lie side by side in one
            tensor; a module with {e} holds one expert.
        gated: parts that are called otherwise where the feed-forward has a gate.
        base: what precedes the modules of the backbone in a model with a head.
        heads: task → part → module of its head.
        same: modules that hold the same tensor, the one that is written first.
        transposed: kernels of the backbone are stored as (out, in); those of heads always are.
        shift: norms are stored less this.
        ignored: regular expressions of tensors that say nothing.
        read, write: what a table cannot say: functions of (config.json, fields), which takes out
            what it has read, and of (config, task), which gives more of config.json.
    """

    model_type: str
    architectures: dict
    fields: dict
    always: dict = field(default_factory=dict)
    must: dict = field(default_factory=dict)
    silent: tuple = ()
    parts: dict
    gated: dict = field(default_factory=dict)
    base: str = ""
    heads: dict = field(default_factory=dict)
    same: tuple = ()
    transposed: bool = True
    shift: float = 0.0
    ignored: tuple = (r".*\.inv_freq", r".*\.position_ids")
    read: Callable | None = None
    write: Callable | None = None

    @property
    def tasks(self):
        return tuple(dict.fromkeys(self.architectures.values()))

    @property
    def is_causal(self):
        return "causal_lm" in self.tasks

    def read_config(self, hf, task, ignore=()):
        """The Config of the object in config.json; what it does not know, it refuses."""
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        rest = {key: value for key, value in hf.items() if key not in ignore}
        fields = dict(self.always)
        for name, (key, *default) in self.fields.items():
            if rest.get(key) is None and not default:
                raise CheckpointError(f"config.json must say {key!r}, got {brief(sorted(hf))}")
            value = rest.pop(key, *default)
            if name in ("bos_id", "eos_id") and isinstance(value, list) and value:
                value = [checked(name, item) for item in value][0]  # a Config has one
            if name == "activation":
                value = read_activation(key, value)
            missing = value is None and default == [None]
            fields[name] = None if missing else checked(name, value)
        if self.read is not None:
            self.read(rest, fields)
        for key, allowed in (NEUTRAL | self.must).items():
            value = rest.pop(key, allowed[0])
            if not any(value == one and type(value) is type(one) for one in allowed):
                rule = f"{self.model_type}: {key} must be {' or '.join(map(repr, allowed))}"
                raise CheckpointError(f"{rule}, got {brief(value)}")
        if unknown := sorted(set(rest) - SILENT - set(self.silent)):
            rule = f"config.json of {self.model_type} must have known keys only"
            hint = "ignore=[...] passes over keys that do not change the model"
            raise CheckpointError(f"{rule}, got {brief(unknown)}; {hint}")
        for name in ("pad_id", "bos_id", "eos_id"):  # what the vocabulary has not never occurs
            if isinstance(fields[name], int) and fields[name] >= fields["vocabulary_size"]:
                fields[name] = None
        return Config(**fields)

    def write_config(self, config, task):
        """config.json of a Config: the inverse, where there is one."""
        out = {"model_type": self.model_type}
        out["architectures"] = [next(a for a, t in self.architectures.items() if t == task)]
        for key, allowed in self.must.items():
            out[key] = allowed[0]
        full = resolved(config)
        for name, (key, *_) in self.fields.items():
            value = full[name]
            out[key] = ACTIVATIONS[value][0] if name == "activation" else value
        return out | (self.write(config, task) if self.write is not None else {})

    def links(self, config, shapes, task, prefix):
        """What corresponds to what: [Link]. A weight without a counterpart is an error.

        Args:
            shapes: path → shape, of `weight_shapes`.
            prefix: what precedes the modules of the backbone.
        """
        table = {}
        backbone = self.parts | (self.gated if config.gated else {})
        for parts, module in backbone.items():
            table |= entries(parts, prefix + module, self.transposed)
        for part, module in self.heads.get(task, {}).items():
            table |= entries(part, module, True)
        links, missing = {}, []
        for path, shape in shapes.items():
            link = self.link(table, path, shape)
            if link is None:
                missing.append(path)
            else:
                links.setdefault(link.tensors, link)
        if missing:
            rule = f"every weight must have a counterpart in {self.model_type}"
            raise ValueError(f"{rule}, got {brief(missing)}")
        return list(links.values())

    def link(self, table, path, shape):
        number = re.match(r"(?:\w+/)?block_(\d+)/", path)
        pattern = path.replace(f"block_{number[1]}/", "block_{i}/", 1) if number else path
        i = number[1] if number else None
        part, _, leaf = pattern.rpartition("/")
        if pattern in table:  # a weight by itself: a row, or a tensor for each expert
            _, module, _ = table[pattern]
            if "{e}" not in module:
                return Link((path,), (module,), (1, *shape), "row")
            names = tuple(module.format(i=i, e=e) + ".weight" for e in range(shape[0]))
            return Link((path,), names, tuple(reversed(shape[1:])), "expert")
        if part not in table:
            return None
        parts, module, transposed = table[part]
        paths = tuple(f"{p.replace('{i}', i or '')}/{leaf}" for p in parts)
        name = f"{module.format(i=i)}.{SUFFIXES[leaf]}"
        shape = (*shape[:-1], shape[-1] * len(parts))
        if leaf == "kernel" and transposed:
            return Link(paths, (name,), tuple(reversed(shape)), "transposed")
        return Link(paths, (name,), shape, leaf)

    def to_weights(self, link, tensors):
        """The arrays of link.weights from those of link.tensors."""
        if link.kind == "expert":
            return [np.stack([tensor.T for tensor in tensors])]
        (tensor,) = tensors
        if link.kind == "transposed":
            tensor = tensor.T
        if link.kind == "row":
            tensor = tensor[0]
        if link.kind == "scale" and self.shift:
            tensor = tensor + np.float32(self.shift)
        return np.split(tensor, len(link.weights), axis=-1)

    def to_tensor(self, link, number, weights):
        """The array of link.tensors[number] from those of link.weights."""
        if link.kind == "expert":
            return weights[0][number].T
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights, axis=-1)
        if link.kind == "scale" and self.shift:
            weight = weight - np.float32(self.shift)
        if link.kind == "row":
            return weight[None]
        return weight.T if link.kind == "transposed" else weight


class Link(NamedTuple):
    """What corresponds: one weight and one tensor, or several of one kind and one of the other."""

    weights: tuple  # paths
    tensors: tuple  # names
    shape: tuple  # of each tensor
    kind: str  # suffix of the weights, or "transposed", "expert", "row"


def entries(parts, module, transposed):
    """part → (all parts of the same tensor, module, kernels are stored as (out, in))."""
    parts = tuple(parts.split())
    return {part: (parts, module, transposed) for part in parts}


def read_activation(key, value):
    for name, spellings in ACTIVATIONS.items():
        if value in spellings:
            return name
    known = ", ".join(spelling for names in ACTIVATIONS.values() for spelling in names)
    raise CheckpointError(f"{key} must be one of {known}, got {brief(value)}")


def resolved(config):
    """The fields of a Config with all that follows from them filled in."""
    full = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return full | dict(
        num_encoder_layers=config.encoder_layers,
        num_key_value_heads=config.key_value_heads,
        head_dim=config.head_width,
        intermediate_dim=config.inner_dim,
        qkv_bias=config.has_qkv_bias,
        final_norm=config.has_final_norm,
        attention_scale=config.attention_scale or config.head_width**-0.5,
        rotary_dim=config.rotary_dim or config.head_width,
        output_scale=config.output_scale or 1.0,
    )


# Fields that decide how a model is trained and nothing else.
TRAINING = (
    "dropout", "attention_dropout", "expert_capacity", "expert_balance", "expert_z",
)  # fmt: skip


def meaning(config, task):
    """The fields of a Config that have a say in what a model for this task computes."""
    full = resolved(config)
    full["window"] = tuple(config.window_of(i) for i in range(config.num_layers))
    dead = {*TRAINING, "pooler"}  # weights say whether there is one
    if config.position != "rotary":
        dead |= {"rotary_base", "rotary_scaling", "rotary_dim"}
    if config.position != "relative":
        dead |= {"relative_buckets", "relative_distance"}
    if config.position != "learned":
        dead |= {"max_length"}
    if config.position not in ("sinusoidal", "rotary"):
        dead |= {"position_layout"}
    elif config.position_layout is None:
        full["position_layout"] = "interleaved" if config.position == "sinusoidal" else "half"
    if not config.num_experts:
        dead |= {"experts_per_token", "expert_bias"}
    if not task.startswith("seq2seq"):
        dead |= {"num_encoder_layers", "target_vocabulary_size"}
    if task not in ("causal_lm", "seq2seq_lm"):
        dead |= {"output_bias"}
    if task not in ("causal_lm", "seq2seq_lm", "masked_lm"):
        dead |= {"output_scale", "tie_embeddings"}
    if task not in ("encoder", "text_classifier") or not config.pooler:
        dead |= {"pooler_activation"}
    kept = {name: value for name, value in full.items() if name not in dead}
    return {name: round(v, 12) if isinstance(v, float) else v for name, v in kept.items()}


def difference(first, second, task):
    """{field: (one value, the other)} where two Configs mean different models."""
    a, b = meaning(first, task), meaning(second, task)
    names = sorted(set(a) | set(b))
    return {
        name: (a.get(name), b.get(name)) for name in names if not same(a.get(name), b.get(name))
    }


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b
