"""Functions: one worker computes an update from the live values while all others wait."""

from __future__ import annotations

from asyncio import CancelledError
from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.replicas.session import Session
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, QUICK, Job, eventually
from tests.unit.clock import Clock
from tests.unit.runtime.playing import adding, bias, bias_of, refusal


def propose_on_all(
    job: Job, id_: str, function: Any, source: int, at_step: int | None = None
) -> list[Ticket]:
    return job.on_all(
        lambda worker: worker.session.proposals.propose_function(id_, function, source, at_step)
    )


def test_a_function_runs_once_on_its_source_with_the_live_values() -> None:
    with Job(3) as job:
        seen: list[float] = []

        def double(values: Any) -> Update:
            seen.append(float(values["dense/bias"][0]))
            assert len(values) == 4
            assert set(values) == set(job.start)
            return Update(note="twice").add("dense/bias", values["bias"])

        before = job.workers[0].propose(bias(3.0))
        job.train(2)
        before.result(DEADLINE_SECS)
        tickets = propose_on_all(job, "double", double, source=1)
        job.train(2)
        receipts = [ticket.result(DEADLINE_SECS) for ticket in tickets]
        assert receipts == receipts[:1] * 3
        assert receipts[0].id == "double"
        assert seen == [3.0]
        assert [bias_of(worker) for worker in job.workers] == [6.0] * 3
        assert job.journal.load("double", job.journal.history().by_id["double"].digest).note == ""


def test_what_a_function_gets_are_copies() -> None:
    with Job(2) as job:

        def spoil(values: Any) -> Any:
            values["dense/kernel"][:] = 7.0
            return {"bias": values["bias"] + 1}

        tickets = propose_on_all(job, "f", spoil, source=1)
        job.train(3)
        assert tickets[0].result(DEADLINE_SECS).sequence == 1
        np.testing.assert_array_equal(job.workers[1].state.values["dense/kernel"], job.start["dense/kernel"])


def raise_text_that_is_not_unicode(_values: Any) -> Any:
    raise ValueError("no model \udcff")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda values: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (raise_text_that_is_not_unicode, "raised ValueError: no model \\udcff"),
        (lambda values: 7, "must return an Update, or a dict from variable names"),
        (lambda values: {"nothing": [1.0]}, "nothing"),
        (lambda values: {"bias": values["kernel"]}, "shape"),
        (lambda values: {"bias": values["no such variable"]}, "no such variable"),
        (lambda values: bias(np.nan), "nan at"),
    ],
)
def test_a_function_that_gives_no_update_is_refused_and_changes_nothing(function: Any, said: str) -> None:
    with Job(2) as job:
        tickets = propose_on_all(job, "f", function, source=1)
        job.train(4)
        for ticket in tickets:
            error = refusal(ticket)
            assert said in str(error)
            assert error.worker == 1
        assert [worker.applied for worker in job.workers] == [[], []]
        eventually(lambda: not job.files())


@pytest.mark.parametrize("broken", [True, False])
def test_a_worker_that_proposes_a_function_after_it_was_decided_is_told(broken: bool) -> None:
    with Job(2) as job:
        function = adding(np.nan if broken else 1.0)
        first = job.workers[0].session.proposals.propose_function("f", function, 0, None)
        job.train(3)
        assert first.settled.wait(DEADLINE_SECS)
        second = job.workers[1].session.proposals.propose_function("f", function, 0, None)
        if broken:
            assert str(refusal(second)) == str(refusal(first))
        else:
            assert second.result(DEADLINE_SECS) == first.result()


def test_a_function_for_a_later_step_delays_no_worker() -> None:
    with Job(2) as job:
        later = propose_on_all(job, "later", lambda v: {"bias": v["bias"] * 2}, 1, at_step=12)
        soon = job.workers[0].propose(bias(3.0))
        job.train(6)
        assert soon.result(DEADLINE_SECS).step <= 6
        assert not later[0].done()
        job.train(12)
        assert later[0].result(DEADLINE_SECS).step == 12
        assert [bias_of(worker) for worker in job.workers] == [6.0, 6.0]


def to_a_boundary(session: Session, ticket: Ticket) -> None:
    session.arrive(session.step + 1)


def to_a_rest(session: Session, ticket: Ticket) -> None:
    session.rest("sync", 0)


def for_a_result(session: Session, ticket: Ticket) -> None:
    ticket.result(DEADLINE_SECS)


@pytest.mark.parametrize("wait", [to_a_boundary, to_a_rest, for_a_result])
def test_a_function_that_waits_for_those_who_wait_for_it_is_refused(wait: Any) -> None:
    with Job(2) as job:
        session = job.workers[1].session
        another = job.workers[1].propose(bias(1.0, id="later"), at_step=50)

        def function(values: object) -> Update:
            wait(session, another)
            raise AssertionError("it was let through")

        tickets = propose_on_all(job, "f", function, source=1)
        job.train(2)
        for ticket in tickets:
            error = refusal(ticket)
            assert "cannot wait for other workers" in error.problem
            assert error.remedy is not None
        assert [worker.session.step for worker in job.workers] == [2, 2]


def test_a_function_may_propose() -> None:
    with Job(2) as job:
        inner: list[Ticket] = []

        def function(values: Any) -> Any:
            inner.append(job.workers[1].propose(bias(10.0, id="inner")))
            return {"bias": values["bias"] + 1}

        tickets = propose_on_all(job, "outer", function, source=1)
        job.train(3)
        assert tickets[0].result(DEADLINE_SECS).sequence == 1
        assert inner[0].result(DEADLINE_SECS).sequence == 2
        assert [bias_of(worker) for worker in job.workers] == [11.0, 11.0]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), CancelledError()], ids=repr)
def test_a_function_that_exits_is_refused_and_the_job_goes_on(error: BaseException) -> None:
    with Job(2) as job:

        def leave(values: Any) -> Any:
            raise error

        tickets = propose_on_all(job, "f", leave, source=1)
        job.train(3)
        for ticket in tickets:
            assert f"leave raised {type(error).__name__}" in str(refusal(ticket))
        later = job.workers[0].propose(bias(1.0))
        job.train(2)
        assert later.result(DEADLINE_SECS).sequence == 1
        assert [bias_of(worker) for worker in job.workers] == [1.0, 1.0]


def test_ctrl_c_in_a_function_ends_the_worker_and_is_refused_for_the_others() -> None:
    with Job(2) as job:

        def interrupted(values: Any) -> Any:
            raise KeyboardInterrupt

        tickets = propose_on_all(job, "f", interrupted, source=1)
        with pytest.raises(KeyboardInterrupt):
            job.train(10_000, closes=False)  # until it happens: worker 0 would wait for the other in `close`
        assert "It ended the worker (KeyboardInterrupt)" in str(refusal(tickets[0]))
        assert [worker.applied for worker in job.workers] == [[], []]


def test_a_function_that_takes_too_long_is_refused_and_leaves_nothing_behind(loop_clock: Clock) -> None:
    with Job(2) as job:
        tickets: list[Ticket] = []

        def slow(values: Any) -> Any:
            loop_clock.added_secs = QUICK.compute_secs
            eventually(tickets[0].done)
            return {"bias": values["bias"] + 1}

        tickets.append(job.workers[0].session.proposals.propose_function("f", slow, 1, None))
        tickets.append(job.workers[1].session.proposals.propose_function("f", slow, 1, None))
        job.train(3)
        error = refusal(tickets[0])
        assert f"Worker 1 did not compute the update within {QUICK.compute_secs} s" in str(error)
        assert error.worker == 1
        later = job.workers[0].propose(bias(1.0))
        job.train(3)
        assert later.result(DEADLINE_SECS).sequence == 1
        assert [bias_of(worker) for worker in job.workers] == [1.0, 1.0]
        eventually(lambda: not job.files())


def test_a_function_refused_by_a_worker_that_cannot_take_its_bytes_lets_all_continue() -> None:
    with Job(3) as job:
        receive = job.workers[2].transport.receive

        def no_room(*_: Any) -> Any:
            raise UpdateRefused("There is no room in shared memory")

        job.workers[2].transport.receive = no_room  # type: ignore[method-assign]
        tickets = propose_on_all(job, "f", adding(1.0), source=0)
        job.train(3)
        assert refusal(tickets[1]).worker == 2
        job.workers[2].transport.receive = receive  # type: ignore[method-assign]
        again = propose_on_all(job, "g", adding(1.0), source=0)
        job.train(3)
        assert again[2].result(DEADLINE_SECS).sequence == 1
        eventually(lambda: not job.files())
