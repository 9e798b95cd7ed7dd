"""A worker that dies while the others wait for its gradients, without a launcher that would see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from replicast.config import PEER_FAILED
from replicast.launcher.plan import hold_ports

DEADLINE_SECS = 100

SCRIPT = """
import os, signal, sys
import numpy as np, keras, tensorflow as tf, replicast
from pathlib import Path

keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
assert strategy.all_reduce == "shared memory"
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Fault(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5 and strategy.rank == 1:
            Path("names").write_text(str(os.listdir("shm")))
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
model.fit(x, y, batch_size=2, verbose=0, callbacks=[Fault()])
"""


def run_with_fault(directory: Path, how: signal.Signals) -> tuple[int, str]:
    """Runs two workers, of which worker 1 ends or freezes; the exit code of the other, and what it said."""
    (directory / "train.py").write_text(SCRIPT)
    (directory / "shm").mkdir()
    with hold_ports([0] * 2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports.numbers]
        workers = [
            subprocess.Popen(
                [sys.executable, "train.py", how.name],
                cwd=directory,
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(
                        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
                    ),
                    "REPLICAST_SHM_DIR": str(directory / "shm"),
                    "CUDA_VISIBLE_DEVICES": "-1",
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = workers[0].communicate(timeout=DEADLINE_SECS)[1]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    workers[1].stderr.close()  # type: ignore[union-attr]
    return workers[0].returncode, said


def assert_noticed(directory: Path, how: signal.Signals) -> str:
    code, said = run_with_fault(directory, how)
    assert (directory / "names").read_text() == "[]", "nothing has a name in shared memory while training"
    assert code == PEER_FAILED, said
    assert "worker 1 was lost" in said
    assert list((directory / "shm").iterdir()) == []
    return said


def test_the_death_of_a_worker_in_an_all_reduce_is_noticed_and_it_is_named(tmp_path: Path) -> None:
    assert "its process has ended" in assert_noticed(tmp_path, signal.SIGKILL)
