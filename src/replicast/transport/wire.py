"""What two hosts say to each other over one connection, once each knows that the other is of this job.

```
 receiver                                        the host before it
 ask for segment 7 of a parcel  ──────────────►
 ask for segment 8              ──────────────►
                                ◄──────────────  WAITING, for worker 3     every second until it is there
                                ◄══════════════  SEGMENT, and its bytes
                                ◄──────────────  REFUSED, and why
```
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import time
from typing import Any

from replicast.errors import UpdateRefused

SILENT_SECS = 5.0  # A connection on which no byte moves for this long is closed, and opened again.
BEAT_SECS = 1.0  # How often a host that has nothing to send yet says for whom it waits.
MAX_REFUSAL_BYTES = 1 << 16
_REQUEST = struct.Struct("!IH")
_ANSWER = struct.Struct("!BQ")
_MAX_ID = 100


class Kind(enum.IntEnum):
    """What an answer is, and what its number means."""

    SEGMENT = 0  # The number of bytes that follow.
    WAITING = 1  # The rank of the worker that is waited for.
    REFUSED = 2  # The number of bytes of JSON that follow.


def limit(connection: socket.socket, secs: float) -> None:
    """Makes every later call raise `BlockingIOError` if no byte moves for this long.

    With Python's own timeouts, a call would return with the first bytes that are there, not with all.
    """
    connection.settimeout(None)
    timeout = struct.pack("ll", int(secs), int(secs % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)


def receive_into(connection: socket.socket, view: memoryview, until: float | None = None) -> None:
    while view:
        if until is not None:
            left_secs = until - time.monotonic()
            if left_secs <= 0:
                raise TimeoutError("the time is over")
            limit(connection, min(SILENT_SECS, max(0.001, left_secs)))
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("closed by the other side")
        view = view[count:]


def receive_bytes(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises as `receive_into`."""
    found = bytearray(count)
    receive_into(connection, memoryview(found))
    return bytes(found)


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


def send_refusal(connection: socket.socket, refusal: dict[str, Any]) -> None:
    """Why there will be no bytes."""
    text = json.dumps(refusal).encode()
    if len(text) > MAX_REFUSAL_BYTES:
        text = json.dumps({"problem": str(refusal.get("problem"))[:1000]}).encode()
    connection.sendall(_ANSWER.pack(Kind.REFUSED, len(text)) + text)


def receive_answer(connection: socket.socket) -> tuple[Kind, int]:
    kind, number = _ANSWER.unpack(receive_bytes(connection, _ANSWER.size))
    if kind == Kind.REFUSED and number <= MAX_REFUSAL_BYTES:
        raise _refusal(receive_bytes(connection, number))
    if kind not in (Kind.SEGMENT, Kind.WAITING):
        raise ConnectionError("not an answer")
    return Kind(kind), number


def _refusal(text: bytes) -> UpdateRefused:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConnectionError("not a refusal")
    return UpdateRefused.from_json(fields)
