"""Trials: an update that proves itself, or is undone by all, bit for bit. With threads as workers."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replicast.errors import FileDamaged, ReplicasDiverged, UpdatePending, UpdateRefused
from replicast.fence import Fence
from replicast.journal import Journal, MemoryJournal
from replicast.protocol import Ticket
from replicast.protocol.measures import MOST, Measures, mean_history
from replicast.state import MemoryState
from replicast.strictjson import sealed, unsealed
from replicast.trial import Trial, TrialOutcome, judged
from replicast.update import Stage, Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually

TRIAL = Trial(steps=5, max_increase=0.1)
Loss = Callable[[Worker, int], float]
At = dict[int, Callable[[Worker], Any]]


def loss_of_state(worker: Worker, step: int) -> float:
    """Worse by what the bias is above zero, as a training would measure it."""
    return 1.0 + float(worker.state.values["dense/bias"][0])


def one_step(worker: Worker, step: int) -> None:
    """What a step of training does to the state: the same on all workers, another at each step."""
    worker.state.values["dense/kernel"] = worker.state.values["dense/kernel"] * np.float32(1.01) + step
    worker.state.values["optimizer/learning_rate"] = np.asarray(0.1 / step, np.float32)


class Run:
    """Steps of a job that measure, and what the state was after each boundary."""

    def __init__(self, job: Job, loss: Loss = loss_of_state) -> None:
        self.job = job
        self.loss = loss
        self.seen: list[dict[int, dict[str, bytes]]] = [{} for _ in job.workers]
        self.tickets: list[Ticket] = []

    def train(self, steps: int, at: At | None = None, *, per_boundary: int = 1, drain: bool = True) -> None:
        barrier = threading.Barrier(self.job.size)

        def loop(worker: Worker) -> None:
            member = worker.member
            for _ in range(steps // per_boundary):
                barrier.wait(DEADLINE_SECS)
                step = member.gate.step + per_boundary
                measured = self.loss(worker, step)  # of the state that the step starts from
                one_step(worker, step)
                member.trying.measures.note(step, per_boundary, {"loss": measured, "accuracy": -measured})
                member.arrive(step)
                self.seen[worker.rank][step] = values(worker)
                if at is not None and step in at:
                    at[step](worker)
            if drain:
                member.pause("drain")

        self.job.on_all(loop)

    def wait_for_commit(self, place: int) -> None:
        eventually(lambda: self.tickets[place].stage in (Stage.COMMITTED, Stage.APPLIED, Stage.VERIFIED))

    def propose(self, rank: int, update: Update, **options: Any) -> Callable[[Worker], None]:
        """On this worker; nobody goes on before it is committed, so that it is where it is in every run."""

        def act(worker: Worker) -> None:
            if worker.rank == rank:
                ticket = worker.member.propose(update, **options)
                self.tickets.append(ticket)
                eventually(lambda: ticket.stage is not Stage.PROPOSED or ticket.step is not None)
                if ticket.stage is Stage.STAGED:
                    eventually(lambda: ticket.stage is not Stage.STAGED)

        return act


def values(worker: Worker) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in worker.state.values.items()}


def last_outcome(job: Job) -> TrialOutcome:
    return next(reversed(job.journal.outcomes().values()))


def outcome_of(ticket: Ticket) -> TrialOutcome:
    outcome = ticket.result(DEADLINE_SECS).trial
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("size", [1, 3])
def test_a_trial_that_makes_it_worse_ends_with_the_bits_of_before_on_every_replica(size: int) -> None:
    with Job(size) as job:
        run = Run(job)
        run.train(20, {4: run.propose(size - 1, bias(1.0), trial=TRIAL)})
        receipt = run.tickets[0].result(DEADLINE_SECS)
        assert receipt.trial is not None
        assert receipt.trial == last_outcome(job)
        assert (receipt.trial.outcome, receipt.trial.before, receipt.trial.during) == ("reverted", 1.0, 2.0)
        began, ended = receipt.step, receipt.trial.step
        assert ended == began + TRIAL.steps
        for seen in run.seen:
            applied = np.frombuffer(seen[began]["dense/bias"], np.float32)
            np.testing.assert_array_equal(applied, np.ones(3, np.float32))
            # At that boundary all but the update was there already: what is gone is the update alone.
            assert seen[ended] == {**seen[began], "dense/bias": np.zeros(3, np.float32).tobytes()}
            assert seen[ended + 1] != seen[ended]
        assert job.values() == job.values()[:1] * size


def test_a_trial_that_helps_is_kept_and_training_was_never_disturbed() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(20, {4: run.propose(0, bias(-0.5), trial=TRIAL)})
        receipt = run.tickets[0].result(DEADLINE_SECS)
        assert receipt.trial is not None
        assert (receipt.trial.outcome, receipt.trial.before, receipt.trial.during) == ("kept", 1.0, 0.5)
    with Job(2) as plain:
        without = Run(plain)
        without.train(20, {4: without.propose(0, bias(-0.5), at_step=receipt.step)})
        assert plain.values() == job.values()


@pytest.mark.parametrize(
    ("trial", "amount", "outcome"),
    [
        (Trial(5, max_increase=0.5), 0.5, "kept"),
        (Trial(5, max_increase=0.49), 0.5, "reverted"),
        (Trial(5, max_increase=-0.5), -0.25, "reverted"),
        (Trial(5, "accuracy", 1.0, "max"), 1.0, "kept"),
        (Trial(5, "accuracy", 0.9, "max"), 1.0, "reverted"),
        (Trial(1, max_increase=0.0), 0.0, "kept"),
    ],
)
def test_how_much_worse_it_may_get_is_the_authors_choice(trial: Trial, amount: float, outcome: str) -> None:
    with Job(1) as job:
        run = Run(job)
        run.train(15, {4: run.propose(0, bias(amount), trial=trial)})
        assert outcome_of(run.tickets[0]).outcome == outcome


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_one_value_that_is_no_finite_number_on_one_worker_ends_with_the_state_of_before(wrong: float) -> None:
    with Job(3) as job:
        run = Run(job, lambda worker, step: wrong if step == 8 and worker.rank == 1 else 1.0)
        run.train(15, {4: run.propose(2, bias(1.0), trial=TRIAL)})
        outcome = outcome_of(run.tickets[0])
        assert outcome.outcome == "reverted"
        assert outcome.during is None
        assert "finite" in outcome.reason
        assert {tuple(worker.state.values["dense/bias"]) for worker in job.workers} == {(0.0, 0.0, 0.0)}


def test_the_mean_over_the_workers_decides_for_all() -> None:
    with Job(2) as job:
        run = Run(job, lambda worker, step: 1.0 if step <= 5 or worker.rank == 0 else 1.1)
        run.train(15, {4: run.propose(0, bias(1.0), trial=Trial(5, max_increase=0.05))})
        outcome = outcome_of(run.tickets[0])
        assert outcome.outcome == "kept"
        assert outcome.during == pytest.approx(1.05)


def test_what_is_proposed_in_a_trial_waits_for_its_end_in_its_order() -> None:
    with Job(3, durable=True) as job:
        run = Run(job)

        def others(worker: Worker) -> None:
            if worker.rank == 2:
                run.tickets += [worker.member.propose(bias(float(n), id=f"other-{n}")) for n in (2, 3)]
                run.tickets.append(worker.member.propose(bias(1.0, id="second-trial"), trial=TRIAL))
                run.tickets.append(worker.member.propose(bias(5.0, id="last")))
                run.tickets.append(
                    worker.member.propose_function("f", lambda v: {"bias": v["bias"] * 2}, 2, None)
                )
                eventually(lambda: all(ticket.step is not None for ticket in run.tickets))

        first_trial = run.propose(1, bias(1.0, id="first-trial"), trial=TRIAL)
        run.train(60, {4: first_trial, 7: others, 14: lambda _: run.wait_for_commit(3)})
        first, *two, second, last, function = [ticket.result(DEADLINE_SECS) for ticket in run.tickets]
        assert first.trial is not None
        assert second.trial is not None
        assert two[0].step >= first.trial.step
        assert second.step >= two[1].step
        assert min(last.step, function.step) >= second.trial.step
        order = ["first-trial", "other-2", "other-3", "second-trial", "last", "f"]
        assert [record.id for record in job.journal.records()] == order
        assert [id_ for _, id_ in job.workers[1].applied] == order
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.full(3, 20, np.float32))
        assert job.values() == job.values()[:1] * 3


def test_what_was_meant_for_a_step_in_the_middle_of_a_trial_is_applied_at_its_end() -> None:
    def play(journal: MemoryJournal) -> tuple[list[Any], list[Any]]:
        with Job(2, journal) as job:
            run = Run(job)
            known = bool(journal.records())
            at: At = {
                2: run.propose(0, bias(3.0, id="scheduled"), at_step=8),
                4: run.propose(1, bias(1.0, id="trial"), trial=TRIAL, at_step=6),
            }
            run.train(20, {} if known else at)
            return job.values(), job.workers[1].applied

    journal = MemoryJournal()
    once = play(journal)
    assert once[1] == [(6, "trial"), (11, "scheduled")]
    assert play(journal) == once


def test_two_trials_for_given_steps_that_overlap_come_one_after_the_other() -> None:
    with Job(2) as job:
        run = Run(job)
        first = run.propose(0, bias(1.0, id="one"), trial=TRIAL, at_step=6)
        second = run.propose(0, bias(-0.5, id="two"), trial=TRIAL, at_step=8)
        run.train(30, {2: lambda worker: (first(worker), second(worker))})
        outcomes = [outcome_of(ticket) for ticket in run.tickets]
        assert [(one.outcome, one.step) for one in outcomes] == [("reverted", 11), ("kept", 16)]


def test_training_that_ends_first_decides_with_what_was_measured() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(
            8, {3: run.propose(1, bias(1.0), trial=Trial(100)), 5: run.propose(0, bias(2.0, id="behind"))}
        )
        outcome = outcome_of(run.tickets[0])
        assert (outcome.outcome, outcome.step, outcome.during) == ("reverted", 8, 2.0)
        assert run.tickets[1].result(DEADLINE_SECS).step == 8
        np.testing.assert_array_equal(job.workers[1].state.values["dense/bias"], np.full(3, 2, np.float32))


def test_training_that_ends_before_anything_was_measured_goes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "replicast")
    with Job(2) as job:
        run = Run(job)
        run.train(5, {5: run.propose(1, bias(-0.5), trial=TRIAL)})
        (said,) = caplog.messages
        assert said.endswith("as it was before the update; the training has ended")
        outcome = outcome_of(run.tickets[0])
        assert (outcome.outcome, outcome.during) == ("reverted", None)
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.zeros(3, np.float32))


def test_two_trials_that_wait_at_the_end_of_training_are_both_decided() -> None:
    with Job(2) as job:
        run = Run(job)
        act = run.propose(1, bias(1.0), trial=TRIAL)
        run.train(5, {4: act, 5: run.propose(0, bias(2.0, id="second"), trial=TRIAL)})
        assert [outcome_of(ticket).step for ticket in run.tickets] == [5, 5]


def test_a_trial_for_a_step_that_training_does_not_reach_holds_nobody_up() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(6, {2: run.propose(0, bias(1.0), trial=TRIAL, at_step=50), 4: run.propose(1, bias(2.0))})
        assert not run.tickets[0].done()
        assert run.tickets[1].result(DEADLINE_SECS).step <= 6
        run.train(60)
        assert outcome_of(run.tickets[0]).outcome == "reverted"


def test_boundaries_of_several_steps_end_a_trial_at_the_first_one_that_is_far_enough() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(40, {8: run.propose(0, bias(1.0), trial=Trial(6), at_step=9)}, per_boundary=4)
        receipt = run.tickets[0].result(DEADLINE_SECS)
        assert receipt.trial is not None
        assert (receipt.step, receipt.trial.step, receipt.trial.outcome) == (12, 20, "reverted")


def test_a_function_can_be_on_trial() -> None:
    with Job(2) as job:
        run = Run(job)

        def propose(worker: Worker) -> None:
            function = worker.member.propose_function
            run.tickets.append(function("f", lambda v: {"bias": v["bias"] + 1}, 1, None, TRIAL))
            run.tickets.append(function("g", lambda v: {"bias": v["bias"] + 4}, 1, None))

        run.train(20, {4: propose})
        for ticket in run.tickets:
            ticket.result(DEADLINE_SECS)
        assert last_outcome(job).outcome == "reverted"
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.full(3, 4, np.float32))


@pytest.mark.parametrize(
    ("trial", "steps", "said"),
    [
        (Trial(5, "mae"), 4, "one of loss, accuracy"),
        (Trial(5), 0, "nothing was measured yet"),
    ],
)
def test_a_trial_that_cannot_be_judged_is_refused(trial: Trial, steps: int, said: str) -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(steps)
        ticket = job.workers[1].member.propose(bias(1.0), trial=trial)
        eventually(ticket.done)
        run.train(5)
        with pytest.raises(UpdateRefused, match=said):
            ticket.result(DEADLINE_SECS)
        assert not job.journal.records()


def test_a_metric_that_is_not_finite_before_the_update_is_refused() -> None:
    with Job(2) as job:
        run = Run(job, lambda worker, step: math.nan)
        run.train(4)
        ticket = job.workers[1].member.propose(bias(1.0), trial=TRIAL)
        eventually(ticket.done)
        run.train(5)
        with pytest.raises(UpdateRefused, match="no finite value before"):
            ticket.result(DEADLINE_SECS)


def test_a_training_thread_does_not_wait_for_a_trial_that_needs_its_steps() -> None:
    with Job(2) as job:
        run = Run(job)
        told: list[str] = []

        def ask(worker: Worker) -> None:
            if worker.rank == 1:
                for ticket in (run.tickets[0], worker.member.propose(bias(2.0))):
                    with pytest.raises(UpdatePending) as pending:
                        ticket.result()
                    told.append(str(pending.value))

        run.train(20, {4: run.propose(1, bias(1.0), trial=TRIAL), 7: ask})
        assert "its trial of 5 steps is not over" in told[0]
        assert len(told) == 2
        assert len(job.workers[0].member.history) == 2


@pytest.mark.parametrize("on_trial", [False, True])
def test_a_training_thread_does_not_wait_for_what_stands_behind_a_function(on_trial: bool) -> None:
    with Job(2) as job:
        run = Run(job)
        told: list[str] = []

        def ask(worker: Worker) -> None:
            if worker.rank == 1:
                function = worker.member.propose_function("f", lambda v: {"bias": v["bias"] + 1}, 1, 6)
                eventually(lambda: function.step is not None)
                run.tickets.append(worker.member.propose(bias(1.0), trial=TRIAL if on_trial else None))
                run.tickets.append(worker.member.propose(bias(2.0)))
                with pytest.raises(UpdatePending) as pending:
                    run.tickets[-1].result()
                told.append(str(pending.value))

        run.train(20, {5: ask}, per_boundary=1)
        assert len(told) == 1
        assert all(ticket.result(DEADLINE_SECS) for ticket in run.tickets)


def test_a_checkpoint_does_not_wait_for_what_a_trial_holds_back() -> None:
    with Job(2) as job:
        run = Run(job)

        def propose(worker: Worker) -> None:
            if worker.rank == 1:
                run.tickets.append(worker.member.propose(bias(2.0, id="behind")))
            eventually(lambda: worker.member.outcomes.are_decided(["behind"]))

        def look(worker: Worker) -> None:
            if worker.rank == 1:
                waits_for.append(run.tickets[1].waits_for)

        waits_for: list[str] = []
        trial = run.propose(1, bias(1.0), trial=TRIAL, at_step=6)
        run.train(20, {4: trial, 7: propose, 8: look})
        assert run.tickets[1].result(DEADLINE_SECS).step >= outcome_of(run.tickets[0]).step
        assert waits_for == ["the trial of update 1, until step 11"]
        assert run.tickets[1].waits_for == ""


def test_a_trial_that_would_begin_where_a_function_is_computed_is_refused() -> None:
    with Job(2) as job:
        run = Run(job)

        def propose(worker: Worker) -> None:
            if worker.rank == 0:
                function = worker.member.propose_function("f", lambda v: {"bias": v["bias"] + 1}, 0, 9)
                eventually(lambda: function.step is not None)
                run.tickets.append(worker.member.propose(bias(1.0), at_step=9, trial=TRIAL))
                eventually(run.tickets[0].done)

        run.train(20, {4: propose})
        with pytest.raises(UpdateRefused, match="A function is computed at step 9"):
            run.tickets[0].result()
        assert [id_ for _, id_ in job.workers[1].applied] == ["f"]


def test_a_function_on_trial_that_waited_for_another_trial_is_decided_at_the_end_of_training() -> None:
    with Job(2) as job:
        run = Run(job)

        def propose(worker: Worker) -> None:
            if worker.rank == 1:
                function = worker.member.propose_function
                run.tickets.append(function("f", lambda v: {"bias": v["bias"] + 1}, 1, None, TRIAL))
                run.tickets.append(function("g", lambda v: {"bias": v["bias"] + 1}, 1, None))

        run.train(8, {4: run.propose(1, bias(1.0), trial=Trial(100)), 7: propose})
        receipts = [ticket.result(DEADLINE_SECS) for ticket in run.tickets]
        assert [receipt.step for receipt in receipts][1:] == [8, 8]
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.ones(3, np.float32))


def test_all_workers_together_are_told_that_a_trial_runs() -> None:
    with Job(2) as job:
        run = Run(job)

        def sync(worker: Worker) -> None:
            with pytest.raises(UpdateRefused, match="A trial runs until step"):
                worker.member.pause("compare\n0\ndense/bias")

        run.train(20, {4: run.propose(1, bias(1.0), trial=TRIAL), 7: sync})
        assert outcome_of(run.tickets[0]).outcome == "reverted"


def test_replicas_that_are_not_equal_after_a_trial_are_reported() -> None:
    with Job(2) as job:
        run = Run(job)

        def assign(worker: Worker) -> None:
            if worker.rank == 1:
                worker.state.values["table/embeddings"] += 1

        run.train(20, {4: run.propose(0, bias(-0.5), trial=TRIAL), 7: assign})
        with pytest.raises(
            ReplicasDiverged, match="at the end of its trial the replicas' states are not equal"
        ):
            run.tickets[0].result(DEADLINE_SECS)


def test_what_a_trial_that_was_taken_back_has_measured_counts_for_no_other() -> None:
    with Job(1) as job:
        run = Run(job)
        first = run.propose(0, bias(1.0), trial=TRIAL)
        second = run.propose(0, bias(0.5, id="second"), trial=Trial(5, max_increase=0.6))
        run.train(30, {4: first, 7: second, 11: lambda _: run.wait_for_commit(1)})
        outcomes = [outcome_of(ticket) for ticket in run.tickets]
        assert [(one.outcome, one.before) for one in outcomes] == [("reverted", 1.0), ("kept", 1.0)]


# With audits.


def flip(worker: Worker) -> None:
    if worker.rank == 1:
        worker.state.values["table/embeddings"][2, 1] += 1


@pytest.mark.parametrize("way", ["pause", "wish"])
@pytest.mark.parametrize("amount", [1.0, -0.5], ids=["reverted", "kept"])
def test_an_audit_heals_in_the_middle_of_a_trial_and_again_at_the_same_step_after_a_restart(
    way: str, amount: float
) -> None:
    def audit(worker: Worker) -> None:
        if way == "pause":
            worker.member.pause("audit\nheal")
        elif worker.rank == 0:
            worker.member.wish("audit")
            eventually(lambda: any(stop.computes for stop in worker.member.gate.pending()))

    journal = MemoryJournal()
    with Job(3, journal) as job:
        job.workers[0].member.examiner.policy = "heal"
        run = Run(job)
        trial = run.propose(2, bias(amount, id="t"), trial=TRIAL, at_step=6)
        scheduled = run.propose(2, bias(3.0, id="scheduled"), at_step=7)
        run.train(20, {4: lambda worker: (scheduled(worker), trial(worker)), 8: flip, 9: audit})
        assert outcome_of(run.tickets[1]).outcome == ("reverted" if amount > 0 else "kept")
        applied = job.workers[1].applied
        assert [id_ for _, id_ in applied] == ["t", "heal-3-from-worker-0", "scheduled"]
        assert 6 < applied[1][0] < 11 == applied[2][0]
        values, outcomes = job.values(), journal.outcomes()
        assert values == values[:1] * 3
        eventually(lambda: len(journal.receipts()) == 3)
    with Job(3, journal) as job:
        run = Run(job)
        run.train(20)
        assert job.workers[1].applied == applied
        assert job.values() == values
        assert journal.outcomes() == outcomes


def test_an_audit_at_the_very_end_of_a_trial_does_not_wait_for_it() -> None:
    with Job(2) as job:
        job.workers[0].member.examiner.policy = "heal"
        run = Run(job)

        def wish(worker: Worker) -> None:
            if worker.rank == 0:
                worker.member.wish("audit")
                eventually(lambda: any(stop.computes for stop in worker.member.gate.pending()))

        trial = run.propose(0, bias(1.0, id="t"), trial=TRIAL, at_step=6)
        run.train(20, {4: trial, 10: wish, 12: lambda worker: worker.member.pause("audit\nheal")})
        assert outcome_of(run.tickets[0]).step == 11
        assert all(report.equal for report in job.workers[0].member.examiner.reports)
        assert job.workers[0].member.examiner.reports


# A restart.


@pytest.mark.parametrize("amount", [1.0, -0.5], ids=["reverted", "kept"])
@pytest.mark.parametrize("from_start", [True, False], ids=["from the start", "from a checkpoint"])
@pytest.mark.parametrize("died_at", [5, 8, 11, 13])
def test_a_job_that_died_ends_with_the_outcome_and_the_bits_of_one_that_did_not(
    died_at: int, amount: float, from_start: bool
) -> None:
    def act_of(run: Run) -> At:
        return {4: run.propose(1, bias(amount, id="t"), trial=TRIAL, at_step=6)}

    with Job(2) as job:
        undisturbed = Run(job)
        undisturbed.train(20, act_of(undisturbed))
        wanted, outcome = job.values(), outcome_of(undisturbed.tickets[0])
        checkpoint = undisturbed.seen[0][5]
    journal = MemoryJournal()
    with Job(2, journal) as job:
        run = Run(job)
        run.train(died_at, act_of(run), drain=False)
    assert bool(journal.outcomes()) == (died_at >= 11)
    with Job(2, journal) as job:
        run = Run(job)
        if not from_start:
            for worker in job.workers:
                for name, value in worker.state.values.items():
                    worker.state.values[name] = (
                        np.frombuffer(checkpoint[name], value.dtype).reshape(value.shape).copy()
                    )
                worker.member.gate.start_from(5)
        run.train(20 if from_start else 15)
        assert job.values() == wanted
        again = last_outcome(job)
        assert (again.outcome, again.step) == (outcome.outcome, outcome.step)
        eventually(lambda: 1 in job.journal.receipts())
        assert job.journal.receipts()[1].trial == again


@pytest.mark.parametrize("died_at", [12, 14])
@pytest.mark.parametrize("lives_in", [2, 3])
def test_what_was_measured_before_a_checkpoint_counts_after_a_restart(died_at: int, lives_in: int) -> None:
    """The checkpoint is older than the trial's commit; the job dies before it begins, or in its middle."""

    def loss(worker: Worker, step: int) -> float:
        return 4.0 / step + worker.rank * 0.5

    def act_of(run: Run) -> At:
        return {11: run.propose(1, bias(1.0, id="t"), trial=Trial(8, max_increase=0.2), at_step=13)}

    with Job(2) as job:
        run = Run(job, loss)
        run.train(25, act_of(run))
        wanted = outcome_of(run.tickets[0])
        assert wanted.before == pytest.approx(np.mean([4.0 / step + 0.25 for step in range(6, 14)]))
    journal = MemoryJournal()
    with Job(2, journal) as job:
        run, saved = Run(job, loss), [""] * 2

        def save(worker: Worker) -> None:
            saved[worker.rank] = json.dumps(worker.member.trying.measures.history())

        run.train(died_at, {10: save, **act_of(run)}, drain=False)
        history = json.dumps(mean_history([json.loads(each) for each in saved]))
    with Job(lives_in, journal) as job:
        for worker in job.workers:
            worker.member.gate.start_from(10)
            worker.member.trying.measures.recall(json.loads(history))
        # With another number of workers, they measure alike what two had measured in the mean.
        run = Run(job, loss if lives_in == 2 else lambda worker, step: 4.0 / step + 0.25)
        run.train(15)
        again = last_outcome(job)
        assert (again.outcome, again.step) == (wanted.outcome, wanted.step)
        assert (again.before, again.during) == pytest.approx((wanted.before, wanted.during))


def test_a_decided_trial_is_not_decided_again_whatever_is_measured() -> None:
    journal = MemoryJournal()
    with Job(2, journal) as job:
        run = Run(job)
        run.train(8, {4: run.propose(1, bias(1.0, id="t"), trial=Trial(100), at_step=6)})
        wanted = outcome_of(run.tickets[0])
        assert (wanted.step, wanted.outcome) == (8, "reverted")
    with Job(2, journal) as job:
        run = Run(job, lambda worker, step: 1.0 / step)
        run.train(20)
        assert journal.outcomes() == {1: wanted}
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.zeros(3, np.float32))


# The parts.


def running_means(values: list[float], epoch: int, per_boundary: int) -> list[tuple[int, int, float]]:
    """As Keras gives them: step, batches so far in the epoch, their mean."""
    found = []
    for step in range(per_boundary, len(values) + 1, per_boundary):
        batches = (step - 1) % epoch + 1
        found.append((step, batches, sum(values[step - batches : step]) / batches))
    return found


@pytest.mark.parametrize("per_boundary", [1, 2, 5])
def test_what_each_step_measured_is_found_in_running_means(per_boundary: int) -> None:
    values = [float(value) for value in np.random.default_rng(1).normal(2.0, 1.0, 60)]
    measures = Measures()
    for step, batches, mean in running_means(values, 20, per_boundary):
        if step == 40 + per_boundary:
            assert measures.before("loss", 10) == pytest.approx(np.mean(values[30:40]))
            assert measures.before("loss", 30) == pytest.approx(np.mean(values[10:40]))
            assert measures.before("loss", 1000) == pytest.approx(np.mean(values[:40]))
            measures.begin(40)
        measures.batches = batches
        measures.note(step, per_boundary, {"loss": mean})
    during, steps = measures.during("loss")
    assert (during, steps) == (pytest.approx(np.mean(values[40:])), 20)
    measures.end(reverted=True)
    assert measures.before("loss", 10) == pytest.approx(np.mean(values[30:40]))
    measures.batches = None
    measures.note(61, 1, {"loss": 7.0})
    assert measures.before("loss", 1) == 7.0


def test_what_an_own_loop_gives_is_taken_as_it_is_also_from_one_dict() -> None:
    measures, logs = Measures(), {}
    for step in range(1, 4 * MOST):
        logs["loss"] = float(step)
        measures.note(step, 1, logs)
    last = 4 * MOST - 1
    assert measures.before("loss", 3) == last - 1
    assert measures.before("loss", 10**6) == last - (MOST - 1) / 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_history_keeps_what_is_no_finite_number_and_forgets_what_was_taken_back(wrong: float) -> None:
    measures = Measures()
    for step, value in enumerate([1.0, wrong, 3.0, 50.0], 1):
        if step == 4:
            measures.begin(3)
        measures.note(step, 1, {"loss": value, "name": "text"})
    measures.end(reverted=True)
    history = measures.history()
    assert [step for step, _, _ in history] == [1, 2, 3]
    later = Measures()
    later.note(9, 1, {"loss": 7.0})
    later.recall(json.loads(json.dumps(mean_history([history, history]))))
    assert later.before("loss", 1) == 3.0
    with pytest.raises(UpdateRefused, match="no finite value before"):
        later.before("loss", 2)


def test_a_worker_that_has_measured_nothing_is_no_part_of_the_mean() -> None:
    histories = [[(1, 1, {"loss": 2.0}), (2, 1, {"loss": 4.0})], [(2, 1, {"loss": 6.0, "other": 1.0})], []]
    assert mean_history(histories) == [(1, 1, {"loss": 2.0}), (2, 1, {"loss": 5.0})]


@pytest.mark.parametrize(
    ("trial", "during", "measured", "said"),
    [
        (Trial(5, max_increase=0.5), 0.25, 5, "and 0.25 in the trial; the limit was at most 0.3"),
        (
            Trial(5, max_increase=0.5),
            0.5,
            3,
            "and 0.5 in the trial (3 of its 5 steps); the limit was at most 0.3",
        ),
        (Trial(5, "loss", 0.5, "max"), 0.5, 8, "and 0.5 in the trial; the limit was at least 0.1"),
    ],
)
def test_the_reason_says_what_decided(trial: Trial, during: float, measured: int, said: str) -> None:
    outcome = judged(trial, 1, 9, 0.2, during, measured)
    assert outcome.reason == f"loss was 0.2 before the update {said}"


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 update of an earlier start is"), (2, "2 updates of an earlier")]
)
def test_a_restart_says_how_many_updates_come_again(
    count: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = MemoryJournal()
    with Job(1, journal) as job:
        run = Run(job)
        run.train(9, {step: run.propose(0, bias(1.0, id=f"u{step}")) for step in range(3, 3 + count)})
    caplog.set_level(logging.WARNING, "replicast")
    with Job(1, journal):
        assert any(message.startswith(said) for message in caplog.messages)


def test_a_snapshot_is_restored_to_the_last_bit_and_shares_no_memory() -> None:
    odd = np.array([np.nan, -0.0, np.inf, 1e-45, -1.5], np.float32)
    odd.view(np.uint32)[0] |= 7  # a NaN with a payload
    state = MemoryState(
        {
            "weight": odd,
            "half": odd.astype(ml_dtypes.bfloat16),
            "seed": np.array([1, 2], np.uint32),
            "on": np.array(True),
        }
    )
    before = state.digests(state.values)
    copy: dict[str, Any] = {}
    state.snapshot(copy)
    for name, value in state.values.items():
        state.values[name] = np.zeros_like(value)
    state.restore_snapshot(copy)
    assert state.digests(state.values) == before
    assert not any(np.shares_memory(state.values[name], copy[name]) for name in copy)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": True},
        {"steps": 2.0},
        {"steps": 1, "metric": ""},
        {"steps": 1, "max_increase": math.nan},
        {"steps": 1, "max_increase": "5 %"},
        {"steps": 1, "mode": "up"},
    ],
)
def test_a_trial_that_makes_no_sense_is_a_mistake(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Received: "):
        Trial(**options)


def test_the_journal_keeps_how_a_trial_ended(tmp_path: Any) -> None:
    outcome = TrialOutcome(42, "reverted", 1250, "loss", 0.5, None, "loss was not finite in the trial")
    Journal(tmp_path, Fence(tmp_path, attempt=0)).write_outcome(outcome)
    assert Journal(tmp_path).outcomes() == {42: outcome}
    (path,) = tmp_path.glob("groups/000001/000001.trial.json")
    path.write_bytes(sealed(unsealed(path.read_bytes()) | {"outcome": "maybe"}))
    with pytest.raises(FileDamaged, match="maybe"):
        Journal(tmp_path).outcomes()
