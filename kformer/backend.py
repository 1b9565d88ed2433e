"""What Keras has no words for: this file and `kernels.py` are the only ones that name a backend.

Compiled functions, gradients of a function, and whether a tensor holds numbers or is still a
symbol of a traced function.
"""

import contextlib
import random

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()
TRAINS = "tensorflow", "jax", "torch"

if BACKEND == "torch":
    import torch
elif BACKEND == "jax":
    import jax
elif BACKEND == "tensorflow":
    import tensorflow as tf


def set_seed(seed):
    """The same weights, orders and dropout from here on; Keras' own function loads TensorFlow."""
    random.seed(seed)
    np.random.seed(seed)
    if BACKEND == "torch":
        torch.manual_seed(seed)
    elif BACKEND == "tensorflow":
        tf.random.set_seed(seed)


def refuse_training(name):
    """ValueError on a backend that has no gradients."""
    if BACKEND not in TRAINS:
        rule = f"{name} needs gradients: KERAS_BACKEND must be one of {', '.join(TRAINS)}"
        raise ValueError(f"{rule}, got {BACKEND}")


def is_concrete(x) -> bool:
    """True if x holds numbers now: not a Keras symbol, not a tracer, not a graph tensor."""
    if isinstance(x, (np.ndarray, np.generic, list, tuple)):
        return True
    if isinstance(x, keras.KerasTensor) or not keras.ops.is_tensor(x):
        return False
    if BACKEND == "jax":
        return not isinstance(x, jax.core.Tracer)
    if BACKEND == "tensorflow":
        return isinstance(x, tf.__internal__.EagerTensor)
    if BACKEND == "torch":
        return x.device.type != "meta" and not torch.compiler.is_compiling()
    return False  # on OpenVINO a tensor is the graph that would compute it


class Compiled:
    """function(layer, *inputs) without gradients, compiled once for each shape of its inputs.

    What training changes is seen; a layer with other variables needs another one. On torch the
    operations are noted down once: Keras' own calls cost several times as much as a small product.

    Args:
        takes: number of the input whose memory it may take over, where it can be (on JAX).
        variables: the layer's, if somebody has them at hand: Keras collects them anew each time.
    Attributes:
        count: how often it was compiled, or noted down.
    """

    def __init__(self, function, layer, takes=None, variables=None):
        def counted(*inputs):
            self.count += 1
            return function(layer, *inputs)

        def pure(values, *inputs):  # nothing is baked into what is compiled
            mapping = list(zip(layer.variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return counted(*inputs)

        self.layer, self.variables, self.function = layer, variables, counted
        self.noted, self.values, self.count = {}, [], 0
        if BACKEND == "jax":
            self.function = jax.jit(pure, donate_argnums=() if takes is None else (1 + takes,))
        elif BACKEND == "tensorflow":
            self.function = tf.function(counted, jit_compile=True)

    def __call__(self, *inputs):
        if BACKEND == "jax":
            variables = self.layer.variables if self.variables is None else self.variables
            return self.function([v.value for v in variables], *inputs)
        # Arrays become tensors: as arrays they would be constants of what is compiled.
        as_input = to_numpy if BACKEND == "openvino" else ops.convert_to_tensor
        inputs = keras.tree.map_structure(as_input, inputs)
        if BACKEND not in ("torch", "openvino"):
            return self.function(*inputs)
        with no_gradient():
            operations, structure = self.operations(inputs)
            return keras.tree.pack_sequence_as(structure, operations(*keras.tree.flatten(inputs)))

    def operations(self, inputs):
        """On torch and OpenVINO: what was noted down for these shapes, and the structure of what
        comes out."""
        if BACKEND == "openvino":  # whatever weights were there is in what was compiled
            values = [v.value for v in self.layer.variables]
            if list(map(id, values)) != list(map(id, self.values)):
                self.noted, self.values = {}, values
        shapes = tuple((x.shape, x.dtype) for x in keras.tree.flatten(inputs))
        if shapes not in self.noted:
            note_down = _note_down if BACKEND == "torch" else _openvino_graph
            self.noted[shapes] = note_down(self.function, inputs)
        return self.noted[shapes]

    def repeat(self, more, state, fixed):
        """state = function(layer, state, fixed), once and as long as more(state): where a loop is
        Python's."""
        if BACKEND != "torch":
            while more(state := self(state, fixed)):
                pass
            return state
        state, fixed = keras.tree.map_structure(ops.convert_to_tensor, (state, fixed))
        with torch.no_grad():
            operations, structure = self.operations((state, fixed))
            flat, fixed = keras.tree.flatten(state), keras.tree.flatten(fixed)
            while True:
                flat = operations(*flat, *fixed)
                state = keras.tree.pack_sequence_as(structure, flat)
                if not more(state):
                    return state


def _note_down(function, inputs):
    """The operations of torch in function(*inputs), on flat tensors, and the outputs' structure."""
    from torch.fx.experimental.proxy_tensor import make_fx

    structure = []

    def flat(*tensors):
        out = function(*keras.tree.pack_sequence_as(inputs, list(tensors)))
        structure.append(keras.tree.map_structure(lambda _: 0, out))
        return keras.tree.flatten(out)

    noted = make_fx(flat)(*keras.tree.flatten(inputs))
    noted.graph.eliminate_dead_code()
    noted.recompile()
    return noted, structure[-1]


def _openvino_graph(function, inputs):
    """The same for OpenVINO, compiled, in float32: of arrays, giving arrays."""
    import openvino

    made = [openvino.opset16.parameter(x.shape, x.dtype) for x in keras.tree.flatten(inputs)]
    tensor = type(ops.convert_to_tensor(0.0))
    out = function(*keras.tree.pack_sequence_as(inputs, [tensor(one.output(0)) for one in made]))
    ends = [ops.convert_to_tensor(x).output for x in keras.tree.flatten(out)]
    if openvino.Type.bf16 in [x.get_element_type() for x in ends]:
        raise ValueError("on openvino a cache and outputs must not be bfloat16, got bfloat16")
    model = openvino.Model(ends, made)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def operations(*arrays):
        return compiled(list(arrays), share_outputs=False).to_tuple()

    return operations, keras.tree.map_structure(lambda _: 0, out)


def program(function, layer, shapes, dtypes):
    """On torch: function(*tensors), which calls the layer, as a `torch.export` program.

    shapes: of each tensor; an axis with a name instead of a number may have any size, the same
        wherever the name stands. Where the operations would not hold for all sizes, torch raises.
    """

    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer  # its weights are the program's

        def forward(self, *tensors):
            return function(*tensors)

    names = dict.fromkeys(n for shape in shapes for n in shape if isinstance(n, str))
    sizes = {name: 2 + i for i, name in enumerate(names)}  # 0 and 1 would mean more than a size
    tensors = [
        ops.ones([sizes.get(n, n) for n in shape], dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    free = [dict.fromkeys(named_axes(shape), torch.export.Dim.DYNAMIC) for shape in shapes]
    given = dict(dynamic_shapes=(tuple(free),), strict=False)
    with torch.no_grad():
        return torch.export.export(Traced(), tuple(tensors), **given)


def named_axes(shape):
    return {axis: n for axis, n in enumerate(shape) if isinstance(n, str)}


def save_program(program, path, **options):
    torch.export.save(program, path, **options)


def save_onnx(program, path, names, shapes, **options):
    """On torch: a program as an ONNX file, with names for its inputs and their axes."""
    axes = tuple(map(named_axes, shapes))
    given = dict(input_names=names, dynamic_shapes=(axes,), verbose=False)
    torch.onnx.export(program, **given, **options).save(path)


def compiles_loops() -> bool:
    """True where a loop is part of what is compiled; on torch it is Python's."""
    return BACKEND in ("jax", "tensorflow")


def isolated(layer):
    """A context in which what a layer notes down inside of a compiled loop stays in there."""
    mapping = [(v, v.value) for v in layer.variables] if BACKEND == "jax" else []
    return keras.StatelessScope(state_mapping=mapping) if mapping else contextlib.nullcontext()


def inference(function, layer, *inputs):
    """function(layer, *inputs) without gradients, on JAX as a whole; states are put back."""
    inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
    if BACKEND != "jax":
        with no_gradient():
            return function(layer, *inputs)
    states = [v for v in layer.variables if not v.trainable]
    both = Compiled(lambda layer, *x: (function(layer, *x), [v.value for v in states]), layer)
    out, moved = both(*inputs)
    for variable, value in zip(states, moved, strict=True):
        variable.assign(value)
    return out


def gradients(function, layer, *inputs):
    """(value, [...], [...]): function(layer, *inputs) and its gradients by the layer's trainable
    variables and by every floating-point input, as NumPy arrays."""
    variables = layer.trainable_variables
    inputs = [ops.convert_to_tensor(x) for x in inputs]
    floats = [i for i, x in enumerate(inputs) if keras.backend.is_float_dtype(x.dtype)]
    if BACKEND == "jax":
        value, found = _jax_gradients(function, layer, inputs, floats)
    elif BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            tape.watch([inputs[i] for i in floats])
            value = function(layer, *inputs)
        sources = [v.value for v in variables], [inputs[i] for i in floats]
        found = tape.gradient(value, sources, unconnected_gradients="zero")
        found = tf.nest.map_structure(tf.convert_to_tensor, found)
    else:
        inputs = [x.detach().requires_grad_(i in floats) for i, x in enumerate(inputs)]
        sources = [v.value for v in variables] + [inputs[i] for i in floats]
        with torch.enable_grad():
            value = function(layer, *inputs)
            flat = torch.autograd.grad(value, sources, allow_unused=True)
        flat = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, flat, strict=True)]
        found = flat[: len(variables)], flat[len(variables) :]
    by_variable, by_input = ([to_numpy(g) for g in group] for group in found)
    return float(to_numpy(value)), by_variable, by_input


def _jax_gradients(function, layer, inputs, floats):
    def pure(weights, floating):
        full = list(inputs)
        for i, x in zip(floats, floating, strict=True):
            full[i] = x
        mapping = list(zip(layer.trainable_variables, weights, strict=True))
        mapping += [(v, v.value) for v in layer.non_trainable_variables]
        with keras.StatelessScope(state_mapping=mapping):
            return function(layer, *full)

    weights = [v.value for v in layer.trainable_variables]
    both = jax.jit(jax.value_and_grad(pure, argnums=(0, 1)))
    return both(weights, [inputs[i] for i in floats])


@contextlib.contextmanager
def keeping(variables):
    """Variables keep their values if something is raised inside. On JAX Keras takes them out of a
    model while it trains; if the very first batch raises, they would be lost."""
    held = [(v, v.value) for v in variables] if BACKEND == "jax" else []
    try:
        yield
    except BaseException:
        for variable, value in held:
            if variable._value is None:
                variable.assign(value)
        raise


def keep_apart(variables):
    """No two of them hold the same array, of which a step on JAX would leave nothing to the second.
    Keras makes weights and their averages one when it ends training."""
    seen = set()
    for variable in variables if BACKEND == "jax" else ():
        if id(variable.value) in seen:
            variable.assign(ops.copy(variable.value))
        seen.add(id(variable.value))


def to_numpy(x) -> np.ndarray:
    """A tensor as a NumPy array; bfloat16, which NumPy does not know, as float32."""
    if keras.ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) == "bfloat16":
        x = ops.cast(x, "float32")
    if BACKEND == "torch" and torch.is_tensor(x):
        return x.detach().cpu().numpy()  # np.array(tensor), as Keras does it, warns
    return ops.convert_to_numpy(x)


def no_gradient():
    """A context in which torch keeps nothing for a backward pass; the others never do outside."""
    return torch.no_grad() if BACKEND == "torch" else contextlib.nullcontext()


def looks_ahead() -> bool:
    """True where Keras looks at two batches of a PyDataset before it trains on them."""
    return BACKEND == "tensorflow"


def map_dataset(dataset, function):
    """A tf.data.Dataset that passes every batch through a NumPy function, on the host."""
    import tensorflow as tf  # noqa: F811  (the data set proves that TensorFlow is loaded)

    flat_spec = tf.nest.flatten(dataset.element_spec)

    def on_host(*batch):
        flat = tf.nest.flatten(batch if len(batch) > 1 else batch[0])
        out = tf.numpy_function(lambda *x: function(x), flat, [s.dtype for s in flat_spec])
        for tensor, spec in zip(out, flat_spec, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(dataset.element_spec, out)

    return dataset.map(on_host)
