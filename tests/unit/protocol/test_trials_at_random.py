"""Trials among everything else: proposals of all kinds at random, and then the same from the journal."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdatePending, UpdateRefused
from replicast.journal import MemoryJournal
from replicast.protocol import Patience, Ticket
from replicast.trial import Trial
from tests.unit.protocol.test_trials import Run
from tests.unit.protocol.twins import Job, Worker, bias

STEPS = 40
KINDS = ("update", "trial", "trial", "function", "function on trial", "sync", "audit", "wait")
PATIENCE = Patience(stage_secs=5, answer_secs=5, decide_secs=15, compute_secs=5, begin_secs=10, park_secs=0.1)


@dataclass(frozen=True, slots=True)
class Deed:
    """What one worker proposes, or all do, at one step."""

    id: str
    rank: int
    kind: str
    amount: float
    at_step: int | None
    trial: Trial


def plan_of(chance: random.Random, size: int) -> dict[int, list[Deed]]:
    plan: dict[int, list[Deed]] = {}
    for step in range(2, STEPS):
        for number in range(chance.choice([0, 0, 0, 1, 2])):
            at_step = step + chance.randrange(1, 12) if chance.random() < 0.3 else None
            trial = Trial(chance.randrange(1, 9), max_increase=0.1)
            who, kind, amount = chance.randrange(size), chance.choice(KINDS), chance.choice([-0.25, 0.5, 1.0])
            plan.setdefault(step, []).append(Deed(f"u{step}-{number}", who, kind, amount, at_step, trial))
    return plan


def proposed(worker: Worker, deed: Deed) -> Ticket | None:
    """Carries out a deed on one worker; a training thread is never kept for ever."""
    member = worker.member
    if deed.kind == "audit":
        member.pause("audit\nheal")
    elif deed.kind == "sync":
        with contextlib.suppress(UpdateRefused):  # a trial may run
            member.pause("compare\n0\ndense/bias")
    elif worker.rank != deed.rank:
        return None
    elif "function" in deed.kind:
        trial = deed.trial if "trial" in deed.kind else None
        return member.propose_function(deed.id, adding(deed.amount), deed.rank, deed.at_step, trial)
    else:
        trial = deed.trial if deed.kind == "trial" else None
        ticket = member.propose(bias(deed.amount, id=deed.id), deed.at_step, trial)
        if deed.kind == "wait":
            with contextlib.suppress(UpdatePending, UpdateRefused):
                ticket.result()
        return ticket
    return None


def adding(amount: float) -> Callable[[Any], Any]:
    return lambda values: {"bias": values["bias"] + np.float32(amount)}


def play(journal: MemoryJournal, plan: dict[int, list[Deed]], size: int, dies_at: int | None) -> Any:
    tickets: list[Ticket] = []
    keep = threading.Lock()
    with Job(size, journal, durable=bool(size % 2), patience=PATIENCE) as job:
        run = Run(job)

        def act(worker: Worker) -> None:
            for deed in plan[worker.member.gate.step]:
                ticket = proposed(worker, deed)
                if ticket is not None:
                    with keep:
                        tickets.append(ticket)

        run.train(dies_at or STEPS, dict.fromkeys(plan, act), drain=dies_at is None)
        if dies_at is not None:
            return None
        job.close()
        open_ = [ticket for ticket in tickets if not ticket.done()]
        assert all((ticket.step or 0) > STEPS for ticket in open_), "only what is for a later step is open"
        assert job.values() == job.values()[:1] * size
        applied = [worker.applied for worker in job.workers]
        assert applied == applied[:1] * size
        return applied[0], job.values(), journal.outcomes()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_proposed_nobody_is_stuck_and_the_journal_gives_the_same_bits_again(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([1, 2, 3])
    plan, journal = plan_of(chance, size), MemoryJournal()
    if chance.random() < 0.5:
        play(journal, plan, size, chance.randrange(3, STEPS - 2))
    first = play(journal, plan, size, None)
    assert play(journal, {}, size, None) == first
