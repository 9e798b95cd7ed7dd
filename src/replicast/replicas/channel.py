"""Messages between workers: through Unix sockets on worker 0's host, through the coordination service beyond.

A message and its answer take 60 µs through a socket, and 1 ms through the service, which TensorFlow runs in
worker 0. An update that somebody waits for needs seven messages, one after the other.

    a socket     frames: the length in 4 bytes, then the messages that were sent together
    down/17      the coordinator's log, read in order by every worker without a socket
    up/2/5       the messages of worker 2 to the coordinator, in order, if it has no socket

Messages of worker 0 to itself need neither. A key is deleted once it has been read; a key of the log, once
all workers without a socket have. Each of them reports how far it has read with every message that it sends.

A socket whose other end is closed tells nothing more. Then the service is asked: its error says which worker
was lost. A worker that takes no message for `FROZEN_SECS` is frozen, and the job has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicast.codec import Record, decode, encode
from replicast.connections import HANDSHAKE_SECS, limit, receive_bytes
from replicast.coordination import LOOK_SECS, Coordination, DirectExchange
from replicast.errors import JobFailed, logger
from replicast.processes import Deadline

FROZEN_SECS = 60.0
_ENDED_SECS = 0.2  # How long the service is asked at a time, in place of a socket that has ended.
_LENGTH = struct.Struct("!I")


class Note(Record):
    """The note of a worker that does not see the run directory. It is not for the coordinator."""

    text: str


@dataclass(eq=False, repr=False)
class Channel:
    """One worker's end. `send` and `broadcast` are for the event loop, the others for one reader each."""

    coordination: Coordination
    name: str
    rank: int
    size: int
    sockets: Mapping[int, socket.socket] = field(default_factory=dict)  # those of `open_sockets`

    def __post_init__(self) -> None:
        self._prefix = f"replicast/{self.name}"
        self._sent = self._appended = self._deleted = self._read = 0
        self._read_from = [0] * self.size
        self._read_by = dict.fromkeys(set(range(1, self.size)) - {*self.sockets}, 0)

    def send(self, messages: Sequence[Any]) -> None:
        """Sends messages to the coordinator. For all workers but worker 0."""
        if not self._send_frame(0, messages):
            self._put(f"up/{self.rank}/{self._sent}", [self._read, *messages])
            self._sent += 1

    def broadcast(self, messages: Sequence[Any]) -> None:
        """Sends the coordinator's messages to all workers but worker 0; raises as `send`."""
        for rank in self.sockets:
            self._send_frame(rank, messages)
        if not self._read_by:
            return
        self._put(f"down/{self._appended}", list(messages))
        self._appended += 1
        read_by_all = min(self._read_by.values())
        while self._deleted < read_by_all:
            self.coordination.delete(f"{self._prefix}/down/{self._deleted}")
            self._deleted += 1

    def receive(self) -> list[Any]:
        """The next messages of the coordinator; empty if none arrived in time."""
        if 0 in self.sockets:
            return self._receive_frame(0)
        text = self.coordination.get(f"{self._prefix}/down/{self._read}", LOOK_SECS)
        if text is None:
            return []
        self._read += 1
        return list(decode(text))

    def receive_from(self, rank: int) -> list[Any]:
        """The next messages of a worker to the coordinator; empty if none arrived in time."""
        if rank in self.sockets:
            return self._receive_frame(rank)
        key = f"{self._prefix}/up/{rank}/{self._read_from[rank]}"
        text = self.coordination.get(key, LOOK_SECS)
        if text is None:
            return []
        self._read_from[rank] += 1
        self.coordination.delete(key)
        self._read_by[rank], *messages = decode(text)
        return list(messages)

    def close(self) -> None:
        """After the readers have ended."""
        for connection in self.sockets.values():
            connection.close()

    def _put(self, key: str, messages: list[Any]) -> None:
        if not self.coordination.put(f"{self._prefix}/{key}", encode(messages)):
            raise JobFailed(
                f"Worker {self.rank} cannot send a message: the coordination service has another one under "
                f"its key ({key}). A call to the service failed before; see the log of this worker",
                worker=self.rank,
            )

    def _send_frame(self, rank: int, messages: Sequence[Any]) -> bool:
        """Returns whether it was sent: not if there is no socket, or its other end is closed."""
        connection = self.sockets.get(rank)
        if connection is None:
            return False
        content = encode(list(messages)).encode()
        try:
            # A script may have set SIGPIPE to its default, which would end the process without a word.
            connection.sendall(_LENGTH.pack(len(content)) + content, socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise self._frozen(rank, "taken a message") from error
        except OSError:
            return False
        return True

    def _receive_frame(self, rank: int) -> list[Any]:
        connection, arrived = self.sockets[rank], select.poll()
        arrived.register(connection, select.POLLIN)
        if not arrived.poll(1000 * LOOK_SECS):
            return []
        try:
            (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
            content = receive_bytes(connection, length)
        except BlockingIOError as error:
            raise self._frozen(rank, "completed a message") from error
        except OSError:
            self.coordination.get(f"{self._prefix}/ended/{rank}", _ENDED_SECS)
            return []
        return list(decode(content.decode()))

    def _frozen(self, rank: int, what: str) -> JobFailed:
        return JobFailed(f"Worker {rank} has not {what} for {FROZEN_SECS:g} s: it is frozen", worker=rank)


# --- Opening: on all workers of worker 0's host, or on none ------------------------------------------------


def open_sockets(exchange: DirectExchange, host: str, timeout_secs: float) -> dict[int, socket.socket]:
    """Connects worker 0 with the other workers of its host: by rank, this worker's end. On every worker.

    The name of the socket is not a path: nothing is left behind by a process that is killed. Each side checks
    that the other one is a process of the same user.
    """
    rank, found, problem = exchange.rank, dict[int, socket.socket](), ""
    if exchange.size == 1:
        return found
    with contextlib.ExitStack() as on_failure, socket.socket(socket.AF_UNIX) as listener:
        if rank == 0:
            listener.bind(b"\0replicast-" + uuid.uuid4().hex.encode())
            listener.listen(exchange.size)
        said = json.dumps([host, listener.getsockname().decode() if rank == 0 else ""])
        told = [json.loads(text) for text in exchange.agree("host of messages", said, timeout_secs).values()]
        near = [other for other, (of, _) in enumerate(told) if other and of == told[0][0]]
        try:
            deadline = Deadline(HANDSHAKE_SECS)
            while rank == 0 and len(found) < len(near):
                if deadline.has_passed():  # Strangers may come faster than they are sent away.
                    raise TimeoutError("not all workers of its host have connected")
                listener.settimeout(deadline.left())
                connection = listener.accept()[0]
                if not _is_of_this_user(connection):
                    connection.close()
                    continue
                on_failure.enter_context(connection)
                (worker,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size, deadline))
                found[worker] = connection
            if rank in near:
                connection = found[0] = on_failure.enter_context(socket.socket(socket.AF_UNIX))
                limit(connection, HANDSHAKE_SECS)  # It waits while the queue of the listener is full.
                connection.connect(told[0][1].encode())
                if not _is_of_this_user(connection):
                    raise PermissionError("another user listens in place of worker 0")
                connection.sendall(_LENGTH.pack(rank), socket.MSG_NOSIGNAL)
        except OSError as error:
            problem = f"worker {rank}: {error}"
        problems = [one for one in exchange.agree("messages", problem, timeout_secs).values() if one]
        if problems:
            logger.warning("messages go through the coordination service: %s", problems[0])
            return {}
        for connection in found.values():
            limit(connection, FROZEN_SECS)
        on_failure.pop_all()
    return found


def _is_of_this_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
