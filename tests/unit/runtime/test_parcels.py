"""The bytes of updates in shared memory: which worker checks which values, and which files are removed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from replicast.core.entries import Stage
from replicast.errors import UpdateRefused
from replicast.replicas.replica import Parcels
from replicast.transport import Parcel, Transport
from replicast.update.digest import BLOCK_BYTES
from replicast.update.edits import Variable
from replicast.update.schema import Schema
from replicast.update.update import Update
from tests.unit.chains import chain_of

ROWS, WIDTH = BLOCK_BYTES // 16 + 1, 4  # more than a block each
NAMES = [f"table_{number}" for number in range(5)]
SCHEMA = Schema(Variable(name, (ROWS, WIDTH), "float32", "trainable") for name in NAMES)


class Host:
    """Workers on one host, of which worker 0 publishes."""

    def __init__(self, size: int, directory: Path) -> None:
        self.directory = directory
        self.transports = [
            Transport("job", rank, directory=directory, local_ranks=range(size)) for rank in range(size)
        ]
        self.workers = [
            Parcels(transport, "job", rank, SCHEMA) for rank, transport in enumerate(self.transports)
        ]

    def publish(self, update: Update) -> Parcel:
        return self.workers[0].publish(update, "ticket")

    def refusals(self, parcel: Parcel) -> list[UpdateRefused]:
        """Of the workers that cannot prepare it."""
        found = []
        for worker in self.workers:
            try:
                worker.prepare("update", parcel.digest, parcel, 30.0)
            except UpdateRefused as error:
                found.append(error)
        return found

    def large_files(self) -> list[Path]:
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return [path for path in files if path.stat().st_size > BLOCK_BYTES]


@pytest.fixture(params=[1, 2, 3])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    host = Host(request.param, tmp_path)
    yield host
    for transport in host.transports:
        transport.close()


def an_update(spoilt: int | None = None) -> Update:
    """An edit of each table, with row edits in between, so that edits and arrays have different indices."""
    update = Update(id="update")
    for place, name in enumerate(NAMES):
        values = np.full((ROWS, WIDTH), float(place), np.float32)
        if place == spoilt:
            values[0 if place % 2 else -1, -1] = np.nan  # in the first or the last part that is looked at
        update = update.add_rows(name, np.arange(ROWS), values) if place == 2 else update.add(name, values)
    return update


def test_a_value_that_is_not_finite_is_found_by_exactly_one_worker(host: Host) -> None:
    for spoilt, name in enumerate(NAMES):
        (refusal,) = host.refusals(host.publish(an_update(spoilt)))
        assert refusal.variable == name
        assert "nan at" in str(refusal)
        for worker in host.workers:
            worker.discard("update")
        host.workers[0].release_ticket("ticket", Stage.REFUSED)
    assert host.large_files() == []


@pytest.mark.parametrize("factor", [float("nan"), 1e39])
def test_a_factor_that_is_not_finite_is_found_by_all_beside_large_arrays(host: Host, factor: float) -> None:
    blended = an_update().blend(NAMES[0], np.zeros((ROWS, WIDTH), np.float32), factor)
    for update in (an_update().scale(NAMES[0], factor), blended):
        refusals = host.refusals(host.publish(update))
        assert [error.variable for error in refusals] == [NAMES[0]] * len(host.workers)
        host.workers[0].release_ticket("ticket", Stage.REFUSED)


def test_a_proposal_that_has_its_outcome_leaves_no_file_whatever_was_prepared(host: Host) -> None:
    first, second = host.publish(an_update()), host.publish(an_update().labelled("somebody", "why"))
    assert first.digest == second.digest, "author and note do not belong to the content"
    assert host.refusals(first) == []
    for worker in host.workers:
        worker.discard("update")
        worker.discard("update")
    assert host.large_files()
    host.workers[0].release_ticket("ticket", Stage.WITHDRAWN)
    assert host.large_files() == []


def test_what_was_prepared_is_kept_by_id_and_content(host: Host) -> None:
    parcel = host.publish(an_update())
    assert host.refusals(parcel) == []
    for worker in host.workers:
        assert [edit.variable for edit in worker.prepared("update", parcel.digest).edits] == NAMES
        with pytest.raises(KeyError):
            worker.take("update", "another digest")
        update, parcel_id = worker.take("update", parcel.digest)
        assert (update.id, parcel_id) == ("update", parcel.id)


def test_refused_updates_leave_no_more_memory_on_any_host_than_is_kept_for_the_next(tmp_path: Path) -> None:
    transports = chain_of("aab", tmp_path)
    workers = [Parcels(transport, "job", rank, SCHEMA) for rank, transport in enumerate(transports)]
    held = []
    for _ in range(3):
        parcel = workers[1].publish(an_update(spoilt=0), "ticket")

        def refusal(worker: Parcels, parcel: Parcel = parcel) -> UpdateRefused:
            with pytest.raises(UpdateRefused) as refused:
                worker.prepare("update", parcel.digest, parcel, 30.0)
            return refused.value

        with ThreadPoolExecutor(3) as threads:
            assert {one.variable for one in threads.map(refusal, workers)} == {NAMES[0]}
        for worker in workers:
            worker.discard("update")
        workers[1].release_ticket("ticket", Stage.REFUSED)
        held.append(open_files(tmp_path))
    for transport in transports:
        transport.close()
    assert held == [1, 1, 1], "the second host keeps one file"
    assert open_files(tmp_path) == 0


def open_files(directory: Path) -> int:
    """How many descriptors of files in a directory this process has, with or without a name."""
    return sum(str(entry.resolve()).startswith(str(directory)) for entry in Path("/proc/self/fd").iterdir())
