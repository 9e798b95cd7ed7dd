"""A worker that is stopped (SIGSTOP) neither exits nor answers: the others exit, and the job restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS_SECS = 280.0
"""Far more than three attempts take, also on a busy machine."""

SCRIPT = """
import os, signal, numpy as np, keras, replicast

attempt = int(os.environ["REPLICAST_ATTEMPT"])
strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
replicas = replicast.Replicas(model)

class Freeze(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and strategy.rank == attempt:
            os.kill(os.getpid(), signal.SIGSTOP)

x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
model.fit(x, y, batch_size=2, verbose=0, callbacks=[Freeze(), replicas.callback()])
print("trained", flush=True)
"""


def test_when_a_worker_is_frozen_the_others_end_and_the_job_starts_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "replicast.cli", "run", "-n", "2", "--max-restarts", "2"]
    done = subprocess.run(
        [*command, "--run-dir", "run", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for frozen in (0, 1):
        assert f"worker {frozen} failed first: frozen by a signal such as SIGSTOP" in done.stderr
        log = (tmp_path / "run" / "logs" / f"attempt-{frozen}" / f"worker-{1 - frozen}.log").read_text()
        assert f"replicast: worker {frozen}" in log, "the log of the other names it too"
    assert "trained" in (tmp_path / "run" / "logs" / "attempt-2" / "worker-1.log").read_text()
