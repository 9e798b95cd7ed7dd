"""Which of the values that a step returns are results of the model's metrics.

A `train_step` returns the results of its metrics under any names. Each was computed from this worker's rows,
and must be computed again when the metric has the state of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf


class MetricResults:
    """Notes what the metrics' `result` returns inside its `with` block.

    Keras has no hook for it, so each metric object, never its class, has a `result` that notes for that time.
    """

    def __init__(self, metrics: Iterable[keras.metrics.Metric]) -> None:
        self._metrics = list({id(metric): metric for metric in metrics}.values())
        self._own = [vars(metric).get("result") for metric in self._metrics]
        self._noted: dict[int, tuple[Any, keras.metrics.Metric, int]] = {}

    def __enter__(self) -> MetricResults:
        for metric in self._metrics:
            object.__setattr__(metric, "result", self._noting(metric))
        return self

    def __exit__(self, *_: Any) -> None:
        for metric, own in zip(self._metrics, self._own, strict=True):
            if own is None:
                object.__delattr__(metric, "result")
            else:  # the script had set it on this object
                object.__setattr__(metric, "result", own)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._noted

    def again(self, value: Any) -> Any:
        """The same result, from the metric's present state."""
        _, metric, place = self._noted[id(value)]
        return tf.nest.flatten(metric.result())[place]

    def _noting(self, metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def noting() -> Any:
            returned = result()
            for place, value in enumerate(tf.nest.flatten(returned)):
                # With the value itself: as long as it is kept, no other one has its id.
                self._noted[id(value)] = (value, metric, place)
            return returned

        return noting
