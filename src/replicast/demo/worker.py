"""The program of each worker of the demo: makes the model, then plays every act that is not over yet.

Started by the runner, with the directory for the notes as its argument.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.audit import AuditReport
from replicast.demo.acts import RUN, programme
from replicast.demo.notes import Moment, NoteReader, NoteWriter, Progress, notes_path
from replicast.digest import digest_state

SEED = 1
BATCH = 128
STEPS_PER_EPOCH = 10
EXAMPLES = BATCH * STEPS_PER_EPOCH  # Of 1,797: whole batches, so that steps are easy to count.
END_SECS = 30.0


class DigitsPlayer:
    """A worker with its replica of a small classifier of handwritten digits."""

    def __init__(self, directory: Path) -> None:
        from sklearn.datasets import load_digits

        keras.utils.set_random_seed(SEED)
        tf.config.experimental.enable_op_determinism()  # What is repeated must come to the same bits.
        self._strategy = replicast.Strategy()
        self.rank = self._strategy.rank
        path = notes_path(directory, self.rank)
        before = list(NoteReader(path).new())  # Of the life before, if there was one.
        self._noted = {note.name for note in before if isinstance(note, Moment)}
        self._done = max((note.done for note in before if isinstance(note, Progress)), default=0)
        self._notes = NoteWriter(path)
        digits = load_digits()
        self._images = (digits.data / 16.0).astype(np.float32)
        self._labels = digits.target
        self._directory = directory
        self._replicas: replicast.Replicas | None = None
        self._boundaries: list[keras.callbacks.Callback] = []
        with self._strategy.scope():
            self.model = build_model()

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        """Trains for so many steps, or for what a restored state has left of them, with the other workers."""

        def step_done(batch: int, logs: dict[str, float]) -> None:
            self._done += 1
            if self.rank == 0:
                self._notes.write(Progress(doing=doing, done=self._done, loss=float(logs["loss"])))
            if after_step is not None:
                after_step(self._step())

        self.model.fit(
            self._images[:EXAMPLES],
            self._labels[:EXAMPLES],
            batch_size=BATCH,
            epochs=steps // STEPS_PER_EPOCH,
            verbose=0,
            callbacks=[*self._boundaries, keras.callbacks.LambdaCallback(on_train_batch_end=step_done)],
        )

    def open_replicas(self) -> replicast.Replicas:
        """This worker's `Replicas`, made when they are not there yet; training has their callback then."""
        if self._replicas is not None:
            return self._replicas
        replicas = self._open(RUN, save_every=None)
        trained = int(self.model.optimizer.iterations.numpy())
        if trained > 0:
            replicas.boundary(steps=trained)  # Else they would count from here, and the screen from before.
        return replicas

    def begin_again(self, run: str, *, save_every: int) -> replicast.Replicas:
        """Makes the model anew, with the same first weights and the same data to come, and its `Replicas`."""
        if self._replicas is not None:
            self._replicas.close()
        keras.utils.set_random_seed(SEED)
        with self._strategy.scope():
            self.model = build_model()
        return self._open(run, save_every=save_every)

    def note_moment(self, name: str, audit: AuditReport | None = None) -> None:
        """Notes down what this worker's replica is now, and what an audit has found."""
        weights = {weight.path: weight.numpy() for weight in self.model.weights}
        total = sum(np.sum(value, dtype=np.float64) for value in weights.values())
        self._notes.write(
            Moment(
                name=name,
                worker=self.rank,
                weights_sum=float(total),
                digest=digest_state(weights),
                step=self._step(),
                process=os.getpid(),
                audit=audit,
            )
        )
        self._noted.add(name)

    def has_noted(self, name: str) -> bool:
        """Whether this worker has noted a moment, in this life or in the one before."""
        return name in self._noted

    def wait_for_the_end(self, sender: str) -> None:
        """Waits for a signal that ends this process; raises when it does not come, and names the sender."""
        time.sleep(END_SECS)
        raise RuntimeError(f"Waited {END_SECS:.0f} s for {sender}. Received: nothing")

    def _open(self, run: str, *, save_every: int | None) -> replicast.Replicas:
        self._replicas = replicast.Replicas(self.model, run_dir=self._directory / run)
        self._boundaries = [self._replicas.callback(save_every=save_every)]
        return self._replicas

    def _step(self) -> int:
        return self._done if self._replicas is None else self._replicas.step


def build_model() -> Any:
    """A classifier of 64 pixels with one hidden layer."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="digits"),
        ],
        name="classifier",  # Else Keras counts, and a checkpoint's names depend on how many were made before.
    )
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy")
    return model


def main() -> None:
    """Plays every act that is not over yet."""
    player = DigitsPlayer(Path(sys.argv[1]))
    for act in programme():
        if not player.has_noted(act.moments[-1]):
            act.play(player)


if __name__ == "__main__":
    main()
