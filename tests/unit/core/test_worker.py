"""The state machine of one worker: its messages, and when its training thread continues."""

from __future__ import annotations

from typing import Any

from replicast.core.events import (
    Arrived,
    Awaited,
    Continue,
    EndJob,
    PassBoundary,
    Performed,
    Rested,
    Send,
    SetTimer,
    Settle,
    TimerFired,
)
from replicast.core.messages import Answer, At, Do, Meet, Propose, Release, Rest, Resume, Stop, Tell
from replicast.core.operations.save import TakeSnapshot
from replicast.core.records import Proposal, Stage
from replicast.core.worker import WorkerMachine


def without_timers(commands: list[Any]) -> list[Any]:
    return [command for command in commands if not isinstance(command, SetTimer)]


def test_an_idle_boundary_is_passed_at_once_and_nothing_is_sent() -> None:
    worker = WorkerMachine(0)
    assert worker.handle(Arrived(1)) == [PassBoundary(1)]
    assert worker.passes(2)
    assert worker.step == 2


def test_a_stop_for_a_far_step_costs_the_boundaries_before_it_nothing() -> None:
    worker = WorkerMachine(0)
    worker.handle(Stop(7, at_step=1000))
    assert all(worker.passes(step) for step in range(1, 1000))
    assert not worker.passes(1000)


def test_training_continues_before_a_late_answer() -> None:
    worker = WorkerMachine(0)
    worker.handle(Stop(7))
    worker.handle(Arrived(1))
    worker.handle(Do(8, TakeSnapshot("a")))
    worker.handle(Release(7))
    assert worker.handle(Performed(8, None, answers=False)) == [PassBoundary(1)]
    assert worker.handle(Answer(8, "x")) == [Send(Answer(8, "x"))]


def test_a_worker_that_rests_before_the_agreed_step_says_so_and_stays() -> None:
    worker = WorkerMachine(0)
    worker.handle(Arrived(1))
    worker.handle(Stop(7))
    worker.handle(Meet(7, 2))
    assert worker.handle(Rested(("close",))) == [Send(At(7, 1, True)), Send(Rest(1, 1, ("close",)))]
    assert worker.handle(Resume((1,), "over")) == []
    assert worker.handle(Release(7)) == [Continue("over")]


def test_a_stop_for_a_later_step_does_not_keep_a_rest() -> None:
    worker = WorkerMachine(0)
    worker.handle(Rested(("sync", 0)))
    assert worker.handle(Stop(7, at_step=5)) == [Send(At(7, 0, False))]
    assert worker.handle(Resume((1,), "over")) == [Continue("over")]


def test_a_training_thread_that_waits_for_a_ticket_continues_with_its_outcome_or_when_the_time_is_up() -> (
    None
):
    worker = WorkerMachine(0)
    worker.handle(Propose("t", Proposal("a", "digest", ())))
    assert worker.handle(Awaited("t", 5.0)) == [SetTimer(1, 5.0)]
    told = Tell("a", ("t",), Stage.VERIFIED)
    assert worker.handle(told) == [Settle("t", told), Continue(Stage.VERIFIED)]
    worker.handle(Propose("u", Proposal("b", "digest", ())))
    worker.handle(Awaited("u", 5.0))
    assert worker.handle(TimerFired(2)) == [Continue(Stage.PROPOSED)]


def test_a_training_thread_does_not_wait_for_the_coordinator_forever_and_names_it() -> None:
    worker = WorkerMachine(1)
    worker.handle(Rested(("begin",)))
    worker.handle(Resume((1, 1), "over"))
    worker.handle(Stop(7))
    timer = worker.handle(Arrived(1))[-1]
    assert isinstance(timer, SetTimer)
    (ends,) = worker.handle(TimerFired(timer.number))
    assert isinstance(ends, EndJob)
    assert "Worker 0, the coordinator" in ends.reason


def test_a_training_thread_waits_without_a_limit_only_for_what_can_come_before_it_trains() -> None:
    worker = WorkerMachine(0)
    worker.handle(Propose("t", Proposal("a", "digest", ())))
    assert without_timers(worker.handle(Awaited("t", None))) == []
    waits = Tell("a", ("t",), Stage.PREPARED, waits_for="the trial of b, until step 3", waits_until=3)
    assert worker.handle(waits) == [Settle("t", waits), Continue(Stage.PREPARED)]
    worker.handle(Arrived(2))
    assert without_timers(worker.handle(Awaited("t", None))) == [Continue(Stage.PREPARED)]
    worker.handle(Arrived(3))
    assert without_timers(worker.handle(Awaited("t", None))) == []
    worker.handle(Stop(7))
    (timer,) = worker.handle(Meet(7, 4))  # the others may still come to wait here
    assert isinstance(timer, SetTimer)
    assert worker.handle(TimerFired(timer.number)) == [Continue(Stage.PREPARED)]
