"""Which `fit` of a script a restored position belongs to."""

from __future__ import annotations

import json

import numpy as np
import pytest

from replicast.errors import CheckpointError
from replicast.replicas.position import Fit, Fits, FrozenVariables, Position
from replicast.testing.job import DEADLINE_SECS, Job, Worker
from replicast.update.edits import Edit, EditKind
from replicast.update.update import Update

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
        frozen, before = FrozenVariables(worker.session, worker.state), bits(worker)
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
        frozen = FrozenVariables(worker.session, worker.state)
        frozen.keep()
        ticket = worker.session.propose(Update().scale("optimizer/learning_rate", 0.5))
        job.train(1)
        assert ticket.result(DEADLINE_SECS).step <= 1
        after = bits(worker)
        frozen.put_back()
        assert bits(worker) == after
        frozen.keep()
        assign(worker, "optimizer/learning_rate", 0.7)
        frozen.put_back()
        assert bits(worker) == after
