"""Who looks at which values of an update, and when."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replicast import finite, validate
from replicast.blocks import BLOCK_BYTES
from replicast.errors import UpdateRefused
from replicast.protocol import receiving
from replicast.protocol.receiving import Receiving
from replicast.schema import Schema, Variable
from replicast.transport import Parcel, SharedMemoryTransport
from replicast.update import Update

ROWS, WIDTH = BLOCK_BYTES // 16 + 1, 4  # more than a block each
NAMES = [f"table_{number}" for number in range(5)]
SCHEMA = Schema(Variable(name, (ROWS, WIDTH), "float32", "trainable") for name in NAMES)


class Job:
    """Workers on one host, of which worker 0 publishes."""

    def __init__(self, size: int, directory: Path) -> None:
        self.transports = [
            SharedMemoryTransport("job", rank, directory=directory, mates=range(size)) for rank in range(size)
        ]
        self.workers = [Receiving(transport, SCHEMA, validate.Limits()) for transport in self.transports]

    def publish(self, update: Update) -> Parcel:
        described = np.frombuffer(json.dumps(update.describe()).encode(), np.uint8)
        return self.transports[0].publish(update.id, [*update.arrays(), described], to_read=True)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def an_update(spoilt: int | None = None) -> Update:
    """An edit of each table; with rows in the middle, so that edits and arrays are counted differently."""
    update = Update()
    for place, name in enumerate(NAMES):
        values = np.full((ROWS, WIDTH), float(place), np.float32)
        if place == spoilt:
            values[0 if place % 2 else -1, -1] = np.nan  # in the first or the last part that is looked at
        update = update.add_rows(name, np.arange(ROWS), values) if place == 2 else update.add(name, values)
    return update


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_value_that_is_not_finite_is_found_by_exactly_one_worker(size: int, tmp_path: Path) -> None:
    job = Job(size, tmp_path)
    for spoilt, name in enumerate(NAMES):
        parcel = job.publish(an_update(spoilt))
        refusals = []
        for worker in job.workers:
            try:
                worker.take(parcel, 30.0)
            except UpdateRefused as error:
                refusals.append(error)
        assert [error.variable for error in refusals] == [name]
        assert "nan at" in str(refusals[0])
        job.transports[0].release(parcel.id)
    job.close()


@pytest.mark.parametrize("factor", [float("nan"), 1e39])
def test_a_factor_that_is_not_finite_is_found_by_all_beside_large_arrays(
    factor: float, tmp_path: Path
) -> None:
    job = Job(2, tmp_path)
    blended = an_update().blend(NAMES[0], np.zeros((ROWS, WIDTH), np.float32), factor)
    for update in (an_update().scale(NAMES[0], factor), blended):
        parcel = job.publish(update)
        for worker in job.workers:
            with pytest.raises(UpdateRefused, match=r"factor|weight"):
                worker.take(parcel, 30.0)
        job.transports[0].release(parcel.id)
    job.close()


def test_every_number_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, tmp_path)
    looked: list[int] = []

    def counting(array: np.ndarray) -> bool:
        looked.append(array.size if array.dtype == np.float32 else 0)
        return finite.is_finite(array)

    monkeypatch.setattr(receiving, "is_finite", counting)
    parcel = job.publish(an_update())
    for worker in job.workers:
        worker.take(parcel, 30.0)
    assert sum(looked) == 5 * ROWS * WIDTH
    job.close()
