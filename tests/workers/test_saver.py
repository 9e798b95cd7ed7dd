"""Checkpoints of jobs whose workers are threads: what each caller is told if an error occurs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from replicast import faults
from replicast.config import TOLD_TO_END
from replicast.core.entries import Saved
from replicast.core.messages import Ended, WriteOutcome
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged
from replicast.processes import Deadline
from replicast.replicas import job_checkpoints
from replicast.replicas.job_checkpoints import Checkpoints, SavePlan, Saving
from replicast.replicas.joined_worker import Departure
from replicast.replicas.position import Position, Training
from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, QUICK, Job, Worker, eventually

Arrays = Iterable[tuple[str, np.ndarray[Any, Any]]]


class Saver:
    """One worker's checkpoints and training, put together as `Replicas` does it."""

    def __init__(
        self, worker: Worker, run_dir: Path | None, plan: SavePlan | None = None, policy: str = "heal"
    ) -> None:
        self.worker = worker
        store = None if run_dir is None else CheckpointStore(run_dir)
        self.training = Training(worker.session)
        self.checkpoints = Checkpoints(worker.session, self.training, store)
        worker.session.set_audit_policy(policy)
        worker.hooks.take_snapshot = self.checkpoints.take_snapshot
        worker.hooks.write_checkpoint = self.checkpoints.write
        worker.hooks.on_ended = self.on_ended
        self.training.active = self.training.has_begun = True
        companions: list[Departure] = []
        self.departure = Departure(
            worker.session, self.checkpoints, self.training, companions, lambda problem: None
        )
        companions.append(self.departure)
        worker.hooks.on_leave = self.departure.leave
        if run_dir is not None:
            self.checkpoints.follow(plan or SavePlan())

    def on_ended(self, ended: Ended) -> None:
        if ended.kind in ("save", "leave"):
            self.checkpoints.on_ended(ended)

    def step(self) -> None:
        self.checkpoints.report()
        self.worker.step()
        self.checkpoints.after_step(1)


def savers(job: Job, run_dir: Path | None, plan: SavePlan | None = None) -> list[Saver]:
    return [Saver(worker, run_dir, plan) for worker in job.workers]


@contextlib.contextmanager
def saving_job(
    size: int, run_dir: Path | None, plan: SavePlan | None = None
) -> Iterator[tuple[Job, list[Saver]]]:
    with Job(size) as job:
        yield job, savers(job, run_dir, plan)


def saved(job: Job, made: list[Saver]) -> Saving:
    """What worker 0 holds when all workers have called `save`."""
    saving: Saving = job.on_all(lambda worker: made[worker.rank].checkpoints.save_here())[0]
    return saving


class SlowStore:
    """Checkpoints that are written as slowly as a test wants: each waits behind its first variable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], object]) -> None:
        self.begun = threading.Event()
        write = CheckpointStore.write

        def slowly(store: CheckpointStore, draft: Manifest, arrays: Arrays, *more: Any) -> Manifest:
            asked = itertools.count()

            class Paced(dict[str, Any]):
                def get(this, name: str, default: Any = None) -> Any:  # noqa: N805 - `self` is the store
                    if next(asked) == 1:
                        self.begun.set()
                        eventually(go_on)
                    return arrays[name]

            return write(store, draft, Paced(arrays), *more)

        monkeypatch.setattr(CheckpointStore, "write", slowly)

    def wait_until_it_is_written(self, worker: Worker, step: int) -> None:
        """Training goes on behind the checkpoint of step 10 when its file is open."""
        if (worker.rank, step) == (0, 12):
            assert self.begun.wait(DEADLINE_SECS)


def test_the_time_since_the_last_checkpoint_goes_on_in_the_next_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, now, asked = SavePlan(timedelta(minutes=10)), [0.0], list[str]()

    class Clocked(Deadline):
        def __init__(self, secs: float | None) -> None:
            super().__init__(secs)
            self.ends_at = math.inf if secs is None else now[0] + secs

        def has_passed(self) -> bool:
            return now[0] >= self.ends_at

    monkeypatch.setattr(job_checkpoints, "Deadline", Clocked)
    with saving_job(1, tmp_path, plan) as (job, made):
        monkeypatch.setattr(made[0].checkpoints.session.proposals, "request", asked.append)
        for _ in range(6):  # as each `fit` does with its callback
            made[0].checkpoints.follow(plan)
            now[0] += 240.0
            job.on_all(lambda worker: made[0].step())
    assert asked == ["save", "save"]


# Who is told to end.


def left(
    job: Job,
    made: list[Saver],
    caplog: pytest.LogCaptureFixture,
    at_each: Callable[[Worker, int], None] = lambda worker, step: None,
) -> list[str]:
    """What is said when worker 1 is told to end at step 14, and all leave with it; by worker."""
    caplog.set_level(logging.WARNING, "replicast")
    barrier = threading.Barrier(job.size)

    def act(worker: Worker) -> Any:
        try:
            for step in itertools.count(1):
                barrier.wait(DEADLINE_SECS)
                made[worker.rank].step()
                at_each(worker, step)
                if worker.rank == 1 and step == 14:
                    made[1].departure.ask()
        except SystemExit as exit_:
            return exit_.code
        return None

    assert job.on_all(act) == [TOLD_TO_END] * job.size
    return sorted(said for said in caplog.messages if "was told to exit" in said)


def is_leaving(job: Job) -> bool:
    return any(one["kind"] == "leave" for one in job.workers[0].session.operations())


def test_a_job_told_to_exit_while_a_checkpoint_is_written_saves_behind_it_although_others_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with saving_job(2, tmp_path, SavePlan(10, when_busy="skip")) as (job, made):
        slow = SlowStore(monkeypatch, lambda: is_leaving(job))
        first, second = left(job, made, caplog, slow.wait_until_it_is_written)
        step = job.workers[0].session.step
    assert first == "worker 0 was told to exit: the state is saved"
    assert second == "worker 1 was told to exit: the state is saved"
    assert [manifest.step for manifest in CheckpointStore(tmp_path).manifests()] == [10, step]


def test_a_job_told_to_exit_says_that_nothing_is_saved_when_the_replicas_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(worker: Worker, step: int) -> None:
        if (worker.rank, step) == (0, 11):
            eventually(lambda: CheckpointStore(tmp_path).manifests())
        if (worker.rank, step) == (1, 12):
            worker.state.values["dense/bias"][:] = 7

    with saving_job(2, tmp_path, SavePlan(10)) as (job, made):
        for said in left(job, made, caplog, change):
            assert "was told to exit: the state is not saved. Worker 1 differs from worker 0 at step" in said
        eventually(lambda: not made[0].checkpoints.is_busy)
    assert [manifest.step for manifest in CheckpointStore(tmp_path).manifests()] == [10]


def test_a_job_told_to_exit_says_why_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "write", full)
    with Job(2) as job:
        first, second = left(job, savers(job, tmp_path), caplog)
    assert first.startswith("worker 0 was told to exit: the state is not saved. ")
    assert "No space left on device" in first
    assert second.startswith("worker 1 was told to exit: the state is not saved. ")
    caplog.clear()
    with Job(2) as job:
        said = left(job, savers(job, None), caplog)
    assert ["the state is not saved. There is no run directory" in each for each in said] == [True] * 2


def test_a_job_told_to_exit_does_not_wait_forever_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    with Job(2) as job:
        job.workers[0].session.timeouts = replace(QUICK, compute_secs=0.1)  # the coordinator has more
        made = savers(job, tmp_path, SavePlan(10, when_busy="skip"))
        slow = SlowStore(monkeypatch, answers.is_set)
        first, _ = left(job, made, caplog, slow.wait_until_it_is_written)
        answers.set()
    assert "the state is not saved. The previous checkpoint is still being written" in first


# A full disk.


def test_a_checkpoint_that_could_not_be_written_is_told_at_the_next_boundary_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for the checkpoint of step 2, and then no more."""
    sync, fired = os.fsync, list[Path]()

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if "checkpoints" not in path.parts:
            return sync(descriptor)
        fired.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with saving_job(2, tmp_path, SavePlan(every=4)) as (job, made):

        def step(worker: Worker) -> str:
            try:
                made[worker.rank].step()
            except CheckpointError as error:
                return f"{type(error.__cause__).__name__}: {error}"
            return ""

        assert [job.on_all(step) for _ in range(2)] == [["", ""]] * 2
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            assert saved(job, made).wait(DEADLINE_SECS)
        assert fired
        assert list((tmp_path / "checkpoints").iterdir()) == []
        said, other = job.on_all(step)
        assert said.startswith("OSError: The checkpoint of step 2 could not be written. Checkpoint: ")
        assert all(part in said for part in ("checkpoints/00000002", "No space left", "Free disk space"))
        assert other == ""
        assert job.on_all(step) == ["", ""]
        job.on_all(lambda worker: made[worker.rank].checkpoints.settle(DEADLINE_SECS))
    assert CheckpointStore(tmp_path).steps() == [4]


# Nobody waits in vain.


def result_of(saving: Saving) -> str:
    """Why there is no checkpoint, from whoever waits for it without a limit."""
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(JobFailed) as caught:
            saving.result()
        said.append(str(caught.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(DEADLINE_SECS)
    assert said, "it waits for ever"
    return said[0]


def test_no_worker_waits_for_a_checkpoint_whose_thread_has_died(tmp_path: Path) -> None:
    with saving_job(1, tmp_path) as (job, made):
        plan = faults.set_plan([faults.Fault(0, faults.Point.WRITE, action=faults.Action.RAISE)])
        try:
            saving = made[0].checkpoints.save_in_passing()
            made[0].checkpoints.report()
            assert "Checkpoints can no longer be written" in result_of(saving)
        finally:
            faults.set_plan([])
        assert plan is not None
        assert plan.fired
        eventually(job.workers[0].session.threads.stopping.is_set)
        with pytest.raises(JobFailed, match="'saver' of replicast died: FaultInjected"):
            job.workers[0].session.check()
        with pytest.raises(JobFailed, match="FaultInjected"):
            saved(job, made)


def test_no_worker_waits_for_a_checkpoint_that_another_never_reaches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving_job(2, tmp_path) as (_, made):
        saving = made[0].checkpoints.save_in_passing()
        made[0].checkpoints.report()  # worker 1 does not
    assert "The job ended before" in result_of(saving)
    assert "did not exit within" not in caplog.text


def test_no_worker_waits_for_a_checkpoint_when_another_thread_has_died(tmp_path: Path) -> None:
    with saving_job(2, tmp_path) as (job, made):
        saving = made[0].checkpoints.save_in_passing()
        job.workers[0].session.threads.start("other", lambda: [][0])
        assert "IndexError" in result_of(saving)
        with pytest.raises(JobFailed, match="IndexError"):
            made[0].checkpoints.settle()


# What is written.


class KeepsOneCopy:
    """Has a worker's state keep one copy of itself and write over it, as that of a model does."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copy: dict[str, np.ndarray[Any, Any]] = {}
        self.times = 0

        def snapshot(buffers: dict[str, np.ndarray[Any, Any]]) -> None:
            for name, value in worker.state.values.items():
                np.copyto(buffers.setdefault(name, np.array(value)), value)
            self.copy = buffers
            self.times += 1

        monkeypatch.setattr(worker.state, "snapshot", snapshot)


def test_a_copy_that_is_being_written_is_not_written_over_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    with Job(1) as job:
        made, (worker,) = savers(job, tmp_path), job.workers
        KeepsOneCopy(worker, monkeypatch)
        slow = SlowStore(monkeypatch, go_on.is_set)
        job.on_all(Worker.step)
        first = saved(job, made)
        assert slow.begun.wait(DEADLINE_SECS)
        for value in worker.state.values.values():
            value[...] = 2
        worker.session.threads.stopping.set()
        with pytest.raises(JobFailed, match="The job ended before"):
            made[0].checkpoints.save_in_passing()
        go_on.set()
        assert first.result(DEADLINE_SECS) is not None
    with CheckpointStore(tmp_path).open(1) as reader:
        reader.verify()
        assert not reader.read("dense/bias").any()


def test_a_copy_that_was_written_over_before_it_was_compared_is_not_taken_for_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 0 is still publishing an update, and then has to compare its copy of step 10, when all leave."""
    with saving_job(2, tmp_path, SavePlan(every=10, when_busy="skip")) as (job, made):
        keeps, transport = KeepsOneCopy(job.workers[0], monkeypatch), job.workers[0].transport
        publish = transport.publish

        def slowly(*what: Any, **how: Any) -> Any:
            eventually(lambda: keeps.times == 2)
            return publish(*what, **how)

        def at_each(worker: Worker, step: int) -> None:
            if worker.rank == 0 and step == 10:
                monkeypatch.setattr(transport, "publish", slowly)
                worker.propose(Update().add("dense/bias", np.ones(3, np.float32)))
            worker.state.values["dense/bias"][...] = step  # it trains

        said = left(job, made, caplog, at_each)
    assert keeps.times == 2
    assert [line for line in said if "the state is saved" in line] == said
    assert not [line for line in caplog.messages if "differs" in line]


def test_what_is_written_is_what_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1) as job:
        made, (worker,) = savers(job, tmp_path), job.workers
        keeps = KeepsOneCopy(worker, monkeypatch)

        def flip() -> bool:
            """Memory that changes under the writer, whoever does it."""
            for value in keeps.copy.values():
                value[...] = 2
            return True

        SlowStore(monkeypatch, flip)
        job.on_all(Worker.step)
        with pytest.raises(CheckpointError, match="changed while it was being written"):
            saved(job, made).result(DEADLINE_SECS)
    assert CheckpointStore(tmp_path).steps() == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("when_busy", "steps"), [("wait", [1, 2, 3]), ("skip", [1, 3])])
def test_a_checkpoint_that_is_due_while_another_is_written_waits_or_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: Literal["wait", "skip"], steps: list[int]
) -> None:
    goes_on = threading.Event()
    with saving_job(2, tmp_path, SavePlan(1, keep=9, when_busy=when_busy)) as (job, made):
        slow = SlowStore(monkeypatch, goes_on.is_set)
        job.on_all(lambda worker: made[worker.rank].step())
        job.on_all(lambda worker: made[worker.rank].checkpoints.report())
        assert slow.begun.wait(DEADLINE_SECS)
        if when_busy == "wait":
            threading.Timer(0.3, goes_on.set).start()
        job.on_all(lambda worker: made[worker.rank].step())
        assert goes_on.is_set() == (when_busy == "wait")
        goes_on.set()
        job.on_all(lambda worker: made[worker.rank].checkpoints.settle(DEADLINE_SECS))
        job.on_all(lambda worker: made[worker.rank].step())
        job.on_all(lambda worker: made[worker.rank].checkpoints.settle(DEADLINE_SECS))
    assert sorted(CheckpointStore(tmp_path).steps()) == steps


def test_a_checkpoint_that_is_skipped_leaves_the_one_that_is_being_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    with saving_job(2, tmp_path, SavePlan(1, when_busy="skip")) as (job, made):
        KeepsOneCopy(job.workers[0], monkeypatch)
        slow = SlowStore(monkeypatch, go_on.is_set)
        for value in range(5):
            for worker in job.workers:
                worker.state.values["dense/bias"][...] = value
            job.on_all(lambda worker: made[worker.rank].step())
            if value == 1:
                assert slow.begun.wait(DEADLINE_SECS)
        eventually(lambda: len(job.workers[0].session.operations()) == 1)  # what was skipped has ended
        go_on.set()
        job.on_all(lambda worker: made[worker.rank].checkpoints.settle())
    (manifest,) = CheckpointStore(tmp_path).manifests()
    assert manifest.step == 1
    with CheckpointStore(tmp_path).open(1) as reader:
        reader.verify()
        assert not reader.read("dense/bias").any()


@pytest.mark.parametrize(("policy", "follows"), [("heal", "An audit follows"), ("raise", "replicas.sync")])
def test_a_checkpoint_that_is_not_made_says_what_follows_by_the_policy(
    tmp_path: Path, policy: str, follows: str
) -> None:
    with Job(2, audit_policy="warn") as job:
        made = [Saver(worker, tmp_path, policy=policy) for worker in job.workers]
        job.workers[1].state.values["dense/bias"][:] = 7
        saving = job.on_all(lambda worker: made[worker.rank].checkpoints.save_here())[0]
        with pytest.raises(ReplicasDiverged, match=r"The state is not saved\. Worker 1 differs") as caught:
            saving.result(DEADLINE_SECS)
    assert (caught.value.worker, caught.value.step) == (1, 0)
    assert follows in str(caught.value)
    assert ("sync" in str(caught.value)) == (policy == "raise")


def steps_until(
    job: Job, made: list[Saver], enough: Callable[[], object], act: Callable[[Saver], None]
) -> None:
    """Trains until it is enough, and lets all workers act after each step."""
    for _ in range(1000):
        job.on_all(lambda worker: made[worker.rank].step())
        job.on_all(lambda worker: act(made[worker.rank]))
        if enough():
            return
    raise AssertionError("it never was")


def test_what_is_proposed_at_the_boundary_of_a_checkpoint_that_was_requested_belongs_to_it(
    tmp_path: Path,
) -> None:
    def propose(saver: Saver) -> None:
        step = saver.worker.session.step
        if saver.worker.rank == 1:
            update = Update(id=f"at-{step}").add("dense/bias", np.ones(3, np.float32))
            saver.worker.propose(update, at_step=10**6)

    with saving_job(2, tmp_path) as (job, made):
        job.workers[0].session.proposals.request("save")
        steps_until(job, made, CheckpointStore(tmp_path).manifests, propose)
    (manifest,) = CheckpointStore(tmp_path).manifests()
    assert {f"at-{step}" for step in range(1, manifest.step + 1)} <= {
        one.proposal.id for one in manifest.pending
    }


def test_a_checkpoint_that_was_requested_at_the_last_batch_of_an_epoch_waits_for_its_end(
    tmp_path: Path,
) -> None:
    with saving_job(2, tmp_path) as (job, made):
        store, first = CheckpointStore(tmp_path), job.workers[0].session

        def is_last_batch(saver: Saver) -> None:
            saver.training.reached(Position(1), {}, epoch_ends=True)

        job.on_all(lambda worker: is_last_batch(made[worker.rank]))
        first.proposals.request("save")
        eventually(first.operations)
        steps_until(job, made, lambda: not first.operations(), is_last_batch)
        assert store.manifests() == []
        step = first.step
        job.on_all(lambda worker: made[worker.rank].checkpoints.after_epoch())
        job.on_all(lambda worker: made[worker.rank].checkpoints.settle())
        assert [manifest.step for manifest in store.manifests()] == [step]


def test_workers_that_are_at_different_moments_of_an_epochs_end_take_part_in_the_same_checkpoints(
    tmp_path: Path,
) -> None:
    """Worker 1 waits in a callback at the end of the epoch, worker 0 stands at the last boundary of it."""
    with saving_job(2, tmp_path, SavePlan("epoch")) as (job, made):
        update = Update(id="waited-for").add("dense/bias", np.ones(3, np.float32))
        has_passed = threading.Event()

        def end_of_epoch(worker: Worker) -> None:
            training = made[worker.rank].training
            training.reached(Position(1), {}, epoch_ends=True)
            if worker.rank == 0:
                assert has_passed.wait(DEADLINE_SECS)
                worker.session.proposals.request("save")
                eventually(lambda: worker.session.is_wanted)
            made[worker.rank].step()
            training.reached(Position(1), {})
            if worker.rank == 1:
                has_passed.set()
                assert worker.propose(update).result(DEADLINE_SECS).step == 1
            made[worker.rank].checkpoints.after_epoch()
            made[worker.rank].checkpoints.report()
            worker.session.rest("close")
            made[worker.rank].checkpoints.settle(DEADLINE_SECS)

        job.on_all(end_of_epoch)
        assert [manifest.step for manifest in CheckpointStore(tmp_path).manifests()] == [1]


# Which ones stay.


def test_a_complete_checkpoint_has_not_failed_if_an_old_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, meanwhile = CheckpointStore.remove, []

    def removed_by_somebody(store: CheckpointStore, step: int) -> None:
        meanwhile.append(step)
        if step == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
        shutil.rmtree(store.path(step).as_path())
        remove(store, step)

    monkeypatch.setattr(CheckpointStore, "remove", removed_by_somebody)
    with saving_job(1, tmp_path, SavePlan(keep=1)) as (job, made):
        for step in (1, 2, 3, 4):
            job.on_all(lambda worker: made[0].step())
            manifest = saved(job, made).result(DEADLINE_SECS)
            assert manifest is not None
            assert manifest.step == step
    assert meanwhile == [1, 2, 2, 3]
    assert CheckpointStore(tmp_path).steps() == [4, 2]


def test_a_script_that_restores_a_step_can_do_so_again(tmp_path: Path) -> None:
    def trained(steps: Iterable[int], start: int | None) -> list[int]:
        with Job(1) as job:
            made = savers(job, tmp_path, SavePlan(keep=2))
            made[0].checkpoints.named = start
            for step in steps:
                job.on_all(lambda worker, step=step: worker.session.arrive(step))
                saved(job, made).result(DEADLINE_SECS)
        return CheckpointStore(tmp_path).steps()

    assert trained((10, 20, 30), None) == [30, 20]
    assert trained((21, 22, 23), 20) == [23, 22, 20]
    assert trained((21,), 20) == [21, 20]


def test_a_metric_that_is_not_there_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with saving_job(1, tmp_path, SavePlan(keep=1, keep_best=("loss", "min"))) as (job, made):
        made[0].training.metrics = {"loss": 1.0}
        saved(job, made).result(DEADLINE_SECS)
        assert "keep_best" not in caplog.text
        made[0].checkpoints.follow(SavePlan(keep=1, keep_best=("val_loss", "min")))
        for _ in range(2):
            job.on_all(lambda worker: made[0].step())
            saved(job, made).result(DEADLINE_SECS)
    said = [message for message in caplog.messages if "keep_best" in message]
    assert len(said) == 1
    assert "the checkpoint of step 1 has no metric 'val_loss'" in said[0]
    assert "It has: loss." in said[0]


def test_one_that_is_skipped_does_not_take_the_place_of_one_that_the_script_has_asked_for(
    tmp_path: Path,
) -> None:
    """Worker 1 takes its part of the skipped one before an update, worker 0 comes to it behind the update."""
    with saving_job(2, tmp_path, SavePlan(every=2, when_busy="skip")) as (job, made):
        may_write, write = threading.Event(), made[0].checkpoints.write

        def write_later(saved: Saved) -> Callable[[], WriteOutcome]:
            return lambda: (may_write.wait(DEADLINE_SECS), write(saved)())[-1]

        job.workers[0].hooks.write_checkpoint = write_later
        ended: list[Ended] = []
        job.workers[0].hooks.on_ended = ended.append
        update = Update(id="between").add("dense/bias", np.ones(3, np.float32))
        proposed: list[Any] = []

        def act(worker: Worker) -> Saving:
            made[worker.rank].step()
            asked_for = made[worker.rank].checkpoints.save_here()
            if worker.rank == 0:
                eventually(lambda: worker.session.is_wanted)  # it stops at the next boundary
            made[worker.rank].step()
            if worker.rank == 1:
                proposed.append(worker.propose(update))
                assert proposed[0].result(DEADLINE_SECS).step == 2, "it is applied where both stand"
            made[worker.rank].step()
            eventually(lambda: ended or worker.session.is_wanted)
            made[worker.rank].step()
            return asked_for

        asked_for = job.on_all(act)[0]
        may_write.set()
        manifest = asked_for.result(DEADLINE_SECS)
        assert manifest is not None
        assert manifest.step == 1


def test_one_that_is_decided_is_not_replaced_while_entries_before_it_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving_job(1, tmp_path) as (job, made):
        goes_on = threading.Event()
        monkeypatch.setattr(job.journal, "remove_payloads", lambda *_: goes_on.wait(2 * DEADLINE_SECS))
        job.workers[0].session.remove_payloads(frozenset(), None)  # in the lane "journal"
        job.on_all(lambda worker: made[0].checkpoints.save_in_passing())
        job.on_all(lambda worker: made[0].checkpoints.report())
        saving = made[0].checkpoints._current
        eventually(lambda: saving.is_writing)
        saving.replace()
        assert not saving.done()
        goes_on.set()
        assert saving.result(DEADLINE_SECS) is not None


def test_one_that_worker_0_could_not_copy_is_not_taken_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving_job(2, tmp_path) as (job, made):
        job.on_all(Worker.step)
        assert saved(job, made).result(DEADLINE_SECS) is not None

        def no_memory(_: object) -> None:
            raise MemoryError("no memory for a copy")

        monkeypatch.setattr(job.workers[0].state, "snapshot", no_memory)
        job.on_all(Worker.step)
        with pytest.raises(CheckpointError, match="no memory for a copy"):
            saved(job, made).result(DEADLINE_SECS)


def test_a_save_that_is_refused_late_does_not_settle_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 hears that the first was refused when it has asked for the second, which is being written."""
    with saving_job(2, tmp_path) as (job, made):
        is_next, is_heard = threading.Event(), threading.Event()
        hear = job.workers[0].hooks.on_ended

        def hear_late(ended: Ended) -> None:
            is_next.wait(DEADLINE_SECS)
            hear(ended)
            is_heard.set()

        job.workers[0].hooks.on_ended = hear_late
        SlowStore(monkeypatch, is_heard.is_set)

        def no_memory(_: object) -> None:
            raise MemoryError("no memory for digests")

        with monkeypatch.context() as patched:
            patched.setattr(job.workers[1].state, "digests", no_memory)
            first = saved(job, made)
        job.on_all(Worker.step)
        second = saved(job, made)
        is_next.set()
        manifest = second.result(DEADLINE_SECS)
        assert manifest is not None
        assert manifest.step == 1
        assert first.done()


def test_a_checkpoint_that_one_worker_leaves_out_is_an_error_that_names_it_and_the_others_are_made(
    tmp_path: Path,
) -> None:
    with saving_job(2, tmp_path, SavePlan(every=1, keep=9)) as (job, made):
        said: list[str] = []

        def act(worker: Worker) -> None:
            for step in range(1, 6):
                if (worker.rank, step) == (1, 2):
                    made[1].checkpoints.report()
                    worker.step()  # and not `after_step`: its callback was skipped
                    continue
                try:
                    made[worker.rank].step()
                except CheckpointError as error:
                    said.append(str(error))
                    made[worker.rank].checkpoints.after_step(1)
            made[worker.rank].checkpoints.report()
            worker.session.rest("close")
            made[worker.rank].checkpoints.settle(DEADLINE_SECS)

        job.on_all(act)
        (problem,) = said
        assert "Worker 1 did not report its save of step 2" in problem
        assert sorted(CheckpointStore(tmp_path).steps()) == [1, 3, 4, 5]


def test_training_does_not_stand_still_for_a_part_of_the_last_checkpoint_that_a_worker_never_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(2, timeouts=replace(QUICK, answer_secs=0.2, meet_secs=10**6)) as job:
        made = savers(job, tmp_path, SavePlan(every=1))

        def act(worker: Worker) -> None:
            for _ in range(3):
                made[0].step() if worker.rank == 0 else worker.step()

        job.on_all(act)
        assert "the checkpoint of step 2 is skipped: the previous one is not decided yet" in caplog.text
