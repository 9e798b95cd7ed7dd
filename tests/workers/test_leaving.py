"""SIGTERM in a script with several models, or with a training that is not in the main thread."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest

import replicast
from replicast.config import TOLD_TO_END
from replicast.storage.checkpoints import CheckpointStore
from tests.pool import Pool
from tests.scripts.compare import heard
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import adam

LONG = 400
"""So many epochs that no training comes to its end before a signal has ended it."""


class Terminate(keras.callbacks.Callback):
    """Worker 1 is told to end in the first epoch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.rank == 1 and epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(replicas: replicast.Replicas, epochs: int, *callbacks: Any) -> None:
    x, y = arrays()
    replicas.model.fit(
        x, y, batch_size=30, epochs=epochs, verbose=0, callbacks=[replicas.callback(), *callbacks]
    )


def saved(run_dir: Path) -> list[int]:
    return [manifest.step for manifest in CheckpointStore(run_dir).manifests()]


def told_while_the_second_model_trains(strategy: Any, directory: Path, close_first: bool) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    both = []
    for name in ("first", "second"):
        both.append(replicast.Replicas(perceptron(strategy, adam), run_dir=directory / name))
        if name == "first":
            train(both[0], 1)
            if close_first:
                both[0].close()
    with pytest.raises(SystemExit) as ended:
        train(both[1], LONG, Terminate(strategy.rank))
    steps = both[0].step, both[1].step
    for replicas in both:
        replicas.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = {name: saved(directory / name) for name in ("first", "second")}
    return {"code": ended.value.code, "steps": steps, **found}


@pytest.mark.parametrize("close_first", [False, True])
def test_sigterm_saves_every_open_model_of_a_script(pool2: Pool, tmp_path: Path, close_first: bool) -> None:
    for told in pool2.run(told_while_the_second_model_trains, tmp_path, close_first):
        assert told["code"] == TOLD_TO_END
        assert told["first"] == ([] if close_first else [told["steps"][0]])
        assert told["second"] == [told["steps"][1]]


def no_room_for_the_first(strategy: Any, directory: Path) -> list[str]:
    """What is said when the disk is full for the model that is not trained just now."""
    written = CheckpointStore.write

    def fails(store: CheckpointStore, *given: Any) -> Any:
        if store.directory.as_path().is_relative_to(directory / "first"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(store, *given)

    with mock.patch.object(CheckpointStore, "write", fails), heard() as said:
        told_while_the_second_model_trains(strategy, directory, close_first=False)
    return [each for each in said if "was told to exit" in each]


def test_sigterm_says_on_every_worker_which_model_could_not_be_saved(pool2: Pool, tmp_path: Path) -> None:
    for second, first in pool2.run(no_room_for_the_first, tmp_path):
        assert "was told to exit: the state is saved" in second
        assert "was told to exit: the state is not saved. " in first
        assert "No space left on device" in first
    assert saved(tmp_path / "first") == []


def leaves_in_a_thread(strategy: Any, directory: Path) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found: dict[str, Any] = {}

    class Leave(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if strategy.rank == 1 and epoch == 0:
                found["replicas"].leave()

    def script() -> None:
        replicas = found["replicas"] = replicast.Replicas(perceptron(strategy, adam), run_dir=directory)
        with pytest.raises(SystemExit) as ended:
            train(replicas, LONG, Leave())
        found["code"] = ended.value.code
        replicas.close()

    with heard() as said:
        thread = threading.Thread(target=script)
        thread.start()
        thread.join()
    return {"code": found.get("code"), "said": said, "saved": saved(directory)}


def test_a_training_outside_the_main_thread_is_told_how_to_leave_and_can(pool2: Pool, tmp_path: Path) -> None:
    for left in pool2.run(leaves_in_a_thread, tmp_path):
        assert left["code"] == TOLD_TO_END
        assert len([each for each in left["said"] if "Call replicas.leave()" in each]) == 1
        assert len(left["saved"]) == 1
