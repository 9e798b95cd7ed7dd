"""Sums over the workers in graphs: through shared memory on one host, and with TensorFlow's collectives."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from replicast.coordination import MemoryCoordination
from replicast.lifetime import Lifetime
from replicast.training.collectives import sum_through_shared_memory
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.pool.worker import start_afresh
from tests.workers.recipes import trained
from tests.workers.test_training import assert_replicas_equal, assert_same_numbers

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64", "complex64")


def how(strategy: Any) -> str:
    return str(strategy.all_reduce)


def test_workers_of_one_host_sum_through_shared_memory(pool2: Pool, pool3: Pool) -> None:
    assert pool2.run(how) == ["shared memory"] * 2
    assert pool3.run(how) == ["shared memory"] * 3


def test_accelerators_use_tensorflows_collectives_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "replicast")
    extended: Any = SimpleNamespace(_local_device_type="GPU")
    lifetime = Lifetime(MemoryCoordination(MemoryCoordination.Store()), 0, 1, lambda: 0)
    assert sum_through_shared_memory(extended, lifetime, wanted=True) is None
    why = "worker 0 computes on an accelerator"
    text = f"TensorFlow's collectives sum the gradients, not shared memory: {why}"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("DEBUG", text)]


def every_kind(strategy: Any) -> dict[str, Any]:
    """All that a custom step may sum, with sums in branches and loops and independent ones between them."""
    import tensorflow as tf

    def on_replica(rank: tf.Tensor) -> dict[str, Any]:
        context = tf.distribute.get_replica_context()
        add = lambda value: context.all_reduce(tf.distribute.ReduceOp.SUM, value)  # noqa: E731
        one = tf.cast(rank + 1, tf.float32)
        slices = tf.IndexedSlices(tf.fill([rank + 1, 2], one), tf.range(rank + 1), tf.constant([9, 2]))
        values = [tf.cast(tf.fill([3], one), dtype) for dtype in DTYPES]
        total = tf.zeros(())
        for _ in tf.range(3):
            total += add(one)
        return {
            "alone": add(one * 10),
            "mean": context.all_reduce(tf.distribute.ReduceOp.MEAN, one),
            "branch": tf.cond(tf.reduce_sum(one) > 0, lambda: add(one * 100), lambda: one),
            "loop": total,
            "dtypes": [tf.cast(v, tf.complex64) for v in add(values)],
            "slices": tf.convert_to_tensor(add(slices)),
            "empty": add(tf.zeros([0, 3])),
            "gathered": context.all_gather(tf.fill([rank + 1, 2], one), axis=0),
            "large": tf.reduce_sum(add(tf.fill([700, 1000], one))),
        }

    @tf.function
    def step(rank: tf.Tensor) -> Any:
        results = strategy.run(on_replica, args=(rank,))
        reduced = strategy.reduce("SUM", results["alone"], axis=None)
        return results, reduced

    step(tf.constant(strategy.rank))
    results, reduced = step(tf.constant(strategy.rank))
    return {
        "reduced": reduced.numpy(),
        **{k: tf.nest.map_structure(np.asarray, v) for k, v in results.items()},
    }


def test_every_kind_of_sum_in_a_step_is_that_of_all_workers(pool3: Pool) -> None:
    results = pool3.run(every_kind)
    assert_equal_on_all(results)
    found = results[0]
    assert found["alone"] == 60
    assert found["reduced"] == 180
    assert found["mean"] == 2
    assert found["branch"] == 600
    assert found["loop"] == 18
    assert [value.tolist() for value in found["dtypes"]] == [[6, 6, 6]] * len(DTYPES)
    assert found["slices"].tolist() == [[6, 6], [5, 5], [3, 3], *[[0, 0]] * 6]
    assert found["empty"].shape == (0, 3)
    assert found["gathered"].tolist() == [[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]
    assert found["large"] == 700 * 1000 * 6


def trained_by_tensorflow(_: Any, names: tuple[str, ...]) -> list[Any]:
    import replicast

    strategy = replicast.Strategy(all_reduce="tensorflow")
    assert strategy.all_reduce == "tensorflow"
    results = []
    for name in names:
        start_afresh()
        results.append(trained(strategy, name))
    return results


def assert_same_by_tensorflow(pool2: Pool, names: tuple[str, ...], directory: Path) -> None:
    with Pool(2, directory, strategy=False) as pool:
        by_tensorflow = pool.run(trained_by_tensorflow, names)
    for place, name in enumerate(names):
        assert_replicas_equal([results[place] for results in by_tensorflow])
        assert_same_numbers(by_tensorflow[0][place], pool2.run(trained, name)[0])


def test_tensorflows_collectives_train_to_the_same_numbers(pool2: Pool, tmp_path: Path) -> None:
    # Its batches do not divide, and it has a table and dense weights.
    assert_same_by_tensorflow(pool2, ("embedding",), tmp_path)
