"""What `compile` needs: a default optimizer, exact accumulation, names that load anywhere."""

import keras

from kformer.config import check_whole
from kformer.training.losses import TokenCrossentropy


def default_optimizer():
    return keras.optimizers.AdamW(5e-4, weight_decay=0.01, clipnorm=1.0)


def accumulating(optimizer, steps, loss):
    """The optimizer, told to average the gradients of `steps` batches before it moves."""
    check_whole(1, accumulate=steps)
    if not isinstance(loss, TokenCrossentropy):
        kind = loss if isinstance(loss, str) else type(loss).__name__
        raise ValueError(f"accumulate needs a kformer TokenCrossentropy as loss, got {kind}")
    config = optimizer.get_config()
    if config["gradient_accumulation_steps"] not in (None, steps):
        rule = "gradient_accumulation_steps of the optimizer must be left out beside accumulate"
        raise ValueError(f"{rule}, got {config['gradient_accumulation_steps']}")
    return type(optimizer).from_config({**config, "gradient_accumulation_steps": steps})


def public_names(config):
    """A serialized config whose optimizers have their public module name.

    On torch Keras writes the name of a class that exists for torch alone, with which training
    could not go on elsewhere.
    """
    if isinstance(config, dict):
        config = {key: public_names(value) for key, value in config.items()}
        if str(config.get("module")).startswith("keras.src.backend.torch.optimizers"):
            config["module"] = "keras.optimizers"
        return config
    if isinstance(config, (list, tuple)):
        return [public_names(value) for value in config]
    return config
