"""Whatever happens in whatever order: threads that play workers end where one sequential model does.

Hypothesis chooses what happens, all of it before it begins, and the threads choose when. A failure need not
come again, so what happened is printed. REPLICAST_TEST_EXAMPLES=5000 searches for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicast.edits import apply_edit
from replicast.errors import JobFailed, ReplicasDiverged, UpdatePending, UpdateRefused
from replicast.journal import MemoryJournal, Receipt, Record, StagedPayload
from replicast.protocol import Patience, Ticket
from replicast.state import MemoryState
from replicast.update import Update
from replicast.validate import planned
from tests.unit.protocol.twins import Job, Worker, start_values

STUCK_SECS = 15.0
PATIENCE = Patience(
    stage_secs=10, answer_secs=10, decide_secs=12, compute_secs=10, begin_secs=10, park_secs=0.1
)
DISK_FULL, NO_ROOM, BROKEN = "The disk of the test is full", "The worker of the test has no room", "is broken"
KINDS = (
    *("Stage", "Hold", "Aim", "Compute", "Go", "Free", "Drop", "Verified", "Resume"),
    *("Examine", "Lend", "Weigh", "Audited"),
)
WRITES = ("Proposal", "Answer", "Applied", "Computed", "Examined", "Weighed", "stage", "commit", "receipt")
DRIFTING = "optimizer/learning_rate"
"""What the test changes on one worker only; nothing else may ever differ."""
SCHEMA = MemoryState(start_values()).schema
GOOD: list[Callable[[Update], Update]] = [
    lambda u: u.add("dense/bias", np.full(3, 1.0, np.float32)),
    lambda u: u.scale("dense/bias", -3.0),
    lambda u: u.assign_rows("embeddings", [1, 5], np.ones((2, 2), np.float32)).scale("dense/kernel", 2.0),
    lambda u: u.blend("dense/kernel", np.full((4, 3), 7.0, np.float32), 0.25),
    lambda u: u.add_rows("embeddings", [0], [[1.0, 2.0]]),
]
BAD: list[Callable[[Update], Update]] = [
    lambda u: u,
    lambda u: u.add("dense/nothing", [1.0]),
    lambda u: u.add("dense/bias", np.zeros(4, np.float32)),
    lambda u: u.add("dense/bias", np.array([1, np.nan, 2], np.float32)),
    lambda u: u.assign_rows("embeddings", [1, 1], np.zeros((2, 2), np.float32)),
]


class Crash(BaseException):
    """This process is gone."""


class Saved(NamedTuple):
    """A state that training can start from: what a checkpoint holds, and what was applied before it."""

    step: int
    values: dict[str, Any]
    ids: tuple[str, ...]


def trained(values: dict[str, Any], step: int) -> None:
    """One step of training, which does not commute with any update."""
    for name in ("dense/kernel", "dense/bias"):
        values[name] = values[name] * np.float32(0.5) + np.float32(step)


class FaultyJournal(MemoryJournal):
    """Outlives the jobs; `reach` is told before and after each write, and may raise."""

    reach: Callable[[str], None]

    def stage(self, update: Update) -> StagedPayload:
        self.reach("before stage")
        staged = super().stage(update)
        self.reach("after stage")
        return staged

    def commit(self, staged: StagedPayload, record: Record) -> None:
        try:
            self.reach("before commit")
        except UpdateRefused:
            self.discard(staged)
            raise
        super().commit(staged, record)
        self.reach("after commit")

    def write_receipt(self, receipt: Receipt) -> None:
        self.reach("before receipt")
        super().write_receipt(receipt)
        self.reach("after receipt")


class Life:
    """One job, from its start to its crash or end: workers whose training threads do what they are told."""

    def __init__(
        self, size: int, journal: FaultyJournal, saved: Saved, number: int, *, durable: bool
    ) -> None:
        self.job = Job(size, journal, durable=durable, patience=PATIENCE)
        self.saved, self.number, self.journal = saved, number, journal
        self.known = {record.id for record in journal.records()}
        self.boundaries = [saved.step]
        self.crashed, self.failures = threading.Event(), list[str]()
        self.crash_at, self.full = "", ""
        self.no_room, self.late = set[int](), set[int]()
        self.stalls: dict[tuple[str, int], threading.Event] = {}
        self.barriers: list[threading.Barrier] = []
        self.tickets: list[tuple[Ticket, str]] = []
        self.seen: dict[str, Any] = {}
        self.runs = Counter[str]()
        self.injected: set[str] = set()
        self.syncs = 0
        self.training = False
        journal.reach = self.reach
        self.todo: list[queue.Queue[Callable[[Worker], Any] | None]] = [queue.Queue() for _ in range(size)]
        self.threads = [
            threading.Thread(target=self.play, args=(worker,), name=f"training-{worker.rank}", daemon=True)
            for worker in self.job.workers
        ]
        for worker in self.job.workers:
            self.wire(worker)
            worker.member.examiner.policy = "warn"
            worker.state.values.update({name: value.copy() for name, value in saved.values.items()})
            worker.member.gate.step = saved.step
            worker.member.start()
        self.job.coordinator.start(*([saved.step] if saved.ids or saved.step else []))
        for thread in self.threads:
            thread.start()
        self.tell_all(lambda worker: worker.member.pause("begin"))

    def wire(self, worker: Worker) -> None:
        """Puts the test between a worker and what it talks to."""
        store, put, receive = self.job.store, worker.coordination.put, worker.member.transport.receive

        def faulty_put(key: str, value: str) -> bool:
            kind = json.loads(value.partition(" ")[2] if "/log/" in key else value)["kind"]
            self.reach(f"before {kind}")
            written = put(key, value)
            self.reach(f"after {kind}")
            return written

        def faulty_get(key: str, timeout_secs: float) -> str | None:
            if "/log/" in key:
                self.stall("follower", worker.rank)
            with store.changed:
                store.changed.wait_for(lambda: key in store.values or self.crashed.is_set(), timeout_secs)
                self.die_if_crashed()
                return store.values.get(key)

        def faulty_receive(*arguments: Any) -> Any:
            arrays = receive(*arguments)
            described = json.loads(arrays[-1].tobytes())
            if worker.rank in self.no_room and described["id"] not in self.known:
                self.no_room.discard(worker.rank)
                raise UpdateRefused(NO_ROOM, worker=worker.rank)
            return arrays

        answers = worker.member.channel.answers

        def faulty_answers(number: int, *arguments: Any) -> Any:
            came = answers(number, *arguments)
            return {rank: answer for rank, answer in came.items() if not self.comes_late(number, rank)}

        worker.member.channel.answers = faulty_answers  # type: ignore[method-assign]
        worker.coordination.put = faulty_put  # type: ignore[method-assign]
        worker.coordination.get = faulty_get  # type: ignore[method-assign]
        worker.member.transport.receive = faulty_receive  # type: ignore[method-assign]

    def comes_late(self, number: int, rank: int) -> bool:
        """Whether this answer is one that the coordinator has to do without."""
        asked = self.job.store.values.get(f"replicast/test/log/{number}", "")
        if rank not in self.late or any(f'"id":"{id_}"' in asked for id_ in self.known):
            return False
        self.late.discard(rank)
        return True

    def reach(self, point: str) -> None:
        self.die_if_crashed()
        if point == self.crash_at:
            self.crash()
            raise Crash
        if point == f"before {self.full}":
            self.full = ""
            raise OSError(28, DISK_FULL) if "receipt" in point else UpdateRefused(DISK_FULL)

    def die_if_crashed(self) -> None:
        if self.crashed.is_set():
            raise Crash

    def crash(self) -> None:
        """Every thread of every worker ends at what it does next."""
        for worker in self.job.workers:
            worker.member.threads.stopping.set()
        self.crashed.set()
        for worker in self.job.workers:
            worker.failure = JobFailed("the job crashed")
        self.release()
        for barrier in self.barriers:
            barrier.abort()
        with self.job.store.changed:
            self.job.store.changed.notify_all()
        for worker in self.job.workers:
            worker.member.gate.wake()
        verifier = self.job.coordinator._verifier
        with verifier._changed:
            verifier._changed.notify_all()

    def stall(self, what: str, rank: int) -> None:
        stalled = self.stalls.get((what, rank))
        if stalled is not None:
            stalled.wait()
            self.die_if_crashed()

    def release(self) -> None:
        for key in list(self.stalls):
            self.stalls.pop(key).set()

    def play(self, worker: Worker) -> None:
        """A training thread."""
        try:
            while (act := self.todo[worker.rank].get()) is not None:
                self.stall("training", worker.rank)
                act(worker)
        except (Crash, JobFailed, threading.BrokenBarrierError) as error:
            if not self.crashed.is_set():
                self.failures.append(f"worker {worker.rank}: {error!r}")
        except BaseException:
            self.failures.append(f"worker {worker.rank}: {traceback.format_exc()}")

    def tell(self, rank: int, act: Callable[[Worker], Any]) -> None:
        self.todo[rank].put(act)

    def tell_all(self, act: Callable[[Worker], Any]) -> None:
        for rank in range(self.job.size):
            self.tell(rank, act)

    def train(
        self, stride: int, *, together: bool, leaving: Callable[[Worker], None] = lambda worker: None
    ) -> None:
        """One execution of `stride` steps on all workers, which wait for each other or do not."""
        if not self.training:
            self.training = True
            self.tell_all(
                lambda worker: (worker.member.pause("train"), worker.member.arrive(self.saved.step))
            )
        boundary = self.boundaries[-1] + stride
        self.boundaries.append(boundary)
        barrier = threading.Barrier(self.job.size if together else 1)
        self.barriers.append(barrier)

        def step(worker: Worker) -> None:
            leaving(worker)
            barrier.wait()
            for number in range(boundary - stride, boundary):
                trained(worker.state.values, number + 1)
            worker.member.arrive(boundary)

        self.tell_all(step)

    def settle(self) -> None:
        """Waits until all training threads have done what they were told, or the job has crashed."""
        self.release()
        gone = [threading.Event() for _ in self.todo]
        for rank, event in enumerate(gone):
            self.tell(rank, lambda worker, event=event: event.set())
        for event in gone:
            waited = 0.0
            while not event.wait(0.05) and not self.crashed.is_set():
                waited += 0.05
                assert not self.failures, "\n".join(self.failures)
                assert waited < STUCK_SECS, f"stuck\n{self.where()}"

    def where(self) -> str:
        """Where each thread stands."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        ours = {i: frame for i, frame in sys._current_frames().items() if "-" in names.get(i, "MainThread")}
        stacks = [f"{names[i]}:\n" + "".join(traceback.format_stack(f)[-6:]) for i, f in ours.items()]
        return "\n".join(
            [*stacks, *(f"{w.member.gate.step} {w.member.gate.pending()}" for w in self.job.workers)]
        )

    def end(self) -> None:
        """Ends all threads."""
        for waiting in self.todo:
            waiting.put(None)
        for thread in self.threads:
            thread.join(STUCK_SECS)
        for worker in self.job.workers:
            worker.member.stop()
        left = [t.name for t in threading.enumerate() if t.name.startswith(("replicast-", "training-"))]
        assert not left, f"threads that did not end: {left}\n{self.where()}"
        assert not self.failures, "\n".join(self.failures)


class Story:
    """What may happen to a job, a method for each; and in the end what must have come of it."""

    def __init__(self, size: int, durable: bool) -> None:
        self.size, self.durable = size, durable
        self.journal = FaultyJournal()
        self.fresh = Saved(0, {name: value.copy() for name, value in start_values().items()}, ())
        self.saved, self.from_saved = self.fresh, False
        self.lives: list[Life] = []
        self.contents: dict[str, dict[str, Update]] = {}
        self.proposed: list[tuple[str, Update, int | None]] = []
        self.functions = 0
        self.inbox: dict[str, tuple[Update, int | None]] = {}
        self.schedule: dict[str, int] = {}
        self.first_step: dict[str, int] = {}
        self.life = self.born(self.fresh)

    def born(self, saved: Saved) -> Life:
        life = Life(self.size, self.journal, saved, len(self.lives), durable=self.durable)
        self.lives.append(life)
        self.life = life
        for update, at_step in self.inbox.values():
            self.propose(0, update, at_step, in_training=False)
        return life

    def alive(self) -> Life:
        """The job; a new one on the same journal if it has crashed."""
        if self.life.crashed.is_set():
            self.bury(self.life)
            self.born(self.saved if self.from_saved else self.fresh)
        return self.life

    def propose(self, rank: int, update: Update, at_step: int | None, *, in_training: bool) -> None:
        life = self.life
        self.contents.setdefault(update.id, {})[content(update)] = update

        def act(worker: Worker) -> None:
            life.tickets.append((worker.member.propose(update, at_step), content(update)))

        if in_training:
            life.tell(rank, act)
        else:
            act(life.job.workers[rank])

    def somebody_proposes(self, rank: int, kind: int, ahead: int | None, where: str) -> None:
        life = self.alive()
        id_ = f"update-{len(self.proposed)}"
        at_step = None if ahead is None else life.boundaries[-1] + ahead
        update = GOOD[kind](Update(id=id_))
        self.proposed.append((id_, update, at_step))
        if at_step is not None:
            self.schedule[id_] = at_step
        if where == "inbox":
            self.inbox[id_] = (update, at_step)
        self.propose(
            0 if where == "inbox" else rank % self.size, update, at_step, in_training=where == "training"
        )

    def somebody_proposes_the_same_id(self, rank: int, which: int, same: bool, in_training: bool) -> None:
        self.alive()
        if not self.proposed:
            return
        id_, update, at_step = self.proposed[which % len(self.proposed)]
        update = update if same else Update(id=id_, note="other").scale("dense/bias", 9.0)
        self.propose(rank % self.size, update, at_step, in_training=in_training)

    def somebody_proposes_nonsense(self, rank: int, kind: int) -> None:
        life = self.alive()
        update = BAD[kind](Update(id=f"bad-{len(life.tickets)}-{life.number}"))
        life.tickets.append((life.job.workers[rank % self.size].member.propose(update), "bad"))

    def all_propose_a_function(self, source: int, broken: bool, ahead: int | None) -> None:
        life = self.alive()
        self.functions += 1
        id_ = f"function-{self.functions}"
        at_step = None if ahead is None else life.boundaries[-1] + ahead
        if at_step is not None:
            self.schedule[id_] = at_step

        def double(values: Any) -> Update:
            life.runs[id_] += 1
            life.seen[id_] = values["dense/bias"]
            if broken:
                raise ArithmeticError(BROKEN)
            return Update().add("dense/bias", values["dense/bias"])

        life.tell_all(
            lambda worker: life.tickets.append(
                (worker.member.propose_function(id_, double, source % self.size, at_step), "function")
            )
        )

    def all_sync(self, source: int, drifting: int) -> None:
        life = self.alive()
        id_ = f"sync-{life.number}-{life.syncs}"
        life.syncs += 1
        names = ["dense/kernel", "optimizer/learning_rate"]

        def sync(worker: Worker) -> None:
            mine = worker.state.values["optimizer/learning_rate"]
            if worker.rank == drifting % self.size != source % self.size:
                worker.state.values["optimizer/learning_rate"] = mine + 1
            try:
                worker.member.pause("\n".join(["sync", str(source % self.size), id_, *names]))
                applied = any(id_ == one for _, one in worker.applied)
                assert applied, f"{id_} returned on worker {worker.rank}, and nothing was applied"
            except UpdateRefused:
                worker.state.values["optimizer/learning_rate"] = mine

        life.tell_all(lambda worker: worker.member.pause("compare"))
        life.tell_all(sync)

    def all_audit(self, bad: int) -> None:
        """One replica is corrupted, and healed; or it is not, and the test repairs it."""
        life = self.alive()
        bad %= self.size

        def audit(worker: Worker) -> None:
            mine, before = worker.state.values[DRIFTING], len(worker.applied)
            reports = worker.member.examiner.reports
            told = len(reports)
            if worker.rank == bad:
                worker.state.values[DRIFTING] = np.asarray(mine + 1)
            try:
                worker.member.pause("audit\nheal")
                healed = any(id_.startswith("heal-") for _, id_ in worker.applied[before:])
                # By this audit, or by one that somebody wished for and that came first.
                outcomes = [report.outcome for report in list(reports)[told:]]
                assert healed == ("healed" in outcomes), f"{outcomes}: {worker.applied}"
                assert healed or self.size == 1, f"{outcomes}"
            except (UpdateRefused, ReplicasDiverged):
                healed = False
            if not healed:
                worker.state.values[DRIFTING] = mine

        life.tell_all(lambda worker: worker.member.pause("compare"))
        life.tell_all(audit)

    def all_look(self) -> None:
        self.alive().tell_all(lambda worker: worker.member.examiner.look())

    def somebody_wishes_an_audit(self, rank: int) -> None:
        self.alive().job.workers[rank % self.size].member.wish("audit")

    def all_train(self, strides: list[int], together: bool, behind: int | None) -> None:
        life = self.alive()
        if behind is not None:
            self.a_thread_stalls("training", behind)
        for stride in strides:
            life.train(stride, together=together)

    def all_pause(self) -> None:
        self.alive().tell_all(lambda worker: worker.member.pause("drain"))

    def somebody_waits_in_the_training_thread(self, rank: int, timeout: float | None, all_too: bool) -> None:
        life = self.alive()

        def wait(worker: Worker) -> None:
            mine = [ticket for ticket, _ in life.tickets if ticket._wait_for == worker.member._wait_for]
            try:
                if mine:
                    mine[-1].result(timeout)
            except (UpdatePending, UpdateRefused):
                pass

        life.tell(rank % self.size, wait)
        if all_too:
            life.tell_all(lambda worker: worker.member.pause("drain"))

    def a_thread_stalls(self, what: str, rank: int) -> None:
        life = self.alive()
        life.stalls.setdefault((what, rank % self.size), threading.Event())
        if life.crashed.is_set():
            life.release()

    def stalled_threads_go_on(self) -> None:
        self.alive().release()

    def all_come_to_where_they_were_told(self) -> None:
        self.alive().settle()

    def the_disk_is_full_for_one_write(self, full: str) -> None:
        life = self.alive()
        life.injected.add(DISK_FULL)
        life.full = full

    def a_worker_cannot_stage_or_answers_late(self, rank: int, late: bool) -> None:
        life = self.alive()
        life.injected.add("did not answer" if late else NO_ROOM)
        (life.late if late else life.no_room).add(rank % self.size)

    def all_save(self) -> None:
        """A state counts as saved when all that is in it has its receipt."""
        life = self.alive()
        step, copies = life.boundaries[-1], dict[int, Saved]()

        def save(worker: Worker) -> None:
            values = {name: value.copy() for name, value in worker.state.values.items()}
            ids = (*life.saved.ids, *(id_ for _, id_ in worker.applied))
            copies[worker.rank] = Saved(step, values, ids)

        life.tell_all(lambda worker: worker.member.pause("drain"))
        life.tell_all(lambda worker: worker.member.pause("close"))
        life.train(1, together=True, leaving=save)
        life.settle()
        receipts = {receipt.id for receipt in self.journal.receipts().values()}
        if len(copies) == self.size and step > 0 and receipts.issuperset(copies[0].ids):
            self.saved = copies[0]

    def the_job_crashes(self, go_back: bool) -> None:
        self.from_saved = not go_back
        self.alive().crash()

    def the_job_will_crash_at(self, point: str, go_back: bool) -> None:
        self.from_saved = not go_back
        self.alive().crash_at = point

    def end(self) -> None:
        """Whatever happened, no thread is left."""
        for life in self.lives:
            life.crash()
        with contextlib.suppress(AssertionError):  # it was told already
            self.life.end()

    def finish(self) -> None:
        """Calm: nothing fails any more, all train past whatever is scheduled, and the job ends."""
        self.life.crash_at = ""
        life = self.alive()
        life.crash_at = life.full = ""
        life.late, life.no_room = set(), set()
        life.release()
        last = max([*self.schedule.values(), *(record.step for record in self.journal.records()), 0])
        while life.boundaries[-1] <= last + 1 or not life.training:
            life.train(1, together=True)
        life.tell_all(lambda worker: worker.member.pause("drain"))
        life.tell_all(lambda worker: worker.member.pause("close"))
        life.settle()
        for ticket, _ in life.tickets:
            assert ticket.wait(STUCK_SECS), (
                f"{ticket.id} has no outcome, it is {ticket.stage}\n{life.where()}"
            )
        life.end()
        self.check_reports(life)
        self.check_steps(life)
        self.check_model(life)
        self.check_outcomes()

    def bury(self, life: Life) -> None:
        life.end()
        self.check_reports(life)
        self.check_steps(life)
        for receipt in self.journal.receipts().values():
            self.first_step.setdefault(receipt.id, receipt.step)
            self.inbox.pop(receipt.id, None)

    def check_reports(self, life: Life) -> None:
        """No audit saw one worker before and another one after an update, a step or a function."""
        for worker in life.job.workers:
            for report in worker.member.examiner.reports:
                wrong = [one for one in report.differences if one.variable != DRIFTING]
                assert not wrong, "\n".join(report.lines())

    def check_steps(self, life: Life) -> None:
        """Every worker applied the same, each once, at its own step, in the order of steps and sequences."""
        records = {record.id: record for record in self.journal.records()}
        lists = sorted((worker.applied for worker in life.job.workers), key=len)
        longest = lists[-1]
        assert all(one == longest[: len(one)] for one in lists), (
            f"the workers applied different lists: {lists}"
        )
        ids = [*life.saved.ids, *(id_ for _, id_ in longest)]
        assert len(set(ids)) == len(ids), f"applied twice: {ids}"
        assert set(ids) <= set(records), f"applied and not in the journal: {set(ids) - set(records)}"
        for step, id_ in longest:
            record = records[id_]
            meant = (
                min(record.step, self.first_step.get(id_, record.step)) if id_ in life.known else record.step
            )
            assert record.scheduled == (id_ in self.schedule), f"{record}"
            assert step >= self.schedule.get(id_, 0), f"{id_} was for {self.schedule[id_]}: {record}"
            moved = step < meant and not record.scheduled and id_ not in life.known
            due = next((boundary for boundary in life.boundaries if boundary >= meant), None)
            assert step == due or moved, (
                f"{id_} was due at {due} and was applied at {step}: {life.boundaries}"
            )
        order = sorted(longest, key=lambda one: (min(one[0], records[one[1]].step), records[one[1]].sequence))
        assert longest == order, (
            f"applied in another order than the journal's. Received: {longest}, not {order}"
        )
        assert all(count == 1 for count in life.runs.values()), f"functions ran more than once: {life.runs}"
        assert not life.known & life.runs.keys(), f"functions ran again: {life.runs}"

    def check_model(self, life: Life) -> None:
        """One by one, the journal leads to every worker's state; nothing of it is missing."""
        worker = life.job.workers[0]
        assert all(other.applied == worker.applied for other in life.job.workers)
        applied = [*life.saved.ids, *(id_ for _, id_ in worker.applied)]
        records = self.journal.records()
        assert [record.sequence for record in records] == list(range(1, len(records) + 1))
        assert Counter(applied) == Counter(record.id for record in records), (
            f"not all or none: {applied}, {records}"
        )
        sequences = {record.id: record.sequence for record in records}
        receipts = {receipt.id: receipt for receipt in worker.member.history}
        told = [receipt.sequence for receipt in worker.member.history]
        assert len(set(told)) == len(told), f"the history tells an update twice: {told}"
        model = MemoryState(life.saved.values)
        todo, before = list(worker.applied), life.saved.step
        for boundary in life.boundaries:
            for step in range(before, boundary):
                trained(model.values, step + 1)
            before = boundary
            while todo and todo[0][0] == boundary:
                id_ = todo.pop(0)[1]
                update = self.journal.load(sequences[id_])
                if id_ in life.runs:
                    np.testing.assert_array_equal(life.seen[id_], model.values["dense/bias"])
                for edit in update.edits:
                    model.values[edit.variable] = apply_edit(edit, model.values[edit.variable])
                assert id_ in receipts, f"{id_} was applied and not verified"
                expected = dict.fromkeys(range(self.size), model.digest(update.edits))
                assert receipts[id_].digests == expected, f"{id_}: {receipts[id_]}"
                assert receipts[id_].step == boundary, f"{id_}: {receipts[id_]}"
        for other in life.job.workers:
            for name, value in model.values.items():
                np.testing.assert_array_equal(other.state.values[name], value, f"{name} of {other.rank}")

    def check_outcomes(self) -> None:
        """Every ticket has one outcome, and it is true."""
        records = {record.id: record for record in self.journal.records()}
        refused: dict[tuple[str, str], list[bool]] = {}
        for life in self.lives:
            for ticket, what in life.tickets:
                outcome = outcome_of(ticket)
                refused.setdefault((ticket.id, what), []).append(isinstance(outcome, UpdateRefused))
                if isinstance(outcome, Receipt):
                    assert outcome.sequence == records[ticket.id].sequence, f"{outcome}"
                    assert what in ("function", self.content_in_journal(records[ticket.id]))
                elif isinstance(outcome, UpdateRefused):
                    assert self.may_be_refused(life, ticket.id, what, str(outcome)), f"{ticket.id}: {outcome}"
                else:
                    assert life is not self.life, f"{ticket.id}: {outcome!r}"
        for (id_, what), all_refused in refused.items():
            there = id_ in records and what in ("function", self.content_in_journal(records[id_]))
            assert not (there and all(all_refused)), f"{id_} was refused, and is in the journal"

    def content_in_journal(self, record: Record) -> str:
        return content(self.journal.load(record.sequence))

    def may_be_refused(self, life: Life, id_: str, what: str, said: str) -> bool:
        reasons = [reason for reason in life.injected if reason in said]
        past = "is past" in said and id_ in self.schedule
        other = "other content" in said and len(self.contents.get(id_, ())) > 1
        return bool(what == "bad" or reasons or past or other or (what == "function" and BROKEN in said))


def content(update: Update) -> str:
    return planned(update, SCHEMA).content_digest()


def outcome_of(ticket: Ticket) -> Any:
    try:
        return ticket.result(0)
    except Exception as error:
        return error


def event(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


RANKS = st.integers(0, 3)
POINTS = st.sampled_from([f"{when} {point}" for point in KINDS + WRITES for when in ("before", "after")])
EVENTS = [
    event(
        "somebody_proposes",
        rank=RANKS,
        kind=st.integers(0, len(GOOD) - 1),
        ahead=st.none() | st.integers(1, 6),
        where=st.sampled_from(["thread", "training", "inbox"]),
    ),
    event(
        "somebody_proposes_the_same_id",
        rank=RANKS,
        which=st.integers(0, 5),
        same=st.booleans(),
        in_training=st.booleans(),
    ),
    event("somebody_proposes_nonsense", rank=RANKS, kind=st.integers(0, len(BAD) - 1)),
    event("all_propose_a_function", source=RANKS, broken=st.booleans(), ahead=st.none() | st.integers(1, 3)),
    event("all_sync", source=RANKS, drifting=RANKS),
    event("all_audit", bad=RANKS),
    event("all_look"),
    event("somebody_wishes_an_audit", rank=RANKS),
    event(
        "all_train",
        strides=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        together=st.booleans(),
        behind=st.none() | RANKS,
    ),
    event("all_pause"),
    event(
        "somebody_waits_in_the_training_thread",
        rank=RANKS,
        timeout=st.sampled_from([None, 0.02]),
        all_too=st.booleans(),
    ),
    event("a_thread_stalls", what=st.sampled_from(["follower", "training"]), rank=RANKS),
    event("stalled_threads_go_on"),
    event("all_come_to_where_they_were_told"),
    event("the_disk_is_full_for_one_write", full=st.sampled_from(["stage", "commit", "receipt"])),
    event("a_worker_cannot_stage_or_answers_late", rank=RANKS, late=st.booleans()),
    event("all_save"),
    event("the_job_crashes", go_back=st.booleans()),
    event("the_job_will_crash_at", point=POINTS, go_back=st.booleans()),
]
OFTEN = [EVENTS[0], EVENTS[0], EVENTS[1], EVENTS[8], EVENTS[8], EVENTS[13]]


@settings(
    max_examples=int(os.environ.get("REPLICAST_TEST_EXAMPLES", "120")),
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(
    size=st.integers(1, 4),
    durable=st.booleans(),
    events=st.lists(st.one_of(EVENTS + OFTEN), min_size=4, max_size=14),
)
def test_whatever_happens_all_workers_end_where_the_sequential_model_does(
    size: int, durable: bool, events: list[tuple[str, dict[str, Any]]]
) -> None:
    story = Story(size, durable)
    try:
        for name, arguments in events:
            getattr(story, name)(**arguments)
        story.finish()
    finally:
        story.end()
