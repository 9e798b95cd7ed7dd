"""More ways for a job to end than in tests/faults, and the same ones on the other worker."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults import test_endings as endings
from tests.faults.test_endings import HEAD, run
from tests.faults.test_updates import STAGED, start
from tests.jobs import DEADLINE_SECS, finish


@pytest.mark.parametrize("failing", [0, 1])
def test_the_worker_that_raised_is_named_and_all_end(tmp_path: Path, failing: int) -> None:
    code, said, logs = run(
        tmp_path,
        f"""
        class Fault(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3 and rank == {failing}:
                    raise ValueError("no such column")
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[Fault()])
        """,
    )
    assert code == 1
    assert f"worker {failing}" in said.replace("\n", " ")
    assert "no such column" in said
    assert "ValueError: no such column" in logs[failing]
    assert f"worker {failing} failed first: ValueError: no such column" in logs[1 - failing]


def test_worker_1_that_has_fewer_batches_ends_all_with_the_reason(tmp_path: Path) -> None:
    endings.test_workers_with_different_numbers_of_batches_end_with_the_reason(tmp_path, 1)


def test_a_script_that_ends_early_on_all_workers_ends_with_0(tmp_path: Path) -> None:
    code, said, _ = run(tmp_path, "model.fit(x, y, verbose=0); sys.exit()")
    assert code == 0, said


def test_a_model_that_was_made_outside_the_scope_does_not_end_as_if_all_was_well(tmp_path: Path) -> None:
    outside = HEAD.replace("with strategy.scope():", "if True:")
    code, _, logs = run(tmp_path, "model.fit(x, y, verbose=0)", head=outside)
    assert code == 1
    assert all("Build and compile the model inside 'with strategy.scope():'" in log for log in logs)


def test_a_worker_that_leaves_before_the_model_is_made_is_named_with_its_exit_code(tmp_path: Path) -> None:
    leaves = HEAD.replace("rank = strategy.rank", "rank = strategy.rank\nif rank == 1: sys.exit(3)")
    code, said, logs = run(tmp_path, "", head=leaves)
    assert code == 3
    assert "worker 1 failed first: exit code 3" in said
    assert "worker 1 reached the end of its script while worker 0 is still training" in logs[0]


def test_a_callback_that_stops_one_worker_only_ends_with_the_reason(tmp_path: Path) -> None:
    code, _, logs = run(
        tmp_path,
        """
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == 2 and rank == 1
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Stop()])
        """,
    )
    assert code != 0
    assert "worker 1 reached the end of its data, or left its loop" in logs[0] or (
        "worker 1 reached the end of its script" in logs[0]
    )


def test_ctrl_c_while_an_update_is_staged_ends_all_and_leaves_no_memory_behind(tmp_path: Path) -> None:
    job = start(tmp_path, STAGED.format(author=1, then="time.sleep(600)"))
    ends = time.monotonic() + DEADLINE_SECS
    while not (tmp_path / "staged").exists() and job.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    code, said = finish(job)
    assert (tmp_path / "staged").exists(), said
    assert code == 130, said
    assert not list((tmp_path / "shm").iterdir())


@pytest.mark.parametrize(("leaves", "code"), [("sys.exit(3)", 3), ("sys.exit(0)", 75)])
def test_a_worker_that_leaves_between_two_trainings_ends_the_others_with_the_reason(
    tmp_path: Path, leaves: str, code: int
) -> None:
    code, said, logs = run(
        tmp_path,
        f"""
        replicas = replicast.Replicas(model)
        model.fit(x, y, verbose=0, callbacks=[replicas.callback()])
        if rank == 1:
            {leaves}
        model.fit(x, y, verbose=0, callbacks=[replicas.callback()])
        """,
    )
    assert code == code, said
    assert "worker 1 reached the end of its script" in logs[0]


def test_sigterm_after_the_start_ends_a_worker_without_replicas(tmp_path: Path) -> None:
    code, said, logs = run(
        tmp_path,
        """
        import os, signal
        print("started", flush=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
        model.fit(x, y, verbose=0)
        """,
    )
    assert code == 143, said
    assert "started" in logs[1]
    assert "still here" not in logs[1]


def test_sigterm_before_the_first_training_ends_all(tmp_path: Path) -> None:
    code, said, logs = run(
        tmp_path,
        """
        import os, signal, time
        replicas = replicast.Replicas(model)
        replicas.restore()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        model.fit(x, y, verbose=0, callbacks=[replicas.callback()])
        """,
    )
    assert code == 143, said
    assert "this worker was told to exit outside of a training: nothing is saved" in logs[1]
