"""`fit` that goes on where an earlier one stopped, in the middle of an epoch if need be."""

import contextlib

import keras

from kformer import backend
from kformer.training.callbacks import Checkpoint, Limit


class FollowEpochs(keras.callbacks.Callback):
    """Tells the data which epoch it is: its order depends on that, and Keras does not say."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        if self.data.epoch != epoch:
            self.data.seek(epoch)


@contextlib.contextmanager
def prepared(model, given, data):
    """The arguments of `fit` made ready: checkpoints restored, signals waited for."""
    callbacks = given.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Checkpoint):
                given["initial_epoch"] = callback.begin(model, data)
                stack.enter_context(callback)
        if any(isinstance(c, Limit) and c.is_reached(model) for c in callbacks):
            given["epochs"] = given.get("initial_epoch", 0)
        if data is not None:
            if given.get("steps_per_epoch") is not None:
                rule = "steps_per_epoch must be left out with kformer's data: see callbacks.Limit"
                raise ValueError(f"{rule}, got {given['steps_per_epoch']}")
            stack.enter_context(led(data))
            given["callbacks"] = [FollowEpochs(data), *callbacks]
            given["shuffle"] = False  # the data have an order of their own
            if not any(isinstance(callback, Checkpoint) for callback in callbacks):
                data.seek(given.get("initial_epoch", 0))
        yield


@contextlib.contextmanager
def led(data):
    data.led = True
    try:
        yield
    finally:
        data.led = False


def fit(keras_fit, model, given, data=None):
    """Keras' fit with the arguments `given`, from where the newest checkpoint ends.

    data: what `given` has as x, or what that feeds from, if it is of `kformer.data`.
    """
    given = dict(given)
    state = [*model.variables, *model.metrics_variables, *optimizer_variables(model)]
    with prepared(model, given, data), backend.keeping(state):
        history = fit_rest(keras_fit, model, given, data)
    backend.keep_apart(state)
    return history


def optimizer_variables(model):
    """The optimizer's state, made now: inside the step TensorFlow would trace it twice."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer.variables


def fit_rest(keras_fit, model, given, data):
    """Keras takes the length of the first epoch for that of all: where the first is the rest of
    an interrupted one, that one is trained by itself."""
    start, end = given.get("initial_epoch", 0), given.get("epochs", 1)
    if data is None or data.first == 0 or start >= end:
        return keras_fit(**given)
    with unfinished(model.optimizer):
        first = keras_fit(**{**given, "epochs": start + 1})
    if model.stop_training or start + 1 == end:
        model.optimizer.finalize_variable_values(model.trainable_variables)
        return first
    data.seek(start + 1)
    rest = keras_fit(**{**given, "initial_epoch": start + 1})
    for name, values in rest.history.items():
        rest.history[name] = [*first.history.get(name, []), *values]
    return rest


@contextlib.contextmanager
def unfinished(optimizer):
    """At the end of `fit` an optimizer with averages puts them into the weights: not yet."""
    optimizer.finalize_variable_values = lambda variables: None
    try:
        yield
    finally:
        del optimizer.finalize_variable_values
