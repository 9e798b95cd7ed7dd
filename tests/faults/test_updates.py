"""Updates in a job that is killed, interrupted or out of space: none is lost, applied twice or partly."""

from __future__ import annotations

import errno
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import replicast
from replicast.storage.journal import committed_updates
from tests import jobs
from tests.pool import Pool
from tests.pool.checks import digest, state
from tests.workers.recipes import perceptron
from tests.workers.test_updates import mark, quietly, replicas_of

HEAD = """
import os, signal, sys, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf, replicast
from replicast.core.entries import Stage
keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
rank, attempt = strategy.rank, int(os.environ["REPLICAST_ATTEMPT"])
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
random = np.random.default_rng(3)
x = random.normal(size=(64, 3)).astype("float32")
y = x[:, :1]
replicas = replicast.Replicas(model)

def fit(act):
    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            act(replicas.step)
    callbacks = [replicas.callback(), Act()]
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
"""


def start(directory: Path, body: str, *options: str) -> subprocess.Popen[str]:
    return jobs.start(directory, HEAD + textwrap.dedent(body), *options)


# A full disk.


def disk_full(strategy: Any, call: str, directory: Path) -> dict[str, Any]:
    """The disk is full for one update, and then no more."""
    model = perceptron(strategy)
    run_dir = directory / "run"
    before = digest(model)
    original = getattr(os, call)
    fired = 0

    def fails(*given: Any) -> Any:
        nonlocal fired
        if "/groups/" not in f"{Path(f'/proc/self/fd/{given[0]}').readlink()}/":
            return original(*given)
        fired += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = ""
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        ticket = replicas.propose(mark(0)) if strategy.rank == 1 else None
        with mock.patch(f"os.{call}", fails if strategy.rank == 0 else original):
            quietly(replicas, lambda step: None, lambda: ticket is None or ticket.done())
        assert fired == (strategy.rank == 0)
        if ticket is not None:
            with pytest.raises(replicast.UpdateRefused, match="journal cannot be written") as caught:
                ticket.result(0)
            said = str(caught.value)
        assert digest(model) == before
        left = sorted(path.name for path in (run_dir / "groups" / "000001").iterdir())
        replicas.audit()  # Worker 0 has looked: it would write the next update at once.
        if strategy.rank == 1:
            replicas.propose(mark(0))
        quietly(replicas, lambda step: None, lambda: bool(replicas.history))
        assert state(model)["sequential/dense_1/bias"][0] == 100.0
    return {"said": said, "left": left}


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_an_update_that_the_journal_has_no_room_for_is_refused_and_the_next_one_passes(
    pool2: Pool, call: str, tmp_path: Path
) -> None:
    results = pool2.run(disk_full, call, tmp_path)
    assert "No space left on device" in results[1]["said"]
    assert results[0]["left"] == ["log.jsonl", "run.json"], "half of it is still there"
    assert [record.id for record in committed_updates(tmp_path / "run")] == ["mark-0"]


# The end of a job while an update is on its way.

STAGED = """
big = np.ones((3, 4), "float32")

def act(step):
    if step == 5 and rank == {author}:
        ticket = replicas.propose(replicast.Update().add("dense/kernel", big))
        while ticket.stage in (Stage.PROPOSED,):
            time.sleep(0.001)
        Path("staged").touch()
        {then}

fit(act)
"""


def test_a_worker_that_raises_while_an_update_is_staged_is_named_all_end_and_no_memory_is_left(
    tmp_path: Path,
) -> None:
    body = STAGED.format(author=1, then='raise ValueError("no such column")')
    code, said = jobs.finish(start(tmp_path, body))
    assert (tmp_path / "staged").exists()
    assert code == 1, said
    assert "worker 1 failed first" in said
    other, failing = jobs.logs(tmp_path)
    assert "ValueError: no such column" in failing
    assert "worker 1 failed first: ValueError: no such column" in other
    assert not list((tmp_path / "shm").iterdir())
