"""The contestants of the `hosts` tables that move bytes alone: a plain socket, and replicast's transport."""

from __future__ import annotations

import json
import os
import socket
import time

import numpy as np

from benchmarks.runner import Array, Implementation, Times
from replicast.codec import decode, encode
from replicast.config import read_cluster
from replicast.coordination import DirectExchange
from replicast.transport import ChainTransport, Parcel, open_transport

PORT = 5001
WAIT_SECS = 60.0
_READ_BYTES = 1 << 20


class PlainSocket(Implementation):
    """One TCP connection: `sendall` from memory, `recv_into` memory. Between two hosts."""

    def setup(self) -> None:
        cluster = read_cluster(os.environ)
        assert cluster is not None
        address = cluster.addresses[1].rpartition(":")[0], PORT
        self.buffer = np.zeros(self.task.megabytes * 1_000_000, np.uint8)
        key = f"bench/socket/{self.task.megabytes}"
        if self.is_source:
            assert self.group.coordination.get(key, WAIT_SECS) is not None
            self.connection = socket.create_connection(address)
        else:
            with socket.create_server(address) as listener:
                self.group.coordination.put(key, json.dumps(address))
                self.connection, _ = listener.accept()

    def check(self, rounds: int) -> None:
        if rounds:
            expected = self.task.change(rounds - 1).reshape(-1).view(np.uint8)
            assert np.array_equal(self.buffer, expected)

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.buffer[:] = self.task.change(index).reshape(-1).view(np.uint8)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        view = memoryview(self.buffer)
        if self.is_source:
            self.connection.sendall(view)
        else:
            at = 0
            while at < len(view):
                at += self.connection.recv_into(view[at : at + _READ_BYTES])
        return start, time.monotonic_ns()


class Transfer(Implementation):
    """A parcel from the memory of the source's host into that of every other host, verified on each."""

    def setup(self) -> None:
        self.name = f"bench-{type(self).__name__}-{self.task.megabytes}"
        exchange = DirectExchange(self.group.coordination, self.name, self.rank, self.workers)
        self.transport = open_transport(exchange, os.environ, WAIT_SECS)
        assert isinstance(self.transport, ChainTransport)
        self.parcel: Parcel | None = None
        self.arrays: list[Array] = []

    def check(self, rounds: int) -> None:
        for found, expected in zip(self.arrays, self.task.change(rounds - 1) if rounds else (), strict=True):
            assert np.array_equal(found, expected)

    def arrange(self, index: int) -> None:
        coordination, key = self.group.coordination, f"bench/{self.name}/{index}"
        self.arrays = []
        if self.parcel is not None:
            self.transport.release(self.parcel.id, reuse=True)
        if self.is_source:
            parcel = self.transport.publish(f"{self.name}-{index}", self.task.change(index), to_read=True)
            coordination.put(key, encode(parcel))
        self.parcel = decode(coordination.get(key, WAIT_SECS))

    def round(self, index: int) -> Times:
        assert self.parcel is not None
        start = time.monotonic_ns()
        self.arrays = self.transport.receive(self.parcel, WAIT_SECS)
        return start, time.monotonic_ns()
