"""The pool itself, on real processes: order, failures, hangs, deaths, and a clean start for every call."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import is_alive
from tests.pool import Pool, WorkerFailed
from tests.pool.checks import assert_equal_on_all, digest, rank
from tests.pool.messages import Died, Raised, Returned, Stuck
from tests.threads import eventually


@pytest.fixture(scope="module")
def bare_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers without TensorFlow, for tests that end them."""
    with Pool(2, tmp_path_factory.mktemp("bare"), strategy=False, grace_secs=0.5) as pool:
        yield pool


def own_rank(strategy: None, factor: int = 1) -> tuple[int, int]:
    time.sleep(0.1 * (1 - rank()))  # worker 0 answers last
    return rank() * factor, os.getpid()


def raise_on_the_last_worker(strategy: None) -> None:
    print("a line for the log")
    if rank() == 1:
        raise RuntimeError("the last worker cannot")


def wait_for_a_worker_that_died(strategy: None) -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def return_what_cannot_travel(strategy: None) -> object:
    return threading.Lock()


def announce_and_wait(strategy: None, directory: Path) -> None:
    (directory / f"{rank()}.part").write_text(str(os.getpid()))
    (directory / f"{rank()}.part").rename(directory / f"{rank()}.pid")
    threading.Event().wait()


def test_results_come_back_in_the_order_of_the_ranks_from_processes_that_stay(bare_pool: Pool) -> None:
    (first, here), (second, there) = bare_pool.run(own_rank)
    assert (first, second) == (0, 1)
    assert bare_pool.run(own_rank, factor=10) == [(0, here), (10, there)]
    assert bare_pool.run_each(own_rank, [(1,), (20,)]) == [(0, here), (20, there)]
    with pytest.raises(ValueError, match="Received: 1"):
        bare_pool.run_each(own_rank, [(1,)])


@pytest.mark.parametrize(
    ("deed", "outcomes", "said"),
    [
        (
            raise_on_the_last_worker,
            (Returned, Raised),
            ("worker 0 returned", "in raise_on_the_last_worker", "a line for the log", "last worker cannot"),
        ),
        (return_what_cannot_travel, (Raised, Raised), ("The result cannot be sent",)),
        (wait_for_a_worker_that_died, (Stuck, Died), ("worker 1 died of SIGKILL",)),
    ],
)
def test_a_failure_says_what_each_worker_did_and_the_next_call_works(
    bare_pool: Pool, deed: Callable[..., Any], outcomes: tuple[type, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(WorkerFailed) as failure:
        bare_pool.run(deed)
    message = str(failure.value)
    assert all(text in message for text in said), message
    assert [type(failure.value.outcomes[worker]) for worker in range(2)] == [*outcomes]
    assert [found for found, _ in bare_pool.run(own_rank)] == [0, 1]


def test_workers_do_not_outlive_pytest(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from tests.pool import Pool\n"
        "from tests.workers.test_pool import announce_and_wait\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "Pool(2, directory, strategy=False).run(announce_and_wait, directory)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        eventually(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        owner.kill()
        owner.wait()
    processes = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    eventually(lambda: not any(is_alive(process) for process in processes))


def leave_traces(strategy: Any) -> None:
    import keras
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_floatx("float64")
    keras.layers.Dense(1)
    tf.config.run_functions_eagerly(True)
    tf.config.experimental.enable_op_determinism()


def look_around(strategy: Any) -> dict[str, Any]:
    import keras
    import tensorflow as tf
    from tensorflow.python.framework.config import is_op_determinism_enabled

    return {
        "policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "layer": keras.layers.Dense(1).name,
        "eager functions": tf.config.functions_run_eagerly(),
        "determinism": is_op_determinism_enabled(),
        "drawn": (float(tf.random.uniform([])), float(np.random.random())),
    }


def test_a_call_finds_nothing_of_the_calls_before(pool2: Pool) -> None:
    before = pool2.run(look_around)
    pool2.run(leave_traces)
    assert_equal_on_all([*before, *pool2.run(look_around)])
    assert before[0]["policy"] == before[0]["floatx"] == "float32"
    assert before[0]["layer"] == "dense"


def digest_with_one_replica_changed(strategy: Any) -> dict[str, str]:
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
        )
        model.compile("adam", "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    if rank() == 1:
        model.layers[0].kernel.assign_add([[1e-3, 0], [0, 0], [0, 0]])
    return digest(model)


def test_the_digest_is_of_the_local_state_and_names_what_differs(pool2: Pool) -> None:
    digests = pool2.run(digest_with_one_replica_changed)
    assert {"sequential/dense/bias", "sequential/batch_normalization/moving_mean"} < digests[0].keys()
    assert {"adam/iteration", "adam/learning_rate", "adam/sequential_dense_kernel_momentum"} < digests[
        0
    ].keys()
    assert not any("mean_absolute_error" in name or "loss" in name for name in digests[0])
    with pytest.raises(
        AssertionError, match=r"differ\.\nsequential/dense/kernel: worker 1 has"
    ) as difference:
        assert_equal_on_all(digests)
    assert str(difference.value).count("\n") == 1


ZEROS = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({"a": ZEROS}, "b: worker 1 does not have it"),
        ({"a": ZEROS, "b": 2}, "b: worker 1 has 2, worker 0 1"),
        ({"a": ZEROS[0], "b": 1}, "a: worker 1 has float32[2], worker 0 float32[2, 2]"),
        ({"a": ZEROS.astype(float), "b": 1}, "a: worker 1 has float64[2, 2], worker 0 float32[2, 2]"),
        (
            {"a": ZEROS + np.float32([[0, 0.5]]), "b": 1},
            "a: worker 1 differs in 2 of 4 elements, at most by 0.5",
        ),
        ({"a": -ZEROS, "b": 1}, "a: worker 1 differs in its bytes only"),
    ],
)
def test_a_difference_is_told_by_name_and_worker(found: dict[str, Any], difference: str) -> None:
    expected = {"a": ZEROS, "b": 1}
    assert_equal_on_all([expected, expected])
    with pytest.raises(AssertionError, match=re.escape(difference)):
        assert_equal_on_all([expected, found])


def test_the_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each process of `make test` starts every pool, and nothing else says so."""
    if getattr(request.config.option, "loadgroup", False):  # as in make test
        assert request.node.nodeid.endswith(f"@{__file__}"), (
            "pytest-xdist ignores groups: pytest 9.2 with 3.8?"
        )
