"""The coordinator: its events, its commands, and what it must never do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from replicast.core import messages as m
from replicast.core.coordinator import Coordinator
from replicast.core.entries import History, Payload, Proposal, Scheduled, Stage
from replicast.core.messages import Refusal, ReportId, SeenDigests
from replicast.core.operations.apply import Load, UpdateOperation

ADD = Proposal("add", "digest", (("add", "d", 5),))


class Job:
    """A coordinator of two workers that have begun; the test plays the workers."""

    def __init__(self, history: History | None = None) -> None:
        self.coordinator = Coordinator(2, history or History())
        self.said: list[Any] = []
        self.commands: list[Any] = []
        self.all_rest(0, "begin")

    def tell(self, event: Any) -> list[Any]:
        commands = self.coordinator.handle(event)
        self.commands += commands
        self.said += [command.message for command in commands if isinstance(command, m.Broadcast)]
        return commands

    def hear(self, rank: int, message: Any) -> list[Any]:
        return self.tell(m.FromWorker(rank, message))

    def all_answer(self, value: Any = None) -> list[Any]:
        number = next(one.number for one in reversed(self.said) if isinstance(one, m.Do))
        self.hear(0, m.Answer(number, value))
        return self.hear(1, m.Answer(number, value))

    def all_rest(self, step: int, *intent: Any) -> None:
        for rank in (0, 1):
            self.hear(rank, m.Rest(1, step, intent))

    def written(self, outcome: m.WriteOutcome = m.WriteOutcome.DURABLE) -> list[Any]:
        write = next(one for one in reversed(self.commands) if isinstance(one, m.Write))
        return self.tell(m.Written(write.number, outcome))

    def told(self) -> m.Tell:
        return next(one for one in reversed(self.said) if isinstance(one, m.Tell))

    def timers(self) -> list[m.SetTimer]:
        return [one for one in self.commands if isinstance(one, m.SetTimer)]

    def ended(self) -> list[tuple[str, Any]]:
        """The id and the problem of each save and audit that was refused."""
        ended = (one for one in self.commands if isinstance(one, m.Ended))
        return [(one.id, one.outcome.result) for one in ended if isinstance(one.outcome.result, Refusal)]


def test_a_worker_that_does_not_prepare_in_time_is_named_and_its_late_answer_changes_nothing() -> None:
    job = Job()
    job.hear(0, m.Propose("t", ADD))
    job.hear(0, m.Answer(job.said[-1].number, None))
    job.tell(m.TimerFired(job.timers()[-1].number))
    assert job.told().stage is Stage.REFUSED
    assert job.told().outcome == Refusal("Worker 1 did not prepare the update within 130 s", (1,))
    late = next(one for one in job.said if isinstance(one, m.Do))
    assert job.hear(1, m.Answer(late.number, None)) == []


def stopped() -> tuple[Job, m.Stop]:
    """A job with a proposal that all have prepared, and the order to stop for it."""
    job = Job()
    job.hear(0, m.Propose("t", ADD))
    job.all_answer()
    job.written()
    stop = job.said[-1]
    assert isinstance(stop, m.Stop)
    return job, stop


def test_a_worker_that_does_not_come_to_the_agreed_boundary_is_named() -> None:
    job, stop = stopped()
    job.hear(0, m.At(stop.meeting, 5, True))
    job.hear(1, m.At(stop.meeting, 4, False))
    assert job.said[-1] == m.Meet(stop.meeting, 5)
    for timer in job.timers():
        job.tell(m.TimerFired(timer.number))
    told = job.told()
    assert told.stage is Stage.REFUSED
    assert told.outcome.problem == "Worker 1 did not reach the boundary within 900 s"
    assert m.Release(stop.meeting) in job.said


def test_a_worker_that_does_not_answer_a_stop_is_named_and_the_others_continue() -> None:
    job, stop = stopped()
    job.hear(0, m.At(stop.meeting, 4, True))
    job.tell(m.TimerFired(job.timers()[1].number))
    assert m.Release(stop.meeting) in job.said
    assert job.told().outcome == Refusal("Worker 1 did not answer within 30 s", (1,))


def test_a_rest_of_all_workers_does_not_wait_for_a_report_that_one_of_them_has_left_out() -> None:
    job = Job()
    job.hear(0, m.Answer(ReportId("audit", 4), SeenDigests(4, {"": "digest"})))
    for rank in (0, 1):
        job.hear(rank, m.Rest(2, 4, ("meet",)))
    assert isinstance(job.said[-1], m.Resume), "it may still come, and nobody waits for it"
    for rank in (0, 1):
        job.hear(rank, m.Rest(3, 5, ("meet",)))
    assert job.ended() == [("audit-step-4", Refusal("Worker 1 did not report its audit of step 4", (1,)))]


def committed(job: Job) -> None:
    """Update 1 is committed, and all workers are about to apply it."""
    job.hear(0, m.Propose("t", ADD))
    job.all_answer()
    job.written()
    meeting = job.said[-1].meeting
    for rank in (0, 1):
        job.hear(rank, m.At(meeting, 4, True))
    job.written()


def test_a_revert_with_the_id_of_the_revert_of_another_update_is_refused() -> None:
    job = Job()
    committed(job)
    job.hear(0, m.Propose("first", Proposal("undo", "", reverts=1)))
    job.hear(0, m.Propose("second", Proposal("undo", "", reverts=2)))
    assert (job.told().tickets, job.told().stage) == (("second",), Stage.REFUSED)
    assert "other content was already proposed" in job.told().outcome.problem


def test_an_unexpected_exception_about_one_proposal_refuses_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(self: UpdateOperation, job: Any) -> Any:
        raise OverflowError("int too large to convert to float")
        yield

    job = Job()
    with monkeypatch.context() as patched:
        patched.setattr(UpdateOperation, "script", script)
        job.hear(0, m.Propose("t", ADD))
    assert job.told().stage is Stage.REFUSED
    assert "Unexpected OverflowError in update add" in job.told().outcome.problem
    job.hear(0, m.Propose("u", ADD))
    assert isinstance(job.said[-1], m.Do)


def test_what_is_scheduled_is_promised_before_the_first_step_of_the_next_attempt() -> None:
    job = Job(History([Payload("add", "digest", ADD.content), Scheduled("add", "digest", 7)]))
    stop = next(one for one in job.said if isinstance(one, m.Stop))
    assert stop.at_step == 7
    assert job.said.index(stop) < next(n for n, one in enumerate(job.said) if isinstance(one, m.Resume))
    assert any(isinstance(one, m.Do) and isinstance(one.order, Load) for one in job.said)


class Copy:
    """The copy of a state, as worker 0 hands it in."""


def test_a_checkpoint_that_is_written_takes_no_memory() -> None:
    job, copy = Job(), Copy()
    kept = weakref.ref(copy)
    for rank, details in ((0, copy), (1, None)):
        job.hear(rank, m.Answer(ReportId("save", 4), m.Snapshot(4, "digest", frozenset(), details)))
    job.written()
    assert job.coordinator.history.checkpoints.keys() == {4}
    job.commands.clear()  # the runtime has carried them out
    del copy, details
    gc.collect()
    assert kept() is None
