"""The transport between hosts: a chain of hosts over TCP, shared memory within each.

The lowest rank of each host is its leader. Leaders stand on a ring in the order of their ranks; for a parcel,
the ring is cut before its source's host. Each leader but the first fetches the parcel from the one before it,
and serves the next one with what it has: each link carries the bytes once, and the last host has them a few
blocks after the second one, however many are between.

```
 source's host            next host                 last host
 publish, verify
 [0][1][2][3] ──[2]──►    [0][1] ──[1]──►           [0]            all at the same time
```
A parcel is one stream of bytes. Each block is verified before it is served. If the connection breaks, or a
block arrives damaged, the next connection continues behind the last good block. A host that has to refuse
says why, and the hosts after it repeat that; the hosts before it have the parcel.

Two hosts first show each other that they know the secret of the job (`connections.py`). What follows is
neither encrypted nor signed.

```
 host that connects: `ChainLink`                      host that listens: `Server`
 ask for a parcel, from this byte on  ────────►
                                ◄──────────────  WAITING, for worker 3     every second until more is there
                                ◄══════════════  BYTES, how many, and these; again until the end
                                ◄──────────────  REFUSED, and why
```
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import uuid
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from replicast.config import host_and_port, host_id, read_cluster, shared_memory_directory
from replicast.connections import (
    HANDSHAKE_SECS,
    Dialer,
    HostServer,
    introduce,
    limit,
    receive_bytes,
    receive_into,
    shut,
)
from replicast.coordination import DirectExchange
from replicast.errors import ClusterError, JobFailed, UpdateRefused, logger, refusal_of
from replicast.processes import Deadline
from replicast.transport.shared import Inspect, Parcel, SharedFile, Transport, damaged_block, not_arrived
from replicast.update.digest import BLOCK_BYTES, digest_block
from replicast.update.edits import Array

# A leader gives up by this part of the time earlier, so that others of its host hear the reason in time.
MARGIN = 0.05
MARGIN_SECS = 0.5  # At least by so much, but not by more than half of the time.
MOST_BYTES = 1 << 20  # In one answer: what arrived is verified and goes on soon.
MAX_DAMAGED = 3  # How often one block may arrive damaged before the parcel is refused.
# So many parcels that are gone are remembered, to refuse them at once instead of waiting for them.
REMEMBERED = 1000
SILENT_SECS = 5.0  # A connection on which no byte moves for this long is closed, and opened again.
BEAT_SECS = 1.0  # How often a host that has nothing to send yet says for whom it waits.
MAX_REFUSAL_BYTES = 1 << 16
MAX_PEERS = 64  # Connections of hosts. One more is closed: the other side tries again.
ANSWER_SECS = 60.0  # An answer that is not taken within this time is given up, and its connection closed.
_PAUSES_SECS = (0.05, 0.2, 1.0)  # Before a broken connection is opened again; the last one is repeated.
_REQUEST = struct.Struct("!QH")
_ANSWER = struct.Struct("!BQ")
_MAX_ID = 100


# --- The transport ---------------------------------------------------------------------------------------


class ChainTransport(Transport):
    """Shared memory within each host, whose lowest rank is its leader: it has `Ends`, the others have none.

    A leader tells the others of its host by a key what it has received, and deletes the key with the parcel.
    """

    ends: Ends | None = None

    def __init__(self, job: str, exchange: DirectExchange, hosts: Sequence[str], **shared: Any) -> None:
        super().__init__(job, exchange.rank, **shared)
        self._name, self._coordination = exchange.name, exchange.coordination
        self._hosts = hosts
        self._leader = hosts.index(hosts[exchange.rank])
        self._told: set[str] = set()

    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda index, chunk: None
    ) -> list[Array]:
        deadline, ends = Deadline(timeout_secs), self.ends
        is_local = self._hosts[parcel.source] == self._hosts[self._rank]
        if ends is None:
            if not is_local:
                parcel = replace(parcel, memory=self._memory_of_host(parcel, timeout_secs))
            return super().receive(parcel, deadline.left(), inspect)
        try:
            if is_local:
                with self._waited_for(parcel, timeout_secs) as descriptor:
                    ends.holdings.add(parcel, os.dup(descriptor), arrives_from=None)
            else:
                # Others of this host still have to hear why it is given up.
                margin_secs = min(timeout_secs / 2, max(MARGIN_SECS, MARGIN * timeout_secs))
                # Into the memory of an earlier parcel, if that is used again.
                with self._filled(parcel.id, parcel.nbytes, parcel.memory or None) as file:
                    Fetch(parcel, file, ends.link, ends.holdings).run(timeout_secs - margin_secs)
                self._tell_host(parcel, {"memory": file.name})
                parcel = replace(parcel, memory=file.name)
            return super().receive(parcel, deadline.left(), inspect)
        except (UpdateRefused, OSError, MemoryError) as error:  # Others would wait until their deadline.
            refusal = refusal_of(error)
            ends.holdings.remove(parcel.id, refusal)
            if not is_local:
                self._tell_host(parcel, {"refused": refusal.to_json()})
            raise

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        if self.ends is not None:
            self.ends.holdings.remove(parcel_id)
        super().release(parcel_id, reuse=reuse)
        if parcel_id in self._told:
            self._told.discard(parcel_id)
            with contextlib.suppress(JobFailed):
                self._coordination.delete(self._key(parcel_id))

    def close(self) -> None:
        if self.ends is not None:
            self.ends.close()
        super().close()

    def _tell_host(self, parcel: Parcel, value: dict[str, Any]) -> None:
        """Tells the other workers of this host in which memory a parcel is, or why it will not come."""
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
        return Transport(job, rank, directory=directory, local_ranks=local_ranks)
    # With REPLICAST_HOST_ID, several hosts may be one machine: their files must have different names.
    files = f"{job}-{zlib.crc32(hosts[rank].encode()):08x}"
    transport = ChainTransport(files, exchange, hosts, directory=directory, local_ranks=local_ranks)
    transport.ends = open_ends(exchange, environ, timeout_secs, hosts, bytes.fromhex(secret))
    exchange.forget_agreed("host")  # with the secret, which all have read
    return transport


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


# --- Which part of a parcel a host has, and which it still needs: without I/O ----------------------------


def blocks_in(parcel: Parcel) -> list[tuple[int, int]]:
    """Where the bytes of a parcel's buffer begin and end that have one digest, in order."""
    return [
        (start, min(start + BLOCK_BYTES, end))
        for begin, end in ((piece.offset, piece.offset + piece.nbytes) for piece in parcel.arrays)
        for start in range(begin, end, BLOCK_BYTES)
    ]


@dataclass(slots=True)
class Holding:
    descriptor: int
    here: int  # so many bytes are verified
    end: int
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
        _, end = (blocks_in(parcel) or [(0, 0)])[-1]
        here, waits_for = (end, self._rank) if arrives_from is None else (0, arrives_from)
        with self._changed:
            self._gone.pop(parcel.id, None)
            holding = self._holdings[parcel.id] = Holding(descriptor, here, end, waits_for)
            self._changed.notify_all()
            return holding

    def arrived(self, parcel_id: str, here: int) -> None:
        with self._changed:
            holding = self._holdings.get(parcel_id)
            if holding is not None:
                holding.here = here
                self._changed.notify_all()

    def remove(self, parcel_id: str, refusal: UpdateRefused | None = None) -> None:
        """Releases a parcel, or with `refusal` notes that it will never arrive. No-op if it is unknown."""
        with self._changed:
            holding = self._holdings.pop(parcel_id, None)
            if holding is not None:
                os.close(holding.descriptor)
            elif refusal is None:
                return
            released = f"Worker {self._rank} has released parcel {parcel_id!r}"
            why = refusal or UpdateRefused(released, worker=self._rank)
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

    def find(self, parcel_id: str, at: int, timeout_secs: float) -> tuple[int, int] | int | None:
        """What to send of a parcel, from this byte on: a descriptor, which the caller closes, and the end.

        Or for which worker it waits; None if that was all. Blocks until there is something to say, at most
        `timeout_secs`. Raises if the rest will not come.
        """

        def look() -> Holding | int | None:
            if parcel_id in self._gone:
                raise UpdateRefused.from_json(self._gone[parcel_id])
            holding = self._holdings.get(parcel_id)
            if holding is None:
                return self._rank
            if at >= holding.end:
                return None
            return holding if at < holding.here else holding.waits_for

        with self._changed:
            self._changed.wait_for(lambda: self._closing or not isinstance(look(), int), timeout_secs)
            found = look()
            if not isinstance(found, Holding):
                return found
            return os.dup(found.descriptor), min(found.here, at + MOST_BYTES)


# --- What two hosts say to each other over one connection ------------------------------------------------


class Kind(enum.IntEnum):
    """What an answer is, and what its number means."""

    BYTES = 0  # How many bytes follow.
    WAITING = 1  # The rank of the worker that is waited for.
    REFUSED = 2  # The number of bytes of JSON that follow.


def send_request(connection: socket.socket, parcel_id: str, at: int) -> None:
    name = parcel_id.encode()
    connection.sendall(_REQUEST.pack(at, len(name)) + name)


def receive_request(connection: socket.socket) -> tuple[str, int]:
    """The id of a parcel, and from which byte on it is wanted."""
    at, length = _REQUEST.unpack(receive_bytes(connection, _REQUEST.size))
    if not 0 < length <= _MAX_ID:
        raise ConnectionError("not a request")
    return receive_bytes(connection, length).decode(errors="replace"), at


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
    if kind not in (Kind.BYTES, Kind.WAITING):
        raise ConnectionError("not an answer")
    return Kind(kind), number


# --- The side that listens -------------------------------------------------------------------------------


class Server(HostServer):
    """Sends parcels to the host that comes next, which asks for them. At one address, until `close`.

    If a thread that sends fails, its connection is closed and the other side connects again. If the one that
    accepts fails, the port is closed: updates that the next host needs are refused, and training goes on.
    """

    def __init__(self, host: str, secret: bytes, holdings: Holdings) -> None:
        self._holdings = holdings
        warning = "The next host, which waits for updates, cannot connect: %s"
        super().__init__(
            _listening(host),
            secret,
            self._send_parcel,
            name="replicast-chain",
            max_peers=MAX_PEERS,
            warn=partial(logger.warning, warning),
        )

    def close(self) -> None:
        self.closing.set()
        self._holdings.stop_waiting()
        super().close()

    def _send_parcel(self, connection: socket.socket) -> None:
        """Sends what comes of a parcel, from where the other side wants it."""
        connection.settimeout(SILENT_SECS)
        parcel_id, at = receive_request(connection)
        try:
            while (found := self._holdings.find(parcel_id, at, BEAT_SECS)) is not None:
                if isinstance(found, int):
                    if self.closing.is_set():
                        return
                    send_answer(connection, Kind.WAITING, found)
                    continue
                descriptor, stop = found
                try:
                    _send_bytes(connection, descriptor, at, stop)
                finally:
                    os.close(descriptor)
                at = stop
        except UpdateRefused as refusal:
            send_refusal(connection, refusal)


def _send_bytes(connection: socket.socket, descriptor: int, at: int, stop: int) -> None:
    """Sends a part of a file. The socket does not block: a slow reader is noticed in any case."""
    deadline = Deadline(ANSWER_SECS)
    send_answer(connection, Kind.BYTES, stop - at, more=True)
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    while at < stop:
        if deadline.has_passed() or not writable.poll(deadline.left(SILENT_SECS) * 1000):
            raise TimeoutError("the other side takes too long")
        with contextlib.suppress(BlockingIOError):
            sent = os.sendfile(connection.fileno(), descriptor, at, stop - at)
            if sent == 0:
                raise ConnectionError("the file has ended")
            at += sent


def _listening(host: str) -> socket.socket:
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
    """One parcel on its way into this host's memory, over one connection after the other."""

    def __init__(self, parcel: Parcel, file: SharedFile, link: ChainLink, holdings: Holdings) -> None:
        self._parcel = parcel
        self._buffer = file.buffer
        self._link = link
        self._holdings = holdings
        self._holding = holdings.add(parcel, file.descriptor(), arrives_from=link.predecessor)
        self._missing = deque(enumerate(blocks_in(parcel)))
        self._damaged = 0  # how often the first of them has arrived damaged
        self._deadline = Deadline(0.0)

    def run(self, timeout_secs: float) -> None:
        """Blocks until all bytes are here, at most `timeout_secs`."""
        self._deadline = Deadline(timeout_secs)
        pauses = itertools.chain(_PAUSES_SECS, itertools.repeat(_PAUSES_SECS[-1]))
        while self._missing:
            try:
                with self._link.connection(self._deadline.left()) as connection:
                    self._pull(connection)
            except OSError:  # it broke, cannot be opened, or brought damaged bytes: again
                if self._deadline.has_passed():
                    waited_for = self._holding.waits_for
                    raise not_arrived(self._parcel, timeout_secs, self._link.rank, waited_for) from None
                self._holding.waits_for = self._link.predecessor
                time.sleep(self._deadline.left(next(pauses)))

    def _pull(self, connection: socket.socket) -> None:
        """Fetches all that is missing over one connection."""
        _, (at, _) = self._missing[0]
        send_request(connection, self._parcel.id, at)
        while self._missing:
            if self._deadline.has_passed():
                raise TimeoutError("the time is over")
            limit(connection, self._deadline.left(SILENT_SECS))
            kind, number = receive_answer(connection)
            if kind is Kind.WAITING:
                self._holding.waits_for = number
                continue
            self._holding.waits_for = self._link.predecessor  # they are on their way: for nobody else
            if at + number > len(self._buffer):
                raise ConnectionError("more bytes than the parcel has")
            receive_into(connection, self._buffer[at : at + number].data, self._deadline, SILENT_SECS)
            at += number
            self._verify(at)

    def _verify(self, at: int) -> None:
        """Lets the next host have the blocks that are here by now."""
        here = 0
        while self._missing and self._missing[0][1][1] <= at:
            number, (start, stop) = self._missing[0]
            found = digest_block(self._buffer[start:stop])
            problem = damaged_block(self._parcel, number, found, self._link.rank)
            if problem is not None:
                self._damaged += 1
                raise problem if self._damaged >= MAX_DAMAGED else ConnectionError(problem.problem)
            self._missing.popleft()
            self._damaged, here = 0, stop
        if here:
            self._holdings.arrived(self._parcel.id, here)
