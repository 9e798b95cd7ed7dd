"""What cannot work is refused immediately on every worker, with an alternative."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

import replicast
from replicast.training import job_of
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


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.only = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.only(inputs)


def restore_before_there_are_variables(strategy: Any, run_dir: Path) -> tuple[str, bool, int]:
    """Keras' own `build` says that the model is built, and makes no variables."""
    x, y = arrays()
    with strategy.scope():
        model = Subclassed()
        model.compile("sgd", "mse")
        model.build(x.shape)
    replicas = replicast.Replicas(model, run_dir=run_dir)
    with pytest.raises(replicast.NotSupported) as refusal:
        replicas.restore()
    replicas.close()
    with strategy.scope():
        model = Subclassed()
        model.compile("sgd", "mse")
        model(x[:2])
    replicas = replicast.Replicas(model, run_dir=run_dir)
    restored = replicas.restore()
    model.fit(x, y, verbose=0, callbacks=[replicas.callback()])
    replicas.close()
    return str(refusal.value), restored is None, len(model.weights)


def test_a_model_that_is_built_without_variables_is_told_how_to_make_them(
    pool2: Pool, tmp_path: Path
) -> None:
    for said, is_first, count in pool2.run(restore_before_there_are_variables, tmp_path):
        assert "Call model(sample_batch) inside strategy.scope()" in said
        assert (is_first, count) == (True, 2)


def begin_in_another_directory(strategy: Any, run_dir: Path) -> tuple[str, list[bool]]:
    model, other = perceptron(strategy), run_dir / "other"
    launched = {"REPLICAST_LAUNCHED": "1", "REPLICAST_RUN_DIR": str(run_dir / "run")}
    with (
        mock.patch.dict(os.environ, launched),
        mock.patch.object(strategy, "next_name", return_value="replicas-1"),
    ):
        with pytest.raises(replicast.LaunchRefused) as refusal:
            replicast.Replicas(model, run_dir=other)
        made = [other.exists()]
        (run_dir / "link").symlink_to(run_dir)
        replicast.Replicas(model, run_dir=run_dir / "link" / "run").close()
    return str(refusal.value), [*made, (run_dir / "run").exists()]


def test_a_script_that_chooses_another_run_directory_than_its_launcher_is_refused_with_both(
    pool1: Pool, tmp_path: Path
) -> None:
    ((said, made),) = pool1.run(begin_in_another_directory, tmp_path)
    assert said == (
        f"Two run directories: `replicast run` uses {tmp_path}/run, and the script {tmp_path}/other. "
        f"Leave out run_dir in Replicas(...), or start with --run-dir {tmp_path}/other."
    )
    assert made == [False, True], "nothing is made there; the same directory by another name is used"


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
    "kind",
    [
        tf.distribute.ParameterServerStrategy,
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    ],
)
def test_a_strategy_that_cannot_be_served_is_refused(kind: Any) -> None:
    with pytest.raises(replicast.NotSupported, match=f"A {kind.__name__} is .*MultiWorkerMirrored"):
        job_of(kind.__new__(kind))


@pytest.mark.parametrize(
    "make", [tf.distribute.get_strategy, lambda: tf.distribute.MirroredStrategy(["CPU:0"])]
)
def test_a_strategy_of_one_process_is_refused_in_a_job_of_several(make: Any) -> None:
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    environ = mock.patch.dict("os.environ", TF_CONFIG=json.dumps(cluster))
    with environ, pytest.raises(replicast.NotSupported, match="in a job of 2 workers"):
        job_of(make())


def test_replicas_of_something_without_names_is_refused() -> None:
    with pytest.raises(replicast.NotSupported, match="Replicas of a list"):
        replicast.Replicas([tf.Variable(1.0)])


@pytest.mark.parametrize("kind", ["empty", "nested", "number", "key"])
def test_a_dict_that_does_not_map_names_to_variables_is_refused(kind: str) -> None:
    variable = tf.Variable(1.0)
    dicts: dict[str, Any] = {
        "empty": {},
        "nested": {"net": {"w": variable}},
        "number": {"w": 1.0},
        "key": {1: variable},
    }
    with pytest.raises(replicast.NotSupported, match="a dict that does not map names to variables"):
        replicast.Replicas(dicts[kind])
