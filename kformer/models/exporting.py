"""Models as files for other runtimes: what `model.export` writes, and what it refuses.

                    tensorflow            jax                   torch
    tf_saved_model  Keras                 Keras (no experts)    -
    onnx            -                     -                     traced here
    openvino        Keras                 -                     traced here
    litert          Keras, fixed length   -                     -
    torch           -                     -                     traced here

On torch Keras would trace with one token in one row, and bake what it saw there into the file.
What a backend cannot write another one can: a `.keras` file opens on all of them.
"""

import contextlib
import importlib.util
import logging
import warnings

import keras
from keras import tree

from kformer import backend, files
from kformer.models.inputs import checked_before

ENDINGS = {"tf_saved_model": "", "onnx": ".onnx", "openvino": ".xml", "litert": ".tflite",
           "torch": ".pt2"}  # fmt: skip
# (format, backend) → the libraries it takes, and the extra of kformer that installs them.
WAYS = {
    ("tf_saved_model", "tensorflow"): ((), None),
    ("tf_saved_model", "jax"): (("tensorflow",), "tensorflow"),
    ("onnx", "torch"): (("onnx", "onnxscript"), "export"),
    ("openvino", "tensorflow"): (("openvino",), "export"),
    ("openvino", "torch"): (("openvino",), "export"),
    ("litert", "tensorflow"): ((), None),
    ("torch", "torch"): ((), None),
}


class Exports:
    """What all models share: `export`."""

    def export(
        self, filepath, format="tf_saved_model", verbose=None, input_signature=None, **options
    ):
        """Keras' export: the forward pass as a file for other runtimes, whole or not at all.

        Args:
            format: "tf_saved_model", "onnx", "openvino", "litert" or "torch". What this backend
                cannot write is a ValueError that names the one that can.
            verbose: False = do not say when it is done.
            input_signature: None = ids of any batch and length ("litert": of `max_length`), for an
                encoder-decoder {"source", "target"}; else `keras.InputSpec`s where arrays go.
            options: of the converter.
        """
        refuse(self, str(filepath), format)
        signature = default_signature(self, format) if input_signature is None else input_signature
        signature = checked_signature(self, signature, format)
        with files.written_together(filepath) as beside, quiet(), checked_before():
            if backend.BACKEND == "torch":
                write_traced(self, str(beside), format, signature, options)
            else:
                if backend.BACKEND == "jax":
                    options = {"jax2tf_kwargs": jax_shapes(self, signature), **options}
                given = dict(format=format, verbose=False, input_signature=[signature])
                super().export(str(beside), **given, **options)
        if verbose is not False:
            print(f"Saved {format} at {filepath}")


def refuse(model, path, format):
    """ValueError for what cannot be written, before anything is."""
    if format not in ENDINGS:
        raise ValueError(f"format must be one of {', '.join(ENDINGS)}, got {format!r}")
    if not path.endswith(ENDINGS[format]):
        raise ValueError(f"filepath must end in {ENDINGS[format]!r} for {format!r}, got {path!r}")
    own = backend.BACKEND
    if (format, own) not in WAYS:
        known = " or ".join(name for other, name in WAYS if other == format)
        rule = f"format {format!r} must be written with KERAS_BACKEND={known}"
        raise ValueError(f"{rule}, where a .keras file opens as well, got {own}")
    if format == "tf_saved_model" and own == "jax" and model.config.num_experts:
        rule = "num_experts must be 0 in a SavedModel from jax, whose top_k TensorFlow cannot read"
        raise ValueError(f"{rule}, got num_experts={model.config.num_experts}")
    libraries, extra = WAYS[format, own]
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            rule = f"format {format!r} on {own} takes {name}"
            raise ValueError(f"{rule}: pip install 'kformer[{extra}]'")


def default_signature(model, format):
    """What the model takes: ids of any batch and length, where the format has such axes."""
    length = model.config.max_length if format == "litert" else None
    names = ("source", "target") if model.has_source else ("ids",)
    specs = {name: keras.InputSpec("int32", (None, length), name=name) for name in names}
    return specs if model.has_source else specs["ids"]


def checked_signature(model, signature, format):
    """The specs of what the model takes, out of Keras' list of one, or ValueError if it does not
    take such inputs, or the format no such shapes."""
    if isinstance(signature, (list, tuple)) and len(signature) == 1:
        signature = signature[0]

    def symbol(spec):
        return keras.KerasTensor(tuple(spec.shape), keras.backend.standardize_dtype(spec.dtype))

    model.check_inputs(tree.map_structure(symbol, signature))
    for spec in tree.flatten(signature):
        if format == "litert" and len(spec.shape) > 1 and spec.shape[1] is None:
            raise ValueError(f"lengths must be fixed for 'litert', got shape {tuple(spec.shape)}")
    return signature


def described(model, signature):
    """The name of every input, in the order of `tree.flatten`; its shape, in which an axis of any
    size has a name (what belongs to one text has one length); and its dtype."""
    names, shapes, dtypes = [], [], []
    for path, spec in tree.flatten_with_path(signature):
        names.append("_".join(path) or "ids")
        axes = "batch", f"{path[0]}_length" if model.has_source else "length"
        shapes.append([axes[axis] if n is None else n for axis, n in enumerate(spec.shape)])
        dtypes.append(spec.dtype)
    return names, shapes, dtypes


def jax_shapes(model, signature):
    """The same for jax2tf: Keras takes every length for another one."""
    _, shapes, _ = described(model, signature)
    shapes = [f"({', '.join(map(str, shape))})" for shape in shapes]
    return {"polymorphic_shapes": [tree.pack_sequence_as(signature, shapes)]}


def write_traced(model, path, format, signature, options):
    """On torch: the operations of the model with any batch and length, in one of the formats."""
    names, shapes, dtypes = described(model, signature)

    def call(*tensors):
        return model(tree.pack_sequence_as(signature, tensors), training=False)

    program = backend.program(call, model, shapes, dtypes)
    if format == "onnx":
        backend.save_onnx(program, path, names, shapes, **options)
    elif format == "torch":
        backend.save_program(program, path, **options)
    else:
        import openvino

        made = openvino.convert_model(program, **options)
        for port, name in zip(made.inputs, names, strict=True):
            port.get_node().set_friendly_name(name)
            port.set_names({name})
        openvino.serialize(made, path)


@contextlib.contextmanager
def quiet():
    """Nothing of what converters have to say about their own insides."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
