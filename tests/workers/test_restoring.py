"""A damaged checkpoint is refused by every worker; all use the same other one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from replicast.errors import CheckpointError, UpdateRefused
from replicast.replicas import job_checkpoints as restoring
from replicast.replicas.job_checkpoints import Checkpoints
from replicast.replicas.position import Training
from replicast.storage.checkpoints import CheckpointStore
from replicast.testing.job import Job, Worker, start_values
from tests.pool import Pool
from tests.workers.changing import scramble
from tests.workers.recipes import perceptron
from tests.workers.test_updates import adam, replicas_of


def flip(run_dir: Path, step: int, strategy: Any) -> None:
    if strategy.rank == 0:
        state = CheckpointStore(run_dir).path(step).as_path() / "state.safetensors"
        content = bytearray(state.read_bytes())
        content[-3] ^= 1
        state.write_bytes(content)


def damaged(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """Two checkpoints, of which first the last is damaged, then both."""
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.save().result(60)
        saved = replicas.digests()
        replicas.boundary()
        replicas.save().result(60)
        with pytest.raises(CheckpointError, match=r"restore\(\) must be called before training"):
            replicas.restore()
    with replicas_of(model, run_dir=run_dir) as replicas, mock.patch.object(restoring, "logger") as logger:
        flip(run_dir, 1, strategy)
        scramble(model, strategy.rank)
        before = replicas.digests()
        said = []
        with pytest.raises(CheckpointError) as refused:
            replicas.restore(step=1)
        said.append(str(refused.value))
        assert replicas.digests() == before
        restored = replicas.restore()
        fell_back = restored.step == replicas.step == 0 and replicas.digests() == saved
        warned = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
        flip(run_dir, 0, strategy)
        scramble(model, strategy.rank)
        before = replicas.digests()
        with pytest.raises(CheckpointError) as refused:
            replicas.restore()
        said.append(str(refused.value))
        return {
            "said": said,
            "changed": before != replicas.digests(),
            "fell back": fell_back,
            "warned": warned,
        }


@pytest.mark.parametrize("seen_by", ["all workers", "worker 0"])
def test_one_flipped_bit_is_found_by_all_who_go_back_to_a_whole_checkpoint_together(
    pool3: Pool, tmp_path: Path, seen_by: str
) -> None:
    (tmp_path / "a file").touch()
    elsewhere = tmp_path / "run" if seen_by == "all workers" else tmp_path / "a file" / "run"
    results = pool3.run_each(damaged, [(tmp_path / "run",), (elsewhere,), (elsewhere,)])
    for result in results:
        asked_for, none_is_whole = result["said"]
        assert "not those that were written" in asked_for
        assert asked_for.endswith("restore(step=0) is intact.")
        assert "No checkpoint is intact" in none_is_whole
        assert not result["changed"]
        assert result["fell back"]
    (warning,), *others = (result["warned"] for result in results)
    assert warning.startswith("THE CHECKPOINT OF STEP 1 IS DAMAGED; step 0 is restored instead. ")
    assert others == [[], []]


def restored_by(worker: Worker, run_dir: Path, number: int = 1) -> restoring.Restored | None:
    """Only worker 0 sees the run directory; variables are sent in parcels of one."""
    store = CheckpointStore(run_dir if worker.rank == 0 else run_dir / "not" / "here")
    return restoring.Restore(worker.session, worker.state, store).run(number, None, False)


def checkpoint_of_ones(run_dir: Path) -> None:
    ones = {name: np.ones_like(value) for name, value in start_values().items()}
    with Job(1, values=ones) as job:
        worker = job.workers[0]
        training = Training(worker.session, worker.state)
        checkpoints = Checkpoints(worker.session, worker.state, training, CheckpointStore(run_dir), 0)
        worker.hooks.take_snapshot = checkpoints.take_snapshot
        worker.hooks.write_checkpoint = checkpoints.write
        assert job.on_all(lambda _: checkpoints.save_here())[0].result(120) is not None


@pytest.mark.parametrize("problem", ["other values", "nothing"])
def test_a_restore_that_one_worker_cannot_finish_has_changed_nothing_on_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(restoring, "PARCEL_BYTES", 1)
    checkpoint_of_ones(tmp_path)
    with Job(3, begins=False) as job:
        transport, received = job.workers[1].transport, itertools.count(1)
        receive = transport.receive

        def receive_badly(parcel: Any, timeout_secs: float, *look: Any) -> Any:
            values = receive(parcel, timeout_secs, *look)
            if next(received) == 3:
                if problem == "nothing":
                    raise UpdateRefused("The bytes did not arrive")
                values[0].reshape(-1).view(np.uint8)[0] ^= 1
            return values

        monkeypatch.setattr(transport, "receive", receive_badly)
        before = job.values()

        def refused(worker: Worker) -> str:
            with pytest.raises(CheckpointError) as caught:
                restored_by(worker, tmp_path)
            return str(caught.value)

        said = job.on_all(refused)
        assert job.values() == before
        assert all(each.startswith("Worker 1 has not received the checkpoint intact") for each in said)
        job.on_all(lambda worker: restored_by(worker, tmp_path, 2))
        assert job.values() != before
        assert all(np.all(value == 1) for worker in job.workers for value in worker.state.values.values())
        assert job.board.buffers == {}


def test_a_restore_for_which_worker_0_has_no_memory_is_refused_on_all_and_has_changed_nothing(
    tmp_path: Path,
) -> None:
    checkpoint_of_ones(tmp_path)
    with Job(2, begins=False) as job:
        job.board.room = 8
        before = job.values()

        def refused(worker: Worker) -> str:
            with pytest.raises(CheckpointError) as caught:
                restored_by(worker, tmp_path)
            return str(caught.value)

        assert all("Worker 0 could not send the checkpoint" in each for each in job.on_all(refused))
        assert job.values() == before


def restored_for_a_custom_loop(strategy: Any, run_dir: Path) -> Any:
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.training_begins()
        replicas.boundary()
        replicas.save().result(60)
    with replicas_of(model, run_dir=run_dir) as replicas:
        assert replicas.restore().step == 1
        replicas.boundary()
    return strategy.take_start(model)


def test_a_restored_custom_loop_leaves_no_position_for_a_later_fit_of_something_else(
    pool1: Pool, tmp_path: Path
) -> None:
    assert pool1.run(restored_for_a_custom_loop, tmp_path) == [None]
