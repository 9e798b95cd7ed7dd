"""How a job ends on real workers: cleanly on all, or promptly on all with the first error named."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import jobs

HEAD = """
import sys, numpy as np, keras, tensorflow as tf, replicast
strategy = replicast.Strategy()
rank = strategy.rank
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 3), "float32")
y = np.ones((64, 1), "float32")
"""


def run(tmp_path: Path, body: str, *, head: str = HEAD, **settings: str) -> tuple[int, str, list[str]]:
    """Runs a script under the launcher: its exit code, what was said, and each worker's log."""
    code, said = jobs.finish(jobs.start(tmp_path, head + textwrap.dedent(body), **settings))
    return code, said, jobs.logs(tmp_path)


def test_a_job_ends_with_0_everywhere_when_worker_0_is_the_first_to_finish(tmp_path: Path) -> None:
    code, said, logs = run(
        tmp_path,
        """
        model.fit(x, y, verbose=0)
        if rank > 0:
            import time
            time.sleep(2)  # worker 0 reaches its end first, and hosts what the others still need
            print("still here", flush=True)
        """,
        REPLICAST_TEST_AS_USERS="1",  # all that Python does at the exit included
    )
    assert code == 0, said
    assert "still here" in logs[1]


def test_a_worker_that_leaves_in_the_middle_ends_the_others_with_the_reason(tmp_path: Path) -> None:
    code, _, logs = run(
        tmp_path,
        """
        class Fault(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3 and rank == 0:
                    sys.exit(0)
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[Fault()])
        """,
    )
    assert code != 0
    assert "worker 0 reached the end of its script while worker 1 is still training" in logs[1]


@pytest.mark.parametrize("fewer", [0])  # tests/long: worker 1
def test_workers_with_different_numbers_of_batches_end_with_the_reason(tmp_path: Path, fewer: int) -> None:
    code, _, logs = run(
        tmp_path,
        f"""
        def batches():
            for _ in range(5 if rank == {fewer} else 9):
                yield x[:8], y[:8]
        model.fit(batches(), verbose=0)
        model.fit(x, y, verbose=0)
        """,
    )
    assert code != 0
    assert "Every worker must get the same number of batches" in logs[1 - fewer] + logs[fewer]
