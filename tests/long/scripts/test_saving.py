"""More ways to save: by one worker, by some, in a larger script, with errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from tests.pool import Pool, WorkerFailed
from tests.pool.checks import assert_equal_on_all
from tests.scripts.test_saving import data, saved_by_one_worker_in_the_scope


@pytest.mark.parametrize("rank", [1, 2])
def test_any_worker_alone_may_save_in_the_scope(pool3: Pool, tmp_path: Path, rank: int) -> None:
    assert_equal_on_all(pool3.run(saved_by_one_worker_in_the_scope, tmp_path, rank))
    assert {file.name for file in tmp_path.iterdir()} == {"by function.keras", "by method.keras"}


class CreatesAVariable(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x

    def save_own_variables(self, store: Any) -> None:
        keras.Variable(0.0)  # a transfer in the scope, which the other workers do not join


def saved_with_a_transfer(strategy: Any, directory: Path) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), CreatesAVariable()])
        model.compile("sgd", "mse")
        model.save_weights(directory / "model.weights.h5")
        model.fit(*data(), batch_size=16, verbose=0)


def test_a_save_that_needs_the_other_workers_fails_at_once_on_all(pool2: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as failed:
        pool2.run(saved_with_a_transfer, tmp_path, deadline_secs=60.0)
    assert "started a transfer to all workers while it alone was writing" in str(failed.value)
    assert "was still running" not in str(failed.value)
