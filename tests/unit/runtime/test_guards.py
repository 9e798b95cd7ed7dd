"""A guard refuses an update: its author is told, no replica changes, and training continues."""

from __future__ import annotations

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.testing.job import DEADLINE_SECS, Job
from replicast.update.guard import Guard
from tests.unit.runtime.playing import bias, bias_of, refusal


@pytest.mark.parametrize("author", [0, 1])
def test_too_large_a_change_is_refused_with_the_bound_and_a_small_one_passes(author: int) -> None:
    with Job(2, guard=Guard(max_norm=1.0)) as job:
        session = job.workers[author].session
        large, small = session.propose(bias(10.0, id="large")), session.propose(bias(0.5, id="small"))
        job.train(8)
        error = refusal(large)
        assert (error.variable, error.expected) == ("dense/bias", "at most 1 (max_norm)")
        assert small.result(DEADLINE_SECS).sequence == 1
        assert list(job.journal.history().by_id) == ["small"]
        assert job.values()[0] == job.values()[1]


def test_what_a_function_returns_is_measured_against_the_values_of_its_boundary() -> None:
    with Job(2, guard=Guard(max_relative_change=0.5)) as job:
        session = job.workers[1].session
        tickets = {
            id_: session.proposals.propose_function(id_, lambda v, f=f: {"kernel": v["kernel"] * f}, 1, None)
            for id_, f in {"double": np.float32(2.0), "slightly": np.float32(1.1)}.items()
        }
        job.train(12)
        assert (refusal(tickets["double"]).received or "").startswith("1, 2 times")
        assert tickets["slightly"].result(DEADLINE_SECS).stage == "verified"
        assert job.values()[0] == job.values()[1]


def test_what_is_denied_changes_nothing_anywhere_whoever_proposes_it() -> None:
    with Job(2, guard=Guard(deny=["dense/*"])) as job:
        before = job.values()
        ticket = job.workers[1].session.propose(bias(1.0))
        with pytest.raises(UpdateRefused, match="denies"):
            job.push(bias(1.0))
        job.train(4)
        assert "denies" in refusal(ticket).problem
        assert job.values() == before
    assert job.board.buffers == {}


def test_what_a_guard_lets_through_comes_from_outside_too() -> None:
    with Job(2, guard=Guard(max_norm=10.0)) as job:
        ticket = job.push(bias(1.0))
        job.train(4)
        assert job.outcomes[ticket].outcome.sequence == 1
        assert [bias_of(worker) for worker in job.workers] == [1.0, 1.0]
