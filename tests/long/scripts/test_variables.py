"""More of reading and assigning the variables of a job in a script."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.test_variables import counted_by_custom_and_keras_steps, metric_of_custom_and_keras_steps


def test_custom_steps_and_eager_keras_steps_count_in_the_same_metric(pool2: Pool) -> None:
    assert pool2.run(metric_of_custom_and_keras_steps, True) == [counted_by_custom_and_keras_steps()] * 2


def test_custom_steps_and_keras_steps_of_three_workers_count_in_the_same_metric(pool3: Pool) -> None:
    found = pool3.run(metric_of_custom_and_keras_steps)
    assert_equal_on_all(found)
    assert abs(found[0]["cached custom step on what fit counted"] - 12) < 1e-5
    assert abs(found[0]["cached after it"] - 18) < 1e-5


def read_in_custom_steps(strategy: Any) -> Any:
    """Counts in every dtype, assigned between steps, read and added to in eager and traced custom steps."""
    found = []
    for dtype in (tf.float32, tf.float64, tf.int32, tf.int64):
        with strategy.scope():
            count = tf.Variable(
                tf.constant(0, dtype),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def add(count: Any = count, dtype: Any = dtype) -> tf.Tensor:
            count.assign_add(tf.constant(1, dtype))
            return count.read_value()

        traced = tf.function(lambda add=add: strategy.run(add))
        for custom in (traced, lambda add=add: strategy.run(add), traced):
            count.assign(tf.constant(7, dtype))
            found.append(float(count))
            parts = custom()
            found.append(float(strategy.reduce("SUM", parts, axis=None)))
            found.append(float(strategy.reduce("SUM", count, axis=None)))
            count.assign_sub(tf.constant(2, dtype))
            custom()
            found.append(float(count))
    return found


def test_a_custom_step_reads_and_adds_to_its_part_of_an_assigned_total(pool2: Pool) -> None:
    assert pool2.run(read_in_custom_steps) == [[7.0, 9.0, 9.0, 9.0] * 12] * 2


def checkpoint_of_a_metric(strategy: Any, directory: str) -> Any:
    with strategy.scope():
        metric = keras.metrics.Sum()
    custom = tf.function(lambda: strategy.run(lambda: metric.update_state(1.0 + strategy.rank)))
    saved = tf.train.Checkpoint(total=metric.total.value)
    found = []
    for number in range(2):
        custom()
        path = saved.write(f"{directory}/{strategy.rank}-{number}")
        found.append([name for name, _ in tf.train.list_variables(path) if "whole" in name])
        metric.reset_state()
        saved.read(path)
        found.append(float(metric.result()))
        custom()
        found.append(float(metric.result()))
    return found


def test_a_checkpoint_keeps_the_total_of_a_metric(pool2: Pool, tmp_path: Any) -> None:
    found = pool2.run(checkpoint_of_a_metric, str(tmp_path))
    assert found == [[[], 3.0, 6.0, [], 9.0, 12.0]] * 2
