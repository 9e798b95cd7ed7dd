"""Operations in any order: workers, as threads, end with the state of one sequential model.

Hypothesis chooses what happens, all of it before it begins, and the threads choose when. A failure need not
come again. REPLICAST_TEST_EXAMPLES=5000 searches for long. Restarts, crashes and full disks at all points are
for the simulation (`tests/simulation`); here it is real threads and messages.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicast.core.entries import Stage
from replicast.errors import UpdatePending, UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.update.edits import apply_edit
from replicast.update.schema import planned
from replicast.update.update import Update
from tests.threads import QUICK, Job, MemoryState, Worker, eventually, start_values
from tests.unit.runtime.playing import own_threads

STEPS = 12
EXAMPLES = int(os.environ.get("REPLICAST_TEST_EXAMPLES", "150"))
TIMEOUTS = msgspec.structs.replace(QUICK, wait_secs=0.1)
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
]


@dataclass(frozen=True)
class Deed:
    """What one worker does after a step.

    Attributes:
        what: "propose"; propose and "wait"; propose from "outside"; "withdraw"; "stall" for a moment; or what
            all workers do: "sync", "audit".
        edit: Which good edit, or, from -1 down, which bad one.
        id: Which id: the same may be proposed again, with the same content or with other.
        later: How many steps later it has to be applied; 0 for the next possible boundary.
    """

    step: int
    rank: int
    what: str
    edit: int
    id: int
    later: int


DEEDS = st.builds(
    Deed,
    st.integers(1, STEPS),
    st.integers(0, 2),
    st.sampled_from(["propose"] * 4 + ["wait", "outside", "withdraw", "stall", "sync", "audit"]),
    st.integers(-len(BAD), len(GOOD) - 1),
    st.integers(0, 9),
    st.sampled_from([0, 0, 0, 0, 2, 5]),
)


def update_of(deed: Deed) -> Update:
    made = BAD[-deed.edit - 1] if deed.edit < 0 else GOOD[deed.edit]
    return made(Update(id=f"u{deed.id}"))


def trained(worker: Worker, step: int) -> None:
    """One step of training, which does not commute with any update."""
    train_values(worker.state.values, step)


def train_values(values: dict[str, Any], step: int) -> None:
    for name in ("dense/kernel", "dense/bias"):
        values[name] = values[name] * np.float32(0.5) + np.float32(step)


class Story:
    """One job to which all of this happens."""

    def __init__(self, job: Job, deeds: list[Deed]) -> None:
        self.job = job
        self.deeds = [replace(deed, rank=deed.rank % job.size) for deed in deeds]
        self.tickets: list[tuple[Deed, Ticket]] = []
        self.pushed: dict[str, Deed] = {}
        self.withdrawals: set[str] = set()
        self._lock = threading.Lock()

    def after_each(self, worker: Worker, step: int) -> None:
        for deed in self.deeds:
            if deed.step == step and (deed.rank == worker.rank or deed.what in ("sync", "audit")):
                self._do(worker, deed)

    def _do(self, worker: Worker, deed: Deed) -> None:
        at_step = worker.session.step + deed.later if deed.later else None
        match deed.what:
            case "propose" | "wait":
                ticket = worker.propose(update_of(deed), at_step)
                with self._lock:
                    self.tickets.append((deed, ticket))
                if deed.what == "wait":
                    with contextlib.suppress(UpdatePending, UpdateRefused):
                        ticket.result()
            case "outside":
                with contextlib.suppress(UpdateRefused), self._lock:
                    self.pushed[self.job.push(update_of(deed), at_step)] = deed
            case "withdraw":
                with self._lock:
                    self.withdrawals.add(self.job.withdraw(f"u{deed.id}"))
            case "stall":
                threading.Event().wait(0.005)
            case "sync":
                worker.session.rest("sync", deed.rank)
            case "audit":
                assert worker.session.rest("audit", "raise").outcome == "equal"

    def check(self) -> None:
        """What must be true of every job."""
        job, applied = self.job, self.job.workers[0].applied
        assert [worker.applied for worker in job.workers] == [applied] * job.size
        assert job.values() == [self._model(applied)] * job.size
        assert len({id_ for _, id_ in applied}) == len(applied), "exactly once"
        committed = job.journal.history().committed.values()
        assert [(record.step, record.id) for record in committed] == applied
        for deed, ticket in self.tickets:
            self._check_ticket(deed, ticket)
        verified = {self.pushed[ticket].id for ticket in self.pushed if self._is_verified(ticket)}
        assert {f"u{number}" for number in verified} <= {id_ for _, id_ in applied}

    def _is_verified(self, ticket: str) -> bool:
        return ticket in self.job.outcomes and self.job.outcomes[ticket].stage is Stage.VERIFIED

    def _check_ticket(self, deed: Deed, ticket: Ticket) -> None:
        if not ticket.done():
            assert (ticket.stage, (ticket.step or 0) > STEPS) == (Stage.SCHEDULED, True), f"{deed}"
            return
        try:
            receipt = ticket.result(0)
        except UpdateRefused:
            assert ticket.stage in (Stage.REFUSED, Stage.WITHDRAWN)
            return
        assert deed.edit >= 0, "a bad update came through"
        assert (receipt.step, receipt.id) in self.job.workers[0].applied
        assert len(set(receipt.digests.values())) == 1
        assert self._applied_update(receipt.id).describe() == planned(update_of(deed), SCHEMA).describe()

    def _model(self, applied: list[tuple[int, str]]) -> dict[str, bytes]:
        """One replica that does everything in order."""
        values = start_values()
        for step in range(1, STEPS + 1):
            train_values(values, step)
            for id_ in (id_ for at, id_ in applied if at == step):
                for edit in self._applied_update(id_).edits:
                    values[edit.variable] = apply_edit(edit, values[edit.variable])
        return {name: value.tobytes() for name, value in values.items()}

    def _applied_update(self, id_: str) -> Update:
        journal = self.job.journal
        return journal.load(id_, journal.history().by_id[id_].digest)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="REPLICAST_TEST_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(size=st.integers(1, 3), deeds=st.lists(DEEDS, max_size=25))
def test_whatever_is_proposed_all_replicas_end_where_the_sequential_model_does(
    size: int, deeds: list[Deed]
) -> None:
    before = own_threads()
    with Job(size, timeouts=TIMEOUTS) as job:
        story = Story(job, deeds)
        job.train(STEPS, story.after_each, one_step=lambda worker, step: trained(worker, step))
        eventually(lambda: story.withdrawals <= job.outcomes.keys())
        story.check()
    eventually(lambda: not own_threads() - before)
    assert not job.files()
