"""Updates of several megabytes: read from shared memory, applied with the same result by all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from replicast import Update
from replicast.mapped_memory import LARGE_BYTES
from replicast.training.variables import component
from tests.pool.scripts import equal_on_all
from tests.workers.test_update_hosts import on_host
from tests.workers.test_updates import Meeting, quietly, replicas_of

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
