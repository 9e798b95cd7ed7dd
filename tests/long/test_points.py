"""A job is killed at every fault point in turn, and ends with the result of an undisturbed job."""

from __future__ import annotations

from pathlib import Path

from replicast.faults import Point
from tests.faults.test_points import assert_nothing_is_lost, undisturbed
from tests.soak.jobs import Outcome

__all__ = ["undisturbed"]  # the fixture

# One attempt of the job for each. Not at the first occurrence, so that an attempt trains a few steps. Points
# that only worker 0 reaches alternate with those at which worker 1 can die. How far an attempt gets depends
# on timing: the job is long enough that the last attempt has many steps left.
WALK = [
    (1, "propose", 2),
    (0, "journal", 2),
    (1, "stage", 3),
    (0, "rename", 7),
    (0, "commit", 2),
    (1, "ready", 3),
    (0, "verify", 3),
    (1, "apply", 4),
    (0, "write", 9),
    (1, "ack", 3),
    (0, "snapshot", 2),
]

OF_TRIALS = {Point.DECIDE, Point.SETTLE}
"""This job has no trial: tests/long/test_killed_trials.py has."""


def test_a_job_that_is_killed_at_every_point_ends_with_the_state_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    assert {name for _, name, _ in WALK} == set(Point) - OF_TRIALS
    assert_nothing_is_lost(WALK, tmp_path / "run", undisturbed)
