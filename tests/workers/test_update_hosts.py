"""The promises of an update between hosts: one machine acts as several, while training continues."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import replicast
from replicast.errors import ClusterError
from replicast.mapped_memory import LARGE_BYTES
from replicast.training.variables import component
from replicast.transport import ChainTransport
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import perceptron
from tests.workers.test_updates import (
    WAYS,
    Meeting,
    quietly,
    reaches_all,
    replicas_of,
    transports_opened,
)
from tests.workers.test_updates import assert_all_were_reached as assert_reached

HOSTS = [("a", "b", "b"), ("a", "a", "b")]


@contextlib.contextmanager
def on_host(strategy: Any, hosts: Sequence[str]) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"REPLICAST_HOST_ID": hosts[strategy.rank]}):
        yield


def reaches_all_hosts(strategy: Any, hosts: Sequence[str], way: str, directory: Path) -> dict[str, Any]:
    with on_host(strategy, hosts), transports_opened() as opened:
        found = reaches_all(strategy, way, directory)
    assert [type(transport) for transport in opened] == [ChainTransport]
    return found


@pytest.mark.parametrize(("hosts", "way"), [(HOSTS[0], WAYS[0]), (HOSTS[1], WAYS[1]), (HOSTS[0], WAYS[2])])
def test_updates_of_three_sources_reach_the_workers_of_two_hosts_at_one_step(
    pool3: Pool, hosts: Sequence[str], way: str, tmp_path: Path
) -> None:
    assert_reached(pool3.run(reaches_all_hosts, hosts, way, tmp_path))


def refused_where_hosts_cannot_connect(strategy: Any, hosts: Sequence[str]) -> str:
    """The address of worker 1 is one of no host here."""
    described = json.loads(os.environ["TF_CONFIG"])
    described["cluster"]["worker"][1] = "192.0.2.1:2222"
    with (
        on_host(strategy, hosts),
        mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(described)}),
        pytest.raises(ClusterError) as refused,
    ):
        replicast.Replicas(perceptron(strategy), durability="memory")
    return str(refused.value)


def test_replicas_refuses_on_all_workers_where_hosts_cannot_connect(pool3: Pool) -> None:
    said = pool3.run(refused_where_hosts_cannot_connect, HOSTS[0])
    assert_equal_on_all(said)
    assert "worker 1 cannot listen at 192.0.2.1" in said[0]


# Updates of several megabytes: read from shared memory, applied with the same result by all workers.

ROWS, WIDTH = 3 * LARGE_BYTES // 64, 16  # three megabytes
ONE_HOST, TWO_HOSTS = ("a", "a", "a"), ("a", "b", "b")


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


def changes(seed: int) -> list[Update]:
    """What one worker proposes, and what must come of it is computed by `expected`."""
    rows = np.random.default_rng(seed).permutation(ROWS)[: ROWS // 2]
    frozen = numbers(seed + 3)
    frozen.flags.writeable = False
    return [
        Update().assign("table/embeddings", numbers(seed)),
        Update().add("table/embeddings", numbers(seed + 1)),  # in place, where the assigned values are
        Update()
        .add_rows("table/embeddings", rows, numbers(seed + 2)[: ROWS // 2])
        .add("table/embeddings", frozen),
    ]


def expected(seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).permutation(ROWS)[: ROWS // 2]
    value = numbers(seed) + numbers(seed + 1)
    value[rows] += numbers(seed + 2)[: ROWS // 2]
    return value + numbers(seed + 3)


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids="".join)
@equal_on_all("pool3")
def test_large_updates_of_every_worker_come_to_the_same_numbers_and_share_no_memory_that_changes(
    strategy: Any, hosts: Sequence[str]
) -> np.ndarray:
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(ROWS, WIDTH, name="table")])
        model.compile("sgd", "mse")
    table = model.layers[0].embeddings
    meeting = Meeting(strategy)
    with on_host(strategy, hosts), replicas_of(model) as replicas:
        for source in range(strategy.size):
            value = expected(10 * source)
            mine = changes(10 * source) if source == strategy.rank else []
            made = [[array.tobytes() for array in update.arrays()] for update in mine]
            tickets = [replicas.propose(update) for update in mine]
            enough = 3 * source + 3
            quietly(replicas, lambda _: None, lambda enough=enough: len(replicas.history) == enough)
            assert all(ticket.done() for ticket in tickets)
            np.testing.assert_array_equal(np.asarray(table), value)
            component(table).assign_add(value)  # in place, as training does
            value = value + value
            meeting.all_say()
            np.testing.assert_array_equal(np.asarray(table), value, "somebody else's memory was changed")
            assert [[array.tobytes() for array in update.arrays()] for update in mine] == made
    return value
