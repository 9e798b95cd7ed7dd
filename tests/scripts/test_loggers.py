"""Callbacks that report elsewhere: one run of a job, not one for each worker.

With stand-ins that have the names of the real modules; `make test-loggers` has the real packages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from tests.pool import Pool
from tests.scripts.test_callbacks import events, fitted, network
from tests.workers.test_updates import replicas_of


class Tracker(keras.callbacks.Callback):
    """Stands for a callback of a tracker: notes what it is asked to report."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.reported.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.reported.append(f"epoch {epoch}")

    def on_test_end(self, logs: Any = None) -> None:
        self.reported.append("test")


OfMlflow = type("MlflowCallback", (Tracker,), {"__module__": "mlflow.keras.callback"})
OfScript = type("OfScript", (OfMlflow,), {"__module__": "train"})  # type: ignore[valid-type,misc]


class Board(keras.callbacks.TensorBoard):
    """As the subclasses of TensorBoard in other packages."""


def reported(strategy: Any, directory: Path) -> dict[str, Any]:
    model = network(strategy)
    of_mlflow, of_script, mine, made = OfMlflow(), OfScript(), Tracker(), list[Tracker]()

    def make() -> Tracker:
        made.append(Tracker())
        return made[0]

    with replicas_of(model, run_dir=directory / "run") as replicas:
        once = [replicas.once(mine), replicas.once(make)]
        callbacks = [replicas.callback(), of_mlflow, of_script, *once, Board(directory / "board")]
        fitted(model, callbacks, epochs=2)
    hooks = sorted(name for name in vars(of_mlflow) if name.startswith("on_"))
    trackers = {"mlflow": [of_mlflow], "script": [of_script], "once": [mine], "made": made}
    return {
        **{name: [one.reported for one in ones] for name, ones in trackers.items()},
        "left behind": hooks,
        "W&B": os.environ.get("WANDB_MODE") if strategy.rank else None,
        "board": events(directory / "board")["files"],
    }


def test_a_tracker_reports_from_worker_0_only(pool2: Pool, tmp_path: Path) -> None:
    first, second = pool2.run(reported, tmp_path)
    all_of_it = ["begin", "test", "epoch 0", "test", "epoch 1"]
    for name in ("mlflow", "script", "once", "made"):
        assert first[name] == [all_of_it], name
    assert (second["mlflow"], second["once"], second["made"]) == ([[]], [[]], [])
    assert second["script"] == [all_of_it], "a subclass of the script may do more than report"
    assert first["left behind"] == second["left behind"] == [], "the callback can be used again"
    assert second["W&B"] == "disabled"
    assert first["board"] == second["board"] == 3, "one of training, one of validation, one of updates"
