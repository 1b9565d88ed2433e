"""Projections and the feed-forward network. Letters: B batch, T tokens, D width."""

import keras
from keras import activations, layers, ops
from keras.backend import standardize_dtype

from kformer.config import CHOICES
from kformer.serialization import Composite, child_policy, register


@register
class Project(layers.Dense):
    """A dense layer that folds the leading axes before the product.

    (B, T, D) · (D, F) is computed as (B·T, D) · (D, F): the same numbers, and on JAX on the CPU
    a whole training step gets 1.5 times faster. The kernel stays two-dimensional, which is what
    LoRA, int8/int4, GPTQ, Muon and exporters expect.

    With adapters (LoRA) of rank r they alone train, x · W + α/r · (x · A) · B: see `enable_lora`
    of kformer.
    """

    shrinks = True  # `quantize` has a say

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        alpha = self.lora_alpha
        super().build(input_shape)
        self.lora_alpha = alpha  # Keras forgets it where it makes adapters here

    def call(self, x, training=None):
        return self.folded(self.project, x)

    def quantized_call(self, x, training=None):
        if not getattr(self, f"is_{self.quantization_mode}_calibrated", True):
            return self.call(x)  # GPTQ and AWQ watch what comes into it
        return self.folded(super().quantized_call, x, training=training)

    def folded(self, function, x, **kwargs):
        """A function of rows, on x without its leading axes."""
        shape = ops.shape(x)
        out = function(ops.reshape(x, (-1, x.shape[-1])), **kwargs)
        return ops.reshape(out, (*shape[:-1], self.units))

    def project(self, x):
        out = ops.matmul(x, self._kernel)
        if self.lora_enabled:  # two thin products, where Keras would make a whole kernel of them
            low = ops.matmul(ops.matmul(x, self.lora_kernel_a), self.lora_kernel_b)
            out = out + ops.cast(self.lora_alpha / self.lora_rank, low.dtype) * low
        if self.bias is not None:
            out = add_bias(self.bias, out)
        return out if self.activation is None else self.activation(out)

    def quantize(self, mode=None, type_check=True, config=None):
        """Keras' quantize, which leaves subclasses alone unless they say that they know."""
        super().quantize(mode, type_check=not self.shrinks, config=config)

    def enable_lora(self, rank, lora_alpha=None, **initializers):
        super().enable_lora(rank, lora_alpha, **initializers)
        if self.bias is not None:
            self.bias.trainable = False

    def merge_lora(self):
        """Fold the adapters into the kernel. Of a quantized one it makes a kernel in float."""
        low = ops.matmul(self.lora_kernel_a, self.lora_kernel_b)
        kernel = self.float_kernel() + self.lora_alpha / self.lora_rank * low
        bias, source = self.bias, self.dtype_policy.name.split("_from_")[-1]
        for name, value in [*vars(self).items()]:
            if isinstance(value, keras.Variable):
                self._untrack_variable(vars(self).pop(name))
        self._tracker.unlock()
        self.lora_enabled, self.lora_rank, self.lora_alpha = False, None, None
        self._is_quantized, self.quantization_config, self.dtype_policy = False, None, source
        self.built = False
        self.build((None, kernel.shape[0]))
        self._kernel.assign(kernel)
        if bias is not None:
            self.bias.assign(bias)

    def float_kernel(self):
        """The kernel without adapters, whatever it is stored as."""
        kernel = self._kernel
        if self.quantization_mode is None:
            return kernel.value
        if self.quantization_mode == "int4":
            kernel = keras.quantizers.unpack_int4(kernel, self.units, axis=-1)
        kernel, scale = ops.cast(kernel, "float32"), self.kernel_scale
        if hasattr(self, "kernel_zero"):  # in groups of rows, each with a scale and a zero
            group = ops.cast(self.g_idx, "int32")
            zero = ops.cast(ops.take(self.kernel_zero, group, axis=0), "float32")
            return (kernel - zero) * ops.take(scale, group, axis=0)
        return kernel / scale

    # Keras would save what a merge would give, adapters gone and a quantized kernel rounded again,
    # and forget the zeros of GPTQ and AWQ.

    def save_own_variables(self, store):
        stored = self.variable_serialization_spec[self.quantization_mode] if self.built else []
        names = ["_kernel" if name == "kernel" else name for name in stored]
        variables = [getattr(self, name, None) for name in names]
        for number, variable in enumerate(v for v in variables if v is not None):
            store[str(number)] = variable
        if self.lora_enabled:
            store["lora_a"], store["lora_b"] = self.lora_kernel_a, self.lora_kernel_b

    def load_own_variables(self, store):
        """Weights without adapters go below those of the layer, which begin anew."""
        first = ops.copy(self.lora_kernel_a) if self.lora_enabled else None
        super().load_own_variables(store)  # Keras makes zeros of both, which would never train
        if self.lora_enabled:
            has = "lora_a" in store.keys()
            self.lora_kernel_a.assign(store["lora_a"] if has else first)
            if has:
                self.lora_kernel_b.assign(store["lora_b"])


def add_bias(bias, x):
    """x + bias, in the order that keeps the gradient of the bias right in low precision.

    For x + bias Keras takes an operation of TensorFlow's whose gradient adds up the rows in the
    precision of x: in bfloat16 the sum of 4096 ones would be 256. In float16 every sum of
    TensorFlow's does that, so there both are float32 for the moment: the same number comes out.
    """
    if standardize_dtype(x.dtype) == "float16":
        return ops.cast(ops.add(ops.cast(bias, "float32"), ops.cast(x, "float32")), x.dtype)
    return ops.add(bias, x)


def activate(x, name):
    """relu, gelu (exact), gelu_tanh (its usual approximation) or silu."""
    if name.startswith("gelu"):
        return activations.gelu(x, approximate=name == "gelu_tanh")
    return activations.relu(x) if name == "relu" else activations.silu(x)


@register
class FeedForward(Composite, layers.Layer):
    """Two projections with a nonlinearity between them, applied to every position alone.

        FFN(h) = W2 · act(W1 · h + b1) + b2            gated: W2 · (act(W1 · h) * (W3 · h))

    Args:
        hidden_dim: width D of input and output.
        intermediate_dim: inner width, usually several times D.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        gated: multiply by a second projection (SwiGLU with "silu").
        use_bias: add biases.
    Call: (B, T, D) → (B, T, D).
    """

    def __init__(
        self, hidden_dim, intermediate_dim, activation="relu", gated=False, use_bias=True, **kwargs
    ):
        super().__init__(**kwargs)
        if activation not in CHOICES["activation"]:
            rule = ", ".join(CHOICES["activation"])
            raise ValueError(f"activation must be one of {rule}, got {activation!r}")
        self.supports_masking = True
        self.activation = activation
        child = dict(use_bias=use_bias, dtype=child_policy(self))
        self.up = Project(intermediate_dim, name="up", **child)
        self.gate = Project(intermediate_dim, name="gate", **child) if gated else None
        self.down = Project(hidden_dim, name="down", **child)

    def compute_output_shape(self, x_shape):
        return x_shape

    def build(self, x_shape):
        for part in (self.up, self.gate):
            if part is not None:
                part.build(x_shape)
        self.down.build((*x_shape[:-1], self.up.units))

    def call(self, x):
        if self.gate is None:
            return self.down(activate(self.up(x), self.activation))
        return self.down(activate(self.gate(x), self.activation) * self.up(x))
