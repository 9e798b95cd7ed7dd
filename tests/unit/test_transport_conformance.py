"""The promises of every transport: each is a function that N workers run together, here in N threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from replicast.codec import decode, encode
from replicast.coordination import Coordination, MemoryCoordination
from replicast.errors import UpdateRefused
from replicast.transport import Parcel, Transport
from tests.unit.chains import chain_of

WAIT_SECS = 120.0
SOON_SECS = 0.05


class Worker:
    """One worker: its transport, and a way to synchronize with the others."""

    def __init__(
        self, transport: Transport, coordination: Coordination, rank: int, size: int, name: str
    ) -> None:
        self.transport = transport
        self.rank = rank
        self.size = size
        self._coordination = coordination
        self._name = name
        self._numbers = itertools.count()
        self._answers = itertools.count()

    def id(self, suffix: object = "") -> str:
        """An id that is the same on all workers, and unique to this promise."""
        return f"{self._name}-{suffix}"

    def meet(self) -> None:
        number = next(self._numbers)
        self._coordination.put(f"{self._name}/{number}/{self.rank}", "here")
        for rank in range(self.size):
            assert self._coordination.get(f"{self._name}/{number}/{rank}", WAIT_SECS), (
                f"worker {rank} is missing"
            )

    def all_agree(self, answer: bool) -> bool:
        """Whether the answer of every worker is true; the same on all."""
        number = next(self._answers)
        self._coordination.put(f"{self._name}/answer-{number}/{self.rank}", str(answer))
        keys = [f"{self._name}/answer-{number}/{rank}" for rank in range(self.size)]
        return {self._coordination.get(key, WAIT_SECS) for key in keys} == {"True"}

    def described(self, source: int, parcel: Parcel | None) -> Parcel:
        """The parcel that the source has published."""
        key = f"{self._name}/{next(self._numbers)}/parcel"
        if parcel is not None:
            self._coordination.put(key, encode(parcel))
        said = self._coordination.get(key, WAIT_SECS)
        assert said is not None, f"worker {source} is missing"
        received: Parcel = decode(said)
        return received

    def published(self, arrays: Sequence[np.ndarray], source: int = 0, suffix: object = "") -> Parcel:
        publishes = self.rank == source
        parcel = self.transport.publish(self.id(suffix), arrays) if publishes else None
        return self.described(source, parcel)

    def received(
        self, arrays: Sequence[np.ndarray], source: int = 0, suffix: object = ""
    ) -> list[np.ndarray]:
        return self.transport.receive(self.published(arrays, source, suffix), WAIT_SECS)

    def refusal(self, parcel: Parcel, timeout_secs: float = WAIT_SECS) -> UpdateRefused:
        with pytest.raises(UpdateRefused) as caught:
            self.transport.receive(parcel, timeout_secs)
        return caught.value


def some(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def every_kind() -> list[np.ndarray]:
    bits = np.random.default_rng(1).integers(0, 256, 48, np.uint8)
    plain = [bits.view(kind) for kind in "bBhHiIlLqQefdFD"]
    return [
        *plain,
        bits.view(ml_dtypes.bfloat16),
        bits.view(ml_dtypes.float8_e4m3fn),
        bits > 100,
        np.float32(3.5).reshape(()),
        np.zeros((0, 3), np.float16),
        np.zeros((2, 0), ml_dtypes.bfloat16),
        np.arange(24).reshape(2, 3, 4).T,
        np.arange(10, dtype=np.float64)[::-3],
        np.arange(5, dtype=">i4"),
        np.zeros(0, np.int8),
    ]


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype.name, one.shape) == (other.dtype.name, other.shape)
        assert one.tobytes() == other.astype(other.dtype.newbyteorder("=")).tobytes()


def every_dtype_and_shape_arrives_bit_for_bit(worker: Worker) -> None:
    assert_same(worker.received(every_kind()), every_kind())


def any_worker_can_be_the_source(worker: Worker) -> None:
    for source in (*range(worker.size), 0):
        parcel = worker.published([some(100, source)], source, f"{source}-{next(worker._numbers)}")
        assert parcel.source == source
        assert_same(worker.transport.receive(parcel, WAIT_SECS), [some(100, source)])


def many_small_arrays_and_one_of_many_chunks_arrive(worker: Worker) -> None:
    arrays = [*(some(count) for count in range(50)), some(1_000_003), some(7)]
    assert_same(worker.received(arrays, worker.size - 1), arrays)


def a_parcel_without_arrays_arrives(worker: Worker) -> None:
    assert worker.received([]) == []
    assert_same(worker.received([np.zeros(0)], suffix="empty"), [np.zeros(0)])


def arrays_are_writable_and_aligned(worker: Worker) -> None:
    for array in worker.received([some(3), some(5), np.array(True), some(70_000)]):
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0


def writes_of_one_worker_are_not_visible_to_others(worker: Worker) -> None:
    arrays = worker.received([some(300_000), some(10)])
    worker.meet()
    for array in arrays:
        array[:] = worker.rank
    worker.meet()
    assert all((array == worker.rank).all() for array in arrays)
    worker.meet()


def the_source_may_change_its_arrays_at_once(worker: Worker) -> None:
    mine = some(100_000)
    parcel = worker.published([mine])
    mine[:] = 0
    assert_same(worker.transport.receive(parcel, WAIT_SECS), [some(100_000)])


def arrays_outlive_the_release_and_later_parcels(worker: Worker) -> None:
    kept = []
    for number in range(4):  # of one size: the room of a former one would fit the next
        kept += worker.received([some(400_000, number)], suffix=number)
        worker.meet()
        worker.transport.release(worker.id(number))
    assert_same(kept, [some(400_000, number) for number in range(4)])


def arrays_outlive_the_transport(worker: Worker) -> None:
    arrays = worker.received([some(300_000)])
    worker.meet()
    worker.transport.close()
    assert_same(arrays, [some(300_000)])
    arrays[0][:] = 1


def several_parcels_may_be_under_way(worker: Worker) -> None:
    parcels = [worker.published([some(1000, n)], n % worker.size, n) for n in range(5)]
    for number, parcel in enumerate(parcels):
        assert_same(worker.transport.receive(parcel, WAIT_SECS), [some(1000, number)])


def threads_receive_different_parcels_at_once(worker: Worker) -> None:
    count = 6
    parcels = [worker.published([some(300_000, n)], n % worker.size, n) for n in range(count)]
    inspected: list[list[int]] = [[] for _ in range(count)]

    def receive(number: int) -> list[np.ndarray]:
        def inspect(place: int, part: np.ndarray) -> None:
            inspected[number].append(part.size)

        return worker.transport.receive(parcels[number], WAIT_SECS, inspect)

    # With a thread for each parcel, workers may start in different orders.
    order = np.random.default_rng(worker.rank).permutation(count)
    with ThreadPoolExecutor(count) as threads:
        received = {number: threads.submit(receive, number) for number in order}
    for number in range(count):
        assert_same(received[number].result(), [some(300_000, number)])
        assert sum(inspected[number]) == 300_000  # none of these shares the verification
    worker.meet()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda parcel: worker.transport.release(parcel.id), parcels))
    assert_same(worker.received([some(300_000)], suffix="next"), [some(300_000)])


def releasing_an_unknown_parcel_is_a_no_op(worker: Worker) -> None:
    worker.transport.release("never-seen")
    worker.received([some(10)])
    worker.meet()
    for _ in range(2):
        worker.transport.release(worker.id())
    worker.transport.close()
    worker.transport.close()


def damaged_bytes_are_refused_by_every_worker(worker: Worker) -> None:
    parcel = replace(worker.published([some(1000)]), blocks="0" * 16)
    refusal = worker.refusal(parcel)
    assert "damaged" in refusal.problem
    assert refusal.expected == f"digest {'0' * 16} of block 0"
    assert refusal.received != refusal.expected
    worker.meet()
    assert_same(worker.received([some(10)], suffix="next"), [some(10)])


def a_parcel_that_never_comes_is_refused_in_time(worker: Worker) -> None:
    source = worker.size - 1
    sent = worker.published([some(10)], source)
    refusal = worker.refusal(replace(sent, id=worker.id("other")), SOON_SECS)
    assert "waited" in refusal.problem
    worker.meet()
    assert_same(worker.received([some(10)], suffix="next"), [some(10)])


PROMISES: list[Callable[[Worker], Any]] = [
    every_dtype_and_shape_arrives_bit_for_bit,
    any_worker_can_be_the_source,
    many_small_arrays_and_one_of_many_chunks_arrive,
    a_parcel_without_arrays_arrives,
    arrays_are_writable_and_aligned,
    writes_of_one_worker_are_not_visible_to_others,
    the_source_may_change_its_arrays_at_once,
    arrays_outlive_the_release_and_later_parcels,
    arrays_outlive_the_transport,
    several_parcels_may_be_under_way,
    threads_receive_different_parcels_at_once,
    releasing_an_unknown_parcel_is_a_no_op,
    damaged_bytes_are_refused_by_every_worker,
    a_parcel_that_never_comes_is_refused_in_time,
]
CHAINS = ["ab", "abc", "aab", "abb", "aba"]
"""The host of each worker."""


def run_on_threads(promise: Callable[[Worker], Any], transports: Sequence[Transport]) -> None:
    store = MemoryCoordination.Store()

    def run(rank: int) -> None:
        coordination = MemoryCoordination(store)
        worker = Worker(transports[rank], coordination, rank, len(transports), promise.__name__)
        try:
            promise(worker)
            worker.meet()
        finally:
            transports[rank].close()

    with ThreadPoolExecutor(len(transports)) as threads:
        for done in [threads.submit(run, rank) for rank in range(len(transports))]:
            done.result()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_transport(promise: Callable[[Worker], Any], size: int, tmp_path: Path) -> None:
    run_on_threads(promise, [Transport("job", rank, directory=tmp_path) for rank in range(size)])
    assert not list(tmp_path.iterdir()), "something is left behind"


@pytest.mark.parametrize("hosts", CHAINS)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_chain(promise: Callable[[Worker], Any], hosts: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())  # Other tests may have left some, which end at any time.
    run_on_threads(promise, chain_of(hosts, tmp_path))
    assert not list(tmp_path.iterdir()), "something is left behind"
    assert set(threading.enumerate()) <= before, "a thread is left behind"
