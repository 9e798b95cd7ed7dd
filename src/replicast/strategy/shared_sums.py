"""Sums over the workers of one host inside a graph: `replicast.allreduce` as one operation of TensorFlow.

`tf.numpy_function` gives the function the tensors' own memory, and takes the results over without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicast.allreduce import Exchange, Form, Plan

SUMMED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}
"""Half-precision values are summed in float32, in rank order, and rounded once."""


class SharedSums:
    """Sums, weighted means and concatenations over the workers. Only inside graphs.

    Args:
        exchange: The exchange with the other workers.
        counter: A variable that counts transfers. Each call adds 1 when its values exist and before it waits,
            and all calls of a graph are ordered by it: two workers that made two calls in different order
            would wait for each other.
    """

    def __init__(self, exchange: Exchange, counter: tf.Variable) -> None:
        self._exchange = exchange
        self._counter = counter

    @staticmethod
    def supports(values: Sequence[Any]) -> bool:
        """Whether this can sum these tensors and row-sparse gradients."""
        return all(SUMMED_AS.get(v.dtype, v.dtype).as_numpy_dtype in _NUMBERS for v in values)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The sum of each value over the workers; for row-sparse gradients, all workers' slices."""
        return self.combine(values, [False] * len(values), tf.constant(1.0))

    def combine(self, values: Sequence[Any], weighted: Sequence[bool], weight: tf.Tensor) -> list[Any]:
        """The sum of each value over the workers, or its weighted mean.

        Args:
            values: Tensors, and row-sparse gradients, which are concatenated.
            weighted: For each value, whether to compute its mean.
            weight: This worker's weight in the means.
        """
        tensors: list[tf.Tensor] = []
        forms: list[Form] = []
        for value, mean in zip(values, weighted, strict=True):
            sparse = isinstance(value, tf.IndexedSlices)
            given = value.values if sparse else value
            tensors.append(tf.cast(given, SUMMED_AS.get(given.dtype, given.dtype)))
            forms.append(_form(tensors[-1], gathered=sparse, weighted=mean))
            if sparse:
                tensors.append(value.indices)
                forms.append(_form(value.indices, gathered=True))
        results = iter(self._call(forms, weight, tensors))
        return [_like(value, results) for value in values]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """All workers' tensors, each concatenated along the first axis; they may have different lengths."""
        return self._call([_form(tensor, gathered=True) for tensor in tensors], tf.constant(1.0), tensors)

    def _call(
        self, forms: Sequence[Form], weight: tf.Tensor, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        plan = Plan(forms)

        def combine(weight: Any, *arrays: Any) -> list[Any]:
            return self._exchange.combine(plan, float(weight), [np.asarray(array) for array in arrays])

        with tf.device("CPU:0"), tf.control_dependencies([weight, *tensors]):
            count = self._counter.assign_add(1, read_value=False)
            with tf.control_dependencies([count]):
                results = tf.numpy_function(combine, [weight, *tensors], [t.dtype for t in tensors])
            with tf.control_dependencies(results):
                self._counter.assign_add(0, read_value=False)
        for form, tensor, result in zip(forms, tensors, results, strict=True):
            result.set_shape([None, *tensor.shape[1:]] if form.gathered else tensor.shape)
        return list(results)


_NUMBERS = frozenset(np.dtype(code).type for code in "bBhHiIlqLQfdFD")


def _form(tensor: tf.Tensor, *, gathered: bool, weighted: bool = False) -> Form:
    return Form(np.dtype(tensor.dtype.as_numpy_dtype), gathered, weighted)


def _like(value: Any, results: Any) -> Any:
    """The next result, with the kind and dtype of the value."""
    result = tf.cast(next(results), value.dtype)
    if not isinstance(value, tf.IndexedSlices):
        return result
    return tf.IndexedSlices(result, next(results), value.dense_shape)
