"""The rows of a share: their number, and a placeholder row if there are none.

A batch with fewer rows than workers leaves some workers without rows. They must still take part in the step's
transfer, but many layers fail on an empty batch (a convolution) or return NaN (a mean). So such a worker
computes one row of zeros, which is ignored: its weight is 0, and what it adds to metrics is discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def rows_of(data: Any) -> tf.Tensor:
    """The number of rows of a share: the length of its first component that has dimensions."""
    for leaf in tf.nest.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            continue
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        return tf.shape(leaf)[0]
    return tf.constant(1)


def at_least_one_row(data: Any) -> Any:
    """The share, with a row of zeros if it has no rows."""

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
            return leaf
        if leaf.shape[0] is not None and leaf.shape[0] > 0:
            return leaf
        shape = tf.shape(leaf)
        zeros = functools.partial(tf.zeros, tf.concat([[1], shape[1:]], axis=0), leaf.dtype)
        # A conditional even if there are certainly no rows: `slices.py` must recognize rows of a batch here,
        # as on the workers that have some.
        whole = tf.cond(shape[0] > 0, lambda: leaf, zeros)
        whole.set_shape([1 if leaf.shape[0] == 0 else None, *leaf.shape[1:]])
        return whole

    return tf.nest.map_structure(filled, data)


def with_unknown_rows(data: Any) -> Any:
    """The share, without its number of rows in the static shapes of its tensors."""

    def unknown(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return data if tf.executing_eagerly() else tf.nest.map_structure(unknown, data)


def predicting_all_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a prediction function; for a share without rows it returns empty tensors."""

    def predict(data: Any) -> Any:
        rows = rows_of(data)

        def of_the_share(output: Any) -> Any:
            if not isinstance(output, tf.Tensor) or output.shape.rank in (None, 0):
                return output
            return output[: tf.where(rows > 0, tf.shape(output)[0], 0)]

        return tf.nest.map_structure(of_the_share, function(at_least_one_row(data)))

    return predict
