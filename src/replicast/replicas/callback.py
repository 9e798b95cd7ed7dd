"""The boundaries of Keras' `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from replicast.errors import NotSupported

if TYPE_CHECKING:
    from replicast.replicas.replicas import Replicas


class BoundaryCallback(keras.callbacks.Callback):
    """Makes every end of a batch a boundary; with `steps_per_execution`, every end of an execution.

    Give it to `fit` on all workers.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas
        self._first_step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Applies what the journal holds for this step."""
        if self.model is not self._replicas.model:
            raise NotSupported(
                "This callback with another model",
                reason="it belongs to the model that its Replicas were made with",
                remedy="Make a replicast.Replicas(model) for the model that is trained",
            )
        self._replicas.training_begins()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the execution starts."""
        self._first_step = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """A boundary."""
        self._replicas.boundary(steps=batch - self._first_step + 1, logs=logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Settles what was proposed during training, so that nothing waits for a step that never comes."""
        self._replicas.training_ends()
