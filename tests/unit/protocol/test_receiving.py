"""Who looks at which values of an update, and when."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replicast import validate
from replicast.errors import UpdateRefused
from replicast.protocol.receiving import Receiving
from replicast.schema import Schema, Variable
from replicast.transport import Parcel, SharedMemoryTransport
from replicast.transport.shared import ANNOUNCED_BYTES
from replicast.update import Update

ROWS, WIDTH = ANNOUNCED_BYTES // 64, 4  # five of these are announced, one is not
NAMES = [f"table_{number}" for number in range(5)]
SCHEMA = Schema(Variable(name, (ROWS, WIDTH), "float32", "trainable") for name in NAMES)


class Job:
    """Workers on one host, of which worker 0 publishes."""

    def __init__(self, size: int, directory: Path) -> None:
        self.transports = [SharedMemoryTransport("job", rank, directory=directory) for rank in range(size)]
        self.workers = [
            Receiving(transport, SCHEMA, validate.Limits(), rank, size)
            for rank, transport in enumerate(self.transports)
        ]

    def publish(self, update: Update, announced: bool) -> Parcel:
        def announce(parcel: Parcel) -> None:
            for worker in self.workers:
                worker.expect(parcel)

        described = np.frombuffer(json.dumps(update.describe()).encode(), np.uint8)
        contents = [*update.arrays(), described]
        return self.transports[0].publish(update.id, contents, announce if announced else None)

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


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_value_that_is_not_finite_is_found_by_exactly_one_worker(
    size: int, announced: bool, tmp_path: Path
) -> None:
    job = Job(size, tmp_path)
    for spoilt, name in enumerate(NAMES):
        parcel = job.publish(an_update(spoilt), announced)
        refusals = []
        for worker in job.workers:
            try:
                worker.take(parcel, 30.0)
            except UpdateRefused as error:
                refusals.append(error)
        assert [error.variable for error in refusals] == [name]
        job.transports[0].release(parcel.id)
    job.close()


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("factor", [float("nan"), 1e39])
def test_a_factor_that_is_not_finite_is_found_by_all_beside_large_arrays(
    factor: float, announced: bool, tmp_path: Path
) -> None:
    job = Job(2, tmp_path)
    blended = an_update().blend(NAMES[0], np.zeros((ROWS, WIDTH), np.float32), factor)
    for update in (an_update().scale(NAMES[0], factor), blended):
        parcel = job.publish(update, announced)
        for worker in job.workers:
            with pytest.raises(UpdateRefused, match=r"factor|weight"):
                worker.take(parcel, 30.0)
        job.transports[0].release(parcel.id)
    job.close()


def test_what_was_looked_at_while_it_arrived_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2, tmp_path)
    looked: list[int] = []
    monkeypatch.setattr(validate, "_nonfinite", lambda array: looked.append(array.size) or (0, -1))
    for announced, times in ((False, 5), (True, 0)):
        looked.clear()
        parcel = job.publish(an_update(), announced)
        for worker in job.workers:
            worker.take(parcel, 30.0)
        assert looked.count(ROWS * WIDTH) == times
        job.transports[0].release(parcel.id)
    job.close()
