"""Keras' progress bar in a `fit` that resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import keras


class ResumedProgress(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, including the batches that were done before a restore.

    Args:
        epoch: The resumed epoch.
        done: How many batches of it are done.
    """

    def __init__(self, epoch: int, done: int) -> None:
        super().__init__()
        self._resumed = {epoch: done}
        self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts a bar."""
        super().on_epoch_begin(epoch, logs)
        self._done = self._resumed.get(epoch, 0)
        if self._done:
            self._time_only_remaining()
            self.progbar.update(self._done)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a batch."""
        super().on_train_batch_end(self._done + batch, logs)

    def _time_only_remaining(self) -> None:
        """Excludes the batches that were done before from the time per batch.

        Private: Keras divides the time since the bar was created by all batches, and has no option for it.
        """
        estimate, done = self.progbar._estimate_step_duration, self._done
        self.progbar._estimate_step_duration = lambda current, now: estimate(current - done, now)


def count_done_batches(
    callbacks: list[keras.callbacks.Callback], params: dict[str, Any], epoch: int, done: int
) -> None:
    """Makes the progress bar of a starting `fit` include the batches that were done before.

    Args:
        callbacks: The callbacks of the `fit`. Replaces the bar among them, unless it is a user's subclass.
        params: The parameters of the `fit` that Keras passes to its callbacks.
        epoch: The resumed epoch.
        done: How many batches of it are done.
    """
    for place, callback in enumerate(callbacks):
        if type(callback) is keras.callbacks.ProgbarLogger:
            resumed = ResumedProgress(epoch, done)
            resumed.set_params(params)
            resumed.set_model(callback.model)
            resumed.on_train_begin()  # Keras may have already called it on the replaced one.
            callbacks[place] = resumed
