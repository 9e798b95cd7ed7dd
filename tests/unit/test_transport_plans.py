"""The pure parts of the transports, the faults of the in-memory one, and how a job chooses its transport."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicast
from replicast.codec import decode, encode
from replicast.config import host_id, shared_memory_directory
from replicast.coordination import MemoryCoordination, Participant
from replicast.errors import ClusterError, JobFailed, UpdateRefused
from replicast.transport import (
    BroadcastTransport,
    Parcel,
    SharedMemoryTransport,
    Transport,
    open_transport,
    opening,
)
from replicast.transport import broadcast as keys
from replicast.transport.base import aligned_buffer, arrays_in, check_share, lay_out, write_out
from replicast.transport.shared import leaders_of
from replicast.update.digest import BLOCK_BYTES, blocks_of, digest_block, digest_of_blocks

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float16", "int8", "int64", "bool", "uint16", "complex128"])


@given(st.lists(st.tuples(dtypes, shapes), max_size=8))
def test_arrays_come_back_from_a_buffer_as_they_went_in(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    arrays = [
        (np.arange(np.prod(shape, dtype=int)) + number).astype(dtype).reshape(shape)
        for number, (dtype, shape) in enumerate(kinds)
    ]
    pieces, nbytes = lay_out(arrays)
    buffer = aligned_buffer(nbytes)
    blocks = write_out(arrays, pieces, buffer)
    assert blocks == "".join(digest_block(block.content) for block in blocks_of(arrays))
    assert nbytes % 64 == 0
    assert all(piece.offset % 64 == 0 for piece in pieces)
    parcel = Parcel("x", 1, nbytes, pieces, blocks)
    assert len({parcel, decode(encode(parcel))}) == 1
    assert parcel.digest == digest_of_blocks(blocks)
    for found, array in zip(arrays_in(buffer, pieces), arrays, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("local_ranks", [(0,), (0, 1), (1, 4, 7)])
def test_every_element_is_inspected_by_exactly_one_worker_of_the_host(local_ranks: tuple[int, ...]) -> None:
    arrays = [np.arange(BLOCK_BYTES // 2, dtype=np.float32), np.zeros(0), np.ones(3, np.int8)]
    pieces, nbytes = lay_out(arrays)
    parcel = Parcel("p", 1, nbytes, pieces, write_out(arrays, pieces, aligned_buffer(nbytes)))
    inspected: list[tuple[int, np.ndarray]] = []
    for rank in local_ranks:
        check_share(parcel, arrays, rank, local_ranks, lambda place, part: inspected.append((place, part)))
    for place, array in enumerate(arrays):
        found = np.sort(np.concatenate([array[:0], *(part for at, part in inspected if at == place)]))
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


def test_the_digests_are_those_of_the_copy() -> None:
    source = np.zeros(1000, np.uint8)
    pieces, nbytes = lay_out([source])
    buffer = aligned_buffer(nbytes)
    blocks = write_out([source], pieces, buffer)
    source[:] = 1
    parcel = Parcel("p", 0, nbytes, pieces, blocks)
    check_share(parcel, arrays_in(buffer, pieces), 0, [0], lambda *_: None)
    with pytest.raises(UpdateRefused, match="damaged"):
        check_share(parcel, [source], 0, [0], lambda *_: None)


@pytest.mark.parametrize(
    ("hosts", "leaders"),
    [("a", {"a": 0}), ("aaa", {"a": 0}), ("abab", {"a": 0, "b": 1}), ("bba", {"b": 0, "a": 2})],
)
def test_the_lowest_rank_of_a_host_leads_it(hosts: str, leaders: dict[str, int]) -> None:
    assert leaders_of(hosts) == leaders


@pytest.mark.parametrize(
    ("nbytes", "chunk", "ranges"),
    [
        (64, 128, [(0, 64)]),
        (128, 128, [(0, 128)]),
        (192, 128, [(0, 128), (128, 192)]),
        (64 * 1024, 64, [(start, start + 64) for start in range(0, 64 * 1024, 64)]),
        (64 * 1025, 64, [(start, min(start + 128, 64 * 1025)) for start in range(0, 64 * 1025, 128)]),
    ],
)
def test_chunks(nbytes: int, chunk: int, ranges: list[tuple[int, int]]) -> None:
    assert keys.chunk_ranges(nbytes, chunk) == ranges


@given(st.integers(1, 2**45).map(lambda n: n * 64), st.sampled_from([64, 1 << 24]))
def test_there_are_never_more_chunks_than_keys(nbytes: int, chunk: int) -> None:
    ranges = keys.chunk_ranges(nbytes, chunk)
    assert len(ranges) <= 1024
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    assert all(start % 64 == 0 for start, _ in ranges)


def test_keys_of_two_parcels_never_meet_and_stay_in_their_range_far_from_those_of_training() -> None:
    first, second = keys.instance_keys(0, 1024), keys.instance_keys(1, 1024)
    assert not set(first) & set(second)
    for block in (0, 5, 10**6, 10**12):
        assert all(keys.FIRST_KEY <= key < 2**31 for key in keys.instance_keys(block, 1024))
    assert keys.FIRST_KEY <= keys.group_key((0, 1)) < 2**31
    assert keys.group_key((0, 1)) != keys.group_key((0, 2))
    # Read, not imported: it would load TensorFlow.
    source = (Path(replicast.__file__).parent / "training" / "collectives.py").read_text()
    assert "FIRST_KEY = 500_000_000" in source
    assert "FIRST_KEY_BETWEEN_STEPS = 100_000_000" in source


def opened(hosts: list[str], place: Path) -> list[Transport]:
    store = MemoryCoordination.Store()

    def open_one(rank: int) -> Transport:
        environ = {"REPLICAST_HOST_ID": hosts[rank], "REPLICAST_SHM_DIR": str(place)}
        return open_transport(Participant(MemoryCoordination(store), rank, len(hosts), environ), "replicas-1")

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(open_one, range(len(hosts))))


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        (["a"], SharedMemoryTransport),
        (["a", "a"], SharedMemoryTransport),
        (["a", "b", "a"], BroadcastTransport),
    ],
)
def test_the_hosts_decide_the_transport(hosts: list[str], kind: type[Transport], tmp_path: Path) -> None:
    transports = opened(hosts, tmp_path)
    assert [type(transport) for transport in transports] == [kind] * len(hosts)
    for transport in transports:
        transport.close()
    assert not list(tmp_path.iterdir())


def fails() -> None:
    raise JobFailed("worker 2 failed first: no such column", worker=2)


def test_who_waits_for_the_hosts_or_their_chain_is_told_that_the_job_has_failed(
    tmp_path: Path,
) -> None:
    coordination = MemoryCoordination(MemoryCoordination.Store())
    with pytest.raises(JobFailed, match="worker 2 failed first"):
        open_transport(
            Participant(coordination, 1, 3, {"REPLICAST_SHM_DIR": str(tmp_path)}, fails), "replicas-1"
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(JobFailed, match="worker 2 failed first"):
        opening.open_chain(Participant(coordination, 1, 3, {}, fails), (0, 2), "chain")


def test_the_host_is_told_apart_by_its_shared_memory(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    ids = [host_id({"REPLICAST_SHM_DIR": str(tmp_path / name)}) for name in "aab"]
    assert ids[0] == ids[1] != ids[2]
    assert host_id({"REPLICAST_HOST_ID": "mine"}) == "mine"


def test_the_directory_for_shared_memory(tmp_path: Path) -> None:
    assert shared_memory_directory({"REPLICAST_SHM_DIR": str(tmp_path)}) == tmp_path.resolve()
    assert shared_memory_directory({}).is_dir()
    with pytest.raises(ClusterError, match=r"REPLICAST_SHM_DIR must be .* Received: '.*/nowhere'"):
        shared_memory_directory({"REPLICAST_SHM_DIR": str(tmp_path / "nowhere")})


class TwoHosts:
    """Two leaders whose hosts have the broadcast between them."""

    def __init__(self, place: Path) -> None:
        self.store = MemoryCoordination.Store()
        self.both = self.sender, self.receiver = [
            BroadcastTransport(
                SharedMemoryTransport(f"job-{rank}", rank, directory=place),
                MemoryCoordination(self.store),
                rank,
                ("a", "b"),
                "job",
            )
            for rank in range(2)
        ]

    def published(self) -> Parcel:
        return self.sender.publish("one", [np.arange(3)])

    def refuses(self, transport: Transport, parcel: Parcel, why: str, timeout_secs: float = 0.01) -> None:
        with pytest.raises(UpdateRefused, match=why):
            transport.receive(parcel, timeout_secs)

    def release(self) -> None:
        for transport in self.both:
            transport.release("one")
        assert self.store.values == {}, "keys are left behind"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    two = TwoHosts(tmp_path)
    yield two
    for transport in two.both:
        transport.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("releases", [False, True])
def test_a_leader_that_gave_up_waiting_is_sent_nothing_also_after_its_release(
    hosts: TwoHosts, releases: bool
) -> None:
    parcel, why = hosts.published(), r"Worker 1 waited 0\.01 s for parcel 'one' from worker 0"
    hosts.refuses(hosts.receiver, parcel, why)
    if releases:
        hosts.receiver.release("one")
        hosts.store.values["replicast/transport/job/one/room/1"] = "{}"  # as the sender has read it before
    # It had reported enough space. Sending now would block until the transfer times out and ends the job.
    hosts.refuses(hosts.sender, parcel, why, 10.0)


@pytest.mark.parametrize("sender_receives", [True, False])
def test_a_refused_transfer_leaves_no_keys_behind_whoever_gave_up_first(
    hosts: TwoHosts, sender_receives: bool
) -> None:
    parcel = hosts.published()
    why = f"Worker {0 if sender_receives else 1} waited 0.01 s for parcel 'one' from worker"
    for transport in hosts.both if sender_receives else hosts.both[1:]:  # the receiver repeats the reason
        hosts.refuses(transport, parcel, why)
    assert hosts.store.values, "no keys were written"
    hosts.release()


def test_a_transfer_leaves_no_keys_behind_and_no_two_transfers_share_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def move(transport: BroadcastTransport, parcel: Parcel, block: int, _: object) -> None:
        if transport._rank == parcel.source:
            sent.append(block)

    monkeypatch.setattr(BroadcastTransport, "_transfer", move)
    for hosts in (TwoHosts(tmp_path), TwoHosts(tmp_path)):  # as for two models of a script
        for source, receiver in ((0, 1), (1, 0), (0, 1)):
            parcel = hosts.both[source].publish("one", [np.zeros(3)])
            with ThreadPoolExecutor() as threads:
                received = threads.submit(hosts.both[receiver].receive, parcel, 10.0)
                hosts.both[source].receive(parcel, 10.0)
                assert not received.result()[0].any()
            hosts.release()
    assert len(set(sent)) == len(sent) == 6
