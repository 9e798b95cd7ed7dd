"""Those who stand at a boundary when they stage an update are held there: they need not be asked to stop."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.protocol.messages import Hold, Stage
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


def said(job: Job) -> list[Any]:
    """What the coordinator says from now on."""
    heard: list[Any] = []
    append = job.workers[0].member.channel.append

    def noting(message: Any) -> int:
        heard.append(message)
        return append(message)

    job.workers[0].member.channel.append = noting  # type: ignore[method-assign]
    return heard


def proposed_while_all_stand(job: Job, update: Update) -> Any:
    """The ticket of what worker 1 proposes, and makes available only when all have come to a pause."""

    def act(worker: Worker) -> Any:
        ticket = None
        if worker.rank == 1:
            worker.member.send(lambda: eventually(lambda: all(w.member.gate._here for w in job.workers)))
            ticket = worker.member.propose(update)
        worker.member.pause("drain")
        return ticket

    return job.on_all(act)[1]


def test_an_update_for_which_all_wait_takes_one_question() -> None:
    with Job(3) as job:
        heard = said(job)
        ticket = proposed_while_all_stand(job, bias(1.0))
        assert ticket.result(DEADLINE_SECS).step == 0
        assert len([one for one in heard if isinstance(one, Stage)]) == 1
        assert not [one for one in heard if isinstance(one, Hold)]
        assert [worker.applied for worker in job.workers] == [[(0, ticket.id)]] * 3


def test_who_is_asked_although_it_is_held_already_stops_once() -> None:
    with Job(1) as job:
        gate = job.workers[0].member.gate
        assert gate.hold_here(1) is None  # it does not stand at a boundary
        assert gate.pending() == []
        thread = threading.Thread(target=lambda: gate.park(lambda: not gate.pending(), DEADLINE_SECS))
        gate.schedule(2, 0)  # what it waits for
        thread.start()
        eventually(lambda: gate.hold_here(3) == 0)
        assert gate.hold(3) == (0, True)
        assert [stop.round for stop in gate.pending()] == [2, 3]
        for round_ in (3, 2, 7):  # the last one was never put up here
            gate.free(round_)
        thread.join(DEADLINE_SECS)
        assert not thread.is_alive()


def test_who_was_held_for_what_is_refused_goes_on() -> None:
    with Job(2) as job:
        wrong = Update().add("dense/bias", np.full(3, np.nan, np.float32))
        ticket = proposed_while_all_stand(job, wrong)
        with pytest.raises(UpdateRefused, match="not finite"):
            ticket.result(DEADLINE_SECS)
        assert [worker.member.gate.pending() for worker in job.workers] == [[], []]
        job.train(2)
        assert [worker.member.gate.step for worker in job.workers] == [2, 2]
