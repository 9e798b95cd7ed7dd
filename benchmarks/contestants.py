"""The contestants of the `fit` table, as they run on a worker.

Each function takes the strategy of its pool and the task, and returns a function that trains for exactly the
steps of the task. The model, the data and the optimizer are the same for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Train = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What every contestant trains.

    Attributes:
        steps: Steps of one turn.
        epochs: Epochs of one turn: `fit` is called once for all of them.
        batch: Examples in a step, over all workers.
        features, units, classes: Sizes of the layers.
    """

    steps: int
    epochs: int
    batch: int = 128
    features: int = 784
    units: int = 128
    classes: int = 10

    def __str__(self) -> str:
        return f"{self.features}-{self.units}-{self.classes} MLP, Adam, global batch {self.batch}"

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """As many examples as one epoch needs, the same in every process."""
        random = np.random.default_rng(0)
        rows = self.steps // self.epochs * self.batch
        x = random.standard_normal((rows, self.features), dtype=np.float32)
        return x, random.integers(0, self.classes, rows).astype(np.int32)


def stock_strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def replicast_strategy() -> Any:
    import replicast

    return replicast.Strategy()


def replicast_strategy_of_several_hosts() -> Any:
    """Gives each worker its own host id."""
    from replicast.config import HOST_ID

    os.environ[HOST_ID] = f"host-{os.environ['RANK']}"
    return replicast_strategy()


def torch_group() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return torch.distributed


def keras_fit_arrays(strategy: Any, task: Task) -> Train:
    import keras

    return _fit(strategy, task, _compiled(strategy, task, keras), *task.arrays())


def keras_fit_dataset(strategy: Any, task: Task) -> Train:
    import keras

    return _fit(strategy, task, _compiled(strategy, task, keras), _dataset(task))


def tf_keras_fit_arrays(strategy: Any, task: Task) -> Train:
    import tf_keras

    return _fit(strategy, task, _compiled(strategy, task, tf_keras), *task.arrays())


def loop_on_a_constant_batch(strategy: Any, task: Task) -> Train:
    import tensorflow as tf

    step, optimizer, _ = custom_step(strategy, task)
    mine = task.batch // strategy.num_replicas_in_sync
    share = tuple(tf.constant(array[:mine]) for array in task.arrays())

    def train() -> None:
        for _ in range(task.steps):
            step(share)

    return _counted(train, optimizer, task)


def loop_on_the_distributed_iterator(strategy: Any, task: Task) -> Train:
    step, optimizer, _ = custom_step(strategy, task)
    batches = strategy.experimental_distribute_dataset(_dataset(task))

    def train() -> None:
        for _ in range(task.epochs):
            for batch in batches:
                step(batch)

    return _counted(train, optimizer, task)


def torch_ddp_on_a_constant_batch(group: Any, task: Task) -> Train:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(task.features, task.units), torch.nn.ReLU(), torch.nn.Linear(task.units, task.classes)
    )
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = task.arrays()
    mine = task.batch // group.get_world_size()
    x_share, y_share = torch.from_numpy(x[:mine]), torch.from_numpy(y[:mine].astype(np.int64))

    def train() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            loss_of(model(x_share), y_share).backward()
            optimizer.step()

    return train


def _model(task: Task, keras: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((task.features,)),
            keras.layers.Dense(task.units, activation="relu"),
            keras.layers.Dense(task.classes),
        ]
    )


def _compiled(strategy: Any, task: Task, keras: Any) -> Any:
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = _model(task, keras)
        model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def _dataset(task: Task) -> Any:
    import tensorflow as tf

    x, y = task.arrays()
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(len(x), seed=0).batch(task.batch).prefetch(tf.data.AUTOTUNE)


def _fit(strategy: Any, task: Task, model: Any, *data: Any) -> Train:
    arguments = {"batch_size": task.batch} if len(data) > 1 else {}
    return _counted(
        lambda: model.fit(*data, epochs=task.epochs, verbose=0, **arguments), model.optimizer, task
    )


def custom_step(strategy: Any, task: Task) -> tuple[Any, Any, Any]:
    """One step as in TensorFlow's guide to custom training loops, with a Keras 3 model and without metrics.

    Returns:
        The step, a function of a batch; the optimizer and the model.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = _model(task, keras)
        optimizer = keras.optimizers.Adam()
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


def _counted(train: Callable[[], Any], optimizer: Any, task: Task) -> Train:
    """Fails if a turn did not have the number of steps by which its time is divided."""

    def checked() -> None:
        before = int(optimizer.iterations.numpy())
        train()
        done = int(optimizer.iterations.numpy()) - before
        if done != task.steps:
            raise RuntimeError(f"A turn was {done} steps instead of {task.steps}")

    return checked
