"""The promises of an update between hosts: one machine acts as several, while training continues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from replicast.transport import BroadcastTransport, ChainTransport, Transport
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.workers.recipes import FEATURES, perceptron
from tests.workers.test_updates import (
    WAYS,
    adam,
    change_here_only,
    quietly,
    reaches_all,
    replicas_of,
    train,
    transports_opened,
)
from tests.workers.test_updates import assert_all_were_reached as assert_reached

HOSTS = [("a", "b", "b"), ("a", "a", "b")]


@contextlib.contextmanager
def on_host(strategy: Any, hosts: Sequence[str], kind: type[Transport] = ChainTransport) -> Iterator[None]:
    """A worker that does not know its address cannot listen there: then all use TensorFlow's broadcast."""
    with mock.patch.dict(os.environ, {"REPLICAST_HOST_ID": hosts[strategy.rank]}):
        if kind is BroadcastTransport and strategy.rank == 1:
            del os.environ["TF_CONFIG"]
        yield


def reaches_all_hosts(
    strategy: Any, hosts: Sequence[str], way: str, kind: type[Transport], directory: Path
) -> dict[str, Any]:
    with on_host(strategy, hosts, kind), transports_opened() as opened:
        found = reaches_all(strategy, way, directory)
    assert [type(transport) for transport in opened] == [kind]
    return found


@pytest.mark.parametrize(
    ("hosts", "way", "kind"),
    [
        (HOSTS[0], WAYS[0], ChainTransport),
        (HOSTS[1], WAYS[1], ChainTransport),
        (HOSTS[0], WAYS[2], BroadcastTransport),
    ],
)
def test_updates_of_three_sources_reach_the_workers_of_two_hosts_at_one_step(
    pool3: Pool, hosts: Sequence[str], way: str, kind: type[Transport], tmp_path: Path
) -> None:
    assert_reached(pool3.run(reaches_all_hosts, hosts, way, kind, tmp_path))


def many_while_training(strategy: Any, hosts: Sequence[str]) -> dict[str, Any]:
    """Every worker proposes at every step; each has a large update of many chunks' worth as well."""
    model = perceptron(strategy, adam)
    random = np.random.default_rng(strategy.rank)

    def act(step: int) -> None:
        if step <= 6:
            value = (0.01 * random.standard_normal((FEATURES, 16))).astype(np.float32)
            update = Update(id=f"{strategy.rank}-{step}", note="x" * 1000 * strategy.rank)
            replicas.propose(update.add("dense/kernel", value).scale("dense/kernel", 0.99))

    with on_host(strategy, hosts), transports_opened() as opened, replicas_of(model) as replicas:
        assert isinstance(opened[0], ChainTransport)
        seen = train(replicas, "fit", act, lambda: len(replicas.history) == 18)
        order = [(receipt.sequence, receipt.id, receipt.step) for receipt in replicas.history]
        if strategy.rank == 2:
            change_here_only(model, "dense_1", "bias", 1.0)
        assert replicas.sync(source=2) is not None
        if strategy.rank == 1:
            replicas.propose(lambda values: {"dense_1/bias": -values["dense_1/bias"]})
        quietly(replicas, lambda step: None, lambda: len(replicas.history) == 20)
    return {"seen": seen, "order": order, "digest": digest(model)}


def test_updates_of_all_workers_cross_hosts_in_one_order_while_they_train(pool3: Pool) -> None:
    results = pool3.run(many_while_training, HOSTS[0])
    assert_equal_on_all(results)
    order = results[0]["order"]
    assert [sequence for sequence, _, _ in order] == list(range(1, 19))
    assert {id_ for _, id_, _ in order} == {f"{rank}-{step}" for rank in range(3) for step in range(1, 7)}
