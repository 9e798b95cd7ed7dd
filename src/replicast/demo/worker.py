"""The program of each worker of the demo: makes the model, then plays every act.

Started by the runner, with the directory for the notes as its argument.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import replicast
from replicast.demo.acts import RUN, programme
from replicast.demo.notes import Moment, NoteWriter, Progress, notes_path
from replicast.digest import digest_state

SEED = 1
BATCH = 128
STEPS_PER_EPOCH = 10
EXAMPLES = BATCH * STEPS_PER_EPOCH  # Of 1,797: whole batches, so that steps are easy to count.


class DigitsPlayer:
    """A worker with its replica of a small classifier of handwritten digits."""

    def __init__(self, directory: Path) -> None:
        from sklearn.datasets import load_digits

        keras.utils.set_random_seed(SEED)
        strategy = replicast.Strategy()
        self.rank = strategy.rank
        self._notes = NoteWriter(notes_path(directory, self.rank))
        digits = load_digits()
        self._images = (digits.data / 16.0).astype(np.float32)
        self._labels = digits.target
        self._done = 0
        self._run_dir = directory / RUN
        self._boundaries: list[keras.callbacks.Callback] = []
        with strategy.scope():
            self.model = build_model()

    def train(self, doing: str, steps: int) -> None:
        """Trains for so many steps, together with the other workers."""

        def step_done(batch: int, logs: dict[str, float]) -> None:
            self._done += 1
            if self.rank == 0:
                self._notes.write(Progress(doing=doing, done=self._done, loss=float(logs["loss"])))

        self.model.fit(
            self._images[:EXAMPLES],
            self._labels[:EXAMPLES],
            batch_size=BATCH,
            epochs=steps // STEPS_PER_EPOCH,
            verbose=0,
            callbacks=[*self._boundaries, keras.callbacks.LambdaCallback(on_train_batch_end=step_done)],
        )

    def open_replicas(self) -> replicast.Replicas:
        """Makes this worker's `Replicas`; training has their callback from then on. All workers, once."""
        replicas = replicast.Replicas(self.model, run_dir=self._run_dir)
        self._boundaries.append(replicas.callback())
        return replicas

    def note_moment(self, name: str) -> None:
        """Notes down what this worker's replica is now."""
        weights = {weight.path: weight.numpy() for weight in self.model.weights}
        total = sum(np.sum(value, dtype=np.float64) for value in weights.values())
        self._notes.write(
            Moment(name=name, worker=self.rank, weights_sum=float(total), digest=digest_state(weights))
        )


def build_model() -> Any:
    """A classifier of 64 pixels with one hidden layer."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="digits"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy")
    return model


def main() -> None:
    """Plays every act."""
    player = DigitsPlayer(Path(sys.argv[1]))
    for act in programme():
        act.play(player)


if __name__ == "__main__":
    main()
