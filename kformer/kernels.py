"""Operations that Keras' ops do not cover, or that a backend has a better way for: the fused
attention kernel, writing a cache in place, gradients that are tensors, and recomputation."""

import functools

from keras import ops

from kformer.backend import BACKEND

if BACKEND == "torch":
    import torch
elif BACKEND == "jax":
    import jax
elif BACKEND == "tensorflow":
    import tensorflow as tf


def fused_attention(query, key, value, visible, bias, scale):
    """softmax(Q·Kᵀ·scale + bias)·V by the backend's own kernel, or None where it has none here.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H), or folded to (B · K, S, H); N is a multiple of K.
        visible: boolean, broadcastable to (B, N, T, S). It reaches the kernel as booleans: as
            large negative numbers they make wrong gradients in rows that see nothing.
        bias: None, or broadcastable to (B, N, T, S).
    Returns:
        (B, N, T, H), zero in rows that see nothing, or None.
    """
    if BACKEND == "torch" and not torch.compiler.is_exporting():
        return _torch_attention(query, key, value, visible, bias, scale)
    if BACKEND == "jax" and jax.default_backend() != "cpu":
        return _jax_attention(query, key, value, visible, bias, scale)
    # TensorFlow, and JAX on the CPU, have no kernel that beats the plain products; and a file for
    # other runtimes holds those: theirs differ in rows that see nothing, and in grouped heads.
    return None


def _torch_attention(query, key, value, visible, bias, scale):
    mask = visible
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if visible is None else torch.where(visible, bias, float("-inf"))
    attend = torch.nn.functional.scaled_dot_product_attention
    given = dict(attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return attend(query, key, value, **given)


def _jax_attention(query, key, value, visible, bias, scale):
    if key.ndim == 3:
        key, value = (x.reshape(query.shape[0], -1, *x.shape[1:]) for x in (key, value))
    query, key, value = (ops.swapaxes(x, 1, 2) for x in (query, key, value))
    bias = None if bias is None else bias.astype(query.dtype)
    attend = functools.partial(jax.nn.dot_product_attention, bias=bias, mask=visible, scale=scale)
    try:
        out = attend(query, key, value, implementation="cudnn")
    except (NotImplementedError, RuntimeError, ValueError):  # no such device, dtype or shape
        out = attend(query, key, value, implementation="xla")
    out = ops.swapaxes(out, 1, 2)
    if visible is None:
        return out
    return ops.where(ops.any(visible, axis=-1, keepdims=True), out, ops.zeros_like(out))


def write(cache, new, start):
    """`cache` (..., S, H) with `new` (..., T, H) at slots start, start + 1, ..., round and round.
    On torch outside of training the cache itself is changed: a copy costs more than a token."""
    slots, length = cache.shape[-2], new.shape[-2]
    new = ops.cast(ops.reshape(new, (*cache.shape[:-2], *new.shape[-2:])), cache.dtype)
    if BACKEND == "torch":
        if torch.is_grad_enabled():
            cache = cache.clone()
        places = (torch.arange(length, device=cache.device) + start) % slots
        return cache.index_copy_(-2, places, new)
    zero, first = ops.zeros_like(start), start % slots
    zeros = [zero] * (len(cache.shape) - 2)
    if length == 1:
        return ops.slice_update(cache, (*zeros, first, zero), new)
    # A stretch up to the last slot and one from the first: what is not new in them stays.
    for place in ops.minimum(first, slots - length), zero:
        at = (*zeros, place, zero)
        # `%` of a number below zero is another one on OpenVINO.
        behind = ops.mod(place + ops.arange(length, dtype="int32") - first, slots)
        moved = ops.take(new, ops.minimum(behind, length - 1), axis=-2)
        mixed = ops.where((behind < length)[:, None], moved, ops.slice(cache, at, new.shape))
        cache = ops.slice_update(cache, at, mixed)
    return cache


def put(row, column, place):
    """`row` (B, S) with `column` (B, 1) at slot `place`; as in `write`, torch changes it."""
    return write(row[..., None], column[..., None], place)[..., 0]


def with_dense_gradient(table):
    """The same tensor, whose gradient is a tensor even if only some of its rows were read. On
    TensorFlow it would be a list of rows, in which Keras' optimizers of the Adam family square each
    occurrence of an id by itself: other updates than on the other backends."""
    if BACKEND != "tensorflow":
        return table

    @tf.custom_gradient
    def same(x):
        return tf.identity(x), tf.convert_to_tensor

    return same(tf.convert_to_tensor(table))


def recomputed(function, *tensors):
    """function(*tensors), whose inner values are computed again for the gradient. It must be pure:
    tensors in, a tuple of tensors out; randomness comes in as seeds."""
    if BACKEND == "jax":
        return jax.checkpoint(function)(*tensors)
    if BACKEND == "tensorflow":
        return tf.recompute_grad(function)(*tensors)
    if BACKEND == "torch":
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)
