"""How kformer's classes are written down and read again.

`Composite` writes what was done to the parts of a layer since it was made: quantized, given
adapters, frozen. `Configured` adds the `Config` that models and blocks are built from; all other
layers take plain arguments, which Keras writes. And a file of weights for another model is refused.
"""

import contextlib
import contextvars

import h5py
import keras

from kformer.config import Config

register = keras.saving.register_keras_serializable(package="kformer")


def child_policy(layer):
    """The dtype a composite hands to its children: a name where a name says it all.

    A policy object would switch off Keras' automatic `get_config` of the child; a quantized or
    mapped policy has no name that says it all, so the object itself is passed.
    """
    return spelled(layer.dtype_policy)


def spelled(policy):
    mapped = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return policy if mapped or policy.quantization_mode else policy.name


def traced_spec(layer, *args, **kwargs):
    """`compute_output_spec` by tracing `call`, whatever number of outputs it has.

    While tracing on torch, Keras forgets to cast weights in mixed precision: the shapes are
    right, the dtypes are set here.
    """

    def in_compute_dtype(x):
        floating = keras.backend.is_float_dtype(x.dtype)
        return keras.KerasTensor(x.shape, layer.compute_dtype if floating else x.dtype)

    spec = keras.Operation.compute_output_spec(layer, *args, **kwargs)
    return keras.tree.map_structure(in_compute_dtype, spec)


_postponed = contextvars.ContextVar("kformer_postponed", default=False)


def build_is_postponed() -> bool:
    """True while a model is made of whose parts more is known than their constructors say."""
    return _postponed.get()


@contextlib.contextmanager
def postponed_build():
    token = _postponed.set(True)
    try:
        yield
    finally:
        _postponed.reset(token)


def parts_of(layer, prefix=""):
    """(path from the layer down, part, what it is a part of), parents before their parts."""
    for part in layer._layers:
        yield prefix + part.name, part, layer
        yield from parts_of(part, f"{prefix}{part.name}/")


def changes_of(part, parent):
    """What was done to a part since its constructor: what `change` does again."""
    changes, mode = {}, part.dtype_policy.quantization_mode
    if mode is not None:
        changes["dtype"] = keras.dtype_policies.serialize(part.dtype_policy)
    if mode in ("int8", "int4"):  # the others' settings are their data
        config = getattr(part, "quantization_config", None)
        changes["quantization_config"] = keras.saving.serialize_keras_object(config)
    if getattr(part, "lora_enabled", False):
        changes["lora"] = [part.lora_rank, part.lora_alpha]
    if part.trainable != parent.trainable:
        changes["trainable"] = part.trainable
    return changes


def change(part, changes):
    """Before the part makes its weights, so that none is made in vain."""
    if "dtype" in changes:
        part.dtype_policy = keras.dtype_policies.deserialize(changes["dtype"])
    if "quantization_config" in changes:
        config = changes["quantization_config"]
        part.quantization_config = keras.saving.deserialize_keras_object(config)
    if "lora" in changes:
        part.lora_rank, part.lora_alpha = changes["lora"]
    if "trainable" in changes:
        part.trainable = changes["trainable"]


class Composite:
    """Mixin of layers that are made of layers: `get_config` and `from_config`, with what was done
    to the parts. Without it, a quantized layer inside of another could not be loaded, adapters
    would be lost, and what was frozen would train again."""

    def get_config(self):
        config = super().get_config()
        changed = {path: changes_of(part, parent) for path, part, parent in parts_of(self)}
        changed = {path: changes for path, changes in changed.items() if changes}
        return {**config, "parts": changed} if changed else config

    get_config._is_default = True  # Keras' mark of methods that leave the arguments to it

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        parts = config.pop("parts", {})
        if isinstance(config.get("dtype"), dict):
            config["dtype"] = spelled(keras.dtype_policies.deserialize(config["dtype"]))
        with postponed_build() if parts else contextlib.nullcontext():
            layer = cls(**config)
        if not layer.trainable:  # each part by itself: Keras may not pass on what is no news
            for part in layer._flatten_layers(include_self=False):
                part.trainable = False
        if parts:
            finish(layer, parts)
        return layer


def finish(layer, parts):
    """Change the parts; then a model, which builds itself, may do so."""
    is_model = layer.built
    for part in layer._flatten_layers():
        if isinstance(part, Composite):  # models inside of models, too
            part.built = False
    for path, part, _ in parts_of(layer):
        change(part, parts.get(path, {}))
    if is_model:
        layer.build()


class Configured(Composite):
    """Mixin: `get_config` for layers and models that are built from a Config.

    A subclass calls `remember(config, **arguments)` with the other arguments of its constructor.
    """

    def remember(self, config, **arguments):
        if isinstance(config, dict):
            config = Config.from_dict(config)
        if not isinstance(config, Config):
            raise ValueError(f"config must be a kformer.Config, got {type(config).__name__}")
        self.config = config
        self._arguments = arguments

    def get_config(self):
        return {**super().get_config(), "config": self.config.to_dict(), **self._arguments}


def refuse_leftovers(model, path):
    """ValueError if a file holds more weights than the model has, before any is loaded."""
    names = []
    with h5py.File(path) as file:
        file.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
    names = [name for name in names if not name.startswith("optimizer/")]
    if len(names) > len(model.weights):
        parts = dict.fromkeys(name.split("/")[0] for name in names)
        extra = [part for part in parts if getattr(model, part, None) is None]
        counts = f"the model has {len(model.weights)} weights, the file {len(names)}"
        raise ValueError(f"weights must all have a place: {counts}; without one: {extra}")
