"""The contestants of the questions about a training step that run on TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.step_task import StepTask, Training


def model_of(task: StepTask, keras: Any) -> Any:
    """The model of a task, in Keras 3 or in tf_keras."""
    layers = keras.layers
    if task.kind == "embedding":
        # Not random: TensorFlow would keep the memory of three tables to make one.
        table = layers.Embedding(task.table, task.width, embeddings_initializer="zeros")
        words = [keras.Input((task.words,), dtype="int32"), table]
        return keras.Sequential([*words, layers.GlobalAveragePooling1D(), layers.Dense(task.classes)])
    inputs = [keras.Input((task.features,))]
    if task.kind == "convolution":
        convolutions = [layers.Conv2D(filters, 3, activation="relu") for filters in task.units]
        inputs += [layers.Reshape((28, 28, 1)), *convolutions, layers.GlobalAveragePooling2D()]
    else:
        inputs += [layers.Dense(units, activation="relu") for units in task.units]
    return keras.Sequential([*inputs, layers.Dense(task.classes)])


def optimizer_of(task: StepTask, keras: Any) -> Any:
    """The optimizer of a task; one of ours if Keras has none of this name."""
    if hasattr(keras.optimizers, task.optimizer):
        return getattr(keras.optimizers, task.optimizer)()
    if task.optimizer == "LazyAdam":
        from replicast.optimizers import LazyAdam

        return LazyAdam()
    return keras.optimizers.get(task.optimizer)


def custom_step(strategy: Any, task: StepTask) -> tuple[Any, Any, Any]:
    """One step as in TensorFlow's guide to custom training loops, with a Keras 3 model and without metrics.

    Returns:
        The step, a function of a batch; the optimizer and the model.
    """
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of(task, keras)
        optimizer = optimizer_of(task, keras)
        optimizer.build(model.trainable_variables)

    def on_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / task.batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(batch: Any) -> None:
        strategy.run(on_replica, args=batch)

    return step, optimizer, model


class _Keras(Training):
    optimizer: Any

    def strategy(self) -> Any:
        return self.group

    def trained(self) -> int:
        return int(self.optimizer.iterations.numpy())


class ConstantBatch(_Keras):
    """A custom loop on one batch: no feeding, no metrics, no callbacks."""

    def setup(self) -> None:
        self.step, self.optimizer, _ = custom_step(self.strategy(), self.task)
        mine = self.task.batch // self.workers
        self.share = tuple(tf.constant(array[:mine]) for array in self.task.arrays())

    def train(self) -> None:
        for _ in range(self.task.steps):
            self.step(self.share)


class NoExchange(ConstantBatch):
    """The floor: the same loop on the same share, in every process by itself."""

    def strategy(self) -> Any:
        return tf.distribute.get_strategy()


class DistributedIterator(_Keras):
    """A custom loop over TensorFlow's distributed dataset."""

    def setup(self) -> None:
        self.step, self.optimizer, _ = custom_step(self.group, self.task)
        self.batches = self.group.experimental_distribute_dataset(dataset_of(self.task))

    def train(self) -> None:
        for _ in range(self.task.epochs):
            for batch in self.batches:
                self.step(batch)


class FitArrays(_Keras):
    """`fit` of Keras 3 on arrays."""

    def setup(self) -> None:
        keras = self.keras()
        keras.utils.set_random_seed(0)
        with self.strategy().scope():
            self.model = model_of(self.task, keras)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(optimizer_of(self.task, keras), loss, metrics=["accuracy"])
        self.data = self.arguments()

    def keras(self) -> Any:
        import keras

        return keras

    def arguments(self) -> dict[str, Any]:
        x, y = self.task.arrays()
        return {"x": x, "y": y, "batch_size": self.task.batch}

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        return self.model.optimizer

    def train(self) -> None:
        self.model.fit(**self.data, epochs=self.task.epochs, verbose=0)


class FitDataset(FitArrays):
    """`fit` of Keras 3 on a `tf.data` pipeline with shuffle and batch."""

    def arguments(self) -> dict[str, Any]:
        return {"x": dataset_of(self.task)}


class FitAlone(FitArrays):
    """`fit` of plain Keras 3 on the same share, in every process by itself: what Keras adds to a loop."""

    def strategy(self) -> Any:
        return tf.distribute.get_strategy()

    def arguments(self) -> dict[str, Any]:
        x, y = self.share()
        return {"x": x, "y": y, "batch_size": self.task.batch // self.workers}

    def share(self) -> tuple[Any, Any]:
        x, y = self.task.arrays()
        mine = len(x) // self.workers
        return x[:mine], y[:mine]


class FitDatasetAlone(FitAlone):
    """The same on a `tf.data` pipeline."""

    def arguments(self) -> dict[str, Any]:
        return {"x": pipeline(*self.share(), self.task.batch // self.workers)}


class FitTfKeras(FitArrays):
    """`fit` of tf_keras, on arrays."""

    def keras(self) -> Any:
        import tf_keras

        return tf_keras


def dataset_of(task: StepTask) -> Any:
    """The arrays of a task as a pipeline."""
    return pipeline(*task.arrays(), task.batch)


def pipeline(x: Any, y: Any, batch: int) -> Any:
    """Shuffled batches of these arrays."""
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(len(x), seed=0).batch(batch).prefetch(tf.data.AUTOTUNE)
