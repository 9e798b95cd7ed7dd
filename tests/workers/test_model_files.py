"""The model in other tools' files, and a custom loop that resumes in the middle of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import CLASSES, arrays, perceptron
from tests.workers.test_updates import replicas_of

FILES = ["model.keras", "model.weights.h5", "tensorflow/checkpoint"]


@pytest.mark.parametrize("name", FILES)
@equal_on_all("pool2")
def test_a_model_comes_back_from_the_file_that_one_worker_wrote(
    strategy: Any, tmp_path: Path, name: str
) -> dict[str, str]:
    """Exports, changes every replica, imports; the digests of the weights before and after are the same."""
    model = perceptron(strategy)
    weights = [variable.path for variable in model.variables]
    with replicas_of(model) as replicas:
        model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])
        before = replicas.digests(weights)
        replicas.export(tmp_path / name)
        if strategy.rank == 1:
            replicas.propose(Update().add("dense_1/bias", np.ones(CLASSES, np.float32)))
        replicas.training_ends()
        assert replicas.digests(weights) != before
        assert replicas.import_weights(tmp_path / name) is not None
        assert replicas.digests(weights) == before
        assert replicas.import_weights(tmp_path / name) is None  # nothing differs any more
    return before


def nothing_there(strategy: Any, directory: Path) -> None:
    with replicas_of(perceptron(strategy)) as replicas:
        for name in FILES:
            with pytest.raises(replicast.CheckpointError, match="Worker 0 could not read"):
                replicas.import_weights(directory / name)


def test_a_file_that_is_not_there_is_told_to_every_worker(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(nothing_there, tmp_path)


def batches_used(strategy: Any, directory: Path, attempt: int, stop_after: int) -> list[int]:
    """A custom loop over a shuffled dataset of 5 batches, three epochs; a checkpoint after each step."""
    model = perceptron(strategy)
    data = tf.data.Dataset.range(5).shuffle(5, seed=7)
    used = []
    with replicas_of(model, run_dir=directory, durability="disk") as replicas:
        restored = replicas.restore()
        assert (restored is not None) == (attempt > 0)
        for _ in range(replicas.step // 5, 3):
            for batch in replicas.resume(data):
                used.append(int(batch))
                replicas.boundary()
                replicas.save().result(60.0)
                if replicas.step == stop_after:
                    return used
    return used


def test_a_custom_loop_continues_with_the_batch_after_the_last_one(pool1: Pool, tmp_path: Path) -> None:
    (whole,) = pool1.run(batches_used, tmp_path / "undisturbed", 0, -1)
    assert len(whole) == 15
    assert [sorted(whole[first : first + 5]) for first in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    (first,) = pool1.run(batches_used, tmp_path / "stopped", 0, 7)
    pool1.kill()
    (second,) = pool1.run(batches_used, tmp_path / "stopped", 1, -1)
    assert first + second == whole
