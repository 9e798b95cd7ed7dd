"""A job is killed at two fault points in turn, and ends with the result of an undisturbed job.

Each kill costs a start of real workers: tests/long has all points.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.faults import Fault, Point
from tests.soak.jobs import PUSHED, Outcome, losses, run_job

HANGS_SECS = 900
"""Far more than a job takes, also on a busy machine."""

SOME = [(0, "commit", 2), (1, "apply", 4)]
"""Worker, point and occurrence, one for each attempt: at a commit, and between it and its receipt.

Not at the first occurrence, so that an attempt trains a few steps.
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = run_job(tmp_path_factory.mktemp("points") / "undisturbed", workers=2, give_up_secs=HANGS_SECS)
    assert outcome.code == 0, outcome.said
    assert not outcome.fired
    return outcome


def assert_nothing_is_lost(walk: list[tuple[int, str, int]], directory: Path, undisturbed: Outcome) -> None:
    """Runs the job with a kill in each attempt; every one must fire."""
    plan = [
        Fault(worker, Point(name), occurrence, attempt=attempt)
        for attempt, (worker, name, occurrence) in enumerate(walk)
    ]
    outcome = run_job(directory, plan, workers=2, max_restarts=len(plan) + 1, give_up_secs=HANGS_SECS)
    assert losses(outcome, undisturbed) == [], outcome.said
    assert [fired["point"] for fired in outcome.fired] == [name for _, name, _ in walk]
    assert outcome.attempts == len(plan) + 1, "an unplanned restart"


def test_a_job_that_is_killed_at_and_after_a_commit_ends_with_the_state_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    assert_nothing_is_lost(SOME, tmp_path / "run", undisturbed)


def test_the_undisturbed_job_has_updates_of_every_kind(undisturbed: Outcome) -> None:
    last_step = int(undisturbed.finals[0].split()[0])
    ids = {id_ for id_, step in undisturbed.updates if step <= last_step}
    assert PUSHED in ids
    assert {"worker-1-step-2-1", "worker-1-step-2-2", "function-0-step-4-1"} <= ids
    assert undisturbed.verified == ids
    assert len(set(undisturbed.finals)) == 1
