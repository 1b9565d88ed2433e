"""How kformer's classes are written down and read again.

`Configured` is the one `get_config` of the library: whatever is built from a `Config` (models and
blocks) inherits it. All other layers take plain arguments, for which Keras writes it. And a file
of weights for another model is refused.
"""

import h5py
import keras

from kformer.config import Config

register = keras.saving.register_keras_serializable(package="kformer")


def child_policy(layer):
    """The dtype a composite hands to its children: a name where a name says it all.

    A policy object would switch off Keras' automatic `get_config` of the child; a quantized or
    mapped policy has no name that says it all, so the object itself is passed.
    """
    policy = layer.dtype_policy
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


class Configured:
    """Mixin: `get_config` and `from_config` for layers and models that are built from a Config.

    A subclass calls `remember(config, **arguments)` with the other arguments of its constructor.
    A quantized child keeps its own policy in a `DTypePolicyMap`, keyed by path, which the
    constructor hands down again: without it a quantized composite cannot be loaded.
    """

    def remember(self, config, **arguments):
        if isinstance(config, dict):
            config = Config.from_dict(config)
        if not isinstance(config, Config):
            raise ValueError(f"config must be a kformer.Config, got {type(config).__name__}")
        self.config = config
        self._arguments = arguments

    def get_config(self):
        config = super().get_config()
        config.update(config=self.config.to_dict(), **self._arguments)
        quantized = {
            layer.path: layer.dtype_policy
            for layer in self._flatten_layers(include_self=False)
            if layer.dtype_policy.quantization_mode is not None
        }
        if quantized:
            policies = keras.dtype_policies.DTypePolicyMap(self.dtype_policy.name, quantized)
            config["dtype"] = keras.dtype_policies.serialize(policies)
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if isinstance(config.get("dtype"), dict):
            config["dtype"] = keras.dtype_policies.deserialize(config["dtype"])
        return cls(**config)


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
