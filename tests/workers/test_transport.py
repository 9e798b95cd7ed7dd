"""The promises of every transport, with real workers, also while they train."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from replicast.coordination import Participant, ServiceCoordination
from replicast.transport import BroadcastTransport, SharedMemoryTransport, Transport, open_transport
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest, rank
from tests.unit.test_transport_conformance import PROMISES, Worker, assert_same, some
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import forget_hosts

ONE_HOST = ("a", "a", "a")
TWO_HOSTS = [("a", "b", "b"), ("a", "a", "b"), ("a", "b", "a")]
THREE_HOSTS = ("a", "b", "c")


def opened(hosts: Sequence[str], job: str, directory: Path) -> Transport:
    if len(set(hosts)) == 1:
        return SharedMemoryTransport(job, rank(), directory=directory)
    shared = SharedMemoryTransport(f"{job}-{hosts[rank()]}", rank(), directory=directory)
    transport = BroadcastTransport(shared, ServiceCoordination(), rank(), tuple(hosts), job)
    transport.chunk_bytes = 1 << 20
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


def run_promise(
    _: Any, promise: Callable[[Worker], None], hosts: Sequence[str], job: str, directory: Path
) -> None:
    with worker_on(hosts, job, directory) as worker:
        promise(worker)


@pytest.mark.parametrize("hosts", [ONE_HOST, *TWO_HOSTS, THREE_HOSTS], ids="".join)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_transport(
    pool3: Pool, promise: Callable[[Worker], None], hosts: Sequence[str], tmp_path: Path
) -> None:
    pool3.run(run_promise, promise, hosts, uuid.uuid4().hex, tmp_path, deadline_secs=300)
    assert not list(tmp_path.iterdir()), "something is left behind"


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
    assert_equal_on_all(pool3.run(receive_while_training, TWO_HOSTS[0], uuid.uuid4().hex, tmp_path))


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


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS[0]], ids="".join)
def test_a_variable_that_took_an_array_over_is_changed_by_its_worker_alone(
    pool3: Pool, hosts: Sequence[str], tmp_path: Path
) -> None:
    pool3.run(assign_and_change, hosts, uuid.uuid4().hex, tmp_path)


def no_room_on(
    strategy: Any, full: int, source: int, hosts: Sequence[str], job: str, directory: Path
) -> tuple[str, list[str], dict[str, str]]:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with worker_on(hosts, job, directory) as worker:
        parcel = worker.published([some(300_000)], source)
        with mock.patch("os.posix_fallocate", refuse) if worker.rank == full else contextlib.nullcontext():
            refusal = worker.refusal(parcel)
        worker.meet()
        left = [path.name for path in directory.iterdir()]
        worker.meet()
        worker.transport.release(parcel.id)
        assert_same(worker.received([some(300_000)], source, "next"), [some(300_000)])
    model = perceptron(strategy)
    model.fit(*arrays(), verbose=0)
    return str(refusal), left, digest(model)


@pytest.mark.parametrize(("full", "source"), [(1, 0), (0, 2)])
def test_no_room_on_one_host_is_refused_by_all_and_training_continues(
    pool3: Pool, full: int, source: int, tmp_path: Path
) -> None:
    results = pool3.run(no_room_on, full, source, TWO_HOSTS[0], uuid.uuid4().hex, tmp_path)
    assert_equal_on_all(results)
    refusal, left, _ = results[0]
    assert f"Worker {full} has no room" in refusal
    assert str(tmp_path) in refusal
    assert "1,200,000 bytes free" in refusal
    (source_file,) = left
    assert f"-{TWO_HOSTS[0][source]}-" in source_file


def opened_together(_: Any, hosts: Sequence[str], directory: Path, knows_address: Sequence[bool]) -> str:
    environ = {"REPLICAST_SHM_DIR": str(directory), "REPLICAST_HOST_ID": hosts[rank()]}
    if knows_address[rank()]:
        environ["TF_CONFIG"] = os.environ["TF_CONFIG"]
    transport = open_transport(Participant(ServiceCoordination(), rank(), len(hosts), environ), "opened")
    worker = Worker(transport, ServiceCoordination(), rank(), len(hosts), f"opened-{directory.name}")
    try:
        assert_same(worker.received([some(10)]), [some(10)])
        worker.meet()
        return type(transport).__name__
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("knows_address", "kind"),
    [((True, True, True), "ChainTransport"), ((True, False, True), "BroadcastTransport")],
)
def test_workers_on_two_hosts_find_out_and_connect_or_broadcast(
    pool3: Pool, knows_address: Sequence[bool], kind: str, tmp_path: Path
) -> None:
    pool3.run(forget_hosts)  # other tests of this pool have said where they are
    assert set(pool3.run(opened_together, TWO_HOSTS[0], tmp_path, knows_address)) == {kind}
    assert not list(tmp_path.iterdir())
