"""Trials on real threads: measurements, decisions, outcomes for authors, and the reverted bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.core.entries import Stage
from replicast.core.messages import Refusal
from replicast.errors import ReplicasDiverged, UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.replicas.replica import MOST_BOUNDARIES as MOST
from replicast.replicas.replica import RecentMetrics
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, committed_updates
from replicast.update.trial import Trial, TrialOutcome, judged
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import bias, bias_of, flip, loss_of_bias, refusal, scheduled

TRIAL = Trial(steps=5, max_increase=0.1)
At = dict[int, Callable[[Worker], Any]]


class Run:
    """A training that measures, and what the state of each worker was after each boundary."""

    def __init__(self, job: Job, one_step: Callable[[Worker, int], Mapping[str, Any]] = loss_of_bias) -> None:
        self.job = job
        self.one_step = one_step
        self.seen: list[dict[int, dict[str, bytes]]] = [{} for _ in job.workers]
        self.tickets: list[Ticket] = []

    def train(self, steps: int, at: At | None = None, **how: Any) -> None:
        def after_each(worker: Worker, step: int) -> None:
            values = worker.state.values.items()
            self.seen[worker.rank][step] = {name: value.tobytes() for name, value in values}
            if at is not None and step in at:
                at[step](worker)

        self.job.train(steps, after_each, one_step=self.one_step, **how)

    def propose(self, rank: int, update: Update, at_step: int, trial: Trial | None = TRIAL) -> Any:
        """On this worker; nobody goes on before its step is agreed on."""

        def act(worker: Worker) -> None:
            if worker.rank == rank:
                self.tickets.append(scheduled(worker.propose(update, at_step, trial)))

        return act


def outcome_of(ticket: Ticket) -> TrialOutcome:
    outcome = ticket.result(DEADLINE_SECS).trial
    assert outcome is not None
    return outcome


def losses(of: Callable[[Worker, int], float]) -> Callable[[Worker, int], Mapping[str, float]]:
    return lambda worker, step: {"loss": of(worker, step)}


@pytest.mark.parametrize("size", [1, 2])
def test_an_author_may_use_the_types_of_numpy(size: int, tmp_path: Path) -> None:
    text, trial = np.str_, Trial(3, np.str_("loss"), np.float64(0.5))
    update = bias(0.0, id=text("fix"), note=text("why"), author=text("me"))
    with Job(size, FileJournal(tmp_path, Fence(tmp_path, 0))) as job:
        run = Run(job)
        run.train(12, {2: run.propose(size - 1, update, 4, trial)})
        assert outcome_of(run.tickets[0]).outcome == "kept"
    (view,) = committed_updates(tmp_path)
    assert (view.id, view.note, view.author, view.trial) == ("fix", "why", "me", trial)


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
        run.train(15, {4: run.propose(0, bias(amount), 6, trial)})
        assert outcome_of(run.tickets[0]).outcome == outcome


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_one_value_that_is_no_finite_number_on_one_worker_ends_with_the_state_of_before(wrong: float) -> None:
    with Job(3) as job:
        run = Run(job, losses(lambda worker, step: wrong if step == 8 and worker.rank == 1 else 1.0))
        run.train(15, {4: run.propose(2, bias(1.0), at_step=6)})
        outcome = outcome_of(run.tickets[0])
        assert (outcome.outcome, outcome.during) == ("reverted", None)
        assert "finite" in outcome.reason
        assert [bias_of(worker) for worker in job.workers] == [0.0] * 3


def test_the_mean_over_the_workers_decides_for_all() -> None:
    with Job(2) as job:
        run = Run(job, losses(lambda worker, step: 1.0 if step <= 6 or worker.rank == 0 else 1.1))
        run.train(15, {4: run.propose(0, bias(1.0), 6, Trial(5, max_increase=0.05))})
        outcome = outcome_of(run.tickets[0])
        assert outcome.outcome == "kept"
        assert outcome.during == pytest.approx(1.05)


def test_what_is_proposed_in_a_trial_waits_for_its_end_in_its_order_and_says_so() -> None:
    with Job(3) as job:
        run = Run(job)
        waits_for: list[str] = []

        def others(worker: Worker) -> None:
            if worker.rank == 2:
                run.tickets += [worker.propose(bias(float(n), id=f"other-{n}")) for n in (2, 3)]
                eventually(lambda: all(ticket.waits_for for ticket in run.tickets[1:]))
                waits_for.extend(ticket.waits_for for ticket in run.tickets[1:])

        run.train(30, {4: run.propose(1, bias(1.0, id="first"), at_step=6), 7: others})
        assert waits_for == ["the trial of first, until step 11"] * 2
        assert [ticket.waits_for for ticket in run.tickets] == ["", "", ""]
        assert [id_ for _, id_ in job.workers[1].applied] == ["first", "other-2", "other-3"]
        assert min(ticket.result(DEADLINE_SECS).step for ticket in run.tickets[1:]) >= 11
        assert [bias_of(worker) for worker in job.workers] == [5.0] * 3


def test_training_that_ends_first_decides_with_what_was_measured() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(8, {3: run.propose(1, bias(1.0), 5, Trial(100))})
        outcome = outcome_of(run.tickets[0])
        assert (outcome.outcome, outcome.step, outcome.during) == ("reverted", 8, 2.0)
        assert "(3 of its 100 steps)" in outcome.reason


@pytest.mark.parametrize(
    ("trial", "steps", "loss", "said"),
    [
        (Trial(5, "mae"), 4, 1.0, "one of loss"),
        (Trial(5), 0, 1.0, "nothing was measured yet"),
        (Trial(5), 4, math.nan, "no finite value before"),
    ],
)
def test_a_trial_that_cannot_be_judged_is_refused(trial: Trial, steps: int, loss: float, said: str) -> None:
    with Job(2) as job:
        run = Run(job, losses(lambda worker, step: loss))
        run.train(steps)
        ticket = job.workers[1].propose(bias(1.0), trial=trial)
        job.on_all(lambda worker: worker.session.rest("close"))
        error = refusal(ticket)
        assert said in str(error)
        assert error.remedy is not None or error.expected is not None
        assert not job.journal.history().committed
        eventually(lambda: not job.files())


def test_a_sync_and_a_save_in_a_trial_are_refused_on_all_workers_and_it_continues() -> None:
    with Job(2) as job:
        run = Run(job)
        told: list[Any] = []

        def ask(worker: Worker) -> None:
            told.extend([worker.session.rest("sync", 0), worker.session.rest("save")])

        run.train(20, {4: run.propose(1, bias(1.0, id="tried"), at_step=6), 8: ask})
        assert len(told) == 4
        for refused in told:
            assert isinstance(refused, Refusal)
            assert "The trial of tried" in refused.problem
        assert outcome_of(run.tickets[0]).outcome == "reverted"
        assert job.checkpoints == []


def test_a_planned_save_in_a_trial_is_made_when_it_is_over() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(20, {4: run.propose(1, bias(1.0), at_step=6), 8: lambda worker: worker.save_in_passing()})
        eventually(lambda: job.checkpoints)
        assert job.checkpoints[0].step >= 11
        eventually(lambda: "save" in [ended.kind for ended in job.ended])
        assert [ended.kind for ended in job.ended].count("save") == 1


def test_replicas_that_are_not_equal_after_a_trial_are_reported() -> None:
    with Job(2) as job:
        run = Run(job)

        def spoil(worker: Worker) -> None:
            if worker.rank == 1:
                flip(worker, "table/embeddings")

        run.train(20, {4: run.propose(0, bias(-0.5), at_step=6), 8: spoil})
        with pytest.raises(
            ReplicasDiverged, match="at the end of its trial the replicas' states are not equal"
        ):
            run.tickets[0].result(DEADLINE_SECS)


def test_a_trial_from_outside_is_told_to_who_pushed_it() -> None:
    with Job(2) as job:
        run = Run(job)
        run.train(4)
        ticket = job.push(bias(1.0), at_step=6, trial=TRIAL)
        eventually(lambda: [one["stage"] for one in job.workers[0].session.operations()] == ["scheduled"])
        run.train(16)
        eventually(lambda: ticket in job.outcomes)
        tell = job.outcomes[ticket]
        assert (tell.stage, tell.outcome.trial.outcome) == (Stage.REVERTED, "reverted")


def test_until_when_an_update_is_on_trial_is_known_while_it_is() -> None:
    with Job(2) as job:

        def until() -> list[int | None]:
            return [one["trial_until"] for one in job.workers[0].session.operations()]

        def one_step(worker: Worker, step: int) -> Mapping[str, Any]:
            if step == 8:
                assert until() == [None], "it is scheduled"
            if step == 11:
                eventually(lambda: until() == [13])
            return loss_of_bias(worker, step)

        run = Run(job, one_step)
        run.train(14, {6: run.propose(1, bias(0.01), at_step=8)})
        assert outcome_of(run.tickets[0]).step == 13
        assert until() == []


# Measurements of steps: derived from running means or used as they are, and kept for a checkpoint.


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
    measures = RecentMetrics()
    measures.means = {"loss": True}
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


def test_every_boundary_is_told_once_with_its_own_values_where_the_logs_have_means() -> None:
    values = [float(value) for value in np.random.default_rng(1).normal(2.0, 1.0, 600)]
    measures, told = RecentMetrics(), list[tuple[int, float, dict[str, float], list[str]]]()
    measures.means = {"loss": True, "auc": False}
    for step, batches, mean in running_means(values, 200, 1):
        measures.batches = batches
        measures.note(step, 1, {"loss": mean, "auc": mean})
        if step % 150 == 0:
            told += measures.take()
    measures.add(600, {"val_loss": 3.0})
    told += measures.take()
    assert [step for step, _, _, _ in told] == [*range(1, 601), 600]
    assert told[-1][2] == {"val_loss": 3.0}
    assert [one["loss"] for _, _, one, _ in told[:-1]] == pytest.approx(values)
    assert told[199][2]["auc"] == pytest.approx(np.mean(values[:200]))
    assert told[199][3] == ["auc"]
    measures.note(601, 1, {"auc": 0.5})
    assert [running for _, _, _, running in measures.take()] == [[]], "of a custom loop after this fit"


def test_a_short_batch_at_the_end_of_an_epoch_counts_by_its_rows() -> None:
    own, rows = [2.0, 4.0, 3.0, 1.0, 9.0], [8, 8, 8, 8, 2]
    measures = RecentMetrics()
    measures.means = {"loss": True}
    for epoch in range(2):
        for done in range(1, 6):
            measures.batches, measures.counts = done, {"loss": rows[:done]}
            mean = np.average(own[:done], weights=rows[:done])
            measures.note(5 * epoch + done, 1, {"loss": mean, "raw": own[done - 1]})
    told = list(measures.take())
    assert [values["loss"] for _, _, values, _ in told] == pytest.approx(2 * own)
    assert [values["raw"] for _, _, values, _ in told] == 2 * own
    assert measures.before("loss", 2) == pytest.approx(5.0)
    assert measures.before("raw", 2) == 5.0


def test_each_mean_is_over_its_own_count_and_without_one_it_is_the_value_of_the_step() -> None:
    own = [2.0, 4.0, 3.0, 1.0]
    weights = {"loss": [8, 8, 8, 2], "level": [1, 1, 1, 1], "late": [0, 4, 4, 0], "unused": [0, 0, 0, 0]}
    measures = RecentMetrics()
    measures.means = dict.fromkeys([*weights, "uncounted"], True)
    for done in range(1, 5):
        measures.batches, measures.counts = done, {name: of[:done] for name, of in weights.items()}
        logs = {name: np.dot(own[:done], of[:done]) / max(1, sum(of[:done])) for name, of in weights.items()}
        measures.note(done, 1, {**logs, "unused": own[done - 1], "uncounted": np.mean(own[:done])})
    told = [values for _, _, values, _ in measures.take()]
    for name in ("loss", "level", "unused", "uncounted"):
        assert [values[name] for values in told] == pytest.approx(own), name
    assert [values.get("late") for values in told] == [0.0, pytest.approx(4.0), pytest.approx(3.0), None]


def test_a_mean_that_is_reset_in_each_step_is_the_value_of_the_step() -> None:
    measures = RecentMetrics()
    measures.means = {"loss": True}
    for step, (value, count) in enumerate([(2.0, 8), (4.0, 8), (3.0, 2)], 1):
        measures.batches, measures.counts = step, {"loss": [count]}
        measures.note(step, 1, {"loss": value})
    assert [values["loss"] for _, _, values, _ in measures.take()] == [2.0, 4.0, 3.0]


def test_after_a_huge_loss_the_values_of_the_next_steps_are_unknown_and_not_rounding_errors() -> None:
    own = [0.5, 0.25, 1e17, 0.25, 0.5]
    measures = RecentMetrics()
    measures.means = {"loss": True}
    for done in range(1, 6):
        measures.batches = done
        measures.note(done, 1, {"loss": float(np.mean(np.array(own[:done], np.float32)))})
    told = [values.get("loss") for _, _, values, _ in measures.take()]
    assert told == [0.5, 0.25, pytest.approx(1e17), None, None]


def test_only_worker_0_keeps_what_it_has_not_written_yet() -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.session.replica.measures.note(1, 1, {"loss": 0.5})
        told = [[step for step, *_ in worker.session.replica.measures.take()] for worker in job.workers]
    assert told == [[1], []]


def test_a_trial_on_what_is_no_mean_over_the_epoch_is_refused_in_fit_and_taken_in_a_custom_loop() -> None:
    measures = RecentMetrics()
    measures.means = {"loss": True, "auc": False, "accuracy": True}
    measures.batches = 1
    measures.note(1, 1, {"loss": 1.0, "auc": 0.5, "accuracy": 0.25})
    with pytest.raises(UpdateRefused, match="must be a mean") as refused:
        measures.before("auc", 1)
    assert (refused.value.expected, refused.value.received) == ("one of loss, accuracy", "'auc'")
    measures.note(2, 1, {"auc": 0.5})
    assert measures.before("auc", 1) == 0.5


def test_what_a_custom_loop_gives_is_taken_as_it_is_also_from_one_dict_and_only_the_last_is_kept() -> None:
    measures, logs = RecentMetrics(), {}
    for step in range(1, 4 * MOST):
        logs["loss"] = float(step)
        measures.note(step, 1, logs)
    last = 4 * MOST - 1
    assert measures.before("loss", 3) == last - 1
    assert measures.before("loss", 10**6) == last - (MOST - 1) / 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_history_keeps_what_is_no_finite_number_and_omits_what_was_reverted(wrong: float) -> None:
    measures = RecentMetrics()
    for step, value in enumerate([1.0, wrong, 3.0, 50.0], 1):
        if step == 4:
            measures.begin(3)
        measures.note(step, 1, {"loss": value, "name": "text"})
    measures.end(reverted=True)
    history = measures.history()
    assert [step for step, _, _ in history] == [1, 2, 3]
    later = RecentMetrics()
    later.note(9, 1, {"loss": 7.0})
    later.recall(json.loads(json.dumps(history)))
    assert later.before("loss", 1) == 3.0
    with pytest.raises(UpdateRefused, match="no finite value before"):
        later.before("loss", 2)


@pytest.mark.parametrize(
    ("trial", "during", "measured", "said"),
    [
        (Trial(5, max_increase=0.5), 0.25, 5, ["0.25 in the trial;", "at most 0.3"]),
        (Trial(5, max_increase=0.5), 0.5, 3, ["0.5 in the trial (3 of its 5 steps);", "at most 0.3"]),
        (Trial(5, "loss", 0.5, "max"), 0.5, 8, ["0.5 in the trial;", "at least 0.1"]),
    ],
)
def test_the_reason_says_what_decided(trial: Trial, during: float, measured: int, said: list[str]) -> None:
    _, reason, _ = judged(trial, 0.2, during, measured)
    assert reason.startswith("loss was 0.2 before the update")
    assert all(part in reason for part in said)


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


def test_the_learning_rate_is_among_the_metrics_where_it_has_changed_and_no_trial_reads_it() -> None:
    measures = RecentMetrics()
    measures.means = {"loss": True, "rate": True}
    for step, rate in enumerate([0.1, None, 0.1, 0.05, None]):  # None: it was not looked at.
        measures.batches = step + 1
        measures.note(step, 1, {"loss": 1.0}, rate)
    assert [told.get("learning_rate") for _, _, told, _ in measures.take()] == [
        0.1, None, None, 0.05, None,
    ]  # fmt: skip
    assert measures.rate == 0.05
    with pytest.raises(UpdateRefused, match="not in the logs"):
        measures.before("learning_rate", 1)
