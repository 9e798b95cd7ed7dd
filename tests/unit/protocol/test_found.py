"""What the search in test_state_machine.py has found, each in the fewest words that show it."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import pytest

from replicast.errors import UpdatePending, UpdateRefused
from replicast.journal import MemoryJournal, Receipt, StagedPayload
from replicast.runtime import Ticket
from replicast.protocol.messages import Parked, Paused, Proposal
from replicast.core.stage import Stage
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


def refused_or_receipt(ticket: Ticket) -> UpdateRefused | Receipt:
    try:
        return ticket.result(DEADLINE_SECS)
    except UpdateRefused as error:
        return error


@pytest.mark.parametrize("second_author", [0, 1])
def test_a_refusal_of_the_first_of_two_twins_is_not_told_to_the_second(second_author: int) -> None:
    tickets: list[Ticket] = []

    class FullOnce(MemoryJournal):
        full = True

        def stage(self, update: Update) -> StagedPayload:
            if self.full:
                eventually(lambda: len(tickets) == 2 and tickets[1].content_digest)
                self.full = False
                raise UpdateRefused("The disk is full")
            return super().stage(update)

    with Job(2, FullOnce()) as job:
        tickets.append(job.workers[1].member.propose(bias(1.0, id="fix")))
        eventually(lambda: tickets[0].stage is Stage.STAGED)
        tickets.append(job.workers[second_author].member.propose(bias(1.0, id="fix")))
        job.train(5)
        assert isinstance(refused_or_receipt(tickets[0]), UpdateRefused)
        second = refused_or_receipt(tickets[1])
        assert isinstance(second, Receipt), f"{second}, and the journal has {job.journal.records()}"


def test_what_was_applied_before_the_first_step_is_applied_again_after_a_restart() -> None:
    with Job(2) as first:

        def before_training(worker: Worker) -> None:
            worker.member.arrive(0)
            if worker.rank == 1:
                assert worker.member.propose(bias(1.0, id="early")).result(DEADLINE_SECS).step == 0
            worker.member.pause("drain")

        first.on_all(before_training)
        values = first.values()
    with Job(2, first.journal) as second:
        second.train(3)
        assert [id_ for _, id_ in second.workers[0].applied] == ["early"]
        assert second.values() == values


def test_a_function_for_a_later_step_is_not_brought_forward_by_a_pause() -> None:
    with Job(2) as job:
        ticket = job.workers[1].member.propose_function("f", lambda v: {"bias": v["bias"] + 1}, 1, 5)
        eventually(lambda: ticket.step is not None)
        job.train(3)
        assert job.workers[0].applied == []
        job.train(5)
        assert ticket.result(DEADLINE_SECS).step == 5


def test_a_function_for_a_later_step_is_not_waited_for_while_all_pause() -> None:
    with Job(2) as job:
        entered, gate = threading.Event(), job.workers[0].member.gate
        aim, finish = gate.aim, job.coordinator._rounds.finish

        def slow_aim(*arguments: Any) -> None:
            entered.wait(1.0)  # worker 0's follower is slower than its coordinator
            aim(*arguments)

        def finish_noting(*arguments: Any) -> Any:
            entered.set()
            return finish(*arguments)

        gate.aim, job.coordinator._rounds.finish = slow_aim, finish_noting  # type: ignore[method-assign]
        tickets: list[Ticket] = []

        def pause(worker: Worker) -> None:
            if worker.rank == 1:
                eventually(lambda: gate._here)
                function = worker.member.propose_function
                tickets.append(function("f", lambda v: {"bias": v["bias"] + 1}, 1, 5))
            worker.member.pause("drain")

        job.on_all(pause)
        job.train(8)
        assert tickets[0].result(DEADLINE_SECS).step == 5


def test_a_twin_of_an_update_for_a_later_step_does_not_keep_the_training_thread_for_ever() -> None:
    with Job(2) as job:
        first = job.workers[0].member.propose(bias(1.0, id="fix"), at_step=15)
        eventually(lambda: first.stage is Stage.COMMITTED)

        def ask(worker: Worker) -> None:
            worker.member.arrive(1)
            if worker.rank == 1:
                with pytest.raises(UpdatePending):
                    worker.member.propose(bias(1.0, id="fix"), at_step=15).result()

        job.on_all(ask)


def test_two_functions_that_come_due_at_one_boundary_do_not_wait_for_each_other() -> None:
    with Job(1) as job:
        propose = job.workers[0].member.propose_function
        tickets = [
            propose(f"at-{step}", lambda v: {"bias": v["bias"] + 1}, 0, at_step=step) for step in (3, 2)
        ]
        eventually(lambda: all(ticket.step is not None for ticket in tickets))
        job.on_all(lambda worker: worker.member.arrive(4))
        assert [ticket.result(DEADLINE_SECS).step for ticket in tickets] == [4, 4]


def test_a_function_that_a_pause_brings_forward_does_not_keep_the_one_behind_it() -> None:
    with Job(1) as job:
        member = job.workers[0].member
        post = member.channel.post

        def post_when_parked(message: Any) -> None:
            if isinstance(message, Proposal) and message.id == "second":
                eventually(lambda: member.gate._here)
            if isinstance(message, Paused | Parked):
                finishing.wait(DEADLINE_SECS)
            post(message)

        finishing, finish = threading.Event(), job.coordinator._rounds.finish

        def finish_noting(*arguments: Any) -> Any:
            finishing.set()
            return finish(*arguments)

        job.coordinator._rounds.finish = finish_noting  # type: ignore[method-assign]
        member.channel.post = post_when_parked  # type: ignore[method-assign]
        job.on_all(lambda worker: worker.member.arrive(1))
        first = member.propose_function("first", lambda v: {"bias": v["bias"] + 1}, 0, None)
        eventually(lambda: first.step is not None)
        second = member.propose_function("second", lambda v: {"bias": v["bias"] * 2}, 0, None)
        job.on_all(lambda worker: worker.member.pause("drain"))
        assert [ticket.result(DEADLINE_SECS).step for ticket in (first, second)] == [1, 1]


def test_a_function_waits_until_its_source_has_proposed_it_too() -> None:
    with Job(2) as job:
        proposed = threading.Event()

        def script(worker: Worker) -> Ticket:
            worker.member.arrive(1)
            if worker.rank == 0:  # still at the boundary when the other has proposed
                worker.member.gate.park(lambda: proposed.wait(0) and bool(worker.member.gate.pending()), 2.0)
            else:
                eventually(lambda: job.workers[0].member.gate._here)
            ticket = worker.member.propose_function("f", lambda v: {"bias": v["bias"] + 1}, 0, None)
            proposed.set()
            worker.member.pause("drain")
            return ticket

        assert [ticket.result(DEADLINE_SECS).sequence for ticket in job.on_all(script)] == [1, 1]


def test_nothing_is_applied_between_what_a_function_saw_and_what_it_returned() -> None:
    with Job(1) as job:
        member, computed = job.workers[0].member, threading.Event()
        incoming, rounds = job.coordinator._incoming, job.coordinator._rounds
        open_round = rounds.open

        def open_when_another_waits(*arguments: Any) -> Any:
            eventually(lambda: incoming.qsize() > 0)
            opened = open_round(*arguments)
            computed.wait(1.0)
            return opened

        def add_ten(values: Any) -> Any:
            seen = values["bias"]
            computed.set()
            return {"bias": seen + 10}

        rounds.open = open_when_another_waits  # type: ignore[method-assign]

        def script(worker: Worker) -> None:
            member.propose_function("ten", add_ten, 0, None)
            member.propose(bias(1.0))
            member.pause("drain")

        job.on_all(script)
        assert job.workers[0].state.values["dense/bias"].tolist() == [11.0] * 3


def test_a_restarted_worker_that_waits_before_training_is_not_kept_for_ever() -> None:
    with Job(2) as first:
        first.workers[0].member.propose(bias(1.0, id="old"))
        first.train(5)
    again = Job(2, first.journal)
    for worker in again.workers:
        worker.member.start()
    again.coordinator.start()

    def script(worker: Worker) -> None:
        worker.member.pause("begin")
        if worker.rank == 1:
            with contextlib.suppress(UpdatePending):
                worker.member.propose(bias(1.0, id="new")).result()
        worker.member.pause("train")

    try:
        again.on_all(script)
    finally:
        again.__exit__()


@pytest.mark.parametrize("broken", [True, False])
def test_a_worker_that_proposes_a_function_after_it_was_decided_is_told(broken: bool) -> None:
    with Job(2) as job:

        def function(values: Any) -> Any:
            return {"nothing" if broken else "bias": values["bias"] + 1}

        first = job.workers[0].member.propose_function("f", function, 0, None)
        job.train(3)
        assert isinstance(refused_or_receipt(first), UpdateRefused if broken else Receipt)
        second = job.workers[1].member.propose_function("f", function, 0, None)
        assert second.wait(3.0), f"it is {second.stage}"


def test_what_is_brought_forward_keeps_its_place_in_the_order_of_the_journal() -> None:
    with Job(2, durable=True) as job:
        author = job.workers[1].member
        job.on_all(lambda worker: worker.member.arrive(1))
        first = author.propose(Update(id="first").scale("dense/kernel", 2.0))
        eventually(lambda: first.stage is Stage.COMMITTED)
        post = author.channel.post

        def post_when_parked(message: Any) -> None:
            if isinstance(message, Proposal):
                eventually(lambda: all(worker.member.gate._here for worker in job.workers))
            post(message)

        asked, advance = threading.Event(), job.coordinator._rounds.advance

        def advance_noting() -> None:
            advance()
            asked.set()

        author.channel.post = post_when_parked  # type: ignore[method-assign]
        job.coordinator._rounds.advance = advance_noting  # type: ignore[method-assign]

        def wait_together(worker: Worker) -> None:
            worker.member.arrive(2)
            if worker.rank == 1:
                asked.wait(DEADLINE_SECS)  # worker 0 waits alone so far
                worker.member.propose(Update(id="second").assign("dense/kernel", [[1.0] * 3] * 4)).result(5)
            worker.member.pause("drain")

        job.on_all(wait_together)
        applied, values = job.workers[0].applied, job.values()
    with Job(2, job.journal, durable=True) as again:
        again.train(5)
        assert again.workers[0].applied == applied
        assert again.values() == values


def test_a_job_that_stops_while_it_waits_to_be_told_leaves_no_thread() -> None:
    with Job(2) as job:
        job.workers[1].member.channel.applied = lambda *_: None  # type: ignore[method-assign]

        def sync(worker: Worker) -> None:
            worker.member.pause("sync\n0\nsync-1\ndense/bias")

        threads = [threading.Thread(target=partial(_until_death, sync, worker)) for worker in job.workers]
        for thread in threads:
            thread.start()
        eventually(lambda: all(worker.applied for worker in job.workers))
    for thread in threads:
        thread.join(DEADLINE_SECS)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("replicast-")]


def _until_death(act: Any, worker: Worker) -> None:
    with pytest.raises(Exception, match="died"):
        act(worker)


def test_what_the_start_state_holds_is_told_again_although_its_receipt_was_not_written() -> None:
    class NoReceipts(MemoryJournal):
        def write_receipt(self, receipt: Receipt) -> None:
            raise OSError(28, "No space left on device")

    with Job(2, NoReceipts()) as first:
        ticket = first.workers[0].member.propose(bias(1.0, id="fix"))
        first.train(5)
        step = ticket.result(DEADLINE_SECS).step
    second = Job(2, first.journal)
    second.coordinator.start = partial(second.coordinator.start, step)  # type: ignore[method-assign]
    with second:
        again = second.workers[0].member.propose(bias(1.0, id="fix"))
        assert again.wait(3.0), f"it is {again.stage}"


def test_updates_applied_again_come_before_new_ones_of_the_same_step() -> None:
    with Job(2) as first:
        propose = first.workers[0].member.propose
        tickets = [propose(bias(1.0, id=f"old-{number}"), at_step=3) for number in range(6)]
        eventually(lambda: all(ticket.stage is Stage.COMMITTED for ticket in tickets))
        first.train(5)
    with Job(2, first.journal) as second:
        new = second.workers[0].member.propose(bias(1.0, id="new"), at_step=3)
        eventually(lambda: new.stage is Stage.COMMITTED)
        second.train(5)
        assert [id_ for _, id_ in second.workers[0].applied] == [*(f"old-{n}" for n in range(6)), "new"]
