"""Leaving: a job that is told to end does so once, at one boundary, and decides nothing after that."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from replicast.config import TOLD_TO_END
from replicast.errors import UpdateRefused
from replicast.protocol.leaving import Leaving, told_to_end
from replicast.trial import Trial
from replicast.core.stage import Stage
from tests.unit.protocol.test_trials import Run
from tests.unit.protocol.twins import Job, Worker, bias, eventually


class Told:
    """A job whose workers can be told to end, and what they have saved."""

    def __init__(self, job: Job) -> None:
        self.saved: list[int] = []
        self.leavings = [Leaving(worker.member, lambda: self._save()) for worker in job.workers]

    def _save(self) -> str:
        self.saved.append(0)
        return "the state is saved"

    def ask(self, worker: Worker) -> None:
        """SIGTERM, to this worker; nobody goes on before all know where they leave."""
        self.leavings[worker.rank].ask()
        eventually(lambda: self.is_on_its_way(worker))

    def come_to_the_end(self, worker: Worker) -> None:
        """The script of this worker ends."""
        self.leavings[worker.rank].ends = True
        self.leavings[worker.rank].settle()

    @staticmethod
    def is_on_its_way(worker: Worker) -> bool:
        return any(stop.go is not None and stop.go.action for stop in worker.member.gate.pending())


@pytest.mark.parametrize("on_trial", [True, False])
def test_workers_that_are_told_to_end_leave_once_and_decide_nothing(
    on_trial: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "replicast")
    with Job(2, durable=True) as job:
        run, told = Run(job), Told(job)
        trial = run.propose(1, bias(-0.5), trial=Trial(5000) if on_trial else None)

        def push(worker: Worker) -> None:
            if worker.rank == 0 and on_trial:
                run.tickets.append(worker.member.propose(bias(2.0, id="behind")))
                eventually(lambda: run.tickets[1].waits_for)

        with pytest.raises(SystemExit) as ended:
            run.train(40, {4: trial, 8: push, 9: told.ask})
        assert ended.value.code == TOLD_TO_END
        # As at the end of the process: nothing raises, and nobody waits for the others.
        for worker in job.workers:
            monkeypatch.setattr(worker.member, "pause", lambda intent: pytest.fail(f"paused to {intent}"))
        job.on_all(lambda worker: told.come_to_the_end(worker))
        job.on_all(lambda worker: told.leavings[worker.rank].ask())
        assert {worker.member.gate.step for worker in job.workers} == {10}
        assert not job.journal.outcomes()
        assert len(told.saved) == (0 if on_trial else 2)
        assert sum("was told to end" in said for said in caplog.messages) == 2
        if on_trial:
            assert run.tickets[1].stage is Stage.PROPOSED
            assert len(job.journal.records()) == 1


def test_a_training_that_ends_when_all_are_told_to_end_does_not_decide_its_trial() -> None:
    with Job(2, durable=True) as job:
        run, told = Run(job), Told(job)
        with pytest.raises(SystemExit):
            run.train(9, {4: run.propose(1, bias(-0.5), trial=Trial(5000)), 9: told.ask})
        assert all(leaving.left for leaving in told.leavings)
        assert not job.journal.outcomes()


def test_a_script_that_ends_when_all_are_told_to_end_saves_and_raises_nothing() -> None:
    with Job(2, durable=True) as job:
        run, told = Run(job), Told(job)
        run.train(6, {6: told.ask}, drain=False)
        job.on_all(lambda worker: told.come_to_the_end(worker))
        assert all(leaving.left for leaving in told.leavings)
        assert len(told.saved) == 2


def test_what_is_proposed_when_some_have_left_is_for_the_next_start() -> None:
    with Job(2) as job:
        run, told = Run(job), Told(job)

        def propose_where_worker_0_leaves() -> str:
            worker = job.workers[0]
            if not run.tickets:
                run.tickets.append(worker.member.propose(bias(2.0)))
                eventually(lambda: run.tickets[0].stage is Stage.COMMITTED)
            return "the state is not saved"

        told.leavings[0] = Leaving(job.workers[0].member, propose_where_worker_0_leaves)
        with pytest.raises(SystemExit):
            run.train(20, {9: told.ask})
        assert [record.step for record in job.journal.records()] == [11]
        for worker in job.workers:
            np.testing.assert_array_equal(worker.state.values["dense/bias"], np.zeros(3, np.float32))


def test_a_script_that_does_not_train_ends_at_once() -> None:
    with Job(1) as job:
        leaving = Leaving(job.workers[0].member, lambda: "the state is saved")
        with pytest.raises(SystemExit) as ended:
            told_to_end([leaving])
        assert ended.value.code == TOLD_TO_END


def test_a_worker_that_was_elsewhere_when_the_others_ended_comes_to_the_end_too() -> None:
    with Job(2) as job:
        told = Told(job)

        def end(worker: Worker) -> None:
            if worker.rank == 1:  # as a script does that saves on one worker only, and catches the error
                for _ in range(2):
                    with pytest.raises(UpdateRefused, match="at different places"):
                        worker.member.pause("save")
            told.come_to_the_end(worker)

        job.on_all(end)
