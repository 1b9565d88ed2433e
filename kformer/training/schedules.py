"""Learning-rate schedules: all rise linearly over `warmup` steps, then differ."""

import math

import keras
from keras import ops

from kformer.serialization import register

Schedule = keras.optimizers.schedules.LearningRateSchedule


class Warmup(Schedule):
    """peak · (step + 1) / warmup while that is below 1, then peak · `later(step)`."""

    def __init__(self, peak, warmup, **arguments):
        if not (peak > 0 and math.isfinite(peak)):
            raise ValueError(f"peak must be above 0, got {peak!r}")
        if warmup < 0:
            raise ValueError(f"warmup must not be negative, got {warmup!r}")
        self.arguments = {"peak": peak, "warmup": warmup, **arguments}
        self.peak, self.warmup = peak, warmup

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rising = (step + 1.0) / max(self.warmup, 1)
        return self.peak * ops.where(step < self.warmup, rising, self.later(step))

    def get_config(self):
        return dict(self.arguments)


@register
class InverseSquareRoot(Warmup):
    """peak · √(warmup / step) after the warm-up, as the original transformer was trained."""

    def __init__(self, peak, warmup=4000):
        super().__init__(peak, max(warmup, 1))

    def later(self, step):
        return ops.sqrt(self.warmup / ops.maximum(step + 1.0, self.warmup))


@register
class WarmupCosine(Warmup):
    """Half a cosine from peak to floor · peak at step `total`, and `floor` from there on."""

    def __init__(self, peak, warmup, total, floor=0.0):
        super().__init__(peak, warmup, total=total, floor=floor)
        if total <= warmup:
            raise ValueError(f"total must be above warmup, got total={total}, warmup={warmup}")
        self.total, self.floor = total, floor

    def later(self, step):
        done = ops.clip((step - self.warmup) / (self.total - self.warmup), 0.0, 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + ops.cos(math.pi * done))


@register
class WarmupStableDecay(Warmup):
    """Constant after the warm-up, then linearly down to floor · peak in the last `decay` steps."""

    def __init__(self, peak, warmup, total, decay, floor=0.0):
        super().__init__(peak, warmup, total=total, decay=decay, floor=floor)
        if decay < 1 or warmup + decay > total:
            rule = "decay must be at least 1 and warmup + decay at most total"
            raise ValueError(f"{rule}, got warmup={warmup}, decay={decay}, total={total}")
        self.total, self.decay, self.floor = total, decay, floor

    def later(self, step):
        left = ops.clip((self.total - step) / self.decay, 0.0, 1.0)
        return self.floor + (1.0 - self.floor) * left
