"""Updates of a job whose workers are threads: what their authors are told, and when the bytes are freed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.core.entries import Stage
from replicast.errors import ReplicasDiverged, UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.replicas.replica import Parcels
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, committed_updates
from replicast.transport import Transport
from replicast.transport.shared import KEPT_BYTES
from replicast.update.guard import Guard
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, MemoryState, Worker, eventually
from tests.unit.runtime.playing import bias, bias_of, refusal, scheduled


def test_two_proposals_of_one_worker_are_decided_in_order_whatever_their_size() -> None:
    with Job(2) as job:
        tickets: list[Ticket] = []

        def propose(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step <= 10:
                large = Update().assign("dense/kernel", np.full((4, 3), step, np.float32))
                tickets.extend([worker.propose(large), worker.propose(bias(1.0))])

        job.train(20, propose)
        sequences = [ticket.result(DEADLINE_SECS).sequence for ticket in tickets]
        assert sequences == list(range(1, 21))
        assert [id_ for _, id_ in job.workers[0].applied] == [ticket.id for ticket in tickets]


def test_a_receipt_says_what_has_changed_on_every_way_to_it(tmp_path: Path) -> None:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, 0))) as job:
        rate = job.workers[1].propose(Update().assign("optimizer/learning_rate", 0.25))
        ticket = job.workers[0].propose(Update().add("dense/bias", np.full(3, 2.0, np.float32)))
        job.train(4)
        (of_rate,), (of_bias,) = (one.result(DEADLINE_SECS).effects or () for one in (rate, ticket))
    assert str(of_rate) == "0.1 → 0.25"
    assert (of_bias.shape, of_bias.rows, of_bias.norm) == ((3,), None, 0.0)
    assert of_bias.change == pytest.approx(2 * 3**0.5)
    told = {one for view in committed_updates(tmp_path) for one in view.texts}
    assert told == {"assign optimizer/learning_rate 0.1 → 0.25", f"add dense/bias {of_bias}"}


def test_what_cannot_be_measured_is_applied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("replicast.replicas.replica.effects", broken)
    with Job(2) as job:
        ticket = job.workers[1].propose(bias(1.0))
        job.train(2)
        assert not ticket.result(DEADLINE_SECS).effects
        assert [bias_of(worker) for worker in job.workers] == [1.0, 1.0]


def test_what_a_guard_lets_through_is_applied_whoever_proposes_it() -> None:
    with Job(2, guard=Guard(max_norm=10.0)) as job:
        mine, pushed = job.workers[1].propose(bias(1.0)), job.push(bias(2.0))
        job.train(4)
        assert {mine.result(DEADLINE_SECS).sequence, job.outcomes[pushed].outcome.sequence} == {1, 2}
        assert [bias_of(worker) for worker in job.workers] == [3.0, 3.0]


def test_too_much_is_refused_with_its_bound_whoever_proposes_it_and_nothing_changes() -> None:
    with Job(2, guard=Guard(max_norm=99.0, max_relative_change=0.5, deny=["*/learning_rate"])) as job:
        worker, before = job.workers[1], job.values()
        nan = Update(allow_nonfinite=True).add("dense/kernel", np.full((4, 3), np.nan, np.float32))
        too_much = {
            "max_norm": worker.propose(bias(100.0)),
            "max_relative_change": worker.propose(Update().scale("dense/kernel", 3.0), at_step=3),
            "deny": worker.propose(Update().assign("optimizer/learning_rate", 0.5)),
            "require_finite": worker.propose(nan),
            "Received: 2, 4 times the bound": worker.session.proposals.propose_function(
                "f", lambda values: {"dense/kernel": values["dense/kernel"] * np.float32(-1)}, 1, None
            ),
        }
        with pytest.raises(UpdateRefused, match="Received: 3, 6 times the bound"):
            job.push(Update().scale("dense/kernel", 4.0))
        job.train(4)
        for bound, ticket in too_much.items():
            assert bound in str(refusal(ticket)), bound
        assert job.values() == before


def failing(worker: Worker, error: Exception) -> None:
    """This worker cannot receive anything."""

    def receive(*_: Any) -> Any:
        raise error

    worker.transport.receive = receive  # type: ignore[method-assign]


def test_an_unexpected_error_in_preparing_refuses_that_update_and_the_job_continues() -> None:
    with Job(2) as job:
        receive = job.workers[1].transport.receive
        failing(job.workers[1], ZeroDivisionError("of the test"))
        bad = job.workers[0].propose(bias(1.0))
        job.train(3)
        error = refusal(bad)
        assert "ZeroDivisionError: of the test" in error.problem
        assert error.worker == 1
        job.workers[1].transport.receive = receive  # type: ignore[method-assign]
        good = job.workers[0].propose(bias(2.0))
        job.train(3)
        assert good.result(DEADLINE_SECS).sequence == 1


def test_an_unexpected_error_in_publishing_refuses_that_update_and_the_job_continues() -> None:
    with Job(2) as job:
        publish = job.workers[1].transport.publish

        def broken(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        job.workers[1].transport.publish = broken  # type: ignore[method-assign]
        bad = job.workers[1].propose(bias(1.0))
        assert "No space left" in str(refusal(bad))
        job.workers[1].transport.publish = publish  # type: ignore[method-assign]
        good = job.workers[1].propose(bias(2.0))
        job.train(3)
        assert good.result(DEADLINE_SECS).sequence == 1


def test_bytes_that_were_changed_on_their_way_are_refused_by_a_worker_that_notices() -> None:
    with Job(2) as job:
        receive = job.workers[0].transport.receive

        def damaging(*arguments: Any) -> Any:
            (file,) = job.files()
            with file.open("r+b") as content:
                content.write(b"\1")
            return receive(*arguments)

        job.workers[0].transport.receive = damaging  # type: ignore[method-assign]
        ticket = job.workers[1].propose(bias(1.0))
        job.train(5)
        assert refusal(ticket).worker in (0, 1)
        assert [worker.applied for worker in job.workers] == [[], []]


def test_the_same_id_with_the_same_content_is_applied_once_and_all_get_the_receipt() -> None:
    with Job(2) as job:
        tickets = [
            worker.propose(bias(1.0, id="fix").labelled(f"author {worker.rank}", f"{worker.rank}"))
            for worker in job.workers
        ]
        job.train(10)
        first, second = (ticket.result(DEADLINE_SECS) for ticket in tickets)
        assert first == second
        later = job.workers[1].propose(bias(1.0, id="fix"))
        assert later.result(DEADLINE_SECS) == first
        assert len(job.workers[0].applied) == 1


def test_the_same_id_with_other_content_is_refused_and_the_first_one_stays() -> None:
    with Job(2) as job:
        first = scheduled(job.workers[1].propose(bias(1.0, id="fix"), at_step=6))
        on_its_way = job.workers[1].propose(bias(2.0, id="fix"))
        assert "other content" in str(refusal(on_its_way))
        job.train(8)
        assert first.result(DEADLINE_SECS).step == 6
        afterwards = job.workers[0].propose(bias(3.0, id="fix"))
        assert "other content" in str(refusal(afterwards))
        assert [bias_of(worker) for worker in job.workers] == [1.0, 1.0]


def test_replicas_that_differ_are_named_in_the_error() -> None:
    with Job(3) as job:
        job.workers[1].state.values["dense/bias"][0] = 7.0
        ticket = job.workers[0].propose(bias(1.0))
        job.train(8)
        with pytest.raises(ReplicasDiverged, match=r"worker 0, 2: \w+; worker 1: ") as diverged:
            ticket.result(DEADLINE_SECS)
        error = diverged.value
        assert (ticket.stage, error.update_id, error.step) == (Stage.FAILED, ticket.id, ticket.step)
        assert error.digests[0] == error.digests[2] != error.digests[1]


def test_an_update_of_what_may_differ_is_no_divergence() -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.session.replica.may_differ = frozenset({"table/embeddings"})
            worker.state.values["table/embeddings"][:] = worker.rank
        tickets = [
            job.workers[0].propose(Update().scale("table/embeddings", 2.0)),
            job.workers[0].propose(bias(1.0).scale("table/embeddings", 2.0)),
        ]
        job.train(3)
        for ticket in tickets:
            assert len(set(ticket.result(DEADLINE_SECS).digests.values())) == 1
        assert job.workers[1].state.values["table/embeddings"][0, 0] == 4


def test_what_an_update_assigns_stays_when_the_memory_is_used_again(tmp_path: Path) -> None:
    transport = Transport("job", 0, directory=tmp_path)
    size = KEPT_BYTES[0] // 4
    schema = MemoryState({"wide": np.zeros(size, np.float32)}).schema
    parcels = Parcels(transport, "job", 0, schema)
    prepared = []
    for number in (1.0, 2.0):
        update = Update(id=f"assign-{number}").assign("wide", np.full(size, number, np.float32))
        parcel = parcels.publish(update, f"ticket-{number}")
        parcels.prepare(update.id, parcel.digest, parcel, 1.0)
        prepared.append(parcels.take(update.id, parcel.digest)[0])
        parcels.release_ticket(f"ticket-{number}", Stage.VERIFIED)
    assert len(list(tmp_path.iterdir())) == 1
    assert [float(update.edits[0].arrays["value"][-1]) for update in prepared] == [1.0, 2.0]
    transport.close()


# Memory.


def test_no_bytes_stay_in_memory_whatever_came_of_an_update() -> None:
    with Job(3) as job:
        worker = job.workers[1]
        tickets = [worker.propose(bias(1.0, id="verified")), worker.propose(bias(1.0, id="verified"))]
        tickets.append(job.workers[2].propose(bias(1.0, id="verified")))
        tickets.append(worker.propose(bias(9.0, id="verified")))
        tickets.append(worker.propose(Update(id="refused").add("dense/bias", np.full(3, np.nan, np.float32))))
        taken_back = scheduled(worker.propose(bias(1.0, id="withdrawn"), at_step=50))
        pushed = job.push(bias(1.0, id="pushed"))
        twice = job.push(bias(1.0, id="pushed"))
        job.withdraw("withdrawn")
        computed = worker.session.proposals.propose_function(
            "computed", lambda now: {"bias": now["bias"] * 2}, 1, None
        )
        wrong = worker.session.proposals.propose_function(
            "wrong", lambda now: {"bias": now["kernel"]}, 1, None
        )
        job.train(4)
        job.workers[2].state.values["dense/kernel"][:] = 0
        job.on_all(lambda worker: worker.session.rest("sync", 0))
        job.workers[2].state.values["dense/kernel"][:] = 0
        job.on_all(lambda worker: worker.session.rest("audit", "heal"))
        job.workers[2].state.values["dense/kernel"][:] = 0
        job.on_all(lambda worker: worker.session.rest("audit", "warn"))
        for ticket in (*tickets, taken_back, computed, wrong):
            assert ticket.settled.wait(DEADLINE_SECS)
        assert [ticket.stage for ticket in tickets] == [Stage.VERIFIED] * 3 + [Stage.REFUSED] * 2
        assert (taken_back.stage, computed.stage, wrong.stage) == (
            Stage.WITHDRAWN,
            Stage.VERIFIED,
            Stage.REFUSED,
        )
        eventually(lambda: {pushed, twice} <= job.outcomes.keys())
        eventually(lambda: not job.files())


def test_no_bytes_stay_in_memory_when_a_job_ends_in_the_middle() -> None:
    with Job(2) as job:
        scheduled(job.workers[1].propose(bias(1.0), at_step=50))
        assert job.files()
    assert not job.files()


def test_no_room_for_an_update_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Job(2) as job:
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            ticket = job.workers[1].propose(bias(1.0))
            assert refusal(ticket).worker == 1
        again = job.workers[1].propose(bias(1.0))
        job.train(3)
        assert again.result(DEADLINE_SECS).sequence == 1
