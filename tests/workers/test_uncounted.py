"""A `fit` without `replicas.callback()`: a warning says so, and no step is made up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras

import replicast
from replicast.storage.run_files import read_worker_notes
from tests.pool import Pool
from tests.scripts.compare import heard
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import adam, replicas_of

DEADLINE_SECS = 120.0
EPOCHS = 2


class Propose(keras.callbacks.Callback):
    """A callback of the script's own: worker 1 proposes, and looks at what others can see of it."""

    def __init__(self, replicas: replicast.Replicas, run_dir: Path) -> None:
        super().__init__()
        self.replicas, self.run_dir = replicas, run_dir
        self.ticket: Any = None
        self.steps = 0
        self.seen: set[str] = set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 2:
            if self.replicas.rank == 1:
                self.ticket = self.replicas.propose(replicast.Update().scale("dense/kernel", 0.5))
            ends = time.monotonic() + DEADLINE_SECS
            while not any(self.seen) and time.monotonic() < ends:
                self.seen = {note.waiting_for for note in read_worker_notes(self.run_dir)}
                time.sleep(0.05)


def trained_without(strategy: Any, run_dir: Path) -> dict[str, Any]:
    with heard() as said, replicas_of(perceptron(strategy, adam), run_dir=run_dir) as replicas:
        propose = Propose(replicas, run_dir)
        x, y = arrays()
        for _ in range(2):
            replicas.model.fit(x, y, batch_size=30, epochs=EPOCHS, verbose=0, callbacks=[propose])
        replicas.sync()
        step = replicas.step
        replicas.model.fit(x, y, batch_size=30, verbose=0, callbacks=[replicas.callback()])
        receipt = None if propose.ticket is None else propose.ticket.result(DEADLINE_SECS)
    return {
        "steps": propose.steps,
        "step": step,
        "receipt": None if receipt is None else receipt.step,
        "seen": propose.seen,
        "said": [each for each in said if "was not given replicas.callback()" in each],
    }


def test_a_fit_without_the_callback_is_said_once_and_its_steps_are_counted(
    pool2: Pool, tmp_path: Path
) -> None:
    first, second = pool2.run(trained_without, tmp_path)
    for each in (first, second):
        assert len(each["said"]) == 1
        assert "a boundary: its fit has no replicas.callback()" in each["seen"]
        assert each["step"] == each["steps"]
    assert second["receipt"] == second["steps"]
