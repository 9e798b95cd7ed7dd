"""A job is killed at every fault point in turn, and ends with the result of an undisturbed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.faults import Fault, Point
from tests.soak.jobs import PUSHED, Outcome, losses, run_job

HANGS_SECS = 900
"""Far more than a job takes, also on a busy machine."""

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
"""This job has no trial: tests/faults/test_trials.py has."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = run_job(tmp_path_factory.mktemp("points") / "undisturbed", workers=2, give_up_secs=HANGS_SECS)
    assert outcome.code == 0, outcome.said
    assert not outcome.fired
    return outcome


def test_a_job_that_is_killed_at_every_point_ends_with_the_state_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    plan = [
        Fault(worker, Point(name), occurrence, attempt=attempt)
        for attempt, (worker, name, occurrence) in enumerate(WALK)
    ]
    outcome = run_job(tmp_path / "run", plan, workers=2, max_restarts=len(plan) + 1, give_up_secs=HANGS_SECS)
    assert losses(outcome, undisturbed) == [], outcome.said
    assert [fired["point"] for fired in outcome.fired] == [name for _, name, _ in WALK]
    assert {name for _, name, _ in WALK} == set(Point) - OF_TRIALS
    assert outcome.attempts == len(plan) + 1, "an unplanned restart"


def test_the_undisturbed_job_has_updates_of_every_kind(undisturbed: Outcome) -> None:
    last_step = int(undisturbed.finals[0].split()[0])
    ids = {id_ for id_, step in undisturbed.updates if step <= last_step}
    assert PUSHED in ids
    assert {"worker-1-step-2-1", "worker-1-step-2-2", "function-0-step-4-1"} <= ids
    assert undisturbed.verified == ids
    assert len(set(undisturbed.finals)) == 1
