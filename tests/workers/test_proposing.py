"""The ids of proposals, with threads as workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from replicast.core.entries import Stage
from replicast.errors import UpdateRefused
from replicast.replicas.proposals import Proposals, Ticket, checked_worker
from replicast.update.update import Update, checked_step
from tests.threads import DEADLINE_SECS, Job, Worker, eventually


def propose(proposing: Proposals, what: object) -> Ticket:
    return proposing.propose(what, None, None, None)  # type: ignore[arg-type]


def in_a_thread(proposing: Proposals, what: object) -> Ticket:
    tickets: list[Ticket] = []
    thread = threading.Thread(target=lambda: tickets.append(propose(proposing, what)))
    thread.start()
    thread.join(DEADLINE_SECS)
    return tickets[0]


def test_two_functions_of_a_thread_are_two_also_at_the_same_step() -> None:
    with Job(2) as job:
        proposing = job.workers[1].session.proposals
        tickets = [
            in_a_thread(proposing, lambda now, n=n: {"dense/bias": now["dense/bias"] + np.float32(n)})
            for n in (1, 10)
        ]
        # As another attempt of the job would give them: not by a count that begins anew.
        tickets.append(
            in_a_thread(
                job.workers[1].session.proposals,
                lambda now: {"dense/bias": now["dense/bias"] + np.float32(100)},
            )
        )
        job.train(3)
        assert sorted(ticket.result(DEADLINE_SECS).sequence for ticket in tickets) == [1, 2, 3]
        assert job.workers[0].state.values["dense/bias"].tolist() == [111.0] * 3


def ids_before_and_after_a_step(worker: Worker) -> tuple[str, str]:
    proposing, update = worker.session.proposals, Update().scale("dense/bias", 2.0)
    worker.session.arrive(worker.session.step)  # the thread that proposes comes to the boundaries
    before = propose(proposing, update).id
    proposing.training_continues()
    worker.step()
    return before, propose(proposing, update).id


def test_what_a_script_proposes_has_the_id_of_its_worker_step_and_place() -> None:
    with Job(2) as job:
        job.train(5)
        ids = job.on_all(ids_before_and_after_a_step)
        assert ids[1] == ("worker-1-step-0-1", "worker-1-step-6-1"), "before training, also after a restore"
        assert ids[0] == ("worker-0-step-0-1", "worker-0-step-6-1")


@pytest.mark.parametrize("source", [1.5, -1, 2, "1", None])
def test_a_source_that_is_not_a_worker_is_refused(source: object) -> None:
    with pytest.raises(UpdateRefused, match="There is no such worker"):
        checked_worker(source, 2)
    assert type(checked_worker(np.int64(1), 2)) is int


def test_an_update_that_was_labelled_does_the_same() -> None:
    update = Update(id="x", author="me").add("b", np.ones(2, np.float32))
    other = update.labelled("you", "why")
    assert (other.author, other.note, other.id) == ("you", "why", "x")
    assert other.content_digest() == update.content_digest()
    assert update.signed("nobody") is update


@pytest.mark.parametrize("step", [2.5, True, -1, 10**400, "7"])
def test_a_step_that_no_journal_could_hold_is_refused(step: object) -> None:
    with pytest.raises(UpdateRefused, match="at_step must be a number of steps"):
        checked_step(step)
    assert (checked_step(None), checked_step(np.int64(7))) == (None, 7)


def test_what_is_committed_and_proposed_again_for_a_step_that_is_past_has_its_receipt() -> None:
    update = Update(id="fix").scale("dense/bias", 2.0)
    with Job(2) as job:
        first = job.workers[1].propose(update, at_step=3)
        eventually(lambda: first.stage is Stage.SCHEDULED)
        job.train(6)
        again = job.workers[1].session.proposals.propose(update, None, 3, None)
        assert again.result(DEADLINE_SECS) == first.result(DEADLINE_SECS)
        assert again.result(0).step == 3
