"""Checkpoints of the Hugging Face hub as kformer's models.

In this order, so that what is wrong is found before anything is allocated: the folder, its
config.json, the Config of its family, the headers of its files, the names and shapes that this
Config needs. Then the model is made, and each weight is read as its variable comes to be.
"""

import re
from typing import NamedTuple

import keras
import numpy as np

from kformer import models
from kformer.config import check_whole
from kformer.interop.checkpoint import MAX_TENSORS, Checkpoint, read_config
from kformer.interop.families import FAMILIES
from kformer.interop.family import SUFFIXES
from kformer.interop.header import CheckpointError, brief, refusing
from kformer.interop.hub import folder_of
from kformer.interop.tokenizers import read_tokenizer
from kformer.weights import path_in, weight_shapes

MAX_CLASSES = 2**16
MODELS = {
    "encoder": models.Encoder,
    "decoder": models.Decoder,
    "seq2seq": models.Seq2Seq,
    "text_classifier": models.TextClassifier,
    "token_classifier": models.TokenClassifier,
    "masked_lm": models.MaskedLM,
    "causal_lm": models.CausalLM,
    "seq2seq_lm": models.Seq2SeqLM,
}


def from_hf(source, task=None, *, num_classes=None, class_names=None, dtype=None, ignore=(),
            allow_nonfinite=False):  # fmt: skip
    """A model from a folder with config.json and safetensors files, or from an id of the hub.

        model = kformer.from_hf("path/to/checkpoint")
        model = kformer.from_hf("path/to/encoder", task="text_classifier", num_classes=3)

    Args:
        source: a folder, or an id such as "owner/name", which `huggingface_hub` downloads.
        task: "encoder", "masked_lm", "text_classifier", "token_classifier", "decoder",
            "causal_lm", "seq2seq" or "seq2seq_lm"; None = what the checkpoint was saved for.
        num_classes, class_names: of a new head for a classifier; None = the checkpoint's own.
        dtype: dtype policy of the model, "bfloat16" say; None = Keras' default.
        ignore: keys of config.json that are passed over although kformer does not know them.
        allow_nonfinite: take NaN and infinity among the weights.
    """
    with refusing():
        folder = folder_of(source)
        hf = read_config(folder)
        family = family_of(hf)
        task = check_task(family, hf, task)
        config = without_pad(family.read_config(hf, task, ignore), task)
        head = head_of(family, task, hf, num_classes, class_names)
        plan = Plan(family, config, task, Checkpoint.open(folder, allow_nonfinite), head)
        config, tokenizer = with_tokenizer(plan.config, folder)
    given = dict(tokenizer=tokenizer, dtype=dtype, **plan.arguments)
    return made_with(plan.values(), lambda: MODELS[task](config, **given))


def without_pad(config, task):
    """Where padding has the id that ends texts, taking it for padding would hide their ends.
    Classifiers are told by it where a text ends."""
    if task in ("causal_lm", "decoder") and config.pad_id in (config.bos_id, config.eos_id):
        return config.replace(pad_id=None)
    return config


def with_tokenizer(config, folder):
    """The config and the folder's tokenizer, if it has one; their special ids agree."""
    ids = {name: getattr(config, name) for name in ("pad_id", "bos_id", "eos_id")}
    tokenizer = read_tokenizer(folder, config.vocabulary_size, **ids)
    if tokenizer is not None and config.pad_id is None:
        config = config.replace(pad_id=tokenizer.pad_id)
    return config, tokenizer


def family_of(hf):
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"model_type must be one of {', '.join(FAMILIES)}, got {brief(kind)}")
    return FAMILIES[kind]


def check_task(family, hf, task):
    """The task that was asked for, or else that of the class in config.json."""
    if task is not None and task not in family.tasks:
        raise ValueError(f"task must be one of {', '.join(family.tasks)}, got {task!r}")
    names = hf.get("architectures")
    if task is None:
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        if not isinstance(name, str) or name not in family.architectures:
            rule = (
                f"architectures must be one of {', '.join(family.architectures)}, or task= be given"
            )
            raise CheckpointError(f"{rule}, got {brief(names)}")
        task = family.architectures[name]
    return task


class Head(NamedTuple):
    """Arguments of a classifier, and whether its weights are new ones."""

    arguments: dict
    is_new: bool = False

    def sizes(self):
        return {key: value for key, value in self.arguments.items() if key != "class_names"}


def head_of(family, task, hf, num_classes, class_names):
    """The Head that was asked for, or the checkpoint's own."""
    if "classifier" not in task:
        if num_classes is not None or class_names is not None:
            raise ValueError(f"num_classes must be left out for task={task!r}, got {num_classes!r}")
        return Head({})
    is_new = num_classes is not None or class_names is not None
    if not is_new:
        class_names = class_names_in(hf)
    number = len(class_names) if num_classes is None else num_classes
    arguments = dict(num_classes=number, class_names=class_names)
    arguments["causal"] = family.is_causal
    if task == "text_classifier":
        arguments["pooling"] = "last" if family.is_causal else "first"
    return Head(arguments, is_new)


def class_names_in(hf):
    """The names of its classes that config.json has, or those that stand for them."""
    names, number = hf.get("id2label"), hf.get("num_labels", 2)
    check_whole(2, num_labels=number)
    if names is None:
        if number > MAX_CLASSES:
            raise CheckpointError(f"num_labels must be at most {MAX_CLASSES:,}, got {number}")
        return [f"LABEL_{i}" for i in range(number)]
    numbers = [str(i) for i in range(len(names))] if isinstance(names, dict) else []
    wrong = len(numbers) < 2 or set(names) != set(numbers)
    if wrong or not all(isinstance(name, str) for name in names.values()):
        rule = "id2label must name two classes or more, 0, 1, 2, ..."
        raise CheckpointError(f"{rule}, got {brief(names)}")
    return [names[i] for i in numbers]


def check_number(shapes):
    """An expert is a tensor, and config.json may say that there are millions."""
    number = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes.values())
    if number > MAX_TENSORS:
        rule = f"config.json must say a model of at most {MAX_TENSORS:,} tensors"
        raise CheckpointError(f"{rule}, got {number:,}")


class Plan:
    """Which tensor goes where, settled before anything is made.

    Args:
        family, config, task: whose tensors, and what they are for.
        checkpoint: what is there.
        head: arguments of a classifier, as `head_of` gives them.
    """

    def __init__(self, family, config, task, checkpoint, head):
        self.family, self.checkpoint, self.arguments = family, checkpoint, head.arguments
        there = checkpoint.tensors
        self.prefix = family.base if any(name.startswith(family.base) for name in there) else ""
        has_pooler = f"{self.pooler_module(task)}.weight" in there
        pools = task == "text_classifier" and not family.is_causal
        pools = pools or task == "encoder" and has_pooler
        self.config = config.replace(pooler=pools)
        shapes = weight_shapes(self.config, task, **head.sizes())
        if head.is_new:
            fresh = ("classifier/",) if has_pooler else ("classifier/", "pooler/")
            shapes = {p: shape for p, shape in shapes.items() if not p.startswith(fresh)}
        check_number(shapes)
        self.links = family.links(self.config, shapes, task, self.prefix)
        expected = {name: link.shape for link in self.links for name in link.tensors}
        self.stand_ins = self.find_stand_ins(expected)
        expected = {self.stand_ins.get(name, name): shape for name, shape in expected.items()}
        checkpoint.check(expected, ignore=self.passed_over())

    def pooler_module(self, task):
        own = self.family.heads.get(task, {}).get("pooler")
        return own or self.prefix + self.family.parts.get("pooler", "?")

    def find_stand_ins(self, expected):
        """Tensors that go by several names: {the expected one: the one that is there}. Where
        several are there, they must be equal."""
        stand_ins, there = {}, self.checkpoint.tensors
        for group in self.family.same:
            base = self.family.base
            group = group if self.prefix else [name.removeprefix(base) for name in group]
            main = next((name for name in group if name in expected), None)
            others = [name for name in group if name in there and name not in expected]
            if not self.config.tie_embeddings:
                others = [name for name in others if not self.is_head(name)]
            if main is None or not others:
                continue
            if main not in there:
                stand_ins[main] = main = others.pop(0)
            for other in others:
                self.refuse_unequal(main, other)
        return stand_ins

    def refuse_unequal(self, main, other):
        first, second = (self.checkpoint.read(name) for name in (main, other))
        if not np.array_equal(first, second):
            raise CheckpointError(
                f"{other} must be equal to {main}, to which config.json ties it, got other numbers"
            )

    def is_head(self, name):
        return any(re.fullmatch(pattern, name) for pattern in self.head_patterns())

    def head_patterns(self):
        """Regular expressions of the tensors of all heads of the family."""
        modules = [module for head in self.family.heads.values() for module in head.values()]
        if "pooler" in self.family.parts:
            modules.append(self.prefix + self.family.parts["pooler"])
        suffixes = "|".join(set(SUFFIXES.values()))
        return [rf"{re.escape(module)}(\.({suffixes}))?" for module in modules]

    def passed_over(self):
        """Patterns of what may be there and is not read: other heads, other names, buffers."""
        base, tied = self.family.base, self.config.tie_embeddings
        names = [name for group in self.family.same for name in group]
        names += [name.removeprefix(base) for name in names]
        names = [re.escape(name) for name in names if tied or not self.is_head(name)]
        return [*self.family.ignored, *names, *self.head_patterns()]

    def values(self):
        """{path of a weight: function that reads its value}."""
        kept = {}

        def reader(link, number):
            def read():
                if link not in kept:
                    names = (self.stand_ins.get(name, name) for name in link.tensors)
                    tensors = [self.checkpoint.read(name) for name in names]
                    kept[link] = [len(link.weights), self.family.to_weights(link, tensors)]
                kept[link][0] -= 1
                value = kept[link][1][number]
                if kept[link][0] == 0:
                    del kept[link]
                return value

            return read

        return {
            path: reader(link, number)
            for link in self.links
            for number, path in enumerate(link.weights)
        }


def made_with(values, make):
    """make(), a model whose weights begin with these values and not with random numbers.

    Inside of a `StatelessScope` Keras makes variables without values; where it ends, it gives
    every one its initial value, one after the other: here, what is read in this moment.
    """
    errors = []

    def initializer(read):
        def give(shape, dtype=None):
            try:
                if not errors:
                    return keras.ops.convert_to_tensor(read(), dtype)
            except BaseException as error:  # Keras must come to the end of its list, or it stays
                errors.append(error)
            return keras.ops.zeros(shape, dtype)

        return give

    with keras.StatelessScope():
        model = make()
        found = {path_in(model, variable.path): variable for variable in model.variables}
        for path, read in values.items():
            found[path]._initializer = initializer(read)
    if errors:
        raise errors[0]
    return model
