"""What people who tried it have found, each in the fewest words that show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.coordination import MemoryCoordination
from replicast.errors import JobFailed, UpdateRefused
from replicast.protocol import Channel, Member, Ticket
from replicast.protocol.coordinator import PILE
from replicast.transport import SharedMemoryTransport
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


def drain(worker: Worker) -> None:
    worker.member.pause("drain")


def test_what_a_pause_brings_forward_is_told_before_what_is_scheduled_for_a_step_that_comes_later() -> None:
    with Job(2, durable=True) as job:
        for step in (1, 2, 3):
            job.on_all(lambda worker, step=step: worker.member.arrive(step))
        author = job.workers[1].member
        scheduled = author.propose(bias(1.0, id="scheduled"), at_step=4)
        eventually(lambda: scheduled.step == 4)
        plain = author.propose(bias(2.0, id="plain"))
        eventually(lambda: plain.step == 5)
        job.on_all(drain)
        eventually(plain.done)
        assert (plain.result(0).step, scheduled.done()) == (3, False)


def test_the_same_update_by_two_authors_with_two_notes_is_one() -> None:
    with Job(2) as job:
        tickets = [
            worker.member.propose(
                bias(1.0, id="fix").labelled(f"worker {worker.rank}", f"note {worker.rank}")
            )
            for worker in job.workers
        ]
        job.train(2)
        assert [ticket.result(DEADLINE_SECS).sequence for ticket in tickets] == [1, 1]
        (record,) = job.journal.records()
        assert (record.author, record.note) in {("worker 0", "note 0"), ("worker 1", "note 1")}
        assert job.journal.load(1).author == record.author
        other = job.workers[1].member.propose(bias(2.0, id="fix"))
        job.train(2)
        with pytest.raises(UpdateRefused, match="other content"):
            other.result(DEADLINE_SECS)


def test_a_function_that_its_source_never_proposes_is_refused_at_the_end_of_training() -> None:
    with Job(2) as job:
        ticket = job.workers[0].member.propose_function("f", lambda now: {}, source=1, at_step=None)
        job.train(2)
        with pytest.raises(UpdateRefused, match="Worker 1, on which the function was to run"):
            ticket.result(DEADLINE_SECS)


def to_a_boundary(member: Member, ticket: Ticket) -> None:
    member.arrive(member.gate.step + 1)


def to_a_pause(member: Member, ticket: Ticket) -> None:
    member.pause("drain")


def for_a_result(member: Member, ticket: Ticket) -> None:
    ticket.result(DEADLINE_SECS)


@pytest.mark.parametrize("wait", [to_a_boundary, to_a_pause, for_a_result])
def test_a_function_that_waits_for_those_who_wait_for_it_is_refused(wait: Any) -> None:
    with Job(2) as job:
        member = job.workers[1].member
        another = member.propose(bias(1.0, id="later"), at_step=50)

        def function(now: object) -> Update:
            wait(member, another)
            raise AssertionError("it was let through")

        tickets = job.on_all(lambda w: w.member.propose_function("f", function, source=1, at_step=None))
        job.train(2)
        for ticket in tickets:
            with pytest.raises(UpdateRefused, match="cannot wait for other workers"):
                ticket.result(DEADLINE_SECS)
        assert [worker.member.gate.step for worker in job.workers] == [2, 2]


def test_an_update_of_what_may_differ_is_no_divergence() -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.member.examiner.declared = frozenset({"table/embeddings"})
            worker.state.values["table/embeddings"][:] = worker.rank
        ticket = job.workers[0].member.propose(Update().scale("table/embeddings", 2.0))
        both = job.workers[0].member.propose(bias(1.0).scale("table/embeddings", 2.0))
        job.train(2)
        assert len(set(ticket.result(DEADLINE_SECS).digests.values())) == 1
        assert len(set(both.result(DEADLINE_SECS).digests.values())) == 1
        assert job.workers[1].state.values["table/embeddings"][0, 0] == 4


def test_bytes_of_what_is_known_already_are_not_kept(tmp_path: Path) -> None:
    large = np.zeros(1 << 18, np.float32)
    with Job(2, values={"w": large}) as job:
        for worker in job.workers:
            transport = SharedMemoryTransport("job", worker.rank, directory=tmp_path, mates=range(job.size))
            worker.member.transport = transport
            worker.member.shelf._transport = worker.member.shelf._receiving._transport = transport
        tickets = []
        for _ in range(3):
            tickets.append(job.workers[1].member.propose(Update(id="same").add("w", large + 1)))
            job.train(2)
        assert [ticket.result(DEADLINE_SECS).sequence for ticket in tickets] == [1, 1, 1]
        job.on_all(drain)
        assert list(tmp_path.iterdir()) == []


def test_what_was_read_is_removed_from_the_service_also_when_there_is_never_a_quiet_moment() -> None:
    with Job(2) as job:
        most = 0
        for number in range(PILE):
            ticket = job.workers[1].member.propose(bias(1.0, id=f"u{number}"))
            job.on_all(lambda worker: worker.member.arrive(worker.member.gate.step + 1))
            job.on_all(drain)
            ticket.result(DEADLINE_SECS)
            most = max(most, len([key for key in job.store.values if "/log/" in key]))
        assert most <= PILE + 20, "of some thousand entries"
        job.on_all(drain)
        assert not [key for key in job.store.values if "/applied/" in key]


def test_who_waits_for_one_that_has_left_is_told_and_what_that_one_said_before_is_heard() -> None:
    store = MemoryCoordination.Store()
    left: set[int] = set()
    first, second = (
        Channel(MemoryCoordination(store), "test", rank, 2, has_left=left.__contains__) for rank in range(2)
    )
    second._put("agree/plan/1", "said before it left")
    left.add(1)
    assert first.agree("plan", "mine", DEADLINE_SECS) == {0: "mine", 1: "said before it left"}
    with pytest.raises(JobFailed, match="worker 1 reached the end of its script") as failure:
        first.agree("another plan", "mine", DEADLINE_SECS)
    assert failure.value.worker == 1


def test_who_is_elsewhere_because_another_has_left_blames_that_one() -> None:
    with Job(2) as job:
        job.workers[0].member.channel._has_left = lambda worker: worker == 1

        def come(worker: Worker) -> str:
            try:
                worker.member.pause("train" if worker.rank == 0 else "drain")
            except (JobFailed, UpdateRefused) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        first, second = job.on_all(come)
        assert first.startswith("JobFailed: worker 1 reached the end of its script")
        assert second.startswith("UpdateRefused: The workers wait for each other at different places")
