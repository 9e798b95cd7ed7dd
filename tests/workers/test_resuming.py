"""Where a restored `fit` continues: after any step of an undisturbed one, with the next batch."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.errors import CheckpointError
from replicast.replicas.callback import ReplicasCallback
from replicast.replicas.job_checkpoints import Checkpoints, SavePlan
from replicast.replicas.position import Fit, Fits, FrozenVariables, Position, Training
from replicast.training import resuming
from replicast.training.feeding import DataPosition
from replicast.training.resuming import Lengths, data_position, read_to
from replicast.update.edits import Edit, EditKind
from replicast.update.update import Update
from tests.pool import Pool
from tests.threads import DEADLINE_SECS, Job, MemoryState, Worker, eventually
from tests.workers.recipes import arrays, perceptron

BATCHES, EPOCHS = 5, 3


def begun(model: keras.Model, worker: Any) -> Any:
    """A `Replicas` of this model whose training begins on this worker."""
    return mock.MagicMock(model=model, **{"training_begins.return_value": worker})


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
        replicas = mock.MagicMock(job=strategy, **{"session.rank": rank})
        replicas.training.begin_fit.return_value = start
        replicas.training.reached.side_effect = lambda position, *_, **__: self.positions.append(position)
        ends = keras.callbacks.LambdaCallback(on_epoch_end=self._epoch_ended)
        callbacks = [ReplicasCallback(begun(self.model, replicas)), ends]
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
    "foreign": (lambda: {"x": rows().batch(2)}, Position(0, 3), "Pass a tf.data.Dataset"),
    "generator": (lambda: {"x": generated(4)}, Position(0, 9), "a generator must be a new one"),
    "dataset": (lambda: {"x": rows().batch(2)}, Position(0, 9), "9 batches done of an epoch that has 5"),
    "threads": (lambda: {"x": Reshuffled(workers=2)}, Position(1, 2), "with workers=1"),
    "ahead": (lambda: {"x": Reshuffled(), "steps_per_epoch": 3}, Position(1, 2), "without steps_per_epoch"),
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
    attempt = Training(mock.MagicMock(rank=0, step=0, state=MemoryState({})))
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


# Scripts that resume: custom loops over any data, several trainings, other callbacks at epoch ends.

UNCERTAIN = "This data cannot be positioned reliably"


def given(kind: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "dataset": lambda: tf.data.Dataset.range(5),
        "list": lambda: list(range(5)),
        "generator": lambda: (number for number in range(5)),
        "iterable": lambda: {number: number for number in range(5)},
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["dataset", "list", "generator", "iterable"])
def test_a_custom_loop_continues_in_any_kind_of_data_and_warns_once_in_every_attempt_of_what_is_uncertain(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for start, expected in [
        (None, [0, 1, 2, 3, 4]),
        (Position(0, 3), [3, 4]),
        (Position(2, 1), [1, 2, 3, 4]),
    ]:
        caplog.clear()
        attempt = training(start)
        assert [int(batch) for batch in attempt.resume(given(kind))] == expected
        assert [int(batch) for batch in attempt.resume(given(kind))] == [0, 1, 2, 3, 4]
        warned = [UNCERTAIN in message for message in caplog.messages]
        assert warned == ([True] if kind in ("generator", "iterable") else [])


def test_batches_beyond_the_length_of_a_list_are_whole_passes() -> None:
    attempt = training(Position(0, 12))
    assert [*attempt.resume(given("list"))] == [2, 3, 4]
    assert attempt.position == Position(2, 2)


def order_of_events(strategy: Any) -> list[str]:
    """What happens in a `fit` that goes on in its first epoch, with another callback behind ours."""
    with strategy.scope():
        model = Remembers()
        model.compile("sgd", "mse", run_eagerly=True)
    events: list[str] = []
    replicas = mock.MagicMock(**{"session.rank": 0})
    attempt = replicas.training
    attempt.begin_fit.return_value = Position(0, 3)
    attempt.frozen_variables.keep.side_effect = lambda names: events.append("kept")
    attempt.frozen_variables.put_back.side_effect = lambda: events.append("put back")
    replicas.checkpoints.after_epoch.side_effect = lambda: events.append("saved")
    attempt.reached.side_effect = lambda *_, epoch_ends=False, **__: events.extend(["ends"] * epoch_ends)
    other = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: events.append("other begins"),
        on_epoch_begin=lambda epoch, logs: events.append("other begins epoch"),
        on_epoch_end=lambda epoch, logs: events.append("other ends epoch"),
    )
    ours = ReplicasCallback(begun(model, replicas))
    given_by_user = keras.callbacks.CallbackList(
        [ours, other], add_history=True, model=model, epochs=2, steps=BATCHES
    )
    model.fit(ARRAY, ARRAY, batch_size=2, epochs=2, verbose=0, callbacks=given_by_user)
    assert [type(each).__name__ for each in given_by_user.callbacks][2:] == ["History"]
    return events


def test_a_checkpoint_at_an_epochs_end_is_made_after_all_callbacks_and_what_they_do_twice_is_put_back(
    pool1: Pool,
) -> None:
    (events,) = pool1.run(order_of_events)
    epoch = ["other begins epoch", "put back", "ends", "other ends epoch", "saved"]
    assert events == ["other begins", "kept", *epoch, *epoch]


def test_a_checkpoint_that_is_due_at_the_last_batch_of_an_epoch_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, saved = mock.MagicMock(rank=0, step=8), []
    attempt = Training(session)
    checkpoints = Checkpoints(session, attempt, mock.MagicMock())
    monkeypatch.setattr(
        checkpoints, "save_in_passing", lambda: saved.append((attempt.position, dict(attempt.metrics)))
    )
    checkpoints.follow(SavePlan(every=4))
    attempt.reached(Position(1), {"loss": 2.0}, epoch_ends=True)
    checkpoints.after_step(1)
    assert saved == []
    attempt.reached(Position(1), {"loss": 2.0, "val_loss": 1.0})
    checkpoints.after_epoch()
    checkpoints.after_epoch()
    assert saved == [(Position(1), {"loss": 2.0, "val_loss": 1.0})]


class Lives:
    """A script of several trainings that is run again, with the callback and without the rest of a job."""

    def __init__(self, strategy: Any, start: Position | None = None) -> None:
        random.seed(3)
        keras.utils.clear_session(free_memory=False)
        with strategy.scope():
            self.model = Remembers()
            self.model.compile("sgd", "mse", run_eagerly=True)
        self.attempt = training(start)
        self.positions: list[Position] = []
        self._replicas = mock.MagicMock(job=strategy, **{"session.rank": 0})
        self._replicas.training = self.attempt
        self._replicas.boundary.side_effect = lambda **_: self.positions.append(self.attempt.position)

    def run(self) -> list[list[int]]:
        data, reshuffled = rows().batch(2), Reshuffled()
        for _ in range(2):
            self._fit(data, epochs=1)
        self._fit(rows().batch(2).repeat(), epochs=2, steps_per_epoch=3)
        for _ in range(2):
            self._fit(reshuffled, epochs=2)
        self._fit(data, epochs=2)
        return [[*batch] for batch in self.model.seen]

    def _fit(self, data: Any, **options: Any) -> None:
        callback = ReplicasCallback(begun(self.model, self._replicas))
        self.model.fit(data, verbose=0, callbacks=[callback], **options)


def scripts(strategy: Any) -> list[Any]:
    """Where another attempt trains something else than the first one did after every fourth of its steps."""
    first = Lives(strategy)
    whole = first.run()
    wrong = []
    for done in range(1, len(whole) + 1, 4):
        rest = Lives(strategy, first.positions[done - 1]).run()
        if rest != whole[done:]:
            wrong.append((done, len(whole), rest))
    return wrong


def test_a_script_of_several_fits_continues_in_the_one_where_it_was_with_the_data_that_came_next(
    pool1: Pool,
) -> None:
    (wrong,) = pool1.run(scripts)
    assert wrong == []


class Proposing(keras.callbacks.Callback):
    """Proposes at every moment that there is, and notes which it was and under which id."""

    def __init__(self, replicas: replicast.Replicas) -> None:
        super().__init__()
        self.replicas = replicas
        self.ids: list[tuple[str, str]] = []

    def note(self, moment: str) -> None:
        update = replicast.Update().scale("optimizer/learning_rate", 1.0)
        self.ids.append((moment, self.replicas.propose(update).id))

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("training begins")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.note(f"epoch {epoch} begins")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note(f"batch begins behind {self.replicas.step}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note(f"batch ends behind {self.replicas.step}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note(f"epoch {epoch} ends")


def ids_in_two_lives(strategy: Any, directory: Path, ours_first: bool) -> list[list[tuple[str, str]]]:
    attempts = []
    for _ in range(2):
        keras.backend.clear_session()  # another process would give the same names
        model = perceptron(strategy)
        replicas = replicast.Replicas(model, run_dir=directory)
        replicas.restore()
        theirs = Proposing(replicas)
        theirs.note("script begins")
        both = [replicas.callback(save_every=11), theirs]
        x, y = arrays()
        model.fit(
            x[:64], y[:64], batch_size=8, epochs=2, callbacks=both if ours_first else both[::-1], verbose=0
        )
        replicas.close()
        attempts.append(theirs.ids)
    return attempts


@pytest.mark.parametrize("ours_first", [True, False])
def test_what_a_callback_proposes_at_a_moment_has_the_same_id_in_an_attempt_that_begins_there(
    pool1: Pool, ours_first: bool, tmp_path: Path
) -> None:
    ((first, second),) = pool1.run(ids_in_two_lives, tmp_path, ours_first)
    assert len({id_ for _, id_ in first}) == len(first)
    moments = [moment for moment, _ in first]
    begun = [moments.index(moment) for moment in ("script begins", "training begins", "epoch 1 begins")]
    rest = moments.index("batch begins behind 11")
    assert second == [*(first[place] for place in begun), *first[rest:]]
    assert dict(first)["batch begins behind 11"] == "worker-0-step-11-batch-1"


def test_what_was_meant_for_a_step_that_never_came_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Job(1) as job:
        (worker,) = job.workers
        attempt = Training(worker.session)
        attempt.warn_of_what_was_left()
        assert caplog.messages == []
        for step in (7, 3, 7):
            worker.propose(replicast.Update().scale("dense/kernel", 2.0), at_step=step)
        eventually(lambda: [one["step"] for one in worker.session.operations()] == [7, 3, 7])
        attempt.warn_of_what_was_left()
    (said,) = caplog.messages
    assert said.startswith(
        "the training ended at step 0; updates scheduled for step 3, 7 were not applied and stay in the "
        "journal for a later start"
    )


# Which fit of a script a restored position belongs to.

FIRST, SECOND, THIRD = Fit(4, 9), Fit(3, 5), Fit(1, None)


def over(position: Position) -> bool:
    return position.inside == "over"


def saved(fits: Fits, position: Position) -> Position:
    """What a checkpoint at this position says, when another attempt reads it."""
    stamped = fits.stamped(position)
    return Position(stamped.epoch, stamped.batch).at(json.loads(json.dumps(stamped.script())))


def done(fits: Fits, fit: Fit, epochs: int | None = None) -> None:
    fits.begin(fit)
    fits.end(fit.epochs if epochs is None else epochs, stopped=epochs is not None)


def later(position: Position) -> Fits:
    attempt = Fits()
    attempt.resumed = position
    return attempt


def test_a_checkpoint_of_the_second_fit_passes_the_first_one_over_and_continues_in_the_second() -> None:
    attempt = Fits()
    done(attempt, FIRST)
    attempt.begin(SECOND)
    again = later(saved(attempt, Position(1, 3)))
    first = again.begin(FIRST)
    assert over(first)
    assert first.epoch == 4
    assert again.begin(SECOND) == Position(1, 3)
    again.end(3, stopped=False)
    assert again.begin(THIRD) == Position()


def test_fits_that_are_alike_are_told_apart_by_their_order() -> None:
    attempt = Fits()
    for _ in range(3):
        done(attempt, THIRD)
    attempt.begin(THIRD)
    for _ in range(2):  # and so in the attempt after the next
        attempt = later(saved(attempt, Position(0, 7)))
        assert [over(attempt.begin(THIRD)) for _ in range(3)] == [True] * 3
        assert attempt.begin(THIRD) == Position(0, 7)


def test_a_checkpoint_at_the_end_of_a_fit_is_taken_by_it_also_with_more_epochs() -> None:
    attempt = Fits()
    attempt.begin(FIRST)
    again = later(saved(attempt, Position(4)))
    found = again.begin(Fit(6, 9))
    assert found == Position(4)
    assert not over(found)
    assert again.begin(SECOND) == Position()


def test_a_fit_that_was_stopped_stays_so_unless_it_is_called_otherwise() -> None:
    attempt = Fits()
    done(attempt, FIRST, epochs=2)
    again = later(saved(attempt, Position(2)))
    found = again.begin(FIRST)
    assert found == Position(2)
    assert found.inside == "stopped"
    assert again.begin(SECOND) == Position()
    found = later(saved(attempt, Position(2))).begin(Fit(8, 9))  # the user wants more of it
    assert found == Position(2)
    assert found.inside == "fit"


def test_a_custom_loop_between_fits_continues_when_the_fit_before_it_is_passed_over() -> None:
    attempt = Fits()
    attempt.begin(FIRST)
    position = attempt.stamped(Position(4))
    attempt.end(4, stopped=False)
    position = attempt.used(position, 7)
    again = later(saved(attempt, position))
    assert over(again.begin(FIRST))
    assert again.take_loop() == Position(0, 7)
    assert again.begin(SECOND) == Position()


def test_the_position_of_a_custom_loop_is_not_taken_by_the_fit_behind_it() -> None:
    attempt = Fits()
    again = later(saved(attempt, attempt.used(Position(), 7)))
    assert again.begin(FIRST) == Position()
    assert again.take_loop() is None


def test_a_loop_that_comes_again_before_the_place_of_the_checkpoint_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempt = Fits()
    attempt.used(Position(), 5)
    attempt.begin(FIRST)
    again = later(saved(attempt, Position(1, 3)))
    assert again.take_loop() is None
    again.used(Position(), 1)
    assert ["THIS LOOP REPEATS TRAINING" in message for message in caplog.messages] == [True]
    assert again.begin(FIRST) == Position(1, 3)


def test_a_script_that_leaves_out_what_was_done_continues_with_the_fit_of_the_checkpoint() -> None:
    attempt = Fits()
    done(attempt, FIRST)
    attempt.begin(SECOND)
    again = later(saved(attempt, Position(1, 3)))
    assert again.begin(SECOND) == Position(1, 3)
    assert saved(again, Position(1, 4)).fits == (FIRST._replace(ended=4), SECOND)


def test_another_fit_in_the_place_of_one_that_was_done_is_refused() -> None:
    attempt = Fits()
    done(attempt, FIRST)
    attempt.begin(SECOND)
    with pytest.raises(CheckpointError, match="Expected: a fit with 4 epochs of 9 batches") as raised:
        later(saved(attempt, Position(1, 3))).begin(Fit(5, 9))
    assert raised.value.received == "a fit with 5 epochs of 9 batches"


def test_a_script_that_ends_before_the_place_of_the_checkpoint_has_trained_nothing() -> None:
    attempt = Fits()
    done(attempt, THIRD)
    attempt.begin(THIRD)
    again = later(saved(attempt, Position(0, 3)))
    assert over(again.begin(THIRD))
    assert "the script ended after 1" in again.awaited()
    again.begin(THIRD)
    assert again.awaited() == ""


def test_a_checkpoint_of_an_earlier_version_is_taken_by_whatever_comes_first() -> None:
    assert Position(1, 3).at(None).fits is None
    assert later(Position(1, 3)).begin(FIRST) == Position(1, 3)
    assert later(Position(1, 3)).take_loop() == Position(1, 3)


def assign(worker: Worker, name: str, value: float) -> None:
    like = worker.state.values[name]
    worker.state.apply([Edit(EditKind.ASSIGN, name, {"value": np.full_like(like, value)})])


def bits(worker: Worker) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in worker.state.values.items()}


def test_what_a_script_changes_again_is_put_back() -> None:
    with Job(1) as job:
        (worker,) = job.workers
        frozen, before = FrozenVariables(worker.session), bits(worker)
        frozen.put_back()
        frozen.keep()
        for value in (3.0, 4.0):
            assign(worker, "dense/kernel", value)
            frozen.put_back()
            assert bits(worker) == before
        frozen.release()
        assign(worker, "dense/kernel", 5.0)
        frozen.put_back()
        assert bits(worker) != before


def test_what_an_update_changes_is_not_put_back() -> None:
    with Job(1) as job:
        (worker,) = job.workers
        frozen = FrozenVariables(worker.session)
        frozen.keep()
        ticket = worker.propose(Update().scale("optimizer/learning_rate", 0.5))
        job.train(1)
        assert ticket.result(DEADLINE_SECS).step <= 1
        after = bits(worker)
        frozen.put_back()
        assert bits(worker) == after
        frozen.keep()
        assign(worker, "optimizer/learning_rate", 0.7)
        frozen.put_back()
        assert bits(worker) == after
