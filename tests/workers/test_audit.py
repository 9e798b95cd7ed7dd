"""Real workers whose replicas differ, by one bit or by an assignment: detected, located, healed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import replicast
from replicast.core.entries import Saved
from replicast.errors import FileDamaged
from replicast.replicas import job_audits as auditing
from replicast.replicas import job_audits as expectation
from replicast.replicas.job_audits import AuditPlan, Audits
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, committed_updates
from replicast.storage.run_files import append_audit, last_audits
from replicast.update.schema import Schema
from replicast.update.update import Update
from tests.pool import Pool
from tests.scripts.compare import heard
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.logs import cut, damage
from tests.workers.changing import flip
from tests.workers.recipes import CLASSES, FEATURES, arrays
from tests.workers.test_updates import WAIT_SECS, AtStep, Meeting, Until, adam, replicas_of

STORED = ("bfloat16", "float16", "int8", "int32", "uint32", "bool")
"""Variables that no step changes, one of each dtype."""
FLIPS = [
    ("dense/kernel", (3, 2), 0),
    ("dense/kernel", (0, 0), 31),  # -0.0, should it be 0.0
    ("optimizer/audited_dense_kernel_momentum", (1, 4), 22),
    ("normed/moving_mean", (5,), 7),
    ("seed_generator/seed_generator_state", (1,), 3),
    ("optimizer/learning_rate", (), 1),
    ("optimizer/iteration", (), 5),
    *((f"stored/{dtype}", (1, 2), 0) for dtype in STORED),
]


class Stored(keras.layers.Layer):
    """Passes its input on, and has variables of all dtypes."""

    def build(self, shape: Any) -> None:
        for dtype in STORED:
            self.add_weight(shape=(2, 3), dtype=dtype, name=dtype, initializer="ones", trainable=False)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs


def audited(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="relu", name="dense"),
            keras.layers.BatchNormalization(name="normed"),
            keras.layers.Dropout(0.2, seed=3, name="dropout"),
            Stored(name="stored"),
            keras.layers.Dense(CLASSES, name="out"),
        ]
        model = keras.Sequential(layers, name="audited")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(adam(), loss)
    return model


def fit(model: keras.Model, callbacks: list[Any], steps: int, epochs: int = 1) -> None:
    x, y = arrays(steps * 8)
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)


# One flipped bit, everywhere.


def flipped(strategy: Any) -> list[Any]:
    outcomes = []
    with replicas_of(audited(strategy)) as replicas:
        fit(replicas.model, [replicas.callback(audit_every=None)], 3)
        for place, (name, index, bit) in enumerate(FLIPS):
            bad = place % strategy.size
            before = replicas.digests()
            full = replicas.schema.resolve(name).name
            if strategy.rank == bad:
                flip(replicas.model, name, index, bit)
            wrong = replicas.digests()
            report = replicas.audit(on_divergence="heal")
            outcomes.append((full, index, bad, before, wrong, replicas.digests(), report))
        equal = replicas.audit()
        history = [(receipt.sequence, len(set(receipt.digests.values()))) for receipt in replicas.history]
    return [outcomes, equal, history]


@pytest.mark.parametrize("size", [2, 3])
def test_one_flipped_bit_is_found_located_and_healed(size: int, pool2: Pool, pool3: Pool) -> None:
    results = (pool2 if size == 2 else pool3).run(flipped)
    equal, history = results[0][1:]
    assert equal.equal
    assert equal.last_equal == equal.step
    assert history == [(number, 1) for number in range(1, len(FLIPS) + 1)]
    for place in range(len(FLIPS)):
        name, index, bad, before, _, after, report = results[0][0][place]
        assert all(outcomes[place][6] == report for outcomes, _, _ in results), "one report for all"
        assert all(outcomes[place][5] == after for outcomes, _, _ in results), "equal again"
        (difference,) = report.differences
        (minority,) = difference.minority
        assert difference.variable == name
        assert minority == (bad if size == 3 else 1)
        assert difference.rule == ("majority" if size == 3 else "coordinator")
        found = difference.differing[minority]
        assert (found.count, found.first_index) == (1, index)
        assert (report.outcome, report.healed) == ("healed", (place + 1,))
        worker_0 = results[0][0][place][4]
        assert after == (before if size == 3 else worker_0)


# The usual wrong answer, in the middle of `fit`, with nothing but the callback.


def assigned_in_the_middle(strategy: Any, run_dir: Path) -> Any:
    model = audited(strategy)

    def assign(step: int) -> None:
        if step == 3 and strategy.rank == strategy.size - 1:
            kernel = model.get_layer("out").kernel
            kernel.value.values[0].assign(kernel.value.values[0] * 0.0)

    def append_slowly(*given: Any) -> None:
        time.sleep(0.1)
        append_audit(*given)

    slow_disk = mock.patch.object(auditing, "append_audit", append_slowly)
    with heard() as said, slow_disk, replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        fit(model, [replicas.callback(), AtStep(assign)], 5, epochs=3)
        return replicas.digests(), replicas.audits, said


def test_an_assignment_on_one_worker_in_the_middle_of_fit_is_healed_with_the_callbacks_defaults(
    pool3: Pool, tmp_path: Path
) -> None:
    results = pool3.run(assigned_in_the_middle, tmp_path)
    assert results[0][0] == results[1][0] == results[2][0]
    (report,) = (report for report in results[1][1] if not report.equal)
    changed = {difference.variable for difference in report.differences}
    assert "audited/out/kernel" in changed
    assert all(difference.minority == (2,) for difference in report.differences)
    assert report.found_at == 5, "the end of the epoch"
    assert report.last_equal is None
    assert 5 <= report.step <= 15
    (record,) = committed_updates(tmp_path)
    assert (record.author, record.step) == ("audit", report.step)
    assert record.note.startswith("heal: ")
    assert record.note.endswith("as on worker 0 (majority)")
    assert any("audited/out/kernel: worker 2 differs from workers 0 and 1" in text for text in results[0][2])
    written = last_audits(tmp_path, 10)
    assert report in written
    assert written[-1].equal
    assert written[-1].step == 15
    assert tuple(written) == results[0][1], "fit returns when the reports of its audits are known"


class AssignsLast(keras.callbacks.Callback):
    """Changes one replica when the last epoch has been audited already: it comes after our callback."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._rank == 1 and epoch == self.params["epochs"] - 1:
            kernel = self.model.get_layer("out").kernel
            kernel.value.values[0].assign(kernel.value.values[0] * 0.0)


def assigned_at_the_end(strategy: Any, run_dir: Path) -> Any:
    model = audited(strategy)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        fit(model, [replicas.callback(), AssignsLast(strategy.rank)], 5, epochs=2)
        return replicas.digests(), [report.outcome for report in replicas.audits]


def test_an_assignment_at_the_end_of_the_last_epoch_is_healed_before_fit_returns(
    pool2: Pool, tmp_path: Path
) -> None:
    results = pool2.run(assigned_at_the_end, tmp_path)
    assert results[0][0] == results[1][0]
    assert results[0][1][-1] == "healed"


# What is due at a checkpoint, and whom a checkpoint helps.


def healed_between_checkpoints(strategy: Any, run_dir: Path) -> Any:
    model = audited(strategy)

    def assign(step: int) -> None:
        if step == 3 and strategy.rank == 1:
            flip(replicas.model, "out/kernel", (0, 0), 20)

    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        meeting = Meeting(strategy)

        def saved() -> bool:
            return any(path.name[:8] > "00000004" for path in run_dir.glob("checkpoints/*"))

        callbacks = [replicas.callback(save_every=4, keep=100), AtStep(assign), Until(meeting, saved)]
        fit(model, callbacks, 4, epochs=100)
        replicas.save().result(WAIT_SECS)
        if strategy.rank == 1:
            replicas.propose(Update().scale("stored/float16", 3.0).assign("stored/int8", [[1] * 3] * 2))
        replicas.sync(variables=["out/bias"])  # and whatever was proposed
        right = replicas.digests()
        if strategy.rank == 0:
            flip(replicas.model, "stored/float16", (0, 0), 4)
        report = replicas.audit("heal")
        return report, replicas.digests() == right, sorted(p.name for p in run_dir.glob("checkpoints/*"))


def test_two_workers_agree_on_what_the_checkpoint_has_and_a_checkpoint_waits_until_they_are_equal(
    pool2: Pool, tmp_path: Path
) -> None:
    report, as_before, checkpoints = pool2.run(healed_between_checkpoints, tmp_path)[0]
    assert "00000004-1" not in checkpoints, "the replicas differed then"
    assert len(checkpoints) >= 1
    (difference,) = report.differences
    assert (difference.reference, difference.rule) == (1, "checkpoint and journal")
    assert difference.minority == (0,)
    assert as_before, "worker 0 was the bad one"


# Plans.


@pytest.mark.parametrize("every", [0, -5, True, 2.5, "epoch"])
def test_a_plan_that_makes_no_sense_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=r"audit_every is a number of steps.*Received: "):
        AuditPlan(every)
    with pytest.raises(ValueError, match=r"on_divergence must be.*Received: 'ignore'"):
        AuditPlan(5, "ignore")  # type: ignore[arg-type]


def different_plans(strategy: Any, run_dir: Path) -> list[str]:
    said = []
    with replicas_of(audited(strategy), run_dir=run_dir) as replicas:
        for different in ({"audit_every": 5 + strategy.rank}, {"save_every": None if strategy.rank else 1}):
            with pytest.raises(replicast.ClusterError) as caught:
                fit(replicas.model, [replicas.callback(**different)], 2)
            said.append(str(caught.value))
        fit(replicas.model, [replicas.callback(audit_every=1, on_divergence="raise")], 2)
    return said


def test_workers_with_different_plans_are_told_before_one_waits_for_the_other(
    pool2: Pool, tmp_path: Path
) -> None:
    first, second = pool2.run(different_plans, tmp_path)
    assert first == second
    of_audits, of_saves = first
    assert of_audits.startswith("Worker 1 has different audit settings than worker 0.")
    assert of_saves.startswith("Worker 1 has a different save_every than worker 0.")
    assert "Received: None, worker 0: 1" in of_saves


# Raise, and ask from outside.


def raised(strategy: Any, run_dir: Path) -> Any:
    model = audited(strategy)
    asked: list[str] = []

    def act(step: int) -> None:
        if step == 2 and strategy.rank == 0:
            asked.append(inbox.ask(run_dir, "audit", author="me", timeout_secs=600.0).id)

    def corrupt(step: int) -> None:
        if step == 3 and strategy.rank == 1:
            flip(replicas.model, "dense/kernel", (1, 1), 3)

    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        meeting = Meeting(strategy)

        def answered() -> bool:
            time.sleep(0.01)  # what a step would take: the worker's other threads need some time as well
            return strategy.rank != 0 or inbox.answer_of(run_dir, asked[0]) is not None

        fit(model, [replicas.callback(), AtStep(act), Until(meeting, answered)], 2, epochs=100_000)
        strictly = replicas.callback(audit_every=5, on_divergence="raise")
        with pytest.raises(replicast.ReplicasDiverged) as caught:
            fit(model, [strictly, AtStep(corrupt)], 50)
        healed = replicas.audit("heal")
        answer = None if strategy.rank else inbox.answer_of(run_dir, asked[0])
        return str(caught.value), caught.value.step, healed, replicas.digests(), answer


def test_a_difference_ends_fit_on_all_workers_and_who_asks_from_outside_is_answered(
    pool2: Pool, tmp_path: Path
) -> None:
    (first, second) = pool2.run(raised, tmp_path)
    assert first[:4] == second[:4]
    assert "audited/dense/kernel: worker 1 differs from worker 0" in first[0]
    assert first[2].outcome == "healed"
    assert (first[4].author, first[4].details["equal"]) == ("me", True)


# What may differ.


def declared(strategy: Any, run_dir: Path) -> Any:
    model = audited(strategy)
    with pytest.raises(ValueError, match=r"such as audited/normed/gamma.*Received: 'audited/normed/gama'"):
        replicast.Replicas(model, may_differ=["audited/normed/gama"])
    options = {"run_dir": run_dir, "durability": "disk", "may_differ": ["audited/stored/*"]}
    with replicas_of(model, **options) as replicas:
        if strategy.rank == 1:
            for name in ("stored/int32", "stored/float16"):
                flip(replicas.model, name, (0, 1), 2)
        fit(model, [replicas.callback(on_divergence="raise")], 5)
        report = replicas.audit()
        mine = replicas.read(["audited/stored/float16", "audited/stored/int32"])
        replicas.save().result(WAIT_SECS)
    with replicas_of(model, **options) as again:
        again.restore()
        return report, mine, again.read(mine), again.audit()


def test_what_may_differ_is_told_never_healed_and_worker_0s_in_a_checkpoint(
    pool2: Pool, tmp_path: Path
) -> None:
    (report, first, now_first, after), (_, _, now_second, _) = pool2.run(declared, tmp_path)
    assert report.equal
    differs = {one.variable: one.differs for one in report.declared}
    assert differs["audited/stored/float16"]
    assert differs["audited/stored/int32"]
    assert not differs["audited/stored/int8"]
    assert "audited/dense/kernel" not in differs
    assert not any(one.differs for one in after.declared)
    for now in (now_first, now_second):
        np.testing.assert_array_equal(now["audited/stored/float16"], first["audited/stored/float16"])
    np.testing.assert_array_equal(now_second["audited/stored/int32"], first["audited/stored/int32"])


# What is written down.


class SlowSchema(Schema):
    """Takes a moment to be counted, so that two threads that do it meet."""

    def __len__(self) -> int:
        time.sleep(0.05)
        return super().__len__()


def test_an_audit_that_the_script_asked_for_is_written_down_once(tmp_path: Path) -> None:
    """Worker 0 hears of it twice at the same time: in its training thread and in the background."""
    with Job(2, attempt=3) as job:

        def make(worker: Worker) -> Audits:
            worker.state.schema = SlowSchema(worker.state.schema)
            return Audits(worker.session, tmp_path, AuditPlan())

        made = job.on_all(make)
        ended: list[Any] = []

        def tell(report: Any) -> None:
            made[0].on_ended(report)
            ended.append(report)

        job.workers[0].hooks.on_ended = tell
        reports = job.on_all(lambda worker: made[worker.rank].audit(None))
        eventually(lambda: ended)
        assert [one.number for one in made[0].reports] == [reports[0].number]
        assert [one.attempt for one in last_audits(tmp_path, 10)] == [3]


@pytest.mark.parametrize(("every", "steps", "epoch"), [(10, 10, 10**9), (10, 40, 10**9), (100, 1, 5)])
def test_tables_are_compared_in_consecutive_turns_however_far_apart_audits_are(
    every: int, steps: int, epoch: int
) -> None:
    with Job(2) as job:
        made = job.on_all(lambda worker: Audits(worker.session, None, AuditPlan(every, ends=True)))
        audits, session = made[0], mock.MagicMock(size=2)
        audits.session = session
        for session.step in range(400, 800, steps):  # a restart at step 400
            audits.after_step(steps)
            if session.step % epoch == 0:
                audits.after_epoch()
        audits.after_training()
        *turns, whole = [call.args[0] for call in session.replica.examine_quietly.call_args_list]
        assert turns == list(range(400 // every, 400 // every + len(turns)))
        assert len(turns) >= 10
        assert whole is None


# The values of variables according to checkpoint and journal, for audits without a majority.


class Reads:
    """Counts how often the journal is read for an expectation; it may be damaged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.damaged = False
        read = expectation.committed_updates

        def counted(run_dir: Path) -> Any:
            self.count += 1
            if self.damaged:
                raise FileDamaged(run_dir / "groups", "it was damaged")
            return read(run_dir)

        monkeypatch.setattr(expectation, "committed_updates", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, attempt=0))) as job:
        first = job.workers[0]
        first.hooks.expected_digests = lambda names: expectation.expected_digests(
            tmp_path, first.session.replica.holds, names, durable=True
        )
        yield job


def save(job: Job, run_dir: Path) -> None:
    worker = job.workers[0]
    step, holds = worker.session.step, frozenset(worker.session.replica.holds)
    draft = Manifest(
        step=step,
        epoch=0,
        batch=0,
        created_at=time.time(),
        workers=job.size,
        attempt=0,
        schema=worker.state.schema,
    )
    draft = draft.with_updates(Saved(step, 0, holds, (), None))
    CheckpointStore(run_dir).write(draft, worker.state.values)


def spoil(job: Job) -> None:
    """Every variable of worker 0 has another value now than worker 1's."""
    for name, value in job.workers[0].state.values.items():
        job.workers[0].state.values[name] = np.asarray(value + 1, value.dtype)


def found_by_an_audit(job: Job) -> list[tuple[int, str]]:
    """Of each difference, who was right by which rule."""
    report = job.on_all(lambda worker: worker.session.rest("audit", "warn"))[0]
    return [(one.reference, one.rule) for one in report.differences]


def propose(job: Job, amount: float) -> None:
    ticket = job.workers[0].propose(Update().add("dense/bias", np.full(3, amount, np.float32)))
    job.train(3)
    assert ticket.settled.wait(DEADLINE_SECS)


def test_the_journal_is_read_once_for_all_variables_of_an_audit(
    job: Job, tmp_path: Path, reads: Reads
) -> None:
    propose(job, 1.0)
    save(job, tmp_path)
    propose(job, 2.0)
    spoil(job)
    assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
    assert reads.count == 1
    propose(job, 4.0)
    assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
    assert reads.count == 2


def test_a_checkpoint_that_was_made_since_is_what_the_next_audit_goes_by(job: Job, tmp_path: Path) -> None:
    propose(job, 1.0)
    spoil(job)
    assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
    save(job, tmp_path)
    assert found_by_an_audit(job) == [(0, "checkpoint and journal")] * 4


def test_a_damaged_journal_is_said_once_for_all_variables(
    job: Job, tmp_path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, tmp_path)
    propose(job, 1.0)
    spoil(job)
    reads.damaged = True
    assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
    assert reads.count == 1
    assert caplog.text.count("it was damaged") == 1


def test_an_update_whose_entry_is_damaged_is_not_taken_for_one_of_other_variables(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, tmp_path)
    propose(job, 1.0)
    job.workers[1].state.values["dense/bias"] -= 1.0  # the value of the checkpoint
    assert found_by_an_audit(job) == [(0, "checkpoint and journal")]
    damage(tmp_path, "payload", cut)
    assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
    assert "entry 1, the payload of update" in caplog.text
