"""What cannot work is refused immediately on every worker, with an alternative."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import replicast
from tests.pool import Pool
from tests.unit.test_liveness import running_elsewhere
from tests.workers.recipes import arrays, perceptron


def jit_compiled(strategy: Any) -> None:
    perceptron(strategy, jit_compile=True).fit(*arrays(), verbose=0)


def jit_compiled_train_on_batch(strategy: Any) -> None:
    perceptron(strategy, jit_compile=True).train_on_batch(*arrays())


def message_of_refusal(strategy: Any, name: str) -> str:
    with pytest.raises(replicast.NotSupported) as refusal:
        globals()[name](strategy)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit_compiled", "jit_compile=True is not supported here"),
        ("jit_compiled_train_on_batch", "Compile the model with jit_compile=False"),
    ],
)
def test_what_cannot_work_is_refused_on_every_worker(name: str, expected: str, pool2: Pool) -> None:
    messages = pool2.run(message_of_refusal, name)
    assert all(expected in message for message in messages), messages


def begin_beside_another_host(strategy: Any, run_dir: Path) -> list[str]:
    model = perceptron(strategy)
    with running_elsewhere(run_dir):
        with pytest.raises(replicast.ClusterError) as refusal:
            replicast.Replicas(model, run_dir=run_dir)
        untouched = [path.name for path in run_dir.glob("groups/*")]
        with mock.patch.dict(os.environ, {"REPLICAST_TAKE_OVER": "1"}):
            replicast.Replicas(model, run_dir=run_dir).close()
    return [str(refusal.value), *untouched]


def test_replicas_do_not_take_over_the_directory_of_a_job_on_another_host_unless_they_are_told_to(
    pool1: Pool, tmp_path: Path
) -> None:
    ((said, *untouched),) = pool1.run(begin_beside_another_host, tmp_path)
    assert "worker 0, process 7 on host 'there', has written a note" in said
    assert untouched == ["000001"]
    assert sorted(path.name for path in tmp_path.glob("groups/*")) == ["000001", "000002"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (
            mock.Mock(spec=tf.distribute.MultiWorkerMirroredStrategy),
            "Replicas needs a strategy whose workers can meet between two steps. Write 'strategy = replic",
        ),
        (tf.distribute.get_strategy(), "created outside the scope of a replicast.Strategy"),
    ],
    ids=["stock", "none"],
)
def test_replicas_of_a_model_of_another_strategy_says_what_is_the_case(strategy: Any, expected: str) -> None:
    with pytest.raises(replicast.NotSupported, match=expected):
        replicast.Replicas(SimpleNamespace(distribute_strategy=strategy))
