"""Connections: whoever sends nothing, or reads nothing, keeps nobody out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock
from urllib.request import urlopen

import pytest
from uvicorn.server import ServerState

from replicast.page import web_server as server
from replicast.page.app import App
from replicast.page.web_server import HEAD_SECS, READ_SECS, HttpConnection, PageSettings, configured
from tests.page.conftest import TOKEN
from tests.page.live import served
from tests.page.prompt_run import PromptRun

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Loop:
    """The clock of the connections, which are checked when time has passed, as the server does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connections: list[HttpConnection] = []

    def time(self) -> float:
        return self.now

    def call_later(self, _secs: float, _act: Callable[[], None]) -> Mock:
        return Mock()  # uvicorn's own limit, which does not count here.

    def pass_time(self, secs: float) -> None:
        for connection in self.connections:
            connection.check()
        self.now += secs
        for connection in self.connections:
            connection.check()

    def create_task(self, answer: Coroutine[Any, Any, None]) -> Any:
        answer.close()  # A test ends an answer itself.
        return Mock()


class Transport(asyncio.Transport):
    """A connection of one peer, which reads nothing while `unread` is set."""

    def __init__(self, peer: str) -> None:
        super().__init__({"peername": (peer, 40000), "sockname": ("127.0.0.1", 8080)})
        self.sent = b""
        self.unread = 0
        self.end = ""

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = "aborted"

    def is_closing(self) -> bool:
        return bool(self.end)

    def pause_reading(self) -> None:
        """The peer waits."""

    def resume_reading(self) -> None:
        """The peer goes on."""


Connect = Callable[..., tuple[HttpConnection, Transport]]


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def connect(run: PromptRun, loop: Loop) -> Connect:
    settings = PageSettings(token=TOKEN, trusted_proxies=("10.0.0.1",))
    config, state = configured(App(lambda: {"first": run}, settings), settings), ServerState()
    config.load()

    def one(peer: str = "127.0.0.1") -> tuple[HttpConnection, Transport]:
        made: Any = config.http_protocol_class
        connection, transport = made(config, state, {}, loop), Transport(peer)
        connection.connection_made(transport)
        loop.connections.append(connection)
        return connection, transport

    return one


@pytest.mark.parametrize("sent", [b"", b"G", REQUEST[:-1]])
def test_a_connection_without_a_complete_head_is_closed_in_time(
    connect: Connect, loop: Loop, sent: bytes
) -> None:
    connection, transport = connect()
    for byte in sent:  # One that sends a little from time to time has no more time than others.
        loop.pass_time(HEAD_SECS / 100)
        connection.data_received(bytes([byte]))
    assert not transport.end
    loop.pass_time(HEAD_SECS)
    assert transport.end == "closed"


def test_an_answer_may_take_longer_than_the_head(connect: Connect, loop: Loop) -> None:
    connection, transport = connect()
    connection.data_received(REQUEST)
    loop.pass_time(100 * HEAD_SECS)
    assert not transport.end


def test_the_next_head_of_a_connection_has_the_same_time(connect: Connect, loop: Loop) -> None:
    connection, transport = connect()
    connection.data_received(REQUEST)
    connection.on_response_complete()
    connection.data_received(b"G")  # uvicorn stops to count here.
    loop.pass_time(HEAD_SECS)
    assert transport.end == "closed"


def test_who_does_not_read_an_answer_is_cut_off_and_who_reads_slowly_is_not(
    connect: Connect, loop: Loop
) -> None:
    connection, transport = connect()
    connection.data_received(REQUEST)
    transport.unread = 4 * server.MIN_READ_BYTES
    loop.pass_time(READ_SECS - 1)
    for _ in range(3):
        transport.unread -= server.MIN_READ_BYTES
        loop.pass_time(READ_SECS - 1)
        assert not transport.end
    loop.pass_time(READ_SECS)
    assert transport.end == "aborted"


def test_one_peer_cannot_take_all_connections(connect: Connect) -> None:
    made = [connect("10.9.9.9")[1] for _ in range(server.MAX_CONNECTIONS_PER_PEER + 1)]
    assert [bool(one.end) for one in made] == [False] * server.MAX_CONNECTIONS_PER_PEER + [True]
    assert made[-1].sent.startswith(b"HTTP/1.1 503 ")
    assert not connect("10.9.9.8")[1].end


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1"])
def test_this_machine_and_a_named_proxy_speak_for_many(connect: Connect, peer: str) -> None:
    assert not any(connect(peer)[1].end for _ in range(server.MAX_CONNECTIONS_PER_PEER + 1))


def test_a_full_server_closes_who_has_waited_longest_and_nobody_who_has_asked(
    connect: Connect, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    made = []
    for _ in range(6):
        made.append(connect())
        if len(made) == 1:
            made[0][0].data_received(REQUEST)
        loop.pass_time(0.1)
    ends = [transport.end for _, transport in made]
    assert ends == ["", "aborted", "aborted", "aborted", "", ""]


def test_connections_that_send_nothing_keep_nobody_out(
    run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(server, "HEAD_SECS", 600.0)
    with served(run) as address, ExitStack() as opened:
        port = int(address.rpartition(":")[2])
        for _ in range(30):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        with urlopen(f"{address}/healthz", timeout=20) as answer:
            assert answer.status == 200


def test_the_server_closes_a_connection_that_sends_nothing(
    run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECS", 0.0)
    with served(run) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 120) as connection:
            assert connection.recv(1) == b""
