"""A guard in the way of an update: its author is told, nothing moves, and training goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.guard import Guard
from replicast.protocol import Ticket
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, start_values


def guarded(job: Job, guard: Guard) -> None:
    for worker in job.workers:
        worker.member.guard = guard


def refusal(ticket: Ticket) -> UpdateRefused:
    with pytest.raises(UpdateRefused) as caught:
        ticket.result(DEADLINE_SECS)
    return caught.value


def unchanged(worker: Worker) -> bool:
    return all(np.array_equal(value, start_values()[name]) for name, value in worker.state.values.items())


@pytest.mark.parametrize("author", [0, 1])
def test_too_large_a_change_is_refused_with_the_bound_and_a_small_one_passes(author: int) -> None:
    with Job(2) as job:
        guarded(job, Guard(max_norm=1.0))
        member = job.workers[author].member
        large, small = member.propose(bias(10.0, id="large")), member.propose(bias(0.5, id="small"))
        job.train(8)
        error = refusal(large)
        assert (error.variable, error.expected) == ("dense/bias", "at most 1 (max_norm)")
        assert small.result(DEADLINE_SECS).sequence == 1
        assert [record.id for record in job.journal.records()] == ["small"]
        assert job.values()[0] == job.values()[1]


def test_what_a_function_returns_is_measured_against_the_values_of_its_boundary() -> None:
    with Job(2) as job:
        guarded(job, Guard(max_relative_change=0.5))
        member = job.workers[1].member
        kernel: Any = {"double": 2.0, "slightly": 1.1}
        tickets = {
            id_: member.propose_function(id_, lambda v, f=f: {"kernel": v["kernel"] * np.float32(f)}, 1, None)
            for id_, f in kernel.items()
        }
        job.train(12)
        assert refusal(tickets["double"]).received == "1, 2 times the bound"
        assert tickets["slightly"].result(DEADLINE_SECS).stage == "verified"
        assert job.values()[0] == job.values()[1]


def test_what_is_denied_changes_nothing_anywhere() -> None:
    with Job(2) as job:
        guarded(job, Guard(deny=["dense/*"]))
        ticket = job.workers[1].member.propose(bias(1.0))
        job.train(4)
        assert "denies" in refusal(ticket).problem
        assert all(unchanged(worker) for worker in job.workers)
