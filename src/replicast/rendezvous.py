"""The workers wait for each other here before TensorFlow connects them.

TensorFlow connects all workers in one call, which returns when the last one is there. It holds Python's lock
meanwhile: no thread runs, Ctrl-C does nothing, and TensorFlow has its own handler for SIGTERM, which does not
end the process. So the workers first meet in Python, where a wait can be reported, limited and interrupted.
Worker 0 listens at its address in `TF_CONFIG`, where TensorFlow's server listens afterwards. One JSON object
per line:

    worker K → worker 0    {"worker": K, "addresses": [...]}
    worker 0 → worker K    {"missing": [2, 3]}     every second
                           {"refused": "..."}      not a worker of this job
                           {"start": true, "heartbeat_secs": 10.0}    all workers are there
"""

from __future__ import annotations

import contextlib
import itertools
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replicast.config import START_TIMEOUT, Cluster, host_and_port
from replicast.connections import Dialer, accept_problem, is_address
from replicast.errors import ClusterError
from replicast.processes import Deadline

REPORT_SECS = 10.0  # After this time a waiting worker reports who is missing.
REPEAT_SECS = 30.0  # How often it does so again.
_LOOK_SECS = 0.2
# After a restart all workers come at once, and worker 0 may be a few milliseconds behind.
_FIRST_PAUSES_SECS = (0.02, 0.04, 0.08)
_TELL_SECS = 1.0
# Worker 0 sends something every second. What is silent for this long is not worker 0, or hangs.
_ANSWER_SECS = 5.0
_SERVER_SECS = 10.0  # For TensorFlow's server in worker 0: a connection that fails is not retried for 1 s.
_SILENT = "does not answer"
_NAMELESS = "has a name that no DNS server has resolved yet"
_MAX_LINE = 1 << 20
# How many connections more than there are workers may be without a worker; the oldest makes way.
_MAX_STRANGERS = 64


def meet(
    cluster: Cluster, timeout_secs: float, report: Callable[[str], object], heartbeat_secs: float
) -> float:
    """Blocks until every worker of the cluster has called this, at most `timeout_secs`."""
    wait = _Wait(cluster, timeout_secs, report)
    if cluster.rank == 0:
        _host(cluster, wait, {"start": True, "heartbeat_secs": heartbeat_secs})
        return heartbeat_secs
    hello = {"worker": cluster.rank, "addresses": list(cluster.addresses)}
    pauses_secs = itertools.chain(_FIRST_PAUSES_SECS, itertools.repeat(_LOOK_SECS))
    dialer = Dialer(*host_and_port(cluster.addresses[0]))
    while (agreed := _join(cluster, wait, dialer, hello)) is None:
        time.sleep(next(pauses_secs))
    agreed_secs, place = agreed
    deadline = Deadline(_SERVER_SECS)
    while not deadline.has_passed():
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=1.0):
            break
        time.sleep(0.02)
    return agreed_secs


class _Wait:
    def __init__(self, cluster: Cluster, timeout_secs: float, report: Callable[[str], object]) -> None:
        self._cluster = cluster
        self._timeout_secs = timeout_secs
        self._report = report
        self._began = time.monotonic()
        self._next_report_secs = REPORT_SECS
        self._is_deaf = False

    def check(self, missing: Sequence[int], why: str = "") -> None:
        """Reports who is missing when it is time to, and raises after the timeout."""
        why = why or ("has not started" if len(missing) == 1 else "have not started")
        names = ", ".join(f"worker {worker} ({self._cluster.addresses[worker]})" for worker in missing)
        waited_secs = time.monotonic() - self._began
        if waited_secs >= self._timeout_secs:
            raise ClusterError(
                f"Not all workers started within {self._timeout_secs:.0f} s: {names} {why}",
                remedy=f"Start all workers of TF_CONFIG, or set {START_TIMEOUT} to a longer time in seconds",
            )
        if waited_secs >= self._next_report_secs:
            self._next_report_secs += REPEAT_SECS
            self._report(
                f"replicast: worker {self._cluster.rank} has waited {waited_secs:.0f} s for {names}, which "
                f"{why}\n"
            )

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """The next connection; says once if none can be accepted for now, and pauses."""
        try:
            accepted, _ = listener.accept()
            accepted.settimeout(_TELL_SECS)
            return accepted
        except OSError as error:
            if problem := accept_problem(error):
                if not self._is_deaf:
                    self._is_deaf = True
                    who = f"worker {self._cluster.rank}"
                    self._report(f"replicast: {who} cannot accept connections at the moment: {problem}\n")
                time.sleep(_LOOK_SECS)
            return None


class _Line:
    """A connection over which JSON objects go, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.opened = time.monotonic()
        self.is_heard = False  # Whether the other side has introduced itself, or was refused.
        self.worker: int | None = None  # None: a stranger.
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived. Blocks if nothing has."""
        data = self.connection.recv(65536)
        if not data:
            raise ConnectionError("closed by the other side")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise ValueError("a line without an end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a JSON object")
        return messages


def _host(cluster: Cluster, wait: _Wait, start: dict[str, Any]) -> None:
    """Worker 0: waits for all others, then tells them to start."""
    lines: list[_Line] = []
    with _listening(cluster.addresses[0]) as listener, contextlib.ExitStack() as connections:
        told = 0.0
        while missing := sorted({*range(1, cluster.size)} - {line.worker for line in lines}):
            wait.check(missing)
            known = {line.connection: line for line in lines}
            for connection in _readable([listener, *known], _LOOK_SECS):
                if connection is not listener:
                    _hear(cluster, known[connection], lines)
                elif (accepted := wait.accept(listener)) is not None:
                    lines.append(_Line(connections.enter_context(accepted)))
            # A worker that was stopped for long, and is dropped here, connects again.
            strangers = [line for line in lines if line.worker is None]
            too_many = strangers[: -(_MAX_STRANGERS + cluster.size)]
            for line in strangers:
                if line in too_many or time.monotonic() - line.opened >= _ANSWER_SECS:
                    _drop(line, lines)
            if time.monotonic() - told >= _TELL_SECS:
                told = time.monotonic()
                _tell(lines, {"missing": missing})
        listener.close()  # before anyone is told: the next to listen here is TensorFlow's server
        _tell(lines, start)


def _hear(cluster: Cluster, line: _Line, lines: list[_Line]) -> None:
    """Takes what came over a connection: a worker introduces itself once, and may go again.

    Only the first message counts: a stranger that sends thousands and reads no answer must block nobody.
    """
    try:
        messages = line.receive()
    except (OSError, ValueError):
        _drop(line, lines)
        return
    if line.is_heard or not messages:
        return
    line.is_heard = True
    message = messages[0]
    rank = message.get("worker")
    known = message.get("addresses") == list(cluster.addresses)
    if not known or type(rank) is not int or not 0 < rank < cluster.size:
        with contextlib.suppress(OSError):
            line.send({"refused": f"worker 0 has the workers {', '.join(cluster.addresses)}"})
        return
    for replaced in [other for other in lines if other.worker == rank]:
        _drop(replaced, lines)
    line.worker = rank


def _drop(line: _Line, lines: list[_Line]) -> None:
    line.connection.close()
    if line in lines:
        lines.remove(line)


def _tell(lines: Sequence[_Line], message: dict[str, Any]) -> None:
    for line in lines:
        if line.worker is not None:
            with contextlib.suppress(OSError):  # `_hear` notices
                line.send(message)


def _readable(sockets: Iterable[socket.socket], secs: float) -> list[socket.socket]:
    """Those that can be read from, in at most this time.

    `select.select` takes no descriptor above 1023, and `epoll` needs one of its own.
    """
    with selectors.PollSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ, one)
        return [key.data for key, _ in selector.select(secs)]


def _join(
    cluster: Cluster, wait: _Wait, dialer: Dialer, hello: dict[str, Any]
) -> tuple[float, tuple[str, int]] | None:
    """Another worker: goes to worker 0 once and waits there."""
    missing, why = [0], _SILENT
    try:
        with dialer.connect(_ANSWER_SECS, lambda: wait.check([0], _NAMELESS)) as connection:
            line, place = _Line(connection), connection.getpeername()[:2]
            line.send(hello)
            heard = time.monotonic()
            while time.monotonic() - heard < _ANSWER_SECS:
                wait.check(missing, why)
                if not _readable([connection], _LOOK_SECS):
                    continue
                heard = time.monotonic()
                for message in line.receive():
                    if message.get("start"):
                        return float(message["heartbeat_secs"]), place
                    if "refused" in message:
                        raise ClusterError(
                            f"TF_CONFIG differs between the workers: {message['refused']}",
                            received=f"worker {cluster.rank} has {', '.join(cluster.addresses)}",
                            remedy="Give all workers of the job the same addresses",
                        )
                    missing = [worker for worker in message["missing"] if worker in range(cluster.size)]
                    why = ""
    except socket.gaierror as error:
        wait.check([0], f"has no address ({error.strerror})")
    except (OSError, ValueError, KeyError, TypeError):
        wait.check([0], _SILENT)  # Not there yet, gone again, or another program at this address.
    return None


def _listening(address: str) -> socket.socket:
    """A socket that listens at this address of worker 0; at all addresses of its host if that is a name.

    So worker 0 needs no name server, and TensorFlow's server, which follows, listens at all in any case.
    """
    name, port = host_and_port(address)
    try:
        with contextlib.suppress(OSError):  # Something else at this address passes connections on.
            if is_address(name) or name == "localhost":
                return _listen(name, port)
        return _listen("", port)
    except OSError as error:
        raise ClusterError(
            f"Worker 0 cannot listen at its address in TF_CONFIG ({error.strerror})", received=address
        ) from None


def _listen(host: str, port: int) -> socket.socket:
    everywhere = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
    # The launcher that reserves the port has bound it with SO_REUSEADDR or with SO_REUSEPORT: set both.
    return socket.create_server(
        (host, port), family=family, backlog=1024, reuse_port=True, dualstack_ipv6=everywhere
    )
