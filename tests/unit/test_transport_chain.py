"""The chain of hosts: who gets the bytes from whom, and what happens when a link, a host or a stranger fails.

Threads act as workers; each has its own address on the loopback network, 127.0.0.1 is worker 0.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicast import connections
from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.errors import ClusterError, JobFailed, UpdateRefused
from replicast.mapped_memory import aligned
from replicast.processes import Deadline
from replicast.transport import (
    ChainTransport,
    Parcel,
    Piece,
    Transport,
    chain,
    open_transport,
)
from replicast.transport.chain import (
    ChainLink,
    Holdings,
    Kind,
    Server,
    blocks_in,
)
from replicast.transport.shared import SharedFile, lay_out
from replicast.update.digest import BLOCK_BYTES, digest_block
from tests.threads import DEADLINE_SECS
from tests.unit.chains import chain_of, environment

SECRET = b"s" * 32
ARRAYS = [np.arange(count, dtype=np.float32) for count in (300_000, 3, 900_000, 0, 1_500_000)]
"""Of 1.2 MB, 12 bytes, 3.6 MB, nothing, and 6 MB in two blocks: five blocks."""
NBYTES = lay_out(ARRAYS)[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times, so that what is silent is noticed soon."""
    monkeypatch.setattr(chain, "SILENT_SECS", 0.3)
    monkeypatch.setattr(chain, "BEAT_SECS", 0.05)


class Job:
    """The workers of a job, which receive in threads."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.store = MemoryCoordination.Store()
        self.threads = ThreadPoolExecutor(8)
        self.workers: list[Any] = []

    def on(self, hosts: str) -> Self:
        self.workers = list(chain_of(hosts, self.place, self.store))
        return self

    def publish(self, source: int = 0, name: str = "one", arrays: Sequence[np.ndarray] = ARRAYS) -> Parcel:
        parcel: Parcel = self.workers[source].publish(name, arrays)
        return parcel

    def receive(
        self, parcel: Parcel, timeout_secs: float = 20.0, ranks: Sequence[int] = ()
    ) -> list[Future[list[np.ndarray]]]:
        return [
            self.threads.submit(self.workers[rank].receive, parcel, timeout_secs)
            for rank in ranks or range(len(self.workers))
        ]

    def release(self, name: str) -> None:
        for worker in self.workers:
            worker.release(name)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.place.iterdir())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "shm").mkdir()
    one = Job(tmp_path / "shm")
    yield one
    one.close()
    one.threads.shutdown()
    assert not one.files(), "a file is left behind"


BeforeSending = Callable[[Callable[[int, range, socket.socket], object]], None]


@pytest.fixture
def before_sending(monkeypatch: pytest.MonkeyPatch) -> BeforeSending:
    """Calls a function with the worker that sends, and what it sends where, before it sends some bytes."""
    send = chain._send_bytes

    def patch(hook: Callable[[int, range, socket.socket], object]) -> None:
        def sending(connection: socket.socket, descriptor: int, at: int, stop: int) -> None:
            # The address of a worker is its end of the connection.
            hook(int(connection.getsockname()[0].rpartition(".")[2]) - 1, range(at, stop), connection)
            send(connection, descriptor, at, stop)

        monkeypatch.setattr(chain, "_send_bytes", sending)

    return patch


def assert_arrived(received: list[Future[list[np.ndarray]]]) -> None:
    for one in received:
        for found, sent in zip(one.result(), ARRAYS, strict=True):
            assert found.tobytes() == sent.tobytes()


def parcel_of(*counts: int) -> Parcel:
    starts = [0, *itertools.accumulate(aligned(count) for count in counts)]
    pieces = tuple(Piece("uint8", (count,), start) for count, start in zip(counts, starts, strict=False))
    return Parcel("p", 0, starts[-1], pieces, "")


# Who gets what from whom: no I/O.


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=12))
def test_blocks_are_in_order_and_hold_every_byte_of_the_arrays(counts: list[int]) -> None:
    parcel = parcel_of(*counts)
    at = 0
    for start, stop in blocks_in(parcel):
        assert at <= start < stop <= min(start + BLOCK_BYTES, parcel.nbytes)
        at = stop
    assert sum(stop - start for start, stop in blocks_in(parcel)) == sum(counts)


def test_what_a_host_has_is_told_from_what_it_waits_for_and_from_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    holdings = Holdings(7)
    assert holdings.find("p", 0, 0.0) == 7
    parcel = parcel_of(BLOCK_BYTES, BLOCK_BYTES)
    holding = holdings.add(parcel, os.open(tmp_path / "file", os.O_RDONLY), arrives_from=3)
    assert holdings.find("p", 0, 0.0) == 3
    holdings.arrived("p", BLOCK_BYTES)
    holding.waits_for = 1
    assert holdings.find("p", BLOCK_BYTES, 0.0) == 1
    found = holdings.find("p", BLOCK_BYTES - 1, 0.0)
    assert isinstance(found, tuple)
    assert found[1] == BLOCK_BYTES
    assert holdings.find("p", 2 * BLOCK_BYTES, 0.0) is None
    holdings.remove("p")
    assert os.read(found[0], 1) == b"x"  # what is being sent stays open
    os.close(found[0])
    with pytest.raises(UpdateRefused, match="Worker 7 has released parcel 'p'"):
        holdings.find("p", 0, 0.0)


# What goes over the links.


def test_each_link_carries_the_bytes_once(job: Job, before_sending: BeforeSending) -> None:
    sent: Counter[int] = Counter()
    before_sending(lambda worker, part, _: sent.update({worker: len(part)}))
    parcel = job.on("abbc").publish(source=3)
    assert_arrived(job.receive(parcel))
    total = sum(array.nbytes for array in ARRAYS)
    assert {worker: round(count / total, 3) for worker, count in sent.items()} == {3: 1.0, 0: 1.0}


def test_a_host_forwards_what_it_has_before_it_has_all(job: Job, before_sending: BeforeSending) -> None:
    forwards = threading.Event()

    def hold_the_last_back(worker: int, part: range, _: object) -> None:
        if worker == 1:
            forwards.set()
        elif part.stop >= NBYTES - BLOCK_BYTES:
            assert forwards.wait(120), "nothing was forwarded"

    before_sending(hold_the_last_back)
    assert_arrived(job.on("abc").receive(job.publish()))


def test_memory_on_other_hosts_is_used_again_when_the_source_uses_its_own_again(job: Job) -> None:
    workers, files = job.on("abb").workers, []
    for number in range(5):
        content = [np.full(500_000, number, np.float32)]
        parcel = workers[0].publish(f"p{number}", content, to_read=True)
        received = [one.result() for one in job.receive(parcel)]
        assert all(arrays[0].tobytes() == content[0].tobytes() for arrays in received)
        files.append(job.files())
        if (
            number != 2
        ):  # the leader may be slower than the source and its next parcel: that gets other memory
            workers[1].release(parcel.id)
        workers[0].release(parcel.id, reuse=True)
    assert len(files[0]) == 2
    assert files[0] == files[1] == files[2]
    workers[1].release("p2")
    assert len(job.files()) == 2


def test_memory_on_other_hosts_is_given_back_when_its_source_gives_its_own_back(job: Job) -> None:
    workers = job.on("ab").workers
    for number in range(3):  # each needs more than the last one, so none can be used again
        content = [np.full(300_000 * (number + 1), number, np.float32)]
        parcel = workers[0].publish(f"p{number}", content, to_read=True)
        for one in job.receive(parcel):
            assert one.result()[0].tobytes() == content[0].tobytes()
        workers[1].release(parcel.id)
        workers[0].release(parcel.id, reuse=True)
    assert len(job.files()) == 2


def test_a_transfer_leaves_no_keys_behind(job: Job) -> None:
    parcel = job.on("abb").publish()
    opened = set(job.store.values)
    assert_arrived(job.receive(parcel))
    assert set(job.store.values) - opened == {"replicast/chain/parcel/one/1"}
    job.release("one")
    assert set(job.store.values) == opened


# Links and hosts that fail.


def test_a_broken_connection_is_opened_again_and_only_what_is_missing_is_sent(
    job: Job, before_sending: BeforeSending
) -> None:
    sent: list[range] = []
    breaks = [9 << 20, 3 << 20]

    def breaking(_: int, part: range, connection: socket.socket) -> None:
        if breaks and part.stop > breaks[-1]:
            breaks.pop()
            connection.sendall(b"\0" * 1000)
            raise ConnectionResetError
        sent.append(part)

    before_sending(breaking)
    assert_arrived(job.on("ab").receive(job.publish()))
    assert breaks == []
    assert sum(map(len, sent)) <= NBYTES + 2 * (BLOCK_BYTES + chain.MOST_BYTES)


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Flips a bit of what arrives, so many times; returns what is left of them."""
    left = [times]
    real = chain.receive_into

    def damaging(connection: socket.socket, view: memoryview, *until: Any) -> None:
        real(connection, view, *until)
        if left[0] > 0 and len(view) > 1000:
            left[0] -= 1
            view[5] ^= 1

    monkeypatch.setattr(chain, "receive_into", damaging)
    return left


def test_a_block_that_arrives_damaged_is_fetched_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    left = damage(monkeypatch, 2)
    assert_arrived(job.on("abc").receive(job.publish()))
    assert left == [0]


def test_a_host_that_gets_only_damaged_bytes_refuses_for_the_hosts_after_it_and_forwards_none(
    job: Job, before_sending: BeforeSending, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    before_sending(lambda worker, *_: sent.append(worker))
    damage(monkeypatch, 10**6)
    parcel = job.on("abcc").publish(arrays=[ARRAYS[0][:1000]])
    source, *others = job.receive(parcel)
    assert source.result()[0].tobytes() == ARRAYS[0][:1000].tobytes()
    for other in others:
        with pytest.raises(UpdateRefused, match="from worker 0 arrived damaged at worker 1"):
            other.result()
    assert sent == [0] * chain.MAX_DAMAGED, "it is fetched again, and then given up"
    assert len(job.files()) == 1, "a file of a host that refused is left behind"


@pytest.mark.parametrize(
    ("call", "problem", "why"),
    [
        pytest.param("posix_fallocate", errno.ENOSPC, "Worker 1 has no room", id="no room"),
        pytest.param("dup", errno.EMFILE, "OSError: .* Too many open files", id="no descriptors"),
    ],
)
def test_a_host_that_cannot_receive_refuses_for_the_hosts_after_it_and_the_next_parcel_passes(
    call: str, problem: int, why: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcel = job.on("abbcc").publish()

    def fails(*_: object) -> None:
        raise OSError(problem, os.strerror(problem))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises((UpdateRefused, OSError), match=why.removeprefix("OSError: .* ")):
            job.workers[1].receive(parcel, 60.0)
    # Before their own time is up, they are told.
    for other in job.receive(parcel, 60.0, ranks=(2, 3, 4)):
        with pytest.raises(UpdateRefused, match=why):
            other.result()
    for worker in job.workers[1:]:  # it may be told to discard it before the next host asks for it
        worker.release("one")
    job.release("one")
    assert_arrived(job.receive(job.publish(name="two")))


def test_a_job_that_is_lost_during_a_transfer_refuses_no_update(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcel, told = job.on("abb").publish(), []

    def gone(_self: MemoryCoordination, _key: str, value: str) -> bool:
        told.append(value)
        raise JobFailed("worker 0 is gone")

    monkeypatch.setattr(MemoryCoordination, "put", gone)
    source, other = job.receive(parcel, 60.0, ranks=(0, 1))
    with pytest.raises(JobFailed):
        other.result()
    assert_arrived([source])
    assert [list(json.loads(one)) for one in told] == [["memory"]]


@pytest.mark.usefixtures("quick")
def test_a_host_that_dies_during_a_transfer_is_named_and_the_others_end_in_time(
    job: Job, before_sending: BeforeSending
) -> None:
    begun = threading.Event()

    def dying(worker: int, *_: Any) -> None:
        if worker == 1:
            begun.set()
            raise ConnectionResetError

    before_sending(dying)
    _, _, last = job.on("abc").receive(job.publish(), 2.0)
    assert begun.wait(120)
    job.workers[1].close()
    with pytest.raises(UpdateRefused, match=r"Worker 2 waited .* for parcel 'one' from worker 1"):
        last.result()


@pytest.mark.usefixtures("quick")
def test_every_host_names_the_frozen_one_and_not_the_one_that_waits_for_it(
    job: Job, before_sending: BeforeSending
) -> None:
    thawed = threading.Event()
    before_sending(lambda worker, *_: worker == 0 and thawed.wait(120))
    parcel = job.on("abccd").publish()
    others = job.receive(parcel, ranks=range(4))
    with pytest.raises(UpdateRefused, match=r"Worker 4 waited .* from worker 0"):  # the others have more time
        job.workers[4].receive(parcel, 2.0)
    thawed.set()
    assert_arrived(others)
    job.workers[4].release("one")
    assert_arrived(job.receive(job.publish(name="two")))


@pytest.mark.usefixtures("quick")
def test_all_workers_of_a_host_hear_whom_their_leader_waited_for(
    job: Job, before_sending: BeforeSending
) -> None:
    thawed = threading.Event()
    before_sending(lambda *_: thawed.wait(120))
    for other in job.on("abb").receive(job.publish(), 1.5)[1:]:
        with pytest.raises(UpdateRefused, match="Worker 1 waited 1 s for parcel 'one' from worker 0"):
            other.result()
    thawed.set()
    assert len(job.files()) == 1, "a file of a host that refused is left behind"


def test_closing_ends_a_transfer_that_waits(job: Job) -> None:
    (waits,) = job.on("ab").receive(job.publish(), 600.0, ranks=[1])  # and worker 0 never receives it
    while not waits.running():
        time.sleep(0.001)
    job.workers[1].close()
    with pytest.raises(UpdateRefused, match="Worker 1 has closed its connections"):
        waits.result(120)


def link_to(port: int, secret: bytes = SECRET, rank: int = 1) -> ChainLink:
    return ChainLink("127.0.0.1", port, secret, rank, 0)


@pytest.mark.usefixtures("quick")
def test_a_fetch_ends_in_time_although_bytes_still_arrive_and_names_the_host_that_sends_them(
    tmp_path: Path,
) -> None:
    def drip() -> None:
        """Worker 0 sends bytes so slowly that it never stands still, and takes several seconds."""
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):
                    connections.admit(connection, SECRET)
                    chain.receive_request(connection)
                    chain.send_answer(connection, Kind.WAITING, 7)
                    chain.send_answer(connection, Kind.BYTES, 64)
                    for byte in range(64):
                        connection.sendall(bytes([byte]))
                        time.sleep(0.05)

    content = np.arange(64, dtype=np.uint8)
    pieces, nbytes = lay_out([content])
    parcel = Parcel("p", 0, nbytes, pieces, digest_block(content))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=drip)
        serving.start()
        link = link_to(listener.getsockname()[1], rank=2)
        holdings, file = Holdings(2), SharedFile(tmp_path, nbytes)
        with pytest.raises(UpdateRefused, match="parcel 'p' from worker 0"):
            chain.Fetch(parcel, file, link, holdings).run(0.5)
        holdings.clear()
        file.remove()
        link.close()
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()


# Readers and strangers.


class Served(Server):
    """Worker 0 with one parcel, larger than what the system buffers."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(BLOCK_BYTES))
        holdings = Holdings(0)
        holdings.add(parcel_of(BLOCK_BYTES), os.open(file, os.O_RDONLY), arrives_from=None)
        super().__init__("127.0.0.1", SECRET, holdings)
        self.links: list[ChainLink] = []

    def link(self, secret: bytes = SECRET) -> ChainLink:
        self.links.append(link_to(self.port, secret))
        return self.links[-1]

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def connect(self, secret: bytes = SECRET) -> None:
        with self.link(secret).connection():
            pass

    def ask_and_take(self) -> None:
        with self.link().connection(120.0) as connection:
            chain.send_request(connection, "p", 0)
            for _ in range(BLOCK_BYTES // chain.MOST_BYTES):
                assert chain.receive_answer(connection) == (Kind.BYTES, chain.MOST_BYTES)
                connections.receive_bytes(connection, chain.MOST_BYTES)
            with pytest.raises(ConnectionError, match="closed by the other side"):
                connections.receive_bytes(connection, 1)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "file")
    yield one
    for link in one.links:
        link.close()
    one.close()
    one._holdings.clear()
    eventually(lambda: not chain_threads(), "a thread is left behind")


def chain_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("replicast-chain")]


def senders() -> int:
    return chain_threads().count("replicast-chain-serve")


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


@pytest.mark.usefixtures("quick")
def test_a_reader_that_takes_nothing_holds_up_no_other_and_is_given_up(served: Served) -> None:
    with served.link().connection(120.0) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        chain.send_request(slow, "p", 0)
        served.ask_and_take()
        served.links[-1].close()
        eventually(lambda: senders() == 0, "the server still waits for the slow reader")


def test_a_reader_that_takes_a_little_at_a_time_is_given_up_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "ANSWER_SECS", 0.1)
    with served.link().connection(120.0) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        chain.send_request(slow, "p", 0)
        eventually(lambda: bool(slow.recv(1 << 14)) and senders() == 0, "it is still served")


def test_a_server_that_waits_for_bytes_ends_when_it_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "BEAT_SECS", 3600.0)  # it would say nothing, and look at nothing, before
    find, waits = Holdings.find, threading.Event()

    def finding(*arguments: Any) -> Any:
        waits.set()
        return find(*arguments)

    monkeypatch.setattr(Holdings, "find", finding)
    with served.link().connection(120.0) as connection:
        chain.send_request(connection, "not here yet", 0)
        assert waits.wait(120)
        served.close()
        assert senders() == 0


def test_a_server_that_is_closed_while_it_sends_keeps_no_file_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, found = Holdings.find, list[int]()

    def closing_meanwhile(*arguments: Any) -> Any:
        descriptor, stop = find(*arguments)  # type: ignore[misc]
        found.append(descriptor)
        served.closing.set()
        monkeypatch.undo()
        return descriptor, stop

    monkeypatch.setattr(Holdings, "find", closing_meanwhile)
    with served.link().connection(120.0) as connection:
        chain.send_request(connection, "p", 0)
        eventually(lambda: bool(found), "it does not send")
        served.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(found[0])


def test_a_connection_on_which_a_peer_talks_nonsense_is_closed(served: Served) -> None:
    with served.link().connection() as connection:
        connection.sendall(b"\xff" * 1000)
        with pytest.raises(OSError):  # noqa: PT011 - closed, or reset
            connections.receive_bytes(connection, 1)
    served.ask_and_take()


@pytest.mark.parametrize("secret", [b"", b"S" * 32, SECRET[:-1]])
def test_whoever_does_not_know_the_secret_gets_nothing(secret: bytes, served: Served) -> None:
    with pytest.raises(OSError, match="does not accept this host's secret"):
        served.connect(secret)
    with served.stranger() as stranger:
        greeting = stranger.recv(1000)
        assert len(greeting) < 100
        assert SECRET not in greeting
        stranger.sendall(greeting + b"\0" * 200)
        assert is_closed(stranger)
    served.ask_and_take()


def test_a_proof_that_was_overheard_is_worth_nothing(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as threads:
        victim = threads.submit(link_to(impostor.getsockname()[1]).connection().__enter__)
        relayed, _ = impostor.accept()
        relayed.sendall(b"replicast-hosts-3" + bytes(32))
        proof = relayed.recv(1000)
        assert len(proof) == 64
        with served.stranger() as replaying:
            replaying.recv(1000)
            replaying.sendall(proof)
            assert is_closed(replaying)
        relayed.sendall(proof[-32:])  # nor is the victim's own proof an answer to it
        with pytest.raises(ConnectionError, match="does not know the secret"):
            victim.result()
        relayed.close()


def test_strangers_are_few_and_keep_no_peer_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECS", 600.0)
    strangers = [served.stranger() for _ in range(100)]
    served.ask_and_take()
    eventually(lambda: senders() <= connections.MAX_STRANGERS + 1, "too many strangers have a thread")
    for stranger in strangers:
        stranger.close()


def test_hosts_that_all_connect_at_once_are_let_in(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(served.stranger()) for _ in range(60)]
        for host in hosts:
            connections.introduce(host, SECRET, Deadline(120.0))


def test_a_stranger_that_says_nothing_or_a_byte_now_and_then_is_gone_soon(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECS", 0.2)
    with served.stranger() as silent:
        assert silent.recv(1000)  # the nonce
        assert is_closed(silent)
    with served.stranger() as slow, contextlib.suppress(OSError):  # reset, or a broken pipe
        for _ in range(63):  # of the 64 bytes of a proof
            slow.sendall(b"x")
            time.sleep(0.1)
        pytest.fail("it could send all of them")


def test_a_server_without_free_descriptors_says_so_once_and_serves_later(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE] * 3

    def fails_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    with served.stranger():
        served.ask_and_take()
        served.ask_and_take()
    assert failures == []
    (said,) = caplog.records
    assert "cannot connect: too many open files; see ulimit -n" in said.message


def test_the_port_is_open_at_the_named_address_only(served: Served) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=120)
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(OSError, match=r"all addresses|not supported|Cannot assign"):
            Server(everywhere, SECRET, Holdings(0))


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
        chain.send_refusal(there, UpdateRefused("No room", remedy="x" * 10**6))  # of any length
        with pytest.raises(UpdateRefused, match="No room"):
            chain.receive_answer(here)


def test_a_host_that_cannot_start_a_thread_for_a_connection_serves_the_next(served: Served) -> None:
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        with pytest.raises(OSError, match=r"closed by the other side|reset by peer"):
            served.connect()
    served.ask_and_take()


# Hosts find each other at the start, or no worker starts.


def opened(job: Job, hosts: str, addresses: Sequence[str], name: str = "replicas-1") -> list[Exception]:
    """Opens the transports of all workers; returns what those raised that could not be opened."""

    def open_one(rank: int) -> Transport | ClusterError:
        exchange = DirectExchange(MemoryCoordination(job.store), name, rank, len(hosts))
        try:
            return open_transport(exchange, environment(rank, hosts, job.place, addresses), DEADLINE_SECS)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as threads:
        found = list(threads.map(open_one, range(len(hosts))))
    job.workers = [one for one in found if isinstance(one, Transport)]
    return [one for one in found if isinstance(one, Exception)]


def test_hosts_that_reach_each_other_are_a_chain_also_for_a_second_model(job: Job) -> None:
    for name in ("replicas-1", "replicas-2"):
        assert not opened(job, "aba", ["127.0.0.1", "localhost", "127.0.0.3"], name)
        assert {type(worker) for worker in job.workers} == {ChainTransport}
        assert_arrived(job.receive(job.publish(source=2)))
        job.close()
    assert not any("/host" in key for key in job.store.values), "the secret is still in the service"


def assert_refused_by_all(job: Job, problems: Sequence[Exception], why: str, workers: int) -> None:
    assert not job.workers
    assert [str(problem) for problem in problems] == [str(problems[0])] * workers
    assert why in str(problems[0])
    assert "TCP connections between these addresses must be allowed" in str(problems[0])
    eventually(lambda: not chain_threads(), "a thread is left behind")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1", "worker 1 cannot listen at 192.0.2.1"),
        ("0.0.0.0", "all addresses of a host"),
        ("no-such-host.invalid", "worker 1 cannot listen at no-such-host.invalid"),
    ],
)
def test_no_worker_starts_if_one_cannot_listen_at_its_address(address: str, why: str, job: Job) -> None:
    problems = opened(job, "abca", ["127.0.0.1", address, "127.0.0.3", "127.0.0.1"])
    assert_refused_by_all(job, problems, why, workers=4)


def test_no_worker_starts_if_one_cannot_reach_the_host_before_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ChainLink.connection

    def filtered(link: ChainLink) -> contextlib.AbstractContextManager[socket.socket]:
        if link.rank == 2:
            raise TimeoutError("timed out")
        return real(link)

    monkeypatch.setattr(ChainLink, "connection", filtered)
    problems = opened(job, "abc", ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    assert_refused_by_all(job, problems, "worker 2 cannot reach worker 1 at 127.0.0.2:", workers=3)
