"""Weighted means with TensorFlow's collectives, which only sum, and not every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
}
"""Dtypes that TensorFlow's collectives do not support, and a dtype that holds all of their values."""


def weighted_with(
    all_reduce: Callable[[list[Any]], list[Any]], parts: list[Any], means: list[bool], weight: tf.Tensor
) -> list[Any]:
    """Sums values over the workers; some of them are averaged. One collective for each dtype.

    Args:
        all_reduce: Sums tensors and row-sparse gradients of one dtype.
        parts: The values.
        means: For each, whether the result is the weighted mean instead of the sum.
        weight: This worker's weight.
    """
    weighted = [_times(part, weight) if mean else part for part, mean in zip(parts, means, strict=True)]
    carried = [_cast(value, CARRIERS.get(value.dtype, value.dtype)) for value in (*weighted, weight)]
    summed: dict[int, Any] = {}
    for dtype in dict.fromkeys(value.dtype for value in carried):
        places = [place for place, value in enumerate(carried) if value.dtype == dtype]
        summed.update(zip(places, all_reduce([carried[place] for place in places]), strict=True))
    totals = [_cast(summed[place], part.dtype) for place, part in enumerate(parts)]
    all_weights = summed[len(parts)]
    return [_over(t, all_weights) if mean else t for t, mean in zip(totals, means, strict=True)]


def _times(value: Any, factor: tf.Tensor) -> Any:
    """The product, which is 0 for a worker without rows even if its value is NaN."""
    return _mapped(value, lambda v: tf.math.multiply_no_nan(v, tf.cast(factor, v.dtype)))


def _over(value: Any, total: tf.Tensor) -> Any:
    return _mapped(value, lambda v: v / tf.cast(total, v.dtype))


def _cast(value: Any, dtype: tf.DType) -> Any:
    return value if value.dtype == dtype else _mapped(value, lambda v: tf.cast(v, dtype))


def _mapped(value: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)
