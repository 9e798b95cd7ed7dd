"""W&B and MLflow themselves, offline: a stock script on two workers makes one run. `make test-loggers`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("wandb") is None,
    reason="needs W&B and MLflow in an environment of their own: make test-loggers",
)

SCRIPT = """
import os, sys
import numpy as np, keras, replicast

strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
replicas = replicast.Replicas(model)
x, y = np.ones((32, 6), "float32"), np.ones((32, 1), "float32")


def fit(*callbacks):
    model.fit(x, y, epochs=2, batch_size=8, verbose=0, callbacks=[replicas.callback(), *callbacks])


def make():
    mlflow.set_tracking_uri("sqlite:///named.db")
    mlflow.set_experiment("digits")
    mlflow.start_run()
    return mlflow.keras.MlflowCallback()


match sys.argv[1]:
    case "wandb":
        import wandb
        from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

        wandb.init(project="digits")
        fit(WandbMetricsLogger(), WandbModelCheckpoint("saved.keras"))
        wandb.finish()
    case "mlflow":
        import mlflow

        mlflow.set_experiment("digits")
        with mlflow.start_run():
            fit(mlflow.keras.MlflowCallback())
    case "autolog":
        import mlflow

        mlflow.set_experiment("digits")
        mlflow.autolog()
        fit()
    case "once":
        import mlflow

        fit(replicas.once(make))
"""


def train(directory: Path, how: str) -> None:
    (directory / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "replicast", "run", "-n", "2", "train.py", how],
        cwd=directory,
        env={**os.environ, "WANDB_MODE": "offline", "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(directory.glob("replicast-mlflow-*")), "the stores of the other workers are removed"


def test_wandb_has_one_run_of_a_job(tmp_path: Path) -> None:
    train(tmp_path, "wandb")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert (tmp_path / "saved.keras").exists()


@pytest.mark.parametrize("how", ["mlflow", "autolog", "once"])
def test_mlflow_has_one_run_of_a_job(tmp_path: Path, how: str) -> None:
    import mlflow

    train(tmp_path, how)
    store = "named" if how == "once" else "mlflow"
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/{store}.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "loss")) >= 2
    assert run.info.status == "FINISHED"
