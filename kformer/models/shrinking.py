"""What `quantize` of a model needs: which weights, and whether it can be done."""

import re

import keras

from kformer import backend
from kformer.layers.embedding import Table
from kformer.layers.feedforward import Project
from kformer.models.inputs import describe

CALIBRATED = ("gptq", "awq")  # they look at what comes into each block, one after the other


def renew(model):
    """After its weights were changed for others: what was compiled is forgotten, and a compiled
    model is compiled anew, with an optimizer that starts from nothing."""
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            part.train_function = part.test_function = part.predict_function = None
            getattr(part, "_functions", {}).clear()
    if model.compiled:
        model.compile_from_config(model.get_compile_config())


def chosen(model, mode, config, filters):
    """The layers that `quantize` is about to change; ValueError, before anything has changed,
    that names those that cannot be."""
    mode = getattr(config, "mode", None) if mode is None else mode
    layers = [part for part in leaves(model) if part.shrinks and passes(part, filters)]
    if mode in CALIBRATED:
        stack = calibrated_stack(model, mode)
        inside = {id(part) for block in stack.blocks for part in leaves(block)}
        layers = [part for part in layers if id(part) in inside and isinstance(part, Project)]
        refuse_one_sign(layers, mode, config)
    if mode == "float8":
        layers = [part for part in layers if isinstance(part, Project)]
    if adapted := [part.path for part in layers if part.lora_enabled]:
        rule = "quantize comes before enable_lora, or after merge_lora"
        raise ValueError(f"{rule}, got adapters on {listed(adapted)}")
    if done := [part.path for part in layers if part.quantization_mode]:
        raise ValueError(f"quantize must find weights in float, got quantized {listed(done)}")
    if not layers:
        raise ValueError(f"filters must leave a layer to quantize, got {filters!r}, which do not")
    return {id(part) for part in layers}


def leaves(layer):
    return [part for part in layer._flatten_layers() if isinstance(part, (Project, Table))]


def passes(layer, filters):
    """Keras' rule: a regular expression for names, a list of them, or a function of the layer."""
    if filters is None or callable(filters):
        return filters is None or filters(layer)
    patterns = [filters] if isinstance(filters, str) else filters
    return any(re.search(pattern, layer.name) for pattern in patterns)


def calibrated_stack(model, mode):
    """The one whose blocks are fed by nothing but the block before."""
    if mode == "awq" and keras.backend.backend() == "tensorflow":  # 4 times the error of others
        raise ValueError("awq needs JAX or torch, where Keras' search finds scales, got tensorflow")
    stacks = [part for part in model._flatten_layers() if hasattr(part, "blocks")]
    if len(stacks) != 1:
        rule = f"{mode} needs a model of one stack of blocks"
        raise ValueError(f"{rule}, got {listed([part.path for part in stacks])}")
    if stacks[0].bias is not None:
        rule = f"{mode} needs blocks that need nothing but what comes out of the one before"
        raise ValueError(f"{rule}, got position={model.config.position!r}, a bias they share")
    return stacks[0]


def refuse_one_sign(layers, mode, config):
    """Where all numbers of a group are positive, Keras' zero of the group is below 0, which it
    stores as 255: the column would be lost."""
    if getattr(config, "symmetric", False):
        return
    wrong = []
    for layer in layers:
        kernel = backend.to_numpy(layer._kernel)
        size = len(kernel) if config.group_size == -1 else config.group_size
        groups = [kernel[at : at + size] for at in range(0, len(kernel), size)]
        if any((group.min(axis=0) > 0).any() for group in groups):
            wrong.append(layer._kernel.path)
    if wrong:
        rule = f"{mode} needs numbers of both signs in every group: take a larger group_size"
        raise ValueError(f"{rule}, got positive ones alone in {listed(wrong)}")


def structure(model, mode):
    """What Keras calibrates: ids → what the first block sees, then the blocks."""
    stack = calibrated_stack(model, mode)

    def embed(ids):
        return stack.embed(ids, describe(ids, model.config))

    return {"pre_block_layers": [embed], "sequential_blocks": stack.blocks}


def listed(paths, most=5):
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
