"""Attention maps: who looked at whom. Letters: B batch, N heads, T queries, S keys."""

import keras
import numpy as np

from kformer import backend
from kformer.layers.attention import capture


def attention_maps(model, inputs) -> dict:
    """The weights of every self- and cross-attention of a model, by the path of its layer.

    Args:
        model: a kformer model, or any Keras model with `MultiHeadAttention` layers of kformer.
        inputs: a batch, as the model takes it.
    Returns:
        {"decoder/block_0/self_attention": array (B, N, T, S), ...} in the order of the layers.
    """
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(f"model must be a Keras model or layer, got {type(model).__name__}")
    with capture() as maps, backend.no_gradient():
        model(inputs, training=False)
    return maps


def draw(weights, path, keys=None, queries=None, title=None):
    """A picture (PNG) of one map's first row: a panel per head. Needs matplotlib.

    Args:
        weights: (B, N, T, S), one value of `attention_maps`.
        path: where the picture goes.
        keys, queries: S and T names of the tokens, for the axes.
        title: text above the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heads = np.asarray(weights)[0]
    high, wide = (2.0 + 0.2 * size for size in heads.shape[1:])
    size = (max(wide, 3.5) * len(heads), max(high, 3.5))
    figure, axes = plt.subplots(1, len(heads), figsize=size, squeeze=False)
    for number, (axis, head) in enumerate(zip(axes[0], heads, strict=True)):
        axis.imshow(head, vmin=0.0, vmax=max(float(head.max()), 1e-6), cmap="viridis")
        name = f"head {number}" if len(heads) > 1 else None
        axis.set(title=name, xlabel="key", ylabel="query")
        if keys is not None:
            axis.set_xticks(range(head.shape[1]), keys, rotation=90)
        if queries is not None:
            axis.set_yticks(range(head.shape[0]), queries)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
