"""Checkpoints of jobs whose workers are threads: who is told what, when something goes wrong on the way."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicast.protocol.replays import Replays
from replicast.replicas.recovery import Recovery, Saves
from replicast.replicas.saving import Keeping, Saving

from replicast import faults
from replicast.checkpoint import CheckpointStore, Draft, Manifest
from replicast.config import TOLD_TO_END
from replicast.errors import CheckpointError, JobFailed
from tests.unit.protocol.twins import DEADLINE_SECS, PATIENCE, Job, Worker, eventually

Arrays = Iterable[tuple[str, np.ndarray[Any, Any]]]


def recoveries(job: Job, run_dir: Path | None, saves: Saves | None = None) -> list[Recovery]:
    made = [Recovery(worker.member, worker.state, run_dir, 0, None) for worker in job.workers]  # type: ignore[arg-type]
    for recovery in made:
        recovery.plan(saves if saves is not None else Saves())
    return made


def copying_in_place(job: Job) -> None:
    """Has worker 0's state keep one copy of itself and write over it, as that of a model does."""
    state = job.workers[0].state

    def snapshot(buffers: dict[str, np.ndarray[Any, Any]]) -> None:
        for name, value in state.values.items():
            np.copyto(buffers.setdefault(name, np.array(value)), value)

    state.snapshot = snapshot  # type: ignore[method-assign]


class SlowStore:
    """Checkpoints that are written as slowly as a test wants: each waits behind its first variable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], object]) -> None:
        self.begun = threading.Event()
        write = CheckpointStore.write

        def slowly(store: CheckpointStore, draft: Draft, arrays: Arrays, *more: Any) -> Manifest:
            def paced() -> Iterator[tuple[str, Any]]:
                for place, each in enumerate(arrays):
                    if place == 1:
                        self.begun.set()
                        eventually(go_on)
                    yield each

            return write(store, draft, paced(), *more)

        monkeypatch.setattr(CheckpointStore, "write", slowly)


def told_keys(job: Job) -> list[str]:
    return [key for key in job.store.values if "/told/save/" in key]


def left(
    job: Job,
    made: list[Recovery],
    caplog: pytest.LogCaptureFixture,
    at_each: Callable[[Worker, int], None] = lambda worker, step: None,
) -> list[str]:
    """Has all workers train until worker 1, who is told to end at step 14, leaves with the others.

    Returns:
        What was said of it, in the order of the workers.
    """
    caplog.set_level(logging.WARNING, "replicast")
    barrier = threading.Barrier(job.size)

    def act(worker: Worker) -> Any:
        try:
            for step in range(1, 40):
                barrier.wait(DEADLINE_SECS)
                made[worker.rank].goes_on()
                worker.member.arrive(step)
                made[worker.rank].after_step(1)
                at_each(worker, step)
                if worker.rank == 1 and step == 14:
                    made[1].leaving.ask()
                    eventually(lambda: any(stop.go is not None for stop in worker.member.gate.pending()))
        except SystemExit as exit_:
            return exit_.code
        return None

    assert job.on_all(act) == [TOLD_TO_END] * job.size
    return sorted(said for said in caplog.messages if "was told to end" in said)


def test_who_is_told_to_end_while_a_checkpoint_is_written_saves_behind_it_although_others_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(2) as job:
        made = recoveries(job, tmp_path, Saves(10, when_busy="skip"))
        SlowStore(monkeypatch, lambda: made[0].leaving.left)
        first, second = left(job, made, caplog)
        assert first == "worker 0 was told to end: the state is saved"
        assert second == "worker 1 was told to end: worker 0 saves the state, and says so"
        assert [manifest.step for manifest in CheckpointStore(tmp_path).list()] == [10, 15]


def test_who_is_told_to_end_says_that_nothing_is_saved_when_the_replicas_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(worker: Worker, step: int) -> None:
        if (worker.rank, step) == (1, 12):
            worker.state.values["dense/bias"][:] = 7

    with Job(2) as job:
        first, second = left(job, recoveries(job, tmp_path, Saves(10)), caplog, change)
    assert first.startswith("worker 0 was told to end: the state is not saved. ")
    assert "worker 1 differs from worker 0 in dense/bias" in first
    assert "is saved" not in second
    assert [manifest.step for manifest in CheckpointStore(tmp_path).list()] == [10]


def test_who_is_told_to_end_says_why_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "write", full)
    with Job(2) as job:
        first, _ = left(job, recoveries(job, tmp_path), caplog)
    assert first.startswith("worker 0 was told to end: the state is not saved. ")
    assert "No space left on device" in first
    caplog.clear()
    with Job(2) as job:
        said = left(job, recoveries(job, None), caplog)
    assert ["the state is not saved, since there is no run directory" in each for each in said] == [True] * 2


def test_who_is_told_to_end_does_not_wait_for_ever_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    with Job(2) as job:
        made = recoveries(job, tmp_path, Saves(10, when_busy="skip"))
        slow = SlowStore(monkeypatch, answers.is_set)

        def lose_patience(worker: Worker, step: int) -> None:
            if (worker.rank, step) == (0, 12):
                assert slow.begun.wait(DEADLINE_SECS)
                worker.member.patience = replace(PATIENCE, begin_secs=0.2)

        first, _ = left(job, made, caplog, lose_patience)
        answers.set()
    assert "the state is not saved. The checkpoint before is still being written" in first


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


def test_nobody_waits_for_a_checkpoint_whose_thread_has_died(tmp_path: Path) -> None:
    with Job(1) as job:
        (recovery,) = recoveries(job, tmp_path)
        plan = faults.set_plan([faults.Fault(0, faults.Point.WRITE, action=faults.Action.RAISE)])
        try:
            assert "FaultInjected" in result_of(recovery.save())
        finally:
            faults.set_plan([])
        assert plan is not None
        assert plan.fired
        eventually(job.workers[0].member.threads.stopping.is_set)
        with pytest.raises(JobFailed, match="'saver' of replicast died: FaultInjected"):
            job.workers[0].member.threads.check()
        assert "FaultInjected" in result_of(recovery.save()), "the next one is not begun"


def test_nobody_waits_for_a_checkpoint_when_another_thread_has_died_or_all_were_stopped(
    tmp_path: Path,
) -> None:
    with Job(1) as job:
        (recovery,) = recoveries(job, tmp_path)
        saver: Any = recovery._saver
        job.workers[0].member.threads.start("other", lambda: [][0])
        eventually(lambda: saver._ended)  # else it may still write this one
        assert "IndexError" in result_of(recovery.save())
    with Job(1) as job:
        (recovery,) = recoveries(job, tmp_path)
        job.workers[0].member.stop()
        assert "The job ended before" in result_of(recovery.save())


def test_a_copy_that_is_being_written_is_not_written_over_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    with Job(1) as job:
        (recovery,), (worker,) = recoveries(job, tmp_path), job.workers
        copying_in_place(job)
        slow = SlowStore(monkeypatch, go_on.is_set)
        worker.member.arrive(1)
        first = recovery.save()
        assert slow.begun.wait(DEADLINE_SECS)
        for value in worker.state.values.values():
            value[...] = 2
        worker.member.arrive(2)
        worker.member.threads.stopping.set()
        with pytest.raises(JobFailed, match="The job ended before"):
            recovery.save()
        go_on.set()
        assert first.result(DEADLINE_SECS) is not None
    with CheckpointStore(tmp_path).open(1, verify=True) as reader:
        assert not reader.read("dense/bias").any()


def test_what_is_written_is_what_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1) as job:
        (recovery,), (worker,) = recoveries(job, tmp_path), job.workers
        copying_in_place(job)

        def flip() -> bool:
            """Memory that changes under the writer, whoever does it."""
            saver: Any = recovery._saver
            for value in saver._buffers.values():
                value[...] = 2
            return True

        SlowStore(monkeypatch, flip)
        worker.member.arrive(1)
        with pytest.raises(CheckpointError, match="it has changed meanwhile"):
            recovery.save().result(DEADLINE_SECS)
    assert CheckpointStore(tmp_path).steps() == []
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_that_is_whole_is_none_that_failed_when_an_old_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, meanwhile = CheckpointStore.remove, []

    def removed_by_somebody(store: CheckpointStore, step: int) -> None:
        meanwhile.append(step)
        if step == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
        shutil.rmtree(store.path(step))
        remove(store, step)

    monkeypatch.setattr(CheckpointStore, "remove", removed_by_somebody)
    with Job(1) as job:
        (recovery,) = recoveries(job, tmp_path, Saves(keeping=Keeping(1)))
        for step in (1, 2, 3, 4):
            job.workers[0].member.arrive(step)
            recovery.after_step(1)
            manifest = recovery.save().result(DEADLINE_SECS)
            assert manifest is not None
            assert manifest.step == step
        recovery.settle()
    assert meanwhile == [1, 2, 2, 3]
    assert CheckpointStore(tmp_path).steps() == [4, 2]


def test_a_job_that_ends_leaves_no_thread_that_waits_for_a_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(2, patience=replace(PATIENCE, begin_secs=600)) as job:
        saving = recoveries(job, tmp_path)[0].save()  # worker 1 does not come
    assert "The job ended before" in result_of(saving)
    assert "did not end within" not in caplog.text


def test_what_others_say_of_a_checkpoint_that_is_skipped_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    with Job(3) as job:
        made = recoveries(job, tmp_path, Saves(when_busy="skip"))
        slow = SlowStore(monkeypatch, go_on.is_set)
        first = job.on_all(lambda worker: made[worker.rank].save())[0]
        assert slow.begun.wait(DEADLINE_SECS)
        for _ in range(3):
            skipped = job.on_all(lambda worker: made[worker.rank].save())
            assert skipped[0].result(0) is None
        assert len(told_keys(job)) == 2 * 3
        go_on.set()
        assert first.result(DEADLINE_SECS) is not None
        assert job.on_all(lambda worker: made[worker.rank].save())[0].result(DEADLINE_SECS) is not None
        assert told_keys(job) == []


def test_a_script_that_restores_a_step_can_do_so_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replays, "start_from", lambda *_: None)  # these jobs train as soon as they are there

    def trained(steps: Iterable[int], start: int | None) -> list[int]:
        with Job(1) as job:
            (recovery,) = recoveries(job, tmp_path, Saves(keeping=Keeping(2)))
            if start is not None:
                restored = recovery.restore(start, partial=False)
                assert restored is not None
                assert restored.step == start
            for step in steps:
                job.workers[0].member.arrive(step)
                recovery.save().result(DEADLINE_SECS)
        return CheckpointStore(tmp_path).steps()

    assert trained((10, 20, 30), None) == [30, 20]
    assert trained((21, 22, 23), 20) == [23, 22, 20]
    assert trained((21,), 20) == [21, 20]
