"""The transport between hosts: a chain of hosts over TCP, shared memory within each.

The lowest rank of each host is its leader. Leaders stand on a ring in the order of their ranks; for a parcel,
the ring is cut before its source's host. Each leader but the first fetches the parcel from the one before it,
segment by segment, and serves the next one with what it has: each link carries the bytes once, and the last
host has them a few segments after the second one, however many are between.

```
 source's host            next host                 last host
 publish, verify
 [0][1][2][3] ──[2]──►    [0][1] ──[1]──►           [0]            all at the same time
```
A segment is verified before it is served. What is missing after a connection broke is asked for again. A
host that has to refuse says why, and the hosts after it repeat that; the hosts before it have the parcel.

Two hosts first show each other that they know the secret of the job (`connections.py`). What follows is
neither encrypted nor signed.

```
 host that connects: `ChainLink`, `Fetch`             host that listens: `Server`
 ask for segment 7 of a parcel  ──────────────►
 ask for segment 8              ──────────────►
                                ◄──────────────  WAITING, for worker 3     every second until it is there
                                ◄══════════════  SEGMENT, and its bytes
                                ◄──────────────  REFUSED, and why
```
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import uuid
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from replicast.config import host_and_port, host_id, read_cluster, shared_memory_directory
from replicast.connections import (
    HANDSHAKE_SECS,
    HostServer,
    introduce,
    limit,
    receive_bytes,
    receive_into,
    shut,
)
from replicast.coordination import DirectExchange
from replicast.deadline import Deadline
from replicast.errors import ClusterError, JobFailed, UpdateRefused
from replicast.mapped_memory import Bytes
from replicast.names import Dialer
from replicast.tensorfiles import Array
from replicast.transport.base import Inspect, Parcel, Transport, damaged_block, no_inspection, not_arrived
from replicast.transport.shared import SharedFile, SharedMemoryTransport
from replicast.update.digest import BLOCK_BYTES, digest_block

logger = logging.getLogger("replicast")

# A leader gives up by this part of the time earlier, so that others of its host hear the reason in time.
MARGIN = 0.05
MARGIN_SECS = 0.5  # At least by so much, but not by more than half of the time.
# Blocks that lie next to each other go together up to this size. A larger block goes alone.
SEGMENT_BYTES = 1 << 20
MAX_DAMAGED = 3  # How often one segment may arrive damaged before the parcel is refused.
# So many parcels that are gone are remembered, to refuse them at once instead of waiting for them.
REMEMBERED = 1000
SILENT_SECS = 5.0  # A connection on which no byte moves for this long is closed, and opened again.
BEAT_SECS = 1.0  # How often a host that has nothing to send yet says for whom it waits.
MAX_REFUSAL_BYTES = 1 << 16
MAX_PEERS = 64  # Connections of hosts. One more is closed: the other side tries again.
IDLE_SECS = 60.0  # A connection over which nothing is asked for this long is closed.
SEGMENT_SECS = 60.0  # A segment that is not taken within this time is given up, and its connection closed.
IN_FLIGHT = 2  # So many segments are asked for before the first of them has arrived.
_PAUSES_SECS = (0.05, 0.2, 1.0)  # Before a broken connection is opened again; the last one is repeated.
_REQUEST = struct.Struct("!IH")
_ANSWER = struct.Struct("!BQ")
_MAX_ID = 100


# --- The transport ---------------------------------------------------------------------------------------


class ChainTransport(Transport):
    """Shared memory within each host, whose lowest rank is its leader: it has `Ends`, the others have none.

    A leader tells the others of its host by a key what it has received, and deletes the key with the parcel.
    """

    def __init__(
        self,
        shared: SharedMemoryTransport,
        exchange: DirectExchange,
        hosts: Sequence[str],
        ends: Ends | None,
    ) -> None:
        self._shared = shared
        self._name, self._rank, self._coordination = exchange.name, exchange.rank, exchange.coordination
        self._hosts = hosts
        self._leader = hosts.index(hosts[exchange.rank])
        self._ends = ends
        self._mirrors = Mirrors(shared)
        self._told: set[str] = set()

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        return self._shared.publish(parcel_id, arrays, to_read=to_read)

    def receive(self, parcel: Parcel, timeout_secs: float, inspect: Inspect = no_inspection) -> list[Array]:
        deadline = Deadline(timeout_secs)
        if self._hosts[parcel.source] == self._hosts[self._rank]:
            if self._ends is not None:
                return self._receive_and_serve(self._ends, parcel, timeout_secs, inspect)
        elif self._ends is not None:
            parcel = replace(parcel, memory=self._receive_for_host(self._ends, parcel, timeout_secs))
        else:
            parcel = replace(parcel, memory=self._memory_of_host(parcel, timeout_secs))
        return self._shared.receive(parcel, deadline.left(), inspect)

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        if self._ends is not None:
            self._ends.holdings.remove(parcel_id)
        self._mirrors.release(parcel_id)
        self._shared.release(parcel_id, reuse=reuse)
        if parcel_id in self._told:
            self._told.discard(parcel_id)
            with contextlib.suppress(JobFailed):
                self._coordination.delete(self._key(parcel_id))

    def close(self) -> None:
        if self._ends is not None:
            self._ends.close()
        self._mirrors.close()
        self._shared.close()

    def _receive_and_serve(
        self, ends: Ends, parcel: Parcel, timeout_secs: float, inspect: Inspect
    ) -> list[Array]:
        try:
            with self._shared.waited_for(parcel, timeout_secs) as descriptor:
                ends.holdings.add(parcel, os.dup(descriptor), arrives_from=None)
            return self._shared.receive(parcel, timeout_secs, inspect)
        except UpdateRefused as refusal:
            ends.holdings.remove(parcel.id, refusal)
            raise

    def _receive_for_host(self, ends: Ends, parcel: Parcel, timeout_secs: float) -> str:
        """Fetches a parcel and tells the other workers of this host in which memory it is."""
        margin_secs = min(timeout_secs / 2, max(MARGIN_SECS, MARGIN * timeout_secs))
        try:
            memory = self._fetch(ends, parcel, timeout_secs - margin_secs)
        except UpdateRefused as refusal:
            ends.holdings.remove(parcel.id, refusal)
            self._tell_host(parcel, {"refused": refusal.to_json()})
            raise
        self._tell_host(parcel, {"memory": memory})
        return memory

    def _tell_host(self, parcel: Parcel, value: dict[str, Any]) -> None:
        if self._hosts.count(self._hosts[self._rank]) > 1:
            self._told.add(parcel.id)
            self._coordination.put(self._key(parcel.id), json.dumps(value))

    def _memory_of_host(self, parcel: Parcel, timeout_secs: float) -> str:
        """In which memory the leader has received a parcel; raises if it refuses, or if the time is over."""
        text = self._coordination.get(self._key(parcel.id), timeout_secs)
        if text is None:
            raise not_arrived(parcel, timeout_secs, self._rank, self._leader)
        told = json.loads(text)
        if "refused" in told:
            raise UpdateRefused.from_json(told["refused"])
        return str(told["memory"])

    def _key(self, parcel_id: str) -> str:
        return f"replicast/{self._name}/parcel/{parcel_id}/{self._leader}"

    def _fetch(self, ends: Ends, parcel: Parcel, timeout_secs: float) -> str:
        """Returns the name of the memory, if that is used again."""
        file = self._mirrors.reserve(parcel)
        try:
            Fetch(parcel, file, ends.link, ends.holdings).run(timeout_secs)
            if not file.name:
                file.complete(self._shared.path(parcel.id))
        except BaseException:
            self._mirrors.release(parcel.id, keep=False)
            raise
        if parcel.memory:
            file.name = file.name or parcel.id
        return file.name


@dataclass(frozen=True, slots=True)
class Ends:
    """A leader's two ends of the chain: what it serves, to the next host, and from where it fetches."""

    holdings: Holdings
    server: Server
    link: ChainLink

    def close(self) -> None:
        self.link.close()
        self.server.close()
        self.holdings.clear()


# --- Opening: on all workers, or on none -----------------------------------------------------------------


def open_transport(exchange: DirectExchange, environ: Mapping[str, str], timeout_secs: float) -> Transport:
    """The transport of a model. On every worker; blocks until all have called it, each round at most so long.

    Raises on all workers if the hosts cannot connect to each other.
    """
    rank, directory = exchange.rank, shared_memory_directory(environ)
    # Worker 0 names the files of the job, and makes the secret.
    said = [host_id(environ), uuid.uuid4().hex, secrets.token_hex(32)] if rank == 0 else [host_id(environ)]
    told = [json.loads(text) for text in exchange.agree("host", json.dumps(said), timeout_secs).values()]
    (_, job, secret), hosts = told[0], tuple(host for host, *_ in told)
    local_ranks = [local for local, host in enumerate(hosts) if host == hosts[rank]]
    if len(local_ranks) == exchange.size:
        return SharedMemoryTransport(job, rank, directory=directory, local_ranks=local_ranks)
    # With REPLICAST_HOST_ID, several hosts may be one machine: their files must have different names.
    files = f"{job}-{zlib.crc32(hosts[rank].encode()):08x}"
    shared = SharedMemoryTransport(files, rank, directory=directory, local_ranks=local_ranks)
    ends = open_ends(exchange, environ, timeout_secs, hosts, bytes.fromhex(secret))
    exchange.forget_agreed("host")  # with the secret, which all have read
    return ChainTransport(shared, exchange, hosts, ends)


def open_ends(
    exchange: DirectExchange,
    environ: Mapping[str, str],
    timeout_secs: float,
    hosts: Sequence[str],
    secret: bytes,
) -> Ends | None:
    """A leader's ends of the chain, None for others. All leaders listen, then each tries the one before it.

    Raises on all workers if one cannot listen, or not reach the host before it: the chain needs every link.
    """
    rank, cluster = exchange.rank, read_cluster(environ)
    leaders = list(dict.fromkeys(map(hosts.index, hosts)))
    with contextlib.ExitStack() as on_failure:
        ends, port, problem = None, 0, ""
        if rank in leaders:
            before = leaders[leaders.index(rank) - 1]
            if cluster is None:
                problem = f"worker {rank} has no TF_CONFIG, which would name its address"
            else:
                own, other = (host_and_port(cluster.addresses[worker])[0] for worker in (rank, before))
                holdings = Holdings(rank)
                try:
                    server = Server(own, secret, holdings)
                except OSError as error:
                    problem = f"worker {rank} cannot listen at {own}, its address in TF_CONFIG: {error}"
                else:
                    on_failure.callback(server.close)
                    port = server.port
        ports = exchange.agree("port", str(port), timeout_secs)
        if port and int(ports[before]):
            link = ChainLink(other, int(ports[before]), secret, rank, before)
            on_failure.callback(link.close)
            ends = Ends(holdings, server, link)
            try:
                with link.connection():
                    pass
            except OSError as error:
                problem = f"worker {rank} cannot reach worker {before} at {other}:{ports[before]}: {error}"
        problems = [told for told in exchange.agree("link", problem, timeout_secs).values() if told]
        if problems:
            raise ClusterError(
                f"The hosts cannot send updates to each other: {'; '.join(problems[:3])}",
                remedy="TF_CONFIG must name each worker by an address of its own host, and TCP connections "
                "between these addresses must be allowed, at any port",
            )
        on_failure.pop_all()
    if rank == 0:
        logger.info("updates go along a chain of %d hosts, over TCP", len(leaders))
    return ends


# --- Memory for what comes from other hosts ---------------------------------------------------------------


class Mirrors:
    """A host's files for what comes from other hosts. All methods may be called from any thread.

    The file of the last parcel is kept, if its source keeps the memory of it: when that is used again, no
    worker of the job uses this one any more, also if it was not released here.
    """

    def __init__(self, shared: SharedMemoryTransport) -> None:
        self._shared = shared
        self._files: dict[str, tuple[SharedFile, str]] = {}  # by memory of the source; with the parcel in it
        self._closed = False
        self._lock = threading.Lock()

    def reserve(self, parcel: Parcel) -> SharedFile:
        memory = parcel.memory or parcel.id
        with self._lock:
            file = self._files.pop(memory, (None, ""))[0]
        if file is not None and file.nbytes < parcel.nbytes:
            file.remove()
            file = None
        file = file or self._shared.reserve(parcel.nbytes)
        with self._lock:
            self._files[memory] = file, parcel.id
        return file

    def release(self, parcel_id: str, *, keep: bool = True) -> None:
        """Keeps the file of a parcel for the next one, instead of the last. No-op if it has none."""
        with self._lock:
            memory = next((memory for memory, (_, held) in self._files.items() if held == parcel_id), None)
            if memory is None:
                return
            file, _ = self._files.pop(memory)
            if keep and file.name and not self._closed and self._shared.is_worth_keeping(file.nbytes):
                for kept in [kept for kept, (_, held) in self._files.items() if not held]:
                    self._files.pop(kept)[0].remove()
                self._files[memory] = file, ""
            else:
                file.remove()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for file, _ in self._files.values():
                file.remove()
            self._files.clear()


# --- Which part of a parcel a host has, and which it still needs: without I/O ----------------------------


class Block(NamedTuple):
    """The bytes of a parcel's buffer that have one digest."""

    number: int
    start: int
    stop: int


class Segment(NamedTuple):
    """Whole blocks, sent and verified together. Padding between them is sent too, and not verified."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


def segments_of(parcel: Parcel) -> tuple[Segment, ...]:
    """All segments of a parcel: the same on every worker."""
    groups: list[list[Block]] = []
    number = 0
    for piece in parcel.arrays:
        end = piece.offset + piece.nbytes
        for start in range(piece.offset, end, BLOCK_BYTES):
            block = Block(number, start, min(start + BLOCK_BYTES, end))
            number += 1
            if groups and block.stop - groups[-1][0].start <= SEGMENT_BYTES:
                groups[-1].append(block)
            else:
                groups.append([block])
    return tuple(Segment(group[0].start, group[-1].stop, tuple(group)) for group in groups)


@dataclass(slots=True)
class Holding:
    descriptor: int
    segments: tuple[Segment, ...]
    here: set[int]
    waits_for: int  # the worker because of which the others are not here


class Holdings:
    """What a host can send to the next one: parcels that it has, and those that still arrive. Any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._holdings: dict[str, Holding] = {}
        self._gone: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._changed = threading.Condition(threading.RLock())
        self._closing = False

    def add(self, parcel: Parcel, descriptor: int, *, arrives_from: int | None) -> Holding:
        segments = segments_of(parcel)
        here = set(range(len(segments))) if arrives_from is None else set()
        waits_for = self._rank if arrives_from is None else arrives_from
        with self._changed:
            self._gone.pop(parcel.id, None)
            holding = self._holdings[parcel.id] = Holding(descriptor, segments, here, waits_for)
            self._changed.notify_all()
            return holding

    def arrived(self, parcel_id: str, segment: int) -> None:
        with self._changed:
            holding = self._holdings.get(parcel_id)
            if holding is not None:
                holding.here.add(segment)
                self._changed.notify_all()

    def remove(self, parcel_id: str, refusal: UpdateRefused | None = None) -> None:
        """The parcel is no longer here, or never will be. No-op if that is known."""
        with self._changed:
            holding = self._holdings.pop(parcel_id, None)
            if holding is not None:
                os.close(holding.descriptor)
            elif refusal is None:
                return
            why = refusal or UpdateRefused(
                f"Worker {self._rank} has released parcel {parcel_id!r}", worker=self._rank
            )
            self._gone[parcel_id] = why.to_json()
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            for parcel_id in list(self._holdings):
                self.remove(parcel_id)

    def stop_waiting(self) -> None:
        """Ends all waits in `find`; later calls do not block."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def find(self, parcel_id: str, segment: int, timeout_secs: float) -> tuple[int, Segment] | int:
        """A segment and a descriptor of its file, which the caller closes; or for which worker it waits.

        Blocks until there is something to say, at most `timeout_secs`. Raises if the segment will not come.
        """

        def look() -> Holding | int:
            if parcel_id in self._gone:
                raise UpdateRefused.from_json(self._gone[parcel_id])
            holding = self._holdings.get(parcel_id)
            if holding is None:
                return self._rank
            if segment >= len(holding.segments):
                raise UpdateRefused(f"Parcel {parcel_id!r} has no segment {segment}")
            return holding if segment in holding.here else holding.waits_for

        with self._changed:
            self._changed.wait_for(lambda: self._closing or not isinstance(look(), int), timeout_secs)
            found = look()
            return found if isinstance(found, int) else (os.dup(found.descriptor), found.segments[segment])


# --- What two hosts say to each other over one connection ------------------------------------------------


class Kind(enum.IntEnum):
    """What an answer is, and what its number means."""

    SEGMENT = 0  # The number of bytes that follow.
    WAITING = 1  # The rank of the worker that is waited for.
    REFUSED = 2  # The number of bytes of JSON that follow.


def send_request(connection: socket.socket, parcel_id: str, segment: int) -> None:
    name = parcel_id.encode()
    connection.sendall(_REQUEST.pack(segment, len(name)) + name)


def receive_request(connection: socket.socket) -> tuple[str, int]:
    """The id of a parcel, and the number of a segment."""
    segment, length = _REQUEST.unpack(receive_bytes(connection, _REQUEST.size))
    if not 0 < length <= _MAX_ID:
        raise ConnectionError("not a request")
    return receive_bytes(connection, length).decode(errors="replace"), segment


def send_answer(connection: socket.socket, kind: Kind, number: int, *, more: bool = False) -> None:
    """The head of an answer. `more`: its bytes follow at once, and may share a packet with it."""
    connection.sendall(_ANSWER.pack(kind, number), socket.MSG_MORE if more else 0)


def send_refusal(connection: socket.socket, refusal: UpdateRefused) -> None:
    text = json.dumps(refusal.to_json()).encode()
    if len(text) > MAX_REFUSAL_BYTES:
        text = json.dumps({"problem": refusal.problem[:1000]}).encode()
    connection.sendall(_ANSWER.pack(Kind.REFUSED, len(text)) + text)


def receive_answer(connection: socket.socket) -> tuple[Kind, int]:
    """The head of an answer; raises a refusal."""
    kind, number = _ANSWER.unpack(receive_bytes(connection, _ANSWER.size))
    if kind == Kind.REFUSED and number <= MAX_REFUSAL_BYTES:
        fields = None
        with contextlib.suppress(ValueError):
            fields = json.loads(receive_bytes(connection, number))
        if not isinstance(fields, dict):
            raise ConnectionError("not a refusal")
        raise UpdateRefused.from_json(fields)
    if kind not in (Kind.SEGMENT, Kind.WAITING):
        raise ConnectionError("not an answer")
    return Kind(kind), number


# --- The side that listens -------------------------------------------------------------------------------


class Server(HostServer):
    """Sends segments to the host that comes next, which asks for them. At one address, until `close`.

    If a thread that sends fails, its connection is closed and the other side connects again. If the one that
    accepts fails, the port is closed: updates that the next host needs are refused, and training goes on.
    """

    def __init__(self, host: str, secret: bytes, holdings: Holdings) -> None:
        self._holdings = holdings
        warning = "The next host, which waits for updates, cannot connect: %s"
        super().__init__(
            _listening(host),
            secret,
            self._serve_segments,
            name="replicast-chain",
            max_peers=MAX_PEERS,
            warn=partial(logger.warning, warning),
        )

    def close(self) -> None:
        self.closing.set()
        self._holdings.stop_waiting()
        super().close()

    def _serve_segments(self, connection: socket.socket) -> None:
        while not self.closing.is_set():
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(IDLE_SECS)
        parcel_id, number = receive_request(connection)
        connection.settimeout(SILENT_SECS)
        try:
            while isinstance(found := self._holdings.find(parcel_id, number, BEAT_SECS), int):
                if self.closing.is_set():
                    return
                send_answer(connection, Kind.WAITING, found)
        except UpdateRefused as refusal:
            send_refusal(connection, refusal)
            return
        descriptor, segment = found
        try:
            _send_segment(connection, descriptor, segment)
        finally:
            os.close(descriptor)


def _send_segment(connection: socket.socket, descriptor: int, segment: Segment) -> None:
    """Sends a segment from its file. The socket does not block: a slow reader is noticed in any case."""
    deadline = Deadline(SEGMENT_SECS)
    send_answer(connection, Kind.SEGMENT, segment.stop - segment.start, more=True)
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    at = segment.start
    while at < segment.stop:
        if deadline.has_passed() or not writable.poll(deadline.left(SILENT_SECS) * 1000):
            raise TimeoutError("the other side takes too long")
        with contextlib.suppress(BlockingIOError):
            sent = os.sendfile(connection.fileno(), descriptor, at, segment.stop - at)
            if sent == 0:
                raise ConnectionError("the file has ended")
            at += sent


def _listening(host: str) -> socket.socket:
    """A socket that listens at this address only."""
    problem = OSError("the name has no address")
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            problem = error
            continue
        if listener.getsockname()[0] in ("0.0.0.0", "::"):
            listener.close()
            raise OSError(f"{host} means all addresses of a host, not one")
        return listener
    raise problem


# --- The side that connects ------------------------------------------------------------------------------


class ChainLink:
    """Connects a host to the host before it: one connection for each transfer. Any thread."""

    def __init__(self, host: str, port: int, secret: bytes, rank: int, predecessor: int) -> None:
        self._address = host, port
        self._secret = secret
        self.rank = rank
        self.predecessor = predecessor
        self._open: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connection(self, timeout_secs: float = HANDSHAKE_SECS) -> Iterator[socket.socket]:
        """A connection that is closed at the end. Connecting takes at most that long, and at most 5 s."""
        deadline = Deadline(min(timeout_secs, HANDSHAKE_SECS))
        with Dialer(*self._address).connect(deadline.left()) as connection:
            with self._lock:
                if self._closed:
                    raise UpdateRefused(f"Worker {self.rank} has closed its connections", worker=self.rank)
                self._open.add(connection)
            try:
                introduce(connection, self._secret, deadline)
                limit(connection, SILENT_SECS)
                yield connection
            finally:
                with self._lock:
                    self._open.discard(connection)

    def close(self) -> None:
        """Shuts all connections down; threads that use one get an `OSError`. A second call does nothing."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                shut(connection)


class Fetch:
    """One parcel on its way into this host's memory, with the next request under way.

    ```
    missing ──ask──► asked ──arrived──► here
       ▲               │
       └───────────────┘   the connection broke, or the bytes were damaged
    ```
    """

    def __init__(self, parcel: Parcel, file: SharedFile, link: ChainLink, holdings: Holdings) -> None:
        self._parcel = parcel
        self._buffer = file.buffer
        self._link = link
        self._holdings = holdings
        self._holding = holdings.add(parcel, file.descriptor(), arrives_from=link.predecessor)
        self._missing = deque(range(len(self._holding.segments)))
        self._asked: deque[int] = deque()
        self._damaged: Counter[int] = Counter()
        self._deadline = Deadline(0.0)

    def run(self, timeout_secs: float) -> None:
        """Blocks until all bytes are here, at most `timeout_secs`."""
        self._deadline = Deadline(timeout_secs)
        pauses = deque(_PAUSES_SECS)
        while self._missing:
            try:
                with self._link.connection(self._deadline.left()) as connection:
                    self._pull(connection)
            except OSError:  # it broke, or cannot be opened: again
                self._missing.extendleft(reversed(self._asked))
                self._asked.clear()
                if self._deadline.has_passed():
                    waited_for = self._holding.waits_for
                    raise not_arrived(self._parcel, timeout_secs, self._link.rank, waited_for) from None
                self._holding.waits_for = self._link.predecessor
                time.sleep(self._deadline.left(pauses[0]))
                if len(pauses) > 1:
                    pauses.popleft()

    def _pull(self, connection: socket.socket) -> None:
        """Fetches all that is missing over one connection."""
        while self._missing or self._asked:
            while self._missing and len(self._asked) < IN_FLIGHT:
                self._asked.append(self._missing.popleft())
                send_request(connection, self._parcel.id, self._asked[-1])
            if self._deadline.has_passed():
                raise TimeoutError("the time is over")
            limit(connection, self._deadline.left(SILENT_SECS))
            kind, number = receive_answer(connection)
            if kind is Kind.WAITING:
                self._holding.waits_for = number
            else:
                self._receive(connection, number)

    def _receive(self, connection: socket.socket, nbytes: int) -> None:
        segment = self._holding.segments[self._asked[0]]
        if nbytes != segment.stop - segment.start:
            raise ConnectionError("not the segment that was asked for")
        try:
            problem = self._receive_segment(connection, segment)
        except OSError:  # it was on its way: nobody else is waited for
            self._holding.waits_for = self._link.predecessor
            raise
        place = self._asked.popleft()
        if problem is None:
            self._holdings.arrived(self._parcel.id, place)
            return
        self._damaged[place] += 1
        if self._damaged[place] >= MAX_DAMAGED:
            raise problem
        self._missing.appendleft(place)

    def _receive_segment(self, connection: socket.socket, segment: Segment) -> UpdateRefused | None:
        def received(_: int, chunk: Bytes) -> Bytes:
            receive_into(connection, chunk.data, self._deadline, SILENT_SECS)
            return chunk

        alone = len(segment.blocks) == 1  # digested while its bytes are in the processor's cache
        if not alone:
            received(0, self._buffer[segment.start : segment.stop])
        for block in segment.blocks:
            content = self._buffer[block.start : block.stop]
            found = digest_block(content, received) if alone else digest_block(content)
            problem = damaged_block(self._parcel, block.number, found, self._link.rank)
            if problem is not None:
                return problem
        return None
