"""What all models share: built by their constructor, checked inputs, a compile() that is ready."""

import contextlib
import inspect
import warnings

import keras
import numpy as np
from keras import ops

from kformer import backend
from kformer.data.batches import Data
from kformer.layers.embedding import Table, TokenEmbedding, inside_a_model, resize_layer
from kformer.layers.experts import MixtureOfExperts
from kformer.layers.positions import AlibiBias, RelativeBias
from kformer.models import feeding, resuming, shrinking
from kformer.models.compiling import accumulating, default_optimizer, public_names
from kformer.models.exporting import Exports
from kformer.models.inputs import check_labels, checked_before, to_arrays, with_special_ids
from kformer.serialization import Configured, build_is_postponed, refuse_leftovers
from kformer.text import Tokenizer
from kformer.text.foreign import adapt
from kformer.training.losses import TokenCrossentropy, counted
from kformer.training.metrics import TokenMean

TAKES_INTEGERS = (TokenEmbedding, Table, AlibiBias, RelativeBias)


class Transformer(Configured, Exports, keras.Model):
    """Base of the models. A subclass makes its layers and calls `self.build()` last, so that
    `load_weights` always has something to load into."""

    def __init__(self, config, tokenizer=None, remat=None, **kwargs):
        super().__init__(**kwargs)
        self.autocast = False  # a cache keeps its precision; layers cast what they compute with
        self.supports_jit = backend.BACKEND != "openvino"  # see `make_predict_function`
        if remat not in (None, "block"):
            raise ValueError(f"remat must be None or 'block', got {remat!r}")
        self.remember(config, remat=remat)
        self.config = with_special_ids(self.config, adapt(tokenizer))
        self.tokenizer, self.remat = adapt(tokenizer), remat
        self.accumulate, self.jit_asked = 1, "auto"
        self._functions = {}
        self.expert_metrics = []
        if self.config.num_experts:
            names = "experts_dropped", "experts_busiest"
            self.expert_metrics = [keras.metrics.Mean(name=name) for name in names]

    has_source = False  # True = an encoder-decoder

    tokenizer_names = ("tokenizer",)

    # Saving

    def get_config(self):
        """With kformer's own tokenizers inside."""
        config = super().get_config()
        for name in self.tokenizer_names:
            if isinstance(getattr(self, name), Tokenizer):
                config[name] = getattr(self, name).get_config()
        return config

    def save(self, *args, **kwargs):
        """Keras' save; a tokenizer of another library is not stored, and a warning says so."""
        for name in self.tokenizer_names:
            if not isinstance(getattr(self, name), Tokenizer | None):
                rule = "only a kformer.Tokenizer is stored with a model: set it again after loading"
                warnings.warn(f"{name}: {rule}, got {getattr(self, name)!r}", stacklevel=2)
        return super().save(*args, **kwargs)

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        for name in cls.tokenizer_names:
            if isinstance(config.get(name), dict):
                config[name] = Tokenizer.from_config(config[name])
        return super().from_config(config)

    # Building and calling

    def build(self, input_shape=None):
        """Makes every weight. All widths are known, so no input is needed, symbolic or real."""
        if build_is_postponed():
            return
        hidden = (None, None, self.config.hidden_dim)
        for part in self._layers:
            if not part.built:
                part.build(hidden[:2] if isinstance(part, TAKES_INTEGERS) else hidden)

    def __call__(self, inputs, *args, **kwargs):
        """Checks the inputs where they enter; models inside of models take them as they are."""
        if inside_a_model.get():
            return super().__call__(inputs, *args, **kwargs)
        inputs = to_arrays(inputs)
        self.check_inputs(inputs)
        with checked_before():
            return super().__call__(inputs, *args, **kwargs)

    def run_compiled(self, function, *inputs):
        """function(self, *inputs) without gradients, compiled once for each shape of inputs."""
        name = function.__name__
        if name not in self._functions:
            self._functions[name] = backend.Compiled(function, self)
        return self._functions[name](*inputs)

    def quantize(self, mode=None, config=None, filters=None, **kwargs):
        """Keras' quantize for projections and the tied table of tokens; small tables, norms and
        experts stay in float. What cannot be done is a ValueError before anything changes.

        Args:
            mode: "int8", "int4", "float8" (kernels, in training), or "gptq" and "awq", which need
                a config with texts and calibrate the kernels of the blocks.
            config: one of `keras.quantizers`, such as Int4QuantizationConfig(block_size=64).
            filters: names of the layers to change: a regular expression, several, or a function.
        """
        layers = shrinking.chosen(self, mode, config, filters)
        super().quantize(mode, config, filters=lambda layer: id(layer) in layers, **kwargs)
        shrinking.renew(self)

    def get_quantization_layer_structure(self, mode=None):
        return shrinking.structure(self, mode)

    def summary(self, *args, expand_nested=True, **kwargs):
        """Keras' summary, down to the blocks."""
        return super().summary(*args, expand_nested=expand_nested, **kwargs)

    def count_params(self):
        """Numbers that are learned; what experts note about their load is not among them."""
        notes = [part.statistics for part in self.experts()]
        return super().count_params() - sum(int(np.prod(note.shape)) for note in notes)

    def experts(self):
        return [part for part in self._flatten_layers() if isinstance(part, MixtureOfExperts)]

    def resize_vocabulary(self, size, side="target"):
        """Change the number of ids in place; rows of kept ids stay, new ones start at the mean.

        Optimizer and compiled functions know the old shapes: a compiled model is compiled anew,
        and its optimizer starts from nothing.

        Args:
            size: the new number of ids.
            side: "target", or "source" where the two sides of an encoder-decoder have
                vocabularies of their own.
        """
        if side not in ("source", "target"):
            raise ValueError(f"side must be 'source' or 'target', got {side!r}")
        own = self.has_source and self.config.target_vocabulary_size is not None
        own = own and side == "target"
        field = "target_vocabulary_size" if own else "vocabulary_size"
        self.config.replace(**{field: size})  # refuses a wrong size before anything changes
        table, *heads = self.vocabulary_layers(side)
        table.resize(size)
        for head in heads:
            resize_layer(head, "units", size)
        for part in self._flatten_layers():
            if isinstance(part, Configured):
                part.config = part.config.replace(**{field: size})
        shrinking.renew(self)
        return self

    def load_weights(self, filepath, skip_mismatch=False, **kwargs):
        """Keras' load_weights, which does not mind weights that the model has no place for."""
        if not skip_mismatch and str(filepath).endswith(".weights.h5"):
            refuse_leftovers(self, filepath)
        return super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    # Training

    def default_loss(self):
        name = type(self).__name__
        raise ValueError(f"{name} has no head: compile() needs a loss, got loss=None")

    def default_metrics(self):
        return None

    def compile(self, optimizer=None, loss=None, metrics=None, accumulate=1, **kwargs):
        """Keras' compile, with defaults for everything: AdamW, the loss and metrics of the model.

        Args:
            accumulate: n batches per update of the weights. Keras' own argument averages the n
                means, which is wrong where batches hold different numbers of real tokens; here
                the update is exactly the one of the n batches in one. It needs a
                `TokenCrossentropy`, and arrays or a PyDataset in `fit`.
        """
        optimizer = default_optimizer() if optimizer is None else keras.optimizers.get(optimizer)
        loss = self.default_loss() if loss is None else loss
        metrics = self.take_token_metrics(metrics, kwargs)
        if metrics is None:  # the metrics of the model count what the loss counts
            kwargs.setdefault("weighted_metrics", self.default_metrics())
        if accumulate != 1:
            optimizer = accumulating(optimizer, accumulate, loss)
        self.accumulate, self.jit_asked = accumulate, kwargs.get("jit_compile", "auto")
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics, **kwargs)

    def take_token_metrics(self, metrics, options):
        """kformer's metrics count what the loss counts: they go among the weighted ones."""
        if not isinstance(metrics, (list, tuple)):
            return metrics
        own = [metric for metric in metrics if isinstance(metric, TokenMean)]
        for metric in own:
            if metric.ignore_id is None:
                metric.ignore_id = getattr(self, "ignored_label", None)
        if own:
            options["weighted_metrics"] = [*(options.get("weighted_metrics") or []), *own]
        return [metric for metric in metrics if metric not in own]

    def get_compile_config(self):
        """What `compile` was asked for: Keras would write what "auto" means on this backend, and
        a model saved on torch would then run uncompiled on JAX."""
        config = public_names(super().get_compile_config())
        asked = {"accumulate": self.accumulate, "jit_compile": self.jit_asked}
        return {**config, **asked} if config else config

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**config)
        self.optimizer.build(self.trainable_variables)

    def label_weights(self, x, y, sample_weight):
        """The weights of the labels y, where the inputs x have a say; see `TokenClassifier`."""
        return sample_weight

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        weights = self.label_weights(x, y, sample_weight)
        loss = super().compute_loss(x, y, y_pred, weights, training=training)
        if training and self.accumulate > 1:
            loss = loss * ops.sum(counted(ops.cast(y, "int32"), self.loss.ignore_id, weights))
        if training and self.expert_metrics:
            notes = ops.mean(ops.stack([part.statistics.value for part in self.experts()]), axis=0)
            for metric, note in zip(self.expert_metrics, (notes[0], notes[1]), strict=True):
                metric.update_state(note)
        return loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        weights = self.label_weights(x, y, sample_weight)
        return super().compute_metrics(x, y, y_pred, weights)

    # Every way in for data leads through a check on the host.

    def check_batch(self, x, y=None):
        self.check_inputs(x)
        if y is not None and isinstance(getattr(self, "loss", None), TokenCrossentropy):
            check_labels(y, self.num_labels, self.label_shape(x))

    def weigh(self, x, y, sample_weight):
        """The weight of every label in the loss."""
        labels = ops.cast(y, "int32")
        return counted(labels, self.loss.ignore_id, self.label_weights(x, y, sample_weight))

    def fit(self, *args, **kwargs):
        """Keras' fit; see `compile` about `accumulate`."""
        backend.refuse_training("fit")
        given = inspect.signature(super().fit).bind(*args, **kwargs).arguments
        if given.get("validation_data") is not None:
            given["validation_data"] = self._checked_validation(given["validation_data"])
        x, y = given.get("x"), given.get("y")
        data = x if isinstance(x, Data) else None
        if feeding.is_arrays(x):
            self.check_batch(x, y)
        if feeding.is_arrays(x) and self.accumulate > 1:
            weight, size = (given.pop(name, None) for name in ("sample_weight", "batch_size"))
            x = feeding.ArrayBatches(x, y, weight, size, given.get("shuffle", True))
            given.pop("y", None)
        if not feeding.is_arrays(x):
            x = feeding.feed(x, self.check_batch, self.accumulate, self.weigh)
        if self.accumulate > 1:
            given["shuffle"] = False  # the batches of a group stay together
        with self.running():
            return resuming.fit(super().fit, self, {**given, "x": x}, data)

    @contextlib.contextmanager
    def running(self, *state):
        """While Keras runs a loop over batches that were checked when they came in."""
        with backend.keeping(state), feeding.errors_of_the_host(), checked_before():
            yield

    def _checked_validation(self, data):
        if isinstance(data, (tuple, list)):
            self.check_batch(*data[:2])
            return data
        return feeding.feed(data, self.check_batch)

    def evaluate(self, x=None, y=None, *args, **kwargs):
        x = self._checked(x, y)
        with self.running(*self.variables, *self.metrics_variables):
            return super().evaluate(x, y, *args, **kwargs)

    def predict(self, x, *args, **kwargs):
        x = self._checked(x)
        with self.running(*self.variables):
            return super().predict(x, *args, **kwargs)

    def make_predict_function(self, force=False):
        """Keras', but on OpenVINO, where that computes in bfloat16 if the processor can, and goes
        on with the weights of the first batch after they were changed."""
        super().make_predict_function(force)
        if backend.BACKEND == "openvino":
            self.predict_function = self.predict_batches

    def predict_batches(self, batches):
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in batches]
        found = [self.run_compiled(forward, x) for x in inputs]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *found)

    def _checked(self, x, y=None):
        if isinstance(x, feeding.CheckedDataset):
            return x
        if feeding.is_arrays(x):
            self.check_batch(x, y)
            return x
        return feeding.feed(x, self.check_batch)

    def train_on_batch(self, x, y=None, *args, **kwargs):
        backend.refuse_training("train_on_batch")
        if self.accumulate > 1:  # a batch by itself does not know the others of its group
            raise ValueError(f"train_on_batch needs accumulate=1, got {self.accumulate}: use fit")
        self.check_batch(x, y)
        resuming.optimizer_variables(self)
        return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(self, x, y=None, *args, **kwargs):
        self.check_batch(x, y)
        return super().test_on_batch(x, y, *args, **kwargs)

    def predict_on_batch(self, x):
        self.check_batch(x)
        return super().predict_on_batch(x)


def forward(model, inputs):
    return model(inputs, training=False)
