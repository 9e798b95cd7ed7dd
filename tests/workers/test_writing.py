"""Files that every worker would write are written by worker 0, and are complete when the others continue."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.scripts.files import files_opened_to_write
from tests.workers.recipes import arrays, perceptron


def trained_with(
    strategy: Any, directory: Path, callbacks: list[Any], **options: Any
) -> tuple[Any, set[str]]:
    written = files_opened_to_write(directory)
    model = perceptron(strategy)
    model.fit(*arrays(), batch_size=30, epochs=3, verbose=0, callbacks=callbacks, **options)
    return model, written


def saved_where_it_cannot_be(strategy: Any, directory: Path) -> str:
    model = perceptron(strategy)
    model.fit(*arrays(), verbose=0)
    with pytest.raises(FileNotFoundError) as error:
        model.save(directory / "no such folder" / "model.keras")
    assert error.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="end in"):
        model.save_weights(directory / "no weights")
    model.fit(*arrays(), verbose=0)
    return str(error.value)


def test_a_save_that_fails_can_be_caught_on_all_workers(pool2: Pool, tmp_path: Path) -> None:
    _, of_second = pool2.run(saved_where_it_cannot_be, tmp_path)
    assert "worker 0 could not write" in of_second
    assert "no such folder" in of_second


class StopAfterTwo(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise InterruptedError("as if the job was ended here")


def interrupted_and_resumed(strategy: Any, directory: Path) -> dict[str, Any]:
    backup = keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=True)
    with pytest.raises(InterruptedError):
        trained_with(strategy, directory, [backup, StopAfterTwo()])
    model = perceptron(strategy)
    again = keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=True)
    history = model.fit(*arrays(), batch_size=30, epochs=3, verbose=0, callbacks=[again])
    return {
        "epochs": history.epoch,
        "digest": digest(model),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def test_backup_and_restore_continues_where_it_was_on_every_worker(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(interrupted_and_resumed, tmp_path)
    assert_equal_on_all(results)
    assert results[0]["iterations"] == 15
    assert results[0]["epochs"] == [2]
    assert not (tmp_path / "backup").exists()
