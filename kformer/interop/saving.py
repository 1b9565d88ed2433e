"""kformer's models as checkpoints that `transformers` loads."""

import json

import numpy as np

from kformer import backend
from kformer.interop.checkpoint import Lazy, write
from kformer.interop.families import FAMILIES
from kformer.interop.family import difference
from kformer.interop.loading import MODELS
from kformer.interop.tokenizers import tokenizer_texts
from kformer.text import Tokenizer
from kformer.weights import path_in, weight_shapes


def to_hf(model, directory):
    """Writes a folder that `transformers` loads with `AutoModel...from_pretrained`.

    The family is the one whose Config says the same; a model that no family has is an error
    that names the parts without a counterpart. The folder appears whole or not at all.

    Args:
        model: one of kformer's models.
        directory: a new folder, an empty one, or an earlier export.
    """
    task = next((task for task, kind in MODELS.items() if type(model) is kind), None)
    if task is None:
        rule = f"model must be one of {', '.join(kind.__name__ for kind in MODELS.values())}"
        raise ValueError(f"{rule}, got {type(model).__name__}")
    weights = {path_in(model, v.path): v for v in model.variables if is_weight(v)}
    family = family_for(model, task)
    check_plain(model, task, weights)
    links = family.links(
        model.config, shapes_of(weights), task, family.base if task in family.heads else ""
    )
    texts = {"config.json": config_text(family, model, task)}
    if isinstance(model.tokenizer, Tokenizer):
        texts |= tokenizer_texts(model.tokenizer)
    write(directory, dict(tensors(family, links, weights)), texts)


def is_weight(variable):
    """What is learned; seeds, and what experts note of their load, are not."""
    return "float" in str(variable.dtype) and not variable.path.endswith("/statistics")


def shapes_of(weights):
    return {path: tuple(variable.shape) for path, variable in weights.items()}


def family_for(model, task):
    """The family whose Config means the same model; the error names the nearest one."""
    config, differing = model.config, {}
    for family in FAMILIES.values():
        if (
            task not in family.tasks
            or getattr(model, "causal", family.is_causal) != family.is_causal
        ):
            continue
        try:
            theirs = family.read_config(family.write_config(config, task), task)
            theirs = theirs.replace(pooler=config.pooler)  # weights say whether there is one
        except ValueError:  # not even its config.json can say it
            continue
        found = difference(config, theirs, task) | other_head(family, model)
        if not found:
            return family
        differing[family.model_type] = found
    name, found = min(differing.items(), key=lambda item: len(item[1]))
    parts = ", ".join(f"{part}={mine!r}" for part, (mine, _) in found.items())
    known = ", ".join(differing)
    rule = f"the parts of a model must be those of {known}"
    raise ValueError(f"{rule}; nearest is {name}, which has no {parts}")


def other_head(family, model):
    """How a classifier of texts makes one vector of a row, where the family makes it otherwise."""
    if not hasattr(model, "pooling"):
        return {}
    found = {}
    if model.pooling.mode != ("last" if family.is_causal else "first"):
        found["pooling"] = model.pooling.mode, None
    if not family.is_causal and not model.config.pooler:
        found["pooler"] = False, None
    return found


def check_plain(model, task, weights):
    """Every weight must be there as a number: no adapters beside it, no integers in its place."""
    arguments = {}
    if "classifier" in task:
        arguments = dict(num_classes=model.num_classes, causal=model.causal)
    if task == "text_classifier":
        arguments["pooling"] = model.pooling.mode
    expected, found = weight_shapes(model.config, task, **arguments), shapes_of(weights)
    if expected != found:
        wrong = sorted(set(expected.items()) ^ set(found.items()))
        rule = "weights must be plain numbers (merge adapters, and export before quantizing)"
        raise ValueError(f"{rule}, got {', '.join(dict.fromkeys(path for path, _ in wrong))[:300]}")


def config_text(family, model, task):
    out = family.write_config(model.config, task)
    if "classifier" in task:
        names = model.class_names or [f"LABEL_{i}" for i in range(model.num_classes)]
        out["id2label"] = {str(i): name for i, name in enumerate(names)}
        out["label2id"] = {name: i for i, name in enumerate(names)}
    return json.dumps(out, indent=2, ensure_ascii=False) + "\n"


def tensors(family, links, weights):
    """(name, Lazy) of every tensor: one is in memory at a time."""
    for link in links:
        for number, name in enumerate(link.tensors):

            def read(link=link, number=number):
                arrays = [backend.to_numpy(weights[path].value) for path in link.weights]
                return family.to_tensor(link, number, [np.asarray(a, "float32") for a in arrays])

            yield name, Lazy(link.shape, read)
