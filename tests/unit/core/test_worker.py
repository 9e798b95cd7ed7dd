"""The state machine of one worker: its messages, and when its training thread continues."""

from __future__ import annotations

import inspect
from typing import Any

from replicast.core import messages as m
from replicast.core.entries import Proposal, Stage
from replicast.core.operations.attempt import TakeSnapshot
from replicast.core.worker import WorkerMachine


def without_timers(commands: list[Any]) -> list[Any]:
    return [command for command in commands if not isinstance(command, m.SetTimer)]


def test_an_idle_boundary_is_passed_at_once_and_nothing_is_sent() -> None:
    worker = WorkerMachine(0)
    assert worker.handle(m.Arrived(1)) == [m.PassBoundary(1)]
    assert worker.passes(2)
    assert worker.step == 2


def test_a_stop_for_a_far_step_costs_the_boundaries_before_it_nothing() -> None:
    worker = WorkerMachine(0)
    worker.handle(m.Stop(7, at_step=1000))
    assert all(worker.passes(step) for step in range(1, 1000))
    assert not worker.passes(1000)


def test_training_continues_before_a_late_answer() -> None:
    worker = WorkerMachine(0)
    worker.handle(m.Stop(7))
    worker.handle(m.Arrived(1))
    worker.handle(m.Do(8, TakeSnapshot("a")))
    worker.handle(m.Release(7))
    assert worker.handle(m.Performed(8, None, answers=False)) == [m.PassBoundary(1)]
    assert worker.handle(m.Answer(8, "x")) == [m.Send(m.Answer(8, "x"))]


def test_a_training_thread_that_waits_for_a_ticket_continues_with_its_outcome_or_when_the_time_is_up() -> (
    None
):
    worker = WorkerMachine(0)
    worker.handle(m.Propose("t", Proposal("a", "digest", ())))
    assert worker.handle(m.Awaited("t", 5.0)) == [m.SetTimer(1, 5.0)]
    told = m.Tell("a", ("t",), Stage.VERIFIED)
    assert worker.handle(told) == [m.Settle("t", told), m.Continue(Stage.VERIFIED)]
    worker.handle(m.Propose("u", Proposal("b", "digest", ())))
    worker.handle(m.Awaited("u", 5.0))
    assert worker.handle(m.TimerFired(2)) == [m.Continue(Stage.PROPOSED)]


def test_a_training_thread_does_not_wait_for_the_coordinator_forever_and_names_it() -> None:
    worker = WorkerMachine(1)
    worker.handle(m.Rested(("begin",)))
    worker.handle(m.Resume((1, 1), "over"))
    worker.handle(m.Stop(7))
    timer = worker.handle(m.Arrived(1))[-1]
    assert isinstance(timer, m.SetTimer)
    (ends,) = worker.handle(m.TimerFired(timer.number))
    assert isinstance(ends, m.EndJob)
    assert "Worker 0, the coordinator" in ends.reason


def test_a_training_thread_waits_without_a_limit_only_for_what_can_come_before_it_trains() -> None:
    worker = WorkerMachine(0)
    worker.handle(m.Propose("t", Proposal("a", "digest", ())))
    assert without_timers(worker.handle(m.Awaited("t", None))) == []
    waits = m.Tell("a", ("t",), Stage.PREPARED, waits_for="the trial of b, until step 3", waits_until=3)
    assert worker.handle(waits) == [m.Settle("t", waits), m.Continue(Stage.PREPARED)]
    worker.handle(m.Arrived(2))
    assert without_timers(worker.handle(m.Awaited("t", None))) == [m.Continue(Stage.PREPARED)]
    worker.handle(m.Arrived(3))
    assert without_timers(worker.handle(m.Awaited("t", None))) == []
    worker.handle(m.Stop(7))
    (timer,) = worker.handle(m.Meet(7, 4))  # the others may still come to wait here
    assert isinstance(timer, m.SetTimer)
    assert worker.handle(m.TimerFired(timer.number)) == [m.Continue(Stage.PREPARED)]


def test_every_order_is_a_method_of_a_replica_that_takes_its_fields() -> None:
    of_one_method = [kind for kind in m.Order.__subclasses__() if kind.perform is m.Order.perform]
    assert {"Prepare", "Apply", "Publish"} <= {kind.__name__ for kind in of_one_method}
    for kind in of_one_method:
        inspect.signature(getattr(m.Replica, kind.method)).bind("replica", *kind.__struct_fields__)
