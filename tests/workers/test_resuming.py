"""Where a restored `fit` continues: after any step of an undisturbed one, with the next batch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.position import Position, Training
from replicast.training import resuming
from replicast.training.feeding import DataPosition
from replicast.training.resuming import Lengths, data_position, read_to
from replicast.update.state import MemoryState
from tests.pool import Pool

BATCHES, EPOCHS = 5, 3


@pytest.mark.parametrize(
    ("epochs", "batch", "lengths", "expected"),
    [
        (0, 3, Lengths(5, None), DataPosition(0, 3, epoch=0)),
        (2, 3, Lengths(5, None), DataPosition(4, 3, epoch=2)),
        (2, 3, Lengths(None, None), DataPosition(2, 3, epoch=2)),
        (2, 3, Lengths(None, 4), DataPosition(0, 11, epoch=0)),
        (2, 1, Lengths(15, 5), DataPosition(0, 11, epoch=0)),
        (3, 1, Lengths(15, 5), DataPosition(1, 1, epoch=2)),
        (2, 0, Lengths(5, 5), DataPosition(2, 0, epoch=1)),
        (1, 1, Lengths(5, 4), DataPosition(0, 5, epoch=0)),
        (2, 3, Lengths(5, 4), DataPosition(1, 3, epoch=1)),  # the second epoch has a single batch
        (2, 0, Lengths(None, 3, execution=2), DataPosition(0, 8, epoch=0)),
        (2, 2, Lengths(7, 4, execution=2), DataPosition(1, 2, epoch=1)),
    ],
)
def test_the_place_in_the_data_follows_from_epochs_and_batches(
    epochs: int, batch: int, lengths: Lengths, expected: DataPosition
) -> None:
    assert data_position(epochs, batch, lengths) == expected


@pytest.mark.parametrize(
    ("epochs", "batch", "steps", "following", "used", "complete"),
    [
        (0, 2, 3, 2, 2, True),
        (1, 1, 3, 4, 4, True),
        (2, 1, 3, 1, 1, True),  # the second epoch ran out after two batches
        (2, 1, 5, 1, 1, True),  # the second epoch had none
        (2, 3, None, 3, 3, True),
        (0, 9, None, None, 5, False),
    ],
)
def test_data_of_unknown_length_is_read_as_keras_read_it(
    epochs: int, batch: int, steps: int | None, following: int | None, used: int, complete: bool
) -> None:
    current, *found = read_to(lambda: iter(range(BATCHES)), epochs, batch, steps)
    assert (next(current, None), *found) == (following, used, complete)


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        (Position(0, 12), 5, Position(2, 2)),
        (Position(1, 5), 5, Position(2, 0)),
        (Position(2, 3), 5, Position(2, 3)),
        (Position(1, 12), -2, Position(1, 12)),
    ],
)
def test_batches_beyond_the_length_are_whole_passes(
    position: Position, length: int, expected: Position
) -> None:
    assert position.in_passes_of(length) == expected


class Remembers(keras.Model):
    """Notes the batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen: list[list[int]] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.append([int(value) for value in np.ravel(data[0])])
        return {"loss": tf.constant(0.0)}


class Reshuffled(keras.utils.PyDataset):
    """Ten rows in an order that each end of an epoch draws anew."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._order = np.arange(10)
        self._random = np.random.default_rng(4)
        self._begun = 0

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> Any:
        rows = self._order[2 * number : 2 * number + 2]
        return 10.0 * self._begun + rows[:, None].astype("float32"), rows

    def on_epoch_begin(self) -> None:
        self._begun += 1

    def on_epoch_end(self) -> None:
        self._order = self._random.permutation(10)


class Fixed(keras.utils.PyDataset):
    """Ten rows that are the same in every epoch."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> Any:
        rows = np.arange(2 * number, 2 * number + 2)
        return rows[:, None].astype("float32"), rows


def generated(count: int | None) -> Iterator[Any]:
    draws, number = np.random.default_rng(9), 0
    while number != count:
        rows = draws.integers(0, 100, 2)
        yield rows[:, None].astype("float32"), rows
        number += 1


def rows() -> tf.data.Dataset:
    x = np.arange(10, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, x)).shuffle(10, seed=5)


def from_generator(count: int) -> tf.data.Dataset:
    spec = (tf.TensorSpec((None, 1), tf.float32), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(lambda: generated(count), output_signature=spec)


def undivided(data: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


ARRAY = np.arange(10, dtype="float32")[:, None]
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": ARRAY, "y": ARRAY, "batch_size": 2},
    "arrays, short epochs": lambda: {"x": ARRAY, "y": ARRAY, "batch_size": 2, "steps_per_epoch": 3},
    "dataset": lambda: {"x": rows().batch(2)},
    "repeated": lambda: {"x": rows().batch(2).repeat(EPOCHS), "steps_per_epoch": BATCHES},
    "short epochs": lambda: {"x": rows().batch(2), "steps_per_epoch": 3},
    "epochs as long as the data": lambda: {"x": rows().batch(2), "steps_per_epoch": BATCHES},
    "endless": lambda: {"x": rows().repeat().batch(2), "steps_per_epoch": 3},
    "unknown length": lambda: {"x": rows().batch(2).filter(lambda x, y: True)},
    "unknown length, short epochs": lambda: {"x": from_generator(7), "steps_per_epoch": 3},
    "endless generator": lambda: {"x": generated(None), "steps_per_epoch": 3},
    "generator": lambda: {"x": generated(8)},
    "reshuffled": lambda: {"x": Reshuffled(), "shuffle": False},
    "reshuffled, batches shuffled": lambda: {"x": Reshuffled()},
    "batches shuffled, short epochs": lambda: {"x": Fixed(), "steps_per_epoch": 3},
    "divided by TensorFlow": lambda: {"x": undivided(rows().batch(2))},
}


class Life:
    """A `fit` that goes on at a position, with the callback and without the rest of a job."""

    def __init__(self, strategy: Any, start: Position, data: dict[str, Any], rank: int = 0) -> None:
        random.seed(3)
        keras.utils.clear_session(free_memory=False)
        with strategy.scope():
            self.model = Remembers()
            self.model.compile("sgd", "mse", run_eagerly=True)
        self.positions: list[Position] = []
        self.epochs: list[tuple[int, int]] = []
        self.told: list[str] = []
        replicas = mock.MagicMock(strategy=strategy, **{"session.rank": rank})
        replicas.training.begin_fit.return_value = start
        replicas.training.reached.side_effect = lambda position, *_, **__: self.positions.append(position)
        ends = keras.callbacks.LambdaCallback(on_epoch_end=self._epoch_ended)
        callbacks = [BoundaryCallback(self.model, lambda: replicas, mock.MagicMock(), mock.MagicMock()), ends]
        tf.random.set_seed(1)  # arrays are shuffled the same way in every attempt
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        self.told = [str(each.message) for each in told]
        self.seen = [[*batch] for batch in self.model.seen]

    def _epoch_ended(self, epoch: int, logs: Any) -> None:
        self.epochs.append((epoch, len(self.model.seen)))


def attempts(strategy: Any, kind: str) -> dict[str, Any]:
    """All that an undisturbed training uses, and what is used after every third of its steps."""
    tf.random.set_seed(1)  # as every attempt does: datasets are made before it
    whole = Life(strategy, Position(), KINDS[kind]())
    done, wrong = 0, []
    for position in [*dict.fromkeys(whole.positions)][::3]:
        done = position_after(whole, position)
        again = Life(strategy, position, KINDS[kind]())
        ends = [(epoch, steps - done) for epoch, steps in whole.epochs if epoch >= position.epoch]
        if again.seen != whole.seen[done:] or again.epochs != ends:
            wrong.append((position, again.seen, again.epochs, ends))
        if any("ran out of data" in each for each in again.told) and not whole.told:
            wrong.append((position, again.told))
    return {"steps": len(whole.seen), "seen": whole.seen, "wrong": wrong}


def position_after(whole: Life, position: Position) -> int:
    """How many batches were used at this position."""
    before = [steps for epoch, steps in whole.epochs if epoch == position.epoch - 1]
    return (before[0] if before else 0) + position.batch


@pytest.mark.parametrize("kind", KINDS)
def test_fit_continues_with_the_next_batch_after_any_step(pool1: Pool, kind: str) -> None:
    (found,) = pool1.run(attempts, kind)
    assert found["steps"] > BATCHES
    assert found["wrong"] == []


CANNOT: dict[str, tuple[Callable[[], dict[str, Any]], Position, str]] = {
    "foreign": (lambda: {"x": rows().batch(2)}, Position(0, 3), "a tf.data.Dataset, a keras"),
    "generator": (lambda: {"x": generated(4)}, Position(0, 9), "a generator must be a new one"),
    "dataset": (lambda: {"x": rows().batch(2)}, Position(0, 9), "9 batches done of an epoch that has 5"),
    "threads": (lambda: {"x": Reshuffled(workers=2)}, Position(1, 2), "Keras reads it ahead"),
    "ahead": (lambda: {"x": Reshuffled(), "steps_per_epoch": 3}, Position(1, 2), "Leave out steps_per_epoch"),
}


def warned_of(strategy: Any, how: str, rank: int) -> list[str]:
    said: list[str] = []
    data, position, _ = CANNOT[how]
    with (
        mock.patch.object(resuming, "POSITIONED", () if how == "foreign" else resuming.POSITIONED),
        mock.patch("replicast.replicas.callback.logger.warning", said.append),
    ):
        Life(strategy, position, data(), rank)
    return said


@pytest.mark.parametrize("how", CANNOT)
def test_fit_says_once_what_cannot_be_positioned(pool1: Pool, how: str) -> None:
    ((said,),) = pool1.run(warned_of, how, 0)
    assert CANNOT[how][2] in said


def test_what_cannot_be_positioned_is_said_by_worker_0_alone(pool1: Pool) -> None:
    assert pool1.run(warned_of, "dataset", 1) == [[]]


def training(start: Position | None = None) -> Training:
    """A training of worker 0, without the rest of a job."""
    session, state = mock.MagicMock(rank=0, step=0), MemoryState({})
    attempt = Training(session, state)
    if start is not None:
        attempt.restored(start)
    return attempt


def custom_loop(attempt: Training, stop_after: int, saved: dict[int, Position]) -> list[int]:
    """Four of five batches a pass, whose length is not known; two for each step."""
    data, used = tf.data.Dataset.range(5).shuffle(5, seed=7).filter(lambda number: True).take(4), []
    while len(used) < stop_after:
        for batch in attempt.resume(data):
            used.append(int(batch))
            if len(used) % 2 == 0:
                attempt.used(2)
                saved[len(used)] = attempt.position
    return used


def test_a_custom_loop_of_short_passes_and_two_batches_a_step_continues_in_its_pass() -> None:
    saved: dict[int, Position] = {}
    whole = custom_loop(training(), 12, saved)
    assert saved == {2: Position(0, 2), 4: Position(0, 4), 6: Position(1, 2), 8: Position(1, 4)} | {
        10: Position(2, 2),
        12: Position(2, 4),
    }
    for done in (2, 6, 10):
        assert custom_loop(training(saved[done]), 12 - done, {}) == whole[done:]


def test_steps_before_the_first_pass_are_not_of_it() -> None:
    attempt = training()
    attempt.used(3)
    assert attempt.position == Position(0, 3)  # what the default assumes
    attempt.resume(tf.data.Dataset.range(5))
    assert attempt.position == Position()
