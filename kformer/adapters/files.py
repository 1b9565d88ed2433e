"""Adapters in files of their own, as PEFT has them: a few kilobytes beside a large model.

adapter_config.json           rank, alpha, which modules
adapter_model.safetensors     base_model.model.<module>.lora_A.weight (r, in), lora_B (out, r)
"""

import json

from kformer import backend
from kformer.adapters.lora import adapted, enable_lora, own_layers, own_weights
from kformer.interop.checkpoint import Checkpoint, read_config, write
from kformer.interop.header import CheckpointError, brief
from kformer.interop.loading import MODELS
from kformer.interop.saving import family_for
from kformer.layers.feedforward import Project
from kformer.models.shrinking import listed
from kformer.weights import path_in, weight_shapes

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
MAX_RANK = 2**16
TASKS = {
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_2_SEQ_LM",
    "TextClassifier": "SEQ_CLS",
    "TokenClassifier": "TOKEN_CLS",
}
# What PEFT knows beyond this, and what it must be here.
FIXED = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


def foreign_modules(model):
    """{path of a weight, as `path_in` has it: path of its module in Hugging Face}; what has no
    module of its own there, and all of a model that no family has, keeps kformer's names."""
    task = next((task for task, kind in MODELS.items() if type(model) is kind), None)
    try:
        family = None if task is None else family_for(model, task)
    except ValueError:  # as `to_hf` would say
        return {}
    if family is None:
        return {}
    shapes = weight_shapes(model.config, task, getattr(model, "num_classes", 2), "first")
    prefix = family.base if task in family.heads else ""
    links = family.links(model.config, shapes, task, prefix)
    alone = [link for link in links if len(link.weights) == len(link.tensors) == 1]
    return {link.weights[0]: link.tensors[0].rpartition(".")[0] for link in alone}


def save_adapters(model, folder):
    """Write the adapters of a model, and the heads of kformer's that train beside them, to a new
    folder, or over an earlier one."""
    modules = named_layers(model)
    layers = {name: layer for name, layer in modules.items() if has_adapters(layer)}
    if not layers:
        raise ValueError(f"save_adapters needs adapters, got {model.name} without any")
    heads = {name: layer for name, layer in modules.items() if is_head(layer)}
    tensors = {}
    for name, layer in layers.items():
        for tensor, weight in zip(adapter_names(name), adapters_of(layer), strict=True):
            tensors[tensor] = backend.to_numpy(weight).T
    for tensor, (weight, turned) in head_weights(heads).items():
        array = backend.to_numpy(weight)
        tensors[tensor] = array.T if turned else array
    first = next(iter(layers.values()))
    if any(
        (x.lora_rank, x.lora_alpha) != (first.lora_rank, first.lora_alpha) for x in layers.values()
    ):
        raise ValueError("save_adapters needs one rank and one alpha for all adapters, got several")
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(type(model).__name__),
        "r": first.lora_rank,
        "lora_alpha": first.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "target_modules": sorted(layers),
        "modules_to_save": sorted(heads) or None,
    }
    write(folder, tensors, {CONFIG: json.dumps(config, indent=2) + "\n"}, file=WEIGHTS)


def load_adapters(model, folder):
    """Read adapters into a model, which is given some if it has none.

    Those of another base model, and tensors that are missing, too many or of another shape, are
    one CheckpointError that lists them all, before anything has changed.

    Returns:
        The model, for convenience.
    """
    config = checked_config(folder)
    modules = named_layers(model)
    layers = targeted(modules, config)
    heads = saved_heads(modules, config)
    shapes = expected_shapes(layers, heads, config["r"])
    checkpoint = Checkpoint.open(folder, file=WEIGHTS)
    checkpoint.check(shapes)
    values = {name: checkpoint.read(name) for name in shapes}  # all of them, before any is set
    if not adapted(model):
        kernels = {layer._kernel.path for layer in layers.values()}
        saved = {weight.path for weight, _ in head_weights(heads).values()}
        kept = saved.__contains__ if saved else None
        enable_lora(model, config["r"], kernels.__contains__, config["lora_alpha"], kept)
    for name, layer in layers.items():
        layer.lora_alpha = config["lora_alpha"]
        for tensor, weight in zip(adapter_names(name), adapters_of(layer), strict=True):
            weight.assign(values[tensor].T)
    for tensor, (weight, turned) in head_weights(heads).items():
        weight.assign(values[tensor].T if turned else values[tensor])
    return model


def named_layers(model):
    """{module: layer} of all of kformer's layers that have weights of their own."""
    foreign, out = foreign_modules(model), {}
    for part in [part for root in own_layers(model) for part in root._flatten_layers()]:
        if weights := own_weights(part):
            path = weights[0].path
            known = foreign.get(path_in(model, path)) if foreign else None
            out[known or path.rpartition("/")[0].replace("/", ".")] = part
    return out


def has_adapters(layer):
    return isinstance(layer, Project) and layer.lora_enabled


def is_head(layer):
    return not has_adapters(layer) and any(weight.trainable for weight in own_weights(layer))


def adapter_names(module):
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def adapters_of(layer):
    return layer.lora_kernel_a, layer.lora_kernel_b


def head_weights(heads):
    """{tensor: (weight, whether it is turned round)}: kernels are (out, in), as in torch."""
    out = {}
    for module, layer in heads.items():
        for weight in own_weights(layer):
            is_kernel = weight.name == "kernel"
            out[f"{PREFIX}{module}.{'weight' if is_kernel else weight.name}"] = weight, is_kernel
    return out


def expected_shapes(layers, heads, rank):
    """{tensor: shape} of a whole file."""
    shapes = {}
    for module, layer in layers.items():
        a, b = adapter_names(module)
        shapes[a], shapes[b] = (rank, layer._kernel.shape[0]), (layer.units, rank)
    for tensor, (weight, turned) in head_weights(heads).items():
        shapes[tensor] = tuple(weight.shape)[::-1] if turned else tuple(weight.shape)
    return shapes


def checked_config(folder):
    """The settings of adapters, as far as kformer knows what they mean."""
    config = {"modules_to_save": None, **read_config(folder, CONFIG)}
    for name, allowed in FIXED.items():
        if config.get(name) not in allowed:
            rule = f"{name} of {CONFIG} must be {allowed[0]!r}"
            raise CheckpointError(f"{rule}, got {brief(config.get(name))}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{name} of {CONFIG} must be above 0, got {brief(value)}")
    if not isinstance(config["r"], int) or config["r"] > MAX_RANK:
        rule = f"r of {CONFIG} must be a whole number up to {MAX_RANK}"
        raise CheckpointError(f"{rule}, got {brief(config['r'])}")
    for name in ("target_modules", "modules_to_save"):
        value = config.get(name)
        if value is None and name == "modules_to_save":
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            rule = f"{name} of {CONFIG} must be a list of names of modules"
            raise CheckpointError(f"{rule}, got {brief(value)}")
    return config


def saved_heads(modules, config):
    """{module: layer} of the heads that the file has whole."""
    names = config["modules_to_save"] or []
    if lost := [name for name in names if name not in modules]:
        rule = f"modules_to_save of {CONFIG} must be layers of the model"
        raise CheckpointError(f"{rule}, got {listed(lost)}")
    return {name: modules[name] for name in names}


def targeted(modules, config):
    """{module: projection} that the file has adapters for: by whole names, or by their ends."""
    ends = tuple("." + name for name in config["target_modules"])
    names = [name for name, layer in modules.items() if isinstance(layer, Project)]
    found = {name: modules[name] for name in names if f".{name}".endswith(ends)}
    mine = [name for name in names if has_adapters(modules[name])]
    if not found:
        rule = f"target_modules of {CONFIG} must name some of {listed(names)}"
        raise CheckpointError(f"{rule}, got {brief(config['target_modules'])}")
    ranks = {modules[name].lora_rank for name in mine} - {config["r"]}
    if mine and (ranks or set(mine) != set(found)):
        rule = f"adapters of rank {config['r']} on {listed(list(found))} need a model with the same"
        raise CheckpointError(f"{rule} or none, got rank {ranks or config['r']} on {listed(mine)}")
    return found
