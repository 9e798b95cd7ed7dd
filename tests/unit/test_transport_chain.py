"""The chain of hosts: who gets the bytes from whom, and what happens when a link, a host or a stranger fails.

Threads act as workers; each has its own address on the loopback network, 127.0.0.1 is worker 0.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicast.coordination import MemoryCoordination
from replicast.errors import UpdateRefused
from replicast.mapped_memory import aligned
from replicast.transport import (
    BroadcastTransport,
    ChainTransport,
    Parcel,
    Piece,
    Transport,
    chain,
    open_transport,
)
from replicast.transport.base import lay_out
from replicast.transport.chain import (
    MAX_DAMAGED,
    SEGMENT_BYTES,
    ChainLink,
    Fetch,
    Holdings,
    Kind,
    Missing,
    Server,
    predecessor,
    segments_of,
)
from replicast.update.digest import BLOCK_BYTES, digest_block
from tests.unit.chains import chain_of, environment

SECRET = b"s" * 32
ARRAYS = [np.arange(count, dtype=np.float32) for count in (300_000, 3, 900_000, 0, 1_500_000)]
"""Of 1.2 MB, 12 bytes, 3.6 MB, nothing, and 6 MB in two blocks: five segments."""
SEGMENTS = 5
Send = Callable[[socket.socket, int, Any], None]
real_send: Send = chain._send_segment


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for parcels as small as these."""
    monkeypatch.setattr(chain, "STREAM_BYTES", 1 << 20)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times, so that what is silent is noticed soon."""
    monkeypatch.setattr(chain, "SILENT_SECS", 0.3)
    monkeypatch.setattr(chain, "BEAT_SECS", 0.05)


def close(transports: list[ChainTransport]) -> None:
    for transport in transports:
        transport.close()


def receive_on_all(
    threads: ThreadPoolExecutor, transports: list[ChainTransport], parcel: Parcel, timeout_secs: float = 20.0
) -> list[Future[list[np.ndarray]]]:
    return [threads.submit(transport.receive, parcel, timeout_secs) for transport in transports]


def assert_arrived(received: list[Future[list[np.ndarray]]]) -> None:
    for one in received:
        for found, sent in zip(one.result(), ARRAYS, strict=True):
            assert found.tobytes() == sent.tobytes()


def sender(connection: socket.socket) -> int:
    """The worker whose end of a connection this is."""
    return int(connection.getsockname()[0].rpartition(".")[2]) - 1


def parcel_of(*counts: int) -> Parcel:
    starts = [0, *itertools.accumulate(aligned(count) for count in counts)]
    pieces = tuple(Piece("uint8", (count,), start) for count, start in zip(counts, starts, strict=False))
    return Parcel("p", 0, starts[-1], pieces, "")


# Who gets what from whom: no I/O.


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=12))
def test_every_block_is_in_exactly_one_segment_and_segments_are_in_order(counts: list[int]) -> None:
    parcel = parcel_of(*counts)
    segments = segments_of(parcel)
    blocks = [block for segment in segments for block in segment.blocks]
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert sum(block.stop - block.start for block in blocks) == sum(counts)
    at = 0
    for segment in segments:
        assert at <= segment.start < segment.stop <= parcel.nbytes
        assert (segment.start, segment.stop) == (segment.blocks[0].start, segment.blocks[-1].stop)
        assert segment.stop - segment.start <= (SEGMENT_BYTES if len(segment.blocks) > 1 else BLOCK_BYTES)
        at = segment.stop


def test_many_small_arrays_are_few_segments() -> None:
    assert len(segments_of(parcel_of(*[100] * 5000))) == 1
    assert segments_of(parcel_of()) == ()


def test_the_parcel_of_these_tests_has_the_segments_that_they_count_on() -> None:
    pieces, nbytes = lay_out(ARRAYS)
    assert len(segments_of(Parcel("p", 0, nbytes, pieces, ""))) == SEGMENTS


def test_a_segment_is_with_one_stream_until_it_arrives_or_is_given_back() -> None:
    missing = Missing(3)
    assert [missing.take() for _ in range(4)] == [0, 1, 2, None]
    missing.give_back([2, 0])
    assert [missing.take(), missing.take(), missing.take()] == [0, 2, None]
    for _ in range(2):
        missing.arrived()
    assert not missing.complete
    missing.arrived()
    assert missing.complete


def test_a_segment_that_is_always_damaged_is_given_up() -> None:
    missing = Missing(1)
    for _ in range(MAX_DAMAGED - 1):
        assert missing.take() == 0
        assert missing.damaged(0)
    assert missing.take() == 0
    assert not missing.damaged(0)
    assert missing.take() is None


@pytest.mark.parametrize("leaders", [(0, 1), (0, 2, 5), (0, 3, 4, 9)])
def test_from_every_source_the_hosts_are_a_chain(leaders: tuple[int, ...]) -> None:
    for source in leaders:
        reached = [source]
        while len(reached) < len(leaders):
            reached += [one for one in leaders if predecessor(leaders, one) == reached[-1]]
        assert sorted(reached) == list(leaders)


def test_what_a_host_has_is_told_from_what_it_waits_for_and_from_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    holdings = Holdings(7)
    assert holdings.find("p", 0, 0.0) == 7
    parcel = parcel_of(BLOCK_BYTES, BLOCK_BYTES)
    holdings.add(parcel, os.open(tmp_path / "file", os.O_RDONLY), arrives_from=3)
    holdings.arrived("p", 1)
    assert holdings.find("p", 0, 0.0) == 3
    holdings.waits_for("p", 1)
    assert holdings.find("p", 0, 0.0) == 1
    found = holdings.find("p", 1, 0.0)
    assert isinstance(found, tuple)
    with pytest.raises(UpdateRefused, match="has no segment 2"):
        holdings.find("p", 2, 0.0)
    holdings.remove("p")
    assert os.read(found[0], 1) == b"x"  # what is being sent stays open
    os.close(found[0])
    with pytest.raises(UpdateRefused, match="Worker 7 has released parcel 'p'"):
        holdings.find("p", 1, 0.0)


# What goes over the links.


def test_each_link_carries_the_bytes_once(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[int] = Counter()

    def counted(connection: socket.socket, descriptor: int, segment: Any) -> None:
        sent[sender(connection)] += segment.stop - segment.start
        real_send(connection, descriptor, segment)

    monkeypatch.setattr(chain, "_send_segment", counted)
    transports = chain_of("abbc", tmp_path)
    parcel = transports[3].publish("one", ARRAYS)
    assert_arrived(receive_on_all(threads, transports, parcel))
    total = sum(array.nbytes for array in ARRAYS)
    assert {worker: round(count / total, 3) for worker, count in sent.items()} == {3: 1.0, 0: 1.0}
    close(transports)


def test_a_host_forwards_what_it_has_before_it_has_all(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_host_has_one = threading.Event()

    def sending(connection: socket.socket, descriptor: int, segment: Any) -> None:
        if sender(connection) == 0 and segment.blocks[-1].number == SEGMENTS - 1:
            assert last_host_has_one.wait(120), "nothing was forwarded"
        real_send(connection, descriptor, segment)
        if sender(connection) == 1:
            last_host_has_one.set()

    monkeypatch.setattr(chain, "_send_segment", sending)
    transports = chain_of("abc", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    assert_arrived(receive_on_all(threads, transports, parcel))
    close(transports)


def test_memory_on_other_hosts_is_used_again_when_the_source_uses_its_own_again(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    transports = chain_of("abb", tmp_path)
    files = []
    for number in range(4):
        content = [np.full(500_000, number, np.float32)]
        parcel = transports[0].publish(f"p{number}", content, to_read=True)
        received = [one.result() for one in receive_on_all(threads, transports, parcel)]
        assert all(arrays[0].tobytes() == content[0].tobytes() for arrays in received)
        files.append(sorted(path.name for path in tmp_path.iterdir()))
        if number == 1:
            transports[1].release("p1")  # the leader may be slower than the source and its next parcel
        transports[0].release(parcel.id, reuse=True)
    assert len(files[0]) == 2
    assert all(found == files[0] for found in files)
    close(transports)
    assert not list(tmp_path.iterdir())


def test_memory_on_other_hosts_is_given_back_when_its_source_gives_its_own_back(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    transports = chain_of("ab", tmp_path)
    for number in range(3):  # each needs more than the last one, so none can be used again
        content = [np.full(300_000 * (number + 1), number, np.float32)]
        parcel = transports[0].publish(f"p{number}", content, to_read=True)
        for one in receive_on_all(threads, transports, parcel):
            assert one.result()[0].tobytes() == content[0].tobytes()
        transports[1].release(parcel.id)
        transports[0].release(parcel.id, reuse=True)
    assert len(list(tmp_path.iterdir())) == 2
    close(transports)
    assert not list(tmp_path.iterdir())


def test_a_transfer_leaves_no_keys_behind_and_the_secret_is_gone_before_the_first(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    store = MemoryCoordination.Store()
    transports = chain_of("abb", tmp_path, store)
    opened = set(store.values)
    assert not any("secret" in key for key in opened)
    parcel = transports[0].publish("one", ARRAYS)
    assert_arrived(receive_on_all(threads, transports, parcel))
    assert set(store.values) - opened == {"replicast/transport/job/one/here/1"}
    for transport in transports:
        transport.release("one")
    assert set(store.values) == opened
    close(transports)


# Links and hosts that fail.


def test_a_broken_connection_is_opened_again_and_only_what_is_missing_is_sent(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[int] = Counter()
    breaks = [4, 2]

    def breaking(connection: socket.socket, descriptor: int, segment: Any) -> None:
        number = segment.blocks[0].number
        if number in breaks:
            breaks.remove(number)
            connection.sendall(b"\0" * 1000)
            raise ConnectionResetError
        real_send(connection, descriptor, segment)
        sent[number] += 1

    monkeypatch.setattr(chain, "_send_segment", breaking)
    transports = chain_of("ab", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    assert_arrived(receive_on_all(threads, transports, parcel))
    assert breaks == []
    assert len(sent) == SEGMENTS
    assert sum(sent.values()) <= SEGMENTS + 2 * chain.IN_FLIGHT
    close(transports)


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Flips a bit of what arrives, so many times; returns what is left of them."""
    left = [times]
    real = chain.receive_into

    def damaging(connection: socket.socket, view: memoryview, *until: Any) -> None:
        real(connection, view, *until)
        if left[0] > 0 and len(view) > 10_000:
            left[0] -= 1
            view[5] ^= 1

    monkeypatch.setattr(chain, "receive_into", damaging)
    return left


def test_a_block_that_arrives_damaged_is_fetched_again(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = damage(monkeypatch, 2)
    transports = chain_of("abc", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    assert_arrived(receive_on_all(threads, transports, parcel))
    assert left == [0]
    close(transports)


def test_a_host_that_gets_only_damaged_bytes_refuses_for_the_hosts_after_it_and_forwards_none(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, 10**6)
    transports = chain_of("abcc", tmp_path)
    parcel = transports[0].publish("one", [ARRAYS[0]])
    source, *others = receive_on_all(threads, transports, parcel)
    assert source.result()[0].tobytes() == ARRAYS[0].tobytes()
    for other in others:
        with pytest.raises(UpdateRefused, match="from worker 0 arrived damaged at worker 1"):
            other.result()
    assert len(list(tmp_path.iterdir())) == 1, "a file of a host that refused is left behind"
    close(transports)


def test_a_host_without_room_refuses_for_the_hosts_after_it_and_the_next_parcel_passes(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = chain_of("abcc", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(UpdateRefused, match="Worker 1 has no room"):
            transports[1].receive(parcel, 5.0)
    transports[1].release("one")  # it may be told to discard it before the next host asks for it
    for other in receive_on_all(threads, transports[2:], parcel):
        with pytest.raises(UpdateRefused, match="Worker 1 has no room"):
            other.result()
    for transport in transports:
        transport.release("one")
    assert_arrived(receive_on_all(threads, transports, transports[0].publish("two", ARRAYS)))
    close(transports)


@pytest.mark.usefixtures("quick")
def test_a_host_that_dies_during_a_transfer_is_named_and_the_others_end_in_time(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def dying(connection: socket.socket, descriptor: int, segment: Any) -> None:
        if sender(connection) == 1:
            begun.set()
            raise ConnectionResetError
        real_send(connection, descriptor, segment)

    monkeypatch.setattr(chain, "_send_segment", dying)
    transports = chain_of("abc", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    _, _, last = receive_on_all(threads, transports, parcel, 2.0)
    assert begun.wait(120)
    transports[1].close()
    with pytest.raises(UpdateRefused, match=r"Worker 2 waited .* for parcel 'one' from worker 1"):
        last.result()
    close(transports)


@pytest.mark.usefixtures("quick")
def test_every_host_names_the_frozen_one_and_not_the_one_that_waits_for_it(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    thawed = threading.Event()

    def freezing(connection: socket.socket, descriptor: int, segment: Any) -> None:
        if sender(connection) == 0:
            thawed.wait(120)
        real_send(connection, descriptor, segment)

    monkeypatch.setattr(chain, "_send_segment", freezing)
    transports = chain_of("abccd", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    others = receive_on_all(threads, transports[:4], parcel, 20.0)
    with pytest.raises(UpdateRefused, match=r"Worker 4 waited .* from worker 0"):  # the others have more time
        transports[4].receive(parcel, 2.0)
    thawed.set()
    assert_arrived(others)
    transports[4].release("one")
    others = receive_on_all(threads, transports, transports[0].publish("two", ARRAYS), 20.0)
    assert_arrived(others)
    close(transports)


@pytest.mark.usefixtures("quick")
def test_all_workers_of_a_host_hear_whom_their_leader_waited_for(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    thawed = threading.Event()
    monkeypatch.setattr(chain, "_send_segment", lambda *_: thawed.wait(120))
    transports = chain_of("abb", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)
    for other in receive_on_all(threads, transports, parcel, 1.5)[1:]:
        with pytest.raises(UpdateRefused, match="Worker 1 waited 1 s for parcel 'one' from worker 0"):
            other.result()
    thawed.set()
    assert len(list(tmp_path.iterdir())) == 1, "a file of a host that refused is left behind"
    close(transports)


@pytest.mark.usefixtures("quick")
def test_a_host_that_was_frozen_for_a_while_goes_on_where_it_was(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    froze = threading.Event()

    def freezing(connection: socket.socket, descriptor: int, segment: Any) -> None:
        if sender(connection) == 0 and not froze.is_set():
            froze.set()
            time.sleep(3 * chain.SILENT_SECS)
        real_send(connection, descriptor, segment)

    monkeypatch.setattr(chain, "_send_segment", freezing)
    transports = chain_of("abc", tmp_path)
    assert_arrived(receive_on_all(threads, transports, transports[0].publish("one", ARRAYS)))
    assert froze.is_set()
    close(transports)


def test_closing_ends_a_transfer_that_waits(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    transports = chain_of("ab", tmp_path)
    parcel = transports[0].publish("one", ARRAYS)  # and worker 0 never receives it
    waits = threads.submit(transports[1].receive, parcel, 600.0)
    while not waits.running():
        time.sleep(0.001)
    transports[1].close()
    with pytest.raises(UpdateRefused, match="Worker 1 has closed its connections"):
        waits.result(120)
    close(transports)


def link_to(port: int, secret: bytes = SECRET, rank: int = 1) -> ChainLink:
    return ChainLink("127.0.0.1", port, secret, rank, 0)


# One fetch, from a host that a test plays.


@contextlib.contextmanager
def fetch_from(play: Callable[[socket.socket], object]) -> Iterator[Fetch]:
    """A parcel of one array, to be fetched from worker 0, which does what `play` does on each connection."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):
                    chain.admit(connection, SECRET)
                    play(connection)

    content = np.arange(64, dtype=np.uint8)
    pieces, nbytes = lay_out([content])
    parcel = Parcel("p", 0, nbytes, pieces, digest_block(content))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        link = link_to(listener.getsockname()[1], rank=2)
        yield Fetch(parcel, np.zeros(nbytes, np.uint8), link, Holdings(2))
        link.close()
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()


def drip(connection: socket.socket) -> None:
    """Sends a segment so slowly that it never stands still, and takes several seconds."""
    chain.receive_request(connection)
    chain.send_answer(connection, Kind.WAITING, 7)
    chain.send_answer(connection, Kind.SEGMENT, 64)
    for byte in range(64):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.usefixtures("quick")
def test_a_fetch_ends_in_time_although_bytes_still_arrive_and_names_the_host_that_sends_them() -> None:
    with fetch_from(drip) as slow, pytest.raises(UpdateRefused, match="parcel 'p' from worker 0"):
        slow.run(0.5)


# Readers and strangers.


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    """Worker 0 with one parcel of one segment, larger than what the system buffers."""
    (tmp_path / "file").write_bytes(bytes(BLOCK_BYTES))
    holdings = Holdings(0)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    holdings.add(parcel_of(BLOCK_BYTES), descriptor, arrives_from=None)
    one = Server("127.0.0.1", SECRET, holdings)
    yield one
    one.close()
    holdings.clear()
    eventually(lambda: not chain_threads(), "a thread is left behind")


def chain_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("replicast-chain")]


def senders() -> int:
    return chain_threads().count("replicast-chain-send")


def is_closed(connection: socket.socket) -> bool:
    """Waits for what the other side does: whether it closes the connection and sends nothing before."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def eventually(happens: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def ask_and_take(link: ChainLink) -> None:
    connection = link.take()
    chain.send_request(connection, "p", 0)
    kind, count = chain.receive_answer(connection)
    assert (kind, count) == (Kind.SEGMENT, BLOCK_BYTES)
    chain.receive_bytes(connection, count)
    link.give_back(connection)


@pytest.mark.usefixtures("quick")
def test_a_reader_that_takes_nothing_holds_up_no_other_and_is_given_up(served: Server) -> None:
    slow, fast = (link_to(served.port, rank=rank) for rank in (1, 2))
    connection = slow.take()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(4):
        chain.send_request(connection, "p", 0)
    ask_and_take(fast)
    fast.close()
    eventually(lambda: senders() == 0, "the server still waits for the slow reader")
    slow.drop(connection)
    slow.close()


def test_a_reader_that_takes_a_little_at_a_time_is_given_up_too(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "SEGMENT_SECS", 0.1)
    link = link_to(served.port)
    connection = link.take()
    for _ in range(1000):
        chain.send_request(connection, "p", 0)
    eventually(lambda: bool(connection.recv(1 << 14)) and senders() == 0, "it is still served")
    link.drop(connection)
    link.close()


def test_a_server_that_waits_for_a_segment_ends_when_it_is_closed(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "BEAT_SECS", 3600.0)  # it would say nothing, and look at nothing, before
    find, waits = Holdings.find, threading.Event()

    def finding(*arguments: Any) -> Any:
        waits.set()
        return find(*arguments)

    monkeypatch.setattr(Holdings, "find", finding)
    link = link_to(served.port)
    connection = link.take()
    chain.send_request(connection, "not here yet", 0)
    assert waits.wait(120)
    served.close()
    assert senders() == 0
    link.drop(connection)
    link.close()


def test_connections_are_used_again(served: Server) -> None:
    link = link_to(served.port)
    for _ in range(5):
        ask_and_take(link)
    assert senders() == 1
    link.close()


@pytest.mark.parametrize("secret", [b"", b"S" * 32, SECRET[:-1]])
def test_whoever_does_not_know_the_secret_gets_nothing(secret: bytes, served: Server) -> None:
    link = link_to(served.port, secret)
    with pytest.raises(OSError, match=r"closed by the other side|reset by peer"):
        link.take()
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as stranger:
        greeting = stranger.recv(1000)
        assert len(greeting) < 100
        assert SECRET not in greeting
        stranger.sendall(greeting + b"\0" * 200)
        assert is_closed(stranger)
    link.close()
    ask_and_take(right := link_to(served.port))
    right.close()


def test_a_proof_that_was_overheard_is_worth_nothing(served: Server) -> None:
    def listening() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=120)
        connection.recv(1000)
        return connection

    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as threads:
        port = impostor.getsockname()[1]
        victim = threads.submit(link_to(port).take)
        relayed, _ = impostor.accept()
        relayed.sendall(b"replicast-chain-1" + bytes(32))
        proof = relayed.recv(1000)
        assert len(proof) == 68
        with listening() as replaying:
            replaying.sendall(proof)
            assert is_closed(replaying)
        relayed.sendall(proof[-32:])  # nor is the victim's own proof an answer to it
        with pytest.raises(ConnectionError, match="does not know the secret"):
            victim.result()
        relayed.close()


def test_strangers_are_few_and_keep_no_peer_out(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "HANDSHAKE_SECS", 600.0)
    strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(100)]
    ask_and_take(link := link_to(served.port))
    eventually(lambda: senders() <= chain.MAX_STRANGERS + 1, "too many strangers have a thread")
    for stranger in strangers:
        stranger.close()
    link.close()


def test_a_stranger_that_says_nothing_is_gone_soon(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "HANDSHAKE_SECS", 0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as stranger:
        assert stranger.recv(1000)  # the nonce
        assert is_closed(stranger)


def send_slowly(connection: socket.socket, count: int) -> None:
    for _ in range(count):
        connection.sendall(b"x")
        time.sleep(0.1)


def test_a_stranger_that_sends_a_byte_now_and_then_is_gone_as_soon(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "HANDSHAKE_SECS", 0.2)
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=120) as stranger,
        pytest.raises(OSError),  # noqa: PT011 - reset, or a broken pipe
    ):
        send_slowly(stranger, 67)  # of the 68 bytes of a proof


def test_a_server_without_free_descriptors_says_so_once_and_serves_later(
    served: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE] * 3

    def fails_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    with socket.create_connection(("127.0.0.1", served.port), timeout=120):
        ask_and_take(link := link_to(served.port))
        ask_and_take(other := link_to(served.port, rank=2))
    assert failures == []
    assert [record.message[:19] for record in caplog.records] == ["Too many open files"]
    link.close()
    other.close()


def test_the_port_is_open_at_the_named_address_only(served: Server) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=120)
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(OSError, match=r"all addresses|not supported|Cannot assign"):
            Server(everywhere, SECRET, Holdings(0))


def test_an_authenticated_peer_that_talks_nonsense_is_closed(served: Server) -> None:
    link = link_to(served.port)
    connection = link.take()
    connection.sendall(b"\xff" * 1000)
    with pytest.raises(OSError):  # noqa: PT011 - closed, or reset
        chain.receive_bytes(connection, 1)
    link.drop(connection)
    ask_and_take(link)
    link.close()


@pytest.mark.parametrize("said", [b"{", b"[]", b"\xff"])
def test_an_answer_that_makes_no_sense_is_a_broken_connection(said: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(bytes([Kind.REFUSED]) + len(said).to_bytes(8, "big") + said)
        with pytest.raises(ConnectionError, match="not a refusal"):
            chain.receive_answer(here)
        there.sendall(bytes([7]) + bytes(8))
        with pytest.raises(ConnectionError, match="not an answer"):
            chain.receive_answer(here)


def test_a_refusal_of_any_length_is_told() -> None:
    here, there = socket.socketpair()
    with here, there:
        chain.send_refusal(there, UpdateRefused("No room", remedy="x" * 10**6))
        with pytest.raises(UpdateRefused, match="No room"):
            chain.receive_answer(here)


def test_a_host_that_cannot_start_a_thread_for_a_connection_serves_the_next(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_to(served.port)
    real = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "replicast-chain-send":
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match=r"closed by the other side|reset by peer"):
            link.take()
    ask_and_take(link)
    link.close()


def test_a_host_that_cannot_start_a_thread_for_a_stream_fetches_with_fewer(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = chain_of("ab", tmp_path)
    real = threading.Thread.start
    streams: list[threading.Thread] = []

    def one_thread(thread: threading.Thread) -> None:
        if thread.name == "replicast-chain-fetch":
            streams.append(thread)
            if len(streams) > 1:
                raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", one_thread)
    assert_arrived(receive_on_all(threads, transports, transports[0].publish("one", ARRAYS)))
    assert len(streams) == 2
    close(transports)


# Which transport a job has.


def opened(
    hosts: str, place: Path, addresses: list[str], store: MemoryCoordination.Store, name: str = "replicas-1"
) -> list[Transport]:
    def open_one(rank: int) -> Transport:
        environ = environment(rank, hosts, place, addresses)
        return open_transport(MemoryCoordination(store), rank, len(hosts), environ, name)

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(open_one, range(len(hosts))))


def test_hosts_that_reach_each_other_are_a_chain_also_for_a_second_model(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    store = MemoryCoordination.Store()
    for name in ("replicas-1", "replicas-2"):
        transports: Any = opened("aba", tmp_path, ["127.0.0.1", "localhost", "127.0.0.3"], store, name)
        assert {type(transport) for transport in transports} == {ChainTransport}
        assert_arrived(receive_on_all(threads, transports, transports[2].publish("one", ARRAYS)))
        close(transports)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1", "worker 1 cannot listen at 192.0.2.1"),
        ("0.0.0.0", "all addresses of a host"),
        ("no-such-host.invalid", "worker 1 cannot listen at no-such-host.invalid"),
    ],
)
def test_all_workers_fall_back_if_one_cannot_listen_at_its_address_and_the_log_says_so_once(
    address: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryCoordination.Store()
    with caplog.at_level(logging.INFO, "replicast"):
        transports = opened("abca", tmp_path, ["127.0.0.1", address, "127.0.0.3", "127.0.0.1"], store)
    assert {type(transport) for transport in transports} == {BroadcastTransport}
    (said,) = [record for record in caplog.records if "go between the 3 hosts" in record.message]
    assert why in said.message
    assert said.levelname == "WARNING"
    for transport in transports:
        transport.close()
    eventually(lambda: not chain_threads(), "a thread is left behind")


def test_all_workers_fall_back_if_one_cannot_reach_the_host_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = ChainLink.take

    def filtered(link: ChainLink, *timeout: float) -> socket.socket:
        if link.rank == 2:
            raise TimeoutError("timed out")
        return real(link, *timeout)

    monkeypatch.setattr(ChainLink, "take", filtered)
    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    transports = opened("abc", tmp_path, addresses, MemoryCoordination.Store())
    assert {type(transport) for transport in transports} == {BroadcastTransport}
    assert "worker 2 cannot reach worker 1 at 127.0.0.2:" in caplog.text
    for transport in transports:
        transport.close()
