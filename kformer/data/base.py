"""What every data set of kformer is: batches whose order seed and epoch decide.

What a batch holds is a function of seed, epoch and batch number alone, so that an epoch can be
continued from any batch and threads change nothing.
"""

import concurrent.futures
import hashlib
import os

import keras
import numpy as np

from kformer.config import check_whole

IGNORED = -1  # a negative label never counts


class Data(keras.utils.PyDataset):
    """Base of the data sets. A subclass has `plan(epoch)`, a list of what each batch holds, and
    `batch(item, random)`, which makes one from it; `sides`, its rows, and `settings()` tell one
    data set from another, for checkpoints.

    Keras' own workers are not used: they hand over batches of one epoch in the next, and lose
    others. Threads of this class make batches ahead instead.

    Args:
        seed: with the epoch it decides the order.
        shuffle: another order in every epoch; False for evaluation.
        prefetch: batches made ahead, in the background; 0: none.
        workers: threads that make them.
    """

    def __init__(self, seed=0, shuffle=True, prefetch=2, workers=1):
        super().__init__()
        check_whole(0, seed=seed, prefetch=prefetch)
        check_whole(1, workers=workers)
        self.seed, self.shuffle, self.prefetch = seed, shuffle, prefetch
        self.epoch, self.first, self.led = 0, 0, False
        self.asked, self.waiting, self.plans = set(), {}, {}
        self.threads = concurrent.futures.ThreadPoolExecutor(workers)  # none before the first use
        self.process, self.known_fingerprint = os.getpid(), None

    def __getstate__(self):
        """For other processes, which need no threads of their own."""
        return {**self.__dict__, "threads": None, "waiting": {}, "prefetch": 0}

    def seek(self, epoch, batch=0):
        """Go on from that batch of that epoch."""
        check_whole(0, epoch=epoch)
        number = len(self.planned(epoch))
        if not 0 <= batch <= number:
            raise ValueError(f"batch must be in [0, {number}], got {batch}")
        self.epoch, self.first, self.asked, self.waiting = epoch, batch, set(), {}

    def planned(self, epoch):
        epoch = epoch if self.shuffle else 0
        plan = self.plans.get(epoch)
        if plan is None:
            plan = self.plan(epoch)
            self.plans = {epoch: plan}
        return plan

    @property
    def num_batches(self):
        return len(self.planned(self.epoch)) - self.first

    def __getitem__(self, index):
        epoch, number, waiting = self.epoch, self.first + index, self.waiting
        plan = self.planned(epoch)
        if index < 0 or number >= len(plan):
            raise IndexError(f"batch must be in [0, {self.num_batches}), got {index}")
        self.asked.add(number)
        made = waiting.get(number)
        # A forked process has the pool, but not its threads: it would wait for ever.
        prefetch = self.prefetch if os.getpid() == self.process else 0
        ahead = range(number + 1, min(number + 1 + prefetch, len(plan)))
        self.waiting = {
            n: waiting.get(n) or self.threads.submit(self.make, plan, epoch, n) for n in ahead
        }
        return made.result() if made else self.make(plan, epoch, number)

    def make(self, plan, epoch, number):
        random = np.random.default_rng([self.seed, epoch if self.shuffle else 0, number])
        return self.batch(plan[number], random)

    def on_epoch_end(self):
        """After a whole pass; Keras also calls this when it has looked at a batch or two.

        led: somebody else, the `fit` of kformer's models, says which epoch it is.
        """
        if not self.led and len(self.asked) == self.num_batches:
            self.seek(self.epoch + 1)

    def examples(self):
        """Batches that show which sizes vary; none where no size does."""
        return []

    def random(self, epoch):
        return np.random.default_rng([self.seed, epoch])

    sides = ()

    def settings(self):
        """What else decides about the batches, as plain values."""
        return ()

    def fingerprint(self):
        """Of the rows, their order and the shapes: the same data give the same batches."""
        if self.known_fingerprint is None:
            parts = [type(self).__name__, self.seed, self.shuffle, *map(str, self.settings())]
            parts += [rows.fingerprint() for rows in self.sides]
            self.known_fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
        return self.known_fingerprint
