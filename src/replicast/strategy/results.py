"""Finds which of the values that a step returns are results of the model's metrics.

A `train_step` may return the results of its metrics under any names. Each was computed from this worker's
rows, and must be recomputed once the metric has the state of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf


class MetricResults:
    """Records what the metrics' `result` methods return inside its `with` block.

    Keras has no hook for this, so the method is replaced on each metric object, never on its class.
    """

    def __init__(self, metrics: Iterable[keras.metrics.Metric]) -> None:
        self._metrics = list({id(metric): metric for metric in metrics}.values())
        self._own = [vars(metric).get("result") for metric in self._metrics]
        self._recorded: dict[int, tuple[Any, keras.metrics.Metric, int]] = {}

    def __enter__(self) -> MetricResults:
        for metric in self._metrics:
            object.__setattr__(metric, "result", self._recording(metric))
        return self

    def __exit__(self, *_: Any) -> None:
        for metric, own in zip(self._metrics, self._own, strict=True):
            if own is None:
                object.__delattr__(metric, "result")
            else:  # the script had set it on this object
                object.__setattr__(metric, "result", own)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._recorded

    def recompute(self, value: Any) -> Any:
        """The same result, from the metric's current state."""
        _, metric, index = self._recorded[id(value)]
        return tf.nest.flatten(metric.result())[index]

    def _recording(self, metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def recording() -> Any:
            returned = result()
            for index, value in enumerate(tf.nest.flatten(returned)):
                # Keeps the value alive: its id cannot be reused then.
                self._recorded[id(value)] = (value, metric, index)
            return returned

        return recording
