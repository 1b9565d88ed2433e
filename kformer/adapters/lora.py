"""LoRA: fine-tuning by two thin matrices beside each of some kernels, while all else is frozen.

y = x · W + α/r · (x · A) · B            A: (in, r), random;  B: (r, out), zeros at first
"""

import re

import keras

from kformer.layers.attention import MultiHeadAttention
from kformer.layers.experts import MixtureOfExperts
from kformer.layers.feedforward import Project
from kformer.models.shrinking import listed, renew
from kformer.models.tasks import Classifier

BASES = (None, "int8", "int4")  # what a kernel with adapters may be stored as


def enable_lora(model, rank, target=None, alpha=None, trainable=None):
    """Give kernels adapters, which then are all that trains; the rest stays as it is, bit by bit.

    It works on kformer's models and on models of your own with kformer's layers in them, whose
    other layers are left as they are. Kernels in int8 or int4 do as well (QLoRA). A compiled
    model is compiled anew, and its optimizer starts from nothing.

    Args:
        model: a built model.
        rank: r, the width of the adapters.
        target: kernels of projections, by a regular expression that is searched for in the path
            of the weight, or by a function of that path; None = queries and values of every
            attention.
        alpha: α; None = r.
        trainable: weights that train as well, chosen like `target`, with all of the layer that
            holds them; None = the head of a classifier.
    Returns:
        The model, for convenience.
    """
    check_numbers(rank, alpha)
    layers = chosen(model, target)
    refuse_unable(model, layers)
    kept = [*layers, *heads(model, trainable)]
    for root in own_layers(model):
        freeze(root, {id(layer) for layer in kept})
    for layer in layers:
        layer.enable_lora(rank, lora_alpha=rank if alpha is None else alpha)
    renew(model)
    return model


def merge_lora(model):
    """Fold the adapters into their kernels: plain layers that give the same, and train again.

    Kernels in int8 or int4 that have adapters become float: rounding would undo what was learned.
    """
    layers = adapted(model)
    if not layers:
        raise ValueError(f"merge_lora needs adapters, got {model.name} without any")
    for layer in layers:
        layer.merge_lora()
    for part in [part for root in own_layers(model) for part in root._flatten_layers()]:
        part.trainable = True  # each by itself: on TensorFlow one that is already tells no parts
    renew(model)
    return model


def adapted(model):
    """The projections that have adapters."""
    return [layer for layer in projections(model) if layer.lora_enabled]


def projections(model):
    return [part for part in model._flatten_layers() if isinstance(part, Project)]


def kernel_path(layer):
    return layer._kernel.path


def check_numbers(rank, alpha):
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number above 0, got {rank!r}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if alpha is not None and not (is_number and alpha > 0):
        raise ValueError(f"alpha must be a number above 0, got {alpha!r}")


def matcher(rule):
    """A function of paths, from one or from a regular expression."""
    if callable(rule):
        return rule
    try:
        return re.compile(rule).search
    except (TypeError, re.error) as error:
        rule = f"weights must be chosen by a regular expression or a function, got {rule!r}"
        raise ValueError(f"{rule}: {error}") from None


def chosen(model, target):
    """The projections whose kernels get adapters."""
    layers = projections(model)
    if not model.built or not layers:
        raise ValueError(f"enable_lora needs a built model with projections, got {model.name}")
    paths = [kernel_path(layer) for layer in layers]
    if target is None:
        attentions = [p for p in model._flatten_layers() if isinstance(p, MultiHeadAttention)]
        return [layer for attention in attentions for layer in (attention.query, attention.value)]
    matches = matcher(target)
    if cubes := [path for path in other_matrices(model, layers) if matches(path)]:
        rule = "target must match kernels of projections, which are 2-D"
        raise ValueError(
            f"{rule}, got {listed(cubes)} (experts, and layers that are not kformer's)"
        )
    found = [layer for layer, path in zip(layers, paths, strict=True) if matches(path)]
    if not found:
        raise ValueError(f"target must match a kernel of {listed(paths)}, got {target!r}")
    return found


def other_matrices(model, layers):
    """Paths of what looks like a kernel and can have no adapters."""
    for part in model._flatten_layers():
        if isinstance(part, MixtureOfExperts):
            cubes = part.up, part.gate, part.down
            yield from (cube.path for cube in cubes if cube is not None)
        elif isinstance(part, (keras.layers.Dense, keras.layers.EinsumDense)):
            if part not in layers and part.built:
                yield part.path + "/kernel"


def refuse_unable(model, layers):
    if done := [kernel_path(layer) for layer in adapted(model)]:
        rule = "adapters are given once: merge_lora first"
        raise ValueError(f"{rule}, got adapters on {listed(done)}")
    modes = sorted({str(layer.quantization_mode) for layer in layers} - {str(m) for m in BASES})
    if modes:
        rule = "adapters need kernels in float, int8 or int4"
        raise ValueError(f"{rule}, got {', '.join(modes)}")


def heads(model, trainable):
    """The layers without adapters that train."""
    if trainable is None:
        parts = model._layers if isinstance(model, Classifier) else []
        return [part for part in parts if part is not model.backbone]
    matches = matcher(trainable)
    owners = [part for root in own_layers(model) for part in root._flatten_layers()]
    paths = {weight.path: part for part in owners for weight in own_weights(part)}
    found = [part for path, part in paths.items() if matches(path)]
    if not found:
        rule = f"trainable must match a weight of {listed(list(paths))}"
        raise ValueError(f"{rule}, got {trainable!r}")
    return found


def own_weights(layer):
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_layers(model):
    """kformer's layers at the top of a model, or the model itself if it is kformer's."""
    if keras.saving.get_registered_name(type(model)).startswith("kformer>"):
        return [model]
    return [layer for part in model._layers for layer in own_layers(part)]


def freeze(root, kept):
    """Nothing below trains but the layers in `kept`, by id. What contains one of them counts as
    trainable, unless it has weights of its own."""
    for part in root._flatten_layers():  # from the top, as a layer says it to all its parts
        around = any(id(layer) in kept for layer in part._flatten_layers())
        part.trainable = id(part) in kept or (around and not part._trainable_variables)
