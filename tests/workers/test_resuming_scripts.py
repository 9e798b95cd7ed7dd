"""Scripts that resume: custom loops over any data, several trainings, other callbacks at epoch ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

import replicast
from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.job_checkpoints import Checkpoints, SavePlan
from replicast.replicas.position import Position, Training
from replicast.testing.job import Job, eventually
from tests.pool import Pool
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_resuming import ARRAY, BATCHES, Remembers, Reshuffled, rows, training

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
    ours = BoundaryCallback(model, lambda: replicas, mock.MagicMock(), mock.MagicMock())
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
    session, state, saved = mock.MagicMock(rank=0, step=8), mock.MagicMock(), []
    attempt = Training(session, state)
    checkpoints = Checkpoints(session, state, attempt, mock.MagicMock(), attempt=0)
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
        self._replicas = mock.MagicMock(strategy=strategy, **{"session.rank": 0})
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
        callback = BoundaryCallback(self.model, lambda: self._replicas, SavePlan(), mock.MagicMock())
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
        attempt = Training(worker.session, worker.state)
        attempt.warn_of_what_was_left()
        assert caplog.messages == []
        for step in (7, 3, 7):
            worker.session.propose(replicast.Update().scale("dense/kernel", 2.0), at_step=step)
        eventually(lambda: [one["step"] for one in worker.session.operations()] == [7, 3, 7])
        attempt.warn_of_what_was_left()
    (said,) = caplog.messages
    assert said.startswith(
        "the training ended at step 0; updates scheduled for step 3, 7 were not applied and stay in the "
        "journal for a later start"
    )
