"""The evaluator in `TF_CONFIG`: follows a job of two workers, and measures each of its checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from replicast.client import connect
from replicast.errors import CheckpointError, JobFailed
from replicast.replicas.replicas import Follower
from replicast.storage.checkpoints import CheckpointStore, Manifest
from replicast.storage.run_files import EVALUATIONS, measured_in
from replicast.training.tensorflow_state import Source, TensorFlowState
from tests.pool import Pool
from tests.threads import eventually
from tests.unit.played_job import output_of

SCRIPT = """
import json, time
from pathlib import Path
import keras, numpy as np, replicast

strategy = replicast.Strategy()
keras.utils.set_random_seed(0)
x = np.random.normal(size=(64, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse", metrics=["mae"])
replicas = replicast.Replicas(model)


def wait(batch, logs):
    # On both workers, between two steps, when two checkpoints are written.
    while int(model.optimizer.iterations) == 9 and not Path("go").exists():
        time.sleep(0.05)


if strategy.is_evaluator:
    try:
        model.fit(x, y, verbose=0, callbacks=[replicas.callback()])
    except replicast.NotSupported as error:
        print(error)
    found = replicas.follow(lambda: model.evaluate(x, y, verbose=0, return_dict=True))
    Path("followed").write_text(json.dumps(sorted(found)))
else:
    waits = keras.callbacks.LambdaCallback(on_train_batch_begin=wait)
    callbacks = [replicas.callback(save_every="epoch", keep=10), waits]
    how = {"epochs": 4, "batch_size": 16, "verbose": 0, "validation_batch_size": 64}
    history = model.fit(x, y, **how, validation_data=(x, y), callbacks=callbacks)
    if replicas.rank == 0:
        Path("history").write_text(json.dumps(history.history))
"""
EVALUATOR = {"cluster": {"worker": ["host:1", "host:2"]}, "task": {"type": "evaluator", "index": 0}}


@contextmanager
def started(directory: Path, name: str, *options: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    (directory / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "replicast", "run", "--run-dir", "run", *options, "train.py"]
    kept = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    with (directory / name).open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=kept | environ, stdout=log, stderr=subprocess.STDOUT
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_an_evaluator_measures_each_checkpoint_of_a_job_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    evaluator = {"TF_CONFIG": json.dumps(EVALUATOR)}
    with started(tmp_path, "job.log", "-n", "2") as job:
        with started(tmp_path, "first.log", **evaluator) as first:
            eventually(lambda: len(list(measured_in(run, EVALUATIONS))) == 2)
            first.kill()
        assert first.wait() == -9
        (tmp_path / "go").touch()
        with started(tmp_path, "second.log", **evaluator) as second:
            assert job.wait(120) == 0, (tmp_path / "job.log").read_text()
            assert second.wait(120) == 0, (tmp_path / "second.log").read_text()
    said = (tmp_path / "second.log").read_text()
    assert "replicas.follow(evaluate)" in said, "fit in an evaluator is refused, and says what to do"
    assert json.loads((tmp_path / "followed").read_text()) == [12, 16], "not what the first one had measured"
    found = list(measured_in(run, EVALUATIONS))[::-1]
    assert [one["step"] for one in found] == [4, 8, 12, 16]
    history = json.loads((tmp_path / "history").read_text())
    for name in ("loss", "mae"):
        expected = history[f"val_{name}"]
        np.testing.assert_allclose([one["values"][name] for one in found], expected, rtol=1e-5)
    assert connect(str(run)).status().evaluations[-1]["step"] == 16
    monkeypatch.chdir(tmp_path)
    assert "(the evaluator, step 16, saved" in output_of(0, "status", "run")


def model_of(units: int) -> keras.Model:
    with keras.name_scope(""):
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, name="out")])


def followed(_: None, directory: Path) -> dict[str, Any]:
    """Checkpoints of a job that has ended, one of them damaged; then a model of another shape, and no job."""
    model = model_of(2)
    state, store = TensorFlowState(*Source(model).variables()), CheckpointStore(directory / "run")
    store.directory.as_path().mkdir(parents=True)
    values = state.read([one.name for one in state.schema])
    for step in (3, 5):
        moved = {name: value + step for name, value in values.items()}
        draft = Manifest(
            step=step, epoch=0, batch=step, created_at=step, workers=1, attempt=0, schema=state.schema
        )
        store.write(draft, moved)
    file = (store.path(3) / "state.safetensors").as_path()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    said: dict[str, Any] = {}
    follow = Follower(Source(model), directory / "run").run
    said["found"] = follow(lambda: {"bias": float(np.sum(model.get_weights()[1]))}, 0.0)
    said["again"] = problem(lambda: follow(dict, 0.0))
    other = Follower(Source(model_of(4)), directory / "run").run
    (directory / "run" / EVALUATIONS).unlink()
    said["other model"] = problem(lambda: other(dict, 0.0))
    said["no metrics"] = problem(lambda: follow(lambda: 1.0, 0.0))
    return said


def problem(act: Any) -> str:
    with pytest.raises((CheckpointError, JobFailed, TypeError)) as caught:
        act()
    return str(caught.value)


def test_an_evaluator_leaves_out_what_is_damaged_and_names_what_does_not_fit(
    plain: Pool, tmp_path: Path
) -> None:
    (said,) = plain.run(followed, tmp_path)
    assert said["found"] == {5: {"bias": 10.0}}, "the checkpoint of step 3 has a flipped bit"
    assert "has waited 0 s" in said["again"]
    assert "of another model" in said["other model"]
    assert "out/kernel" in said["other model"]
    assert "return_dict=True" in said["no metrics"]
