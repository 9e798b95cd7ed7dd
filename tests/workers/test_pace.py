"""What a worker's note tells of its pace and its way."""

from __future__ import annotations

import pytest

from replicast.replicas.position import Fit, Position
from replicast.replicas.worker_notes import Pace, memory_bytes, progress


def test_the_step_time_is_the_mean_of_the_last_steps() -> None:
    pace = Pace()
    assert pace.look(0, 100.0, training=True) == {"step_secs": None, "stepped_at": None}
    assert pace.look(10, 101.0, training=True) == {"step_secs": 0.1, "stepped_at": 101.0}
    assert pace.look(10, 102.0, training=True) == {"step_secs": 0.1, "stepped_at": 101.0}
    assert pace.look(15, 103.0, training=True)["step_secs"] == pytest.approx(0.2)


def test_a_pause_between_two_trainings_is_no_slow_step() -> None:
    pace = Pace()
    pace.look(0, 100.0, training=True)
    pace.look(10, 101.0, training=True)
    pace.look(10, 400.0, training=False)
    pace.look(10, 500.0, training=True)
    assert pace.look(20, 501.0, training=True)["step_secs"] == pytest.approx(0.1)


def test_a_step_that_goes_back_begins_a_new_mean() -> None:
    pace = Pace()
    pace.look(10, 100.0, training=True)
    pace.look(20, 101.0, training=True)
    assert pace.look(10, 102.0, training=True)["step_secs"] == pytest.approx(0.1)
    assert pace.look(15, 103.0, training=True)["step_secs"] == pytest.approx(0.2)


def test_the_steps_left_are_those_of_all_epochs_that_remain() -> None:
    fits = (Fit(2, 10), Fit(4, 25))
    assert progress(Position(1, 5, fits)) == {"epoch": 1, "epochs": 4, "steps_left": 70}
    assert progress(Position(4, 0, fits)) == {"epoch": 3, "epochs": 4, "steps_left": 0}


def test_what_is_not_known_is_not_told() -> None:
    assert progress(Position(1, 5, (Fit(4),))) == {"epoch": 1, "epochs": 4}
    assert progress(Position(2, 5, (), "loop")) == {"epoch": 2}


def test_the_memory_of_a_process_is_known() -> None:
    assert (memory_bytes() or 0) > 1_000_000
