"""Breaks of where the workers stop, and of what is applied there in which order."""

from __future__ import annotations

from typing import Any

from replicast.core.coordinator import Coordinator
from replicast.core.messages import Do, Tell
from replicast.core.operation import Meeting
from replicast.core.worker import Worker
from tests.simulation.mutations.registry import ORIGINAL, broken, mutation


@mutation
def skip_the_stop() -> Any:
    """The workers have said where they are: that is taken for standing there."""
    return broken(Meeting, "step", lambda self: self.latest if self.answered else None)


@mutation
def pass_a_boundary_in_spite_of_a_stop() -> Any:
    def go_on(self: Worker) -> None:
        stops, self._stops = self._stops, {}
        ORIGINAL[Worker, "_go_on"](self)
        self._stops = stops

    return broken(Worker, "_go_on", go_on)


@mutation
def choose_the_earliest_boundary_instead_of_the_latest() -> Any:
    return broken(Meeting, "latest", property(lambda self: min(self.steps.values())))


@mutation
def apply_twice() -> Any:
    def twice(self: Worker, do: Do) -> None:
        ORIGINAL[Worker, "_do"](self, do)
        if not do.order.in_background:
            ORIGINAL[Worker, "_do"](self, do)

    return broken(Worker, "_do", twice)


@mutation
def leave_a_stop_up_when_a_rest_ends() -> Any:
    def rests_end(self: Coordinator) -> None:
        self._here = None
        _original_rests_end(self)

    _original_rests_end = Coordinator._end_rests
    return broken(Coordinator, "_end_rests", rests_end)


@mutation
def end_a_rest_while_another_operation_has_the_turn() -> Any:
    def resume_rests(self: Coordinator) -> bool:
        resume, self._resuming = self._resuming, None
        if resume is None:
            return False
        self._end_rests()
        self._say(resume)
        return True

    return broken(Coordinator, "_resume_rests", resume_rests)


@mutation
def apply_in_another_order_on_one_worker() -> Any:
    def go_on(self: Worker) -> None:
        if self.rank == 1:
            self._orders.reverse()
        ORIGINAL[Worker, "_go_on"](self)

    return broken(Worker, "_go_on", go_on)


@mutation
def commit_others_during_a_trial() -> Any:
    return broken(Coordinator, "_deferred", lambda self, operation: None)


@mutation
def ignore_at_step() -> Any:
    def want(self: Coordinator, operation: Any, at_step: int | None) -> None:
        if operation.replays is None and operation is not None and operation.meeting is not None:
            self._release(operation.meeting)
            operation.meeting = None
        ORIGINAL[Coordinator, "_want"](self, operation, None if operation.replays is None else at_step)

    return broken(Coordinator, "_want", want)


@mutation
def wait_without_a_deadline() -> Any:
    return broken(Coordinator, "_set_timer", lambda self, secs, then: None)


@mutation
def do_not_ask_again_when_a_worker_rests_early() -> Any:
    def at(self: Coordinator, rank: int, number: int, step: int, standing: bool) -> None:
        meeting = self._meetings.get(number)
        if meeting is not None and meeting.at_step is None and meeting.answered and step < meeting.target:
            return
        _original_at(self, rank, number, step, standing)

    _original_at = Coordinator._at
    return broken(Coordinator, "_at", at)


@mutation
def do_not_say_until_when_an_update_waits() -> Any:
    def tell_progress(self: Coordinator, operation: Any, tickets: Any) -> None:
        self._say(Tell(operation.id, tickets, operation.stage, operation.step))

    return broken(Coordinator, "_tell_progress", tell_progress)
