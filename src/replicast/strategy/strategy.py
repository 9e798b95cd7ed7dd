"""`replicast.Strategy`: MultiWorkerMirroredStrategy as Keras 3 needs it."""

from __future__ import annotations

import os
from typing import Any, Literal

import keras
import tensorflow as tf

from replicast.config import read_cluster
from replicast.strategy.collectives import ReplicatedExtended
from replicast.strategy.step import Agreed, KerasStep


class Strategy(tf.distribute.MultiWorkerMirroredStrategy):
    def __init__(
        self,
        *,
        statistics: Literal["mean", "local"] = "mean",
    ) -> None:
        cluster = read_cluster(os.environ)
        extended = ReplicatedExtended(
            self,
            tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            tf.distribute.experimental.CommunicationOptions(),
        )
        super(tf.distribute.MultiWorkerMirroredStrategy, self).__init__(extended)
        self.rank = 0 if cluster is None else cluster.rank
        self.size = 1 if cluster is None else cluster.size
        self._statistics = statistics

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        model = getattr(fn, "__self__", None)
        if self.size == 1 or not isinstance(model, keras.Model):
            return super().run(fn, args, kwargs, options)
        step = KerasStep(self.extended, model, fn, self._statistics == "mean")
        outputs = super().run(step, args, kwargs, options)
        return tf.nest.map_structure(Agreed, outputs)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        if isinstance(value, Agreed):
            return value.value
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        if self.size == 1:
            return super().experimental_distribute_dataset(dataset, options)
        def take(*b):
            def sl(t):
                n = tf.shape(t)[0]
                return t[n*self.rank//self.size: n*(self.rank+1)//self.size]
            return tf.nest.map_structure(sl, b)
        return dataset.map(take).prefetch(2)
