"""Fetches one parcel from the host before this one: several streams, each with its next request under way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from replicast.errors import UpdateRefused
from replicast.mapped_memory import Bytes
from replicast.transport.base import Parcel, damaged, not_arrived
from replicast.transport.link import ChainLink
from replicast.transport.segments import Missing, Segment, segments_of
from replicast.transport.wire import SILENT_SECS, Kind, limit, receive_answer, receive_into, send_request
from replicast.update.digest import digest_block

STREAMS = 4  # The most connections for one parcel.
# Another stream is opened for each so many bytes. Streams share the link, so with each of them the next host
# has its first segment later, by the time of one segment: little for a large parcel, much for a small one.
STREAM_BYTES = 1 << 27
IN_FLIGHT = 2  # So many segments are asked for on each stream before the first of them has arrived.
_PAUSES_SECS = (0.05, 0.2, 1.0)  # Before a broken connection is opened again; the last one is repeated.


class Fetch:
    """One parcel on its way into this host's memory. Its threads end with `run`."""

    def __init__(
        self,
        parcel: Parcel,
        buffer: Bytes,
        link: ChainLink,
        *,
        rank: int,
        predecessor: int,
        arrived: Callable[[int], object],
        waits: Callable[[int], object],
    ) -> None:
        self._parcel = parcel
        self._buffer = buffer
        self._link = link
        self._rank = rank
        self._predecessor = predecessor
        self._arrived = arrived
        self._waits = waits
        self._segments = segments_of(parcel)
        self._missing = Missing(len(self._segments))
        self._waits_for = predecessor
        self._problem: BaseException | None = None
        self._until = 0.0
        self._lock = threading.Lock()

    def run(self, timeout_secs: float) -> None:
        """Blocks until all bytes are here, at most `timeout_secs`."""
        self._until = time.monotonic() + timeout_secs
        streams = min(streams_for(self._parcel.nbytes), len(self._segments))
        others = [
            threading.Thread(target=self._stream, name="replicast-chain-fetch", daemon=True)
            for _ in range(streams - 1)
        ]
        started = []
        with contextlib.suppress(RuntimeError):  # no more threads for now: fewer streams
            for other in others:
                other.start()
                started.append(other)
        self._stream()
        for other in started:
            other.join()  # it ends when this one does: each looks at the time and at the others' problem
        if self._problem is not None:
            raise self._problem
        if not self._missing.complete:
            raise not_arrived(self._parcel, timeout_secs, self._rank, self._waits_for)

    def _stream(self) -> None:
        """Fetches segments until there is none left to take. What it raises, `run` raises."""
        pauses = deque(_PAUSES_SECS)
        try:
            while not (self._missing.complete or self._is_given_up()):
                try:
                    if self._pull_on_one_connection():
                        return
                except OSError:  # it broke, or cannot be opened: again
                    if self._is_given_up():  # the time is over, for whatever reason
                        return
                    self._blame(self._predecessor)
                    time.sleep(min(pauses[0], self._left_secs()))
                    if len(pauses) > 1:
                        pauses.popleft()
        except BaseException as problem:
            with self._lock:
                self._problem = self._problem or problem

    def _pull_on_one_connection(self) -> bool:
        """Returns whether there is nothing left for this stream to take."""
        connection = self._link.take(self._left_secs())
        try:
            ended = self._pull(connection)
        except BaseException:
            self._link.drop(connection)
            raise
        if ended:
            self._link.give_back(connection)
        else:
            self._link.drop(connection)
        return ended

    def _pull(self, connection: socket.socket) -> bool:
        asked: deque[int] = deque()
        try:
            while not self._is_given_up():
                while len(asked) < IN_FLIGHT and (number := self._take()) is not None:
                    asked.append(number)
                    send_request(connection, self._parcel.id, number)
                if not asked:
                    return True
                self._receive(connection, asked)
            return False
        finally:
            with self._lock:
                self._missing.give_back(asked)

    def _receive(self, connection: socket.socket, asked: deque[int]) -> None:
        limit(connection, min(SILENT_SECS, self._left_secs()))
        kind, number = receive_answer(connection)
        if kind is Kind.WAITING:
            self._blame(number)
            return
        segment = self._segments[asked[0]]
        if number != segment.stop - segment.start:
            raise ConnectionError("not the segment that was asked for")
        try:
            problem = self._receive_segment(connection, segment)
        except OSError:  # it was on its way: nobody else is waited for
            self._blame(self._predecessor)
            raise
        place = asked.popleft()
        if problem is None:
            with self._lock:
                self._missing.arrived(place)
            self._arrived(place)
            return
        with self._lock:
            again = self._missing.damaged(place)
        if not again:
            raise problem

    def _receive_segment(self, connection: socket.socket, segment: Segment) -> UpdateRefused | None:
        """Receives a segment; returns what is wrong with its bytes."""

        def received(_: int, chunk: Bytes) -> Bytes:
            receive_into(connection, chunk.data, self._until)
            return chunk

        alone = len(segment.blocks) == 1  # digested while its bytes are in the processor's cache
        if not alone:
            receive_into(connection, self._buffer[segment.start : segment.stop].data, self._until)
        for block in segment.blocks:
            content = self._buffer[block.start : block.stop]
            found = digest_block(content, received) if alone else digest_block(content)
            expected = self._parcel.digest_of(block.number)
            if found != expected:
                digest = f"digest {expected} of block {block.number}"
                return damaged(self._parcel, digest, f"digest {found}", self._rank)
        return None

    def _take(self) -> int | None:
        with self._lock:
            return self._missing.take()

    def _is_given_up(self) -> bool:
        return self._problem is not None or time.monotonic() >= self._until

    def _left_secs(self) -> float:
        return max(0.001, self._until - time.monotonic())

    def _blame(self, worker: int) -> None:
        if worker != self._waits_for:
            self._waits_for = worker
            self._waits(worker)


def streams_for(nbytes: int) -> int:
    """How many connections a parcel of this size uses."""
    return min(STREAMS, 1 + nbytes // STREAM_BYTES)
