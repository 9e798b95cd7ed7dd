"""The pure parts of the transports, and how a job chooses its transport."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicast.codec import decode, encode
from replicast.config import host_id, shared_memory_directory
from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.errors import ClusterError, JobFailed, UpdateRefused
from replicast.transport import ChainTransport, Parcel, Transport, open_transport
from replicast.transport.shared import arrays_in, check_share, lay_out, write_out
from replicast.update.digest import BLOCK_BYTES, blocks_of, digest_block, digest_of_blocks
from tests.threads import DEADLINE_SECS
from tests.unit.chains import environment

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float16", "int8", "int64", "bool", "uint16", "complex128"])


@given(st.lists(st.tuples(dtypes, shapes), max_size=8))
def test_arrays_come_back_from_a_buffer_as_they_went_in(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    arrays = [
        (np.arange(np.prod(shape, dtype=int)) + number).astype(dtype).reshape(shape)
        for number, (dtype, shape) in enumerate(kinds)
    ]
    pieces, nbytes = lay_out(arrays)
    buffer = np.zeros(nbytes, np.uint8)
    blocks = write_out(arrays, pieces, buffer)
    assert blocks == "".join(digest_block(content) for _, _, content in blocks_of(arrays))
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
    parcel = Parcel("p", 1, nbytes, pieces, write_out(arrays, pieces, np.zeros(nbytes, np.uint8)))
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
    buffer = np.zeros(nbytes, np.uint8)
    blocks = write_out([source], pieces, buffer)
    source[:] = 1
    parcel = Parcel("p", 0, nbytes, pieces, blocks)
    check_share(parcel, arrays_in(buffer, pieces), 0, [0], lambda *_: None)
    with pytest.raises(UpdateRefused, match="damaged"):
        check_share(parcel, [source], 0, [0], lambda *_: None)


def opened(hosts: list[str], place: Path) -> list[Transport]:
    store = MemoryCoordination.Store()

    def open_one(rank: int) -> Transport:
        exchange = DirectExchange(MemoryCoordination(store), "replicas-1", rank, len(hosts))
        return open_transport(exchange, environment(rank, hosts, place), DEADLINE_SECS)

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(open_one, range(len(hosts))))


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        (["a"], Transport),
        (["a", "a"], Transport),
        (["a", "b", "a"], ChainTransport),
    ],
)
def test_the_hosts_decide_the_transport(hosts: list[str], kind: type[Transport], tmp_path: Path) -> None:
    transports = opened(hosts, tmp_path)
    assert [type(transport) for transport in transports] == [kind] * len(hosts)
    for transport in transports:
        transport.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answered", [(), ("host",), ("host", "port")])
def test_who_waits_for_the_hosts_or_their_links_is_told_that_the_job_has_failed(
    answered: tuple[str, ...], tmp_path: Path
) -> None:
    store = MemoryCoordination.Store()

    def has_failed(_: int) -> bool:
        raise JobFailed("worker 1 failed first: no such column", worker=1)

    other = DirectExchange(MemoryCoordination(store), "replicas-1", 1, 2)
    for what in answered:
        other.tell(f"{what}/1", {"host": '["b"]', "port": "0"}[what])
    exchange = DirectExchange(MemoryCoordination(store), "replicas-1", 0, 2, has_failed)
    with pytest.raises(JobFailed, match="worker 1 failed first"):
        open_transport(exchange, environment(0, "ab", tmp_path), DEADLINE_SECS)
    assert not list(tmp_path.iterdir())


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
