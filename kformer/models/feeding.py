"""Data on its way into `fit`, `evaluate` and `predict`: every batch is checked on the host.

Where a model accumulates gradients, batches also get the weights that make n small updates equal
to one large one.
"""

import contextlib
import copy
import inspect
import random
import threading

import keras
import numpy as np
from keras import tree

from kformer import backend
from kformer.data.base import Data


def feed(data, check, accumulate=1, weigh=None):
    """`data` in the same kind, whose batches go through `check(x, y)` before anything else.

    accumulate, weigh: groups of so many batches get weights, see `share`; weigh(x, y, weight)
    gives the weight of every label.
    """
    if isinstance(data, keras.utils.PyDataset):
        return CheckedDataset(data, check, accumulate, weigh)
    if accumulate > 1:  # Keras loses a generator's first batch: groups would not stay together
        raise ValueError(f"accumulate needs arrays or a PyDataset, got {type(data).__name__}")
    if inspect.isgenerator(data):
        return _checked(data, check)
    if hasattr(data, "element_spec"):  # tf.data.Dataset
        return _checked_tf(data, check)
    if hasattr(data, "collate_fn"):  # torch DataLoader
        return _checked_loader(data, check)
    if callable(getattr(data, "map", None)):  # Grain
        return data.map(lambda batch: _passed(batch, check))
    return data


def is_arrays(data):
    """Arrays, tensors, lists of numbers, or a dict of them: not something that yields batches."""
    leaves = tree.flatten(data) if isinstance(data, (dict, list, tuple)) else [data]
    return all(hasattr(x, "shape") or isinstance(x, (int, float, type(None))) for x in leaves)


def _passed(batch, check):
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    check(x, y)
    return batch


def _checked(batches, check):
    for batch in batches:
        yield _passed(batch, check)


_host_errors = []


@contextlib.contextmanager
def errors_of_the_host():
    """TensorFlow wraps what a check raised inside of tf.data: here it comes out again."""
    _host_errors.clear()
    try:
        yield
    except Exception as error:
        if _host_errors:
            raise _host_errors[0] from error
        raise


def _checked_tf(dataset, check):
    def on_host(flat):
        try:
            _passed(tree.pack_sequence_as(dataset.element_spec, list(flat)), check)
        except ValueError as error:
            _host_errors.append(error)
            raise
        return flat

    return backend.map_dataset(dataset, on_host)


def _checked_loader(loader, check):
    loader = copy.copy(loader)
    loader.collate_fn = CheckedCollate(loader.collate_fn, check)
    return loader


class CheckedCollate:
    """A class and not a closure, because it goes to the loader's worker processes."""

    def __init__(self, collate, check):
        self.collate, self.check = collate, check

    def __call__(self, samples):
        return _passed(self.collate(samples), self.check)


class CheckedDataset(keras.utils.PyDataset):
    """Another PyDataset with checked batches, in groups of n if gradients are accumulated."""

    def __init__(self, inner, check, accumulate=1, weigh=None):
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.inner, self.check = inner, check
        self.accumulate, self.weigh = accumulate, weigh
        self.group, self.lock = (None, []), threading.Lock()
        self.shown = self.to_show()

    def __getstate__(self):
        """For worker processes, which make a lock of their own."""
        return {key: value for key, value in self.__dict__.items() if key != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state, lock=threading.Lock())

    @property
    def num_batches(self):
        number = self.inner.num_batches
        return None if number is None else -(-number // self.accumulate) * self.accumulate

    def to_show(self):
        """What the first two looks get. On TensorFlow Keras infers from them which sizes vary, and
        in the middle of an epoch two neighbours may be alike where others are not."""
        if not (backend.looks_ahead() and isinstance(self.inner, Data)):
            return []
        batches = self.inner.examples()[: self.inner.num_batches]
        if self.accumulate > 1 and batches:
            return share(batches, max(self.accumulate, 2), self.weigh)[:2]
        return batches

    def __getitem__(self, index):
        if self.shown:
            return self.shown.pop(0)
        if self.accumulate == 1:
            return _passed(self.inner[index], self.check)
        first = index - index % self.accumulate
        with self.lock:  # a data set may be random: every batch of a group is loaded once
            if self.group[0] != first:
                numbers = range(first, min(first + self.accumulate, self.inner.num_batches))
                batches = [self.inner[i] for i in numbers]
                self.group = first, share(batches, self.accumulate, self.weigh)
            batch = self.group[1][index - first]
        return _passed(batch, self.check)

    def on_epoch_begin(self):
        self.group = (None, [])
        self.inner.on_epoch_begin()

    def on_epoch_end(self):
        self.inner.on_epoch_end()


class ArrayBatches(keras.utils.PyDataset):
    """Arrays as shuffled batches, for the cases in which Keras must not do the batching."""

    def __init__(self, x, y, sample_weight, batch_size, shuffle):
        super().__init__()
        self.arrays = (x, y) if sample_weight is None else (x, y, sample_weight)
        self.size, self.batch_size = len(tree.flatten(x)[0]), batch_size or 32
        self.random = np.random.default_rng(random.getrandbits(32)) if shuffle else None
        self.order = np.arange(self.size)
        self.on_epoch_end()

    @property
    def num_batches(self):
        return -(-self.size // self.batch_size)

    def __getitem__(self, index):
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return tree.map_structure(lambda a: np.asarray(a)[rows], self.arrays)

    def on_epoch_end(self):
        if self.random is not None:
            self.random.shuffle(self.order)


def share(group, number, weigh):
    """A group of batches with weights that add up to n · (share of the group's tokens) in each.

    Keras averages the gradients of n batches. Where batch i of W_i tokens has the mean loss l_i,
    the gradient of l_i · n · W_i / ΣW averages to the gradient of Σ W_i·l_i / ΣW, exactly what
    one batch of all of them gives; `Transformer.compute_loss` multiplies by the sum of these
    weights. A group that is short at the end of an epoch is filled up with weights of 0.
    """
    unpacked = [keras.utils.unpack_x_y_sample_weight(batch) for batch in group]
    masses = [backend.to_numpy(weigh(x, y, weight)) for x, y, weight in unpacked]
    total = max(sum(float(mass.sum()) for mass in masses), 1e-9)
    out = [(x, y, number / total * m) for (x, y, _), m in zip(unpacked, masses, strict=True)]
    while len(out) < number:
        x, y, weight = out[0]
        out.append((x, y, 0.0 * weight))
    return out
