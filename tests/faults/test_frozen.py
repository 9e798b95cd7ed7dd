"""A worker that is stopped (SIGSTOP) while the job trains: it is named, and the job starts again."""

from __future__ import annotations

import json
from pathlib import Path

from tests import jobs

SCRIPT = """
import json, os, signal, sys
from pathlib import Path

attempt = int(os.environ.get("REPLICAST_ATTEMPT", "0"))
own = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
frozen, moment = dict(enumerate(json.loads(os.environ["FREEZES"]))).get(attempt, (None, None))

def freeze_at(here):
    if own == frozen and here == moment:
        Path(f"frozen-{own}-{moment}").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

freeze_at("start")
import numpy as np, keras, replicast

strategy = replicast.Strategy()
wide = 5000 if moment == "update" else 1
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(wide), keras.layers.Dense(wide)])
    model.compile("sgd", "mse")
replicas = replicast.Replicas(model)

class Moments(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            freeze_at("training")
            if moment == "update":  # 100 MB, by the worker that stays
                if own != frozen:
                    delta = np.full((wide, wide), 0.5, "float32")
                    replicas.propose(replicast.Update(note="large").add("dense_1/kernel", delta))
                freeze_at("update")

x, y = np.ones((64, 3), "float32"), np.ones((64, wide), "float32")
model.fit(x, y, batch_size=2, verbose=0, callbacks=[Moments(), replicas.callback()])
freeze_at("close")
replicas.close()
print("trained", flush=True)
"""


def run_frozen(directory: Path, *freezes: tuple[int, str]) -> tuple[int, str]:
    """Runs a job of two workers; in each attempt but the last one a worker freezes at a moment."""
    restarts = ("--max-restarts", str(len(freezes)))
    return jobs.finish(jobs.start(directory, SCRIPT, *restarts, FREEZES=json.dumps(freezes)))


def test_when_worker_0_is_frozen_it_is_named_and_the_job_starts_again(tmp_path: Path) -> None:
    code, said = run_frozen(tmp_path, (0, "training"))
    assert code == 0, said
    assert (tmp_path / "frozen-0-training").exists(), "the fault fired"
    assert "worker 0 was stopped (SIGSTOP) and did not continue: killed" in said
    assert "restart 1 of 1 because worker 0 failed (stopped by SIGSTOP)" in said
    assert all("trained" in log for log in jobs.logs(tmp_path, attempt=1))
