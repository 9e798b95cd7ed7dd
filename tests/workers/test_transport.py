"""Parcels between real workers: while they train, and as the memory of variables."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.coordination import DirectExchange, ServiceCoordination
from replicast.transport import ChainTransport, Transport
from replicast.transport.chain import open_ends
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest, rank
from tests.unit.test_transport_conformance import WAIT_SECS, Worker, assert_same, some
from tests.workers.recipes import arrays, perceptron

ONE_HOST, TWO_HOSTS = ("a", "a", "a"), ("a", "b", "b")


def opened(hosts: Sequence[str], job: str, directory: Path) -> Transport:
    if len(set(hosts)) == 1:
        return Transport(job, rank(), directory=directory)
    exchange = DirectExchange(ServiceCoordination(), job, rank(), len(hosts))
    transport = ChainTransport(f"{job}-{hosts[rank()]}", exchange, hosts, directory=directory)
    transport.ends = open_ends(exchange, os.environ, WAIT_SECS, hosts, b"s" * 32)
    return transport


@contextlib.contextmanager
def worker_on(hosts: Sequence[str], job: str, directory: Path) -> Iterator[Worker]:
    transport = opened(hosts, job, directory)
    worker = Worker(transport, ServiceCoordination(), rank(), len(hosts), job)
    try:
        yield worker
        worker.meet()
    finally:
        transport.close()


def receive_while_training(strategy: Any, hosts: Sequence[str], job: str, directory: Path) -> dict[str, str]:
    import keras

    model = perceptron(strategy)
    x, y = arrays()
    model.fit(x, y, verbose=0)  # traced
    training, done = threading.Event(), threading.Event()
    received: list[np.ndarray] = []

    def receive() -> None:
        assert training.wait(60)
        for number in range(6):
            received.extend(worker.received([some(500_000, number)], number % worker.size, number))
        done.set()

    begun = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: training.set())
    with worker_on(hosts, job, directory) as worker:
        thread = threading.Thread(target=receive)
        thread.start()
        while not worker.all_agree(done.is_set()):  # each has to train as often as the others
            model.fit(x, y, verbose=0, callbacks=[begun])
        thread.join()
        assert_same(received, [some(500_000, number) for number in range(6)])
    return digest(model)


def test_parcels_arrive_in_the_background_while_the_workers_train(pool3: Pool, tmp_path: Path) -> None:
    """Within a host and between two."""
    assert_equal_on_all(pool3.run(receive_while_training, TWO_HOSTS, uuid.uuid4().hex, tmp_path))


def assign_and_change(_: Any, hosts: Sequence[str], job: str, directory: Path) -> None:
    import tensorflow as tf

    with worker_on(hosts, job, directory) as worker:
        (value,) = worker.received([some(300_000)])
        variable = tf.Variable(np.zeros(300_000, np.float32))
        variable.assign(tf.experimental.dlpack.from_dlpack(value.__dlpack__()))
        del value
        worker.meet()
        worker.transport.release(worker.id())
        variable.assign_add(tf.fill([300_000], float(worker.rank)))
        worker.meet()
        worker.received([some(300_000, 1)], suffix="next")  # may not take the place of the first
        worker.meet()
        np.testing.assert_array_equal(variable.numpy(), some(300_000) + np.float32(worker.rank))


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids="".join)
def test_a_variable_that_took_an_array_over_is_changed_by_its_worker_alone(
    pool3: Pool, hosts: Sequence[str], tmp_path: Path
) -> None:
    pool3.run(assign_and_change, hosts, uuid.uuid4().hex, tmp_path)
