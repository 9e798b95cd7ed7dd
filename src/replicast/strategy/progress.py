"""Keras' progress bar in a `fit` that goes on in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import keras


class ResumedProgress(keras.callbacks.ProgbarLogger):
    """Keras' callback for the bar, which counts the batches of an epoch that were done before a restore.

    Args:
        epoch: The epoch that goes on.
        done: How many batches of it are done.
    """

    def __init__(self, epoch: int, done: int) -> None:
        super().__init__()
        self._resumed = {epoch: done}
        self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins a bar."""
        super().on_epoch_begin(epoch, logs)
        self._done = self._resumed.get(epoch, 0)
        if self._done:
            self._time_what_is_left()
            self.progbar.update(self._done)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a batch."""
        super().on_train_batch_end(self._done + batch, logs)

    def _time_what_is_left(self) -> None:
        """Keeps the batches that were done before out of the time per batch.

        Private: Keras divides the time since the bar was made by all batches, and has no option for less.
        """
        estimate, done = self.progbar._estimate_step_duration, self._done
        self.progbar._estimate_step_duration = lambda current, now: estimate(current - done, now)


def count_done_batches(
    callbacks: list[keras.callbacks.Callback], params: dict[str, Any], epoch: int, done: int
) -> None:
    """Has the progress bar of a `fit` that is about to begin count batches that were done before.

    Args:
        callbacks: The callbacks of the `fit`; the bar among them is replaced. One of the user's own class is
            left alone.
        params: What Keras tells its callbacks of the `fit`.
        epoch: The epoch that goes on.
        done: How many batches of it are done.
    """
    for place, callback in enumerate(callbacks):
        if type(callback) is keras.callbacks.ProgbarLogger:
            resumed = ResumedProgress(epoch, done)
            resumed.set_params(params)
            resumed.set_model(callback.model)
            resumed.on_train_begin()  # The one that it replaces may have been told already.
            callbacks[place] = resumed
